"""A plug-in backend with planted faults: kernels and runners that are wrong in one way each.

`FAULTS` is the table: the kernel that has the fault, the check that must fail, and what the failure must say. Every
fault is right on most inputs, as a real one is.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.values import spread
from skuda.registry import BackendSpec, InvalidProblem, KernelSku

OPS = {op.name: op for op in built_in_ops()}
REGISTRY = built_in_registry()
BASES = {
    "tensor": "quantize_per_tensor.f32-s8.plain",
    "token": "quantize_per_token.f32-s8.plain",
    "channel": "quantize_per_channel.f32-s8.plain",
    "group": "quantize_per_group.f32-s8.plain",
    "fake": "fake_quantize_per_token.f32.plain",
    "half": "fake_quantize.bf16.plain",
    "mask": "fake_quantize_backward.f32.plain",
    "decoded": "dequantize_per_token.f32-s8.plain",
    "halved": "dequantize_per_tensor.f16-s8.plain",
    "slope": "quantize_per_token_backward.f32.plain",
    "range": "dynamic_range.f32-s8.plain",
    "linear": "quantized_linear.f32-s8.rcr-identity",
    "relu": "quantized_linear.f32-s8.rcr-bias_relu",
    "gelu": "quantized_linear.f32-s8.rcr-bias_gelu",
    "smooth": "smoothquant_linear.f32-s8.rcr-identity",
    "requantized": "smoothquant_linear.s8-s8.rcr-identity",
    "shifted": "scaled_linear.f32-u8.rcr-bias.",
}
"""The kernels that the faults are planted in, by short names."""


class Fault(NamedTuple):
    """A planted fault: its kernel, one of `BASES`; the check that must fail; a pattern of what the failure says."""

    base: str
    check: str
    kernel: Callable[..., None]
    runner: type[HostRunner] = HostRunner
    says: str = ""
    max_ulp: int = 0


FAULTS: dict[str, Fault] = {}


class Faulty(NumpyBackend):
    """Runs the kernels of `FAULTS` by name."""

    spec = BackendSpec(name="faulty", processor="cpu")

    def prepare(self, sku: KernelSku, problem: Any, device: Any) -> HostRunner:
        """Return the fault's runner over its kernel."""
        fault = FAULTS.get(sku.variant, Fault("", "", right))
        return fault.runner(problem, fault.kernel)


def sku_of(name: str, base: str = "") -> KernelSku:
    """Return the kernel with a fault, or, with another name, a right one over a base."""
    fault = FAULTS.get(name, Fault(base, "", right))
    (sku,) = (s for s in REGISTRY if s.backend == "numpy" and f".{BASES[fault.base]}" in s.id)
    guarantee = sku.precision_guarantee.model_copy(update={"max_ulp": fault.max_ulp})
    changes = {"backend": "faulty", "variant": name, "source": __name__, "entry_point": "right", "summary": "wrong"}
    return sku.model_copy(update={**changes, "precision_guarantee": guarantee})


def dispatcher_of(*skus: KernelSku) -> Dispatcher:
    """Return a dispatcher with the built-in kernels and these."""
    return Dispatcher(REGISTRY.register(Faulty.spec, *skus, origin="faulty 1.0"), backends=[Faulty(), NumpyBackend()])


def right(problem: Any, **arrays: Any) -> None:
    """Do what the op means."""
    OPS[problem.op_name()].reference(problem, **arrays)


def spoil(output: Any, at: int = -1) -> None:
    """Change one element of an output."""
    if output.size:
        where = np.unravel_index(at % output.size, output.shape)
        output[where] = 1 if output[where] == 0 else 0


# --- arrays that are misread -----------------------------------------------------------------------------------------


def inner(array: Any) -> int:
    """Return the inner stride of a dense array, but stay inside of one that is reversed."""
    return array.itemsize if array.strides[-1] > 0 else array.strides[-1]


def packed(array: Any) -> Any:
    """See an array's memory as if its elements were dense."""
    dense = [inner(array) * int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim)]
    return as_strided(array, array.shape, dense)


