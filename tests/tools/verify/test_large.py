"""Large problems, at small sizes: with NumPy arrays, and where torch is installed with its CPU tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from halved import ALWAYS, CASES, EXACT, FEW, LOOSE, OUTPUTS, HalvedDescriptor, dispatcher_of, toy

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.dtypes import storage_dtype
from skuda.registry import Between
from skuda.registry.descriptor import storage_shape
from skuda.registry.device import HOST
from skuda.tools.verify.evidence import SkuEvidence
from skuda.tools.verify.large import Copies, Sizes, large_problems, suitable
from skuda.tools.verify.placement import HostPlacement, Placement, TorchPlacement
from skuda.tools.verify.trial import Trial
from skuda.tools.verify.verification import verify

SMALL = Sizes(rows=3 * FEW, few=FEW, total=1 << 13, piece=1 << 10, memory=0)


@pytest.fixture(params=["numpy", "torch"])
def placement(request) -> Placement:
    if request.param == "numpy":
        return HostPlacement()
    pytest.importorskip("torch")
    return TorchPlacement("cpu")


def evidence_of(placement: Placement, *skus: Any, **more: Any) -> list[SkuEvidence]:
    given = {"skus": [sku.id for sku in skus], "seed": 3, "placement": placement, "sizes": SMALL, **more}
    return list(verify(dispatcher_of(*skus), HOST, **given).skus)


def test_large_problems_are_large_and_made_of_small_ones():
    for op in built_in_ops():
        problem = suitable(case.problem for case in op.cases)
        names = []
        for large in large_problems(problem):
            names.append(large.name)
            for small, whole in zip(large.small.arguments(), large.problem.arguments(), strict=True):
                same = small.shape == whole.shape
                assert same or whole.shape == (small.shape[0] * large.copies, *small.shape[1:])
            sizes = [
                int(np.prod(storage_shape(a.shape, a.elements[0]), dtype=float)) * storage_dtype(a.elements[0]).itemsize
                for a in large.problem.arguments()
                if not a.is_scalar
            ]
            limit = {"70,000 rows": 0, "more than 2,147,483,648 bytes": 2**31}[large.name]
            assert limit < max(sizes) < 2**33
        assert names[-1:] == ["more than 2,147,483,648 bytes"]


def test_a_right_kernel_is_compared_over_all_copies(placement):
    (found,) = evidence_of(placement, toy("reference"))
    (without,) = evidence_of(placement, toy("reference"), sizes=Sizes(memory=1))
    assert (found.verdict, found.first_failure) == ("verified", None)
    assert (without.cases, found.cases) == (len(CASES) + len(ALWAYS), len(CASES) + len(ALWAYS) + 2)
    assert without.outputs == OUTPUTS
    problem = suitable(case.problem for case in CASES)
    sizes = [large.problem.n * large.problem.d for large in large_problems(problem, SMALL)]
    assert sizes[0] == 3 * FEW * problem.d
    assert 4 * sizes[1] > SMALL.total
    assert found.outputs == without.outputs + sum(sizes)


@pytest.mark.parametrize(
    ("entry", "check", "output", "says"),
    [
        ("wrong_in_a_late_copy", "bits", "y", "210 rows: copy 2 of 3; 1 of"),
        ("beside_when_large", "guard", "y", "210 rows: beside the array"),
        ("over_its_input_when_large", "input", "x", "210 rows: an input was written"),
        ("raises_when_large", "error", "", "210 rows: ZeroDivisionError: odd"),
    ],
)
def test_each_kind_of_fault_of_a_large_problem_is_caught(placement, entry, check, output, says):
    wrong, right = evidence_of(placement, toy(entry), toy("reference"))
    failure = wrong.first_failure
    assert wrong.verdict == "failed"
    assert (failure.case, failure.check, failure.output) == (-1, check, output)
    assert failure.message.startswith(says)
    if check == "bits":
        assert failure.at == (3 * FEW - 1, 0)
        assert failure.got.startswith("1.0000000150474662e+30")
        assert wrong.promises.bit_exact is False
    assert right.verdict == "verified", "the next kernel on the same inputs is not to blame"


def test_a_distance_that_is_promised_holds_for_every_copy(placement):
    def sku(ulps: int) -> Any:
        return toy("within_two", EXACT.model_copy(update={"max_ulp": ulps}), variant=f"ulp_{ulps}")

    near, far = evidence_of(placement, sku(2), sku(1))
    assert (near.verdict, near.promises.within_ulp) == ("verified", True)
    assert (far.verdict, far.first_failure.check) == ("failed", "ulp")


def test_a_reference_that_fails_on_a_large_problem_is_told(monkeypatch):
    from skuda.tools.verify import large

    def fails(*_: Any) -> Any:
        raise MemoryError("little")

    monkeypatch.setattr(large, "draw", fails)
    (found,) = evidence_of(HostPlacement(), toy("reference"))
    assert found.first_failure.message == "210 rows: MemoryError: little"


def test_every_built_in_reference_is_right_on_large_problems(placement):
    """Also of packed elements, of flat arrays, of ranges over all rows, and of scalar outputs."""
    dispatcher, names = Dispatcher(built_in_registry()), set()
    for op in built_in_ops():
        skus = [sku for sku in op.skus if sku.backend == "numpy"]
        for sku in skus[:: 1 + len(skus) // 8]:
            trial = Trial(sku, partial(select, dispatcher, sku), placement)
            for large in large_problems(suitable(c.problem for c in op.cases if c.problem.key() == sku.key), SMALL):
                names.add(large.name)
                Copies(op, large, placement, seed=5).run(trial, partial(select, dispatcher, sku))
            assert trial.finding.failure is None, sku.id
            assert trial.finding.promises == {"bit_exact": True}
    assert names == {"210 rows", "more than 8,192 bytes"}


def select(dispatcher: Dispatcher, sku: Any, problem: Any) -> Any:
    return dispatcher.select(problem, PlanPreference(sku=sku.id))


def test_a_large_problem_that_is_refused_is_noted(placement):
    sku = toy("reference", constraints=(Between(field="n", maximum=100),))
    (found,) = evidence_of(placement, sku)
    assert (found.verdict, found.first_failure) == ("verified", None)
    assert "is refused" in found.note


def test_what_is_not_promised_is_not_compared_on_large_problems(placement):
    (found,) = evidence_of(placement, toy("within_two", LOOSE))
    assert (found.verdict, found.promises.within_ulp, found.promises.bit_exact) == ("verified", None, None)


def test_an_empty_problem_has_no_large_ones():
    assert list(large_problems(HalvedDescriptor(n=0, d=3), SMALL)) == []
