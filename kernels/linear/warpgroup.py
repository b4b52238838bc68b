"""Tile choice and launch rule of the warpgroup product. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from skuda.kernels.launch import Launch, Step, TensorMap, s32
from skuda.kernels.linear import hopper, layer
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import ActivationKind

if TYPE_CHECKING:
    from skuda.dispatch.device import Device

_STAGE_K = 128
"""Bytes of K in a stage."""

_THREADS = 384
_STAGING = 8 * 16 * 144
_BAND = 2048
"""Rows of a rasterization band: tiles go down these rows before they move to the next columns."""

_CACHED = 40_000_000
"""Operands of up to this many bytes are read from memory once, larger ones once per band."""


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
    launch_time : float
        Time of a launch without work.
    stage_time : float
        Time of one stage of the mainloop, 128 bytes of K of one tile, alone on the card.
    contention : float
        Time added to a stage when all multiprocessors are busy.
    epilogue_time : float
        Time of the epilogue of one tile.
    bandwidth : float
        Memory bandwidth in TB/s that it reaches.
    """

    m: int
    n: int
    stages: int
    cluster: tuple[int, int]
    cooperative: bool
    launch_time: float
    stage_time: float
    contention: float
    epilogue_time: float
    bandwidth: float

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        ring = self.stages * ((self.m + self.n) * _STAGE_K + 16)
        return 1024 + ring + _STAGING + 16 * self.n

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
        )

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return rows and columns of clusters that cover m x n results."""
        return -(-m // (self.m * self.cluster[0])), -(-n // (self.n * self.cluster[1]))

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
        spare = -(-m // self.m) < self.cluster[0] or -(-n // self.n) < self.cluster[1]
        slots = max(1, sm_count // self.blocks)
        tiles = rows * columns
        waves, occupied = -(-tiles // slots), min(1.0, tiles / slots)
        mainloop = -(-k // _STAGE_K) * (self.stage_time + self.contention * occupied)
        if self.cooperative or waves == 1:
            own = waves * (mainloop + self.epilogue_time)
        else:
            # The other warpgroup's mainloop hides the epilogue unless the epilogue takes longer.
            own = waves * max(mainloop, (mainloop + self.epilogue_time) / 2) + self.epilogue_time
        # An activation is not hidden; one warpgroup alone does not keep the multiprocessor busy with it.
        own += waves * curve * self.m * self.n * (1.6 if waves == 1 and not self.cooperative else 1.0)
        high = min(rows, self.band)
        wide = min(columns, max(1, slots // high))
        read = (m + n) * k
        if read > _CACHED:
            once = high * self.m * self.cluster[0] + wide * self.n * self.cluster[1]
            read = max(read, int(tiles / (high * wide) * once * k))
        memory = (read + 2 * m * n) / (self.bandwidth * 1e6 * min(1.0, 1.5 * occupied))
        # A cluster with idle blocks only costs time.
        return float(self.launch_time + (3.0 if spare else 0.0) + math.hypot(own**2, memory**2) ** 0.5)

    def __str__(self) -> str:
        how = "cooperative" if self.cooperative else "ping-pong"
        clusters = f", clusters of {self.cluster[0]} x {self.cluster[1]}" if self.blocks > 1 else ""
        return f"{self.m} x {self.n}, {how}, {self.stages} stages{clusters}"


_COOPERATIVE, _PING_PONG = True, False

TILES = (
    Tile(128, 256, 4, (1, 1), _COOPERATIVE, 4.936, 0.5307, 0.1044, 3.563, 4.402),
    Tile(128, 256, 4, (2, 1), _COOPERATIVE, 6.014, 0.522, 0.0981, 3.722, 4.731),
    Tile(128, 128, 6, (1, 1), _PING_PONG, 4.638, 0.2255, 0.1468, 2.959, 4.966),
    Tile(128, 128, 6, (1, 2), _PING_PONG, 4.804, 0.2605, 0.09857, 3.238, 4.063),
    Tile(128, 128, 6, (2, 1), _PING_PONG, 4.189, 0.2534, 0.1073, 3.833, 5.463),
    Tile(128, 128, 6, (1, 1), _COOPERATIVE, 4.554, 0.2428, 0.1304, 1.904, 4.906),
    Tile(64, 256, 5, (1, 1), _PING_PONG, 4.903, 0.275, 0.1729, 3.72, 4.283),
    Tile(64, 128, 8, (1, 1), _PING_PONG, 4.459, 0.1085, 0.1697, 1.903, 4.644),
    Tile(64, 128, 8, (2, 1), _PING_PONG, 5.601, 0.1327, 0.08653, 2.496, 3.609),
    Tile(128, 64, 8, (1, 1), _COOPERATIVE, 5.262, 0.1111, 0.1634, 0.9693, 5.111),
    Tile(64, 64, 12, (1, 1), _PING_PONG, 4.563, 0.08322, 0.1085, 1.365, 4.671),
    Tile(64, 64, 12, (2, 1), _PING_PONG, 4.539, 0.1269, 0.04455, 1.719, 4.714),
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


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    m, n, k = problem.sizes
    sm_count = device.sm_count or hopper.H200
    activation = problem.epilogue.activation
    curve = CURVES[activation][problem.output is ElementKind.F32] if activation in CURVES else 0.0
    tile, chosen = layer.choose(ranking(max(1, m), max(1, n), k, sm_count, curve), choice)
    clusters = min(math.prod(tile.grid(m, n)), max(1, sm_count // tile.blocks))
    name, otherwise = ("act_q_scratch", "codes") if problem.dynamic else ("act_q", "")
    product = Step(
        entry=f"{problem.op_name()}_warpgroup",
        grid=(clusters * tile.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            TensorMap(name, m, k, tile.m // tile.cluster[1], otherwise=otherwise),
            TensorMap("weight_q", n, k, tile.n // tile.cluster[0]),
            *(layer.SCALES if problem.dynamic else layer.given_scales(problem)),
            *layer.epilogue_parameters(problem),
            *s32(tile.band),
        ),
        shared=tile.shared,
        overlaps=problem.dynamic,
    )
    flags = (*tile.flags, *layer.element_flags(problem))
    return layer.launch_product(problem, product, flags=flags, notes=(hopper.ALIGNED,), **chosen)