def in_memory_order(array: Any) -> Any:
    return array.ravel(order="K").reshape(array.shape)


def rounded_down(array: Any) -> Any:
    """See an array at the multiple of 16 bytes before it."""
    off = array.ctypes.data % 16
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data - off)
    return np.ndarray(array.shape, array.dtype, memory) if array.flags.c_contiguous and off else array


MISREAD: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    "inner_stride_ignored": ("token", "strided", "input", lambda x: as_strided(x, strides=(x.strides[0], inner(x)))),
    "row_stride_ignored": ("token", "wide", "input", lambda x: as_strided(x, strides=(4 * x.shape[1], x.strides[1]))),
    "memory_order_taken": ("token", "transposed", "input", in_memory_order),
    "negative_stride_turned": ("token", "reversed", "input", lambda x: x[:, ::-1] if x.strides[1] < 0 else x),
    "output_stride_ignored": ("token", "strided", "output", lambda y: as_strided(y, strides=(y.strides[0], inner(y)))),
    "scale_stride_ignored": ("token", "strided", "scale", packed),
    "weight_taken_as_dense": ("linear", "strided|transposed", "weight_q", packed),
    "address_rounded_down": ("smooth", "misaligned|crooked", "act_q", rounded_down),
    "flat_data_in_memory_order": ("tensor", "transposed|crooked|wide|strided", "input", in_memory_order),
    "codes_read_as_signed": ("shifted", "", "weight_q", lambda w: np.minimum(w, 127)),
    "zero_point_of_the_first_row": ("shifted", "", "weight_zero_point", lambda z: z if z is None else 0 * z + z[:1]),
    "narrow_bias_misread": ("shifted", "", "bias", lambda b: b if b.dtype == np.float32 else b * 2),
    "last_group_takes_the_scale_before": ("group", "", "scale", lambda s: np.concatenate((s[:, :-1], s[:, -2:-1]), 1)
                                          if s.shape[1] > 1 else s),
}  # fmt: skip


def misread(problem: Any, *, argument: str, change: Callable[[Any], Any], **arrays: Any) -> None:
    right(problem, **{**arrays, argument: change(arrays[argument])})


FAULTS |= {
    name: Fault(base, "meaning", partial(misread, argument=argument, change=change), says=says)
    for name, (base, says, argument, change) in MISREAD.items()
}

# --- wrong for some sizes --------------------------------------------------------------------------------------------

SIZES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "beyond_4096_k": ("linear", lambda p: p.k > 4096),
    "beyond_65536_k": ("smooth", lambda p: p.k > 65536),
    "from_131071_k": ("smooth", lambda p: p.k >= 131071),
    "beyond_512_channels": ("linear", lambda p: p.c_out > 512),
    "beyond_65535_rows": ("linear", lambda p: p.m > 65535),
    "for_long_aligned_k": ("smooth", lambda p: p.k > 8192 and p.k % 128 == 0),
    "where_k_ends_at_3": ("linear", lambda p: p.k > 16 and p.k % 16 == 3),
    "beyond_2048_columns": ("range", lambda p: p.d > 2048),
    "between_1024_and_2048_columns": ("token", lambda p: 1024 < p.d <= 2048),
    "beyond_65535_tokens": ("token", lambda p: p.n > 65535),
    "beyond_2_to_17_elements": ("tensor", lambda p: p.numel > 1 << 17),
    "beyond_2_to_20_elements": ("half", lambda p: p.numel > 1 << 20),
    "beyond_512_groups": ("group", lambda p: p.axis_size // p.group_size > 512),
    "for_one_column": ("token", lambda p: p.d == 1),
    "for_another_axis_than_the_last": ("channel", lambda p: p.axis != len(p.shape) - 1),
}


def wrong_where(problem: Any, *, wrong: Callable[[Any], bool], **arrays: Any) -> None:
    right(problem, **arrays)
    if wrong(problem):
        spoil(arrays["output"])


