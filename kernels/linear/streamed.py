"""The products for few tokens (``streamed.cuh``, ``direct.cuh``): tilings, costs and launch. Pure: needs no GPU.

``streamed.h100.json`` has the costs, which ``tests/programs/refit.py`` fits to times of layers of models. In a model
layers run one after another, and most of a launch is hidden behind the end of the previous layer. Behind a pause, the
costs of a launch would differ more. The launch rule takes the configuration with the shortest predicted time. The time
in us is, with the bandwidth of the card's memory as it reports it:

through shared memory
    launch, tokens, split-K and a second warpgroup; then the longer of copy and memory. copy: the TMA unit of a
    multiprocessor takes so long for the boxes of a k-block, longer for each token whose row does not begin at a line of
    the cache (128 bytes), and still longer if not at a sector (32 bytes). memory: codes and weights, the latter in part
    again for each further strip of tokens. The shorter of both hides almost completely.
through registers
    launch; a latency for each round of loads; what a multiprocessor reads from L2; and the memory.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from math import hypot, sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from skuda.kernels import nonfinite
from skuda.kernels.launch import Choice, Launch, Parameter, Step, pointers, s32, strided
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.problem import FEW_ROWS, LinearProblem
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import CODES8, ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

BLOCK_K = 128
"""Bytes of K in a k-block."""

MAX_ROWS = 128
"""Most rows of an activation."""

_ATOM = 1024
_WGMMA_M = 64
_QUANTIZERS = 512
_TOKENS, _MANY_TOKENS = (8, 16, FEW_ROWS), (16, FEW_ROWS)
_SPLITS = (1, 2, 4)
_MIN_SPLIT = 512
"""Fewest bytes of K for each block of a cluster."""

_MIN_STAGES, _MAX_STAGES = 4, 64
_MIN_IN_FLIGHT, _MAX_IN_FLIGHT = 64 << 10, 112 << 10
_IN_FLIGHT = hopper.H200 * _MIN_IN_FLIGHT
"""Bytes of the weight that a block, and all blocks together, request ahead: enough to keep the memory busy.

