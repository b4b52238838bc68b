"""The wgmma product without a GPU: its tiles, launches and tensor maps, and the problems and arrays that it refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
from fakes import DEVICE, FakeArray, Rig
from harness.resources import Job, compiled
from products import dynamic, scaled, static
from support import SEED, fresh, sampled

from skuda.dispatch import Dispatcher, Plan, PlanPreference
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.compile import compilers as compiling
from skuda.dispatch.cuda import tensor_maps
from skuda.dispatch.cuda.packing import packer, parameter_layout
from skuda.dispatch.plan import Ready
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import MOST_ZEROS, Constant, Pointer, Step, TensorMap
from skuda.kernels.linear import hopper, mma, streamed, warpgroup
from skuda.kernels.linear.warpgroup import TILES
from skuda.registry import ElementKind, InvalidProblem
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.errors import Unaligned

H200 = KNOWN_DEVICES["h200"]


def explain(problem, preference=None, device=H200):
    return Dispatcher().explain(problem, *([preference] if preference else []), device=device)


def sizes(count, *key):
    """Draw m, n, k; k a multiple of 16."""
    rng = fresh("sizes", *key)
    for _ in range(count):
        m, n, k = (int(2 ** rng.uniform(0, high)) for high in (14, 15, 14))
        yield m, n, max(16, k // 16 * 16)


# --- tiles and launches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_tile_fits_a_block_and_its_boxes_fit_tma(tile):
    assert tile.shared() <= H200.shared_memory == hopper.MAX_SHARED
    for rows, parts in ((tile.m, tile.cluster[1]), (tile.n, tile.cluster[0])):
        assert rows % (8 * parts) == 0, "a box must be whole groups of eight rows"
        assert rows // parts <= 256
    assert tile.m // (1 + tile.cooperative) % 64 == 0, "a warpgroup multiplies 64 rows at a time"


def test_every_tile_is_ranked_and_the_grid_covers_every_result():
    for m, n, k in sizes(50):
        ranked = warpgroup.ranking(m, n, k, 132)
        assert {tile for _, tile in ranked} == set(TILES)
        times = [us for us, _ in ranked]
        assert times == sorted(times)
        assert all(math.isfinite(us) and us > 0 for us in times)
        launch = warpgroup.launch(static(m, n, k), H200)
        (tile,) = (tile for tile in TILES if str(tile) == launch.choice)
        (step,) = launch.steps
        rows, columns = tile.grid(m, n)
        assert (rows * tile.cluster_m >= m, columns * tile.cluster_n >= n) == (True, True)
        assert step.grid[0] % tile.blocks == 0
        assert (step.grid[0] <= 132, step.shared) == (True, tile.shared())


@pytest.mark.parametrize("spare", [1, 4, 131, 500])
def test_multiprocessors_are_spared(spare):
    problem, preference = scaled(512, 8192, 14336), PlanPreference(spare_multiprocessors=spare)
    part = preference.part_of(H200)
    assert part.sm_count == max(1, 132 - spare)
    (step,) = warpgroup.launch(problem, part).steps
    assert math.prod(step.grid) <= max(2, part.sm_count)  # the smallest cluster has two blocks
    plans = [Dispatcher().select(problem, *given, device=H200) for given in ((preference,), ())]
    assert [plan.device for plan in plans] == [H200, H200]
    assert warpgroup.launch(problem, part).explanation()[0] in explain(problem, preference).notes


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        *itertools.product((warpgroup, mma), (static(), dynamic(), scaled())),
        *itertools.product((streamed,), (static(16), static(1, 4096, 4096), static(100, 512, 4096))),
        *itertools.product((streamed,), (dynamic(16), dynamic(1), scaled(16))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_configuration_of_a_launch_rule_can_be_chosen_by_name(module, problem):
    best = module.launch(problem, H200)
    names = [choice.name for choice in best.choices]
    times = [choice.microseconds for choice in best.choices]
    assert (names[0], times) == (best.choice, sorted(times))
    assert len(set(names)) == len(names) > 1
    assert module is streamed or len(names) == len(TILES if module is warpgroup else mma.TILES)
    launches = [module.launch(problem, H200, name) for name in names]
    assert launches[0] == best
    assert hash(launches[0]) == hash(best)
    assert all(launch.choices == best.choices for launch in launches)
    assert len({(launch.flags, launch.steps) for launch in launches}) == len(launches)
    for launch in launches:
        assert launch.explanation()[0].startswith(f"configuration {launch.choice}: ")
    assert names[1] in best.explanation()[0]
    with pytest.raises(LookupError, match=re.escape(names[-1])):
        module.launch(problem, H200, "1 x 1")


# --- problems --------------------------------------------------------------------------------------------------------


def test_sums_fit_in_32_bits_at_the_largest_k():
    for weight, largest in ((ElementKind.S8, 128), (ElementKind.U8, 255)):
        (limit,) = (c for c in hopper.constraints(weight) if c.kind == "between")
        assert limit.maximum * 255 * largest <= 2**31 - 1 < (limit.maximum + 1) * 255 * largest


def launch_of(sku, problem):
    return CudaCoreBackend.launch_of(built_in_registry().sku(sku), problem, H200)


@pytest.mark.parametrize("problem", [static(m=0), static(n=0), scaled(m=0), scaled(n=0, output_element="s32")], ids=str)
def test_an_empty_output_launches_nothing(problem):
    for each in explain(problem).accepted:
        assert "numpy" in each.sku or launch_of(each.sku, problem).steps == ()


@pytest.mark.parametrize("m", [3, 40, 256])
def test_codes_are_made_for_an_empty_product(m):
    problem = dynamic(m=m, n=0)
    kernels = [each.sku for each in explain(problem).accepted if "numpy" not in each.sku]
    assert {sku.rpartition(".")[2] for sku in kernels} >= {"warpgroup", "mma", "plain"}
    for sku in kernels:
        assert [step.entry for step in launch_of(sku, problem).steps] == ["quantized_linear_codes"], sku


@pytest.mark.parametrize(
    ("of", "zero_points", "sums"),
    [
        (static, {"act_zero_point": 3}, 512),
        (static, {"has_weight_zero_point": True}, 256),
        (scaled, {"has_act_zero_point": True, "has_weight_zero_point": True}, 512 + 256),
        (dynamic, {"has_weight_zero_point": True}, 256),
    ],
)
def test_a_launch_before_the_product_adds_up_codes_for_zero_points(of, zero_points, sums):
    launch, plain = warpgroup.launch(of(**zero_points), H200), warpgroup.launch(of(), H200)
    *before, summing, product = launch.steps
    assert (*before, product.entry) == (*plain.steps[:-1], plain.steps[-1].entry)
    assert (summing.entry, summing.overlaps, dict(launch.scratch)["code_sums"]) == ("code_sums", True, 4 * sums)
    assert not any(step.entry == "code_sums" for step in plain.steps)
    assert any("zero points" in note for note in launch.explanation())
    if not before and sums == 512:
        for limit, variant in ((4 * sums, "warpgroup"), (4 * sums - 1, "mma")):
            chosen = explain(of(**zero_points), PlanPreference(max_workspace_bytes=limit)).chosen
            assert chosen.endswith(variant)


def test_a_limit_of_the_workspace_selects_a_configuration_without_partial_sums():
    problem = static(900, 512, 30000)
    launch, first = warpgroup.launch(problem, H200), warpgroup.launch(problem, H200).choices[0]
    assert dict(launch.scratch)["partial_sums"] == first.workspace > 0, "the best configuration is stream-K"
    plans = [
        Dispatcher().select(problem, PlanPreference(max_workspace_bytes=limit), device=H200)
        for limit in (None, first.workspace, 0)
    ]
    assert len({plan.sku for plan in plans}) == 1
    tight = next(choice.name for choice in launch.choices if not choice.workspace)
    assert [plan.choice for plan in plans] == ["", "", tight]


# --- stream-K --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.stream_k], ids=str)
def test_shares_cover_every_k_block_once_and_none_is_empty(tile):
    """Computes the shares as ``TileScheduler`` of ``warpgroup.cuh`` does."""
    seen = grouped = alone = 0
    for m, n, k in sizes(400, tile):
        clusters, divided, groups, band = tile.schedule(m, n, k, 132)
        k_blocks, (rows, columns) = -(-k // 128), tile.grid(m, n)
        assert 1 <= clusters * tile.blocks <= 132
        assert band >= 1
        if not divided:
            assert (groups, clusters) == (1, min(132 // tile.blocks, rows * columns))
            continue
        seen, grouped = seen + 1, grouped + (groups > 1)
        assert divided <= rows * columns
        assert divided == rows * columns or groups == 1
        assert divided % groups == clusters % groups == min(rows, columns) % groups == 0
        members, units = clusters // groups, divided // groups * k_blocks
        begins = [units * member // members for member in range(members + 1)]
        assert (begins[0], begins[-1]) == (0, units)
        assert all(low < high for low, high in itertools.pairwise(begins)), (tile, m, n, k)
        assert clusters == 1 or divided * k_blocks >= 4 * clusters, "a share has at least four k-blocks"
        alone += clusters % divided == 0 and {tile * k_blocks for tile in range(divided // groups)} <= set(begins)
        assert divided * k_blocks < 2**31
        assert 8 * clusters * tile.blocks <= MOST_ZEROS
    assert seen > grouped > 0
    assert alone > 0, "in some schedules every cluster has a part of one tile only"


# --- compilation -----------------------------------------------------------------------------------------------------

_KINDS = (
    ("smoothquant_linear", "s8", "bf16", "IDENTITY"),
    ("smoothquant_linear", "u8", "s8", "BIAS_GELU"),
    ("smoothquant_linear", "s8", "f32", "BIAS_SILU"),
    ("smoothquant_linear", "s8", "f16", "BIAS_RELU"),
    ("scaled_linear", "s8", "bf16", "IDENTITY"),
    ("scaled_linear", "u8", "s32", "IDENTITY"),
)


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no NVRTC")
@pytest.mark.parametrize("number", sampled(range(len(TILES)), 2))
def test_every_tile_compiles_for_the_registers_of_setmaxnreg(number):
    """A remark says that wgmma is serialized (C7510) or that registers cannot be handed over (C7508)."""
    op, code, output, epilogue = _KINDS[(number + SEED) % len(_KINDS)]
    sku = next(s for s in built_in_registry().skus_of(op) if s.variant == "warpgroup")
    tile, job = TILES[number], Job.of(sku, "sm_90a")
    shifts = 0 if output == "s32" else (number + SEED // 7) % 4
    more = (*tile.flags, f"-DSKUDA_CODE={code}", f"-DSKUDA_OUT={output}", f"-DSKUDA_EPILOGUE={epilogue}")
    result = compiled(dataclasses.replace(job, flags=(*job.flags, *more, f"-DSKUDA_ZERO_POINTS={shifts}")))
    assert not result.remarks, f"{tile}: {result.remarks}"
    assert result.kernels[f"{op}_warpgroup"].registers == 168, f"{tile}: 384 threads share 65,536 registers"


# --- tensor maps and arrays ------------------------------------------------------------------------------------------


class Encoding:
    """A driver that records the maps that it makes."""

    def __init__(self):
        self.made = []

    def call(self, name, place, element, rank, address, sizes, strides, box, steps, *modes):
        assert (name, place.value % 64) == ("cuTensorMapEncodeTiled", 0)
        self.made.append((element, rank, address.value, tuple(sizes), tuple(strides), tuple(box), tuple(steps), modes))
        ctypes.memset(place.value, 0xA0 + len(self.made), 128)


@pytest.fixture
def encoding(monkeypatch):
    driver = Encoding()
    monkeypatch.setattr(tensor_maps, "driver", lambda: driver)
    tensor_maps._encoded.cache_clear()
    yield driver
    tensor_maps._encoded.cache_clear()


def test_a_map_is_made_once_for_an_address_and_a_stride(encoding):
    encode = tensor_maps.encoder(TensorMap("w", 300, 1024, 64), "op")
    first = encode(0x1000, 2048)
    assert encode(0x1000, 2048) is first
    assert tensor_maps.encoder(TensorMap("v", 300, 1024, 64), "of other rows")(0x1000, 2048) is first
    assert first == bytes([0xA1]) * 128
    assert encode(0x1000, 1024) != first
    assert encoding.made[0] == (0, 2, 0x1000, (1024, 300), (2048,), (128, 64), (1, 1), (0, 3, 2, 0))
    for at in range(10_000):
        encode(0x2000 + 16 * at, 1024)
    assert encode(0x1000, 2048) != first, "only the latest are kept"
    tensor_maps.encoder(TensorMap("a", 1, 100, 64), "op")(0x1000, 7)
    assert encoding.made[-1][4] == (112,), "the stride of a single row does not matter"


@pytest.mark.parametrize("lead", [0, 48])
def test_parameters_lie_where_the_compiled_kernel_has_them(encoding, lead):
    parameters = (TensorMap("a", 2, 16, 8), TensorMap("w", 2, 16, 8), Constant(ElementKind.S32, 0), Pointer("y"))
    step = Step("k", (1, 1, 1), (1, 1, 1), parameters, lead=lead)
    assert parameter_layout(step) == ((lead, 128), (lead + 128, 128), (lead + 256, 4), (lead + 264, 8))
    packed = packer(step, "op")
    content = packed.pack(0x1000, 16, 0x2000, 16, -1, 0x3000)
    assert len(content) == packed.size == lead + 272
    assert content[lead : lead + 260] == bytes([0xA1]) * 128 + bytes([0xA2]) * 128 + b"\xff" * 4
    assert content[lead + 264 :] == (0x3000).to_bytes(8, "little")


M, N, K = 32, 48, 64
ARRAYS = {
    "act_q": FakeArray((M, K), np.int8, 0x10000),
    "weight_q": FakeArray((N, K), np.int8, 0x20000),
    "weight_scale": FakeArray((N,), np.float32, 0x30000),
    "output": FakeArray((M, N), np.float32, 0x40000),
}
UNALIGNED = [
    ("act_q", FakeArray((M, K), np.int8, 0x10001)),
    ("act_q", FakeArray((M, K), np.int8, 0x10000, (K + 1, 1))),
    ("weight_q", FakeArray((N, K), np.int8, 0x20008)),
]


@pytest.fixture
def rig(encoding):
    return Rig(static(M, N, K, output_element="f32"), warpgroup.launch)


def test_slices_are_read_in_place(rig):
    rig.run(**ARRAYS)
    assert rig.last[:4] == (0x10000, K, 0x20000, K)
    rig.run(**ARRAYS | {"act_q": FakeArray((M, K), np.int8, 0x10080, (512, 1))})
    assert rig.last[:4] == (0x10080, 512, 0x20000, K)


@pytest.mark.parametrize(("name", "array"), UNALIGNED)
def test_an_array_that_tma_cannot_read_is_refused(rig, name, array):
    with pytest.raises(Unaligned, match=name):
        rig.runner.check(ARRAYS | {name: array})
    rig.run(**ARRAYS)
    before = len(rig.engine.launches)
    with pytest.raises(Unaligned, match=name):
        rig.run(**ARRAYS | {name: array})
    assert len(rig.engine.launches) == before


class Runner:
    """A runner that takes arrays of some names only."""

    notes = ()

    def __init__(self, *names):
        self.names, self.ran = names, []

    def check(self, given):
        if not given.keys() <= set(self.names):
            raise Unaligned("op", "x", "the address 0x1", "be a multiple of 16")

    def run(self, given, stream):
        self.check(given)
        self.ran.append((given, stream))
        return self.names

    def bind(self, given, stream):
        self.check(given)
        return lambda: (self.names, stream)


def plan_of(runner, following=None):
    sku = next(iter(Dispatcher().registry.skus_of("smoothquant_linear")))
    ready = Ready(runner, following=lambda: following)
    return Plan.prepared(ready, sku=sku, problem=static(), device=DEVICE, preference=PlanPreference())


def test_a_plan_hands_unaligned_arrays_to_the_next_kernel():
    first, second = Runner("aligned"), Runner("aligned", "other")
    plan = plan_of(first, plan_of(second))
    assert plan.run(aligned=1) == first.names
    assert plan.run(other=1, stream=7) == second.names
    assert second.ran == [({"other": 1}, 7)]
    assert plan.can_implement(other=1)
    assert plan.bind(other=1, stream=7)() == (second.names, 7)
    assert plan.bind(aligned=1)() == (first.names, None)
    only = plan_of(Runner("aligned"))
    for call in (only.run, only.bind, only.can_implement):
        with pytest.raises(InvalidProblem, match="multiple of 16"):
            call(other=1)
