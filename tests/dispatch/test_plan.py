"""Plans and the records around them as values: they are copied, pickled and sent to other processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from skuda.dispatch import Dispatcher, Plan, PlanPreference, device_named
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.quantize import FakeQuantizeDescriptor
from skuda.registry import InvalidProblem, KernelFailed, NotPrepared, Unsupported

PROBLEM = FakeQuantizeDescriptor(numel=3, q_min=-8, q_max=7, input_element="f32")
GIVEN = {"input": np.float32([0.4, 100, -3]), "scale": 0.5, "zero_point": 1}
PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


@pytest.fixture(scope="module")
def dispatcher():
    return Dispatcher(built_in_registry())


def pickled(value, protocol=pickle.DEFAULT_PROTOCOL):
    return pickle.loads(pickle.dumps(value, protocol))  # noqa: S301  made here


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_a_pickled_plan_comes_back_as_from_json_and_is_prepared_where_it_lands(dispatcher, device, protocol):
    plan = dispatcher.select(PROBLEM, PlanPreference(require={"max_ulp": 0}), device)
    hash(plan)  # what is cached must not matter
    again = pickled(plan, protocol)
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


def test_an_error_survives_a_pickle(dispatcher):
    with pytest.raises(Unsupported) as refused:
        dispatcher.select(PROBLEM, PlanPreference(sku="none"))
    errors = (refused.value, InvalidProblem("a", "b", "c", "d"), KernelFailed("a.b", "pack 1.0", "ValueError: x"))
    for error in errors:
        again = pickled(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def landed(plan):
    """What another process does with a plan."""
    return Dispatcher(built_in_registry()).prepare(plan).run(**GIVEN).tolist()


def test_a_plan_goes_to_a_process_of_a_pool(dispatcher):
    plan = dispatcher.select(PROBLEM, device="cpu")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(landed, [plan]) == [plan.run(**GIVEN).tolist()]


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


def test_threads_copy_and_pickle_a_plan_that_runs(dispatcher):
    plan, want = dispatcher.select(PROBLEM, device="cpu"), []

    def work():
        want.extend(pickled(plan) == plan == copy.deepcopy(plan) and plan.run(**GIVEN).any() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert want == [True] * 200
