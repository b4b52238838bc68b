"""Launch rule of the kernels of ``gated_amax.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels import nonfinite
from skuda.kernels.launch import (
    ANY_ROWS,
    MOST_ZEROS,
    ZEROS,
    Constant,
    Launch,
    Pointer,
    Step,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.quantize.elementwise_launch import THREADS, WARP, width_of
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.quantize.gated_amax import GatedAmaxProblem
    from skuda.registry.device import Device

_ONE_BLOCK = 512
"""Chunks of a row that one block finishes sooner than several blocks, which have to exchange their maxima."""
_MIN_CHUNKS = 64
"""Fewest chunks of a block if several blocks share a row."""


def gated_amax(problem: GatedAmaxProblem, device: Device) -> Launch:
    """Launch one step that reads every row once: lanes of a warp or a block a row, or several blocks for few rows."""
    if not problem.n:
        return Launch(steps=())
    width = width_of(problem.input_element)
    chunks, bits = -(-problem.d // width), problem.input_element.compute.bits // 8
    zeros = problem.n * (bits + 4)
    lanes, per_block, parts = WARP, 1, 1
    if chunks > _ONE_BLOCK and zeros <= MOST_ZEROS:
        parts = max(1, min(-(-chunks // _MIN_CHUNKS), 2 * device.sm_count // problem.n))
    part = -(-chunks // parts)
    parts = max(1, -(-chunks // max(1, part)))
    if chunks <= WARP:
        lanes = 1 << (max(1, chunks) - 1).bit_length()
        held, threads, per_block = "lanes_1", THREADS, THREADS // lanes
    elif part <= THREADS:
        held, threads = "1", -(-part // WARP) * WARP
    else:
        turns = -(-part // (2 * THREADS))
        held, threads = "2", -(-part // (2 * turns * WARP)) * WARP
    shared = parts > 1
    none = Constant(ElementKind.S64, 0)
    step = Step(
        entry=f"gated_amax_{held}",
        grid=(-(-problem.n // per_block), parts, 1),
        block=(threads, 1, 1),
        parameters=(
            *(strided("gate_up") if problem.fused else strided("gate")),
            *((none, none) if problem.fused else strided("up")),
            *strided("product"),
            *pointers("amax"),
            Pointer(ZEROS) if shared else none,
            *s64(problem.n, problem.d, part * width),
            *s32(lanes),
        ),
    )
    return Launch(
        steps=(step,), scratch=((ZEROS, zeros),) if shared else (), alike=ANY_ROWS, flags=nonfinite.flags(problem)
    )
