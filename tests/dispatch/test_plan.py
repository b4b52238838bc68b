"""Plans and their records can be copied, pickled and sent to other processes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from skuda.dispatch import Dispatcher, Plan, PlanPreference, device_named
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.quantize import FakeQuantizeDescriptor
from skuda.registry import NotPrepared

PROBLEM = FakeQuantizeDescriptor(numel=3, q_min=-8, q_max=7, input_element="f32")
GIVEN = {"input": np.float32([0.4, 100, -3]), "scale": 0.5, "zero_point": 1}


@pytest.fixture(scope="module")
def dispatcher():
    return Dispatcher(built_in_registry())


def pickled(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301  made here


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_a_pickled_plan_is_prepared_where_it_lands(dispatcher, device):
    plan = dispatcher.select(PROBLEM, PlanPreference(require={"max_ulp": 0}), device)
    hash(plan)  # what is cached must not matter
    again = pickled(plan)
    assert again == plan == Plan.model_validate_json(plan.model_dump_json())
    assert hash(again) == hash(plan)
    assert again.model_dump() == plan.model_dump()
    assert again.notes == ()
    with pytest.raises(NotPrepared, match=r"Dispatcher\.prepare"):
        again.run(**GIVEN)
    if device == "cpu":
        np.testing.assert_array_equal(dispatcher.prepare(again).run(**GIVEN), plan.run(**GIVEN))


def test_a_plan_that_is_copied_is_ready(dispatcher):
    plan = dispatcher.select(PROBLEM, device="cpu")
    for copied in (copy.copy(plan), copy.deepcopy(plan), copy.deepcopy({"plans": [plan]})["plans"][0]):
        assert copied == plan
        np.testing.assert_array_equal(copied.run(**GIVEN), plan.run(**GIVEN))


@pytest.mark.parametrize("op", built_in_ops(), ids=lambda op: op.name)
def test_the_records_around_a_plan_survive_a_pickle(dispatcher, op):
    problem = op.cases[0].problem
    preference = PlanPreference(require={"deterministic": True})
    found = dispatcher.explain(problem, preference, "h200")
    sku = dispatcher.registry.skus_of(op.name)[0]
    for value in (problem, preference, device_named("h200"), sku, sku.identity, found, dispatcher.status["numpy"]):
        hash(value)
        for again in (pickled(value), copy.deepcopy(value)):
            assert again == value
            assert hash(again) == hash(value)
            assert type(again) is type(value)


def test_a_fresh_process_finds_the_descriptor_of_a_pickled_plan(dispatcher, tmp_path):
    plan = dispatcher.select(PROBLEM, device="cpu")
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    code = (
        "import pickle, sys; plan = pickle.load(open(sys.argv[1], 'rb')); from skuda.dispatch import Dispatcher;"
        " import numpy; x = numpy.float32([0.4, 100, -3]);"
        " print(Dispatcher().prepare(plan).run(input=x, scale=0.5, zero_point=1).tolist())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plan")],
        env={**os.environ, "SKUDA_PLUGINS": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == str(plan.run(**GIVEN).tolist())
