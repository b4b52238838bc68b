"""The warpgroup product without a GPU: which tile, which launch, which arrays; what it refuses and who serves those."""

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
from paths import ROOT
from products import dynamic, scaled, static
from support import SEED, sampled

from skuda.dispatch import Dispatcher, Plan, PlanPreference
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.compile import compilers as compiling
from skuda.dispatch.cuda import tensor_maps
from skuda.dispatch.cuda.call import packer, parameter_layout
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import MOST_ZEROS, Constant, Launch, Pointer, Step, TensorMap, Which
from skuda.kernels.linear import hopper, mma, streamed, warpgroup
from skuda.registry import ElementKind, InvalidProblem, NotPrepared, PrecisionRequirement
from skuda.registry.device import HOST, KNOWN_DEVICES
from skuda.registry.errors import Unaligned
from skuda.tools.bench import fit

H200 = KNOWN_DEVICES["h200"]
RNG = np.random.default_rng(SEED)


def sizes(count):
    """Draw m, n, k; k a multiple of 16."""
    for _ in range(count):
        m, n, k = (int(2 ** RNG.uniform(0, high)) for high in (14, 15, 14))
        yield m, n, max(16, k // 16 * 16)


# --- the choice of a tile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", warpgroup.TILES, ids=str)
def test_a_tile_fits_a_block_and_the_copy_engine(tile):
    assert tile.shared() <= H200.shared_memory == hopper.MOST_SHARED
    for rows, parts in ((tile.m, tile.cluster[1]), (tile.n, tile.cluster[0])):
        assert rows % parts == 0
        assert rows // parts % 8 == 0, "a box must be whole groups of eight rows"
        assert rows // parts <= 256
    assert tile.m // (1 + tile.cooperative) % 64 == 0, "a warpgroup multiplies 64 rows at a time"


def test_every_tile_is_ranked_and_longer_rows_take_longer():
    for m, n, k in sizes(50):
        ranked = warpgroup.ranking(m, n, k, 132)
        assert sorted(map(repr, (tile for _, tile in ranked))) == sorted(map(repr, warpgroup.TILES)), (m, n, k, SEED)
        times = [us for us, _ in ranked]
        assert times == sorted(times)
        assert all(math.isfinite(us) and us > 0 for us in times)
        # A tile that divides short rows among clusters launches few of them, so that longer rows may take it less.
        assert warpgroup.ranking(m, n, k + 4096, 132)[0][0] > times[0], (m, n, k, SEED)
        for tile in (tile for tile in warpgroup.TILES if not tile.divides):
            assert tile.predicted(m, n, k + 4096, 132) > tile.predicted(m, n, k, 132), (tile, m, n, k, SEED)


def test_the_grid_covers_every_result_and_never_exceeds_the_card():
    for m, n, k in sizes(50):
        launch = warpgroup.launch(static(m, n, k), H200)
        (step,) = launch.steps
        (tile,) = (tile for tile in warpgroup.TILES if str(tile) == launch.choice)
        rows, columns = tile.grid(m, n)
        assert rows * tile.m * tile.cluster[0] >= m
        assert columns * tile.n * tile.cluster[1] >= n
        assert step.grid[0] % tile.blocks == 0
        assert step.grid[0] <= 132
        assert step.shared == tile.shared()


@pytest.mark.parametrize("spare", [1, 4, 131, 500])
def test_multiprocessors_are_spared(spare):
    problem, preference = scaled(512, 8192, 14336), PlanPreference(spare_multiprocessors=spare)
    part = preference.part_of(H200)
    assert part.sm_count == max(1, 132 - spare)
    (step,) = warpgroup.launch(problem, part).steps
    assert math.prod(step.grid) <= max(2, part.sm_count)  # a cluster of two is the least
    plan, own = (Dispatcher().select(problem, *given, device=H200) for given in ((preference,), ()))
    assert plan.device == own.device == H200
    explained = Dispatcher().explain(problem, preference, H200)
    assert warpgroup.launch(problem, part).told()[0] in explained.notes


def test_a_device_of_unknown_size_is_spared_nothing():
    unknown = H200.model_copy(update={"sm_count": 0})
    assert PlanPreference(spare_multiprocessors=4).part_of(unknown) is unknown
    assert PlanPreference().part_of(H200) is H200


def test_a_launch_names_its_tile_its_time_and_the_runners_up():
    launch = warpgroup.launch(static(4096, 4096, 4096), H200)
    best, second = (tile for _, tile in warpgroup.ranking(4096, 4096, 4096, 132)[:2])
    assert launch.told()[0].startswith(f"configuration {best}: ")
    assert str(second) in launch.told()[0]
    assert f"-DTILE_M={best.m}" in launch.flags
    explained = Dispatcher().explain(static(4096, 4096, 4096), device=H200)
    assert explained.chosen.endswith("warpgroup")
    assert launch.told()[0] in explained.notes


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        *itertools.product((warpgroup, mma), (static(), dynamic(), scaled())),
        *itertools.product((streamed,), (static(16), static(1, 4096, 4096), static(100, 512, 4096))),
        *itertools.product((streamed,), (dynamic(16), dynamic(1), scaled(16))),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_configuration_that_a_rule_ranks_can_be_asked_for(module, problem):
    best = module.launch(problem, H200)
    assert best.choice == best.choices[0].name
    assert [c.microseconds for c in best.choices] == sorted(c.microseconds for c in best.choices)
    assert len({c.name for c in best.choices}) == len(best.choices) > 1
    assert module is streamed or len(best.choices) == len(module.TILES)
    asked = [module.launch(problem, H200, c.name) for c in best.choices]
    assert asked[0] == best
    assert [launch.choice for launch in asked] == [c.name for c in best.choices]
    assert all(launch.choices == best.choices for launch in asked)
    assert len({(launch.flags, launch.steps) for launch in asked}) == len(asked)
    assert module is streamed or len({launch.flags for launch in asked}) == len(asked)
    assert all(launch.told()[0].startswith(f"configuration {launch.choice}: ") for launch in asked)
    with pytest.raises(LookupError, match=re.escape(best.choices[-1].name)):
        module.launch(problem, H200, "1 x 1")


# --- what it serves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        static(k=1000),
        static(k=65_808),
        static(k=33_040, weight_element="u8"),
        static(m=127, act_zero_point=3),
        static(output_element="f64"),
        static(k=0),
        dynamic(k=24),
        dynamic(activation_element="f64"),
        dynamic(output_element="f64"),
        scaled(m=40, has_act_zero_point=True, has_weight_zero_point=True),
        scaled(output_element="f64"),
        scaled(output_element="s32", k=131_056),
    ],
    ids=str,
)
def test_what_it_cannot_serve_goes_to_another_kernel_with_the_reason(problem):
    found = Dispatcher().explain(problem, device=H200)
    assert found.chosen is not None
    assert not found.chosen.endswith("warpgroup")
    own = [d for d in found.refused if d.sku.endswith("warpgroup")]
    assert own
    assert all(d.reasons for d in own)


