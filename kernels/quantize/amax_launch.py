"""Launch rules of the kernels of ``amax.cu`` and ``amax_quantize.cu``. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels import nonfinite
from skuda.kernels.launch import ANY_ROWS, Launch, Parameter, Step, pointers, s32, s64, strided
from skuda.kernels.quantize.elementwise_launch import THREADS, WARP, width_of

if TYPE_CHECKING:
    from skuda.kernels.quantize.amax import AmaxDescriptor
    from skuda.kernels.quantize.amax_quantize import AmaxQuantizeDescriptor
    from skuda.registry.device import Device

_CHUNKS = 4
"""Chunks that a thread has in flight."""
_MAX_THREADS = 512
_FEW_THREADS = 64
_MAX_PARTS = 65_535


def amax(problem: AmaxDescriptor, device: Device) -> Launch:  # noqa: ARG001  every launch rule has this signature
    """Launch one step that reads every row once: by some lanes of a warp, or by a block."""
    parameters = (*strided("input"), *pointers("output"), *s64(problem.n, problem.d))
    return _by_rows(problem, parameters, _MAX_THREADS, 1)._replace(flags=nonfinite.flags(problem))


def amax_quantize(problem: AmaxQuantizeDescriptor, device: Device) -> Launch:
    """Launch one step whose blocks share the parts of a long row."""
    threads, held = THREADS, _CHUNKS * width_of(problem.input_element)
    if problem.n * -(-problem.d // (held * threads)) < device.sm_count:
        threads = _FEW_THREADS
    parts = max(1, min(-(-problem.d // (held * threads)), _MAX_PARTS))
    parameters = (
        *strided("input"),
        *pointers("amax"),
        *strided("output"),
        *pointers("scale_out"),
        *s64(problem.n, problem.d),
    )
    return _by_rows(problem, parameters, threads, parts, *s32(problem.q_min, problem.q_max))


def _by_rows(
    problem: AmaxDescriptor | AmaxQuantizeDescriptor,
    parameters: tuple[Parameter, ...],
    most_threads: int,
    parts: int,
    *bounds: Parameter,
) -> Launch:
    """Launch lanes of a warp for each short row, or a column of the grid for each long one."""
    if not problem.n:
        return Launch(steps=())
    wanted = max(1, -(-problem.d // (_CHUNKS * width_of(problem.input_element))))
    lanes = 1 << (wanted - 1).bit_length()
    if lanes <= WARP:
        entry, threads, rows, parts = "lanes", THREADS, THREADS // lanes, 1
    else:
        entry, threads, rows = "block", min(-(-wanted // WARP) * WARP, most_threads), 1
    step = Step(
        entry=f"{problem.kernel}_{entry}",
        grid=(-(-problem.n // rows), parts, 1),
        block=(threads, 1, 1),
        parameters=(*parameters, *s32(lanes), *bounds),
    )
    return Launch(steps=(step,), alike=ANY_ROWS)
