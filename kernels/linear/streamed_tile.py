"""Tilings of the weight-streaming product (``streamed.cuh``). Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import NamedTuple

from skuda.kernels.linear import hopper
from skuda.kernels.linear.problem import FEW_ROWS

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
    """One tiling.

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


def tilings(
    sizes: tuple[int, int, int],
    sm_count: int,
    output_bytes: int,
    *,
    quantizes: bool = False,
    zero_points: tuple[bool, bool] = (False, False),
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
        strip = _Strip(tokens, n, k, output_bytes, quantizes, zero_points, -(-m // tokens))
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
    tokens, quantizes = strip.tokens, strip.quantizes
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
        codes = k_blocks * tokens * BLOCK_K
        stage = k_blocks * atoms * _ATOM + (0 if quantizes else codes)
        fixed += steps * codes if quantizes else 0
        fitting = min((room - fixed) // (stage + 16), _MAX_STAGES)  # a stage has two mbarriers
        if fitting >= _MIN_STAGES or k_blocks == 1:
            break
    used = steps * -(-tiles // width)
    in_flight = _MAX_IN_FLIGHT if split_k > 1 else min(max(_IN_FLIGHT // blocks, _MIN_IN_FLIGHT), _MAX_IN_FLIGHT)
    wanted = max(in_flight, 8 * atoms * _ATOM) // (k_blocks * atoms * _ATOM)
    stages = min(used, fitting, max(_MIN_STAGES, wanted))
    # The last wgmma may read beyond the tile's rows, so shared memory must extend that far.
    reach = 1024 + ones + stages * k_blocks * atoms * _ATOM + (_WGMMA_M * warpgroups - 8 * atoms) * BLOCK_K
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
    slab = 8 if strip.tokens == 8 or strip.output_bytes == 4 else 16
    staging = 4 * warpgroups * slab * (16 * strip.output_bytes + 16)
    own_slabs = -(-(strip.tokens // slab) // split_k)
    return staging + (own_slabs * split_k * (slab // 8) * warpgroups * 2048 if split_k > 1 else 0)
