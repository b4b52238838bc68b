"""Tile choice and launch rule of the warpgroup product. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skuda.kernels.launch import (
    ZEROS,
    Choice,
    Launch,
    Leading,
    Parameter,
    Pointer,
    Step,
    TensorMap,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.linear import hopper, layer
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.constraints import Between, Constraint
from skuda.registry.elements import ElementKind
from skuda.registry.sku import WorkspaceTerm
from skuda.registry.vocabulary import ActivationKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_STAGE_K = 128
"""Bytes of K in a stage."""

_THREADS, _SUMS_THREADS = 384, 256
_STAGING = 8 * 16 * 144
_BAND = 2048
"""Rows of a rasterization band: tiles go down these rows before they move to the next columns."""

_ALIKE, _MANY_ALIKE, _MANY = 16, 64, 4096
"""So many numbers of rows, which all tiles cover alike, get the same ranking, because programs meet ever new ones.

The second is for the third or more, of which 64 are too few to change a prediction.
"""

_SHORTEST_SHARE = 4
"""Fewest steps of a share."""

_LONG_SHARE = 16
"""Fewest steps of a share if the last tiles alone are divided, so that a tile has few parts."""

_MOST_IDLE = 0.05
"""Share of the clusters that may be left without work so that the others fall into groups; see `Work`."""

_MOST_LONGER = 400_000
"""Results times steps by which shares may be longer so that none has parts of two tiles.

A second part costs a tile's sums and another start; measured, in ``docs/evidence/h200-one-part.json``.
"""

_PARTIAL_LINES = ((128, 0.0), (64, 1.0), (32, 1.244))
"""Time of loading parts of lines, by what divides the bytes of a row, relative to rows of half lines."""

_NEARBY = 18
"""Blocks that run near each other, on one GPC: the times suggest that L2 is asked once for what they read together."""

_FETCH_A, _FETCH_W = 1.5, 3.0
"""Time by which rows of a and of w take longer that one of these blocks reads alone, relative to rows that all read.

Fitted. Those of w come from memory, those of a mostly from L2 cache, as other columns of tiles read them, too.
"""

_CACHED = 40_000_000
"""Operands of up to this many bytes are read from memory once, larger ones once per band."""

_OUT_OF_STEP = 0.7
"""Share of what divided tiles read that each fetches from memory for itself where clusters are not in groups."""

_RESIDENT, _REREAD = 30_000_000, 0.5
"""Operands of more bytes do not stay in L2, and the share of what then goes missing that memory is asked for again.

So where clusters in groups divide tiles: the members of a group read different parts of its operand at the same time.
"""

_GROUP_BANDWIDTH = 4e6
"""Bytes in a us that memory gives for that."""

_SECOND_PART = 0.25
"""Share of the launch time of divided tiles that is missing where shares have parts of one tile alone."""

_SUSTAINED = 600.0
"""Time in us after which half of `Tile.throttled` shows."""

_SMALL = 64_000_000
"""Operands and results of up to this many bytes: blocks need not run beside those that they share operands with.

Where a kernel in front lets a product start early, its blocks begin as multiprocessors come free, so neighbouring tiles
no longer share a pair of them, which fetches from L2 once what both read. Clusters always do.
"""

_SUMS_LAUNCH, _SUMS_BANDWIDTH = 2.0, 3.5
"""Time in us of a launch of ``code_sums`` without work, and the memory bandwidth in TB/s it reaches: assumed."""

WORKSPACE = (WorkspaceTerm(factors=("num_code_sums",), bytes_each=4),)
"""What the kernel needs beside the op's workspace and that of a configuration."""

