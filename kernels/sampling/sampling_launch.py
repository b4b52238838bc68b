"""Launch rules of the kernels of sampling. Pure: nothing here needs a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skuda.kernels.launch import ANY_ROWS, Launch, Parameter, Step, pointers, s32, s64, strided
from skuda.registry.elements import ElementKind

if TYPE_CHECKING:
    from skuda.kernels.sampling.argmax import ArgmaxDescriptor
    from skuda.kernels.sampling.log_softmax_at import LogSoftmaxAtDescriptor
    from skuda.kernels.sampling.sample import SampleDescriptor
    from skuda.kernels.sampling.weights import LogitsProblem
    from skuda.registry.device import Device

_WARP = 32
_THREADS = 256
"""Threads of a block that takes a part of a row."""
_ROW_THREADS = 1024
"""Threads of a block that takes a whole row."""


def log_softmax_at(problem: LogSoftmaxAtDescriptor, device: Device) -> Launch:
    """Launch three steps: maxima and sums of parts of rows, then the results of every row."""
    temperature: tuple[Parameter, ...] = pointers("temperature") if problem.has_temperature else s64(0)
    parameters = (
        *strided("logits"),
        *temperature,
        *strided("tokens"),
        *s32(_wide(problem)),
        *pointers("row_maxima", "row_sums"),
        *strided("logprob"),
        *pointers("entropy"),
        *s32(problem.v, problem.parts, problem.t),
    )
    threads = min(_THREADS, -(-max(problem.t, 1) // _WARP) * _WARP)
    last = _step(device, "log_softmax_at", problem.n, threads, parameters)
    return _launch(problem, _maxima(problem, device, temperature), _sums(problem, device, temperature), last)


def argmax(problem: ArgmaxDescriptor, device: Device) -> Launch:
    """Launch two steps: maxima of parts of rows, then of rows."""
    parameters: tuple[Parameter, ...] = (*pointers("row_maxima", "token"), *s32(_wide(problem), problem.parts))
    last = _step(device, "argmax", problem.n, _WARP, parameters)
    return _launch(problem, _maxima(problem, device, s64(0)), last)


def sample(problem: SampleDescriptor, device: Device) -> Launch:
    """Launch three steps: maxima and sums of parts of rows, then the token of every row.

    A block takes a whole row where tokens may be left out: it reads the row as often as the kernel says.
    """
    temperature = pointers("temperature")
    filtered = problem.has_top_k or problem.has_top_p
    parameters = (
        *strided("logits"),
        *temperature,
        *(pointers("top_k") if problem.has_top_k else s64(0)),
        *(pointers("top_p") if problem.has_top_p else s64(0)),
        *pointers("seed", "sequence", "position", "row_maxima", "row_sums", "token"),
        *s32(_wide(problem), problem.v, problem.parts),
    )
    entry, threads = ("sample_some", _ROW_THREADS) if filtered else ("sample_all", _THREADS)
    last = _step(device, entry, problem.n, threads, parameters)
    return _launch(problem, _maxima(problem, device, temperature), _sums(problem, device, temperature), last)


def _launch(problem: LogitsProblem, *steps: Step) -> Launch:
    """Return steps whose blocks leave the maxima and sums of parts of rows in scratch memory."""
    parts = problem.n * max(problem.parts, 1)
    needs = (("row_maxima", 8 * parts * _THREADS // _WARP), ("row_sums", 16 * parts))
    used = {parameter for step in steps for parameter in step.parameters}
    return Launch(
        steps=tuple(step for step in steps if 0 not in step.grid),
        scratch=tuple(need for need in needs if pointers(need[0])[0] in used and problem.n),
        alike=ANY_ROWS,
    )


def _maxima(problem: LogitsProblem, device: Device, temperature: tuple[Parameter, ...]) -> Step:
    parameters = (*strided("logits"), *temperature, *pointers("row_maxima"), *s32(problem.v, problem.parts))
    return _step(device, "row_maxima", problem.n * problem.parts, _THREADS, parameters)


def _sums(problem: LogitsProblem, device: Device, temperature: tuple[Parameter, ...]) -> Step:
    arrays = pointers("row_maxima", "row_sums")
    parameters = (*strided("logits"), *temperature, *arrays, *s32(problem.v, problem.parts))
    return _step(device, "row_sums", problem.n * problem.parts, _THREADS, parameters)


def _step(device: Device, entry: str, blocks: int, threads: int, parameters: tuple[Parameter, ...]) -> Step:
    overlaps = device.overlaps_launches
    return Step(entry=entry, grid=(blocks, 1, 1), block=(threads, 1, 1), parameters=parameters, overlaps=overlaps)


def _wide(problem: LogitsProblem) -> bool:
    """Return whether token ids have 64 bits."""
    return problem.token_element is ElementKind.S64
