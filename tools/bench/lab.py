"""Where a bench happens: arrays on a device, a clock, and what outputs are compared with."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from skuda.dispatch.host.arrays import tensor_view
from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import TABLES, CacheProblem
from skuda.kernels.attention.drawn import full_tables
from skuda.kernels.draw import BYTES, draw
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.packed import LEVELS
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.sampling.weights import LogitsProblem
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.registry.op import Case, Op
from skuda.registry.registry import Registry
from skuda.tools.bench.clock import CudaClock, HostClock, Replay
from skuda.tools.bench.rival import scaled_mm, torch_dtype
from skuda.tools.verify.batches import Batch, alone
from skuda.tools.verify.compare import difference, differing
from skuda.tools.verify.problems import axes_of, row_field
from skuda.tools.verify.trial import answer as reference_answer

_ROWS, _SAMPLED_ELEMENTS = 16, 1 << 20
"""Fewest rows of a large output that are compared, and elements: the reference of all would take minutes."""
_SAMPLED = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
"""How the rows of logits are sampled."""
Arrays = Mapping[str, Any]


class Ceiling(NamedTuple):
    """A large copy or product whose speed bounds others, or a call whose time does; the best of one name counts.

    `amount` is in bytes moved, or operations; 0 if the time itself is the ceiling. `make` returns the call to time, and
    raises if the device cannot run it. A copy is not timed in a graph, because the driver copies 512 MiB and more much
    slower as part of one.
    """

    name: str
    amount: int
    make: Callable[[], Replay]
    graph: bool = True


class HostLab:
    """Arrays and a clock: here NumPy arrays on the CPU, inputs drawn by the ops, and the host's clock."""

    clock: HostClock | CudaClock
    _answered: tuple[Arrays, Arrays] | None = None

    def __init__(self, registry: Registry) -> None:
        self._registry, self.clock = registry, HostClock()

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return random inputs by argument name: arrays, flat if any shape will do, and numbers for scalars."""
        op = self._registry.ops[problem.op_name()]
        inputs = draw(op, Case(problem), np.random.default_rng(seed)).inputs
        flat, made = {a.name for a in problem.arguments() if a.flat}, {a.name for a in _made(problem)}
        return {n: value.reshape(-1) if n in flat else value for n, value in inputs.items() if n not in made}

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return arrays for the outputs, and for what is written in place: nothing reads it before."""
        return {a.name: np.empty(_shape(a), storage_dtype(a.elements[0])) for a in _made(problem)}

    def poison(self, arrays: Arrays) -> None:
        """Overwrite every byte with 0xFF, a NaN in every float, so that unwritten elements are detected."""
        for array in arrays.values():
            array.view(np.uint8).fill(0xFF)

    def flush(self) -> None:
        """Remove the data of the last call from the device's cache; a CPU's caches are not flushed."""

    def capture(self, call: Replay, *, careful: bool = True) -> Replay:
        """Warm a call up and return a function that repeats it; see `CudaClock.capture`."""
        return self.clock.capture(call, careful=careful)

    def measure(self, replays: Sequence[Replay]) -> list[float]:
        """Run each call in order after a flush of the cache; return the microseconds of each."""
        return self.clock.measure(replays, self.flush)

    def mismatch(self, op: Op, problem: Descriptor, inputs: Arrays, outputs: Arrays, ulps: int | None) -> str:
        """Compare every element of some outputs with the expected value; describe the first difference, if any.

        Floats may be `ulps` representable values apart; None allows any distance between finite ones.
        """
        # The answer is kept for all kernels of one problem, because the reference of a large product takes seconds.
        if self._answered is None or self._answered[0] is not inputs:
            self._answered = (inputs, self.answer(op, problem, inputs))
        rows = self.sample(problem)
        for name, got in outputs.items():
            want = self._answered[1][name]
            found = self.differences(got if rows is None else got.reshape(-1, *want.shape[1:])[rows], want, ulps)
            if found:
                of = "" if rows is None else f", of {len(rows)} rows that were compared"
                return f"wrong result: {name}{found}{of}"
        return ""

    def sample(self, problem: Descriptor) -> Any:  # noqa: ARG002  other labs look at it
        """Return the rows of the outputs that are compared, places on their first axis; None for all."""
        return None

    def answer(self, op: Op, problem: Descriptor, inputs: Arrays) -> Arrays:
        """Return the expected outputs by name: those of the op's reference, into overwritten arrays."""
        state = {a.name: np.empty(_shape(a), storage_dtype(a.elements[0])) for a in _made(problem, Role.STATE)}
        HostLab.poison(self, state)
        return reference_answer(op, problem, {**inputs, **state})

    def differences(self, got: Any, want: Any, ulps: int | None) -> str:
        """Describe the first element that differs by more than `ulps`, and the count; empty if there is none."""
        want = want.reshape(got.shape)
        bad = differing(got, want, ulps or 0)
        if not bad.any() or (ulps is None and np.isfinite(got.astype(np.float64)).all()):
            return ""
        found = difference("", bad, got, want)
        return f"{list(found['at'])}: got {found['got']}, want {found['want']}; {found['message']}"

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return the ceilings of the device; empty if they are not measured."""
        return ()

    def tidy(self) -> None:
        """Free the memory of the last problem."""
        self._answered = None


class TorchLab(HostLab):
    """Torch tensors on a present CUDA device, or on the CPU.

    `flushed` are the bytes of a flush, 0 for what fits the device's L2 cache, `copied` those of a copied array, and
    `product` is M = N = K of products.
    Raises `MissingDependency` if torch is not installed, and `InvalidProblem` if torch has no CUDA or does not see the
    device.
    """

    def __init__(self, device: Device, flushed: int = 0, copied: int = 1 << 30, product: int = 8192) -> None:
        if find_spec("torch") is None:
            raise MissingDependency("torch, with whose arrays and clocks this measures,", "pip install torch")
        torch: Any = importlib.import_module("torch")
        l2, ordinal = device.l2_cache, device.ordinal or 0
        if device.processor == "cpu":
            self.place, self.clock = torch.device("cpu"), HostClock()
        else:
            if not torch.cuda.is_available() or torch.cuda.device_count() <= ordinal:
                rule = f"see CUDA device {ordinal}: install a build with CUDA for this driver (https://pytorch.org)"
                raise InvalidProblem("bench", "torch", f"{torch.__version__}, which does not", rule)
            self.place = torch.device("cuda", ordinal)
            torch.cuda.set_device(self.place)
            facts = torch.cuda.get_device_properties(self.place)
            self.clock = CudaClock(torch.cuda, self.place)
            l2 = l2 or facts.L2_cache_size
        # A flush replaces the whole content of the L2 cache.
        self._torch, self._copied, self._product = torch, copied, product
        flushed = flushed or max(4 * (l2 or 0), 1 << 26)
        self._written = torch.empty(flushed, dtype=torch.uint8, device=self.place)
        self._read = torch.zeros(flushed // 4, dtype=torch.float32, device=self.place)
        self._sum = torch.zeros((), dtype=torch.float32, device=self.place)

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return random inputs; on a paged cache, sequences of one length that fill it.

        Logits deviate by 4, so that a few tokens have most of the probability; all rows are sampled in the same way.
        """
        random = self._torch.Generator(self.place).manual_seed(seed)
        roles = (Role.INPUT, Role.SCALE, Role.ZERO_POINT, Role.VALUE)
        found = {a.name: self._one(a, random) for a in problem.arguments() if a.role in roles and a.required}
        if isinstance(problem, CacheProblem):
            tables = full_tables(problem, np.random.default_rng(seed))
            found |= {name: self._torch.as_tensor(table, device=self.place) for name, table in tables.items()}
        if isinstance(problem, LinearProblem) and problem.group_size:
            groups = found["weight_q"][..., LEVELS:]  # scale and base, so small that every code fits in s8
            groups[..., ::2] %= 9
            groups[..., 1::2] %= 121
        if isinstance(problem, LogitsProblem):
            found["logits"] *= 4
            for name in _SAMPLED.keys() & found.keys():
                found[name].fill_(_SAMPLED[name])
            if "tokens" in found:
                found["tokens"].random_(problem.v, generator=random)
        return found

    def _one(self, argument: Argument, random: Any) -> Any:
        """Draw one argument; most data lies within the range of the codes, some outside."""
        torch, element, shape = self._torch, argument.elements[0], _shape(argument)
        options = {"dtype": torch_dtype(element), "device": self.place, "generator": random}
        if argument.role is Role.ZERO_POINT or element in (ElementKind.S32, ElementKind.S64):
            found = torch.randint(-8, 9, shape, **options)
        elif not element.is_float:
            low, high = BYTES.get(element) or element.integer_range or (0, 1)
            found = torch.randint(low, high + 1, shape, **options)
        elif "scale" in argument.name:
            found = 0.02 + 0.02 * torch.rand(shape, **options)
        else:
            found = torch.randn(shape, **options)
        return found.item() if argument.is_scalar else found

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return tensors."""
        empty, place = self._torch.empty, self.place
        return {a.name: empty(_shape(a), dtype=torch_dtype(a.elements[0]), device=place) for a in _made(problem)}

    def poison(self, arrays: Arrays) -> None:
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

    def answer(self, op: Op, problem: Descriptor, inputs: Arrays) -> Arrays:
        """Run the op's reference on the host, for the rows that are compared."""
        torch, rows = self._torch, self.sample(problem)
        if rows is not None:
            part = _part(problem, inputs, rows.cpu().numpy())
            taken = {n: torch.from_numpy(at).to(self.place) for n, at in part.picked.items()}
            inputs = {n: value[taken[n]] if n in taken else value for n, value in inputs.items()} | part.tables
            problem = part.problem
        host = {name: value.cpu() if hasattr(value, "cpu") else value for name, value in inputs.items()}
        return super().answer(op, problem, host)

    def sample(self, problem: Descriptor) -> Any:
        """Return some rows, from the first to the last, of a large problem whose rows do not depend on each other."""
        if (place := _rows(problem)) is None:
            return None
        extent, most = _extent(problem, place), max(math.prod(_shape(one)) for one in _made(problem))
        few = (
            _ROWS
            if isinstance(problem, AttentionDescriptor)
            else max(_ROWS, _SAMPLED_ELEMENTS * extent // max(1, most))
        )
        rows = np.linspace(0, extent - 1, few).astype(np.int64)
        return self._torch.from_numpy(rows).to(self.place) if few < extent else None

    def differences(self, got: Any, want: Any, ulps: int | None) -> str:
        """Compare tensors on the host."""
        on_host = [one if isinstance(one, np.ndarray) else tensor_view(one.detach().cpu()) for one in (got, want)]
        return super().differences(on_host[0], on_host[1], ulps)

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return copies, by the driver and by a kernel, because either may be faster, products, and an empty kernel."""
        torch, place, size, copied = self._torch, self.place, self._product, self._copied

        def matrix() -> Any:
            return torch.randn((size, size), dtype=torch.bfloat16, device=place)

        def moving(how: Callable[[Any, Any], Any]) -> Replay:
            source = torch.ones(copied // 2, dtype=torch.bfloat16, device=place)
            return partial(how, source, torch.empty_like(source))

        def fp8() -> Replay:
            a, b = matrix().to(torch.float8_e4m3fn), matrix().to(torch.float8_e4m3fn).T
            one = torch.ones((), device=place)
            return partial(scaled_mm, a, b, one, one)

        return (
            # One thread that looks at the clock twice: the emptiest kernel that every build of torch holds.
            Ceiling("empty", 0, lambda: partial(torch.cuda._sleep, 0)),  # noqa: SLF001  it has no public name
            Ceiling("copy_bandwidth", 2 * copied, lambda: moving(lambda x, y: y.copy_(x)), graph=False),
            Ceiling("copy_bandwidth", 2 * copied, lambda: moving(lambda x, y: torch.neg(x, out=y))),
            Ceiling("bf16", 2 * size**3, lambda: partial(torch.matmul, matrix(), matrix().T)),
            Ceiling("fp8", 2 * size**3, fp8),
        )

    def tidy(self) -> None:
        """Free the memory of dropped graphs, and clear the cache of torch.compile, whose size is limited."""
        super().tidy()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        self._torch.cuda.empty_cache()


def _rows(problem: Descriptor) -> tuple[str, int | None] | None:
    """Return the field that counts independent rows, or elements of flat data; None if rows depend on each other."""
    fields = type(problem).model_fields
    if isinstance(problem, CacheProblem):
        return ("tokens", None) if isinstance(problem, AttentionDescriptor) else None
    name = "numel" if "numel" in fields else row_field(problem)
    return ("shape", 0) if "shape" in fields else (name, None) if name else None


def _extent(problem: Descriptor, place: tuple[str, int | None]) -> int:
    name, index = place
    value = getattr(problem, name)
    return int(value if index is None else value[index])


def _part(problem: Descriptor, inputs: Arrays, rows: Any) -> Batch:
    """Return some rows of a problem as a problem of their own."""
    if isinstance(problem, AttentionDescriptor):
        return alone(problem, {a.name: tensor_view(inputs[a.name].cpu()) for a in TABLES}, rows)
    name, index = place = _rows(problem) or ("", None)
    size = len(rows) if index is None else (len(rows), *getattr(problem, name)[1:])
    names = (name for name, axis in axes_of(problem)[place] if axis == 0)
    return Batch("", problem.model_copy(update={name: size}), dict.fromkeys(names, rows), {})


def _made(problem: Descriptor, *roles: Role) -> list[Argument]:
    return [argument for argument in problem.arguments() if argument.role in (roles or (Role.OUTPUT, Role.STATE))]


def _shape(argument: Argument) -> tuple[int, ...]:
    return storage_shape(argument.shape, argument.elements[0])
