"""Tiles of the mma.sync product (``mma.cuh``): a cost model that ranks them, and the launch rule. Pure: needs no GPU.

The costs are fitted to times of an H200. On other cards only the order of the predicted times is meant to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from skuda.kernels.launch import Choice, Launch, Step
from skuda.kernels.linear import parameters
from skuda.kernels.linear.expanded import behind_unpacking
from skuda.kernels.linear.problem import LinearProblem, longest_sum
from skuda.kernels.linear.strategies import Strategy
from skuda.registry.arch import ArchSku
from skuda.registry.constraints import Between, Constraint, MultipleOf
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.registry.device import Device

_REGISTERS, _UNIT = 65_536, 16
_RESERVED = 1024  # bytes of shared memory that the system reserves per block


@dataclass(frozen=True, slots=True)
class MmaTile:
    """One of the tiles that ``mma.cuh`` names.

    Attributes
    ----------
    rows, columns : int
        Rows and columns of outputs of a block.
    block_k : int
        Bytes of K in a stage.
    warps : (int, int, int)
        Warps along rows, columns and within a stage.
    stages : int
        Stages in shared memory.
    blocks : int
        Blocks per multiprocessor that the registers allow.
    """

    rows: int
    columns: int
    block_k: int
    warps: tuple[int, int, int]
    stages: int
    blocks: int

    @property
    def name(self) -> str:
        """The name that ``-DSKUDA_TILE`` takes."""
        return f"t{self.rows}x{self.columns}x{self.block_k}s{self.stages}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        down, across, within = self.warps
        return 32 * down * across * within

    def __str__(self) -> str:
        return (
            f"{self.rows} x {self.columns}, {self.stages} stages of {self.block_k} bytes of k, {self.threads} threads"
        )

    def grid(self, m: int, n: int) -> int:
        """Return the number of blocks that cover m x n results."""
        return -(-m // self.rows) * -(-n // self.columns)

    def shared(self, *, zero_points: bool) -> int:
        """Return the bytes of dynamic shared memory of a block."""
        edge = self.rows + self.columns
        return edge * self.block_k * self.stages + (4 * self.warps[2] * edge if zero_points else 0)


TILES = (
    MmaTile(256, 128, 64, (4, 2, 1), 4, 1),
    MmaTile(128, 128, 128, (2, 4, 1), 3, 2),
    MmaTile(128, 128, 64, (2, 2, 1), 4, 2),
    MmaTile(128, 64, 128, (4, 2, 1), 4, 2),
    MmaTile(64, 128, 128, (2, 4, 1), 4, 2),
    MmaTile(64, 64, 128, (2, 2, 1), 4, 3),
    MmaTile(64, 64, 128, (2, 2, 2), 6, 2),
    MmaTile(64, 32, 128, (2, 1, 2), 6, 3),
    MmaTile(32, 64, 128, (1, 2, 2), 6, 2),
    MmaTile(32, 32, 128, (2, 1, 2), 6, 4),
    MmaTile(16, 128, 128, (1, 4, 2), 6, 1),
    MmaTile(16, 32, 128, (1, 2, 2), 8, 3),
)
"""The tiles named in ``mma.cuh``."""


# What a multiprocessor of an H200 does in a microsecond: products, bytes of shared memory, bytes from L2, and bytes
# shifted into place if rows are not whole units. All of these overlap, except for a part, which is smaller if several
# blocks share the multiprocessor.
_PRODUCTS, _SHARED, _FROM_L2, _SHIFTED = 4.126e6, 2.783e5, 1.339e5, 3.939e4
_APART, _ALONE, _HIDING = 0.0444, 0.34, 0.716
# Products and shared memory of other generations relative to that, according to their data sheets.
_RELATIVE = {(8, 0): (0.63, 0.83), (8, 6): (0.4, 1.0), (8, 9): (0.6, 1.45), (9, 0): (1.0, 1.0), (12, 0): (0.57, 1.4)}
_MEMORY = 0.729  # part of the peak bandwidth that is reached
_LATENCY, _SHIFTED_LATENCY = 1.095, 2.065  # us from the start of a copy to its use, without and with shifting
_LAUNCH, _WAVE, _OUTPUT = 5.99, 0.828, 1.65e-4  # us of a launch, of a wave of blocks, of an output


def _microseconds(size: tuple[int, int, int], device: Device, tile: MmaTile, resident: int, *, aligned: bool) -> float:
    """Predict the time in us of a product with `tile`; `resident` of its blocks fit on a multiprocessor."""
    m, n, k = size
    capability = device.compute_capability or (9, 0)
    rate, shared_rate = _RELATIVE[max(known for known in _RELATIVE if known <= max(capability, (8, 0)))]
    down, across, _ = tile.warps
    outputs, edge = tile.rows * tile.columns, tile.rows + tile.columns
    fragments = tile.rows * across + tile.columns * down
    stages = tile.stages if aligned else tile.stages * tile.block_k // (tile.block_k + 16)
    parts = (
        outputs / (_PRODUCTS * rate),
        edge / _FROM_L2,
        (fragments + edge) / (_SHARED * shared_rate),
    )

    def wave(blocks: int) -> float:
        step = (blocks + _ALONE) * (max(parts) + _APART * (sum(parts) - max(parts)))
        if not aligned:
            step += blocks * edge / (_SHIFTED * rate) * max(1.0, 512 / (tile.threads * blocks)) ** _HIDING
        latency = (_LATENCY if aligned else _SHIFTED_LATENCY) / (stages - 1)
        return -(-k // tile.block_k) * max(tile.block_k * step, latency) + _WAVE + blocks * outputs * _OUTPUT

    grid = tile.grid(m, n)
    sms = max(1, device.sm_count)
    full, rest = divmod(grid, sms * resident)
    computed = full * wave(resident) + (wave(-(-rest // sms)) if rest else 0.0)
    moved = (m * k + n * k + 2 * m * n) / max(1.0, _MEMORY * device.memory_bandwidth / 1e6)
    return _LAUNCH + max(computed, moved) + 0.05 * min(computed, moved)


@lru_cache(maxsize=4096)
def ranking(
    m: int, n: int, k: int, device: Device, *, zero_points: bool = False, aligned: bool | None = None
) -> tuple[tuple[float, MmaTile], ...]:
    """Return (predicted us, tile) of every tile that fits into a multiprocessor, fastest first.

    Parameters
    ----------
    m, n, k : int
        Rows, columns and inner size of the product, all at least 1.
    device : Device
        The device, of compute capability 8.0 or later.
    zero_points : bool
        Whether sums of codes are needed beside the product.
    aligned : bool or None
        Whether addresses, leading strides and K are multiples of 16; None where only K is known. It changes which
        tile is the fastest; every tile is correct.
    """
    if aligned is None:
        aligned = k % 16 == 0
    found = []
    for tile in TILES:
        shared = tile.shared(zero_points=zero_points)
        if shared <= device.shared_memory:
            blocks = min(tile.blocks, (device.shared_memory + _RESERVED) // (shared + _RESERVED))
            found.append((_microseconds((m, n, k), device, tile, blocks, aligned=aligned), tile))
    return tuple(sorted(found, key=lambda pair: pair[0]))


def constraints(weight: ElementKind) -> tuple[Constraint, ...]:
    """Return what the kernel requires: sums that fit in 32 bits, and whole units of 16-bit codes.

    `weight` is s8, u8 or s16.
    """
    limit = Between(field="k", minimum=1, maximum=longest_sum(weight))
    return (limit, MultipleOf(field="k_of_halves", divisor=_UNIT))


STRATEGY = Strategy(
    "mma",
    __name__,
    ArchSku.SM_80,
    constraints,
    "tensor cores of any card since Ampere; every alignment and zero point",
    wide=True,
)


@lru_cache(maxsize=4096)
def _ranked(
    m: int,
    n: int,
    k: int,
    device: Device,
    zero_points: bool,  # noqa: FBT001  private
) -> tuple[tuple[MmaTile, ...], tuple[Choice, ...]]:
    return parameters.ranked(ranking(m, n, k, device, zero_points=zero_points))


def launch(problem: LinearProblem, device: Device, choice: str = "") -> Launch:
    """Launch the product, after the quantization of a dynamic activation."""
    (m, n, k), zero_points = problem.sizes, problem.has_zero_points
    m, n = m * problem.code_element.halves, n * problem.weight_code.halves  # halves are rows of the operands
    tile, chosen = parameters.choose(*_ranked(max(1, m), max(1, n), k, device, zero_points), choice)
    product = Step(
        entry=f"{problem.op_name()}_mma",
        grid=(tile.grid(m, n), 1, 1),
        block=(tile.threads, 1, 1),
        parameters=(*parameters.activation_parameters(problem), *parameters.layer_parameters(problem)),
        shared=tile.shared(zero_points=zero_points),
    )
    flags = (
        f"-DSKUDA_TILE={tile.name}",
        f"-DSKUDA_ZERO_POINTS={int(zero_points)}",
        f"-DSKUDA_CODE={problem.code_element}",
        f"-DSKUDA_OUT={problem.output}",
    )
    aligned = ("act_q_scratch" if problem.dynamic else "act_q", "weight_q") if problem.code_element.is_split else ()
    return parameters.launch_product(problem, product, flags=flags, aligned=aligned, **chosen)


expanded = behind_unpacking(launch)