@pytest.mark.parametrize("name", [name for name in KNOWN_DEVICES if KNOWN_DEVICES[name].compute_capability != (9, 0)])
def test_other_chips_get_other_kernels(name):
    assert "warpgroup" not in (Dispatcher().explain(static(), device=KNOWN_DEVICES[name]).chosen or "")


def test_a_caller_may_decline_kernels_for_one_chip_or_ask_for_wider_sums():
    for preference in (
        PlanPreference(allow_arch_specific=False),
        PlanPreference(require=PrecisionRequirement(accumulator=ElementKind.S64)),
    ):
        assert not Dispatcher().explain(static(), preference, H200).chosen.endswith("warpgroup")


def test_sums_fit_in_32_bits_at_the_largest_k():
    for weight, largest in ((ElementKind.S8, 128), (ElementKind.U8, 255)):
        (limit,) = (c for c in hopper.constraints(weight) if c.kind == "between")
        assert limit.maximum * 255 * largest <= 2**31 - 1
        assert (limit.maximum + 1) * 255 * largest > 2**31 - 1


@pytest.mark.parametrize("module", [warpgroup, streamed])
@pytest.mark.parametrize("scope", ["token", "tensor"])
def test_given_scales_are_read_where_the_arrays_are(module, scope):
    problem = scaled(m=16, act_scale_scope=scope)
    (step,) = module.launch(problem, H200).steps
    step_between = Constant(ElementKind.S64, int(scope == "token"))
    given = (Pointer("act_scale"), Which("act_scale"), Constant(ElementKind.S64, 0), step_between)
    assert step.parameters[2:6] == given
    assert step.parameters[:2] == tuple(module.launch(static(m=16), H200).steps[0].parameters[:2])
    (summing,) = module.launch(scaled(m=16, output_element="s32"), H200).steps
    assert not [p for p in summing.parameters if isinstance(p, Pointer) and "scale" in p.name]