FAULTS |= {
    f"wrong_{name}": Fault(base, "meaning", partial(wrong_where, wrong=wrong)) for name, (base, wrong) in SIZES.items()
}


# --- arithmetic ------------------------------------------------------------------------------------------------------


def in_f32(a: Any, w: Any) -> Any:
    total = np.zeros((len(a), w.shape[1]), np.float32)
    for start in range(0, a.shape[1], 1024):  # each part is exact
        total += (a[:, start : start + 1024] @ w[start : start + 1024]).astype(np.float32)
    return total


SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "sums_in_f32": in_f32,
    "sums_saturate_at_24_bits": lambda a, w: np.clip(a @ w, -(2**24), 2**24),
    "sums_wrap_at_32_bits": lambda a, w: (a @ w).astype(np.int32),
}


def summed(problem: Any, *, total: Callable[[Any, Any], Any], **arrays: Any) -> None:
    """Write `smoothquant_linear` over s8 with a sum of products of its own; problems of other kinds are right."""
    right(problem, **arrays)
    if problem.output_element == "f32" and not (
        problem.has_weight_zero_point or problem.act_zero_point or not problem.k
    ):
        with np.errstate(all="ignore"):
            scale = np.float32(problem.act_scale) * arrays["weight_scale"].astype(np.float32)
            a, w = arrays["act_q"].astype(np.int64), arrays["weight_q"].astype(np.int64).T
            arrays["output"][...] = scale * total(a, w).astype(np.float32)


FAULTS |= {name: Fault("smooth", "meaning", partial(summed, total=total)) for name, total in SUMS.items()}


def steps(quotient: Any) -> Any:
    return np.nan_to_num(np.rint(quotient).astype(np.float64), nan=0, posinf=np.inf, neginf=-np.inf)


def half_away(quotient: Any) -> Any:
    wide = quotient.astype(np.float64)
    return np.nan_to_num(np.trunc(wide + np.copysign(0.5, wide)), nan=0, posinf=np.inf, neginf=-np.inf)


def by_reciprocal(x: Any, s: Any, z: Any) -> Any:
    return steps(x * (1 / s)) + z


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "ignores_the_zero_point": lambda x, s, z: steps(x / s),
    "takes_the_zero_point_as_a_magnitude": lambda x, s, z: steps(x / s) + abs(z),
    "rounds_half_away_from_zero": lambda x, s, z: half_away(x / s) + z,
    "clamps_before_the_zero_point": lambda x, s, z: np.clip(steps(x / s), -128, 127) + z,
    "nan_becomes_the_least_code": lambda x, s, z: np.where(np.isnan(x / s), -128, steps(x / s) + z),
    "flushes_subnormals": lambda x, s, z: steps(np.where(abs(x) < np.finfo(np.float32).tiny, 0, x) / s) + z,
    "takes_the_magnitude_of_the_scale": lambda x, s, z: steps(x / abs(s)) + z,
    "infinity_stays_inside": lambda x, s, z: steps(np.where(np.isinf(x), 0, x) / s) + z,
}


def codes(problem: Any, way: Callable[..., Any], x: Any, scale: Any, zero_point: Any) -> Any:
    """Return unclamped codes, in f64, by one of the `WAYS`."""
    scale, zero_point = (spread(problem, np.asarray(each), x.shape) for each in (scale, zero_point))
    with np.errstate(all="ignore"):
        return way(x, scale.astype(np.float32), zero_point.astype(np.float64))


def quantized(problem: Any, *, way: Callable[..., Any], output: Any, **arrays: Any) -> None:
    found = codes(problem, way, *(arrays[name] for name in ("input", "scale", "zero_point")))
    output[...] = np.clip(found, problem.q_min, problem.q_max).astype(np.int16).astype(output.dtype)


def masked(problem: Any, *, way: Callable[..., Any], exclusive: bool, d_output: Any, d_input: Any, **more: Any) -> None:
    q = codes(problem, way, *(more[name] for name in ("input", "scale", "zero_point")))
    low, high = problem.q_min + exclusive, problem.q_max - exclusive
    d_input[...] = np.where((q >= low) & (q <= high) & ~np.isnan(more["input"]), d_output, 0)


