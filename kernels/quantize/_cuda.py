"""Launch rules of the elementwise affine kernels, and how their SKUs are declared. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skuda.kernels.launch import (
    Columns,
    Constant,
    Launch,
    Leading,
    Number,
    Parameter,
    Pointer,
    Rows,
    Step,
    Which,
)
from skuda.kernels.quantize import _problems
from skuda.registry.descriptor import Role
from skuda.registry.elements import ElementKind
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope

if TYPE_CHECKING:
    from skuda.dispatch.device import Device
    from skuda.kernels.elementwise.fill import FillDescriptor
    from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor

ELEMENTWISE = "skuda.kernels.quantize._cuda:elementwise"
"""The launch rule of the elementwise ops, as their SKUs name it."""

THREADS = 256
_WARP = 32
_CHUNK_BYTES = 16
_PASSES = 4
_CHUNKS = 4
_MOST_BLOCKS = 2**31 - 1


def segmentation(problem: _problems.AffineProblem) -> tuple[int, int]:
    """Return (inner, channels): element e of the flattened data belongs to segment (e // inner) % channels."""
    if isinstance(problem, _problems.PerChannel):
        return math.prod(problem.shape[problem.axis + 1 :]), problem.channels
    if isinstance(problem, _problems.PerToken):
        return problem.d, problem.n
    if isinstance(problem, _problems.PerGroup):
        return problem.group_size, problem.outer_size * problem.num_groups
    return max(1, math.prod(problem.data_shape)), 1


def elementwise(problem: _problems.AffineProblem, device: Device) -> Launch:
    """Launch one elementwise op over all of its data arrays.

    Parameters
    ----------
    problem : AffineProblem
        Any affine problem that is not a reduction.
    device : Device
        Where it runs.
    """
    arguments = {argument.name: argument for argument in problem.arguments()}
    data = tuple(a for a in arguments.values() if a.role in (Role.INPUT, Role.OUTPUT) and a.shape == problem.data_shape)
    data = tuple(a for a in data if a.name not in ("scale", "zero_point"))
    floating = next(a.elements[0] for a in data if a.elements[0].is_float)
    inner, channels = segmentation(problem)
    width = _CHUNK_BYTES * 8 // floating.bits
    numel = math.prod(problem.data_shape)
    # A backward pass of two inputs holds chunks of both.
    in_flight = in_flight_of(floating) // (len(data) - 1)
    whole = not isinstance(problem, (_problems.PerChannel, _problems.PerToken, _problems.PerGroup))
    segmented = None if whole else (inner, channels)
    blocks, threads, shape = walk(segmented, numel, width, in_flight, device)
    step = Step(
        entry=problem.op_name() + ("_mixed" if channels > 1 and inner % width else ""),
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        parameters=(
            *_data_pointers(*(a.name for a in data)),
            *segment_parameters(problem, floating),
            Rows(),
            Columns(),
            *shape,
        ),
    )
    return Launch(steps=(step,) if numel else (), view=tuple(a.name for a in data))


def segment_parameters(problem: _problems.AffineProblem, data: ElementKind) -> list[Parameter]:
    """Return the parameters behind the SEGMENTS macro of ``affine.cuh``."""
    names = {argument.name: argument for argument in problem.arguments()}
    compute = data.compute
    by_value = names["scale"].is_scalar
    return [
        Pointer("scale"),
        Which("scale"),
        Number("scale", compute) if by_value else Constant(compute, 0.0),
        Pointer("zero_point") if "zero_point" in names else Constant(ElementKind.S64, 0),
        Number("zero_point", ElementKind.S32) if by_value and "zero_point" in names else Constant(ElementKind.S32, 0),
        Constant(ElementKind.S32, getattr(problem, "q_min", 0)),
        Constant(ElementKind.S32, getattr(problem, "q_max", 0)),
    ]


def walk(
    segmented: tuple[int, int] | None, numel: int, width: int, in_flight: int, device: Device
) -> tuple[int, int, list[Parameter]]:
    """Return how `walk` of ``walk.cuh`` goes over a shape.

    Parameters
    ----------
    segmented : (int, int) or None
        What `segmentation` gives; None where the entry is for one segment only.
    numel : int
        Elements of the shape.
    width : int
        Elements of a 16-byte chunk.
    in_flight : int
        Chunks that a thread has in flight.
    device : Device
        Where it runs.

    Returns
    -------
    (int, int, list of Parameter)
        Blocks, threads of a block, and the parameters of the SHAPE macro of ``affine.cuh`` behind rows and columns.
    """
    inner, channels = segmented or (max(1, numel), 1)
    lanes, threads, parts = units_of(inner, width, in_flight) if segmented else (THREADS, THREADS, 0)
    if parts:
        enough = -(-(numel // inner) * parts * lanes // threads)
        # Where a thread has few chunks in flight for their size, setting segments up pays off over a few units.
        passes = max(1, min(_PASSES, enough // (16 * max(1, device.sm_count)))) if width >= 4 * in_flight else 1
        blocks = max(1, min(-(-enough // passes), _MOST_BLOCKS))
    else:
        period = period_of(inner * channels, width) if channels > 1 and numel else 0
        blocks = blocks_for(-(-numel // width), period, in_flight, device)
    shape = [
        Constant(ElementKind.S64, inner),
        Constant(ElementKind.S64, channels),
        Constant(ElementKind.S32, parts),
        *_divisor(max(1, parts)),
        *_divisor(min(max(1, channels), _MOST_BLOCKS)),
        Constant(ElementKind.S32, lanes),
    ]
    return blocks, threads, shape


def units_of(inner: int, width: int, in_flight: int) -> tuple[int, int, int]:
    """Return how segments are cut into units, of which a thread takes `in_flight` chunks.

    Parameters
    ----------
    inner : int
        Elements of a segment.
    width : int
        Elements of a 16-byte chunk.
    in_flight : int
        Chunks that a thread has in flight.

    Returns
    -------
    (int, int, int)
        Threads that share a unit (a power of two within a warp, or the block), threads of a block, and units in a
        segment, 0 where that is not whole chunks.
    """
    if inner % width or not inner:
        return THREADS, THREADS, 0
    threads = -(-(inner // width) // in_flight)
    if threads <= _WARP:
        return 1 << max(0, threads - 1).bit_length(), THREADS, 1
    parts = -(-threads // THREADS)
    lanes = -(-threads // (parts * _WARP)) * _WARP
    return lanes, lanes, parts if parts < _MOST_BLOCKS else 0


def _divisor(d: int) -> list[Parameter]:
    """Return multiplier and shift with which (n * multiplier >> 32) >> shift is n // d for every n below 2^31."""
    shift = max(0, (d - 1).bit_length() - 1)
    multiplier = -(-(1 << (32 + shift)) // d) % 2**32  # 0 stands for 2^32, that is for d = 1
    signed = multiplier - 2**32 if multiplier >= 2**31 else multiplier
    return [Constant(ElementKind.S32, signed), Constant(ElementKind.S32, shift)]


def in_flight_of(data: ElementKind) -> int:
    """Return how many chunks of `data` a thread of an elementwise op has in flight: IN_FLIGHT of ``affine.cuh``."""
    return 8 if data is ElementKind.F64 else 4


def period_of(elements: int, width: int) -> int:
    """Return blocks after which chunks of `width` elements meet the same of `elements` again."""
    return elements // math.gcd(elements, THREADS * width)


def blocks_for(chunks: int, period: int, in_flight: int, device: Device) -> int:
    """Return the number of blocks for `chunks` 16-byte chunks.

    Parameters
    ----------
    chunks : int
        Chunks of the whole shape.
    period : int
        Blocks after which the scales repeat, where a thread should come back to the same ones; else 0.
    in_flight : int
        Chunks that a thread has in flight.
    device : Device
        Where it runs.
    """
    if period == 0:
        return max(1, min(-(-chunks // (THREADS * in_flight)), _MOST_BLOCKS))
    # Threads keep the scales of their columns in registers: they step by whole periods, or take one chunk each.
    once = max(1, -(-chunks // THREADS))
    resident = 8 * max(1, device.sm_count)
    return min(once, max(period, min(once // in_flight, resident) // period * period), _MOST_BLOCKS)


def dynamic_range(problem: DynamicRangeQuantizeDescriptor, device: Device) -> Launch:
    """Launch a dynamic-range quantize: one pass where a segment is one run, else ranges, scales and codes.

    Parameters
    ----------
    problem : DynamicRangeQuantizeDescriptor
        The problem.
    device : Device
        Where it runs.
    """
    n, d = problem.data_shape
    whole = problem.scope is DynamicRangeScope.TENSOR
    spread = problem.scope is DynamicRangeScope.CHANNEL and problem.axis == 1
    inner = {DynamicRangeScope.TENSOR: n * d, DynamicRangeScope.GROUP: problem.group_size or 1}.get(problem.scope, d)
    segments = math.prod(problem.segment_shape)
    mode: list[Parameter] = [
        Constant(ElementKind.S32, int(problem.mode is DynamicRangeMode.ASYMMETRIC)),
        Constant(ElementKind.S32, problem.q_min),
        Constant(ElementKind.S32, problem.q_max),
    ]
    if whole or spread:
        return _by_parts(problem, device, mode, (1, segments) if spread else (max(1, inner), 1))
    # Two groups of odd size share a byte: their codes are written from finished scales, a pair at a time.
    shared = problem.output_element.is_packed and inner % 2 == 1 and d > inner
    width = _CHUNK_BYTES * 8 // problem.input_element.bits
    held, lanes = _held(-(-inner // width))
    together = max(1, THREADS // lanes) if lanes <= _WARP else 1  # segments of one block
    blocks = -(-segments // together)
    step = Step(
        entry=f"dynamic_range_{'lanes_' if lanes <= _WARP else ''}{held}",
        grid=(min(blocks, _MOST_BLOCKS), -(-blocks // _MOST_BLOCKS), 1),
        block=(lanes * together, 1, 1),
        parameters=(
            *_data_pointers("input", "output"),
            Pointer("scale_out"),
            Pointer("zero_point_out"),
            *_matrix(problem),
            Constant(ElementKind.S64, inner),
            Constant(ElementKind.S64, segments),
            Constant(ElementKind.S32, max(1, segments // max(1, n))),
            Constant(ElementKind.S32, lanes),
            *mode,
            Constant(ElementKind.S32, int(not shared)),
        ),
    )
    steps = (step, _codes(problem, device, inner, segments)) if shared else (step,)
    return Launch(steps=steps if segments else ())


def _held(chunks: int) -> tuple[int, int]:
    """Return chunks a thread holds and threads a segment gets: up to 8,192 chunks (128 KiB) are read once."""
    for held, most in ((1, 2), (4, _WARP)):
        lanes = 1 << (max(1, -(-chunks // held)) - 1).bit_length()
        if lanes <= most:
            return held, lanes
    for held, most in ((4, 256), (8, 256), (16, 512)):
        lanes = -(-chunks // (held * _WARP)) * _WARP
        if lanes <= most:
            return held, lanes
    return 16, 512


def _matrix(problem: DynamicRangeQuantizeDescriptor) -> tuple[Parameter, ...]:
    """Return n and d: segments need rows as they are, so that no longer or shorter ones are made of them."""
    return tuple(Constant(ElementKind.S64, size) for size in problem.data_shape)


def _data_pointers(*names: str) -> tuple[Parameter, ...]:
    return tuple(part for name in names for part in (Pointer(name), Leading(name)))


def _by_parts(
    problem: DynamicRangeQuantizeDescriptor, device: Device, mode: list[Parameter], segmented: tuple[int, int]
) -> Launch:
    """Ranges of parts, then scales, then codes."""
    n, d = problem.data_shape
    inner, segments = segmented
    width = _CHUNK_BYTES * 8 // problem.input_element.bits
    compute = problem.input_element.compute
    if segments == 1 and problem.scope is DynamicRangeScope.TENSOR:
        parts = max(1, min(-(-n * d // (width * THREADS * _CHUNKS)), 8 * max(1, device.sm_count)))
        entry, grid = "dynamic_range_whole", (parts, 1, 1)
    else:
        strips = -(-d // (32 * width))
        parts = max(1, min(-(-n // 32), 8 * max(1, device.sm_count) // max(1, strips), 65535))
        entry, grid = "dynamic_range_columns", (strips, parts, 1)
    ranges = Step(
        entry=entry,
        grid=grid,
        block=(THREADS, 1, 1),
        parameters=(*_data_pointers("input"), Pointer("partial"), *_matrix(problem)),
    )
    together = _WARP if segments > 1 else 1
    scales = Step(
        entry="dynamic_range_scales",
        grid=(-(-segments // together), 1, 1),
        block=(THREADS, 1, 1),
        parameters=(
            Pointer("partial"),
            Pointer("scale_out"),
            Pointer("zero_point_out"),
            Constant(ElementKind.S64, parts),
            Constant(ElementKind.S64, segments),
            Constant(ElementKind.S32, together),
            *mode,
            Constant(ElementKind.S32, int(n * d == 0)),
        ),
    )
    steps = (ranges, scales, _codes(problem, device, inner, segments)) if n * d else (ranges, scales)
    scratch = (("partial", 2 * parts * segments * compute.bits // 8),)
    return Launch(steps=steps if segments else (), scratch=scratch)


def _codes(problem: DynamicRangeQuantizeDescriptor, device: Device, inner: int, channels: int) -> Step:
    width = _CHUNK_BYTES * 8 // problem.input_element.bits
    compute = problem.input_element.compute
    numel, in_flight = math.prod(problem.data_shape), in_flight_of(problem.input_element)
    blocks, threads, shape = walk((inner, channels) if channels > 1 else None, numel, width, in_flight, device)
    road = "_whole" if channels == 1 else "_mixed" if inner % width else ""
    return Step(
        entry=f"dynamic_range_codes{road}",
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        parameters=(
            *_data_pointers("input", "output"),
            Pointer("scale_out"),
            Constant(ElementKind.S32, 0),
            Constant(compute, 0.0),
            Pointer("zero_point_out"),
            Constant(ElementKind.S32, 0),
            Constant(ElementKind.S32, problem.q_min),
            Constant(ElementKind.S32, problem.q_max),
            *_matrix(problem),
            *shape,
        ),
    )


def fill(problem: FillDescriptor, device: Device) -> Launch:  # noqa: ARG001  every launch rule has this signature
    """Launch a fill.

    Parameters
    ----------
    problem : FillDescriptor
        The problem.
    device : Device
        Where it runs.
    """
    size = max(1, problem.numel * problem.output_element.bits // 8 // _CHUNK_BYTES)
    step = Step(
        entry="fill",
        grid=(min(-(-size // (THREADS * _CHUNKS)), _MOST_BLOCKS), 1, 1),
        block=(THREADS, 1, 1),
        parameters=(
            *_data_pointers("output"),
            Pointer("value"),
            Number("value", ElementKind.F64),
            Rows(),
            Columns(),
        ),
    )
    return Launch(steps=(step,) if problem.numel else (), view=("output",))