@pytest.mark.parametrize("output", ["bf16", "s32"])
@pytest.mark.parametrize(("m", "variant"), [(1, "streamed"), (32, "streamed"), (256, "warpgroup")])
def test_sums_and_given_scales_get_the_kernels_of_the_family(m, variant, output):
    assert Dispatcher().explain(scaled(m, output_element=output), device=H200).chosen.endswith(variant)


@pytest.mark.parametrize("problem", [static(m=0), static(n=0), scaled(m=0), scaled(n=0, output_element="s32")], ids=str)
def test_nothing_to_do_launches_nothing(problem):
    for found in Dispatcher().explain(problem, device=H200).decisions:
        if found.accepted and "numpy" not in found.sku:
            assert launch_of(found.sku, problem).steps == ()


def launch_of(sku, problem):
    return CudaCoreBackend.launch_of(built_in_registry().sku(sku), problem, H200)


@pytest.mark.parametrize("m", [3, 40, 256])  # 3: one kernel for both, elsewhere
def test_codes_are_made_where_only_their_product_is_empty(m):
    problem = dynamic(m=m, n=0)
    taken = [d.sku for d in Dispatcher().explain(problem, device=H200).accepted if "numpy" not in d.sku]
    assert {sku.rpartition(".")[2] for sku in taken} >= {"warpgroup", "mma", "plain"}
    for sku in taken:
        (step,) = launch_of(sku, problem).steps
        assert step.entry == "quantized_linear_codes", sku


@pytest.mark.parametrize(
    ("problem", "variant"),
    [
        (static(32, 4096, act_zero_point=3, has_weight_zero_point=True), "streamed"),
        (static(33, 4096, act_zero_point=3), "mma"),
        (static(33, act_zero_point=3), "streamed"),
        (static(127, 4096, act_zero_point=3), "mma"),
        (static(128, 4096, act_zero_point=3), "warpgroup"),
        (static(33, 4096, has_weight_zero_point=True), "warpgroup"),
        (scaled(32, has_act_zero_point=True), "streamed"),
        (scaled(127, 4096, has_act_zero_point=True, has_weight_zero_point=True), "mma"),
        (scaled(128, 4096, has_act_zero_point=True, has_weight_zero_point=True), "warpgroup"),
        (dynamic(2, has_weight_zero_point=True), "streamed"),
        (dynamic(33, 4096, has_weight_zero_point=True), "warpgroup"),
    ],
    ids=str,
)
def test_zero_points_are_served_where_their_sums_pay(problem, variant):
    """Sums of the weight's codes read all of it, which pays for many rows; the streamed kernel has it in hand."""
    found = Dispatcher().explain(problem, device=H200)
    assert found.chosen.endswith(variant)
    if variant == "mma":
        reasons = [reason for d in found.refused if d.sku.endswith("warpgroup") for reason in d.reasons]
        assert "rows_per_weight_sum" in {reason.field for reason in reasons}