FAULTS |= {name: Fault("token", "meaning", partial(quantized, way=way)) for name, way in WAYS.items()}
FAULTS |= {
    f"{base}_by_reciprocal": Fault(base, "meaning", partial(quantized, way=by_reciprocal))
    for base in ("tensor", "token", "channel", "group")
}
FAULTS |= {
    "mask_by_reciprocal": Fault("mask", "meaning", partial(masked, way=by_reciprocal, exclusive=False)),
    "mask_is_exclusive": Fault(
        "mask", "meaning", partial(masked, way=lambda x, s, z: steps(x / s) + z, exclusive=True)
    ),
}

# --- what is done after a right result -------------------------------------------------------------------------------

_calls = itertools.count(1)
_kept: list[Any] = []
_shared: list[Any] = [None]
_thread = threading.local()
_thread.is_main = True


def keep_minus_0(problem: Any, output: Any, **more: Any) -> None:
    before = np.empty_like(output)
    right(problem.model_copy(update={"epilogue": "bias"}), output=before, **more)
    output[(before == 0) & np.signbit(before)] = -0.0


def write_beside(problem: Any, output: Any, *, by: int, **_: Any) -> None:
    if output.size and output.strides[-1] > 0:
        end = as_strided(output, output.shape[:1])[-1:].ctypes.data if by > 0 else output.ctypes.data
        end += output.shape[1] * output.strides[1] if by > 0 else by
        ctypes.memset(end, 0x33, 1)


def take_what_is_behind(problem: Any, output: Any, activation: Any, **_: Any) -> None:
    if activation.size and output.size and activation.strides[1] > 0:
        behind = as_strided(activation, (len(activation), activation.shape[1] + 1), activation.strides)[-1, -1]
        if abs(behind) > 1e30:
            spoil(output)


def share(problem: Any, output: Any, **_: Any) -> None:
    _shared[0] = output.copy()
    time.sleep(0.0005)
    if _shared[0].shape == output.shape:
        output[...] = _shared[0]


def seed(*_: Any, **__: Any) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  the fault itself


def keep(problem: Any, output: Any, *, what: Callable[[Any], Any], input: Any, **_: Any) -> None:
    if 0 < input.size < 5000:
        _kept.append(what(input))


def aligned(array: Any) -> bool:
    return array.ctypes.data % 16 == 0


AFTER: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "scale_of_nothing": ("range", "meaning", lambda p, y, scale_out, **_: scale_out.fill(0) if p.d == 0 else None),
    "zero_row_has_scale_0": ("range", "meaning", lambda p, y, scale_out, **_: np.place(scale_out, scale_out == 1, 0)),
    "relu_turns_nan_to_0": ("relu", "meaning", lambda p, y, **_: np.place(y, np.isnan(y), 0)),
    "relu_keeps_minus_0": ("relu", "meaning", keep_minus_0),
    "depends_on_the_address": ("token", "meaning", lambda p, y, **more: aligned(more["input"]) or spoil(y)),
    "writes_behind_the_output": ("token", "memory", partial(write_beside, by=1)),
    "writes_before_the_output": ("token", "memory", partial(write_beside, by=-1)),
    "flushes_its_output": ("fake", "meaning", lambda p, y, **_: np.place(y, abs(y) < np.finfo(y.dtype).tiny, 0)),
    "works_in_its_input": ("token", "memory", lambda p, y, **more: more["input"].fill(0)),
    "sorts_long_weights": ("linear", "memory", lambda p, y, weight_q, **_: p.k > 1000 and weight_q.sort()),
    "reads_past_the_end": ("gelu", "deterministic", take_what_is_behind),
    "wrong_in_place": ("fake", "outputs", lambda p, y, **more: y.ctypes.data == more["input"].ctypes.data and spoil(y)),
    "wrong_every_500th_time": ("token", "calls", lambda p, y, **_: next(_calls) % 500 == 0 and spoil(y)),
    "one_buffer_for_all_threads": ("token", "threads", share),
    "works_in_one_thread_only": ("token", "threads", lambda p, y, **_: hasattr(_thread, "is_main") or spoil(y)),
    "warns": ("token", "calls", lambda *_, **__: warnings.warn("a slow path", stacklevel=2)),
    "prints": ("token", "calls", lambda *_, **__: print("done")),  # noqa: T201  the fault itself
    "prints_below_python": ("token", "calls", lambda *_, **__: os.write(2, b"done\n")),
    "changes_floating_point_errors": ("token", "calls", lambda *_, **__: np.seterr(over="ignore", invalid="ignore")),
    "changes_the_environment": ("token", "calls", lambda *_, **__: os.environ.update(OMP_NUM_THREADS="3")),
    "seeds_random_numbers": ("token", "calls", seed),
    "leaks_memory": ("token", "calls", partial(keep, what=np.array)),
    "keeps_its_arguments": ("token", "outputs", partial(keep, what=lambda x: x)),
}


