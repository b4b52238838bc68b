"""Arrays beyond a size, here a small one: with NumPy arrays, and where torch is installed with its CPU tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from halved import FEW, LOOSE, HalvedDescriptor, dispatcher_of, toy

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.dtypes import storage_dtype
from skuda.registry import Between, Case
from skuda.registry.descriptor import storage_shape
from skuda.registry.device import HOST
from skuda.tools.verify import large
from skuda.tools.verify.checks import perform
from skuda.tools.verify.large import large_problem
from skuda.tools.verify.placement import HostPlacement, Placement, TorchPlacement
from skuda.tools.verify.trial import Examples, Trial

DISPATCHER = Dispatcher(built_in_registry())


@pytest.fixture(params=["numpy", "torch"])
def placement(request) -> Placement:
    if request.param == "numpy":
        return HostPlacement()
    pytest.importorskip("torch")
    return TorchPlacement("cpu")


@pytest.fixture
def small(monkeypatch):
    """Make large problems small."""
    for name, value in (("TOTAL", 64 * FEW), ("PIECE", 1 << 10), ("MEMORY", 0)):
        monkeypatch.setattr(large, name, value)


def trial_of(sku: Any, placement: Placement, dispatcher: Any = None, **more: Any) -> Trial:
    dispatcher = dispatcher or dispatcher_of(sku)
    trial = Trial(sku, dispatcher, HOST, placement, Examples(dispatcher.registry.ops[sku.op], 3), **more)
    perform(trial, "large")
    return trial


def test_large_problems_are_large_and_made_of_small_ones():
    for op in built_in_ops():
        sku = next(sku for sku in op.skus if sku.backend == "numpy")
        found = large_problem(Trial(sku, DISPATCHER, HOST, HostPlacement(), Examples(op, 3)))
        sizes = []
        for one, whole in zip(found.small.arguments(), found.problem.arguments(), strict=True):
            count = (one.shape[0] - 1) * found.copies + 1 if one.name == "starts" else one.shape[0] * found.copies
            assert one.shape == whole.shape or whole.shape == (count, *one.shape[1:])
            if not whole.is_scalar:
                size = storage_dtype(whole.elements[0]).itemsize
                sizes.append(math.prod(storage_shape(whole.shape, whole.elements[0])) * size)
        assert 2**31 < max(sizes) < 2**33


def test_a_right_kernel_is_compared_over_all_copies(placement, small):
    trial = trial_of(toy("reference"), placement)
    problem = large_problem(trial).problem
    assert (trial.failures, trial.checks) == ({}, {"large": ""})
    assert trial.outputs == problem.n * problem.d > 16 * FEW


@pytest.mark.parametrize(
    ("entry", "output", "says"),
    [
        ("wrong_in_a_late_copy", "y", r"copy (\d+) of \d+ in HalvedDescriptor.*; 1 of"),
        ("beside_when_large", "y", "memory beside an array of a large problem was written"),
        ("over_its_input_when_large", "x", "an input of a large problem was written"),
        ("raises_when_large", "", "ZeroDivisionError: odd"),
    ],
)
def test_each_kind_of_fault_of_a_large_problem_is_caught(placement, small, entry, output, says):
    trial = trial_of(toy(entry), placement)
    failure = trial.failures["large"]
    assert failure.output == output
    assert re.match(says, failure.message), failure.message
    if entry == "wrong_in_a_late_copy":
        assert failure.at == (large_problem(trial).problem.n - 1, 0)
        assert failure.got.startswith("1.0000000150474662e+30")


def test_what_is_not_promised_is_not_compared(placement, small):
    trial = trial_of(toy("within_two", LOOSE), placement)
    assert (trial.failures, trial.outputs) == ({}, 0)


def test_every_built_in_reference_is_right_on_large_problems(placement, small, monkeypatch):
    """Also of packed elements, of flat arrays, of ranges over all rows, and of scalar outputs."""
    monkeypatch.setattr(large, "TOTAL", 1 << 13)
    for op in built_in_ops():
        skus = [sku for sku in op.skus if sku.backend == "numpy"]
        for sku in skus[:: 1 + len(skus) // 8]:
            trial = trial_of(sku, placement, DISPATCHER)
            assert (trial.failures, trial.checks) == ({}, {"large": ""}), sku.id


@pytest.mark.parametrize(
    ("changes", "more", "says"),
    [
        ({"constraints": (Between(field="n", maximum=FEW),)}, {}, "it refuses a problem of"),
        ({}, {"memory": 24 << 30}, "it takes a device with 24 GiB"),
        ({"element": "f64"}, {}, "no case of its op can be repeated"),
        ({"element": "f64"}, {"more": (Case(HalvedDescriptor(n=0, d=3, element="f64")),)}, "no case of its op can"),
    ],
)
def test_what_cannot_be_run_large_says_why(small, monkeypatch, changes, more, says):
    monkeypatch.setattr(large, "MEMORY", more.pop("memory", 0))
    trial = trial_of(toy("reference", **changes), HostPlacement(), **more)
    assert trial.failures == {}
    assert trial.checks["large"].startswith(says)
