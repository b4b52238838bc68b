"""The kernel for few tokens without a GPU: which configuration, which launch, and how well it is chosen."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from harness import emulator
from harness.resources import Job, compiled
from paths import ROOT
from products import dynamic, scaled, static
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.compile import compilers as compiling
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import Pointer, TensorMap
from skuda.kernels.linear import direct, hopper, streamed
from skuda.registry.device import KNOWN_DEVICES, Device
from skuda.tools.bench import fit

H200 = KNOWN_DEVICES["h200"]


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
            cluster = int(flags.get("CLUSTER", 1))
            assert int(flags["TOKENS"]) == tokens
            assert step.grid[1] * tokens >= m
            assert step.shared <= hopper.MOST_SHARED
            tiles = -(-n // rows)
            if "registers" in choice.name:
                assert step.grid == (tiles, 1, 1)
                assert step.block[0] >= tokens * rows // 4, "every result has a thread"
            else:
                assert math.prod(step.grid) <= H200.sm_count
                assert cluster == 1 or step.grid[0] == tiles * cluster, "a cluster takes one tile"
                assert cluster == 1 or not problem.has_weight_zero_point


def test_tiles_of_a_whole_product_are_offered_where_fewer_blocks_than_the_card_has_room_for_can_have_them():
    few = [str(cut) for cut in streamed.cuts_for((16, 2384, 3024), 132, 2, fused=False)]
    assert [name.split(" through")[0] for name in few] == ["24 x 16", "64 x 16", "40 x 16", "64 x 16", "80 x 16"]
    many = [str(cut) for cut in streamed.cuts_for((16, 28672, 4096), 132, 2, fused=False)]
    assert many == ["112 x 16 through shared memory"]


def test_fewer_blocks_request_more_of_the_weight_ahead():
    """Between 64 KB, where all multiprocessors load, and 112 KB; clusters of many blocks have half of shared memory."""

    def in_flight(n, cluster):
        cuts = streamed.cuts_for((8, n, 16384), 132, 2, fused=False)
        return [cut.stages * cut.chunks * cut.atoms for cut in cuts if (cut.atoms, cut.cluster) == (8, cluster)]

    assert in_flight(64 * 132, 1) == [64]
    assert in_flight(64 * 88, 1) == [96]
    assert in_flight(64 * 30, 1) == [112]
    assert in_flight(64 * 30, 2) == [112]
    assert in_flight(64 * 60, 2) == [80]


def test_a_card_and_its_data_sheet_choose_alike():
    h100, h200 = KNOWN_DEVICES["h100"], H200
    for card, reported, wanted in ((h200, 4_916_736_000_000, 5.0), (h100, 3_352_320_000_000, 3.5), (h100, 0, 5.0)):
        assert hopper.bandwidth(card.model_copy(update={"memory_bandwidth": reported})) == wanted
    assert (hopper.bandwidth(h200), hopper.bandwidth(h100)) == (5.0, 3.5)


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no NVRTC")
@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_two_blocks_of_a_cluster_share_the_registers_of_a_multiprocessor(rows, cluster):
    """As `_SHARED_BY_TWO` counts on; else clusters of all multiprocessors take turns."""
    problem = dynamic(rows, 1280, 8192) if rows else static(16, 1280, 8192)
    sku = next(s for s in built_in_registry().skus_of(problem.op) if s.variant == "streamed" and s.key == problem.key())
    name = next(c.name for c in streamed.launch(problem, H200).choices if c.name.endswith(f"k shared by {cluster}"))
    launch = streamed.launch(problem, H200, name)
    job = replace(Job.of(sku, "sm_90a"), flags=(*sku.flags, *launch.flags))
    needs = compiled(job).kernels[launch.steps[-1].entry]
    assert (needs.spills, needs.stack) == (0, 0)
    threads = math.prod(launch.steps[-1].block)
    assert 2 * threads * -(-needs.registers // 8) * 8 <= 65_536


def test_configurations_through_registers_are_for_what_one_block_takes():
    assert direct.configurations(33) == ()
    assert {one.tokens for m in range(1, 33) for one in direct.configurations(m)} == {8, 16, 32}
    assert all(one.tokens >= m for m in range(1, 33) for one in direct.configurations(m))


SIZES = """
#include "direct.cuh"
extern "C" __global__ void sizes(s32* to) { to[0] = DEEP, to[1] = UNIT, to[2] = THREADS, to[3] = 4 * WARPS * PART; }
"""


@pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
@pytest.mark.parametrize("one", [one for m in (8, 16, 32) for one in direct.configurations(m)], ids=str)
def test_the_rule_counts_as_the_kernel_does(one):
    """Without zero points, whose sums leave fewer registers: `predicted` knows nothing of those."""
    problem = static(one.tokens)
    flags = streamed.launch(problem, H200, str(one)).flags
    sku = next(s for s in built_in_registry().skus_of(problem.op) if s.variant == "streamed" and s.key == problem.key())
    library = emulator.load(replace(emulator.Unit.of(sku), text=SIZES).configured(flags))
    found = np.zeros(4, np.int32)
    library.launch("sizes", (1, 1, 1), (1, 1, 1), 0, [("p", found.ctypes.data)])
    assert found.tolist() == [one.deep, direct._UNIT, one.block[0], one.shared()]


@pytest.mark.parametrize(
    ("problem", "arrays"), [(static(16), "act_q"), (scaled(16), "act_q"), (dynamic(16), "act_q_scratch")], ids=str
)
def test_arrays_that_go_to_registers_are_whole_units_as_those_of_the_copy_engine_are(problem, arrays):
    for choice in streamed.launch(problem, H200).choices:
        launch = streamed.launch(problem, H200, choice.name)
        maps = [each.name for each in launch.steps[-1].parameters if isinstance(each, TensorMap)]
        assert sorted((*maps, *launch.aligned)) == sorted((arrays, "weight_q"))
        if not maps:
            pointers = [each.name for each in launch.steps[-1].parameters if isinstance(each, Pointer)]
            assert {arrays, "weight_q"} <= set(pointers)


def test_codes_that_a_caller_asks_for_are_whole_units_where_the_product_makes_them():
    launch = streamed.launch(dynamic(1), H200)
    assert any(flag.startswith("-DROWS") for flag in launch.flags)
    assert launch.aligned == ("activation", "act_q_scratch")


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (static(32, 28672, 8192), "streamed"),
        (static(33, 2816, 4096), "streamed"),
        (static(33, 2817, 4096), "warpgroup"),
        (static(128, 1024, 1024), "streamed"),
        (static(129, 64, 1024), "warpgroup"),
        (dynamic(64, 512, 4096), "streamed"),
        (scaled(64, 512, 4096, output_element="s32"), "streamed"),
    ],
    ids=str,
)
def test_more_rows_are_served_where_their_tiles_run_at_once(problem, variant):
    found = Dispatcher().explain(problem, device=H200)
    assert found.chosen.endswith(variant)
    if variant == "warpgroup":
        reasons = [reason for d in found.refused if d.sku.endswith("streamed") for reason in d.reasons]
        assert {reason.field for reason in reasons} & {"m", "tiles_beyond_few_rows"}


def test_the_chosen_configuration_is_near_the_best_among_layers():
    """Times of `skuda tune --layers 16`: of every configuration, at shapes that were drawn when the rule was done."""
    for measured in fit.sets_of(ROOT / "docs/evidence/h100-layers.json"):
        assert measured["layers"] == 16
        device = Device.model_validate(measured["environment"]["device"])
        losses = []
        for (m, n, k), us in fit.timed(measured, "streamed"):
            sizes = {"m": m, "k": k, "c_out" if measured["problem"]["op"] == "quantized_linear" else "n": n}
            problem = Dispatcher().describe(**measured["problem"], **sizes)
            losses.append(us[streamed.launch(problem, device).choice] / min(us.values()))
        assert len(losses) >= 59
        assert np.exp(np.log(losses).mean()) < 1.02
        assert max(losses) < 1.33


def test_the_chosen_configuration_is_near_the_best_of_those_measured():
    """Times of `skuda tune`: of every configuration, and of the other kernel's where both serve."""
    losses, against = [], []
    (measured,) = fit.sets_of(ROOT / "docs/evidence/h200-few-tokens.json")
    others = dict(fit.timed(measured, "warpgroup"))
    for shape, us in fit.timed(measured, "streamed"):
        chosen = us[streamed.launch(static(*shape), H200).choice]
        losses.append(chosen / min(us.values()))
        against.append(chosen / next(iter(others[shape].values())))  # the first of its ranking
    assert len(losses) >= 80
    assert np.exp(np.log(losses).mean()) < 1.025
    assert max(losses) < 1.2
    assert np.exp(np.log(against).mean()) < 0.9
