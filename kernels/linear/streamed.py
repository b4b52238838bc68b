"""Tiles and launch rule of the weight-streaming linear kernel (``streamed.cuh``). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from skuda.kernels.launch import Choice, Launch, Parameter, Step, TensorMap, pointers, s32, strided
from skuda.kernels.linear import hopper, layer
from skuda.kernels.linear.direct import Direct, configurations
from skuda.kernels.linear.problem import FEW_ROWS, LinearProblem
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_ATOM = 1024
_CHUNK = 128
_MOST_STAGES = 64
_TOKENS = (8, 16, FEW_ROWS)
_MANY_TOKENS = (16, FEW_ROWS)
_CLUSTERS = (1, 2, 4)
_PRODUCT = 64
"""Rows of the weight in one product of a warpgroup."""

_IN_FLIGHT, _MOST_IN_FLIGHT = 64 << 10, 112 << 10
_ALL_IN_FLIGHT, _ALL_WITH_MORE = hopper.H200 * _IN_FLIGHT, 10_000_000
"""Bytes of the weight that a block requests ahead, between which all blocks share a sum of bytes; measured.

More of them than keep the memory busy are slower by up to 3 %. Blocks of clusters request the most; if they are so many
that this is more than `_ALL_WITH_MORE`, two of them fit into a multiprocessor.
"""

_FEWEST_STAGES = 4
_QUANTIZERS = 512
_SHORTEST_SHARE = 512
_SHARED_BY_TWO = 115_712

_MOST_ROWS, _MOST_TILES = 128, hopper.H200
"""Beyond `FEW_ROWS`, most rows of an activation and most tiles of 16 rows by 64 of the weight: all run at once."""

_LAUNCH, _MEMORY, _LATENCY, _FINISH = 1.833, 0.817, 0.14, 0.0162
_BOXES, _TOKEN = 0.0874, 0.000116
_UNALIGNED_TOKEN = {128: 0.0, 64: 0.00055, 32: 0.00044, 16: 0.00117}
_CLUSTER, _EXCHANGE, _SECOND_GROUP, _OTHER_HEIGHT = {1: 0.0, 2: 0.535, 4: 0.818}, 0.000008, 0.383, 0.052
"""Times in us, and the share of a card's memory bandwidth that is reached, fitted; see `Streamed.predicted`.

`_UNALIGNED_TOKEN` is by the largest power of two up to a line of the cache that divides the bytes of a row.
"""


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and no more tokens than it is the fastest for.

    `weight` is s8 or u8; the activation may be either.
    """
    return (
        Between(field="m", maximum=_MOST_ROWS),
        Between(field="tiles_beyond_few_rows", maximum=_MOST_TILES),
        *hopper.constraints(weight),
    )


