"""The gated ops are the ops that they consist of, one after the other, and what torch computes."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_same_bits, draw, every_case, fresh, in_range, run, sampled

import skuda
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor, QuantizePerTensorDescriptor
from skuda.kernels.quantize.gated import GatedProblem, products
from skuda.registry.errors import InvalidProblem

CASES = sampled(
    [pytest.param(op, case, id=name) for name, op, case in every_case() if isinstance(case.problem, GatedProblem)],
    8,
    each=lambda op, case: op.name,
)


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
