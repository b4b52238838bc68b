"""The dispatcher's questions: what is taken for a problem, a preference and a device, and how the rest is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from toy import ToyDescriptor, cuda_sku, toy_op, toy_sku

import skuda
from skuda.dispatch import KNOWN_DEVICES, Backend, BackendStatus, Dispatcher, PlanPreference, device_named
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.elementwise import FillDescriptor
from skuda.registry import InvalidProblem, InvalidRecord, Registry, Unsupported
from skuda.registry.backend import BUILT_IN
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST

FILL = FillDescriptor(numel=2, output_element="f32")
CARDS = tuple(
    KNOWN_DEVICES[name].model_copy(update={"ordinal": ordinal}) for ordinal, name in enumerate(("a100", "h200"))
)


class Cards(Backend):
    """Two cards that are only looked at."""

    spec = next(spec for spec in BUILT_IN if spec.name == "pycuda")

    def status(self):
        return BackendStatus(available=True, detail="two cards")

    def devices(self):
        return CARDS

    def prepare(self, sku, problem, device, choice=""):
        class Runner:
            notes = ()
            run = check = bind = print

        return Runner()


@pytest.fixture(scope="module")
def dispatcher():
    return Dispatcher(built_in_registry())


@pytest.fixture(scope="module")
def with_cards():
    registry = Registry([toy_op(cuda_sku("sm_80", "plain"), toy_sku())])
    return Dispatcher(registry, backends=[Cards(), NumpyBackend()])


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


@pytest.mark.parametrize("name", ["voodoo", "", "cuda:7", "cuda:-1", "gpu", "cuda:" + "9" * 5000, "h200\n" * 10_000])
def test_an_unknown_device_is_refused_with_those_that_there_are(dispatcher, name):
    for ask in (dispatcher.select, dispatcher.explain):
        with pytest.raises(InvalidProblem) as caught:
            ask(FILL, device=name)
        error = caught.value
        assert error.field == "device"
        assert error.must == "be one of cpu, cpu:0, which are here, or of a100, h100, h200, rtx4090, b200"
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 500


def test_a_card_that_is_not_here_is_no_device_of_this_machine(dispatcher):
    with pytest.raises(InvalidProblem, match="had 'cuda:0'"):
        dispatcher.select(FILL, device="cuda:0")


@pytest.mark.parametrize("wrong", [3, 2.5, b"h200", ["h200"], {"name": "h200"}, FILL, PlanPreference, np.ones(3)])
def test_what_is_no_device_is_refused(dispatcher, wrong):
    for ask in (dispatcher.select, dispatcher.explain):
        with pytest.raises(InvalidProblem, match="Dispatcher: device must be a Device, the name of one, or None; had "):
            ask(FILL, device=wrong)


@pytest.mark.parametrize("wrong", [3, None, [], ("h200",), b"h200", np.ones(3), object()])
def test_a_well_known_card_has_a_name_of_characters(wrong):
    with pytest.raises(InvalidRecord, match=r"Device: name must be one of cpu, a100, .*; had "):
        device_named(wrong)


# --- preferences -----------------------------------------------------------------------------------------------------


def test_run_and_select_take_a_preference_alike(dispatcher):
    only = PlanPreference(backend="numpy")
    assert dispatcher.select(FILL, only, "cpu") is dispatcher.select(FILL, preference=only, device=HOST)
    assert dispatcher.run(FILL, only, value=1.0).tolist() == [1.0, 1.0]
    assert dispatcher.run(FILL, preference=only, value=1.0).tolist() == [1.0, 1.0]
    nothing = PlanPreference(sku="nothing")
    for ask in (dispatcher.run, dispatcher.select):
        with pytest.raises(Unsupported, match="'nothing'"):
            ask(FILL, nothing)
        with pytest.raises(Unsupported, match="'nothing'"):
            ask(FILL, preference=nothing)


def test_none_is_no_preference(dispatcher):
    plan = dispatcher.select(FILL, device=HOST)
    assert dispatcher.select(FILL, None, HOST) is plan
    assert dispatcher.explain(FILL, None, HOST) == dispatcher.explain(FILL, device=HOST)
    assert dispatcher.run(FILL, None, value=1.0).tolist() == [1.0, 1.0]
    assert skuda.ops.fill(value=1.0, output=np.zeros(2, "f4"), preference=None, dispatcher=dispatcher).sum() == 2


@pytest.mark.parametrize("wrong", [{"backend": "numpy"}, {}, "numpy", 3, [], PlanPreference, np.ones(2), FILL])
def test_what_is_no_preference_is_refused_everywhere_alike(dispatcher, wrong):
    asks = [
        lambda: dispatcher.select(FILL, wrong),
        lambda: dispatcher.explain(FILL, wrong),
        lambda: dispatcher.run(FILL, wrong, value=1.0),
        lambda: skuda.ops.fill(value=1.0, output=np.zeros(2, "f4"), preference=wrong, dispatcher=dispatcher),
    ]
    for ask in asks:
        rule = r"preference must be a PlanPreference, such as PlanPreference\(backend=\.\.\.\); had"
        with pytest.raises(InvalidProblem, match=rule):
            ask()


# --- problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (None, "be a descriptor, such as Dispatcher.describe(op, ...); had None"),
        ({"op": "fill"}, "be a descriptor, such as Dispatcher.describe(op, ...); had {'op': 'fill'}"),
        ("fill", "be a descriptor, such as Dispatcher.describe(op, ...); had 'fill'"),
        (Descriptor(), "be a descriptor, such as Dispatcher.describe(op, ...); had Descriptor()"),
        (HOST, "be a descriptor, such as "),
        (np.ones(2), "be a descriptor, such as "),
        (FillDescriptor, "be one of its problems: FillDescriptor(...); had <class "),
    ],
    ids=["none", "dict", "str", "base", "device", "array", "class"],
)
def test_what_is_no_problem_is_refused_everywhere_alike(dispatcher, wrong, told):
    sku = dispatcher.select(FILL).sku
    asks = [
        lambda: dispatcher.select(wrong),
        lambda: dispatcher.explain(wrong),
        lambda: dispatcher.run(wrong, value=1.0),
        lambda: dispatcher.choices(sku, wrong, HOST),
    ]
    for ask in asks:
        with pytest.raises(InvalidProblem, match=re.escape(f"Dispatcher: problem must {told}")):
            ask()


@pytest.mark.parametrize("wrong", [None, 3, [], {}, FillDescriptor, np.ones(2), "f" * 100_000])
def test_an_op_has_a_name_of_characters(dispatcher, wrong):
    with pytest.raises(InvalidProblem, match=r"op must be one of fill, .*") as caught:
        dispatcher.describe(wrong, numel=2)
    assert len(caught.value.had) <= 200


@pytest.mark.parametrize("wrong", [None, "{}", {"sku": "x"}, FILL, 3])
def test_only_a_plan_is_prepared(dispatcher, wrong):
    with pytest.raises(InvalidProblem, match="plan must be a Plan, such as Plan"):
        dispatcher.prepare(wrong)


# --- constructing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"registry": 3}, "registry must be a Registry, or None"),
        ({"registry": Registry}, "registry must be a Registry, or None"),
        ({"registry": [toy_op()]}, "registry must be a Registry, or None"),
        ({"backends": 3}, "backends must be several Backends, or None"),
        ({"backends": NumpyBackend()}, "backends must be several Backends, or None"),
        ({"backends": "numpy"}, "backends must hold Backends, such as NumpyBackend()"),
        ({"backends": [NumpyBackend]}, "backends must hold Backends, such as NumpyBackend()"),
        ({"backends": [NumpyBackend(), None]}, "backends must hold Backends, such as NumpyBackend()"),
        ({"tuning": 3}, "tuning must be a Tuning, the path of a file of one, or None"),
        ({"tuning": b"tuning.json"}, "tuning must be a Tuning, the path of a file of one, or None"),
        ({"tuning": {}}, "tuning must be a Tuning, the path of a file of one, or None"),
        ({"on_selection": 3}, "on_selection must be a function of a Selection, or None"),
        ({"on_selection": []}, "on_selection must be a function of a Selection, or None"),
        ({"nvtx": "x"}, "nvtx must be True, False or None"),
        ({"nvtx": 1}, "nvtx must be True, False or None"),
    ],
)
def test_what_a_dispatcher_is_made_from_is_checked_when_it_is_made(given, told):
    with pytest.raises(InvalidProblem, match=re.escape(f"Dispatcher: {told}")):
        Dispatcher(**given)


@pytest.mark.parametrize("path", ["", Path("x\0y"), "x\0y", "/no/such/file", "."])
def test_a_tuning_file_is_there_or_refused(path):
    if path == "":
        assert Dispatcher(tuning=path).tuning is None
        return
    with pytest.raises(InvalidRecord):
        Dispatcher(tuning=path)


def test_backends_may_come_from_anything_that_is_iterated_once(dispatcher):
    made = Dispatcher(dispatcher.registry, backends=iter([NumpyBackend()]))
    assert list(made.backends) == ["numpy"]
    assert made.run(FILL, value=1.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [0, 3, "d", False, Dispatcher, {}])
def test_what_is_no_dispatcher_is_refused_by_a_function(wrong):
    with pytest.raises(InvalidProblem, match="dispatcher must be a Dispatcher, or None for one that all calls share"):
        skuda.ops.fill(value=1.0, output=np.zeros(2, np.float32), dispatcher=wrong)


# --- what is kept ----------------------------------------------------------------------------------------------------


class Repeating:
    """A runner that knows a call again once it has run it."""

    notes = ()

    def __init__(self, ordinal, log):
        self.ordinal, self.log, self.known = ordinal, log, None

    def check(self, arrays):
        raise AssertionError

    bind = check

    def run(self, arrays, stream):
        self.log.append(("run", self.ordinal))
        self.known = dict(arrays)
        return self.ordinal

    def run_again(self, arrays, stream):
        if self.known is None or arrays != self.known:
            return None
        self.log.append(("again", self.ordinal))
        return self.ordinal


@pytest.fixture
def repeating(monkeypatch):
    log = []

    class Knowing(Cards):
        def prepare(self, sku, problem, device, choice=""):
            return Repeating(device.ordinal, log)

    monkeypatch.setattr(
        "skuda.dispatch.dispatcher.common_place",
        lambda op, arrays: log.append("place") or ("cuda", arrays["x"] // 10),
    )
    registry = Registry([toy_op(cuda_sku("sm_80", "plain"), toy_sku())])
    return Dispatcher(registry, backends=[Knowing(), NumpyBackend()]), log


def test_a_call_that_is_recognized_is_not_asked_where_its_arrays_are(repeating):
    dispatcher, log = repeating
    assert [dispatcher.run(ToyDescriptor(m=4), x=11) for _ in range(3)] == [1, 1, 1]
    assert log == ["place", ("run", 1), ("again", 1), ("again", 1)]
    del log[:]
    assert dispatcher.run(ToyDescriptor(m=4), x=5) == 0, "on the other card"
    assert dispatcher.run(ToyDescriptor(m=4), x=5) == 0
    assert dispatcher.run(ToyDescriptor(m=4), x=11) == 1
    assert log == ["place", ("run", 0), ("again", 0), "place", ("run", 1)]


def test_calls_are_told_apart_by_problem_and_preference(repeating):
    dispatcher, log = repeating
    asked = [
        (ToyDescriptor(m=4), None),
        (ToyDescriptor(m=5), None),
        (ToyDescriptor(m=4), PlanPreference(backend="pycuda")),
    ]
    for problem, preference in asked:
        assert dispatcher.run(problem, preference, x=11) == 1
    assert [each for each in log if each != "place"] == [("run", 1)] * 3


def test_ever_new_sizes_keep_few_plans_and_a_plan_that_is_held_goes_on(repeating, monkeypatch):
    dispatcher, _ = repeating
    monkeypatch.setattr("skuda.dispatch.dispatcher._MOST_PLANS", 8)
    first = dispatcher.select(ToyDescriptor(m=1))
    for m in range(1, 200):
        assert dispatcher.run(ToyDescriptor(m=m), x=1) == 0
        assert max(len(dispatcher._plans), len(dispatcher._ran)) <= 8
    assert len(dispatcher._shortlists._found) == 1
    assert len(dispatcher._answering) == 0
    assert first not in dispatcher._plans.values()
    assert first.run(x=2) == 0
    again = dispatcher.select(ToyDescriptor(m=1))
    assert again == first
    assert again is not first


def test_a_shortlist_that_is_made_while_obstacles_change_is_not_kept():
    dispatcher = Dispatcher(Registry([toy_op(toy_sku())]), backends=[NumpyBackend()])
    lists, asked = dispatcher._shortlists, (dispatcher.registry, ToyDescriptor(), HOST, PlanPreference())

    def changing():
        lists.forget()
        return {}

    assert len(lists.of(*asked, changing)) == 1
    assert lists._found == {}
    assert lists.of(*asked, lambda: {"numpy": ("do", "broken")}) == ()
    assert lists.of(*asked, dict) == (), "kept until it is forgotten"
    lists.forget()
    assert len(lists.of(*asked, dict)) == 1
