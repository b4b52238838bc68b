"""Gated activation and amax, then `amax_quantize`, are the gated ops that quantize, of whole rows and of parts."""

from __future__ import annotations

import numpy as np
import pytest
from harness.binding import launch_of
from support import assert_same_bits, draw, fresh, run

from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import MOST_ZEROS
from skuda.kernels.quantize import (
    AmaxQuantizeDescriptor,
    GeluMulAmaxDescriptor,
    GeluMulQuantizeDescriptor,
    SiluMulAmaxDescriptor,
    SiluMulQuantizeDescriptor,
)
from skuda.kernels.quantize.elementwise_launch import width_of
from skuda.registry import Case
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.elements import FLOATS

CURVES = {
    "silu": (SiluMulAmaxDescriptor, SiluMulQuantizeDescriptor, {}),
    "gelu": (GeluMulAmaxDescriptor, GeluMulQuantizeDescriptor, {"approximation": "erf"}),
    "gelu_tanh": (GeluMulAmaxDescriptor, GeluMulQuantizeDescriptor, {"approximation": "tanh"}),
}


@pytest.mark.parametrize("values", ["normal", "special", "infinite", "zero"])
@pytest.mark.parametrize("data", FLOATS)
@pytest.mark.parametrize("curve", CURVES)
def test_the_maxima_of_parts_give_the_codes_of_whole_rows(curve, data, values):
    rng = fresh(curve, data, values)
    kind, of_whole, form = CURVES[curve]
    for n, d in ((1, 1), (5, 0), (7, 33), (3, 300)):
        fused, bounds = (
            bool(rng.random() < 0.5),
            {"q_min": int(rng.integers(-128, 2)), "q_max": int(rng.integers(1, 128))},
        )
        shared = {"n": n, "input_element": data}
        coded = {"output_element": "s8", **bounds}
        whole = of_whole(d=d, fused=False, has_product=True, **coded, **shared, **form)
        sides = draw(built_in_registry().ops[whole.op], Case(whole, values), rng).inputs
        want = run(whole, sides)
        ends = np.sort(rng.integers(0, d + 1, 3))
        parts = []
        for gate, up in zip(*(np.split(sides[name], ends, axis=1) for name in ("gate", "up")), strict=True):
            given = {"gate_up": np.concatenate([gate, up], axis=1)} if fused else {"gate": gate, "up": up}
            parts.append(run(kind(d=gate.shape[1], fused=fused, **shared, **form), given))
        amax = np.max([part["amax"] for part in parts], axis=0)
        assert_same_bits(np.concatenate([part["product"] for part in parts], axis=1), want["product"], "product")
        got = [
            run(
                AmaxQuantizeDescriptor(d=part["product"].shape[1], **coded, **shared),
                {"input": part["product"], "amax": amax},
            )
            for part in parts
        ]
        assert_same_bits(np.concatenate([each["output"] for each in got], axis=1), want["output"], "codes")
        for each in got:
            assert_same_bits(each["scale_out"], want["scale_out"], "scales")


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
