"""Tile choice and launch rule of the warpgroup product. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

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
    from skuda.dispatch.device import Device

_STAGE_K = 128
"""Bytes of K in a stage."""

_THREADS, _SUMS_THREADS = 384, 256
_STAGING = 8 * 16 * 144
_BAND = 2048
"""Rows of a rasterization band: tiles go down these rows before they move to the next columns."""

_ALIKE = 16
"""So many numbers of rows, which all tiles cover alike, get the same ranking, because programs meet ever new ones."""

_SHORTEST_SHARE = 4
"""Fewest steps of a share."""

_PARTIAL_LINES, _MOST_PARTIAL = ((128, 0.0), (64, 1.0), (32, 1.244)), 2.99
"""Time of loading parts of lines, by what divides the bytes of a row, relative to rows of half lines."""

_CACHED = 40_000_000
"""Operands of up to this many bytes are read from memory once, larger ones once per band."""

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


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the kernel with its measured times.

    Times are in us on an H200, fitted to the measurements in ``docs/evidence/h200-tiles.json``.

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
    stage_time : float
        Time of one stage of the mainloop, 128 bytes of K of one tile, alone on the card.
    contention : float
        Time added to a stage when all multiprocessors are busy.
    unaligned : float
        Time added then where rows do not begin at whole lines of the cache; see `_PARTIAL_LINES`.
    epilogue_time : float
        Time of the epilogue of one tile.
    bandwidth : float
        Memory bandwidth in TB/s that it reaches.
    output : float
        What a byte of the output costs more than one of the operands, as a share.
    exchange_time : float
        Time to add the sums of a divided tile's parts.
    """

    m: int
    n: int
    stages: int
    cluster: tuple[int, int]
    cooperative: bool
    divides: bool
    launch_time: float
    stage_time: float
    contention: float
    unaligned: float
    epilogue_time: float
    bandwidth: float
    output: float
    exchange_time: float

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

    def work(self, m: int, n: int, k: int, sm_count: int) -> tuple[int, int]:
        """Return the number of clusters to launch, and of the tiles that all of them divide evenly; see `divides`."""
        tiles, slots = math.prod(self.grid(m, n)), max(1, sm_count // self.blocks)
        shared = tiles % slots + (slots if tiles > slots else 0) if self.divides and tiles % slots else 0
        steps = -(-k // _STAGE_K)
        if not shared:
            return min(slots, tiles), 0
        # A share shorter than some steps costs more than it gains, and none may be empty.
        return max(1, min(slots, shared * steps // _SHORTEST_SHARE)), shared

    def workspace(self, m: int, n: int, k: int, sm_count: int) -> int:
        """Return the bytes of the sums of parts of tiles."""
        clusters, shared = self.work(m, n, k, sm_count)
        return 4 * self.m * self.n * self.blocks * clusters if shared else 0

    def predicted(self, m: int, n: int, k: int, sm_count: int, curve: float = 0.0) -> float:
        """Return the predicted time in us on a card like the H200.

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
        clusters, shared = self.work(m, n, k, sm_count)
        occupied = min(1.0, (clusters if shared else tiles) / slots)
        partial = next((share for divisor, share in _PARTIAL_LINES if k % divisor == 0), _MOST_PARTIAL)
        stage = self.stage_time + (self.contention + self.unaligned * partial) * occupied
        # An activation is not hidden; one warpgroup alone does not keep the multiprocessor busy with it.
        if shared:
            whole = (tiles - shared) // slots
            own = (shared * steps / clusters + whole * steps) * stage
            own += (1 + whole) * self.epilogue_time * (1.0 if self.cooperative else 0.6)
            own += self.exchange_time * max(1.0, clusters / shared) ** 0.5 + (2 + whole) * curve * self.m * self.n
        else:
            waves = -(-tiles // slots)
            if self.cooperative or waves == 1:
                own = waves * (steps * stage + self.epilogue_time)
            else:
                # The other warpgroup's mainloop hides the epilogue unless the epilogue takes longer.
                own = waves * max(steps * stage, (steps * stage + self.epilogue_time) / 2) + self.epilogue_time
            own += waves * curve * self.m * self.n * (1.6 if waves == 1 and not self.cooperative else 1.0)
        high = min(rows, self.band)
        wide = min(columns, max(1, slots // high))
        read = (m + n) * k
        if read > _CACHED:
            once = high * self.m * self.cluster[0] + wide * self.n * self.cluster[1]
            read = max(read, int(tiles / (high * wide) * once * k))
        moved = read + 2 * m * n * (1 + self.output)
        memory = moved / (self.bandwidth * 1e6 * min(1.0, 1.5 * occupied))
        # A cluster with idle blocks only costs time.
        spare = -(-m // self.m) < self.cluster[0] or -(-n // self.n) < self.cluster[1]
        return float(self.launch_time + (3.0 if spare else 0.0) + math.hypot(own, memory))

    def __str__(self) -> str:
        how = "cooperative" if self.cooperative else "ping-pong"
        clusters = f", clusters of {self.cluster[0]} x {self.cluster[1]}" if self.blocks > 1 else ""
        divided = ", divided evenly" if self.divides else ""
        return f"{self.m} x {self.n}, {how}, {self.stages} stages{clusters}{divided}"


_COOPERATIVE, _PING_PONG = True, False
_WHOLE, _DIVIDED = False, True

TILES = (
    Tile(128, 256, 4, (1, 1), _COOPERATIVE, _WHOLE, 7.217, 0.4563, 0.1164, 0.06968, 2.101, 11.53, 0.2225, 1),
    Tile(128, 256, 4, (2, 1), _COOPERATIVE, _WHOLE, 9.028, 0.4572, 0.1343, 0.008846, 1.804, 6.566, 0.3802, 1),
    Tile(256, 128, 4, (1, 1), _COOPERATIVE, _WHOLE, 5.816, 0.4629, 0.1286, 0.08736, 1.791, 3.182, 0.001472, 1),
    Tile(128, 128, 6, (1, 1), _COOPERATIVE, _WHOLE, 6.898, 0.198, 0.1144, 0.08247, 0.6417, 4.502, 0.6174, 1),
    Tile(128, 128, 6, (1, 1), _PING_PONG, _WHOLE, 7.833, 0.2251, 0.08155, 0.09605, 1.262, 8.517, 1.12, 1),
    Tile(128, 128, 6, (1, 2), _PING_PONG, _WHOLE, 7.209, 0.1697, 0.1355, 0.04809, 2.795, 5.397, 0.4919, 1),
    Tile(128, 128, 6, (2, 1), _PING_PONG, _WHOLE, 6.997, 0.2225, 0.08983, 0.0347, 1.634, 3.024, 0.343, 1),
    Tile(64, 256, 5, (1, 1), _PING_PONG, _WHOLE, 5.407, 0.2257, 0.1055, 0.09811, 2.341, 8.884, 1.925, 1),
    Tile(128, 64, 8, (1, 1), _COOPERATIVE, _WHOLE, 5.998, 0.1163, 0.1164, 0.05397, 0.3104, 2.987, 0.001472, 1),
    Tile(64, 128, 8, (1, 1), _PING_PONG, _WHOLE, 5.6, 0.1262, 0.1027, 0.08653, 0.7025, 8.315, 1.212, 1),
    Tile(64, 128, 8, (2, 1), _PING_PONG, _WHOLE, 8.611, 0.1171, 0.09481, 0.01743, 1.19, 6.979, 1.865, 1),
    Tile(64, 64, 12, (1, 1), _PING_PONG, _WHOLE, 4.606, 0.09439, 0.09743, 0.06685, 0.4551, 5.8, 1.564, 1),
    Tile(128, 256, 4, (2, 1), _COOPERATIVE, _DIVIDED, 8.81, 0.02543, 0.6421, 0.01902, 0.1858, 5.842, 2.134, 5.178),
    Tile(256, 128, 4, (1, 2), _COOPERATIVE, _DIVIDED, 11.67, 0.03047, 0.9263, 0.01947, 1.551, 2.048, 0.1504, 8.951),
    Tile(128, 128, 6, (2, 1), _PING_PONG, _DIVIDED, 6.678, 0.02978, 0.3708, 0.03671, 0.2329, 2.462, 0.001472, 3.588),
    Tile(64, 128, 8, (2, 1), _PING_PONG, _DIVIDED, 8.127, 0.02307, 0.2527, 0.01177, 0.2208, 4.658, 0.5639, 2.617),
    Tile(64, 128, 8, (1, 1), _PING_PONG, _DIVIDED, 6.488, 0.0175, 0.276, 0.06396, 0.2422, 6.955, 0.000943, 4.563),
    Tile(64, 64, 12, (1, 1), _PING_PONG, _DIVIDED, 6.22, 0.02292, 0.1684, 0.03045, 0.2433, 3.774, 1.527, 2.822),
)
"""All configurations. Each serves every problem with the same bits."""


CURVES = {ActivationKind.GELU: (2.5e-4, 3.5e-4), ActivationKind.SILU: (2.15e-4, 2.6e-4)}
"""Time in us that an activation takes a multiprocessor per result: of 16 bits or fewer, and of f32; others 0.

Measured on an H200 as the difference from the same product without activation.
"""


@lru_cache(maxsize=4096)
def ranking(m: int, n: int, k: int, sm_count: int, curve: float = 0.0) -> tuple[tuple[float, Tile], ...]:
    """Return (predicted us, tile) of every configuration, fastest first; see `Tile.predicted`."""
    predicted = ((tile.predicted(m, n, k, sm_count, curve), tile) for tile in TILES)
    return tuple(sorted(predicted, key=lambda pair: pair[0]))


@lru_cache(maxsize=4096)
def _offered(
    m: int, n: int, k: int, sm_count: int, curve: float, zero_points: tuple[bool, bool]
) -> tuple[tuple[Tile, ...], tuple[Choice, ...]]:
    activation, weight = zero_points
    read = (n * activation + m * weight) * k
    sums = _SUMS_LAUNCH + read / (_SUMS_BANDWIDTH * 1e6) if read else 0.0
    ranked = [
        (us, tile) for us, tile in ranking(m, n, k, sm_count, curve) if tile.shared(zero_points) <= hopper.MOST_SHARED
    ]
    choices = tuple(Choice(str(tile), sums + us, tile.workspace(m, n, k, sm_count)) for us, tile in ranked)
    return tuple(tile for _, tile in ranked), choices


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
    alike = -(-max(1, m) // _ALIKE) * _ALIKE
    tile, chosen = layer.choose(*_offered(alike, max(1, n), k, sm_count, curve, zero_points), choice)
    clusters, shared_tiles = tile.work(m, n, k, sm_count)
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    in_front = problem.dynamic or any(zero_points)
    size = (m + n) * k + m * n * problem.output.bits // 8
    # Pairs of lines: rows that do not begin at one would fetch bytes of the next box.
    promotion = 256 if k % 256 == 0 else 128
    product = Step(
        entry=f"{problem.op_name()}_warpgroup",
        grid=(clusters * tile.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            TensorMap(name, m, k, tile.m // tile.cluster[1], otherwise=otherwise, promotion=promotion),
            TensorMap("weight_q", n, k, tile.n // tile.cluster[0], promotion=promotion),
            *(layer.SCALES if problem.dynamic else layer.given_scales(problem)),
            *layer.epilogue_parameters(problem),
            *s32(tile.band, shared_tiles),
            *pointers("partial_sums", ZEROS, "code_sums"),
        ),
        shared=tile.shared(zero_points),
        overlaps=not in_front or tile.blocks > 1 or size <= _SMALL,
    )
    steps: tuple[Step, ...] = (product,)
    flags = (*tile.flags, *layer.epilogue_flags(problem))
    notes: tuple[str, ...] = (hopper.ALIGNED,)
    scratch: tuple[tuple[str, int], ...] = ()
    if sums := tile.workspace(m, n, k, sm_count):
        scratch = (("partial_sums", sums), (ZEROS, 8 * clusters * tile.blocks))
    if any(zero_points):
        steps = (_code_sums(problem, sm_count, zero_points), product)
        scratch = (*scratch, ("code_sums", 4 * problem.num_code_sums))
        notes = ("zero points: a launch in front adds up codes", *notes)
    return layer.launch_product(problem, *steps, scratch=scratch, flags=flags, notes=notes, **chosen)
