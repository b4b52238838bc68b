"""The gated ops are the ops that they consist of, one after the other; which blocks share rows for their maxima."""

from __future__ import annotations

import numpy as np
import pytest
from harness.binding import launch_of
from support import assert_same_bits, draw, every_case, fresh, in_range, quantizes_apart, run, sampled

import skuda
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import MOST_ZEROS
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor, QuantizePerTensorDescriptor, SiluMulAmaxDescriptor
from skuda.kernels.quantize.elementwise_launch import width_of
from skuda.kernels.quantize.gated import GatedProblem, products
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.elements import FLOATS
from skuda.registry.errors import InvalidProblem

CASES = sampled(
    [
        pytest.param(op, case, id=name)
        for name, op, case in every_case()
        if isinstance(case.problem, GatedProblem) and quantizes_apart(case.problem)
    ],
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


@pytest.mark.parametrize("data", FLOATS)
def test_the_blocks_cover_every_row_once_and_share_only_few_rows(data):
    rng = fresh(data)
    sku = next(sku for sku in built_in_registry().skus_of("silu_mul_amax") if sku.launch and sku.element == data)
    devices = [device for device in KNOWN_DEVICES.values() if device.processor == "cuda"]
    sizes = [(1, 14336), (16, 14336), (64, 28672), (8192, 14336)]
    sizes += [tuple(map(int, np.exp2(rng.uniform(0, (13, 18))))) for _ in range(200)]
    shared = 0
    for n, d in sizes:
        launch = launch_of(
            sku, SiluMulAmaxDescriptor(n=n, d=d, input_element=data), devices[rng.integers(len(devices))]
        )
        (step,) = launch.steps
        part, lanes = (step.parameters[i].value for i in (-2, -1))
        chunks = -(-d // width_of(data))
        if step.entry == "gated_amax_lanes_1":
            assert chunks <= lanes <= 32
            assert step.grid[0] * step.block[0] // lanes >= n
        else:
            assert step.grid[0] == n
            assert step.block[0] % 32 == 0
            assert 32 <= step.block[0] <= 256
        assert part % width_of(data) == 0
        assert (step.grid[1] - 1) * part < max(d, 1) <= step.grid[1] * part
        assert bool(launch.scratch) == (step.grid[1] > 1)
        for _, size in launch.scratch:
            assert size == n * (data.compute.bits // 8 + 4) <= MOST_ZEROS
            shared += 1
    assert shared
