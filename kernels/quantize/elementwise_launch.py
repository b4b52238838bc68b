"""Launch rules of the elementwise kernels of the affine family, and how ``walk.cuh`` traverses a shape. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skuda.kernels.launch import (
    ANY_ROWS,
    Columns,
    Constant,
    Launch,
    Number,
    Parameter,
    Pointer,
    Rows,
    Step,
    Which,
    s32,
    s64,
    strided,
)
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.quantize.granularity import AffineProblem
    from skuda.registry.device import Device

THREADS = 256
WARP = 32
CHUNK_BYTES = 16
MAX_BLOCKS = 2**31 - 1
_OF_MANY = 8
"""Chunks that a thread has in flight if there are many: OF_MANY of ``affine.cuh``."""
_RESIDENT = 2
"""Blocks per multiprocessor if threads keep the scales of their columns: as many as the registers allow."""


def elementwise(problem: AffineProblem, device: Device) -> Launch:
    """Launch one elementwise op over all of its data arrays."""
    data = tuple(a.name for a in problem.arguments() if a.shape == problem.data_shape and a.name not in _SCALES)
    floating, segmentation = problem.data_element, problem.granularity.segmentation
    width, numel = width_of(floating), math.prod(problem.data_shape)
    layout, suffix = layout_of(segmentation, width), ""
    in_flight = in_flight_of(floating, layout, len(data) - 1)
    if problem.kernel == "quantize" and in_flight < _OF_MANY and _are_many(numel, segmentation, width, device):
        in_flight, suffix = _OF_MANY, f"_{_OF_MANY}"
    blocks, threads, shape = walk(segmentation, numel, width, in_flight, device)
    step = Step(
        entry=problem.kernel + layout + suffix,
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        parameters=(*strided(*data), *_scale_parameters(problem), Rows(), Columns(), *shape),
    )
    return Launch(steps=(step,) if numel else (), view=data, alike=ANY_ROWS)


_SCALES = ("scale", "zero_point")


def _scale_parameters(problem: AffineProblem) -> list[Parameter]:
    """Return the parameters that the SEGMENTS macro of ``affine.cuh`` declares."""
    names = {argument.name: argument for argument in problem.arguments()}
    compute = problem.data_element.compute
    by_value = names["scale"].is_scalar
    return [
        Pointer("scale"),
        Which("scale"),
        Number("scale", compute) if by_value else Constant(compute, 0.0),
        Pointer("zero_point") if "zero_point" in names else Constant(ElementKind.S64, 0),
        Number("zero_point", ElementKind.S32) if by_value and "zero_point" in names else Constant(ElementKind.S32, 0),
        *s32(getattr(problem, "q_min", 0), getattr(problem, "q_max", 0)),
    ]


def layout_of(segmentation: tuple[int, int] | None, width: int) -> str:
    """Return the suffix of the entry's name, for the position of segments in chunks (`Layout` of ``walk.cuh``)."""
    if segmentation is None:
        return ""
    inner, channels = segmentation
    return "_mixed" if channels > 1 and inner % width else "_runs"


def _are_many(numel: int, segmented: tuple[int, int] | None, width: int, device: Device) -> bool:
    """Return whether a thread gets `_OF_MANY` chunks: there are enough blocks, and runs that fill cache lines."""
    run = (numel if segmented is None else segmented[0]) // width
    return run >= _OF_MANY * 8 and numel // width >= 16 * max(1, device.sm_count) * THREADS * _OF_MANY


def width_of(data: ElementKind) -> int:
    """Return the elements of `data` in a 16-byte chunk."""
    return CHUNK_BYTES * 8 // data.bits


def walk(
    segmented: tuple[int, int] | None, numel: int, width: int, in_flight: int, device: Device
) -> tuple[int, int, tuple[Parameter, ...]]:
    """Return how `walk` of ``walk.cuh`` traverses `numel` elements with `in_flight` chunks of `width` per thread.

    The result is the blocks, the threads of a block, and the parameters of the SHAPE macro of ``affine.cuh`` after rows
    and columns.
    `segmented` is as in `Granularity`.
    """
    inner, channels = segmented or (max(1, numel), 1)
    lanes, threads, parts = _units(inner, width, in_flight) if segmented else (THREADS, THREADS, 0)
    if parts:
        blocks = max(1, min(-(-(numel // inner) * parts * lanes // threads), MAX_BLOCKS))
    else:
        # Number of blocks after which chunks have the same channels again.
        repeats = inner * channels
        period = repeats // math.gcd(repeats, THREADS * width) if channels > 1 and numel else 0
        blocks = _blocks(-(-numel // width), period, in_flight, device)
    divisors = (*_divisor(max(1, parts)), *_divisor(min(max(1, channels), MAX_BLOCKS)))
    return blocks, threads, (*s64(inner, channels), *s32(parts), *divisors, *s32(lanes))


def _units(inner: int, width: int, in_flight: int) -> tuple[int, int, int]:
    """Cut segments of `inner` elements into units; a thread takes `in_flight` chunks of `width` elements of a unit.

    Return the threads that share a unit (a power of two within a warp, or the block), the threads of a block, and the
    units in a segment, 0 if a segment is not whole chunks.
    """
    if inner % width or not inner:
        return THREADS, THREADS, 0
    threads = -(-(inner // width) // in_flight)
    if threads <= WARP:
        return 1 << max(0, threads - 1).bit_length(), THREADS, 1
    parts = -(-threads // THREADS)
    lanes = -(-threads // (parts * WARP)) * WARP
    return lanes, lanes, parts if parts < MAX_BLOCKS else 0


def _divisor(d: int) -> tuple[Parameter, ...]:
    """Return multiplier and shift: (n * multiplier >> 32) >> shift is n // d for every n below 2^31."""
    shift = max(0, (d - 1).bit_length() - 1)
    multiplier = -(-(1 << (32 + shift)) // d) % 2**32  # 0 stands for 2^32, that is for d = 1
    signed = multiplier - 2**32 if multiplier >= 2**31 else multiplier
    return s32(signed, shift)


def in_flight_of(data: ElementKind, layout: str, arrays: int = 1) -> int:
    """Return the chunks that a thread has in flight of one array, or of each of two: InFlight of ``affine.cuh``."""
    return 8 if arrays == 1 and (layout == "_mixed" or data is ElementKind.F64) else 4


def _blocks(chunks: int, period: int, in_flight: int, device: Device) -> int:
    """Return the number of blocks for `chunks`. Kept scales repeat after `period` blocks; 0 if none are kept."""
    if period == 0:
        return max(1, min(-(-chunks // (THREADS * in_flight)), MAX_BLOCKS))
    # Threads keep the scales of their columns in registers: they step by whole periods, or take one chunk each.
    once = max(1, -(-chunks // THREADS))
    resident = _RESIDENT * max(1, device.sm_count)
    return min(once, max(period, min(once // in_flight, resident) // period * period), MAX_BLOCKS)
