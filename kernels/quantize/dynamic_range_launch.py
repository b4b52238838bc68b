"""Launch rules of the kernels of ``dynamic_range.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skuda.kernels.launch import ANY_ROWS, Constant, Launch, Parameter, Step, pointers, s32, s64, strided
from skuda.kernels.quantize.elementwise_launch import (
    MAX_BLOCKS,
    THREADS,
    WARP,
    in_flight_of,
    layout_of,
    walk,
    width_of,
)
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope

if TYPE_CHECKING:
    from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
    from skuda.registry.device import Device

_CHUNKS = 4


def dynamic_range(problem: DynamicRangeQuantizeDescriptor, device: Device) -> Launch:
    """Launch a dynamic-range quantize: one pass where a segment is one run, else ranges, scales and codes."""
    if not math.prod(problem.segment_shape):
        return Launch(steps=())
    if problem.scope is DynamicRangeScope.TENSOR:
        return _three_passes(problem, device, None)
    if problem.scope is DynamicRangeScope.CHANNEL and problem.axis == 1:
        return _three_passes(problem, device, (1, problem.d))
    return _one_pass(problem, device)


def _one_pass(problem: DynamicRangeQuantizeDescriptor, device: Device) -> Launch:
    """Launch one step that reads every segment once, as one run of memory."""
    n, d = problem.data_shape
    inner, segments = problem.group_size or d, math.prod(problem.segment_shape)
    # Two packed groups of odd size share a byte, so their codes are written in pairs once the scales are known.
    share_bytes = problem.output_element.is_packed and inner % 2 == 1 and d > inner
    held, lanes = _held(-(-inner // width_of(problem.input_element)))
    segments_per_block = max(1, THREADS // lanes) if lanes <= WARP else 1
    blocks = -(-segments // segments_per_block)
    step = Step(
        entry=f"dynamic_range_{'lanes_' if lanes <= WARP else ''}{held}",
        grid=(min(blocks, MAX_BLOCKS), -(-blocks // MAX_BLOCKS), 1),
        block=(lanes * segments_per_block, 1, 1),
        parameters=(
            *strided("input", "output"),
            *pointers("scale_out", "zero_point_out"),
            *s64(n, d, inner, segments),
            *s32(max(1, segments // max(1, n)), lanes),
            *_mode(problem),
            *s32(not share_bytes),
        ),
    )
    steps = (step, _codes(problem, device, (inner, segments))) if share_bytes else (step,)
    return Launch(steps=steps, alike=ANY_ROWS)


def _held(chunks: int) -> tuple[int, int]:
    """Return the chunks per thread and the threads per segment; up to 8,192 chunks (128 KiB) are read only once."""
    for held, most in ((1, 2), (4, WARP)):
        lanes = 1 << (max(1, -(-chunks // held)) - 1).bit_length()
        if lanes <= most:
            return held, lanes
    for held, most in ((4, 256), (8, 256), (16, 512)):
        lanes = -(-chunks // (held * WARP)) * WARP
        if lanes <= most:
            return held, lanes
    return 16, 512


def _three_passes(
    problem: DynamicRangeQuantizeDescriptor, device: Device, segmentation: tuple[int, int] | None
) -> Launch:
    """Launch three steps: ranges of parts of every segment, scales, codes."""
    n, d = problem.data_shape
    segments = math.prod(problem.segment_shape)
    width = width_of(problem.input_element)
    if segmentation is None:
        parts = max(1, min(-(-n * d // (width * THREADS * _CHUNKS)), 8 * max(1, device.sm_count)))
        entry, grid = "dynamic_range_whole", (parts, 1, 1)
    else:
        strips = -(-d // (32 * width))
        parts = max(1, min(-(-n // 32), 8 * max(1, device.sm_count) // max(1, strips), 65535))
        entry, grid = "dynamic_range_columns", (strips, parts, 1)
    parameters = (*strided("input"), *pointers("partial"), *s64(n, d))
    ranges = Step(entry=entry, grid=grid, block=(THREADS, 1, 1), parameters=parameters)
    segments_per_block = WARP if segments > 1 else 1
    scales = Step(
        entry="dynamic_range_scales",
        grid=(-(-segments // segments_per_block), 1, 1),
        block=(THREADS, 1, 1),
        parameters=(
            *pointers("partial", "scale_out", "zero_point_out"),
            *s64(parts, segments),
            *s32(segments_per_block),
            *_mode(problem),
            *s32(n * d == 0),
        ),
    )
    scratch = (("partial", 2 * parts * segments * problem.input_element.compute.bits // 8),)
    steps = (ranges, scales, _codes(problem, device, segmentation)) if n * d else (ranges, scales)
    return Launch(steps=steps, scratch=scratch, alike=ANY_ROWS)


def _codes(problem: DynamicRangeQuantizeDescriptor, device: Device, segmentation: tuple[int, int] | None) -> Step:
    """Return the step that writes the codes from finished scales."""
    width, compute = width_of(problem.input_element), problem.input_element.compute
    if segmentation is not None and segmentation[1] == 1:
        segmentation = None
    layout = layout_of(segmentation, width)
    in_flight = in_flight_of(problem.input_element, layout)
    blocks, threads, shape = walk(segmentation, math.prod(problem.data_shape), width, in_flight, device)
    return Step(
        entry=f"dynamic_range_codes{layout}",
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        parameters=(
            *strided("input", "output"),
            *pointers("scale_out"),
            *s32(0),
            Constant(compute, 0.0),
            *pointers("zero_point_out"),
            *s32(0, problem.q_min, problem.q_max),
            # Not the common view, which may join or split rows: segments need the rows of the problem.
            *s64(*problem.data_shape),
            *shape,
        ),
    )


def _mode(problem: DynamicRangeQuantizeDescriptor) -> tuple[Parameter, ...]:
    return s32(problem.mode is DynamicRangeMode.ASYMMETRIC, problem.q_min, problem.q_max)
