"""The wgmma product (``warpgroup.cuh``): tiles, how clusters divide them, costs and launch. Pure: needs no GPU.

The launch rule takes the tile with the shortest predicted time. ``warpgroup.CARD.json`` has the costs of each tile on a
card. ``tests/programs/refit.py`` fits them to measured times. The time in us is ``launch + hypot(compute, memory)``;
more for long products, at which the card lowers its clock:

mainloop
    waves x k-blocks x ``hypot(mma, load)``: wgmma and loads mostly overlap. Loads from L2 take longer the more of the
    card is busy, and if rows do not begin at lines of the cache (128 bytes), or not even at sectors (32 bytes).
epilogue
    Both warpgroups of a cooperative tile wait for it. In ping-pong the mainloop of the other warpgroup hides it; the
    last one counts as part of the launch. GELU and SiLU are never hidden.
fixup
    The first part of a stream-K tile adds the partial sums of the other parts.
memory
    Operands and results, once. Half of L2 counts, because it keeps two copies of a line. What it cannot keep is read
    again: half of what clusters share that do not run at the same time, or read different k-blocks.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from math import hypot
from typing import TYPE_CHECKING, Any, NamedTuple

from skuda.kernels.launch import (
    ZEROS,
    Choice,
    Launch,
    Leading,
    Parameter,
    Pointer,
    Step,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.linear import hopper, parameters
from skuda.kernels.linear.expanded import behind_unpacking
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind
from skuda.registry.sku import WorkspaceTerm

if TYPE_CHECKING:
    from skuda.registry.device import Device

BLOCK_K = 128
"""Bytes of K in a stage, one k-block: BLOCK_K of ``warpgroup.cuh``."""

_STAGING = 8 * 16 * 144
_BAND = 2048
"""Rows of results in a rasterization band."""

_MIN_SHARE, _LONG_SHARE = 4, 16
"""Fewest k-blocks of a cluster's share, and fewest if only the tiles of the last wave are divided."""

_MAX_IDLE = 0.05
"""Part of the clusters that may stay idle so that the others form groups."""

_MAX_LONGER = 400_000
"""Results times k-blocks by which shares may grow so that each is a part of one tile alone."""

_L2_SHARE = 40_000_000
"""Bytes of operands that L2 holds for a wave whose clusters read different k-blocks."""


class Schedule(NamedTuple):
    """How clusters divide the tiles of a product; see ``TileScheduler`` in ``warpgroup.cuh``.

    Attributes
    ----------
    clusters : int
        Clusters to launch.
    stream_k_tiles : int
        Tiles, the first ones, whose k-blocks are divided evenly among all clusters.
    groups : int
        Groups of clusters, each of which divides as many of these tiles.
    band : int
        Rows of clusters in a rasterization band.
    """

    clusters: int
    stream_k_tiles: int
    groups: int
    band: int


