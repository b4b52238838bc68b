"""Wrong kernels that look right: the conformance suite and `skuda verify` find each of them, and name what is wrong."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from support import fresh, parts_of

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.values import spread
from skuda.registry import (
    Argument,
    BackendSpec,
    Between,
    Case,
    Descriptor,
    ElementKind,
    KernelSku,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Role,
)
from skuda.registry.device import HOST
from skuda.registry.value import Extent
from skuda.tools.verify.conformance import Checks
from skuda.tools.verify.edges import LARGE, always
from skuda.tools.verify.kit import Broken, NotRun
from skuda.tools.verify.placement import placement_for
from skuda.tools.verify.verification import verify

F32 = ElementKind.F32
OPS = {op.name: op for op in built_in_ops()}


class CopiedDescriptor(Descriptor):
    """Problem of `copied`: y = x."""

    op: Literal["copied"] = "copied"
    category: ClassVar[OpCategory] = OpCategory.UNARY_ELEMENTWISE
    element_field: ClassVar[str] = "element"
    n: Extent
    d: Extent
    element: ElementKind = F32

    def arguments(self) -> tuple[Argument, ...]:
        return tuple(
            Argument(name, role, (self.element,), (self.n, self.d))
            for name, role in (("x", Role.INPUT), ("y", Role.OUTPUT))
        )


def copied(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x


def sku_of_copied(entry: str, backend: str) -> KernelSku:
    return KernelSku(
        category="unary_elementwise",
        op="copied",
        element="f32",
        arch="cpu",
        backend=backend,
        variant=entry,
        precision_guarantee=PrecisionGuarantee(math_precision="f32", accumulator="f32"),
        source=__name__,
        entry_point=entry,
        summary="a toy",
    )


COPIED = Op(
    CopiedDescriptor,
    copied,
    tuple(Case(CopiedDescriptor(n=n, d=d)) for n, d in ((5, 3), (0, 3), (7, 8))),
    (sku_of_copied("copied", "numpy"),),
    source="test_mutants.py",
)


class Mutants(NumpyBackend):
    """A CPU backend whose kernels are functions of this module."""

    spec = BackendSpec(name="mutants", processor="cpu")
    runner: type[HostRunner] = HostRunner

    def prepare(self, sku, problem, device):
        return self.runner(problem, globals()[sku.entry_point])


def found_in(base: str, entry: str, runner: type[HostRunner] = HostRunner) -> tuple[dict[str, str], Any]:
    """Return what the checks of the suite say of a mutant, and the record that verification makes."""
    backend, before = Mutants(), np.geterr()
    backend.runner = runner
    registry = built_in_registry().register(COPIED, origin="elsewhere 1.0")
    if base == "copied":
        sku = sku_of_copied(entry, "mutants")
    else:
        (kernel,) = [s for s in registry if s.backend == "numpy" and s.id.split(".", 1)[1].startswith(f"{base}.")]
        changes = {"backend": "mutants", "variant": entry, "source": __name__, "entry_point": entry, "summary": "wrong"}
        sku = kernel.model_copy(update=changes)
    registry = registry.register(backend.spec, sku, origin="mutants 1.0")
    dispatcher = Dispatcher(registry, backends=[backend, NumpyBackend()])
    kit, said = Checks("mutants", dispatcher, placement_for, 7), {}
    for name in ("meaning", "memory", "deterministic", "batch_invariant", "outputs", "calls", "reuse"):
        try:
            getattr(kit, f"check_{name}")(sku)
        except Broken as broken:
            said[name] = str(broken)
        except NotRun:
            pass
    np.seterr(**before)
    (record,) = verify(dispatcher, HOST, skus=[sku.id], seed=7).skus
    return said, record


def both(base: str, entry: str, check: str, words: str, runner: type[HostRunner] = HostRunner) -> None:
    """Assert that the suite fails one check for a reason, and verification the kernel for the same."""
    said, record = found_in(base, entry, runner)
    assert re.search(words, said.get(check, "")), said
    assert record.verdict == "failed"
    assert re.search(words, record.first_failure.describe() + record.first_failure.problem), record.first_failure


def right(problem: Any, **arrays: Any) -> None:
    """Do what the op means."""
    reference = copied if problem.op_name() == "copied" else OPS[problem.op_name()].reference
    reference(problem, **arrays)


def test_what_is_right_is_found_right():
    for base in ("copied", "dynamic_range.bf16-u4", "quantized_linear.f16-u8.rcr-bias_gelu"):
        said, record = found_in(base, "right")
        assert (said, record.verdict, record.first_failure) == ({}, "verified", None)


# --- wrong for some inputs -------------------------------------------------------------------------------------------


def nan_to_q_min(problem: Any, *, input: Any, output: Any, **scales: Any) -> None:
    right(problem, input=input, output=output, **scales)
    output[np.isnan(input)] = problem.q_min


def scale_of_nothing(problem: Any, **arrays: Any) -> None:
    right(problem, **arrays)
    if problem.d == 0:
        arrays["scale_out"][...] = 0


def off_by_one_where_large(problem: Any, **arrays: Any) -> None:
    right(problem, **arrays)
    sizes = [getattr(problem, name, 0) for name in ("d", "k", "numel")]
    if max(sizes) > 20_000:
        output = arrays["output"]
        output.flat[output.size - 1] = 0 if output.flat[output.size - 1] else 1


def zero_row_to_zero_scale(problem: Any, **arrays: Any) -> None:
    right(problem, **arrays)
    arrays["scale_out"][arrays["scale_out"] == 1] = 0


def infinity_to_zero(problem: Any, *, input: Any, output: Any, **more: Any) -> None:
    right(problem, input=input, output=output, **more)
    output[np.isneginf(input)] = 0


@pytest.mark.parametrize(
    ("base", "entry", "words"),
    [
        # Keys for which the op's own cases hold no NaN, no empty row and nothing large.
        ("dynamic_range.f16-u8", "nan_to_q_min", r"bits: output\[.*(special|infinite)"),
        ("dynamic_range.f64-s8", "scale_of_nothing", r'(?s)bits: scale_out\[0\]: got 0.*"d":0'),
        ("dynamic_range.f64-s8", "zero_row_to_zero_scale", r"bits: scale_out\["),
        ("dynamic_range.f64-s8", "off_by_one_where_large", rf'(?s)bits: output\[.*"d":{LARGE}'),
        ("quantized_linear.f16-u8.rcr-identity", "off_by_one_where_large", rf'(?s)bits: output\[.*"k":{LARGE}'),
        ("fake_quantize.bf16", "off_by_one_where_large", rf'(?s)bits: output.*"numel":{LARGE}'),
        ("fake_quantize_per_token.f64", "infinity_to_zero", r"bits: output\[.*(special|infinite)"),
    ],
)
def test_wrong_for_rare_inputs(base, entry, words):
    both(base, entry, "meaning", words)


def test_every_kernel_is_asked_for_every_kind_of_input():
    registry, seen = built_in_registry(), {}
    for sku in registry:
        if sku.backend != "numpy":
            continue
        op = OPS[sku.op]
        values = {case.values for case in always(sku, op.cases)} | {
            c.values for c in op.cases if c.problem.key() == sku.key
        }
        assert values >= {"ties", "special", "infinite", "zero"}, sku.id
        seen[sku.op] = [case.problem for case in (*op.cases, *always(sku, op.cases)) if case.problem.key() == sku.key]
        extents = {extent for problem in seen[sku.op] for a in problem.arguments() for extent in a.shape}
        assert {0, 1} <= extents, sku.id
        # Sums as the output refuse a K at which they could leave s32.
        assert max(extents) >= (LARGE >> 1 if sku.id.startswith("quantization.scaled_linear.s32") else LARGE), sku.id


@pytest.mark.parametrize(("most", "largest"), [(None, LARGE), (5000, LARGE >> 4)])
def test_the_large_extent_is_as_large_as_a_kernel_accepts(most, largest):
    sku = sku_of_copied("copied", "numpy").model_copy(update={"constraints": (Between(field="d", maximum=most),)})
    assert max(case.problem.d for case in always(sku, COPIED.cases)) == largest


@pytest.mark.parametrize(
    "name", ["dynamic_range", "quantize_per_token", "quantize_per_tensor", "fake_quantize_backward"]
)
def test_special_inputs_hold_what_they_are_named_for(name):
    op, rng = OPS[name], fresh(name)
    cases = [case for sku in op.skus if sku.backend == "numpy" for case in always(sku, op.cases)]
    for case in cases:
        data = np.asarray(draw(op, case, rng).inputs["input"], np.float64)
        if data.size < 100:
            continue
        least = float(np.nanmin(np.abs(data[data != 0]), initial=np.inf))
        if case.values in ("special", "infinite"):
            assert np.isnan(data).any()
            assert least < 2.0**-14
        if case.values == "infinite":
            assert np.isposinf(data).any()
            assert np.isneginf(data).any()
        if case.values in ("special", "infinite") and data.ndim == 2 and min(data.shape) >= 5:
            assert (data == 0).all(axis=1).any()
            assert (data == 0).sum(axis=0).max() > 0
        if case.values == "zero":
            assert not data.any()


# --- a reciprocal ----------------------------------------------------------------------------------------------------


def codes(problem: Any, x: Any, scale: Any, zero_point: Any) -> tuple[Any, Any]:
    """Quotients by way of the reciprocal, and the codes without clamping, in f64."""
    with np.errstate(all="ignore"):
        scale = np.asarray(scale, np.float64 if x.dtype == np.float64 else np.float32)
        t = np.rint(x.astype(scale.dtype) * (1 / scale)).astype(np.float64)
    return t, np.where(np.isnan(t), 0, t) + np.asarray(zero_point, np.float64)


def quantize_by_reciprocal(problem: Any, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    scale, zero_point = (spread(problem, np.asarray(each), input.shape) for each in (scale, zero_point))
    _, q = codes(problem, input, scale, zero_point)
    output[...] = np.clip(q, problem.q_min, problem.q_max).astype(np.int16).astype(output.dtype)


def mask_by_reciprocal(problem: Any, *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any) -> None:
    scale, zero_point = (spread(problem, np.asarray(each), input.shape) for each in (scale, zero_point))
    t, q = codes(problem, input, scale, zero_point)
    inside = (q >= problem.q_min) & (q <= problem.q_max) & ~np.isnan(t)
    d_input[...] = np.where(inside, d_output, 0)


def range_by_reciprocal(problem: Any, *, input: Any, output: Any, scale_out: Any, zero_point_out: Any) -> None:
    right(problem, input=input, output=output, scale_out=scale_out, zero_point_out=zero_point_out)
    scales = {"scale": scale_out, "zero_point": zero_point_out}
    quantize_by_reciprocal(problem, input=input, output=output, **scales)


def output_by_reciprocal(
    problem: Any, *, output: Any, output_scale: Any, output_zero_point: Any, **arrays: Any
) -> None:
    value = np.empty(output.shape, np.float32)
    right(problem.model_copy(update={"output_element": F32}), output=value, **arrays)
    _, q = codes(problem, value, output_scale, output_zero_point)
    output[...] = np.clip(q, *problem.output_element.integer_range).astype(np.int16).astype(output.dtype)


RECIPROCALS = [
    ("quantize_per_tensor.f32-s8", quantize_by_reciprocal, 0.05),
    ("quantize_per_token.f32-u8", quantize_by_reciprocal, 0.05),
    ("quantize_per_channel.f32-s8", quantize_by_reciprocal, 0.05),
    ("quantize_per_group.f32-s8", quantize_by_reciprocal, 0.05),
    ("fake_quantize_backward.f32", mask_by_reciprocal, 0.03),
    ("fake_quantize_per_token_backward.f32", mask_by_reciprocal, 0.03),
    ("dynamic_range.f32-s8", range_by_reciprocal, 0.05),
    ("smoothquant_linear.s8-s8.rcr-identity", output_by_reciprocal, 0.01),
]


@pytest.mark.parametrize(("base", "kernel", "share"), RECIPROCALS, ids=[each[0] for each in RECIPROCALS])
def test_a_reciprocal_changes_many_of_the_codes_that_are_drawn_for_ties(base, kernel, share):
    name, _, rest = base.partition(".")
    op, rng = OPS[name], fresh(base)
    element, aux = ([*rest.partition(".")[0].split("-"), None])[:2]
    changed = total = 0
    for _ in range(8):
        for sku in op.skus:
            if sku.backend != "numpy" or (sku.element, sku.aux_element) != (element, aux) or "bias" in sku.id:
                continue
            for case in (*op.cases, *always(sku, op.cases)):
                if case.problem.key() == sku.key and case.values == "ties":
                    problem, drawn = case.problem, draw(op, case, rng)
                    want, got = ({**drawn.inputs, **outputs_of(problem, drawn)} for _ in range(2))
                    HostRunner(problem, right).run(want, None)
                    HostRunner(problem, kernel).run(got, None)
                    output = next(argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT)
                    changed += int((want[output] != got[output]).sum())
                    total += want[output].size
    assert total > 1000
    assert changed > share * total, f"{changed} of {total}"


def outputs_of(problem: Any, drawn: Any) -> dict[str, Any]:
    result = HostRunner(problem, right).run(drawn.inputs, None)
    names = [argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT]
    made = dict(zip(names, parts_of(result), strict=True))
    return {name: np.zeros_like(array) for name, array in made.items()}


@pytest.mark.parametrize(("base", "kernel"), [each[:2] for each in RECIPROCALS], ids=[each[0] for each in RECIPROCALS])
def test_a_reciprocal_is_found(base, kernel):
    both(base, kernel.__name__, "meaning", r"bits: (output|d_input)\[")


# --- wrong in how they are called ------------------------------------------------------------------------------------


class Aliasing(HostRunner):
    """Returns its input where the output is left out, which has the right values."""

    def run(self, arrays, stream):
        return arrays["x"] if "y" not in arrays else super().run(arrays, stream)


class Overwriting(HostRunner):
    """Works in its input where the output is left out."""

    def run(self, arrays, stream):
        if "y" not in arrays and arrays["x"].size:
            arrays["x"][0, 0] += 1
        return super().run(arrays, stream)


class Freezing(HostRunner):
    """What `bind` returns keeps the values of that time."""

    def bind(self, arrays, stream):
        kept = {**arrays, "x": np.array(arrays["x"])}
        super().check(arrays)
        return lambda: self.run(kept, stream)


_calls = itertools.count(1)


def every_500th(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x
    if next(_calls) % 500 == 0 and y.size:
        y[0, 0] += 1


def leaking(problem: Any, *, x: Any, y: Any) -> None:
    np.seterr(over="ignore", invalid="ignore")
    y[...] = x


def talking(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x
    print("copied", x.shape)  # noqa: T201  the defect itself


def talking_below_python(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x
    os.write(2, b"copied\n")


def over_its_input(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x
    x[...] = 0


@pytest.mark.parametrize(
    ("entry", "runner", "check", "words"),
    [
        ("right", Aliasing, "outputs", r"outputs: y; it was left out, and shares memory with x"),
        ("right", Overwriting, "outputs", r"outputs: x; an input was written where an output was left out"),
        ("right", Freezing, "reuse", r"bind: y\[.*a call after the values of its inputs changed"),
        ("every_500th", HostRunner, "calls", r"calls: y\[0, 0\]: .*call \d+ of 512 in a row"),
        ("leaking", HostRunner, "calls", r"process: NumPy's handling of floating errors was changed: .*over warn to"),
        ("talking", HostRunner, "calls", r"process: a call prints 'copied"),
        ("talking_below_python", HostRunner, "calls", r"process: a call prints 'copied"),
        ("over_its_input", HostRunner, "memory", r"input: x; byte \d+ of an input was written"),
    ],
)
def test_wrong_in_how_it_is_called(entry, runner, check, words):
    before = np.geterr()
    try:
        both("copied", entry, check, words, runner)
        assert np.geterr() == before, "verification puts back what a kernel changes"
    finally:
        np.seterr(**before)