_FEWEST_ROWS_PER_SUM = 128
"""Fewest rows of an activation with zero points: for fewer, the sums of the weight cost more than the product saves.

Measured for weights of 1024 x 1024 to 28672 x 8192, in ``docs/evidence/h200-zero-points.txt``.
"""


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: operands that TMA can read, and enough rows for each sum of a weight's codes.

    `weight` is s8 or u8; the activation may be either.
    """
    return (*hopper.constraints(weight), Between(field="rows_per_weight_sum", minimum=_FEWEST_ROWS_PER_SUM))


class Work(NamedTuple):
    """How clusters divide tiles; see `Work` in ``warpgroup.cuh``.

    Attributes
    ----------
    clusters : int
        Clusters to launch.
    shared : int
        Tiles whose steps are divided evenly; see `Tile.divides`.
    groups : int
        Groups of clusters that divide as many of these tiles each.
    band : int
        Rows of clusters in a rasterization band.
    """

    clusters: int
    shared: int
    groups: int
    band: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the kernel with its measured times.

    Times are in us on the card that they were fitted for.

    Attributes
    ----------
    m, n : int
        Rows and columns of results.
    stages : int
        Stages of the ring.
    cluster : (int, int)
        Rows and columns of blocks that share loads.
    cooperative : bool
        Whether both consumer warpgroups work on one tile; else they ping-pong: each works on every other tile.
    divides : bool
        Whether the stages of the last tiles, which do not fill the card, are divided evenly among all multiprocessors.
    launch_time : float
        Time of a launch without work.
    multiply_time : float
        Time to multiply one stage of the mainloop, 128 bytes of K of one tile.
    load_time : float
        Time to load a stage when all multiprocessors do so; loading and multiplying mostly overlap. Of a cluster of one
        block, if all blocks nearby read the same; see `_fetched`.
    unaligned : float
        Time added to it where rows do not begin at whole lines of the cache, also if one multiprocessor is alone; see
        `_PARTIAL_LINES`.
    half_sectors : float
        The same where they do not begin at whole sectors of 32 bytes, of which they then need one more per line.
    epilogue_time : float
        Time of the epilogue of one tile.
    bandwidth : float
        Memory bandwidth in TB/s that it reaches.
    output : float
        What a byte of the output costs more than one of the operands, as a share.
    exchange_time : float
        Time to add the sums of a divided tile's parts.
    throttled : float
        Share by which long products take longer, because the card lowers its clock to keep its power; the more so the
        better a configuration uses the card.
    """

    m: int
    n: int
    stages: int
    cluster: tuple[int, int]
    cooperative: bool
    divides: bool
    launch_time: float
    multiply_time: float
    load_time: float
    unaligned: float
    half_sectors: float
    epilogue_time: float
    bandwidth: float
    output: float
    exchange_time: float
    throttled: float

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1]

    def shared(self, zero_points: Sequence[bool] = ()) -> int:
        """Return the bytes of shared memory of a block.

        `zero_points` says of activation and weight whether they have any.
        """
        ring = self.stages * ((self.m + self.n) * _STAGE_K + 16)
        return 1024 + ring + _STAGING + 8 * (2 + sum(zero_points)) * self.n

    @property
    def band(self) -> int:
        """Rows of clusters in a rasterization band."""
        return max(1, _BAND // (self.m * self.cluster[0]))

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags of the tile."""
        return (
            f"-DTILE_M={self.m}",
            f"-DTILE_N={self.n}",
            f"-DSTAGES={self.stages}",
            f"-DCLUSTER_M={self.cluster[0]}",
            f"-DCLUSTER_N={self.cluster[1]}",
            f"-DCOOPERATIVE={int(self.cooperative)}",
            f"-DSHARES={int(self.divides)}",
        )

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return rows and columns of clusters that cover m x n results."""
        return -(-m // (self.m * self.cluster[0])), -(-n // (self.n * self.cluster[1]))

    def work(self, m: int, n: int, k: int, sm_count: int) -> Work:
        """Return how clusters divide the tiles of m x n results of k products each."""
        rows, columns = self.grid(m, n)
        tiles, slots = rows * columns, max(1, sm_count // self.blocks)
        shared = self._shared(m, n, k, slots) if self.divides else 0
        if not shared:
            return Work(min(slots, tiles), 0, 1, self.band)
        steps, side = -(-k // _STAGE_K), min(rows, columns)
        clusters = self._one_part_each(shared, steps, slots) if shared == tiles else 0
        if clusters:
            groups = side
        else:
            # A share shorter than some steps costs more than it gains, and none may be empty.
            most = shared * steps // _SHORTEST_SHARE
            if most < slots:
                return Work(max(1, most), shared, 1, self.band)
            groups = self._groups(side, slots) if shared == tiles else 1
            clusters = slots // groups * groups
        band = self.band if groups == 1 else 1 if columns <= rows else rows
        return Work(clusters, shared, groups, band)

    def _one_part_each(self, tiles: int, steps: int, slots: int) -> int:
        """Return the clusters for which each has a part of one tile alone, or 0 if these are too few."""
        parts = min(slots // tiles, steps // _SHORTEST_SHARE)
        longer = steps / parts - tiles * steps / slots if parts > 1 else 0.0
        return parts * tiles if parts > 1 and longer * self.m * self.n * self.blocks <= _MOST_LONGER else 0

    def _shared(self, m: int, n: int, k: int, slots: int) -> int:
        """Return the tiles whose steps are divided: the last, which do not fill the card, and usually a wave more.

        With a wave more hardly a tile has more than two parts. But unless these are all tiles, which clusters in groups
        read in step, they read different parts of k at the same time; if L2 cache does not hold all of that, the last
        tiles alone are divided, except into short shares.
        """
        rows, columns = self.grid(m, n)
        tiles = rows * columns
        last = tiles % slots
        more = last + slots
        if tiles <= slots or not last:
            return last
        high = min(rows, self.band)
        tall, broad = high * self.m * self.cluster[0], -(-more // high) * self.n * self.cluster[1]
        far = tiles > more and (min(m, tall) + min(n, broad)) * k > _CACHED
        return last if far and last * -(-k // _STAGE_K) >= _LONG_SHARE * slots else more

    @staticmethod
    def _groups(side: int, slots: int) -> int:
        """Return the groups of clusters for a shorter side of the grid: the most that leave few clusters idle.

        Clusters that read the same part of the longer operand at the same time then have it from L2 cache.
        """
        divisors = (groups for groups in range(min(side, slots), 0, -1) if side % groups == 0)
        return next(groups for groups in divisors if slots % groups <= _MOST_IDLE * slots)

    def workspace(self, m: int, n: int, k: int, sm_count: int) -> int:
        """Return the bytes of the sums of parts of tiles."""
        return self.partial_sums(self.work(m, n, k, sm_count))

    def partial_sums(self, work: Work) -> int:
        """Return the bytes of the sums of parts of tiles, for work that is divided so."""
        return 4 * self.m * self.n * self.blocks * work.clusters if work.shared else 0

    def _fetched(self, rows: int, band: int) -> float:
        """Return the time of loading a stage relative to one of which blocks nearby read all, too.

        Tiles go down a band, so two blocks share the rows of w of a column of tiles, except for the last of an odd
        number. Clusters share by themselves.
        """
        own_a = min(rows, band, _NEARBY) / _NEARBY
        own_w = 1.0 if rows == 1 else (1 + rows % 2 / rows) / 2
        return 1 + (_FETCH_A * own_a * self.m + _FETCH_W * own_w * self.n) / (self.m + self.n)

    def predicted(self, m: int, n: int, k: int, sm_count: int, curve: float = 0.0) -> float:
        """Return the predicted time in us on a card like that of its times.

        Parameters
        ----------
        m, n, k : int
            The problem.
        sm_count : int
            Multiprocessors of the card.
        curve : float
            Time in us that the activation takes a multiprocessor per result; see `CURVES`.
        """
        rows, columns = self.grid(m, n)
        tiles, steps = rows * columns, -(-k // _STAGE_K)
        slots = max(1, sm_count // self.blocks)
        clusters, shared, groups, band = self.work(m, n, k, sm_count)
        occupied = min(1.0, (clusters if shared else tiles) / slots)
        lines = (share * self.unaligned for divisor, share in _PARTIAL_LINES if k % divisor == 0)
        partial = next(lines, self.half_sectors)
        load_time = self.load_time * (self._fetched(rows, band) if self.blocks == 1 else 1.0)

        def stage(busy: float) -> float:
            """Return the time of a stage where a share of the card is busy."""
            return math.hypot(self.multiply_time, load_time * busy + partial)

        if shared:
            whole = (tiles - shared) // slots
            parts = whole + 1
            own = (shared / clusters + whole) * steps * stage(occupied)
        else:
            parts = -(-tiles // slots)
            own = ((parts - 1) * stage(1.0) + stage(tiles / slots - (parts - 1))) * steps
        if self.cooperative or parts == 1:
            own += parts * self.epilogue_time
        else:
            # The other warpgroup's mainloop hides the epilogue unless the epilogue takes longer.
            own = max(own, (own + parts * self.epilogue_time) / 2) + self.epilogue_time
        # An activation is not hidden; one warpgroup alone does not keep the multiprocessor busy with it.
        alone = parts == 1 and not (self.cooperative or shared)
        own += (parts + bool(shared)) * curve * self.m * self.n * (1.6 if alone else 1.0)
        if shared:
            own += self.exchange_time * max(1.0, clusters / shared)
        high = min(rows, band)
        wide = min(columns, max(1, slots // high))
        read = (m + n) * k
        if read > _CACHED:
            tall, broad = self.m * self.cluster[0], self.n * self.cluster[1]
            own_reads = _OUT_OF_STEP * shared * (tall + broad) if groups == 1 else 0.0
            together = tiles - shared if own_reads else tiles
            read = max(read, int((together / (high * wide) * (high * tall + wide * broad) + own_reads) * k))
        moved = read + 2 * m * n * (1 + self.output)
        memory = moved / (self.bandwidth * 1e6 * min(1.0, 1.5 * occupied))
        if shared and groups > 1:
            own_operand, times = (n, rows) if columns <= rows else (m, columns)
            missing = max(0.0, 1 - _RESIDENT / ((m + n) * k))
            memory += _REREAD * missing * (times - 1) * own_operand * k / _GROUP_BANDWIDTH
        # A cluster with idle blocks only costs time.
        spare = -(-m // self.m) < self.cluster[0] or -(-n // self.n) < self.cluster[1]
        launch = self.launch_time * (1 - _SECOND_PART if shared and clusters % shared == 0 else 1.0)
        us = launch + (3.0 if spare else 0.0) + math.hypot(own, memory)
        return float(us * (1 + self.throttled * us**2 / (us**2 + _SUSTAINED**2)))

    def __str__(self) -> str:
        how = "cooperative" if self.cooperative else "ping-pong"
        clusters = f", clusters of {self.cluster[0]} x {self.cluster[1]}" if self.blocks > 1 else ""
        divided = ", divided evenly" if self.divides else ""
        return f"{self.m} x {self.n}, {how}, {self.stages} stages{clusters}{divided}"


_COOPERATIVE, _PING_PONG = True, False
_WHOLE, _DIVIDED = False, True

_CONFIGURATIONS = (
    (128, 256, 4, (1, 1), _COOPERATIVE, _WHOLE),
    (128, 256, 4, (2, 1), _COOPERATIVE, _WHOLE),
    (256, 128, 4, (1, 1), _COOPERATIVE, _WHOLE),
    (128, 128, 6, (1, 1), _COOPERATIVE, _WHOLE),
    (128, 128, 6, (1, 1), _PING_PONG, _WHOLE),
    (128, 128, 6, (1, 2), _PING_PONG, _WHOLE),
    (128, 128, 6, (2, 1), _PING_PONG, _WHOLE),
    (64, 256, 5, (1, 1), _PING_PONG, _WHOLE),
    (128, 64, 8, (1, 1), _COOPERATIVE, _WHOLE),
    (64, 128, 8, (1, 1), _PING_PONG, _WHOLE),
    (64, 128, 8, (2, 1), _PING_PONG, _WHOLE),
    (64, 64, 12, (1, 1), _PING_PONG, _WHOLE),
    (128, 256, 4, (2, 1), _COOPERATIVE, _DIVIDED),
    (256, 128, 4, (1, 2), _COOPERATIVE, _DIVIDED),
    (128, 128, 6, (2, 1), _PING_PONG, _DIVIDED),
    (64, 128, 8, (2, 1), _PING_PONG, _DIVIDED),
    (64, 128, 8, (1, 1), _PING_PONG, _DIVIDED),
    (64, 64, 12, (1, 1), _PING_PONG, _DIVIDED),
)
"""The attributes of all configurations up to `Tile.divides`; each serves every problem with the same bits."""


def _timed(*times: tuple[float, ...]) -> tuple[Tile, ...]:
    """Return the configurations with the times of a card: for each the attributes of `Tile` that are left."""
    return tuple(Tile(*how, *each) for how, each in zip(_CONFIGURATIONS, times, strict=True))


TILES = _timed(
    (6.68, 0.49, 0.172, 0.0138, 0.213, 1.47, 13.9, 1.09, 1, 0.165),
    (7.62, 0.54, 0.309, 0.0176, 0.01, 1.55, 111, 24.2, 1, 0.214),
    (6.4, 0.506, 0.196, 0.0164, 0.247, 1.58, 6.07, 0.0013, 1, 0.174),
    (6.3, 0.241, 0.101, 0.0486, 0.258, 0.786, 7.57, 0.0506, 1, 0.0835),
    (7.02, 0.239, 0.0964, 0.0613, 0.288, 0.0826, 7.34, 1.1, 1, 0.103),
    (8.04, 0.245, 0.227, 0.0274, 0.128, 0.57, 7.09, 1.14, 1, 0.093),
    (7.9, 0.257, 0.203, 0.0317, 0.151, 0.103, 15.3, 4.67, 1, 0.109),
    (5.5, 0.245, 0.0881, 0.0978, 0.382, 1.77, 9.77, 1.54, 1, 0.145),
    (6.31, 0.103, 0.0976, 0.057, 0.219, 0.194, 5.45, 0.0013, 1, 0.186),
    (6.75, 0.114, 0.0692, 0.0623, 0.226, 0.0127, 9.05, 1.08, 1, 0.322),
    (7.17, 0.147, 0.164, 0.0296, 0.0978, 0.31, 65.5, 20.1, 1, 0.0731),
    (6.47, 0.0768, 0.0514, 0.0498, 0.156, 0.0076, 9.12, 2.17, 1, 0.291),
    (12.8, 0.0255, 0.626, 0.0107, 0.0099, 1.98, 165, 4.86, 1.58, 0.194),
    (13.7, 0.0245, 0.634, 0.008, 0.0073, 1.83, 162, 0.0013, 1.72, 0.182),
    (9.01, 0.0297, 0.34, 0.0146, 0.101, 1.97, 36.3, 10.9, 1.4, 0.0879),
    (9.33, 0.147, 0.174, 0.0192, 0.0761, 0.0434, 82.2, 23.3, 1.19, 0.0776),
    (7.02, 0.0063, 0.099, 0.0509, 0.193, 1.74, 12.2, 0.0633, 1.1, 0.156),
    (7.02, 0.058, 0.0688, 0.0359, 0.137, 1.22, 13.8, 0.667, 1, 0.0708),
)
"""All configurations with times of an H200, fitted to those in ``docs/evidence/h200-tiles.json``."""

H100_TILES = _timed(
    (6.79, 0.463, 0.181, 0.0204, 0.324, 1.84, 17, 1.16, 1, 0.0967),
    (8.66, 0.473, 0.407, 0.0118, 0.0198, 1.76, 113, 22.7, 1, 0.12),
    (6.84, 0.454, 0.221, 0.0366, 0.341, 1.81, 4.99, 0.0013, 1, 0.115),
    (7.07, 0.199, 0.138, 0.074, 0.259, 0.706, 7.98, 0.051, 1, 0.228),
    (7.51, 0.181, 0.137, 0.0907, 0.286, 0.0819, 7.2, 1.26, 1, 0.285),
    (8.85, 0.218, 0.32, 0.0292, 0.107, 0.648, 7.76, 1.51, 1, 0.126),
    (8.76, 0.241, 0.273, 0.0401, 0.133, 0.1, 19.1, 6.1, 1, 0.163),
    (6.29, 0.189, 0.113, 0.13, 0.436, 1.33, 8.82, 2.39, 1, 0.111),
    (6.73, 0.103, 0.126, 0.0383, 0.201, 0.15, 5.22, 0.0013, 1, 0.227),
    (7.05, 0.0811, 0.102, 0.0541, 0.215, 0.0126, 8.82, 0.567, 1, 0.319),
    (8.55, 0.119, 0.22, 0.0189, 0.0787, 0.304, 63.7, 20.2, 1, 0.178),
    (6.81, 0.0695, 0.0764, 0.0315, 0.144, 0.0076, 10.2, 0.946, 1, 0.234),
    (14.1, 0.0253, 0.626, 0.0077, 0.0141, 2.37, 146, 5.18, 1.51, 0.116),
    (14.9, 0.0244, 0.639, 0.0062, 0.0066, 2.18, 166, 0.0013, 1.65, 0.101),
    (9.72, 0.0297, 0.385, 0.0206, 0.105, 2.07, 40.4, 12.9, 1.46, 0.136),
    (11, 0.19, 0.169, 0.0285, 0.0832, 0.0449, 76.6, 27.8, 1.21, 0.17),
    (7.01, 0.0063, 0.122, 0.0652, 0.214, 1.43, 6.06, 0.057, 1.28, 0.147),
    (7.43, 0.0486, 0.0807, 0.0464, 0.153, 0.972, 8.47, 0.571, 1.14, 0.126),
)
"""All configurations with times of an H100, fitted to those in ``docs/evidence/h100-tiles.json``."""

_H200_L2 = 60 << 20
_TABLES = {_H200_L2: TILES, 50 << 20: H100_TILES}
"""Times of cards by the bytes of their L2 cache."""


def tiles_like(l2_cache: int) -> tuple[Tile, ...]:
    """Return the configurations with the times of the card whose L2 cache is nearest in size; 0 is an H200's.

    L2 has a part for each stack of memory, an H200 six and an H100 five, so that its size tells what loads cost.
    """
    return _TABLES[min(_TABLES, key=lambda size: abs(size - (l2_cache or _H200_L2)))]


CURVES = {ActivationKind.GELU: (2.5e-4, 3.5e-4), ActivationKind.SILU: (2.15e-4, 2.6e-4)}
"""Time in us that an activation takes a multiprocessor per result: of 16 bits or fewer, and of f32; others 0.

Measured on an H200 as the difference from the same product without activation.
"""


@lru_cache(maxsize=4096)
def ranking(
    m: int, n: int, k: int, sm_count: int, l2_cache: int = 0, curve: float = 0.0
) -> tuple[tuple[float, Tile], ...]:
    """Return (predicted us, tile) of every configuration, fastest first; see `Tile.predicted` and `tiles_like`."""
    predicted = ((tile.predicted(m, n, k, sm_count, curve), tile) for tile in tiles_like(l2_cache))
    return tuple(sorted(predicted, key=lambda pair: pair[0]))


class _Offered(NamedTuple):
    """A tile with what problems of other sizes share."""

    tile: Tile
    flags: tuple[str, ...]
    shared: int


@lru_cache(maxsize=4096)
def _offered(
    m: int, n: int, k: int, card: tuple[int, int], curve: float, zero_points: tuple[bool, bool]
) -> tuple[tuple[_Offered, ...], tuple[Choice, ...]]:
    activation, weight = zero_points
    read = (n * activation + m * weight) * k
    sums = _SUMS_LAUNCH + read / (_SUMS_BANDWIDTH * 1e6) if read else 0.0
    ranked = [
        (us, tile) for us, tile in ranking(m, n, k, *card, curve) if tile.shared(zero_points) <= hopper.MOST_SHARED
    ]
    choices = tuple(Choice(str(tile), sums + us, tile.workspace(m, n, k, card[0])) for us, tile in ranked)
    return tuple(_Offered(tile, tile.flags, tile.shared(zero_points)) for _, tile in ranked), choices


def _code_sums(problem: LinearProblem, sm_count: int, zero_points: tuple[bool, bool]) -> Step:
    """Return the step that adds up codes; see ``code_sums.cuh``."""
    (m, n, k), (activation, weight) = problem.sizes, zero_points
    codes: tuple[Parameter, ...] = (*layer.CODES, *s64(k))
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
    sm_count = device.sm_count or hopper.H200
    activation = problem.epilogue.activation
    curve = CURVES[activation][problem.output is ElementKind.F32] if activation in CURVES else 0.0
    zero_points = problem.shifts_activation, problem.has_weight_zero_point
    step = _MANY_ALIKE if m >= _MANY else _ALIKE
    alike = -(-max(1, m) // step) * step
    offered = _offered(alike, max(1, n), k, (sm_count, device.l2_cache), curve, zero_points)
    (tile, tile_flags, shared), chosen = layer.choose(*offered, choice)
    work = tile.work(m, n, k, sm_count)
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    size = (m + n) * k + m * n * problem.output.bits // 8
    # Pairs of lines: rows that do not begin at one would fetch bytes of the next box.
    promotion = 256 if k % 256 == 0 else 128
    product = Step(
        entry=f"{problem.op_name()}_warpgroup",
        grid=(work.clusters * tile.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            TensorMap(name, m, k, tile.m // tile.cluster[1], otherwise=otherwise, promotion=promotion),
            TensorMap("weight_q", n, k, tile.n // tile.cluster[0], promotion=promotion),
            *(layer.SCALES if problem.dynamic else layer.given_scales(problem)),
            *layer.epilogue_parameters(problem),
            *s32(work.band, work.shared, work.groups),
            *pointers("partial_sums", ZEROS, "code_sums"),
        ),
        shared=shared,
        overlaps=tile.blocks > 1 or size <= _SMALL,
    )
    steps: tuple[Step, ...] = (product,)
    flags = (*tile_flags, *layer.epilogue_flags(problem))
    notes: tuple[str, ...] = (hopper.ALIGNED,)
    scratch: tuple[tuple[str, int], ...] = ()
    if sums := tile.partial_sums(work):
        scratch = (("partial_sums", sums), (ZEROS, 8 * work.clusters * tile.blocks))
    if any(zero_points):
        steps = (_code_sums(problem, sm_count, zero_points), product)
        scratch = (*scratch, ("code_sums", 4 * problem.num_code_sums))
        notes = ("zero points: a launch in front adds up codes", *notes)
    return layer.launch_product(problem, *steps, scratch=scratch, flags=flags, notes=notes, **chosen)
