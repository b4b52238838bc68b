"""Linear layers on packed 4-bit weights: what is refused, what follows from the arrays, and the launch in front."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeArray, Rig
from products import dynamic, scaled, static
from support import assert_same_bits, draw, fresh, run

from skuda import ops
from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.shard.explanation import check, held, problems, traffic
from skuda.dispatch.shard.layer import ShardSchedule
from skuda.dispatch.shard.shards import Shards
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.linear import mma, packed, plain, warpgroup
from skuda.registry import Case, InvalidProblem
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.errors import Unaligned

H200, A100 = KNOWN_DEVICES["h200"], KNOWN_DEVICES["a100"]
MAKERS = {"scaled_linear": scaled, "quantized_linear": dynamic, "smoothquant_linear": static}
GROUPS = {"weight_element": "s4", "group_size": 64}


def chosen(problem, device, **preference):
    """Return the explanation of a problem, and the kernel that it names."""
    found = Dispatcher().explain(problem, PlanPreference(**preference), device)
    return found, built_in_registry().sku(found.chosen)


def drawn(problem, rng, values="normal"):
    return draw(built_in_registry().ops[problem.op], Case(problem, values), rng).inputs


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    ("fields", "named", "rule"),
    [
        ({"weight_element": "s4"}, "group_size", "be one of 32, 64, 128"),
        ({"weight_element": "s4", "group_size": 16}, "group_size", "be one of 32, 64, 128"),
        ({"group_size": 32}, "group_size", "be 0: a weight_element of s8 has no groups"),
        ({"weight_element": "u8", "group_size": 64}, "group_size", "be 0: a weight_element of u8 has no groups"),
        (GROUPS | {"has_weight_zero_point": True}, "has_weight_zero_point", "whose groups have offsets instead"),
    ],
)
def test_fields_that_do_not_fit_the_weight_are_refused(make, fields, named, rule):
    with pytest.raises(InvalidProblem, match=f"{named} must {rule}|{named} must .*{rule}"):
        make(**fields)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("size", packed.GROUP_SIZES)
def test_a_packed_weight_gives_what_its_codes_give_and_says_its_fields(make, size):
    rng = fresh(make.__name__, size)
    m, n, k = rng.integers(1, (40, 90, 400)).tolist()
    problem = make(m, n, k, weight_element="s4", group_size=size, epilogue=rng.choice(["identity", "bias_gelu"]))
    inputs = drawn(problem, rng, rng.choice(["normal", "special"]))
    fields = {"output_element": problem.output, "epilogue": problem.epilogue}
    fields |= {"act_scale": problem.act_scale} if problem.op == "smoothquant_linear" else {}
    call = getattr(ops, problem.op)
    found = call(**inputs, **fields)
    codes = packed.unpacked(inputs["weight_q"], n, k)
    assert_same_bits(found, call(**inputs | {"weight_q": codes}, **fields), repr(problem))
    assert_same_bits(found, run(problem, inputs)["output"], repr(problem))


def test_rows_of_sums_are_those_of_whole_units_unless_they_are_given():
    rng = fresh("rows")
    n, k = 37, 200
    inputs = drawn(scaled(3, n, k, output_element="s32", **GROUPS), rng)
    want = inputs["act_q"].astype(np.int32) @ packed.unpacked(inputs["weight_q"], n, k).T.astype(np.int32)
    found = ops.scaled_linear(**inputs, output_element="s32")
    assert found.shape == (3, 48)
    assert_same_bits(found[:, :n], want, "all rows")
    assert_same_bits(ops.scaled_linear(**inputs, output_element="s32", n=n), want, "the rows that there are")
    given = np.empty((3, n), np.int32)
    ops.scaled_linear(**inputs, output_element="s32", output=given)
    assert_same_bits(given, want, "the rows of the output")


@pytest.mark.parametrize(
    ("change", "fields", "rule"),
    [
        (lambda w: w[..., :-1], {}, "weight_q must have as its last axis .* 1152 for groups of 32, 1088 .* 1056"),
        (lambda w: w[0], {}, "weight_q must be .*shape"),
        (lambda w: w[:, :1], {}, r"weight_q must be an array of shape \(3, 2, 1088\) of u8; had shape \(3, 1, 1088\)"),
        (lambda w: w.view(np.int8), {}, "weight_q must be an array of shape .* of u8; had an array of int8"),
        (lambda w: w, {"group_size": 32}, r"weight_q must be an array of shape \(3, 2, 1152\) of u8"),
        (lambda w: w, {"n": 49}, r"weight_q must be an array of shape \(4, 2, 1088\) of u8"),
    ],
)
def test_an_array_that_is_no_packed_weight_of_the_problem_is_refused(change, fields, rule):
    inputs = drawn(scaled(3, 37, 200, output_element="s32", **GROUPS), fresh(rule))
    with pytest.raises(InvalidProblem, match=rule):
        ops.scaled_linear(act_q=inputs["act_q"], weight_q=change(inputs["weight_q"]), output_element="s32", **fields)


@pytest.mark.parametrize(
    ("problem", "device", "variant"),
    [
        (static(m=1024, **GROUPS), H200, "warpgroup"),
        (scaled(k=1000, **GROUPS), H200, "mma"),
        (dynamic(**GROUPS), A100, "mma"),
        (scaled(k=0, **GROUPS), H200, "plain"),
        (scaled(output_element="f64", **GROUPS), A100, "plain"),
    ],
)
def test_unpacking_leads_to_the_kernel_for_8_bit_codes(problem, device, variant):
    accepted = Dispatcher().explain(problem, device=device).accepted
    first = next(decision.sku for decision in accepted if ".expanded_" in decision.sku)
    found, kernel = chosen(problem, device, sku=first)
    _, on_codes = chosen(problem.on_codes, device)
    assert (on_codes.variant, kernel.variant) == (variant, f"expanded_{variant}")
    assert "the 4-bit weight is unpacked in front: a launch, and a byte of scratch" in str(found)
    _, n, k = problem.sizes
    more = n * (-(-k // 16) * 16)
    assert kernel.workspace_size(problem) == on_codes.workspace_size(problem.on_codes) + more


@pytest.mark.parametrize("strategy", [warpgroup, mma, plain])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_only_the_first_step_reads_the_packed_weight(make, strategy):
    problem = make(m=16, n=100, k=336, **GROUPS)
    launch = strategy.expanded(problem, H200)
    first, *steps = launch.steps
    assert (first.entry, first.overlaps) == ("unpack_weight", False)
    assert dict(launch.scratch)["unpacked_weight"] == 100 * 336
    named = [getattr(part, "name", "") for step in steps for part in step.parameters]
    assert "weight_q" not in named
    assert "unpacked_weight" in named
    assert "weight_q" in launch.aligned


M, N, K = 32, 40, 200
SHAPE = packed.shape_of(N, K, 64)
ARRAYS = {
    "act_q": FakeArray((M, K), np.int8, 0x10000),
    "act_scale": FakeArray((M,), np.float32, 0x50000),
    "weight_q": FakeArray(SHAPE, np.uint8, 0x20000),
    "weight_scale": FakeArray((N,), np.float32, 0x30000),
    "output": FakeArray((M, N), np.float32, 0x40000),
}


@pytest.fixture
def rig():
    return Rig(scaled(M, N, K, output_element="f32", **GROUPS), mma.expanded)


def test_the_kernel_gets_the_scratch_with_rows_at_multiples_of_16_bytes(rig):
    rig.run(**ARRAYS)
    (_, unpacking, *_), (_, product, *_) = rig.engine.launches
    address, scratch, *sizes = unpacking
    assert (address, sizes) == (0x20000, [208, N, K, 2])
    at = product.index(scratch)
    assert product[at + 1] == 208
    assert 0x20000 not in product


@pytest.mark.parametrize(
    ("weight", "error", "rule"),
    [
        (FakeArray(SHAPE, np.uint8, 0x20008), Unaligned, "weight_q must .* multiples of 16"),
        (
            FakeArray(SHAPE, np.uint8, 0x20000, (4 * 1088, 1088, 1)),
            InvalidProblem,
            "weight_q must be contiguous; copy it first",
        ),
    ],
)
def test_a_weight_that_the_unpacking_cannot_read_is_refused(rig, weight, error, rule):
    with pytest.raises(error, match=rule):
        rig.run(**ARRAYS | {"weight_q": weight})
    assert not rig.engine.launches


@pytest.mark.parametrize("axis", ["n", "k"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_parts_of_a_split_layer_have_packed_weights_of_their_own(make, axis):
    problem, shards = make(m=8, n=96, k=512, **GROUPS), Shards(axis=axis, count=2)
    schedule = ShardSchedule.of(shards, traffic(check(problem, shards)))
    for rank in range(2):
        products = [one for (name, _), one in problems(problem, schedule, rank).items() if name in ("layer", "sums")]
        assert [(one.weight_element, one.group_size) for one in products] == [("s4", 64)]
        weight = next(one for one in held(problem, schedule, rank) if one.name == "weight_q")
        assert weight.shape == packed.shape_of(*((48, 512) if axis == "n" else (96, 256)), 64)
        assert products[0].packed_shape == weight.shape