def test_sums_of_codes_count_as_workspace():
    problem = static(act_zero_point=3)
    for limit, variant in ((4 * 512, "warpgroup"), (4 * 512 - 1, "mma")):
        found = Dispatcher().explain(problem, PlanPreference(max_workspace_bytes=limit), H200)
        assert found.chosen.endswith(variant)


@pytest.mark.parametrize(
    ("of", "zero_points", "sums"),
    [
        (static, {"act_zero_point": 3}, 512),
        (static, {"has_weight_zero_point": True}, 256),
        (scaled, {"has_act_zero_point": True, "has_weight_zero_point": True}, 512 + 256),
        (dynamic, {"has_weight_zero_point": True}, 256),
    ],
)
def test_codes_are_added_up_in_front_of_a_product_with_zero_points(of, zero_points, sums):
    launch, plain = warpgroup.launch(of(**zero_points), H200), warpgroup.launch(of(), H200)
    *before, summing, product = launch.steps
    assert (*before, product.entry) == (*plain.steps[:-1], plain.steps[-1].entry)
    assert summing.entry == "code_sums"
    assert summing.overlaps
    assert dict(launch.scratch)["code_sums"] == 4 * sums
    assert not any(step.entry == "code_sums" for step in plain.steps)
    assert "zero points: a launch in front adds up codes" in launch.told()
    # All configurations wait for the same sums.
    of_plain = {choice.name: choice for choice in plain.choices}
    waits = [choice.microseconds - of_plain[choice.name].microseconds for choice in launch.choices]
    assert np.allclose(waits, waits[0])
    assert waits[0] > 0


def test_both_steps_may_start_beside_the_kernel_in_front_of_them():
    codes, product = warpgroup.launch(dynamic(), H200).steps
    assert product.overlaps
    assert codes.overlaps
    assert product.parameters[0].otherwise == "codes"


@pytest.mark.parametrize("of", [dynamic, static, scaled])
@pytest.mark.parametrize("shift", [{}, {"has_weight_zero_point": True}])
def test_a_large_product_starts_early_only_where_that_leaves_neighbours_together(of, shift):
    small, large = of(256, 512, 1024, **shift), of(4096, 14336, 4096, **shift)
    for choice in warpgroup.launch(large, H200).choices:
        clusters = "clusters" in choice.name
        *before, product = warpgroup.launch(large, H200, choice.name).steps
        assert product.overlaps == clusters, choice.name
        assert warpgroup.launch(small, H200, choice.name).steps[-1].overlaps, choice.name
        assert len(before) == (of is dynamic) + bool(shift)


# --- tensor maps -----------------------------------------------------------------------------------------------------


class Encoding:
    """A driver that writes down what maps are asked for."""

    def __init__(self):
        self.asked = []

    def call(self, name, place, element, rank, address, sizes, strides, box, steps, *modes):
        assert name == "cuTensorMapEncodeTiled"
        assert place.value % 64 == 0
        self.asked.append((element, rank, address.value, tuple(sizes), tuple(strides), tuple(box), tuple(steps), modes))
        ctypes.memset(place.value, 0xA0 + len(self.asked), 128)


@pytest.fixture
def encoding(monkeypatch):
    found = Encoding()
    monkeypatch.setattr(tensor_maps, "driver", lambda: found)
    return found


def test_a_map_is_made_once_for_an_address_and_a_stride(encoding):
    encode = tensor_maps.encoder(TensorMap("w", 300, 1024, 64), "op")
    first = encode(0x1000, 2048)
    assert encode(0x1000, 2048) is first
    assert first == bytes([0xA1]) * 128
    assert encode(0x1000, 1024) != first
    assert encoding.asked[0] == (0, 2, 0x1000, (1024, 300), (2048,), (128, 64), (1, 1), (0, 3, 2, 0))
    for at in range(1000):
        encode(0x2000 + 16 * at, 1024)
    assert encode(0x1000, 2048) != first, "the latest are remembered, not all"


