"""Launch rules of the kernels of ``gated.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels import nonfinite
from skuda.kernels.launch import (
    ANY_ROWS,
    Constant,
    Launch,
    Number,
    Parameter,
    Pointer,
    Step,
    Which,
    pointers,
    s32,
    s64,
    strided,
)
from skuda.kernels.quantize.elementwise_launch import MAX_BLOCKS, THREADS, WARP, width_of
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import Scaling

if TYPE_CHECKING:
    from skuda.kernels.quantize.gated import GatedProblem
    from skuda.registry.device import Device

_MAX_PARTS = 65535
_MANY = 264
"""With more rows than these, fewer threads share a row."""


def gated(problem: GatedProblem, device: Device) -> Launch:
    """Launch a gated activation and quantize: one step that reads every row as one run of memory."""
    if problem.n == 0 or (problem.d == 0 and problem.scaling is Scaling.STATIC):
        return Launch(steps=())
    chunks = -(-problem.d // width_of(problem.input_element))
    step = _ranged(problem, chunks) if problem.scaling is Scaling.DYNAMIC else _scaled(problem, chunks, device.sm_count)
    return Launch(
        steps=(step._replace(overlaps=device.overlaps_launches),), alike=ANY_ROWS, flags=nonfinite.flags(problem)
    )


def _ranged(problem: GatedProblem, chunks: int) -> Step:
    """Return a step of one group of threads per row."""
    heavy = problem.curve == "gelu" and problem.input_element is ElementKind.F16
    held, lanes = _held(chunks, 256 if heavy else 448, many=problem.n > _MANY)
    short = chunks <= WARP
    per_block = THREADS // lanes if short else 1
    blocks = -(-problem.n // per_block)
    return Step(
        entry=f"gated_{'lanes_' if short else ''}{held}",
        grid=(min(blocks, MAX_BLOCKS), -(-blocks // MAX_BLOCKS), 1),
        block=(lanes * per_block, 1, 1),
        parameters=(
            *_rows(problem),
            *pointers("scale_out"),
            *s32(lanes, problem.q_min, problem.q_max),
        ),
    )


def _held(chunks: int, most_of_4: int, *, many: bool) -> tuple[int, int]:
    """Return the chunks per thread and the threads per row; up to 4,096 chunks (64 KiB of y) are read only once.

    `most_of_4` is the largest number of threads whose registers hold 4 chunks each: MOST_OF_4 of ``gated.cu``. Few rows
    are spread over more threads. `many` rows keep every multiprocessor busy, and small blocks then wait less.
    """
    if chunks <= WARP:
        return 1, 1 << (max(1, chunks) - 1).bit_length()
    for held, most in ((2, 127 if many else 256), (4, most_of_4), (8, 512)):
        lanes = -(-chunks // (held * WARP)) * WARP
        if lanes <= most:
            return held, lanes
    return 8, 512


def _scaled(problem: GatedProblem, chunks: int, sm_count: int) -> Step:
    """Return a step of thread groups for parts of rows. With few rows the groups are small, one a multiprocessor."""
    short = chunks <= WARP
    lanes = 1 << (max(1, chunks) - 1).bit_length() if short else min(-(-chunks // (2 * WARP)) * WARP, THREADS)
    while not short and lanes > WARP and problem.n * -(-chunks // (2 * lanes)) < sm_count:
        lanes -= WARP
    parts = 1 if short else min(-(-chunks // (2 * lanes)), _MAX_PARTS)
    per_block = THREADS // lanes if short else 1
    compute = problem.input_element.compute
    return Step(
        entry="scaled_lanes_1" if short else "scaled_2",
        grid=(-(-problem.n // per_block), parts, 1),
        block=(lanes * per_block, 1, 1),
        parameters=(
            *_rows(problem),
            *(Pointer("scale"), Which("scale"), Number("scale", compute)),
            *(Pointer("zero_point"), Number("zero_point", ElementKind.S32)),
            *s32(problem.q_min, problem.q_max, lanes),
        ),
    )


def _rows(problem: GatedProblem) -> tuple[Parameter, ...]:
    """Return the parameters that the ROWS_PARAMETERS macro of ``gated.cu`` declares."""
    absent = (Constant(ElementKind.S64, 0), Constant(ElementKind.S64, 0))
    return (
        *(strided("gate_up") if problem.fused else strided("gate")),
        *(absent if problem.fused else strided("up")),
        *strided("output"),
        *(strided("product") if problem.has_product else absent),
        *s64(problem.n, problem.d),
    )