@dataclass(frozen=True, slots=True)
class Streamed:
    """One tiling of a product for few tokens.

    Attributes
    ----------
    tokens, groups, tall, chunks, cluster : int
        Compile-time flags of the same names: tokens of a tile; multiplying warpgroups, and products of 64 rows for
        each; chunks of 128 bytes of k in a stage; blocks that share a tile's k.
    atoms : int
        Rows of the weight in a tile, and in the box of its tensor map, divided by 8.
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
    groups: int
    tall: int
    chunks: int
    cluster: int
    atoms: int
    stages: int
    shared: int
    promotion: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags of the tiling."""
        named = ("tokens", "groups", "tall", "chunks", "cluster")
        return tuple(f"-D{name.upper()}={getattr(self, name)}" for name in named)

    def predicted(self, m: int, n: int, k: int, bandwidth: float, *, fused: bool = False) -> float:
        """Return the predicted time in us, as one of many layers.

        Layers of a model run one after the other, and most of a launch is done while the one in front ends; what is
        left of it differs between kernels, so that one behind a pause would choose others.

        The copy engine of a multiprocessor takes so long for the boxes of a chunk and for each row of codes in them,
        longer if rows do not begin at lines of the cache, and the most if not even at sectors. Beside it stand the
        memory, and its latency, in which the ring is read once, and the longest of the three hides most of the others;
        then the launch, what finishes each token of a tile, a second warpgroup, rows that are not those of whole
        products, and the exchange of sums in a cluster. The tests of ``docs/evidence/h100-layers.json`` and
        ``docs/evidence/h200-few-tokens.json`` say how well it chooses.

        Parameters
        ----------
        m, n, k : int
            The problem.
        bandwidth : float
            Memory bandwidth of the card in TB/s.
        fused : bool
            Whether the kernel makes the codes, so that it loads none.
        """
        rows = 8 * self.atoms
        tiles = -(-n // rows)
        turns = -(-tiles // max(1, self.grid[0] // self.cluster))
        token = 0.0 if fused else _TOKEN + _UNALIGNED_TOKEN[math.gcd(k, _CHUNK)]
        copied = turns * -(-k // _CHUNK) / self.cluster * (_BOXES + self.tokens * token)
        waited = turns * -(-k // (_CHUNK * self.chunks * self.cluster)) / self.stages * _LATENCY
        exchange = _CLUSTER[self.cluster] + (_EXCHANGE * rows * self.tokens if self.cluster > 1 else 0.0)
        fixed = (
            _LAUNCH
            + _FINISH * self.tokens
            + exchange
            + (_SECOND_GROUP if self.groups > 1 else 0.0)
            + (_OTHER_HEIGHT if rows % _PRODUCT else 0.0)
        )
        memory = (m + n) * k / (_MEMORY * bandwidth * 1e6)
        return fixed + math.sqrt(math.hypot(copied**2, waited**2, memory**2))

    def __str__(self) -> str:
        shared = f", k shared by {self.cluster}" if self.cluster > 1 else ""
        return f"{8 * self.atoms} x {self.tokens} through shared memory{shared}"


def rows_of(m: int, k: int) -> int:
    """Return ROWS, the flag of the kernel that quantizes the activation itself, or 0 if a separate kernel is faster.

    Every block quantizes all tokens, which pays while it ends before the first weights have arrived.
    """
    return 0 if m > 2 or m * k > 16_384 else 1 << (m - 1).bit_length()


def cuts_for(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    *,
    fused: bool,
    zero_points: tuple[bool, bool] = (False, False),
) -> tuple[Streamed, ...]:
    """Return the tilings for a product of m, n and k, the first without clusters.

    `fused` if the kernel quantizes the activation itself; `zero_points` says of activation and weight whether they have
    any.

    Raises
    ------
    ValueError
        If m or k is beyond what the kernel takes.
    """
    m, n, k = max(1, sizes[0]), max(1, sizes[1]), sizes[2]
    if m > _MOST_ROWS or k % 16:
        raise ValueError(f"m must be at most {_MOST_ROWS} and k a multiple of 16; had m, n, k = {sizes}")
    found: list[Streamed | None] = []
    for tokens in (next(t for t in _TOKENS if t >= m),) if m <= FEW_ROWS else _MANY_TOKENS:
        strips, strip = -(-m // tokens), _Strip(tokens, n, k, output_bytes, fused, zero_points)
        for cluster in _CLUSTERS:
            clusters = max(1, sm_count // strips) // cluster
            # Sums of codes, which zero points need, are those of all of k. A cluster takes one tile.
            divides = k >= _SHORTEST_SHARE * cluster and -(-n // 8) <= 16 * clusters and not any(zero_points)
            if cluster > 1 and not divides:
                continue
            # As many tiles as the card has room for, or fewer, as high as a product, with fewer loads of the codes.
            high = -(-n // _PRODUCT)
            counts = (clusters, high) if high < clusters and cluster <= 2 else (clusters,)
            found += [_cut(strip, _Card(tiles, strips, cluster)) for tiles in counts]
    cuts = dict.fromkeys(cut for cut in found if cut is not None)
    grids = ((0 if 0 in sizes[:2] else cut.grid[0], -(-m // cut.tokens), 1) for cut in cuts)
    return tuple(replace(cut, grid=grid) for cut, grid in zip(cuts, grids, strict=True))


class _Strip(NamedTuple):
    """The results of some tokens, and how they are made; see `cuts_for`."""

    tokens: int
    n: int
    k: int
    output_bytes: int
    fused: bool
    zero_points: tuple[bool, bool]


class _Card(NamedTuple):
    """What a card has for each of so many strips: clusters of so many blocks."""

    clusters: int
    strips: int
    cluster: int


def _cut(strip: _Strip, card: _Card) -> Streamed | None:
    tokens, n, k, output_bytes, fused, zero_points = strip
    clusters, strips, cluster = card
    eights = -(-n // 8)
    # At most 128 rows a tile: more leave fewer stages, and with fewer rows the codes are most of the traffic.
    atoms = -(-eights // (clusters * -(-eights // (16 * clusters))))
    groups = 2 if atoms > 8 else 1
    tiles = -(-eights // atoms)
    width = min(tiles, clusters)
    blocks = width * cluster * strips
    # Not every group of four multiprocessors can hold a cluster; with two blocks per multiprocessor all clusters run.
    two = cluster > 1 and blocks * _MOST_IN_FLIGHT > _ALL_WITH_MORE
    room = _SHARED_BY_TWO if two else hopper.MOST_SHARED
    ones = 8 * _ATOM if zero_points[1] else _ATOM if zero_points[0] else 0
    for chunks in (4, 2, 1):
        if chunks * atoms > 8 and chunks > 2:
            continue
        steps = -(-k // (_CHUNK * chunks * cluster))
        fixed, stage = _bytes(tokens, groups, chunks, cluster, atoms, output_bytes)
        fixed += ones + 4 * tokens * zero_points[0]
        if fused:
            codes = chunks * tokens * _CHUNK
            fixed, stage = fixed + steps * codes, stage - codes
        fitting = min((room - fixed) // (stage + 16), _MOST_STAGES)
        if fitting >= _FEWEST_STAGES or chunks == 1:
            break
    used = steps * -(-tiles // width)
    in_flight = _MOST_IN_FLIGHT if cluster > 1 else min(max(_ALL_IN_FLIGHT // blocks, _IN_FLIGHT), _MOST_IN_FLIGHT)
    wanted = max(in_flight, 8 * atoms * _ATOM) // (chunks * atoms * _ATOM)
    stages = min(used, fitting, max(_FEWEST_STAGES, wanted))
    # The last product of 64 rows may read beyond the tile's rows, so shared memory must extend that far.
    reach = 1024 + ones + stages * chunks * atoms * _ATOM + (64 * groups - 8 * atoms) * _CHUNK
    shared = max(fixed + stages * (stage + 16), reach)
    if stages < min(2, used) or shared > hopper.MOST_SHARED:
        return None
    return Streamed(
        tokens=tokens,
        groups=groups,
        tall=1,
        chunks=chunks,
        cluster=cluster,
        atoms=atoms,
        stages=stages,
        shared=shared,
        promotion=256 if atoms <= 8 or (cluster > 1 and k % 256 == 0) else 128,
        grid=(width * cluster, 1, 1),
        block=(_QUANTIZERS + 32 if fused else 128 * groups + 64, 1, 1),
    )


def _bytes(tokens: int, groups: int, chunks: int, cluster: int, atoms: int, output_bytes: int) -> tuple[int, int]:
    """Return the bytes of shared memory outside the stages and of a stage; each stage also has two barriers."""
    slab = 8 if tokens == 8 or output_bytes == 4 else 16
    staging = 4 * groups * slab * (16 * output_bytes + 16)
    sums = -(-(tokens // slab) // cluster) * cluster * (slab // 8) * groups * 2048 if cluster > 1 else 0
    return 1024 + staging + sums + 4 * tokens, chunks * (atoms * _ATOM + tokens * _CHUNK)


@lru_cache(maxsize=4096)
def _offered(
    m: int,
    n: int,
    k: int,
    card: tuple[int, float],
    output_bytes: int,
    fused: bool,  # noqa: FBT001  private
    zero_points: tuple[bool, bool],
) -> tuple[tuple[Streamed | Direct, ...], tuple[Choice, ...]]:
    sm_count, bandwidth = card
    cuts = cuts_for((m, n, k), sm_count, output_bytes, fused=fused, zero_points=zero_points)
    ranked: list[tuple[float, Streamed | Direct]] = []
    ranked += [(cut.predicted(m, n, k, bandwidth, fused=fused), cut) for cut in cuts]
    ranked += [(one.predicted(m, n, k, *card), one) for one in (() if fused else configurations(m))]
    ranked.sort(key=lambda pair: pair[0])
    return tuple(one for _, one in ranked), tuple(Choice(str(one), us) for us, one in ranked)


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after or fused with the quantization of a dynamic activation, whichever is faster."""
    m, n, k = problem.sizes
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    card, width = (device.sm_count or hopper.H200, hopper.bandwidth(device)), problem.output.bits // 8
    rows = rows_of(m, k) if problem.dynamic and m and n else 0
    found, chosen = layer.choose(*_offered(m, n, k, card, width, rows > 0, zero_points), choice)
    flags = (*found.flags, *layer.epilogue_flags(problem))
    if isinstance(found, Direct):
        product = _direct_product(problem, found, zero_points)
        aligned = ("act_q_scratch" if problem.dynamic else "act_q", "weight_q")
        return layer.launch_product(problem, product, aligned=aligned, flags=flags, notes=(hopper.ALIGNED,), **chosen)
    weight = TensorMap("weight_q", n, k, 8 * found.atoms, promotion=found.promotion)
    if rows:
        product = _product(problem, found, (weight, *_activation(problem)))
        notes = ("every block quantizes the activation itself: one launch", *_notes(found))
        flags = (*flags, f"-DROWS={rows}")
        return Launch(steps=(product,), aligned=("activation", "act_q_scratch"), flags=flags, notes=notes, **chosen)
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    codes = TensorMap(name, m, k, found.tokens, otherwise=otherwise)
    scales = layer.SCALES if problem.dynamic else layer.given_scales(problem)
    product = _product(problem, found, (codes, weight, *scales))
    return layer.launch_product(problem, product, flags=flags, notes=_notes(found), **chosen)


def _product(problem: LinearProblem, cut: Streamed, operands: tuple[Parameter, ...]) -> Step:
    return Step(
        entry=f"{problem.op_name()}_streamed",
        grid=cut.grid,
        block=cut.block,
        parameters=(*operands, *layer.epilogue_parameters(problem), *s32(cut.atoms, cut.stages)),
        shared=cut.shared,
        overlaps=True,
    )


def _direct_product(problem: LinearProblem, found: Direct, zero_points: tuple[bool, bool]) -> Step:
    m, n, _ = problem.sizes
    codes = layer.activation_parameters(problem)
    return Step(
        entry=f"{problem.op_name()}_streamed",
        grid=found.grid(m, n),
        block=found.block,
        parameters=(*codes, *strided("weight_q"), *layer.epilogue_parameters(problem)),
        shared=found.shared(zero_points),
        overlaps=True,
    )


def _activation(problem: Any) -> tuple[Parameter, ...]:
    """Return the activation parameters of a kernel that quantizes the activation itself."""
    scratch = pointers("act_q_scratch", "act_scale_scratch")
    return (*strided("activation"), *scratch, *s32(problem.q_min, problem.q_max))


def _notes(cut: Streamed) -> tuple[str, ...]:
    split = f", k shared by clusters of {cut.cluster}" if cut.cluster > 1 else ""
    tile = f"{8 * cut.atoms} rows of the weight by {cut.tokens} tokens"
    return (f"a block streams {tile}, {cut.stages} stages of {128 * cut.chunks} bytes of k{split}", hopper.ALIGNED)