class WarpgroupTile(NamedTuple):
    """One configuration of the kernel; all of them serve every problem with the same bits.

    Attributes
    ----------
    m, n : int
        Rows and columns of results.
    stages : int
        Stages of the ring in shared memory.
    cluster : (int, int)
        Rows and columns of blocks that multicast loads to each other.
    cooperative : bool
        Whether both consumer warpgroups work on one tile; else each takes every other tile (ping-pong).
    stream_k : bool
        Whether the k-blocks of the last tiles, which do not fill a wave, are divided evenly among all clusters.
    halves : (int, int)
        Bytes of a code of activation and weight.
    """

    m: int
    n: int
    stages: int
    cluster: tuple[int, int] = (1, 1)
    cooperative: bool = False
    stream_k: bool = False
    halves: tuple[int, int] = (1, 1)

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def cluster_m(self) -> int:
        """Rows of results of a cluster."""
        return self.m * self.cluster[0]

    @property
    def cluster_n(self) -> int:
        """Columns of results of a cluster."""
        return self.n * self.cluster[1]

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        return (
            f"-DTILE_M={self.m}",
            f"-DTILE_N={self.n}",
            f"-DSTAGES={self.stages}",
            f"-DCLUSTER_M={self.cluster[0]}",
            f"-DCLUSTER_N={self.cluster[1]}",
            f"-DCOOPERATIVE={int(self.cooperative)}",
            f"-DSTREAM_K={int(self.stream_k)}",
        )

    def shared(self, zero_points: Sequence[bool] = ()) -> int:
        """Return the bytes of shared memory of a block; `zero_points`: whether activation and weight have any."""
        ring = self.stages * (self.loaded(self.m, self.n) * BLOCK_K + 16)
        return 1024 + ring + _STAGING + 8 * (2 + sum(zero_points)) * self.n

    def loaded(self, m: int, n: int) -> int:
        """Return the bytes of m rows and n columns for each element of K."""
        return m * self.halves[0] + n * self.halves[1]

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return rows and columns of clusters that cover m x n results."""
        return -(-m // self.cluster_m), -(-n // self.cluster_n)

    def partial_sums(self, schedule: Schedule) -> int:
        """Return the bytes of the partial sums that stream-K keeps in global memory."""
        sums = self.m * self.n * self.halves[0]
        return 4 * sums * self.blocks * schedule.clusters if schedule.stream_k_tiles else 0

    def schedule(self, m: int, n: int, k: int, sm_count: int) -> Schedule:
        """Return how clusters divide the tiles of m x n results of k products each."""
        rows, columns = self.grid(m, n)
        tiles, slots, band = rows * columns, max(1, sm_count // self.blocks), max(1, _BAND // self.cluster_m)
        divided = self._stream_k_tiles((m, n, k), (rows, columns), slots, band) if self.stream_k else 0
        if not divided:
            return Schedule(min(slots, tiles), 0, 1, band)
        k_blocks, side = -(-k // BLOCK_K), min(rows, columns)
        shares = divided * k_blocks // _MIN_SHARE  # that are long enough
        if clusters := self._one_part_each(tiles, k_blocks, slots) if divided == tiles else 0:
            groups = side
        elif shares < slots:
            clusters, groups = max(1, shares), 1
        else:
            groups = _groups(side, slots) if divided == tiles else 1
            clusters = slots // groups * groups
        return Schedule(clusters, divided, groups, band if groups == 1 else 1 if columns <= rows else rows)

    def _stream_k_tiles(self, sizes: tuple[int, int, int], grid: tuple[int, int], slots: int, band: int) -> int:
        """Return how many tiles are divided: those of the last wave, and usually a wave more.

        With a wave more, hardly a tile has more than two parts. But the clusters then read different k-blocks at the
        same time. If L2 does not hold all of these, only the tiles of the last wave are divided, unless shares get
        short.
        """
        (m, n, k), (rows, columns) = sizes, grid
        last = rows * columns % slots
        if rows * columns <= slots or not last:
            return last
        more, height = last + slots, min(rows, band)
        read = self.loaded(min(m, height * self.cluster_m), min(n, -(-more // height) * self.cluster_n)) * k
        large = rows * columns > more and read > _L2_SHARE
        return last if large and last * -(-k // BLOCK_K) >= _LONG_SHARE * slots else more

    def _one_part_each(self, tiles: int, k_blocks: int, slots: int) -> int:
        """Return the clusters with which each has a part of one tile alone; 0 if shares would get much longer.

        A second part would cost another fixup and another start of the mainloop.
        """
        parts = min(slots // tiles, k_blocks // _MIN_SHARE)
        if parts <= 1:
            return 0
        longer = k_blocks / parts - tiles * k_blocks / slots
        return parts * tiles if longer * self.m * self.n * self.blocks <= _MAX_LONGER else 0

    def __str__(self) -> str:
        how = "cooperative" if self.cooperative else "ping-pong"
        clusters = f", clusters of {self.cluster[0]} x {self.cluster[1]}" if self.blocks > 1 else ""
        return f"{self.m} x {self.n}, {how}, {self.stages} stages{clusters}{', stream-K' if self.stream_k else ''}"


def _groups(side: int, slots: int) -> int:
    """Return the most groups, a divisor of the shorter side of the grid, that leave few clusters idle.

    Clusters of a group that read the same k-blocks of the longer operand at the same time then find them in L2.
    """
    divisors = (groups for groups in range(min(side, slots), 0, -1) if side % groups == 0)
    return next(groups for groups in divisors if slots % groups <= _MAX_IDLE * slots)


TILES = (
    WarpgroupTile(128, 256, 4, cooperative=True),
    WarpgroupTile(128, 256, 4, (2, 1), cooperative=True),
    WarpgroupTile(128, 128, 6),
    WarpgroupTile(128, 128, 6, (1, 2)),
    WarpgroupTile(128, 128, 6, (2, 1)),
    WarpgroupTile(64, 256, 5),
    WarpgroupTile(64, 128, 8),
    WarpgroupTile(64, 64, 12),
    WarpgroupTile(128, 256, 4, (2, 1), cooperative=True, stream_k=True),
    WarpgroupTile(64, 128, 8, (2, 1), stream_k=True),
    WarpgroupTile(64, 128, 8, stream_k=True),
    WarpgroupTile(64, 64, 12, stream_k=True),
)
"""All configurations for codes of 8 bits."""

_WIDE = {(128, 256): (128, 128), (128, 128): (64, 128), (64, 128): (64, 64)}
"""Rows and columns of results of a tile for codes of 16 bits whose sums and loads are those of one of 8 bits."""


def wide_tile(tile: WarpgroupTile, halves: tuple[int, int]) -> WarpgroupTile | None:
    """Return the configuration for codes of 16 bits that has as many sums and stages as fit in the place of `tile`."""
    if (tile.m, tile.n) not in _WIDE:
        return None
    m, n = _WIDE[tile.m, tile.n]
    found = tile._replace(m=m, n=n, halves=halves)
    return found._replace(stages=tile.stages * (tile.m + tile.n) // found.loaded(m, n))


CARDS = ("h200", "h100")
"""Cards that have a file; the first is for cards that do not report the size of their L2."""

_SECTOR = 32
_READ_AGAIN = 0.5
_RESULT_BYTES = 2
_LONG = 600.0
"""Time in us at which half of `TileCost.throttled` shows."""


class TileCost(NamedTuple):
    """The costs of a tile on a card, in us.

    Attributes
    ----------
    launch : float
        A launch without k-blocks.
    mma, load : float
        wgmma of a k-block, and its load from L2 if all multiprocessors load.
    half_lines, half_sectors : float
        How much longer a load takes if rows begin within lines, or within sectors.
    throttled : float
        Part by which the longest products take longer.
    epilogue, fixup : float
        The epilogue of a cooperative tile, and adding the partial sums of a part.
    """

    launch: float
    mma: float
    load: float
    half_lines: float
    half_sectors: float
    throttled: float
    epilogue: float = 0.0
    fixup: float = 0.0


class CardCosts(NamedTuple):
    """The costs of all tiles on a card.

    Attributes
    ----------
    l2_cache, memory_bandwidth : int, float
        Bytes of its L2, and the peak of its memory in bytes per us.
    activations : dict
        Time in us of an activation for a result, on a multiprocessor: for outputs of at most 16 bits, and for f32.
    tiles : tuple of (WarpgroupTile, TileCost)
        The costs of each tile.
    """

    l2_cache: int
    memory_bandwidth: float
    activations: Mapping[str, tuple[float, float]]
    tiles: tuple[tuple[WarpgroupTile, TileCost], ...]


def card_costs(content: Mapping[str, Any]) -> CardCosts:
    """Return the costs in the content of a card's file."""
    tiles = tuple((tile, TileCost(**content["tiles"][str(tile)])) for tile in TILES)
    return CardCosts(content["l2_cache"], content["memory_bandwidth"], content["activations"], tiles)