def test_the_stride_of_a_single_row_does_not_matter(encoding):
    tensor_maps.encoder(TensorMap("a", 1, 100, 64), "op")(0x1000, 7)
    assert encoding.asked[0][4] == (112,)


@pytest.mark.parametrize(("address", "leading"), [(0x1001, 1024), (0x1000, 1032)])
def test_an_unaligned_matrix_is_refused_by_name(encoding, address, leading):
    with pytest.raises(Unaligned, match=rf"op: w must .* {address:#x} and rows {leading} bytes apart"):
        tensor_maps.encoder(TensorMap("w", 300, 1024, 64), "op")(address, leading)
    assert not encoding.asked


@pytest.mark.parametrize("lead", [0, 48])
def test_parameters_lie_where_the_compiled_kernel_has_them(encoding, lead):
    parameters = (TensorMap("a", 2, 16, 8), TensorMap("w", 2, 16, 8), Constant(ElementKind.S32, 0), Pointer("y"))
    step = Step("k", (1, 1, 1), (1, 1, 1), parameters, lead=lead)
    assert parameter_layout(step) == ((lead, 128), (lead + 128, 128), (lead + 256, 4), (lead + 264, 8))
    packed = packer(step, "op")
    content = packed.pack(0x1000, 16, 0x2000, 16, -1, 0x3000)
    assert len(content) == packed.size == lead + 272
    assert content[lead : lead + 256] == bytes([0xA1]) * 128 + bytes([0xA2]) * 128
    assert content[lead + 256 : lead + 260] == b"\xff" * 4
    assert content[lead + 264 :] == (0x3000).to_bytes(8, "little")


# --- arrays ----------------------------------------------------------------------------------------------------------

M, N, K = 32, 48, 64


def arrays(**changes):
    found = {
        "act_q": FakeArray((M, K), np.int8, 0x10000),
        "weight_q": FakeArray((N, K), np.int8, 0x20000),
        "weight_scale": FakeArray((N,), np.float32, 0x30000),
        "output": FakeArray((M, N), np.float32, 0x40000),
    }
    return found | changes


@pytest.fixture
def rig(encoding):
    return Rig(static(M, N, K, output_element="f32"), warpgroup.launch)


def test_slices_are_read_in_place(rig):
    rig.run(**arrays())
    assert rig.last[:4] == (0x10000, K, 0x20000, K)
    rig.run(**arrays(act_q=FakeArray((M, K), np.int8, 0x10080, (512, 1))))
    assert rig.last[:4] == (0x10080, 512, 0x20000, K)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("act_q", FakeArray((M, K), np.int8, 0x10001)),
        ("act_q", FakeArray((M, K), np.int8, 0x10000, (K + 1, 1))),
        ("weight_q", FakeArray((N, K), np.int8, 0x20008)),
    ],
)
def test_what_the_copy_engine_cannot_read_is_said_when_bound_and_when_met_later(rig, name, array):
    with pytest.raises(Unaligned, match=name):
        rig.runner.check(arrays(**{name: array}))
    rig.run(**arrays())
    before = len(rig.engine.launches)
    with pytest.raises(Unaligned, match=name):
        rig.run(**arrays(**{name: array}))
    assert len(rig.engine.launches) == before


class Fussy:
    """A runner that takes arrays named ``good`` only."""

    notes = ()

    def __init__(self, name):
        self.name, self.served = name, []

    def check(self, given):
        if "good" not in given:
            raise Unaligned("op", "x", "the address 0x1", "be a multiple of 16")

    def run(self, given, stream):
        self.check(given)
        self.served.append((given, stream))
        return self.name

    def bind(self, given, stream):
        self.check(given)
        return lambda: (self.name, stream)


class Easy(Fussy):
    def check(self, given):
        pass


def plan_of(runner, following=None):
    sku = next(iter(Dispatcher().registry.skus_of("smoothquant_linear")))
    made = Plan.prepared(sku, static(), DEVICE, PlanPreference(), runner, lambda: following)
    assert made.problem == static()
    return made


