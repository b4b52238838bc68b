"""Which tile the warpgroup product takes, and how it is launched. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from skuda.kernels.launch import Constant, Launch, Parameter, Pointer, Step, TensorMap
from skuda.kernels.quantize import _cuda_linear
from skuda.registry.constraints import Between, Constraint, MultipleOf
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import ActivationKind, EpilogueKind

if TYPE_CHECKING:
    from skuda.dispatch.device import Device
    from skuda.kernels.quantize.quantized_linear import QuantizedLinearDescriptor
    from skuda.kernels.quantize.smoothquant_linear import SmoothQuantLinearDescriptor

_STEP = 128
"""Bytes of K that a block works through at a time."""

_THREADS = 384
_STAGING = 8 * 16 * 144
_BAND = 2048
"""Rows that tiles go down before they go on to the next columns."""

_UNIT = 16
"""Rows must begin at multiples of this many bytes."""

H200 = 132
"""Multiprocessors to plan for where a device does not say."""
_CACHED = 40_000_000
"""Operands of up to this many bytes are read from memory once; larger ones again for every band."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the kernel, and what was measured of it.

    Times are in us on an H200, fitted to the measurements in ``docs/evidence/h200-tiles.json``.

    Attributes
    ----------
    m, n : int
        Rows and columns of results.
    stages : int
        Of the ring.
    cluster : (int, int)
        Blocks below and beside each other that share loads.
    together : bool
        Whether both warpgroups work on one tile, or on every other tile each.
    fixed : float
        A launch without work.
    step : float
        128 bytes of K of one tile, alone on the card.
    crowd : float
        What is added to it when all multiprocessors are busy.
    tail : float
        Writing the results of one tile.
    bandwidth : float
        TB/s that it draws from memory.
    """

    m: int
    n: int
    stages: int
    cluster: tuple[int, int]
    together: bool
    fixed: float
    step: float
    crowd: float
    tail: float
    bandwidth: float

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        ring = self.stages * ((self.m + self.n) * _STEP + 16)
        return 1024 + ring + _STAGING + 16 * self.n

    @property
    def band(self) -> int:
        """Rows of clusters that tiles go down before they go on."""
        return max(1, _BAND // (self.m * self.cluster[0]))

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Return rows and columns of clusters that cover m x n results."""
        return -(-m // (self.m * self.cluster[0])), -(-n // (self.n * self.cluster[1]))

    def predicted(self, m: int, n: int, k: int, sm_count: int, curve: float = 0.0) -> float:
        """Return the predicted time in us on a card of the H200's kind.

        Parameters
        ----------
        m, n, k : int
            The problem.
        sm_count : int
            Multiprocessors of the card.
        curve : float
            What the activation takes a multiprocessor for one result, in us; see `CURVES`.
        """
        rows, columns = self.grid(m, n)
        spare = -(-m // self.m) < self.cluster[0] or -(-n // self.n) < self.cluster[1]
        slots = max(1, sm_count // self.blocks)
        tiles = rows * columns
        waves, steps, share = -(-tiles // slots), -(-k // _STEP), min(1.0, tiles / slots)
        product = steps * (self.step + self.crowd * share)
        if self.together or waves == 1:
            own = waves * (product + self.tail)
        else:
            # Writing hides behind the other warpgroup's product, unless it takes longer.
            own = waves * max(product, (product + self.tail) / 2) + self.tail
        # A curve does not hide; one warpgroup alone does not keep the multiprocessor busy with it.
        own += waves * curve * self.m * self.n * (1.6 if waves == 1 and not self.together else 1.0)
        high = min(rows, self.band)
        wide = min(columns, max(1, slots // high))
        read = (m + n) * k
        if read > _CACHED:
            once = high * self.m * self.cluster[0] + wide * self.n * self.cluster[1]
            read = max(read, int(tiles / (high * wide) * once * k))
        memory = (read + 2 * m * n) / (self.bandwidth * 1e6 * min(1.0, 1.5 * share))
        # Where a cluster has blocks without work, it only costs.
        return float(self.fixed + (3.0 if spare else 0.0) + math.hypot(own**2, memory**2) ** 0.5)

    def __str__(self) -> str:
        how = "both warpgroups" if self.together else "a warpgroup each"
        shared = f", clusters of {self.cluster[0]} x {self.cluster[1]}" if self.blocks > 1 else ""
        return f"{self.m} x {self.n}, {how}, {self.stages} stages{shared}"


_TOGETHER, _IN_TURN = True, False

TILES = (
    Tile(128, 256, 4, (1, 1), _TOGETHER, 4.936, 0.5307, 0.1044, 3.563, 4.402),
    Tile(128, 256, 4, (2, 1), _TOGETHER, 6.014, 0.522, 0.0981, 3.722, 4.731),
    Tile(128, 128, 6, (1, 1), _IN_TURN, 4.638, 0.2255, 0.1468, 2.959, 4.966),
    Tile(128, 128, 6, (1, 2), _IN_TURN, 4.804, 0.2605, 0.09857, 3.238, 4.063),
    Tile(128, 128, 6, (2, 1), _IN_TURN, 4.189, 0.2534, 0.1073, 3.833, 5.463),
    Tile(128, 128, 6, (1, 1), _TOGETHER, 4.554, 0.2428, 0.1304, 1.904, 4.906),
    Tile(64, 256, 5, (1, 1), _IN_TURN, 4.903, 0.275, 0.1729, 3.72, 4.283),
    Tile(64, 128, 8, (1, 1), _IN_TURN, 4.459, 0.1085, 0.1697, 1.903, 4.644),
    Tile(64, 128, 8, (2, 1), _IN_TURN, 5.601, 0.1327, 0.08653, 2.496, 3.609),
    Tile(128, 64, 8, (1, 1), _TOGETHER, 5.262, 0.1111, 0.1634, 0.9693, 5.111),
    Tile(64, 64, 12, (1, 1), _IN_TURN, 4.563, 0.08322, 0.1085, 1.365, 4.671),
    Tile(64, 64, 12, (2, 1), _IN_TURN, 4.539, 0.1269, 0.04455, 1.719, 4.714),
)
"""All configurations. Any serves any problem, with the same bits."""


CURVES = {ActivationKind.GELU: (2.5e-4, 3.5e-4), ActivationKind.SILU: (2.15e-4, 2.6e-4)}
"""What an activation takes a multiprocessor for one result, in us: of 16 bits or fewer, and of f32; others nothing.

Measured on an H200 as the difference to the same product without it.
"""


@lru_cache(maxsize=4096)
def ranking(m: int, n: int, k: int, sm_count: int, curve: float = 0.0) -> tuple[tuple[float, Tile], ...]:
    """Return (predicted us, tile) of every configuration, the fastest first; see `Tile.predicted`."""
    predicted = ((tile.predicted(m, n, k, sm_count, curve), tile) for tile in TILES)
    return tuple(sorted(predicted, key=lambda pair: pair[0]))


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: rows that the copy engine can read, and sums that fit in 32 bits.

    Parameters
    ----------
    weight : ElementKind
        s8 or u8; the activation may be either.
    """
    most = (2**31 - 1) // (255 * (128 if weight is ElementKind.S8 else 255))
    return (
        MultipleOf(field="k", divisor=_UNIT),
        Between(field="k", minimum=_UNIT, maximum=most),
    )


ALIGNED = "arrays that do not begin, or whose rows do not begin, at multiples of 16 bytes are served by the next kernel"
"""What the kernels that read through the copy engine tell people."""


def smoothquant(problem: SmoothQuantLinearDescriptor, device: Device, choice: str = "") -> Launch:
    """Launch the product with a static activation scale: one kernel, no scratch.

    Parameters
    ----------
    problem : SmoothQuantLinearDescriptor
        The problem.
    device : Device
        Where it runs.
    choice : str
        The tile; empty for the one that should be the fastest.
    """
    size = problem.m, problem.n, problem.k
    tile, chosen = _cuda_linear.choose(_ranked(size, device, problem.epilogue, problem.output_element), choice)
    scale = (Constant(ElementKind.F32, problem.act_scale), Pointer("act_scale_scratch"))
    tail = _cuda_linear.epilogue(problem, problem.m, problem.n)
    step = _product("smoothquant_linear_warpgroup", tile, size, device, ("act_q", ""), (*scale, *tail))
    flags = tile_flags(tile, problem.activation_element, problem.output_element, problem.epilogue.name)
    return Launch(steps=(step,), flags=flags, notes=(ALIGNED,), **chosen)


def quantized(problem: QuantizedLinearDescriptor, device: Device, choice: str = "") -> Launch:
    """Launch the dynamic quantization of the activation, then the product.

    Parameters
    ----------
    problem : QuantizedLinearDescriptor
        The problem.
    device : Device
        Where it runs.
    choice : str
        The tile; empty for the one that should be the fastest.
    """
    size = problem.m, problem.c_out, problem.k
    tile, chosen = _cuda_linear.choose(_ranked(size, device, problem.epilogue, problem.output), choice)
    tail = _cuda_linear.epilogue(problem, problem.m, problem.c_out)
    codes = ("act_q_scratch", "codes")
    product = _product("quantized_linear_warpgroup", tile, size, device, codes, (*_cuda_linear.SCALES, *tail))
    flags = tile_flags(tile, problem.code_element, problem.output, problem.epilogue.name)
    return _cuda_linear.behind_codes(problem, replace(product, overlaps=True), flags=flags, notes=(ALIGNED,), **chosen)


def _ranked(
    size: tuple[int, int, int], device: Device, epilogue: EpilogueKind, output: ElementKind
) -> tuple[tuple[float, Tile], ...]:
    m, n, k = size
    activation = epilogue.activation
    curve = CURVES[activation][output is ElementKind.F32] if activation in CURVES else 0.0
    return ranking(max(1, m), max(1, n), k, device.sm_count or H200, curve)


def _product(
    entry: str,
    tile: Tile,
    size: tuple[int, int, int],
    device: Device,
    activation: tuple[str, str],
    scale_and_tail: tuple[Parameter, ...],
) -> Step:
    m, n, k = size
    clusters = min(math.prod(tile.grid(m, n)), max(1, (device.sm_count or H200) // tile.blocks))
    name, otherwise = activation
    return Step(
        entry=entry,
        grid=(clusters * tile.blocks, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            TensorMap(name, m, k, tile.m // tile.cluster[1], otherwise=otherwise),
            TensorMap("weight_q", n, k, tile.n // tile.cluster[0]),
            *scale_and_tail,
            Constant(ElementKind.S32, tile.band),
        ),
        shared=tile.shared,
    )


def tile_flags(tile: Tile, code: ElementKind, output: ElementKind, epilogue: str) -> tuple[str, ...]:
    """Return the compiler flags of one configuration.

    Parameters
    ----------
    tile : Tile
        The tile.
    code, output : ElementKind
        Elements of the activation's codes and of the results.
    epilogue : str
        Name of the `EpilogueKind`, as in ``layer.cuh``.
    """
    return (
        f"-DTILE_M={tile.m}",
        f"-DTILE_N={tile.n}",
        f"-DSTAGES={tile.stages}",
        f"-DCLUSTER_M={tile.cluster[0]}",
        f"-DCLUSTER_N={tile.cluster[1]}",
        f"-DCOOPERATIVE={int(tile.together)}",
        f"-DSKUDA_CODE={code}",
        f"-DSKUDA_OUT={output}",
        f"-DSKUDA_EPILOGUE={epilogue}",
    )