@cache
def costs_for(l2_cache: int) -> CardCosts:
    """Return the costs of the card whose L2 is nearest in size to `l2_cache` bytes; of an H200 for 0.

    L2 has a part for each stack of memory, so its size says which card has similar costs.
    """
    folder = importlib.resources.files(__package__)
    known = [card_costs(json.loads((folder / f"warpgroup.{card}.json").read_text())) for card in CARDS]
    return min(known, key=lambda costs: abs(costs.l2_cache - l2_cache)) if l2_cache else known[0]


def _costs_of(card: CardCosts, halves: tuple[int, int]) -> tuple[tuple[WarpgroupTile, TileCost], ...]:
    """Return the costs of the tiles for some codes: of wide ones those of tiles with as many sums.

    Two codes of 16 bits take three products where one such code takes two.
    """
    if halves == (1, 1):
        return card.tiles
    found = []
    for tile, cost in card.tiles:
        wide = wide_tile(tile, halves)
        if wide is not None:
            load = cost.load * wide.loaded(wide.m, wide.n) / (tile.m + tile.n)
            found.append((wide, cost._replace(mma=cost.mma * (1 + halves[1]) / 2, load=load)))
    return tuple(found)


def predicted(
    tile: WarpgroupTile, cost: TileCost, card: CardCosts, sizes: tuple[int, int, int], sm_count: int, each: float = 0.0
) -> float:
    """Return the predicted time in us of a product of `sizes` (m, n, k); `each`: us of the activation for a result."""
    rows, columns = tile.grid(*sizes[:2])
    tiles, k_blocks, slots = rows * columns, -(-sizes[2] // BLOCK_K), max(1, sm_count // tile.blocks)
    schedule = tile.schedule(*sizes, sm_count)
    clusters, divided = schedule.clusters, schedule.stream_k_tiles
    if divided:
        parts = (tiles - divided) // slots + 1  # of a cluster
        waves, busy = parts - 1 + divided / clusters, clusters / slots
    else:
        parts = -(-tiles // slots)
        waves, busy = float(parts), min(1.0, tiles / slots)
    late = 0.0 if sizes[2] % BLOCK_K == 0 else cost.half_sectors if sizes[2] % _SECTOR else cost.half_lines
    compute = waves * k_blocks * hypot(cost.mma, cost.load * busy + late)
    compute += parts * (cost.epilogue + each * tile.m * tile.n)
    if divided:
        compute += cost.fixup * max(1.0, clusters / divided)
    us = cost.launch + hypot(compute, _bytes(tile, schedule, card, sizes, slots) / card.memory_bandwidth)
    return us * (1 + cost.throttled * us**2 / (us**2 + _LONG**2))


def _bytes(tile: WarpgroupTile, schedule: Schedule, card: CardCosts, sizes: tuple[int, int, int], slots: int) -> float:
    """Return the bytes that memory moves."""
    m, n, k = sizes
    once, results = tile.loaded(m, n) * k, _RESULT_BYTES * m * n
    missing = once - card.l2_cache / 2
    if missing <= 0:
        return once + results
    rows, columns = tile.grid(m, n)
    _, divided, groups, band = schedule
    if groups > 1:  # each row, or column, of tiles reads the other operand
        of_codes, of_weight = tile.halves
        again: float = (rows - 1) * n * of_weight * k if columns <= rows else (columns - 1) * m * of_codes * k
    else:
        height = min(rows, band)
        width = min(columns, max(1, slots // height))
        waves = (rows * columns - divided) / (height * width)
        read = waves * tile.loaded(height * tile.cluster_m, width * tile.cluster_n)
        read += divided * tile.loaded(tile.cluster_m, tile.cluster_n)
        again = max(0.0, read * k - once)
    return once + results + _READ_AGAIN * missing / once * again


_THREADS, _SUMS_THREADS = 384, 256

_ALIKE, _MANY_ALIKE, _MANY = 16, 64, 4096
"""So many numbers of rows share a ranking, because programs meet ever new ones: the second for at least the third."""

_SMALL = 64_000_000
"""Bytes of operands and results up to which a launch without clusters may start before the previous kernel ends.

Its blocks then begin as multiprocessors come free, so neighbouring tiles no longer share a pair of multiprocessors,
which fetches from L2 once what both read. Clusters always share one.
"""

_MIN_ROWS_PER_SUM = 128
"""Fewest rows of an activation with zero points. For fewer, the sums of the weight's codes cost more than wgmma saves.

Measured on an H200 for weights of 1024 x 1024 to 28672 x 8192.
"""


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and enough rows for each sum of a weight's codes.

    `weight` is s8 or u8; the activation may be either.
    """
    return (*hopper.constraints(weight), Between(field="rows_per_weight_sum", minimum=_MIN_ROWS_PER_SUM))


STRATEGY = Strategy(
    "warpgroup",
    __name__,
    ArchSku.SM_90A,
    constraints,
    "wgmma, TMA loads, tiles by predicted time",
    workspace=(WorkspaceTerm(factors=("num_code_sums",), bytes_each=4),),
    wide=True,
)


@lru_cache(maxsize=4096)
def ranking(
    m: int,
    n: int,
    k: int,
    sm_count: int,
    l2_cache: int = 0,
    activation: tuple[str, bool] | None = None,
    halves: tuple[int, int] = (1, 1),
) -> tuple[tuple[float, WarpgroupTile], ...]:
    """Return (predicted us, tile) of every configuration, fastest first.

    Parameters
    ----------
    m, n, k : int
        The problem.
    sm_count, l2_cache : int
        Multiprocessors and bytes of L2 of the card; see `costs_for`.
    activation : (str, bool) or None
        Name of an activation that takes time, and whether the output is f32.
    halves : (int, int)
        Bytes of a code of activation and weight.
    """
    card = costs_for(l2_cache)
    name, wide = activation or ("", False)
    each = card.activations.get(name, (0.0, 0.0))[wide]
    tiles = _costs_of(card, halves)
    times = ((predicted(tile, cost, card, (m, n, k), sm_count, each), tile) for tile, cost in tiles)
    return tuple(sorted(times, key=lambda pair: pair[0]))


@lru_cache(maxsize=4096)
def _ranked(
    sizes: tuple[int, int, int],
    card: tuple[int, int],
    activation: tuple[str, bool] | None,
    zero_points: tuple[bool, bool],
    halves: tuple[int, int],
) -> tuple[tuple[tuple[WarpgroupTile, tuple[str, ...], int], ...], tuple[Choice, ...]]:
    """Return the tiles that fit, each with its flags and shared memory, and what they are called."""
    ranked = ranking(*sizes, *card, activation, halves)
    fitting = [(us, tile, tile.shared(zero_points)) for us, tile in ranked]
    fitting = [each for each in fitting if each[2] <= hopper.MAX_SHARED]
    choices = tuple(Choice(str(tile), us, tile.partial_sums(tile.schedule(*sizes, card[0]))) for us, tile, _ in fitting)
    return tuple((tile, tile.flags, shared) for _, tile, shared in fitting), choices


def _code_sums(problem: LinearProblem, sm_count: int, zero_points: tuple[bool, bool]) -> Step:
    """Return the step that adds up codes; see ``code_sums.cuh``."""
    (m, n, k), (activation, weight) = problem.sizes, zero_points
    codes: tuple[Parameter, ...] = (*parameters.CODES, *s64(k))
    if not problem.dynamic:
        codes = (Pointer("act_q"), *s64(0), Leading("act_q"))
    blocks = -(-problem.num_code_sums // (_SUMS_THREADS // 32))
    return Step(
        entry="code_sums",
        grid=(min(blocks, 4 * sm_count) if m and n else 0, 1, 1),
        block=(_SUMS_THREADS, 1, 1),
        parameters=(
            *strided("weight_q"),
            *s64(n * activation),
            *codes,
            *s64(m * weight),
            *pointers("code_sums"),
            *s64(k),
        ),
        overlaps=True,
    )


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, k = problem.sizes
    sm_count, kind = device.sm_count or hopper.H200, problem.epilogue.activation
    activation = None if kind is None else (kind.value, problem.output is ElementKind.F32)
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    step = _MANY_ALIKE if m >= _MANY else _ALIKE
    alike = -(-max(1, m) // step) * step
    halves = problem.code_element.halves, problem.weight_code.halves
    ranked = _ranked((alike, max(1, n), k), (sm_count, device.l2_cache), activation, zero_points, halves)
    (tile, tile_flags, shared), chosen = parameters.choose(*ranked, choice)
    schedule = tile.schedule(m, n, k, sm_count)
    size = tile.loaded(m, n) * k + m * n * problem.output.bits // 8
    # Pairs of lines; rows that do not begin at a pair would fetch bytes of the next box.
    promotion = 256 if k % 256 == 0 else 128
    product = Step(
        entry=f"{problem.op_name()}_warpgroup",
        grid=(schedule.clusters * tile.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            parameters.activation_map(problem, tile.m // tile.cluster[1], promotion),
            parameters.weight_map(problem, tile.n // tile.cluster[0], promotion),
            *parameters.activation_scales(problem),
            *parameters.epilogue_parameters(problem),
            *s32(schedule.band, schedule.stream_k_tiles, schedule.groups),
            *pointers("partial_sums", ZEROS, "code_sums"),
        ),
        shared=shared,
        overlaps=tile.blocks > 1 or size <= _SMALL,
    )
    steps: tuple[Step, ...] = (product,)
    notes: tuple[str, ...] = (hopper.ALIGNED,)
    scratch: tuple[tuple[str, int], ...] = ()
    if sums := tile.partial_sums(schedule):
        scratch = (("partial_sums", sums), (ZEROS, 8 * schedule.clusters * tile.blocks))
    if any(zero_points):
        steps = (_code_sums(problem, sm_count, zero_points), product)
        scratch = (*scratch, ("code_sums", 4 * problem.num_code_sums))
        notes = ("zero points: a launch in front adds up codes", *notes)
    flags = (*tile_flags, *parameters.epilogue_flags(problem))
    return parameters.launch_product(problem, *steps, scratch=scratch, flags=flags, notes=notes, alike=alike, **chosen)


expanded = behind_unpacking(launch)
