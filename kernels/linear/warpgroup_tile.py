"""The tiles of the wgmma product (``warpgroup.cuh``), and how its clusters divide them. Pure: needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    """

    m: int
    n: int
    stages: int
    cluster: tuple[int, int] = (1, 1)
    cooperative: bool = False
    stream_k: bool = False

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
        ring = self.stages * ((self.m + self.n) * BLOCK_K + 16)
        return 1024 + ring + _STAGING + 8 * (2 + sum(zero_points)) * self.n

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return rows and columns of clusters that cover m x n results."""
        return -(-m // self.cluster_m), -(-n // self.cluster_n)

    def partial_sums(self, schedule: Schedule) -> int:
        """Return the bytes of the partial sums that stream-K keeps in global memory."""
        return 4 * self.m * self.n * self.blocks * schedule.clusters if schedule.stream_k_tiles else 0

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
        read = (min(m, height * self.cluster_m) + min(n, -(-more // height) * self.cluster_n)) * k
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
"""All configurations."""
