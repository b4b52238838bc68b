"""Where a bench happens: arrays on a device, graphs of one call each, a flushed L2 cache, and a clock."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from skuda.dispatch.device import Device
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.registry.op import Op
from skuda.tools.bench_formulas import answer as torch_answer
from skuda.tools.bench_formulas import torch_dtype
from skuda.tools.placing import differing, told
from skuda.tools.trial import answer as reference_answer

Replay = Callable[[], object]
_COPIED, _SIZE = 1 << 30, 8192
_COMPARED = 1 << 20
"""Differing elements that are looked at more closely where some distance is allowed."""


@dataclass(frozen=True)
class Ceiling:
    """Something large whose speed bounds others; of several by one name the fastest counts.

    Attributes
    ----------
    name : str
        ``copy_bandwidth``, ``bf16`` or ``fp8``.
    amount : int
        Bytes moved, or operations.
    make : callable
        Returns what is timed; raises where the device cannot do it.
    graph : bool
        Whether it is timed in a graph. A copy is not: as part of one the driver copies 512 MiB and more much slower.
    """

    name: str
    amount: int
    make: Callable[[], Replay]
    graph: bool = True


class Lab(Protocol):
    """What a bench needs of a device and an array library."""

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return fresh random inputs by argument name: arrays, and numbers for scalars."""

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return arrays for the outputs."""

    def poison(self, arrays: Mapping[str, Any]) -> None:
        """Overwrite every byte, so that what is not written shows."""

    def capture(self, call: Callable[[], object], *, careful: bool = True) -> Replay:
        """Warm a call up and return what does it again at no cost to the host.

        Parameters
        ----------
        call : callable
            What to run.
        careful : bool
            Whether to run it once more before, to see that it does not wait for the device.

        Raises
        ------
        Exception
            Whatever the call raises, also where it waits for the device.
        """

    def measure(self, replays: Sequence[Replay]) -> list[float]:
        """Run each in order behind a cache flushed clean; return the device's microseconds for each."""

    def mismatch(
        self, op: Op, problem: Descriptor, inputs: Mapping[str, Any], outputs: Mapping[str, Any], ulps: int | None
    ) -> str:
        """Compare outputs with what they must be; say the first difference, or nothing.

        Parameters
        ----------
        op : Op
            The op.
        problem : Descriptor
            The problem.
        inputs, outputs : mapping of str to array
            What it was run on and what it gave.
        ulps : int or None
            How far apart floats may be, in representable values; None for any distance.
        """

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return what bounds everything else on this device."""

    def tidy(self) -> None:
        """Give back what the last case took."""


def flush_bytes(l2_cache: int) -> int:
    """Return how much a flush writes, and reads: nothing else is left in the cache after it.

    Parameters
    ----------
    l2_cache : int
        Bytes of the L2 cache.
    """
    return max(4 * l2_cache, 1 << 26)


class TorchLab:
    """Torch tensors on a CUDA device, timed by its events around replays of CUDA graphs.

    Parameters
    ----------
    device : Device
        A CUDA device that is here.

    Raises
    ------
    MissingDependency
        Where torch is not installed.
    InvalidProblem
        Where it has no CUDA, or does not see the device.
    """

    _answered: tuple[Mapping[str, Any], tuple[Any, ...]] | None = None

    def __init__(self, device: Device) -> None:
        if find_spec("torch") is None:
            raise MissingDependency(
                "torch, whose arrays and clocks a bench uses,", "pip install torch (a build with CUDA)"
            )
        torch: Any = importlib.import_module("torch")
        ordinal = device.ordinal or 0
        if not torch.cuda.is_available() or torch.cuda.device_count() <= ordinal:
            rule = f"see CUDA device {ordinal}: install a build with CUDA for this driver (https://pytorch.org)"
            raise InvalidProblem("bench", "torch", f"{torch.__version__}, which does not", rule)
        self._torch = torch
        self._place = torch.device("cuda", ordinal)
        torch.cuda.set_device(self._place)
        self._stream = torch.cuda.Stream(self._place)
        l2 = device.l2_cache or torch.cuda.get_device_properties(self._place).L2_cache_size
        self._written = torch.empty(flush_bytes(l2), dtype=torch.uint8, device=self._place)
        self._read = torch.zeros(flush_bytes(l2) // 4, dtype=torch.float32, device=self._place)
        self._sum = torch.zeros((), dtype=torch.float32, device=self._place)

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return fresh random inputs by argument name."""
        random = self._torch.Generator(self._place).manual_seed(seed)
        roles = (Role.INPUT, Role.SCALE, Role.ZERO_POINT, Role.VALUE)
        return {a.name: self._one(a, random) for a in problem.arguments() if a.role in roles and a.required}

    def _one(self, argument: Argument, random: Any) -> Any:
        """Draw one argument: most data lies within the codes' range, a little outside."""
        torch, element = self._torch, argument.elements[0]
        shape = storage_shape(argument.shape, element)
        dtype, place = torch_dtype(element), self._place
        if argument.role is Role.ZERO_POINT or element is ElementKind.S32:
            found = torch.randint(-8, 9, shape, dtype=dtype, device=place, generator=random)
        elif not element.is_float:
            low, high = (0, 255) if element.is_packed else element.integer_range or (0, 1)
            found = torch.randint(low, high + 1, shape, dtype=dtype, device=place, generator=random)
        elif "scale" in argument.name:
            found = 0.02 + 0.02 * torch.rand(shape, dtype=dtype, device=place, generator=random)
        else:
            found = torch.randn(shape, dtype=dtype, device=place, generator=random)
        if not argument.is_scalar:
            return found
        return found.item()

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return arrays for the outputs."""
        empty, made = self._torch.empty, [a for a in problem.arguments() if a.role is Role.OUTPUT]
        shapes = {a.name: storage_shape(a.shape, a.elements[0]) for a in made}
        return {a.name: empty(shapes[a.name], dtype=torch_dtype(a.elements[0]), device=self._place) for a in made}

    def poison(self, arrays: Mapping[str, Any]) -> None:
        """Overwrite every byte: NaN in every float."""
        for array in arrays.values():
            array.view(self._torch.uint8).fill_(0xFF)

    def capture(self, call: Callable[[], object], *, careful: bool = True) -> Replay:
        """Warm a call up and capture it in a graph."""
        torch, stream = self._torch, self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            stream.synchronize()
            if careful:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    call()
                except RuntimeError as error:
                    if "synchroniz" not in str(error):
                        raise
                    raise RuntimeError(f"it waits for the device, so no graph can hold it: {error}") from error
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                    stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                kept = call()
        torch.cuda.synchronize()

        # The graph knows addresses only: what the call holds has to live as long.
        def replay(_kept: object = (call, kept)) -> None:
            graph.replay()

        return replay

    def measure(self, replays: Sequence[Replay]) -> list[float]:
        """Run each behind a cache flushed clean; the flush keeps the device behind the host."""
        cuda = self._torch.cuda
        # What was enqueued on other streams is done before, poison above all.
        cuda.synchronize()
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in replays]
        with cuda.stream(self._stream):
            for replay, (start, end) in zip(replays, events, strict=True):
                self._flush()
                start.record()
                replay()
                end.record()
        cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def _flush(self) -> None:
        """Write something large, then read something as large.

        A write alone leaves the cache full of lines that have yet to go to memory, and whatever runs next evicts them
        and is charged for it. What the read leaves is clean.
        """
        self._written.zero_()
        self._torch.sum(self._read, dim=0, out=self._sum)

    def mismatch(
        self, op: Op, problem: Descriptor, inputs: Mapping[str, Any], outputs: Mapping[str, Any], ulps: int | None
    ) -> str:
        """Compare every element with torch's own arithmetic, or with the reference where there is no formula."""
        torch, wanted = self._torch, self._wanted(op, problem, inputs)
        made = [a for a in problem.arguments() if a.role is Role.OUTPUT]
        for argument, want in zip(made, wanted, strict=True):
            got = outputs[argument.name]
            want = want.reshape(got.shape)  # noqa: PLW2901  seen in the shape of the output
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
            bad = (got.view(bits) != want.view(bits)).reshape(-1)
            count = int(bad.sum())
            if not count or (ulps is None and bool(torch.isfinite(got.double()).all())):
                continue
            at = bad.nonzero()[:_COMPARED].reshape(-1)
            pair = [_host(torch, array.reshape(-1)[at]) for array in (got, want)]
            far = differing(pair[0], pair[1], ulps or 0)
            if far.any():
                first = int(np.argmax(far))
                where = tuple(int(i) for i in np.unravel_index(int(at[first]), tuple(got.shape)))
                return describe_mismatch(argument.name, where, pair[0], pair[1], first, count, math.prod(got.shape))
        return ""

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return copies, by the driver and by a kernel, which may be the faster one; and products in bf16 and fp8."""
        torch, place, n = self._torch, self._place, _SIZE

        def matrix() -> Any:
            return torch.randn((n, n), dtype=torch.bfloat16, device=place)

        def pair() -> tuple[Any, Any]:
            source = torch.ones(_COPIED // 2, dtype=torch.bfloat16, device=place)
            return source, torch.empty_like(source)

        def copy() -> Replay:
            source, target = pair()
            return lambda: target.copy_(source)

        def negate() -> Replay:
            source, target = pair()
            return lambda: torch.neg(source, out=target)

        def bf16() -> Replay:
            a, b = matrix(), matrix().T
            return lambda: a @ b

        def fp8() -> Replay:
            a, b = matrix().to(torch.float8_e4m3fn), matrix().to(torch.float8_e4m3fn).T
            one = torch.ones((), device=place)
            how = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
            return lambda: torch._scaled_mm(a, b, **how)  # noqa: SLF001  torch's fp8 product has no public name

        operations = 2 * n**3
        return (
            Ceiling("copy_bandwidth", 2 * _COPIED, copy, graph=False),
            Ceiling("copy_bandwidth", 2 * _COPIED, negate),
            Ceiling("bf16", operations, bf16),
            Ceiling("fp8", operations, fp8),
        )

    def _wanted(self, op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        # One for all that are compared with it: the reference of a large product takes seconds.
        if self._answered is None or self._answered[0] is not inputs:
            torch, wanted = self._torch, torch_answer(problem, inputs)
            if wanted is None:
                host = {name: _host(torch, value) for name, value in inputs.items()}
                found = reference_answer(op, problem, host).values()
                wanted = tuple(_device(torch, value, self._place) for value in found)
            self._answered = (inputs, wanted)
        return self._answered[1]

    def tidy(self) -> None:
        """Give back the memory of dropped graphs, and what torch.compile remembers, which ends at some limit."""
        self._answered = None
        if find_spec("torch._dynamo") is not None:
            importlib.import_module("torch._dynamo").reset()
        self._torch.cuda.empty_cache()


def describe_mismatch(name: str, where: tuple[int, ...], got: Any, want: Any, index: int, count: int, size: int) -> str:
    """Say where an output is wrong first, with bits on both sides.

    Parameters
    ----------
    name : str
        The output.
    where : tuple of int
        Its first wrong coordinate.
    got, want : array
        Elements, one of which is told.
    index : int
        Which one.
    count, size : int
        Elements that differ, of how many.
    """
    said = f"got {told(got, (index,))}, want {told(want, (index,))}"
    return f"wrong result: {name}{list(where)}: {said}; {count} of {size} elements differ"


def _host(torch: Any, value: Any) -> Any:
    """Return a NumPy copy of a tensor; numbers as they are."""
    if not hasattr(value, "cpu"):
        return value
    value = value.cpu()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def _device(torch: Any, value: Any, place: Any) -> Any:
    if value.dtype == storage_dtype(ElementKind.BF16):
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).to(place)
    return torch.from_numpy(value).to(place)
