"""The launch rule of the kernels of ``norm.cuh``. Pure: nothing here needs a GPU."""

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
from skuda.kernels.quantize.elementwise_launch import THREADS, WARP
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.quantize.norm import NormProblem
    from skuda.registry.device import Device

_OCTET = 8
_OCTETS = 4
"""Octets of 8 elements that a thread holds, unless the name of the entry has another number."""
_MAX_THREADS = 512
_THREADS_AT_ONCE = {2: 1536, 4: 1024, 8: 512, 16: 256}
"""About how many threads the registers of a multiprocessor allow, by the 16-byte chunks that each thread holds."""


def norm(problem: NormProblem, device: Device) -> Launch:
    """Launch one step that reads every row once, or several times if it exceeds the registers of a block."""
    if not problem.n or not (problem.d or problem.is_dynamic):
        return Launch(steps=())
    entry, lanes, threads = _geometry(problem, max(1, device.sm_count))
    rows_per_block, ahead = threads // lanes, 0
    if entry.isdigit():  # a row is held by a block
        ahead = _ahead(problem.n, int(entry) * problem.input_element.bits // 16, threads, device)
    step = Step(
        entry=f"{problem.kernel}_{entry}",
        grid=(-(-problem.n // rows_per_block), 1, 1),
        block=(threads, 1, 1),
        parameters=_parameters(problem, ahead, lanes),
        overlaps=device.overlaps_launches,
    )
    return Launch(steps=(step,), alike=ANY_ROWS, flags=nonfinite.flags(problem))


def _geometry(problem: NormProblem, multiprocessors: int) -> tuple[str, int, int]:
    """Return the end of the entry's name, the threads that share a row, and the threads of a block.

    Few rows are spread over many threads. Many rows keep every multiprocessor busy anyway; then more octets per thread
    save instructions, because each thread also computes the factor and the scale.
    """
    octets = -(-problem.d // _OCTET)
    if octets <= _OCTETS * WARP:
        lanes = _power(-(-octets // _OCTETS))
        # With few rows, every warp gets a multiprocessor of its own if there are enough of them.
        return "lanes", lanes, THREADS if problem.n * lanes >= 4 * THREADS * multiprocessors else WARP
    threads, many = _power(-(-octets // 2)), problem.n > 2 * multiprocessors
    if threads <= (_MAX_THREADS if not many else 0 if problem.centred else THREADS):
        return "2", threads, threads
    threads = _power(-(-octets // 8))
    if problem.input_element.bits == 16 and 2 * WARP <= threads <= THREADS and many and not problem.centred:
        return "8", threads, threads
    threads = _power(-(-octets // _OCTETS))
    most = THREADS if problem.input_element is ElementKind.F64 else _MAX_THREADS
    return ("4", threads, threads) if threads <= most else ("long", THREADS, THREADS)


def _ahead(rows: int, held: int, threads: int, device: Device) -> int:
    """Return how many rows ahead a block prefetches a row into L2; 0 if there are few `rows`.

    That is about the number of rows in flight at the same time. A block has `threads` that hold `held` chunks of 16
    bytes each.
    """
    at_once = max(1, _THREADS_AT_ONCE[held] // threads) * max(1, device.sm_count)
    return at_once if rows > 2 * at_once else 0


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (max(1, count) - 1).bit_length()


def _parameters(problem: NormProblem, ahead: int, lanes: int) -> tuple[Parameter, ...]:
    """Return the parameters that the NORM_PARAMETERS macro of ``norm.cuh`` declares."""
    compute, names = problem.input_element.compute, {argument.name for argument in problem.arguments()}

    def rows(name: str) -> tuple[Parameter, ...]:
        return strided(name) if name in names else s64(0, 0)

    def vector(name: str) -> tuple[Parameter, ...]:
        return pointers(name) if name in names else s64(0)

    scale: tuple[Parameter, ...] = (*s64(0), *s32(0), Constant(compute, 0.0), *s64(0), *s32(0))
    if not problem.is_dynamic:
        scale = (Pointer("scale"), Which("scale"), Number("scale", compute))
        scale += (Pointer("zero_point"), Number("zero_point", ElementKind.S32))
    return (
        *rows("input"),
        *rows("residual"),
        *vector("weight"),
        *vector("bias"),
        *rows("output"),
        *vector("scale_out"),
        *rows("residual_out"),
        *rows("normalized_out"),
        *scale,
        *s32(problem.q_min, problem.q_max),
        Constant(compute, problem.eps),
        *s64(problem.n, problem.d, ahead),
        *s32(lanes),
    )
