"""Launch rules of the elementwise affine kernels, and how their SKUs are declared. Pure: nothing here needs a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
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
_CHUNK_BYTES = 16
_IN_FLIGHT = 4
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
    mixed = channels > 1 and inner % width != 0
    numel = math.prod(problem.data_shape)
    parameters: list[Parameter] = [part for a in data for part in (Pointer(a.name), Leading(a.name))]
    parameters += segment_parameters(problem, floating)
    threads = threads_for(inner, width) if channels > 1 and not mixed else THREADS
    parameters += shape_parameters(inner, channels, width, threads)
    step = Step(
        entry=problem.op_name() + ("_mixed" if mixed else ""),
        grid=(blocks_for(-(-numel // width), channels // width if mixed and inner == 1 else 1, device, threads), 1, 1),
        block=(threads, 1, 1),
        parameters=tuple(parameters),
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


def shape_parameters(inner: int, channels: int, width: int, threads: int) -> list[Parameter]:
    """Return the parameters behind the SHAPE macro of ``affine.cuh``; `width` is elements per chunk."""
    chunks = inner // width if inner % width == 0 and inner // width < _MOST_BLOCKS else 0
    return [
        Rows(),
        Columns(),
        Constant(ElementKind.S64, inner),
        Constant(ElementKind.S64, channels),
        Constant(ElementKind.S32, chunks),
        *_divisor(max(1, chunks)),
        *_divisor(min(max(1, channels), _MOST_BLOCKS)),
        Constant(ElementKind.S32, int(chunks > 0 and chunks % (threads * _IN_FLIGHT // 2) == 0)),
    ]


def threads_for(inner: int, width: int) -> int:
    """Return threads per block: fewer where the chunks that a block has in flight then share one segment."""
    chunks = inner // width
    if chunks == 0 or inner % width:
        return THREADS
    return next((n for n in (THREADS, THREADS // 2) if chunks % (n * _IN_FLIGHT // 2) == 0), THREADS)


def _divisor(d: int) -> list[Parameter]:
    """Return multiplier and shift with which (n * multiplier >> 32) >> shift is n // d for every n below 2^31."""
    shift = max(0, (d - 1).bit_length() - 1)
    multiplier = -(-(1 << (32 + shift)) // d) % 2**32  # 0 stands for 2^32, that is for d = 1
    signed = multiplier - 2**32 if multiplier >= 2**31 else multiplier
    return [Constant(ElementKind.S32, signed), Constant(ElementKind.S32, shift)]


def blocks_for(chunks: int, columns: int, device: Device, threads: int = THREADS) -> int:
    """Return the number of blocks for `chunks` 16-byte chunks.

    Parameters
    ----------
    chunks : int
        Chunks of the whole shape.
    columns : int
        Chunks after which the scales repeat, where a thread should come back to the same ones; else 1.
    device : Device
        Where it runs.
    threads : int
        Threads per block.
    """
    enough = max(1, -(-chunks // (threads * _IN_FLIGHT)))
    if columns <= 1:
        return min(enough, _MOST_BLOCKS)
    # Threads that step by a multiple of `columns` keep the scales of their columns in registers.
    period = columns // math.gcd(columns, THREADS)
    resident = 8 * max(1, device.sm_count)
    return min(enough, max(period, resident // period * period))


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
    block = max(THREADS, lanes)
    step = Step(
        entry=f"dynamic_range_{held}",
        grid=(min(-(-segments * lanes // block), _MOST_BLOCKS), 1, 1),
        block=(block, 1, 1) if lanes <= 32 else (lanes, 1, 1),
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
    if lanes > 32:
        step = replace(step, grid=(min(segments, _MOST_BLOCKS), 1, 1))
    steps = (step, _codes(problem, device, inner, segments)) if shared else (step,)
    return Launch(steps=steps if segments else ())


def _held(chunks: int) -> tuple[int, int]:
    """Return chunks a thread holds and threads a segment gets: up to 4,096 chunks (64 KiB) are read once."""
    for held, most in ((1, 8), (2, 32), (4, 512)):
        lanes = 1 << (max(1, -(-chunks // held)) - 1).bit_length()
        if lanes <= most:
            return held, lanes
    return 8, 512


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
        parts = min(blocks_for(-(-n * d // width), 1, device), 8 * max(1, device.sm_count))
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
    scales = Step(
        entry="dynamic_range_scales",
        grid=(max(1, min(-(-segments // THREADS), _MOST_BLOCKS)), 1, 1),
        block=(THREADS, 1, 1),
        parameters=(
            Pointer("partial"),
            Pointer("scale_out"),
            Pointer("zero_point_out"),
            Constant(ElementKind.S64, parts),
            Constant(ElementKind.S64, segments),
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
    mixed = channels > 1 and inner % width != 0
    chunks = -(-math.prod(problem.data_shape) // width)
    return Step(
        entry="dynamic_range_codes" + ("_whole" if channels == 1 else "_mixed" if mixed else ""),
        grid=(blocks_for(chunks, channels // width if mixed and inner == 1 else 1, device), 1, 1),
        block=(THREADS, 1, 1),
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
            *shape_parameters(inner, channels, width, THREADS)[2:],
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
        grid=(min(-(-size // (THREADS * _IN_FLIGHT)), _MOST_BLOCKS), 1, 1),
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
