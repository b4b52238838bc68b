"""A layer that is split over the ranks of a group has the bits of the whole layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shards import WAYS, cuttable, part, wanted_of, ways_of
from support import assert_same_bits, dispatcher, draw, fresh, run, sampled

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.shard import NVLINK, Link, Shards, on_ranks, select_shards, split
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.linear import (
    QuantizedLinearDescriptor,
    ScaledLinearDescriptor,
    SmoothQuantLinearDescriptor,
    packed,
)
from skuda.kernels.linear.problem import SUMS
from skuda.registry import InvalidProblem, Registry, Unsupported
from skuda.registry.elements import ElementKind
from skuda.registry.guarantee import PrecisionRequirement
from skuda.registry.op import Case

OPS = {op.name: op for op in built_in_ops() if op.name.endswith("_linear")}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{i}")
    for op in OPS.values()
    for i, case in enumerate(op.cases)
    if case.problem.output not in SUMS and case.problem.compute is case.problem.output.compute
]
SLOW = Link(latency_us=0.0, gigabytes_per_s=1e-3)
"""With it bytes decide, so that sums are scattered; with NVLink small layers add up everywhere."""


def on_shards(problem, shards, inputs, preference=None):
    """What every rank returns."""
    plan = select_shards(dispatcher(), problem, shards, preference)
    return on_ranks(shards.count, lambda g: plan.bind(g).run(**part(problem, shards, g.rank, inputs)), patience=60)


def assert_invariant(problem, shards, inputs):
    inputs = cuttable(problem, shards, inputs)
    whole = run(problem, inputs)["output"]
    for rank, got in enumerate(on_shards(problem, shards, inputs)):
        assert_same_bits(got, wanted_of(whole, problem, shards, rank), f"rank {rank} of {shards}")


def shards_for(way, problem, rng, count=None):
    """Shards of a way: even or arbitrary parts, empty ones too, over a fast or a slow link, in chunks or not.

    Half of the packed weights are cut in whole units.
    """
    axis, given, wanted = way
    count = count or int(rng.integers(1, 9))
    _, n, k = problem.sizes

    def cuts(total, unit=1):
        ends = np.sort(unit * rng.integers(0, total // unit + 1, count - 1))
        return tuple(np.diff([0, *ends, total]).tolist()) if rng.random() < 0.5 else None

    in_units = problem.weight_element == "s4" and rng.random() < 0.5
    sizes = cuts(*((n, packed.ROWS) if axis == "n" else (k, packed.BLOCK))[: 1 + in_units])
    of_input = cuts(k) if (axis, given) == ("n", "columns") else None
    link = NVLINK if rng.random() < 0.5 else SLOW
    shards = Shards(axis=axis, count=count, sizes=sizes, input=given, output=wanted, input_sizes=of_input, link=link)
    return shards.model_copy(update={"chunks": int(rng.integers(1, 6))}) if shards.divisible else shards


@pytest.mark.parametrize(("op", "case"), sampled(CASES, 1, each=lambda op, case: (op.name, case.problem.epilogue)))
def test_every_linear_case_has_the_same_bits_on_all_ranks(op, case):
    rng = fresh(op.name, case)
    inputs = draw(op, case, rng).inputs
    for way in rng.permutation(np.array(ways_of(case.problem), object))[:3]:
        assert_invariant(case.problem, shards_for(tuple(way), case.problem, rng), inputs)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(CASES),
    st.tuples(*(st.integers(0, 40) for _ in range(3))),
    st.sampled_from(WAYS),
    st.integers(1, 8),
    st.sampled_from(["normal", "special", "infinite", "zero"]),
    st.integers(0, 2**32 - 1),
)
def test_any_sizes(params, sizes, way, count, values, seed):
    op, case = params.values
    names = ("m", "c_out" if op.name == "quantized_linear" else "n", "k")
    problem = type(case.problem)(**case.problem.model_dump() | dict(zip(names, sizes, strict=True)))
    rng = np.random.default_rng(seed)
    assume(way in ways_of(problem))
    inputs = draw(op, Case(problem, values), rng).inputs
    assert_invariant(problem, shards_for(way, problem, rng, count), inputs)


def layer(**fields):
    return QuantizedLinearDescriptor(**{"q_min": -127, "q_max": 127, "activation_element": "f32"} | fields)


def test_sums_over_ranks_may_reach_the_end_of_s32():
    """131,071 products of -128 by -128 are the largest sum that fits; K is judged as a whole."""
    problem = ScaledLinearDescriptor(m=2, n=1, k=131_071, output_element="f32")
    inputs = {
        "act_q": np.full((2, 131_071), -128, np.int8),
        "weight_q": np.full((1, 131_071), -128, np.int8),
        "act_scale": np.ones(2, np.float32),
        "weight_scale": np.ones(1, np.float32),
    }
    assert_invariant(problem, Shards(axis="k", count=3), inputs)
    longer = problem.model_copy(update={"k": 131_072})
    with pytest.raises(InvalidProblem, match="at most 131071 where it is split"):
        select_shards(dispatcher(), longer, Shards(axis="k", count=3))
    assert select_shards(dispatcher(), longer, Shards(axis="n", count=3)).kernels


NARROWER = layer(m=3, c_out=5, k=7, output_element="f32").model_copy(update={"activation_element": ElementKind.F64})


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (NARROWER.model_copy(update={"k": 3}), "output_element f64"),
        (ScaledLinearDescriptor(m=1, n=2, k=3, output_element="s32"), "adds up the sums"),
        (OPS["scaled_linear"].cases[0].problem.model_copy(update={"k": 40}), "add up to 40"),
        (next(op for op in built_in_ops() if op.name == "fill").cases[0].problem, "be a linear layer"),
    ],
)
def test_what_cannot_be_split_so_is_refused_with_its_reason(problem, words):
    with pytest.raises(InvalidProblem, match=words):
        select_shards(dispatcher(), problem, Shards(axis="k", count=2, sizes=(1, 2)))


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("weight_q", lambda a: a[:, :-1], r"weight_q must have shape \[5, 4\] on rank 0"),
        ("activation", lambda a: a[:2], r"activation must have shape \[3, 4\]"),
        ("weight_scale", lambda _: None, "weight_scale must be given"),
        ("act_q_scratch", lambda _: np.zeros((3, 4), np.int8), "act_q_scratch must be left out"),
    ],
)
def test_a_rank_that_passes_something_else_is_reported(name, wrong, words):
    problem, shards = layer(m=3, c_out=5, k=8), Shards(axis="k", count=2)
    inputs = draw(OPS["quantized_linear"], Case(problem), fresh(name)).inputs
    plan = select_shards(dispatcher(), problem, shards)

    def work(group):
        arrays = part(problem, shards, group.rank, inputs)
        if group.rank == 0:
            arrays[name] = wrong(arrays.get(name))
        return plan.bind(group).run(**arrays)

    with pytest.raises(InvalidProblem, match=words):
        on_ranks(2, work)


def test_preferences_are_honoured_in_every_step():
    problem, shards = layer(m=3, c_out=5, k=8), Shards(axis="k", count=2)
    with pytest.raises(Unsupported, match=r"preference\.backend"):
        select_shards(dispatcher(), problem, shards, PlanPreference(backend="pycuda"), "cpu")
    plan = select_shards(dispatcher(), problem, shards, PlanPreference(backend="numpy"))
    names = [dict(rank) for rank in plan.kernels]
    assert names[0] == names[1]
    assert set(names[0]) == {"amax", "quantize", "sums", "rescale"}
    assert all(".numpy." in kernel for kernel in names[0].values())
    main = PlanPreference(sku=names[0]["sums"])
    assert select_shards(dispatcher(), problem, shards, main).kernels == plan.kernels
    with pytest.raises(Unsupported):
        select_shards(dispatcher(), problem, shards, PlanPreference(sku=names[0]["amax"]))


def _with_loose_rescale():
    """Return a dispatcher whose kernels of `rescale` on cards promise 2 ulp."""

    def loosened(sku):
        loose = sku.precision_guarantee.model_copy(update={"max_ulp": 2})
        return sku if sku.backend == "numpy" else sku.model_copy(update={"precision_guarantee": loose})

    ops = (replace(op, skus=tuple(map(loosened, op.skus))) if op.name == "rescale" else op for op in built_in_ops())
    return Dispatcher(Registry(tuple(ops), origin="a test"))


def test_the_promise_is_the_least_of_all_steps():
    problem, shards = layer(m=3, c_out=5, k=8, epilogue="bias_gelu"), Shards(axis="k", count=2)
    plain = select_shards(dispatcher(), problem, shards, device="h200")
    assert plain.precision_guarantee.shard_invariant
    assert plain.precision_guarantee.accumulator is ElementKind.S32
    assert "shard-invariant" in plain.precision_guarantee.describe()
    loose = _with_loose_rescale()
    promise = select_shards(loose, problem, shards, device="h200").precision_guarantee
    assert promise.max_ulp == 2
    assert not promise.shard_invariant
    require = PlanPreference(require=PrecisionRequirement(shard_invariant=True))
    with pytest.raises(Unsupported, match="shard_invariant"):
        select_shards(loose, problem, shards, require, "h200")
    assert select_shards(loose, problem, shards, require, "cpu").kernels


def test_smoothquant_scales_stay_fields():
    problem = SmoothQuantLinearDescriptor(m=5, n=6, k=33, act_scale=0.1, act_zero_point=3, output_element="bf16")
    inputs = draw(OPS["smoothquant_linear"], Case(problem), fresh()).inputs
    for way in WAYS:
        assert_invariant(problem, shards_for(way, problem, fresh(way), 3), inputs)


def test_parts_are_even_multiples_of_sixteen_where_there_is_room():
    assert split(28672, 3, 16) == (9568, 9552, 9552)
    assert split(10, 4) == (3, 3, 2, 2)
    assert split(2, 3) == (1, 1, 0)
    assert split(0, 2, 16) == (0, 0)
    assert Shards(axis="n", count=2).parts(33, 5) == (32, 1)
    assert Shards(axis="k", count=2).parts(33, 31) == (16, 15)
