"""The kernel for few tokens without a GPU: its configurations and its launches."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from harness import emulator
from harness.resources import Job, compiled
from products import dynamic, scaled, static
from support import fresh, sampled

from skuda.dispatch.compile import compilers as compiling
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import Pointer, TensorMap
from skuda.kernels.linear import hopper, streamed
from skuda.registry.device import KNOWN_DEVICES

H200 = KNOWN_DEVICES["h200"]


def sku_of(problem):
    skus = built_in_registry().skus_of(problem.op)
    return next(sku for sku in skus if sku.variant == "streamed" and sku.key == problem.key())


def test_every_configuration_covers_the_results_and_fits_the_card():
    rng = fresh("configurations")
    for _ in range(200):
        m, n = int(rng.integers(1, 128, endpoint=True)), int(2 ** rng.uniform(0, 15))
        problem = static(m, n, 16 * int(2 ** rng.uniform(0, 11)), has_weight_zero_point=bool(rng.random() < 0.2))
        for choice in streamed.launch(problem, H200).choices:
            launch = streamed.launch(problem, H200, choice.name)
            (step,) = launch.steps
            flags = dict(flag[2:].split("=") for flag in launch.flags)
            rows, tokens = map(int, re.findall(r"\d+", choice.name)[:2])
            split_k, tiles = int(flags.get("SPLIT_K", 1)), -(-n // rows)
            assert int(flags["TOKENS"]) == tokens
            assert step.grid[1] * tokens >= m
            assert step.shared <= hopper.MAX_SHARED
            if "registers" in choice.name:
                assert step.grid == (tiles, 1, 1)
                assert step.block[0] >= tokens * rows // 4, "every result has a thread"
            else:
                assert math.prod(step.grid) <= H200.sm_count
                assert split_k == 1 or step.grid[0] == tiles * split_k, "a cluster takes one tile"
                assert split_k == 1 or not problem.has_weight_zero_point


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no NVRTC")
@pytest.mark.parametrize("split_k", [2, 4])
@pytest.mark.parametrize("rows", sampled([0, 1, 2]))
def test_two_blocks_of_a_cluster_share_the_registers_of_a_multiprocessor(rows, split_k):
    """The shared memory of such blocks counts on it."""
    problem = dynamic(rows, 1280, 8192) if rows else static(16, 1280, 8192)
    sku = sku_of(problem)
    name = next(c.name for c in streamed.launch(problem, H200).choices if c.name.endswith(f"split-K by {split_k}"))
    launch = streamed.launch(problem, H200, name)
    job = replace(Job.of(sku, "sm_90a"), flags=(*sku.flags, *launch.flags))
    needs = compiled(job).kernels[launch.steps[-1].entry]
    assert (needs.spills, needs.stack) == (0, 0)
    assert 2 * math.prod(launch.steps[-1].block) * -(-needs.registers // 8) * 8 <= 65_536


SIZES = """
#include "direct.cuh"
extern "C" __global__ void sizes(s32* to) { to[0] = AHEAD, to[1] = UNIT, to[2] = THREADS, to[3] = 4 * WARPS * PART; }
"""


@pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
@pytest.mark.parametrize("tile", sampled([one for m in (8, 16, 32) for one in streamed.configurations(m)], 3), ids=str)
def test_the_rule_has_the_constants_of_the_kernel_through_registers(tile):
    problem = static(tile.tokens)
    unit = replace(emulator.Unit.of(sku_of(problem)), text=SIZES)
    found = np.zeros(4, np.int32)
    library = emulator.load(unit.configured(streamed.launch(problem, H200, str(tile)).flags))
    library.launch("sizes", (1, 1, 1), (1, 1, 1), 0, [("p", found.ctypes.data)])
    assert found.tolist() == [tile.ahead, tile.unit, tile.block[0], tile.shared()]
    assert streamed.configurations(33) == ()


@pytest.mark.parametrize(
    ("problem", "codes"), [(static(16), "act_q"), (scaled(16), "act_q"), (dynamic(16), "act_q_scratch")], ids=str
)
def test_operands_must_be_aligned_on_both_ways(problem, codes):
    for choice in streamed.launch(problem, H200).choices:
        launch = streamed.launch(problem, H200, choice.name)
        maps = [each.name for each in launch.steps[-1].parameters if isinstance(each, TensorMap)]
        assert sorted((*maps, *launch.aligned)) == sorted((codes, "weight_q"))
        pointers = {each.name for each in launch.steps[-1].parameters if isinstance(each, Pointer)}
        assert maps or {codes, "weight_q"} <= pointers


def test_scratch_codes_must_be_aligned_where_the_product_quantizes():
    launch = streamed.launch(dynamic(1), H200)
    assert any(flag.startswith("-DQUANTIZED_TOKENS") for flag in launch.flags)
    assert launch.aligned == ("activation", "act_q_scratch")
