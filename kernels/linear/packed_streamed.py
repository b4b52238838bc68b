"""The products of packed weights on Hopper (``packed_streamed.cuh``): tiles, costs, launch. Pure: needs no GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skuda.kernels.launch import Choice, Launch, Step, pointers, s32
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.packed import BLOCK, ROWS, block_bytes
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

MOST_TOKENS = 4095
"""With more, unpacking in front of the kernel for 8-bit codes is faster."""
_BY_WARPS = {(8, 2): 0.162, (8, 4): 0.265, (16, 2): 0.202, (16, 4): 0.376, (32, 2): 0.259, (64, 2): 0.413}
_WGMMA = {(32, 4): 0.46, (64, 2): 0.304, (128, 2): 0.4, (256, 2): 0.687}
"""Microseconds that the warps of a block take for a block of K each, by tokens and warpgroups; measured on an H200."""
_CLUSTER, _MIN_SPLIT, _EXCHANGED = 2, 512, 22_000
"""Blocks of a cluster, the fewest elements of K of each, and the bytes that one sends in a us.

Clusters of 4 blocks took twice as long on an H200: as many as its multiprocessors suffice for do not run at once.
"""
_LAUNCH, _TILE, _PART = 7.2, 0.2, 0.084
"""Microseconds before the first and after the last product, and those that a tile, and each of its parts, adds."""
_MEMORY, _MULTIPROCESSOR = 0.93, 0.057
"""The part of the memory's bandwidth that is reached, and the TB/s that one multiprocessor can take."""
_MOST_UNITS = 8
"""Units of a tile of mma.sync: with more, a block has a part of K for each warp no longer, and too few in flight."""
_ENOUGH_STAGES, _MOST_STAGES = 3, 12
_ATOM = 1024
_ALIKE = 8
"""So many numbers of rows share a ranking. No tile has fewer tokens, and those of all tiles, also divided by 4, are
multiples of it, so nothing tells these numbers apart."""
_MANY = 256
"""Tokens with which a warpgroup of producers gives registers away."""


