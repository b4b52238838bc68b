"""The gated ops are the ops that they consist of, one after the other, and what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_same_bits, dispatcher, draw, every_case, fresh, in_range, run

import skuda
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor, QuantizePerTensorDescriptor
from skuda.kernels.quantize.gated import GatedProblem, products
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem

CASES = [pytest.param(op, case, id=name) for name, op, case in every_case() if isinstance(case.problem, GatedProblem)]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_one_op_gives_the_bits_of_several(op, case):
    problem, inputs = case.problem, draw(op, case, fresh(op.name, case)).inputs
    got = run(problem, inputs)
    gate, up = np.split(inputs["gate_up"], 2, axis=1) if problem.fused else (inputs["gate"], inputs["up"])
    y = products(problem, gate, up)
    if problem.has_product:
        assert_same_bits(got["product"], y, "product")
    shared = {name: getattr(problem, name) for name in ("q_min", "q_max", "input_element", "output_element")}
    if problem.scaling == "dynamic":
        ranged = {"input": in_range(problem, y)}
        want = run(DynamicRangeQuantizeDescriptor(n=problem.n, d=problem.d, **shared), ranged)
        assert_same_bits(got["scale_out"], want["scale_out"], "scale_out")
    else:
        given = {name: inputs[name] for name in ("scale", "zero_point")}
        want = run(QuantizePerTensorDescriptor(numel=y.size, **shared), {"input": y, **given})
    assert_same_bits(got["output"], want["output"], "output")


@pytest.mark.parametrize("op", ["silu_mul_quantize", "gelu_mul_quantize", "silu_mul_amax", "gelu_mul_amax"])
def test_an_odd_number_of_columns_cannot_be_gates_and_ups(op):
    with pytest.raises(InvalidProblem, match="gate_up"):
        getattr(skuda.ops, op)(
            gate_up=np.zeros((3, 7), np.float32), **({"output_element": "s8"} if "quantize" in op else {})
        )


@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("form", ["silu", "erf", "tanh"])
def test_torch_computes_the_same_but_for_its_rounding(form, element):
    torch = pytest.importorskip("torch")
    kind, rng = ElementKind(element), fresh(form, element)
    dtype = getattr(torch, {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}[element])
    gate, up = (torch.from_numpy(rng.standard_normal((8, 512)) * 3).to(dtype) for _ in range(2))
    functional = torch.nn.functional
    active = (
        functional.silu(gate) if form == "silu" else functional.gelu(gate, approximate={"erf": "none"}.get(form, form))
    )
    op = "silu_mul_quantize" if form == "silu" else "gelu_mul_quantize"
    more = {} if form == "silu" else {"approximation": form}
    problem = dispatcher().describe(
        op,
        n=8,
        d=512,
        q_min=-127,
        q_max=127,
        input_element=kind,
        output_element="s8",
        fused=False,
        has_product=True,
        **more,
    )
    _, _, product = dispatcher().run(problem, gate=gate, up=up)
    want = (active * up).double()
    units = {"f16": 2.0**-10, "bf16": 2.0**-7, "f32": 2.0**-19, "f64": 2.0**-46}[element]
    # Torch's erf and tanh are only precise relative to 1, so that its GELU loses digits far below zero.
    least = {"f16": 2.0**-24, "bf16": 2.0**-20, "f32": 2.0**-19, "f64": 2.0**-48}[element]
    near = (product.double() - want).abs() <= want.abs() * 2 * units + least * (1 + up.double().abs()) * 4
    assert near.all()
