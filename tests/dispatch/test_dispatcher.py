"""The arguments of `Dispatcher`: devices by name, preferences, problems, and the errors for anything else."""

from __future__ import annotations

import re
from functools import partial

import pytest
from fakes import FakeCuda, toy_dispatcher
from toy import ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import KNOWN_DEVICES, Dispatcher, PlanPreference
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.launch_cache import FirstRun
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.elementwise import FillDescriptor
from skuda.registry import InvalidProblem, Unsupported
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST

FILL = FillDescriptor(numel=2, output_element="f32")
CARDS = FakeCuda("a100", "h200").cards


@pytest.fixture(scope="module")
def dispatcher():
    return Dispatcher(built_in_registry())


@pytest.fixture(scope="module")
def with_cards():
    backends = [FakeCuda("a100", "h200"), NumpyBackend()]
    return toy_dispatcher(cuda_sku("sm_80", "plain"), toy_sku(), backends=backends)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("cuda", CARDS[0]),
        ("cuda:0", CARDS[0]),
        (" CUDA:1 ", CARDS[1]),
        ("cpu", HOST),
        ("cpu:0", HOST),
        ("h200", KNOWN_DEVICES["h200"]),
        ("H 100", KNOWN_DEVICES["h100"]),
        ("RTX-4090", KNOWN_DEVICES["rtx4090"]),
    ],
)
def test_a_device_can_be_given_by_name(with_cards, name, device):
    problem = ToyDescriptor()
    plan = with_cards.select(problem, device=name)
    assert plan is with_cards.select(problem, device=device)
    assert plan.device == device
    assert with_cards.explain(problem, device=name) == with_cards.explain(problem, device=device)
    assert with_cards.choices(plan.sku, problem, name) == ()


@pytest.mark.parametrize("name", ["voodoo", "", "cuda:0", "cuda:-1", "cuda:" + "9" * 5000, "h200\n" * 10_000])
def test_an_unknown_device_is_refused_with_those_that_there_are(dispatcher, name):
    for ask in (dispatcher.select, dispatcher.explain):
        with pytest.raises(InvalidProblem) as caught:
            ask(FILL, device=name)
        error = caught.value
        assert error.field == "device"
        assert error.must.startswith("be one of cpu, cpu:0, which are here, or of a100, h100, h200, rtx4090, b200, ")
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 500


def test_run_and_select_take_a_preference_alike(dispatcher):
    only = PlanPreference(backend="numpy")
    assert dispatcher.select(FILL, only, "cpu") is dispatcher.select(FILL, preference=only, device=HOST)
    assert dispatcher.run(FILL, only, value=1.0).tolist() == [1.0, 1.0]
    assert dispatcher.run(FILL, preference=only, value=1.0).tolist() == [1.0, 1.0]
    assert dispatcher.select(FILL, None, HOST) is dispatcher.select(FILL, device=HOST)
    nothing = PlanPreference(sku="nothing")
    for ask in (dispatcher.run, dispatcher.select):
        with pytest.raises(Unsupported, match="'nothing'"):
            ask(FILL, nothing)
        with pytest.raises(Unsupported, match="'nothing'"):
            ask(FILL, preference=nothing)


PREFERENCE = "preference must be a PlanPreference, such as PlanPreference(backend=...); had"
NO_QUESTION = {
    "a device": ({"device": 2.5}, "Dispatcher: device must be a Device, the name of one, or None; had 2.5"),
    "a preference as a dict": ({"preference": {"backend": "numpy"}}, PREFERENCE),
    "a class of preferences": ({"preference": PlanPreference}, PREFERENCE),
    "no problem": ({"problem": None}, "problem must be a descriptor, such as Dispatcher.describe(op, ...); had None"),
    "a problem without an op": ({"problem": Descriptor()}, "problem must be a descriptor, such as "),
    "a class of problems": ({"problem": FillDescriptor}, "problem must be one of its problems: FillDescriptor(...);"),
}


@pytest.mark.parametrize(("wrong", "message"), NO_QUESTION.values(), ids=NO_QUESTION)
def test_what_is_no_question_is_refused_everywhere_alike(dispatcher, wrong, message):
    asked = {"problem": FILL, "preference": None} | wrong
    asks = [dispatcher.select, dispatcher.explain]
    if "device" not in wrong:
        asks.append(partial(dispatcher.run, value=1.0))
    for ask in asks:
        with pytest.raises(InvalidProblem, match=re.escape(message)):
            ask(**asked)


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("registry", [3, [toy_op()]]),
        ("backends", [3, NumpyBackend(), "numpy", [NumpyBackend(), None]]),
        ("tuning", [3, {}]),
        ("on_selection", [3]),
        ("nvtx", [1]),
    ],
)
def test_what_a_dispatcher_is_made_from_is_checked_when_it_is_made(argument, wrong):
    for value in wrong:
        with pytest.raises(InvalidProblem, match=f"Dispatcher: {argument} must"):
            Dispatcher(**{argument: value})


def test_backends_may_come_from_anything_that_is_iterated_once(dispatcher):
    made = Dispatcher(dispatcher.registry, backends=iter([NumpyBackend()]))
    assert list(made.backends) == ["numpy"]
    assert made.run(FILL, value=1.0).tolist() == [1.0, 1.0]


class Repeating:
    """A runner that knows a call again once it has run it."""

    notes = ()

    def __init__(self, ordinal, log):
        self.ordinal, self.log = ordinal, log

    def check(self, arrays):
        raise AssertionError

    bind = check

    def run(self, arrays, stream):
        self.log.append(("run", self.ordinal))
        return self.ordinal

    def first_run(self, arrays, stream, failed, positions):
        result = self.run(arrays, stream)

        def launch(given, stream):
            if given != arrays:
                return None
            self.log.append(("again", self.ordinal))
            return self.ordinal

        return FirstRun(result, launch, placed=True)


@pytest.fixture
def repeating(monkeypatch):
    log = []

    class Knowing(FakeCuda):
        def prepare(self, sku, problem, device, choice=""):
            return Repeating(device.ordinal, log)

    monkeypatch.setattr(
        "skuda.dispatch.runtime.common_place",
        lambda op, arrays: log.append("place") or ("cuda", arrays["x"] // 10),
    )
    backends = [Knowing("a100", "h200"), NumpyBackend()]
    return toy_dispatcher(cuda_sku("sm_80", "plain"), toy_sku(), backends=backends), log


def test_a_call_that_is_recognized_is_not_asked_where_its_arrays_are(repeating):
    dispatcher, log = repeating
    assert [dispatcher.run(ToyDescriptor(m=4), x=11) for _ in range(3)] == [1, 1, 1]
    assert log == ["place", ("run", 1), ("again", 1), ("again", 1)]
    del log[:]
    assert dispatcher.run(ToyDescriptor(m=4), x=5) == 0, "on the other card"
    assert dispatcher.run(ToyDescriptor(m=4), x=5) == 0
    assert dispatcher.run(ToyDescriptor(m=4), x=11) == 1
    assert log == ["place", ("run", 0), ("again", 0), ("again", 1)]


def test_calls_are_kept_apart_by_problem_and_preference(repeating):
    dispatcher, log = repeating
    asked = [
        (ToyDescriptor(m=4), None),
        (ToyDescriptor(m=5), None),
        (ToyDescriptor(m=4), PlanPreference(backend="pycuda")),
    ]
    for problem, preference in asked:
        assert dispatcher.run(problem, preference, x=11) == 1
    assert [each for each in log if each != "place"] == [("run", 1)] * 3