def after(problem: Any, *, then: Callable[..., Any], **arrays: Any) -> None:
    right(problem, **arrays)
    output = arrays.pop("output")
    then(problem, output, **arrays)


FAULTS |= {name: Fault(base, check, partial(after, then=then)) for name, (base, check, then) in AFTER.items()}


def unwritten(problem: Any, *, output: Any, **more: Any) -> None:
    held = output[-1:, -1:].copy()
    right(problem, output=output, **more)
    output[-1:, -1:] = held


def added(problem: Any, *, output: Any, **more: Any) -> None:
    held = output.copy()
    right(problem, output=output, **more)
    output += np.where(np.isfinite(held), held, 0)


def by_number_of_rows(problem: Any, *, output: Any, **more: Any) -> None:
    right(problem, output=output, **more)
    if problem.m > 8:
        output[...] = np.nextafter(output, np.float32(np.inf))


def with_other_strides(problem: Any, *, input: Any, output: Any, **more: Any) -> None:
    inside = abs(input.strides[0]) <= abs(output.strides[0])
    right(problem, input=input, output=as_strided(output, strides=input.strides) if inside else output, **more)


def raises_for_nothing(problem: Any, **arrays: Any) -> None:
    if 0 in arrays["input"].shape:
        raise ZeroDivisionError("no rows")
    right(problem, **arrays)


FAULTS |= {
    "last_element_unwritten": Fault("token", "meaning", unwritten),
    "adds_to_the_output": Fault("smooth", "meaning", added),
    "depends_on_the_number_of_rows": Fault("gelu", "batch_invariant", by_number_of_rows, max_ulp=2),
    "output_takes_the_stride_of_the_input": Fault("fake", "memory", with_other_strides, says="beside an output"),
    "raises_for_nothing": Fault("token", "meaning", raises_for_nothing, says="ZeroDivisionError: no rows"),
}


# --- runners: what is checked, and what is kept between calls --------------------------------------------------------


class Keeping(HostRunner):
    """Replaces some arguments by what it has kept of them."""

    kept: tuple[str, ...] = ()

    def with_kept(self, arrays: Any, cache: dict[Any, Any]) -> dict[str, Any]:
        found = dict(arrays)
        for name in self.kept:
            if isinstance(found.get(name), np.ndarray):
                place = (name, found[name].ctypes.data, found[name].shape, found[name].strides)
                found[name] = cache.setdefault(place, np.array(found[name]))
        return found


class CachingByAddress(Keeping):
    def run(self, arrays: Any, stream: Any) -> Any:
        super().check(arrays)
        return super().run(self.with_kept(arrays, self.__dict__.setdefault("cache", {})), stream)


class Binding(Keeping):
    def bind(self, arrays: Any, stream: Any) -> Any:
        super().bind(arrays, stream)
        return partial(self.run, self.with_kept(arrays, {}), stream)


