"""Where a bench happens: arrays on a device, a clock, and what outputs are compared with."""

from __future__ import annotations

import importlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.registry.op import Case, Op
from skuda.registry.registry import Registry
from skuda.tools.bench.clock import CudaClock, HostClock, Replay
from skuda.tools.bench.formulas import answer as torch_answer
from skuda.tools.bench.formulas import scaled_mm, torch_dtype
from skuda.tools.bench.sensor import Reading, Sensor, median
from skuda.tools.verify.compare import differing, first_of, told
from skuda.tools.verify.trial import answer as reference_answer

_COMPARED = 1 << 20
"""Differing elements that are looked at more closely where some distance is allowed."""


@dataclass(frozen=True)
class Ceiling:
    """A large copy or product whose speed bounds others, or a call whose time does; the best of one name counts.

    `amount` is in bytes moved, or operations; 0 if the time itself is the ceiling. `make` returns the call to time, and
    raises if the device cannot run it. A copy is not timed in a graph, because the driver copies 512 MiB and more much
    slower as part of one.
    """

    name: str
    amount: int
    make: Callable[[], Replay]
    graph: bool = True


class Lab(ABC):
    """What a measurement needs from a device and an array library, with a clock that times calls there."""

    clock: HostClock | CudaClock
    unwatched: str = ""
    """Why no clock and power of the device are read; empty if they are, or if it has none."""
    _answered: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None

    @abstractmethod
    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return random inputs by argument name: arrays, and numbers for scalars."""

    @abstractmethod
    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return arrays for the outputs."""

    @abstractmethod
    def poison(self, arrays: Mapping[str, Any]) -> None:
        """Overwrite every byte with 0xFF, a NaN in every float, so that unwritten elements are detected."""

    @abstractmethod
    def answer(self, op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the expected outputs for some inputs, by output name."""

    @abstractmethod
    def differences(self, got: Any, want: Any, ulps: int | None) -> str:
        """Describe the first element that differs by more than `ulps`, and the count; empty if there is none."""

    def capture(self, call: Replay, *, careful: bool = True) -> Replay:
        """Warm a call up and return a function that repeats it; see `CudaClock.capture`."""
        return self.clock.capture(call, careful=careful)

    def measure(self, replays: Sequence[Replay]) -> list[float]:
        """Run each call in order after a flush of the cache; return the microseconds of each."""
        return self.clock.measure(replays, self.flush)

    @abstractmethod
    def flush(self) -> None:
        """Remove the data of the last call from the device's cache."""

    def mismatch(
        self, op: Op, problem: Descriptor, inputs: Mapping[str, Any], outputs: Mapping[str, Any], ulps: int | None
    ) -> str:
        """Compare every element of the outputs with the expected value; describe the first difference, if any.

        Floats may be `ulps` representable values apart; None allows any distance between finite ones.
        """
        # The answer is kept for all kernels of one problem, because the reference of a large product takes seconds.
        if self._answered is None or self._answered[0] is not inputs:
            self._answered = (inputs, self.answer(op, problem, inputs))
        for name, want in self._answered[1].items():
            found = self.differences(outputs[name], want, ulps)
            if found:
                return f"wrong result: {name}{found}"
        return ""

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return the ceilings of this device; empty if they are not measured."""
        return ()

    def reading(self) -> Reading | None:
        """Return the medians of SM clock and power since the last call of this; None if they are not read."""
        taken = self.clock.readings if isinstance(self.clock, CudaClock) else []
        found = median(taken)
        taken.clear()
        return found

    def tidy(self) -> None:
        """Free the memory of the last problem."""
        self._answered = None


class HostLab(Lab):
    """NumPy arrays on the CPU, with the inputs that the registry's ops draw, and the host's clock."""

    def __init__(self, registry: Registry) -> None:
        self._registry, self.clock = registry, HostClock()

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return random inputs; an argument that may have any shape is flat."""
        op = self._registry.ops[problem.op_name()]
        inputs = draw(op, Case(problem), np.random.default_rng(seed)).inputs
        flat = {a.name for a in problem.arguments() if a.flat}
        return {name: value.reshape(-1) if name in flat else value for name, value in inputs.items()}

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return NumPy arrays."""
        return {a.name: np.empty(_shape(a), storage_dtype(a.elements[0])) for a in _made(problem)}

    def poison(self, arrays: Mapping[str, Any]) -> None:
        """Overwrite every byte."""
        for array in arrays.values():
            array.view(np.uint8).fill(0xFF)

    def flush(self) -> None:
        """Do nothing: a CPU's caches are not flushed."""

    def answer(self, op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run the op's reference."""
        return reference_answer(op, problem, inputs)

    def differences(self, got: Any, want: Any, ulps: int | None) -> str:
        """Compare NumPy arrays."""
        flat, wanted = got.reshape(-1), want.reshape(-1)
        bad = differing(flat, wanted, ulps or 0)
        if not bad.any() or (ulps is None and np.isfinite(flat.astype(np.float64)).all()):
            return ""
        (at,) = first_of(bad)
        return describe(np.unravel_index(at, got.shape), flat, wanted, at, int(bad.sum()), bad.size)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the arrays of a `TorchLab`: bytes of a flush, bytes of a copied array, and M = N = K of products."""

    flushed: int
    copied: int = 1 << 30
    product: int = 8192

    @classmethod
    def of(cls, l2_cache: int) -> Sizes:
        """Return sizes for a device with `l2_cache` bytes of L2 cache, so that a flush replaces all of its content."""
        return cls(max(4 * l2_cache, 1 << 26))


class TorchLab(Lab):
    """Torch tensors on a present CUDA device, or on the CPU; without `sizes`, a flush fits the device's L2 cache.

    Raises `MissingDependency` if torch is not installed, and `InvalidProblem` if torch has no CUDA or does not see the
    device.
    """

    def __init__(self, device: Device, sizes: Sizes | None = None) -> None:
        if find_spec("torch") is None:
            raise MissingDependency(
                "torch, whose arrays and clocks a bench uses,", "pip install torch (a build with CUDA)"
            )
        torch: Any = importlib.import_module("torch")
        l2, ordinal = device.l2_cache, device.ordinal or 0
        if device.processor == "cpu":
            self._place, self.clock = torch.device("cpu"), HostClock()
        else:
            if not torch.cuda.is_available() or torch.cuda.device_count() <= ordinal:
                rule = f"see CUDA device {ordinal}: install a build with CUDA for this driver (https://pytorch.org)"
                raise InvalidProblem("bench", "torch", f"{torch.__version__}, which does not", rule)
            self._place = torch.device("cuda", ordinal)
            torch.cuda.set_device(self._place)
            facts = torch.cuda.get_device_properties(self._place)
            sensor = None
            try:
                sensor = Sensor(f"GPU-{facts.uuid}")
            except (OSError, AttributeError) as error:
                self.unwatched = f"SM clock and power are not read: {error}"
            self.clock = CudaClock(torch.cuda, self._place, sensor)
            l2 = l2 or facts.L2_cache_size
        self._torch, self._sizes = torch, sizes or Sizes.of(l2 or 0)
        self._written = torch.empty(self._sizes.flushed, dtype=torch.uint8, device=self._place)
        self._read = torch.zeros(self._sizes.flushed // 4, dtype=torch.float32, device=self._place)
        self._sum = torch.zeros((), dtype=torch.float32, device=self._place)

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return random inputs."""
        random = self._torch.Generator(self._place).manual_seed(seed)
        roles = (Role.INPUT, Role.SCALE, Role.ZERO_POINT, Role.VALUE)
        return {a.name: self._one(a, random) for a in problem.arguments() if a.role in roles and a.required}

    def _one(self, argument: Argument, random: Any) -> Any:
        """Draw one argument; most data lies within the range of the codes, some outside."""
        torch, element = self._torch, argument.elements[0]
        options = {"dtype": torch_dtype(element), "device": self._place, "generator": random}
        shape = _shape(argument)
        if argument.role is Role.ZERO_POINT or element is ElementKind.S32:
            found = torch.randint(-8, 9, shape, **options)
        elif not element.is_float:
            low, high = (0, 255) if element.is_packed else element.integer_range or (0, 1)
            found = torch.randint(low, high + 1, shape, **options)
        elif "scale" in argument.name:
            found = 0.02 + 0.02 * torch.rand(shape, **options)
        else:
            found = torch.randn(shape, **options)
        return found.item() if argument.is_scalar else found

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return tensors."""
        empty, place = self._torch.empty, self._place
        return {a.name: empty(_shape(a), dtype=torch_dtype(a.elements[0]), device=place) for a in _made(problem)}

    def poison(self, arrays: Mapping[str, Any]) -> None:
        """Overwrite every byte."""
        for array in arrays.values():
            array.view(self._torch.uint8).fill_(0xFF)

    def flush(self) -> None:
        """Write a large array, then read another one.

        A write alone leaves the cache full of modified lines, and the next call pays for their eviction. The read
        replaces them by clean lines.
        """
        self._written.zero_()
        self._torch.sum(self._read, dim=0, out=self._sum)

    def answer(self, op: Op, problem: Descriptor, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Compute the op with torch; without a formula, run the op's reference."""
        torch, wanted = self._torch, torch_answer(problem, inputs)
        if wanted is not None:
            return dict(zip((a.name for a in _made(problem)), wanted, strict=True))
        host = {name: to_numpy(torch, value) for name, value in inputs.items()}
        found = reference_answer(op, problem, host)
        return {name: to_torch(torch, value, self._place) for name, value in found.items()}

    def differences(self, got: Any, want: Any, ulps: int | None) -> str:
        """Compare tensors on their device; only differing elements are copied to the host."""
        torch = self._torch
        want = want.reshape(got.shape)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
        bad = (got.view(bits) != want.view(bits)).reshape(-1)
        count = int(bad.sum())
        if not count or (ulps is None and bool(torch.isfinite(got.double()).all())):
            return ""
        at = bad.nonzero()[:_COMPARED].reshape(-1)
        ours, theirs = (to_numpy(torch, array.reshape(-1)[at]) for array in (got, want))
        far = differing(ours, theirs, ulps or 0)
        if not far.any():
            return ""
        first = int(np.argmax(far))
        where = np.unravel_index(int(at[first]), tuple(got.shape))
        return describe(where, ours, theirs, first, count, math.prod(got.shape))

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return copies, by the driver and by a kernel, because either may be faster, products, and an empty kernel."""
        torch, place, size, copied = self._torch, self._place, self._sizes.product, self._sizes.copied

        def matrix() -> Any:
            return torch.randn((size, size), dtype=torch.bfloat16, device=place)

        def pair() -> tuple[Any, Any]:
            source = torch.ones(copied // 2, dtype=torch.bfloat16, device=place)
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
            return partial(scaled_mm, torch, a, b, torch.ones((), device=place))

        def empty() -> Replay:
            # One thread that looks at the clock twice: the emptiest kernel that every build of torch holds.
            return partial(torch.cuda._sleep, 0)  # noqa: SLF001  it has no public name

        return (
            Ceiling("empty", 0, empty),
            Ceiling("copy_bandwidth", 2 * copied, copy, graph=False),
            Ceiling("copy_bandwidth", 2 * copied, negate),
            Ceiling("bf16", 2 * size**3, bf16),
            Ceiling("fp8", 2 * size**3, fp8),
        )

    def tidy(self) -> None:
        """Free the memory of dropped graphs, and clear the cache of torch.compile, whose size is limited."""
        super().tidy()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        self._torch.cuda.empty_cache()


def describe(where: Sequence[Any], got: Any, want: Any, index: int, count: int, size: int) -> str:
    """Describe a wrong element at `index` of two flat arrays, with its bits; `count` of `size` elements differ."""
    place, at = [int(i) for i in where], (index,)
    return f"{place}: got {told(got, at)}, want {told(want, at)}; {count} of {size} elements differ"


def to_numpy(torch: Any, value: Any) -> Any:
    """Return a NumPy copy of a tensor; a number is returned unchanged."""
    if not hasattr(value, "cpu"):
        return value
    value = value.cpu()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def to_torch(torch: Any, value: Any, place: Any) -> Any:
    """Return a NumPy array as a tensor on a torch device."""
    if value.dtype == storage_dtype(ElementKind.BF16):
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16).to(place)
    return torch.from_numpy(value).to(place)


def _made(problem: Descriptor) -> list[Argument]:
    return [argument for argument in problem.arguments() if argument.role is Role.OUTPUT]


def _shape(argument: Argument) -> tuple[int, ...]:
    return storage_shape(argument.shape, argument.elements[0])