def test_a_plan_hands_unaligned_arrays_to_the_next_kernel_and_nothing_else():
    first, second = Fussy("first"), Easy("second")
    plan = plan_of(first, plan_of(second))
    assert plan.run(good=1) == "first"
    assert plan.run(bad=1, stream=7) == "second"
    assert second.served == [({"bad": 1}, 7)]
    assert plan.can_implement(bad=1)
    assert plan.bind(bad=1, stream=7)() == ("second", 7)
    assert plan.bind(good=1)() == ("first", None)


def test_where_no_kernel_follows_the_refusal_stands():
    for call in (plan_of(Fussy("only")).run, plan_of(Fussy("only")).bind, plan_of(Fussy("only")).can_implement):
        with pytest.raises(InvalidProblem, match="multiple of 16"):
            call(bad=1)


def test_an_explicit_kernel_is_never_replaced():
    """Its ranking ends with it; without the wish, the plain kernel stands behind."""
    dispatcher, problem = Dispatcher(), static()
    plan = dispatcher.select(problem, device=H200)
    asked = dispatcher.select(problem, PlanPreference(sku=plan.sku.id), H200)
    assert asked.__pydantic_private__["_next"]() is None
    following, ranking = plan, []
    while following is not None:
        ranking.append(following.sku.id)
        following = following.__pydantic_private__["_next"]()
    assert ranking == [d.sku for d in dispatcher.explain(problem, device=H200).accepted]
    with pytest.raises(NotPrepared):
        plan.run(act_q=None)


def test_on_the_host_nothing_changes():
    assert Dispatcher().explain(static(), device=HOST).chosen.endswith("reference")


# --- compilation -----------------------------------------------------------------------------------------------------