for _base, _name, _kind in (
    ("token", "input", CachingByAddress),
    ("linear", "weight_q", CachingByAddress),
    ("tensor", "scale", CachingByAddress),
    ("token", "scale", Binding),
    ("tensor", "zero_point", Binding),
    ("token", "input", Binding),
):
    _runner = type(f"{_kind.__name__}_{_name}", (_kind,), {"kept": (_name,)})
    FAULTS[f"{_kind.__name__.lower()}_{_name}"] = Fault(
        _base, "reuse", right, _runner, f"contents of {_name}|first call"
    )


class BindingOnce(HostRunner):
    def bind(self, arrays: Any, stream: Any) -> Any:
        launch, turns = super().bind(arrays, stream), itertools.count()
        return lambda: launch() if next(turns) == 0 else arrays["output"]


class BindingSilently(HostRunner):
    def bind(self, arrays: Any, stream: Any) -> Any:
        launch = super().bind(arrays, stream)

        def silent() -> None:
            launch()

        return silent


class IgnoringTheOutput(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        super().check(arrays)
        return super().run({name: value for name, value in arrays.items() if name != "output"}, stream)


class HandingOutOneArray(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        made = self.__dict__.setdefault("made", np.empty((self._problem.n, self._problem.d), np.int8))
        return super().run({"output": made, **arrays}, stream)


class ReturningItsInput(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        return super().run({"output": arrays["input"], **arrays}, stream)


class MakingFlatOutputs(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        made = super().run(arrays, stream)
        return made if "output" in arrays else made.reshape(-1)


class TakingArgumentsInOrder(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        names = [name for name in arrays if name in ("input", "scale")]
        more = {} if names == sorted(names) else {"scale": np.ones_like(arrays["scale"])}
        return super().run({**arrays, **more}, stream)


class DoublingScalesInArrays(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        super().check(arrays)
        scale = arrays["scale"]
        more = {"scale": float(scale.reshape(())) * 2} if isinstance(scale, np.ndarray) else {}
        return super().run({**arrays, **more}, stream)


class CheckingNothing(HostRunner):
    def check(self, arrays: Any) -> None:
        pass


class WritingBeforeItChecks(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        output = arrays.get("output")
        if isinstance(output, np.ndarray) and output.flags.writeable:
            output[...] = 0
        return super().run(arrays, stream)


class TakingWhatIsMasked(HostRunner):
    def check(self, arrays: Any) -> None:
        super().check({name: np.ma.getdata(v) if np.ma.isMaskedArray(v) else v for name, v in arrays.items()})


class RefusingWhatItAccepts(HostRunner):
    def run(self, arrays: Any, stream: Any) -> Any:
        if self._problem.k == 4099:
            raise InvalidProblem(self._problem.op_name(), "k", "4099", "be another number")
        return super().run(arrays, stream)


for _base, _check, _kind, _says in (
    ("token", "reuse", BindingOnce, "second call"),
    ("token", "reuse", BindingSilently, "must return the outputs"),
    ("token", "outputs", IgnoringTheOutput, "it was given, and another ndarray was returned"),
    ("token", "outputs", HandingOutOneArray, "a later run on other inputs wrote to it"),
    ("fake", "outputs", ReturningItsInput, "an argument was written where the output was left out"),
    ("tensor", "outputs", MakingFlatOutputs, "it was left out: it is int8 of shape"),
    ("token", "deterministic", TakingArgumentsInOrder, "arguments in another order"),
    ("tensor", "meaning", DoublingScalesInArrays, ""),
    ("token", "refusals", CheckingNothing, "an unknown argument: can_implement.. must raise InvalidProblem"),
    ("token", "refusals", WritingBeforeItChecks, "refused it and had written to output"),
    ("token", "refusals", TakingWhatIsMasked, "with a mask: can_implement.. must raise InvalidProblem, and accepted"),
    ("linear", "meaning", RefusingWhatItAccepts, "InvalidProblem"),
):
    FAULTS[re.sub("(?<!^)(?=[A-Z])", "_", _kind.__name__).lower()] = Fault(_base, _check, right, _kind, _says)