class PackedStreamedTile(NamedTuple):
    """One configuration.

    Attributes
    ----------
    tokens, warpgroups, row_warps, k_blocks : int
        Compile-time flags of the same names.
    units : int
        Units of 16 rows of the weight in a tile.
    halves : int
        Bytes of a code of the activation.
    split_k : int
        Blocks of a cluster, which divide the K of a tile.
    """

    tokens: int
    warpgroups: int
    row_warps: int
    k_blocks: int
    units: int
    halves: int = 1
    split_k: int = 1

    @property
    def columns(self) -> int:
        """Columns of a product: all halves of the tokens."""
        return self.tokens * self.halves

    @property
    def parts(self) -> int:
        """Warps that divide the K of a row's stage."""
        return 4 * self.warpgroups // self.row_warps if self.row_warps else 1

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        named = {name.upper(): value for name, value in self._asdict().items() if name not in ("units", "halves")}
        return tuple(f"-D{name}={value}" for name, value in named.items())

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.warpgroups + (128 if self.columns == _MANY else 64)

    def tiles(self, n: int) -> int:
        """Return the tiles of n rows of the weight."""
        return -(-n // (ROWS * self.units))

    def grid(self, m: int, n: int, sm_count: int) -> tuple[int, int, int]:
        """Return the blocks that compute m x n results: blocks with the same rows are neighbours, for the cache."""
        strips, tiles = -(-m // self.tokens), self.tiles(n)
        wide = tiles if self.split_k > 1 else min(tiles, max(1, sm_count // max(1, strips)))
        return strips * self.split_k, wide if m else 0, 1

    def ring(self, k: int, group_size: int, output_bytes: int, *, zero_points: bool) -> tuple[int, int]:
        """Return stages, and bytes of shared memory of a block."""
        stage = self.k_blocks * (self.columns * BLOCK + self.units * block_bytes(group_size)) + 16  # and two mbarriers
        slab = 8 if output_bytes >= 4 or self.tokens == 8 else 16
        staging = 4 * self.warpgroups * slab * (16 * output_bytes + 16)
        exchanged = 512 * (self.columns // 8 + zero_points) * self.parts * self.row_warps if self.parts > 1 else 0
        fixed = 1024 + 3 * _ATOM * zero_points + staging + exchanged + 4 * self.tokens * (1 + zero_points)
        steps = -(-k // (BLOCK * self.k_blocks * self.split_k))
        stages = min((hopper.MAX_SHARED - fixed) // stage, _MOST_STAGES, max(2, steps))
        return stages, fixed + stages * stage

    def __str__(self) -> str:
        how = f"mma.sync, K in {self.parts} parts" if self.row_warps else "wgmma"
        split = f", split-K by {self.split_k}" if self.split_k > 1 else ""
        return f"{ROWS * self.units} x {self.tokens} through shared memory, {self.warpgroups} warpgroups, {how}{split}"


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: codes that TMA can read, sums that fit in 32 bits, and not too many tokens.

    `weight` is the element of the codes that are made, s8.
    """
    return (Between(field="m", maximum=MOST_TOKENS), *hopper.constraints(weight))


STRATEGY = Strategy(
    "packed_streamed",
    __name__,
    ArchSku.SM_90A,
    constraints,
    "packed 4-bit weights through a ring, mma.sync or wgmma by tokens",
    weights=(ElementKind.S4,),
    wide=True,
)


def _by_warps(columns: int, warpgroups: int, units: int, halves: int) -> PackedStreamedTile:
    """Return the configuration with two blocks of K for each warp in a stage, or one, if few such stages have room."""
    tile = PackedStreamedTile(columns // halves, warpgroups, units, 4 * warpgroups // units, units, halves)
    twice = tile._replace(k_blocks=2 * tile.k_blocks)
    stages, _ = twice.ring(1 << 30, 32, 4, zero_points=True)
    return twice if stages >= _ENOUGH_STAGES else tile


def _configurations(
    sizes: tuple[int, int, int],
    sm_count: int,
    halves: int,
    zero_points: bool,  # noqa: FBT001  private
) -> list[PackedStreamedTile]:
    """Return configurations whose tiles divide the rows evenly, with as few columns as hold m tokens, or a few more.

    K is divided if all clusters run at once. Zero points need the sums of the codes of all of K.
    """
    m, n, k = sizes
    units = -(-n // ROWS)
    even = {-(-units // (sm_count * turns)) for turns in range(1, 40)}
    used = m * halves
    by_warps = [columns for columns in (8, 16, 32, 64) if columns >= used and columns >= 8 * halves][:2] or [64]
    wgmma = [columns for columns in (32, 64, 128, 256) if used > columns // 4 and (used <= columns or columns >= 64)]
    few = [u for u in sorted(even | {8}) if u <= _MOST_UNITS]
    whole = [
        PackedStreamedTile(c // halves, w, 0, 1 if c == _MANY else 2, u, halves)
        for c, w in _WGMMA
        if c in wgmma
        for u in sorted(even | {4 * w})
        if 2 * w < u <= 4 * w
    ]
    divides = k >= _CLUSTER * _MIN_SPLIT and not zero_points
    divided = [tile._replace(split_k=_CLUSTER) for tile in whole if divides and tile.units == 4 * tile.warpgroups]
    return [
        *(_by_warps(c, w, u, halves) for c, w in _BY_WARPS if c in by_warps for u in few),
        *whole,
        *(tile for tile in divided if tile.tiles(n) * -(-m // tile.tokens) * tile.split_k <= sm_count),
    ]


def _predicted(tile: PackedStreamedTile, m: int, n: int, k: int, group_size: int, card: tuple[int, float]) -> float:
    """Return the predicted time in us: the multiprocessor with the most tiles, by its products and by its bytes."""
    sm_count, bandwidth = card
    across, wide, _ = tile.grid(m, n, sm_count)
    tiles, blocks = tile.tiles(n), -(-k // BLOCK)
    rounds = -(-tiles // wide) * -(-across * wide // sm_count)
    of_warp = -(-blocks // (tile.k_blocks * tile.split_k)) * tile.k_blocks // tile.parts
    a_block = (_BY_WARPS if tile.row_warps else _WGMMA)[tile.columns, tile.warpgroups]
    reached = min(_MEMORY * bandwidth, _MULTIPROCESSOR * min(tiles * across, sm_count))
    memory = tiles * tile.units * blocks * block_bytes(group_size) / (reached * 1e6)
    both = float(((rounds * of_warp * a_block) ** 4 + memory**4) ** 0.25)
    exchanged = 256 * tile.columns * tile.warpgroups * (tile.split_k - 1) / tile.split_k
    return _LAUNCH + rounds * (_TILE + _PART * tile.parts) + exchanged / _EXCHANGED + both


@lru_cache(maxsize=4096)
def _ranked(
    m: int,
    n: int,
    k: int,
    group_size: int,
    card: tuple[int, float],
    halves: int,
    zero_points: bool,  # noqa: FBT001  private
) -> tuple[tuple[PackedStreamedTile, ...], tuple[Choice, ...]]:
    tiles = _configurations((m, n, k), card[0], halves, zero_points)
    return parameters.ranked((_predicted(tile, m, n, k, group_size, card), tile) for tile in tiles)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, k = problem.sizes
    card = hopper.card_of(device)
    alike = -(-max(1, m) // _ALIKE) * _ALIKE
    halves, zero_points = problem.code_element.halves, problem.shifts_activation
    ranked = _ranked(alike, max(1, n), k, problem.group_size, card, halves, zero_points)
    tile, chosen = parameters.choose(*ranked, choice)
    stages, shared = tile.ring(k, problem.group_size, problem.output.bits // 8, zero_points=zero_points)
    product = Step(
        entry=f"{problem.op_name()}_packed_streamed",
        grid=tile.grid(m, n, card[0]),
        block=(tile.threads, 1, 1),
        parameters=(
            parameters.activation_map(problem, tile.tokens),
            *parameters.activation_scales(problem),
            *pointers("weight_q"),
            *parameters.epilogue_parameters(problem),
            *s32(tile.units, stages),
        ),
        shared=shared,
        overlaps=True,
    )
    flags = (*tile.flags, f"-DGROUPS={BLOCK // problem.group_size}", *parameters.epilogue_flags(problem))
    return parameters.launch_product(
        problem, product, aligned=("weight_q",), flags=flags, notes=(hopper.ALIGNED,), alike=alike, **chosen
    )