More are up to 3 % slower.
"""

_MANY_CLUSTERS, _SHARED_BY_TWO = 10_000_000, 115_712
"""Bytes in flight from which two blocks of clusters share a multiprocessor, and the shared memory of each of them."""


class Streamed(NamedTuple):
    """One tiling that streams weights through shared memory.

    Attributes
    ----------
    tokens, warpgroups, k_blocks, split_k : int
        Compile-time flags of the same names: tokens of a tile; consumer warpgroups of 64 rows of the weight; k-blocks
        of a stage; blocks of a cluster, which divide the K of a tile.
    atoms : int
        Rows of the weight in a tile, and in a box of its tensor map, divided by 8.
    stages : int
        Stages of the ring.
    shared : int
        Dynamic shared memory, in bytes.
    promotion : int
        Bytes of L2 promotion of the weight's tensor map.
    grid, block : (int, int, int)
        Launch geometry.
    """

    tokens: int
    warpgroups: int
    k_blocks: int
    split_k: int
    atoms: int
    stages: int
    shared: int
    promotion: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        return 8 * self.atoms

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        named = ("tokens", "warpgroups", "k_blocks", "split_k")
        return tuple(f"-D{name.upper()}={getattr(self, name)}" for name in named)

    def __str__(self) -> str:
        split = f", split-K by {self.split_k}" if self.split_k > 1 else ""
        return f"{self.rows} x {self.tokens} through shared memory{split}"


class _Strip(NamedTuple):
    """The results of some tokens, and how they are made; there are `strips` such strips."""

    tokens: int
    n: int
    k: int
    output_bytes: int
    quantizes: bool
    zero_points: tuple[bool, bool]
    strips: int
    halves: tuple[int, int]


def tilings(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    *,
    quantizes: bool = False,
    zero_points: tuple[bool, bool] = (False, False),
    halves: tuple[int, int] = (1, 1),
) -> tuple[Streamed, ...]:
    """Return the tilings of a product of `sizes` (m, n, k), the first one without clusters.

    Parameters
    ----------
    sizes : (int, int, int)
        m, n and k.
    sm_count : int
        Multiprocessors of the card.
    output_bytes : int
        Bytes of an output element.
    quantizes : bool
        Whether the kernel quantizes the activation itself.
    zero_points : (bool, bool)
        Whether activation and weight have zero points.
    halves : (int, int)
        Bytes of a code of activation and weight.

    Raises
    ------
    ValueError
        If m or k is beyond what the kernel takes.
    """
    m, n, k = max(1, sizes[0]), max(1, sizes[1]), sizes[2]
    if m > MAX_ROWS or k % 16:
        raise ValueError(f"m must be at most {MAX_ROWS} and k a multiple of 16; had m, n, k = {sizes}")
    found: list[Streamed | None] = []
    for tokens in (next(t for t in _TOKENS if t >= m),) if m <= FEW_ROWS else _MANY_TOKENS:
        strip = _Strip(tokens, n, k, output_bytes, quantizes, zero_points, -(-m // tokens), halves)
        for split_k in _SPLITS:
            clusters = max(1, sm_count // strip.strips) // split_k
            # Zero points need the sums of the codes of all of K. A cluster takes one tile.
            if split_k > 1 and (k < _MIN_SPLIT * split_k or -(-n // 8) > 16 * clusters or any(zero_points)):
                continue
            # As many tiles as the card has room for; or fewer tiles of whole wgmma, which load the codes less often.
            whole = -(-n // _WGMMA_M)
            counts = (clusters, whole) if whole < clusters and split_k <= 2 else (clusters,)
            found += [_tiling(strip, count, split_k) for count in counts]
    made = dict.fromkeys(tile for tile in found if tile is not None)
    empty = 0 in sizes[:2]
    return tuple(tile._replace(grid=(0 if empty else tile.grid[0], -(-m // tile.tokens), 1)) for tile in made)


def _tiling(strip: _Strip, clusters: int, split_k: int) -> Streamed | None:
    """Return the tiling for so many clusters; None if it does not fit into shared memory."""
    tokens, quantizes, (of_codes, of_weight) = strip.tokens, strip.quantizes, strip.halves
    eights = -(-strip.n // 8)
    # At most 128 rows: more would leave fewer stages, and with fewer rows the codes are most of the traffic.
    atoms = -(-eights // (clusters * -(-eights // (16 * clusters))))
    warpgroups = 2 if atoms > 8 else 1
    tiles = -(-eights // atoms)
    width = min(tiles, clusters)
    blocks = width * split_k * strip.strips
    # Not every group of four multiprocessors can hold a cluster; with two blocks on a multiprocessor all clusters run.
    two = split_k > 1 and blocks * _MAX_IN_FLIGHT > _MANY_CLUSTERS
    room = _SHARED_BY_TWO if two else hopper.MAX_SHARED
    ones = 8 * _ATOM if strip.zero_points[1] else _ATOM if strip.zero_points[0] else 0
    for k_blocks in (4, 2, 1):
        if k_blocks * atoms > 8 and k_blocks > 2:
            continue
        steps = -(-strip.k // (BLOCK_K * k_blocks * split_k))
        fixed = 1024 + ones + _epilogue_bytes(strip, warpgroups, split_k) + 4 * tokens * (1 + strip.zero_points[0])
        codes, weight = k_blocks * tokens * BLOCK_K * of_codes, k_blocks * atoms * _ATOM * of_weight
        stage = weight + (0 if quantizes else codes)
        fixed += steps * codes if quantizes else 0
        fitting = min((room - fixed) // (stage + 16), _MAX_STAGES)  # a stage has two mbarriers
        if fitting >= _MIN_STAGES or k_blocks == 1:
            break
    used = steps * -(-tiles // width)
    in_flight = _MAX_IN_FLIGHT if split_k > 1 else min(max(_IN_FLIGHT // blocks, _MIN_IN_FLIGHT), _MAX_IN_FLIGHT)
    wanted = max(in_flight, 8 * atoms * _ATOM) // weight
    stages = min(used, fitting, max(_MIN_STAGES, wanted))
    # The last wgmma may read beyond the tile's rows, so shared memory must extend that far.
    reach = 1024 + ones + stages * weight + (_WGMMA_M * warpgroups - 8 * atoms) * BLOCK_K
    shared = max(fixed + stages * (stage + 16), reach)
    if stages < min(2, used) or shared > hopper.MAX_SHARED:
        return None
    return Streamed(
        tokens=tokens,
        warpgroups=warpgroups,
        k_blocks=k_blocks,
        split_k=split_k,
        atoms=atoms,
        stages=stages,
        shared=shared,
        promotion=256 if atoms <= 8 or (split_k > 1 and strip.k % 256 == 0) else 128,
        grid=(width * split_k, 1, 1),
        block=(_QUANTIZERS + 32 if quantizes else 128 * warpgroups + 64, 1, 1),
    )


def _epilogue_bytes(strip: _Strip, warpgroups: int, split_k: int) -> int:
    """Return the bytes of staging, and of the sums that the blocks of a cluster exchange."""
    slab = 8 if strip.tokens == 8 or strip.output_bytes >= 4 else 16
    staging = 4 * warpgroups * slab * (16 * strip.output_bytes + 16)
    own_slabs = -(-(strip.tokens // slab) // split_k)
    exchanged = own_slabs * split_k * (slab // 8) * warpgroups * 2048 * strip.halves[0]
    return staging + (exchanged if split_k > 1 else 0)


_SHAPES = ((1, 8), (1, 16), (2, 8), (2, 16), (4, 8))
_REGISTERS, _MAX_AHEAD = 100, 8


class Direct(NamedTuple):
    """One configuration that loads weights straight to registers.

    Attributes
    ----------
    tokens, mmas_n, warps : int
        Compile-time flags of the same names: tokens of a block; its rows of the weight, divided by 8; warps that divide
        K.
    """

    tokens: int
    mmas_n: int
    warps: int

    @property
    def rows(self) -> int:
        """Rows of the weight in a block."""
        return 8 * self.mmas_n

    @property
    def unit(self) -> int:
        """Bytes of K that a warp loads at once: UNIT of the kernel."""
        return 64

    @property
    def ahead(self) -> int:
        """Units that a thread requests at once: AHEAD of the kernel without zero points."""
        used = 4 * -(-self.tokens // 16) * self.mmas_n
        return min(_MAX_AHEAD, (_REGISTERS - used) // (4 * (2 * self.mmas_n + self.tokens // 8)))

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        return (f"-DTOKENS={self.tokens}", f"-DMMAS_N={self.mmas_n}", f"-DWARPS={self.warps}")

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return (32 * self.warps, 1, 1)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Return the blocks that compute m x n results, m being at most `tokens`."""
        return (-(-n // self.rows) if m else 0, 1, 1)

    def shared(self, zero_points: Sequence[bool] = (False, False)) -> int:
        """Return the bytes of shared memory of a block, for the sums of its warps.

        `zero_points`: whether activation and weight have any.
        """
        activation, weight = zero_points
        pitch = self.rows + (8 if self.mmas_n % 2 == 0 or weight else 0)
        return 4 * self.warps * (self.tokens + activation) * pitch

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens} through registers, {self.warps} warps"


def configurations(m: int) -> tuple[Direct, ...]:
    """Return the configurations straight to registers for m tokens; none if m is too large."""
    tokens = next((each for each in _TOKENS if each >= m), 0)
    return tuple(Direct(tokens, *shape) for shape in _SHAPES if tokens and tokens * shape[0] <= 64)


_WARPS = 16
"""Warps of blocks through registers that share a multiprocessor."""
_READ_AGAIN = 0.5
"""Part of the weights that each further strip of tokens reads from memory again."""


class FewTokensCost(NamedTuple):
    """The costs, in us unless they say otherwise.

    Attributes
    ----------
    launch : float
        A launch through shared memory, as one of many layers.
    token : float
        Finishing a token of a tile.
    box : float
        Loading the boxes of a k-block.
    half_lines, half_sectors : float
        What each token adds to that if rows begin within lines, or within sectors.
    split_k : float
        Exchanging sums within a cluster.
    second_warpgroup : float
        Tiles of more than 64 rows.
    odd_rows : float
        Tiles whose rows are not those of whole wgmma.
    memory : float
        Part of the card's memory bandwidth that is reached.
    direct_launch : float
        A launch through registers.
    direct_eight : float
        Blocks of only 8 rows.
    direct_round : float
        A round of loads.
    direct_l2 : float
        Bandwidth from L2 of a multiprocessor, in TB/s.
    """

    launch: float
    token: float
    box: float
    half_lines: float
    half_sectors: float
    split_k: float
    second_warpgroup: float
    odd_rows: float
    memory: float
    direct_launch: float
    direct_eight: float
    direct_round: float
    direct_l2: float


@cache
def costs() -> FewTokensCost:
    """Return the costs in ``streamed.h100.json``, which serve every card with sm_90a."""
    file = importlib.resources.files(__package__) / "streamed.h100.json"
    return FewTokensCost(**json.loads(file.read_text())["costs"])


def predicted(
    tile: Streamed | Direct,
    cost: FewTokensCost,
    sizes: tuple[int, int, int],
    card: tuple[int, float],
    *,
    quantizes: bool = False,
    halves: tuple[int, int] = (1, 1),
) -> float:
    """Return the predicted time in us.

    Parameters
    ----------
    tile : Streamed or Direct
        The tiling.
    cost : FewTokensCost
        The costs.
    sizes : (int, int, int)
        m, n and k.
    card : (int, float)
        Multiprocessors, and memory bandwidth in TB/s.
    quantizes : bool
        Whether the kernel makes the codes itself, so that it loads none.
    halves : (int, int)
        Bytes of a code of activation and weight.
    """
    (m, n, k), (sm_count, bandwidth) = sizes, card
    reached = cost.memory * bandwidth * 1e6
    if isinstance(tile, Direct):
        (blocks, _, _), slots = tile.grid(m, n), sm_count * _WARPS // tile.warps
        rounds = -(-blocks // slots) * -(-k // (tile.unit * tile.warps * tile.ahead))
        read = -(-blocks // sm_count) * (tile.rows + tile.tokens) * k
        launch = cost.direct_launch + (cost.direct_eight if tile.mmas_n == 1 else 0.0)
        return launch + rounds * cost.direct_round + read / (cost.direct_l2 * 1e6) + (m + n) * k / reached
    tiles, width = -(-n // tile.rows), max(1, tile.grid[0] // tile.split_k)
    turns = -(-tiles // width)
    late = 0.0 if quantizes or k % BLOCK_K == 0 else cost.half_sectors if k % 32 else cost.half_lines
    of_codes, of_weight = halves
    copy = turns * -(-k // BLOCK_K) / tile.split_k * (cost.box * of_weight + tile.tokens * of_codes * late)
    strips = 1 + _READ_AGAIN * (-(-m // tile.tokens) - 1)
    memory = (m * of_codes + strips * n * of_weight) * k / reached
    return (
        cost.launch
        + cost.token * tile.tokens * of_codes
        + (cost.split_k if tile.split_k > 1 else 0.0)
        + (cost.second_warpgroup if tile.warpgroups > 1 else 0.0)
        + (cost.odd_rows if tile.rows % _WGMMA_M else 0.0)
        + sqrt(hypot(copy**2, memory**2))
    )


_MOST_QUANTIZED, _LONGEST_QUANTIZED = 2, 16_384
"""Most tokens that every block quantizes itself, and most elements of them: it ends before the first weights arrive."""


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and so few tokens that all tiles run at once.

    `weight` is s8 or u8; the activation may be either.
    """
    return (
        Between(field="m", maximum=MAX_ROWS),
        Between(field="tiles_beyond_few_rows", maximum=hopper.H200),
        *hopper.constraints(weight),
    )


STRATEGY = Strategy(
    "streamed",
    __name__,
    ArchSku.SM_90A,
    constraints,
    "few tokens: wgmma at the speed at which the weights arrive",
    weights=CODES8,
    wide=True,
)


def quantized_tokens(m: int, k: int) -> int:
    """Return QUANTIZED_TOKENS if the kernel quantizes the activation itself, or 0 if a separate kernel is faster."""
    return 0 if m > _MOST_QUANTIZED or m * k > _LONGEST_QUANTIZED else 1 << (m - 1).bit_length()


def tiles(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    *,
    quantizes: bool = False,
    zero_points: tuple[bool, bool] = (False, False),
    halves: tuple[int, int] = (1, 1),
) -> tuple[Streamed | Direct, ...]:
    """Return all configurations for a product; the arguments are those of `tilings`."""
    through_shared = tilings(sizes, sm_count, output_bytes, quantizes=quantizes, zero_points=zero_points, halves=halves)
    return (*through_shared, *(() if quantizes or halves != (1, 1) else configurations(sizes[0])))


@lru_cache(maxsize=4096)
def _ranked(
    sizes: tuple[int, int, int],
    card: tuple[int, float],
    output_bytes: int,
    quantizes: bool,  # noqa: FBT001  private
    zero_points: tuple[bool, bool],
    halves: tuple[int, int],
) -> tuple[tuple[Streamed | Direct, ...], tuple[Choice, ...]]:
    found = tiles(sizes, card[0], output_bytes, quantizes=quantizes, zero_points=zero_points, halves=halves)
    cost = partial(predicted, cost=costs(), sizes=sizes, card=card, quantizes=quantizes, halves=halves)
    return parameters.ranked((cost(tile), tile) for tile in found)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product; a dynamic activation is quantized before it or within it, whichever is faster."""
    m, n, k = problem.sizes
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    card, width = hopper.card_of(device), problem.output.bits // 8
    halves = problem.code_element.halves, problem.weight_code.halves
    quantized = quantized_tokens(m, k) if problem.dynamic and m and n and halves == (1, 1) else 0
    tile, chosen = parameters.choose(*_ranked((m, n, k), card, width, quantized > 0, zero_points, halves), choice)
    flags = (*tile.flags, *parameters.epilogue_flags(problem))
    if isinstance(tile, Direct):
        product = _direct_product(problem, tile, zero_points)
        aligned = ("act_q_scratch" if problem.dynamic else "act_q", "weight_q")
        return parameters.launch_product(
            problem, product, aligned=aligned, flags=flags, notes=(hopper.ALIGNED,), **chosen
        )
    weight = parameters.weight_map(problem, tile.rows, tile.promotion)
    if quantized:
        product = _product(problem, tile, (weight, *_activation(problem)))
        notes = ("every block quantizes the activation itself: one launch", *_notes(tile))
        flags = (*flags, f"-DQUANTIZED_TOKENS={quantized}", *nonfinite.flags(problem))
        return Launch(steps=(product,), aligned=("activation", "act_q_scratch"), flags=flags, notes=notes, **chosen)
    codes = parameters.activation_map(problem, tile.tokens)
    product = _product(problem, tile, (codes, weight, *parameters.activation_scales(problem)))
    return parameters.launch_product(problem, product, flags=flags, notes=_notes(tile), **chosen)


def _product(problem: LinearProblem, tile: Streamed, operands: tuple[Parameter, ...]) -> Step:
    return Step(
        entry=f"{problem.op_name()}_streamed",
        grid=tile.grid,
        block=tile.block,
        parameters=(*operands, *parameters.epilogue_parameters(problem), *s32(tile.atoms, tile.stages)),
        shared=tile.shared,
        overlaps=True,
    )


def _direct_product(problem: LinearProblem, tile: Direct, zero_points: tuple[bool, bool]) -> Step:
    m, n, _ = problem.sizes
    codes = parameters.activation_parameters(problem)
    return Step(
        entry=f"{problem.op_name()}_streamed",
        grid=tile.grid(m, n),
        block=tile.block,
        parameters=(*codes, *strided("weight_q"), *parameters.epilogue_parameters(problem)),
        shared=tile.shared(zero_points),
        overlaps=True,
    )


def _activation(problem: Any) -> tuple[Parameter, ...]:
    """Return the activation parameters of a kernel that quantizes the activation itself."""
    scratch = pointers("act_q_scratch", "act_scale_scratch")
    return (*strided("activation"), *scratch, *s32(problem.q_min, problem.q_max))


def _notes(tile: Streamed) -> tuple[str, ...]:
    split = f", split-K by {tile.split_k}" if tile.split_k > 1 else ""
    rows = f"{tile.rows} rows of the weight by {tile.tokens} tokens"
    return (f"a block streams {rows}, {tile.stages} stages of {128 * tile.k_blocks} bytes of k{split}", hopper.ALIGNED)