_KINDS = (
    ("smoothquant_linear", "s8", "bf16", "IDENTITY"),
    ("smoothquant_linear", "u8", "s8", "BIAS_GELU"),
    ("smoothquant_linear", "s8", "f32", "BIAS_SILU"),
    ("smoothquant_linear", "s8", "f16", "BIAS_RELU"),
    ("scaled_linear", "s8", "bf16", "IDENTITY"),
    ("scaled_linear", "u8", "s32", "IDENTITY"),
)
_SPILLED = {
    ("smoothquant_linear", "bf16", 0, "128 x 128, ping-pong, 6 stages, clusters of 2 x 1, divided evenly"),
}
"""All of the kinds above with which NVRTC 13.5 keeps something in local memory: 24 bytes, none in the mainloop."""


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no NVRTC")
@pytest.mark.parametrize("number", sampled(range(len(warpgroup.TILES)), 2))
def test_every_tile_compiles_without_a_remark_and_keeps_its_sums_in_registers(number):
    """A remark would be that products are serialized (C7510) or that registers cannot be handed over (C7508)."""
    op, code, output, epilogue = _KINDS[(number + SEED) % len(_KINDS)]
    sku = next(s for s in Dispatcher().registry.skus_of(op) if s.variant == "warpgroup")
    tile, job = warpgroup.TILES[number], Job.of(sku, "sm_90a")
    shifts = 0 if output == "s32" else (number + SEED // 7) % 4
    more = (*tile.flags, f"-DSKUDA_CODE={code}", f"-DSKUDA_OUT={output}", f"-DSKUDA_EPILOGUE={epilogue}")
    result = compiled(dataclasses.replace(job, flags=(*job.flags, *more, f"-DSKUDA_ZERO_POINTS={shifts}")))
    assert not result.remarks, f"{tile}: {result.remarks}"
    needs = result.kernels[f"{op}_warpgroup"]
    most = 24 if (op, output, shifts, str(tile)) in _SPILLED else 0
    assert needs.stack <= most, tile
    assert needs.spills == 0 or most, tile
    assert needs.registers == 168, f"{tile}: {needs.registers}; 384 threads share 65,536, and setmaxnreg counts on it"


def test_a_launch_is_plain_data():
    launch = warpgroup.launch(static(), H200)
    assert isinstance(launch, Launch)
    assert hash(launch) == hash(warpgroup.launch(static(), H200))


# --- evidence --------------------------------------------------------------------------------------------------------

TILE_RECORD, H100_RECORD = (fit.sets_of(ROOT / f"docs/evidence/{card}-tiles.json") for card in ("h200", "h100"))


def _losses(measured, cache=None):
    """Return, for every shape, how much longer the chosen tile took than the best one, as a ratio.

    It is chosen for the card that was measured, or for one with so much L2 `cache`.
    """
    cache = measured["environment"]["device"]["l2_cache"] if cache is None else cache
    for shape, us in fit.timed(measured, "warpgroup"):
        if shape[0] < 33:  # `streamed` serves fewer
            continue
        ranked = [str(tile) for _, tile in warpgroup.ranking(*shape, 132, cache) if str(tile) in us]
        yield us[ranked[0]] / min(us.values())


def _assert_near(losses, *, fitted):
    assert np.exp(np.log(losses).mean()) < (1.02 if fitted else 1.015)
    assert (losses > 1.05).mean() < 0.15


@pytest.mark.parametrize("measured", [*TILE_RECORD, *H100_RECORD], ids=lambda each: f"seed {each['seed']}")
def test_the_chosen_tile_is_near_the_best_of_those_measured(measured):
    _assert_near(np.array(list(_losses(measured))), fitted=measured["fitted"])


@pytest.mark.parametrize("fitted", [True, False])
def test_enough_shapes_were_measured_to_say_so(fitted):
    losses = np.concatenate([list(_losses(each)) for each in TILE_RECORD if each["fitted"] is fitted])
    assert len(losses) > (800 if fitted else 100)
    _assert_near(losses, fitted=fitted)


def test_an_h100_chooses_by_its_own_times():
    own, others = (np.array([x for each in H100_RECORD for x in _losses(each, cache)]) for cache in (None, 60 << 20))
    assert len(own) > 200
    assert np.log(own).mean() < np.log(others).mean() / 2
    assert own.max() < 1.2 < others.max()


def test_times_are_those_of_the_card_with_the_most_similar_cache():
    assert warpgroup.tiles_like(0) == warpgroup.tiles_like(H200.l2_cache) == warpgroup.TILES
    for size, tiles in ((40, warpgroup.H100_TILES), (54, warpgroup.H100_TILES), (126, warpgroup.TILES)):
        assert warpgroup.tiles_like(size << 20) == tiles
    problem = static(8192, 4096, 4096)
    assert warpgroup.launch(problem, KNOWN_DEVICES["h100"]).choice != warpgroup.launch(problem, H200).choice


# --- tiles that are divided ------------------------------------------------------------------------------------------

DIVIDED = [tile for tile in warpgroup.TILES if tile.divides]


@pytest.mark.parametrize("tile", DIVIDED, ids=str)
def test_shares_cover_every_step_once_and_none_is_empty(tile):
    seen = grouped = 0
    for m, n, k in sizes(300):
        clusters, shared, groups, _ = tile.work(m, n, k, 132)
        if not shared:
            continue
        seen += 1
        grouped += groups > 1
        steps, tiles = -(-k // 128), math.prod(tile.grid(m, n))
        assert shared % groups == clusters % groups == 0
        members, units = clusters // groups, shared // groups * steps
        begins = [units * member // members for member in range(members + 1)]  # as in warpgroup.cuh
        assert begins[0] == 0
        assert begins[-1] == units
        assert all(low < high for low, high in itertools.pairwise(begins)), (tile, m, n, k, SEED)
        assert tiles - shared >= 0
        assert clusters == 1 or shared * steps >= 4 * clusters
        assert shared * steps < 2**31
        assert 8 * clusters * tile.blocks <= MOST_ZEROS
    assert seen > grouped > 0


@pytest.mark.parametrize(
    ("m", "n", "groups", "band"),
    [
        (6969, 752, 3, 1),
        (752, 6969, 3, 3),
        (1290, 1072, 5, 1),
        (1536, 1536, 6, 1),
        (2560, 2560, 5, 1),
        (200, 8192, 1, 8),
    ],
)
def test_clusters_fall_into_groups_that_read_the_longer_operand_together(m, n, groups, band):
    """Every group has a column of the grid, or a row: the tiles of one number differ in the shorter side only."""
    tile = DIVIDED[0]
    rows, columns = tile.grid(m, n)
    work = tile.work(m, n, 16384, 132)
    assert (work.groups, work.band) == (groups, band)
    most = 132 // tile.blocks
    assert most // work.shared * work.shared == work.clusters or 0.95 * most <= work.clusters <= most
    assert groups == 1 or work.shared == rows * columns
    assert min(rows, columns) % groups == 0


@pytest.mark.parametrize(
    ("number", "m", "n", "k", "clusters", "groups"),
    [
        (0, 194, 1664, 17104, 63, 1),  # 7 tiles, of 66 clusters
        (0, 317, 1100, 10848, 60, 2),
        (0, 880, 1312, 25472, 64, 4),  # 24 tiles: shares would be a third longer, 25 steps
        (0, 2895, 2912, 28112, 66, 1),  # more tiles than clusters
        (-1, 46, 2832, 5184, 90, 1),
        (-1, 46, 2832, 720, 67, 1),  # parts would be of three steps
    ],
)
def test_every_cluster_has_a_part_of_one_tile_alone_where_shares_get_little_longer(number, m, n, k, clusters, groups):
    tile = DIVIDED[number]
    work = tile.work(m, n, k, 132)
    assert (work.clusters, work.groups) == (clusters, groups)
    parts, rest = divmod(work.clusters, work.shared)
    if not rest and parts > 1:
        units, members = work.shared // groups * -(-k // 128), work.clusters // groups  # as in warpgroup.cuh
        begins = {units * member // members for member in range(members + 1)}
        assert begins >= {tiles * -(-k // 128) for tiles in range(work.shared // groups)}


@pytest.mark.parametrize(
    ("m", "n", "k", "shared"),
    [
        (2895, 2912, 28112, 12),  # of 144 tiles, by 66 clusters
        (2048, 5120, 13824, 28),
        (2056, 4300, 28112, 21),
        (2895, 2912, 4096, 66 + 12),  # L2 cache holds what a wave reads
        (300, 18944, 3584, 66 + 16),
        (1024, 8576, 28112, 66 + 4),  # shares of four tiles would be short
        (6969, 752, 30976, 66 + 18),  # all tiles, in groups
        (1024, 512, 28112, 8),  # less than a wave
    ],
)
def test_the_last_tiles_alone_are_divided_where_a_wave_reads_more_than_the_cache_holds(m, n, k, shared):
    assert DIVIDED[0].work(m, n, k, 132).shared == shared


def test_a_limit_of_the_workspace_is_kept_by_another_configuration():
    problem = static(900, 512, 30000)
    d = Dispatcher()
    free = d.select(problem, device=H200)
    launch = warpgroup.launch(problem, H200)
    assert launch.choices[0].workspace > 0, "the best configuration divides its tiles"
    assert dict(launch.scratch)["partial_sums"] == launch.choices[0].workspace
    tight = d.select(problem, PlanPreference(max_workspace_bytes=0), device=H200)
    assert tight.sku == free.sku
    chosen = {choice.name: choice for choice in launch.choices}[tight.choice]
    assert chosen.workspace == 0
    assert chosen == next(choice for choice in launch.choices if not choice.workspace)
    wide = d.select(problem, PlanPreference(max_workspace_bytes=launch.choices[0].workspace), device=H200)
    assert wide.choice == free.choice == ""


def test_loads_take_pairs_of_lines_where_rows_begin_at_one():
    for k, promotion in ((4096, 256), (4096 + 128, 128), (4304, 128)):
        (step,) = warpgroup.launch(static(256, 512, k), H200).steps
        assert [each.promotion for each in step.parameters if isinstance(each, TensorMap)] == [promotion] * 2
