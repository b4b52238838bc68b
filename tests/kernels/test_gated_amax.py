"""Gated activation and amax, then `amax_quantize`, are the gated ops that quantize, of whole rows and of parts."""

from __future__ import annotations

import numpy as np
import pytest
from harness.binding import launch_of
from support import fresh

from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import MOST_ZEROS
from skuda.kernels.quantize import (
    SiluMulAmaxDescriptor,
)
from skuda.kernels.quantize.elementwise_launch import width_of
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.elements import FLOATS


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
