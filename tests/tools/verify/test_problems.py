"""The problems that kernels are run on: every kind of values, every power of two, both sides of every constraint."""

from __future__ import annotations

import numpy as np
import pytest
from halved import CASES, OP, HalvedDescriptor, toy
from support import fresh

from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.constraints import Between, MultipleOf, OneOf
from skuda.registry.op import Case
from skuda.tools.verify.problems import accepts, cases_of, refused_by

OPS = {op.name: op for op in built_in_ops()}
KERNELS = [sku for sku in built_in_registry() if sku.backend == "numpy"]


def test_every_kernel_gets_every_kind_of_input_and_size():
    for sku in KERNELS:
        cases = [each.case for each in cases_of(sku, OPS[sku.op])]
        assert {case.values for case in cases} >= {
            "ties",
            "special",
            "infinite",
            "zero",
            "extreme",
            "small_data",
            "small_scales",
        }, sku.id
        extents = {extent for case in cases for a in case.problem.arguments() for extent in a.shape}
        assert {0, 1} <= extents, sku.id
        assert {extent.bit_length() - 1 for extent in extents} >= set(range(17)) - {0, 1, 2, 3, 4}, sku.id
        if "numel" in type(cases[0].problem).model_fields:
            assert max(extents) > 1 << 20, sku.id
        if issubclass(OPS[sku.op].descriptor, LinearProblem):
            lengths = {case.problem.k for case in cases}
            assert any(k % 16 == 3 and k > 4096 for k in lengths), sku.id
            assert any(k % 128 == 0 and k > 4096 for k in lengths), sku.id
            # Sums as the output refuse a K at which they could leave s32.
            assert max(lengths) > (65536 if sku.element == "s32" else 131071), sku.id


def test_derived_problems_are_numbered_behind_those_of_the_op_and_are_new():
    cases = cases_of(toy("reference"), OP)
    assert [each.case for each in cases if each.own] == list(CASES)
    assert [each.number for each in cases] == list(range(len(cases)))
    assert len({each.case for each in cases}) == len(cases)
    assert cases_of(toy("reference"), OP, (Case(HalvedDescriptor(n=99, d=99)),))[len(CASES)].own


@pytest.mark.parametrize(
    "constraint",
    [
        Between(field="d", maximum=5000),
        Between(field="n", minimum=17),
        MultipleOf(field="d", divisor=8),
        OneOf(field="n", allowed=(3, 5)),
    ],
    ids=lambda constraint: constraint.kind,
)
def test_problems_lie_on_both_sides_of_the_edge_of_a_constraint(constraint):
    sku = toy("reference", constraints=(constraint,))
    accepted = [getattr(each.case.problem, constraint.field) for each in cases_of(sku, OP)]
    refused = [getattr(problem, constraint.field) for problem in refused_by(sku, OP)]
    assert all(accepts(sku.constraints, each.case.problem) for each in cases_of(sku, OP))
    edge = {"d": {5000, 4999} if isinstance(constraint, Between) else {8, 24}, "n": {17, 18}}
    assert set(accepted) >= (edge[constraint.field] if not isinstance(constraint, OneOf) else {3, 5})
    assert refused
    assert not set(refused) & set(accepted)


@pytest.mark.parametrize(
    "name", ["dynamic_range", "quantize_per_token", "quantize_per_tensor", "fake_quantize_backward"]
)
def test_special_inputs_hold_what_they_are_named_for(name):
    op, rng = OPS[name], fresh(name)
    cases = [each.case for sku in op.skus if sku.backend == "numpy" for each in cases_of(sku, op) if not each.own]
    for case in cases:
        data = np.asarray(draw(op, case, rng).inputs["input"], np.float64)
        if data.size < 100:
            continue
        least = float(np.nanmin(np.abs(data[data != 0]), initial=np.inf))
        if case.values in ("special", "infinite"):
            assert np.isnan(data).any()
            assert least < 2.0**-14
        if case.values == "infinite":
            assert np.isposinf(data).any()
            assert np.isneginf(data).any()
        if case.values in ("special", "infinite") and data.ndim == 2 and min(data.shape) >= 5:
            assert (data == 0).all(axis=1).any()
            assert (data == 0).sum(axis=0).max() > 0
        if case.values == "zero":
            assert not data.any()


def test_extreme_codes_make_large_odd_sums():
    op, rng = OPS["smoothquant_linear"], fresh("extreme")
    sku = next(sku for sku in op.skus if sku.id.endswith("f32-s8.rcr-identity.cpu.numpy.reference"))
    case = next(each.case for each in cases_of(sku, op) if each.case.problem.k == 65539)
    drawn = draw(op, case, rng).inputs
    sums = np.abs(drawn["act_q"].astype(np.int64) @ drawn["weight_q"].astype(np.int64).T)
    assert sums.max() == 128 * 128 * 65539
    assert (sums % 2 == 1).any()
    assert sums.min() > 1 << 24
