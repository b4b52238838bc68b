"""Measured selection: what a tuning changes and what it never does, what its file refuses, and `skuda tune` itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from toy import EXACT, ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import (
    KNOWN_DEVICES,
    Backend,
    BackendStatus,
    Dispatcher,
    Explanation,
    Plan,
    PlanPreference,
    Tuning,
)
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.compile.sources import source_hash
from skuda.dispatch.select import match
from skuda.dispatch.select import tuning as tuning_module
from skuda.dispatch.select.environment import Environment, driver_of
from skuda.dispatch.select.measured import Tuned
from skuda.dispatch.select.tuning import Candidate, Entry, Timing
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import Choice
from skuda.kernels.linear import mma, warpgroup
from skuda.kernels.quantize import QuantizedLinearDescriptor
from skuda.registry import InvalidRecord, NotPrepared, Registry, Unsupported
from skuda.registry.device import HOST
from skuda.registry.guarantee import falls_short
from skuda.tools.ship import compile as compile_command
from skuda.tools.ship.cubins import cubins_of

H100, H200 = KNOWN_DEVICES["h100"], KNOWN_DEVICES["h200"]
WEAK = EXACT.model_copy(update={"deterministic": False, "max_ulp": None, "batch_invariant": False})
FIRST, SECOND = cuda_sku("sm_90a", "first"), cuda_sku("sm_80", "second")
LOOSE, OTHER = cuda_sku("sm_80", "loose", precision_guarantee=WEAK), cuda_sku("sm_80", "second").on("cuda_core")
PROBLEM = ToyDescriptor(m=3)
LINEAR = QuantizedLinearDescriptor(m=256, c_out=4096, k=4096, q_min=-127, q_max=127, activation_element="bf16")


@pytest.fixture
def registry():
    """Kernels best first."""
    return Registry([toy_op(FIRST, SECOND, LOOSE, OTHER, toy_sku())])


def timing(us):
    return Timing(median=us, p10=us, p90=us, best=us, rounds=20)


def measured(sku, us, choice="", **changes):
    fields = {"sku": sku.id, "choice": choice, "source_hash": source_hash(sku), "timing": timing(us)}
    return Candidate(**{**fields, **changes})


def tuned(*candidates, problem=PROBLEM, device=H200, driver="580.65 (CUDA 13.0)", margin=3.0):
    entry = Entry(problem=problem.model_dump(mode="json"), date="2026-01-02", seed=1, candidates=candidates)
    return Tuning(environment=Environment(device=device, driver=driver, skuda="0.1.0"), margin=margin, entries=(entry,))


def dispatcher_of(registry, *candidates, backends=None, **how):
    return Dispatcher(registry, backends=backends or [NumpyBackend()], tuning=tuned(*candidates, **how))


def explained(registry, *candidates, preference=None, device=H200, problem=PROBLEM, **how):
    dispatcher = dispatcher_of(registry, *candidates, problem=problem, **how)
    told = dispatcher.explain(problem, preference or PlanPreference(), device)
    plan = dispatcher.select(problem, preference or PlanPreference(), device)
    assert (plan.sku.id, plan.choice) == (told.chosen, told.choice), "what is explained is what is done"
    assert bool(plan.measured) is told.verdict.chosen
    return told


def stays(told, sku=FIRST):
    """Check that the ranking decided; give the reason."""
    assert told.chosen == sku.id
    assert not told.verdict.chosen
    assert [d.rank for d in told.accepted] == list(range(len(told.accepted)))
    return told.verdict.reason


def against(told, sku):
    (found,) = (time.against for time in told.verdict.times if time.sku == sku.id)
    return found


# --- what changes the choice, and what does not ----------------------------------------------------------------------


def test_the_fastest_is_chosen_and_everything_says_so(registry):
    dispatcher = dispatcher_of(registry, measured(FIRST, 10.0), measured(SECOND, 8.0), measured(OTHER, 8.5))
    plan = dispatcher.select(PROBLEM, device=H200)
    assert plan.sku == SECOND
    assert plan.notes == (plan.measured,)
    assert "8.0 us measured, 20.0 % faster than the 10.0 us of the first of the ranking" in plan.measured
    told = dispatcher.explain(PROBLEM, device=H200)
    # The chosen one first; the others keep their order.
    assert [d.sku for d in told.accepted] == [SECOND.id, FIRST.id, LOOSE.id, OTHER.id]
    assert [d.rank for d in told.accepted] == [0, 1, 2, 3]
    assert [time.microseconds for time in told.verdict.times] == [8.0, 8.5, 10.0]
    assert "chosen by a tuning of this program: 8.0 us measured" in str(told)
    assert f"    10.0 us: {FIRST.id}" in str(told)
    again = Explanation.model_validate_json(told.model_dump_json())
    assert again == told
    assert str(again) == str(told)


def test_without_a_tuning_nothing_is_said_of_one(registry):
    told = Dispatcher(registry, backends=[NumpyBackend()], tuning="").explain(PROBLEM, device=H200)
    assert told.verdict is None
    assert told.chosen == FIRST.id
    assert "measured" not in str(told)


@pytest.mark.parametrize(
    ("us", "margin", "flips"), [(9.8, 3, False), (8.0, 20, False), (7.9, 20, True), (9.8, 1, True)]
)
def test_only_a_gain_beyond_the_margin_counts(registry, us, margin, flips):
    told = explained(registry, measured(FIRST, 10.0), measured(SECOND, us), margin=margin)
    assert told.verdict.chosen is flips
    if not flips:
        compared = f"is {10 * (10.0 - us):.1f} % faster than the 10.0 us of the first of the ranking"
        assert f"{compared}, which is within the margin of {margin} %" in stays(told)


def test_the_first_of_the_ranking_stays_where_it_is_the_fastest_or_as_fast(registry):
    for us in (10.0, 11.0):
        reason = stays(explained(registry, measured(FIRST, 10.0), measured(SECOND, us), margin=0))
        assert reason == "the first of the ranking is the fastest measured"


def test_equal_times_keep_the_order_of_the_ranking(registry):
    for candidates in ([SECOND, OTHER], [OTHER, SECOND]):
        told = explained(registry, measured(FIRST, 10.0), *(measured(sku, 5.0) for sku in candidates))
        assert told.chosen == SECOND.id


def test_between_kernels_within_the_margin_of_each_other_the_ranking_decides(registry, here):
    def chosen(*times, backend=None):
        candidates = [measured(*one) for one in ((FIRST, 10.0), *times)]
        how = {"backends": [backend, NumpyBackend()], "device": Tiled.card} if backend else {}
        told = explained(registry, *candidates, **how)
        return told.chosen, told.choice

    # Two compilers, one source: the clock alone must not flip between them.
    assert chosen((SECOND, 5.05), (OTHER, 5.0)) == (SECOND.id, "")
    assert chosen((SECOND, 5.2), (OTHER, 5.0)) == (OTHER.id, "")
    # What is near the fastest, but not beyond the margin before the first, does not count.
    assert chosen((SECOND, 9.75), (OTHER, 9.6)) == (OTHER.id, "")
    # Within a kernel the fastest configuration is taken: nothing else depends on it.
    assert chosen((SECOND, 5.05, "a"), (SECOND, 5.0, "b"), backend=Tiled("a", "b")) == (SECOND.id, "b")
    assert chosen((SECOND, 5.0, "b"), (SECOND, 5.0, "a"), backend=Tiled("a", "b")) == (SECOND.id, "a")


@pytest.mark.parametrize(
    "less",
    [
        {"deterministic": False},
        {"bit_stable_on_same_hardware": False},
        {"batch_invariant": False},
        {"max_ulp": 1},
        {"max_ulp": None},
    ],
)
def test_a_weaker_promise_is_never_chosen_however_fast(less):
    weak = cuda_sku("sm_80", "weak", precision_guarantee=EXACT.model_copy(update=less))
    registry = Registry([toy_op(FIRST, weak, SECOND)])
    candidates = [measured(FIRST, 10.0), measured(weak, 0.1), measured(SECOND, 9.0)]
    told = explained(registry, *candidates)
    assert told.chosen == SECOND.id
    assert against(told, weak) == f"promises less than the first of the ranking: {next(iter(less))}"
    # With nothing equal that is faster, the ranking stays.
    stays(explained(registry, *candidates[:2]))


def test_a_stronger_promise_may_be_chosen(registry):
    registry = Registry([toy_op(LOOSE, SECOND)])
    assert explained(registry, measured(LOOSE, 10.0), measured(SECOND, 9.0)).chosen == SECOND.id


def test_what_is_stronger_and_what_is_another_promise():
    ulp = EXACT.model_copy(update={"max_ulp": 2})
    assert falls_short(EXACT, EXACT) is None
    assert falls_short(EXACT, ulp) is None
    assert falls_short(ulp, EXACT) == "max_ulp"
    # Bit-exact is bit-exact, whatever it computes in; two ulp of f32 are not two ulp of f64.
    assert falls_short(EXACT.model_copy(update={"accumulator": "f32"}), EXACT) is None
    assert falls_short(ulp.model_copy(update={"accumulator": "f32"}), ulp) == "accumulator"
    assert falls_short(ulp.model_copy(update={"math_precision": "f64"}), ulp) == "math_precision"


def test_a_kernel_that_changed_since_is_not_chosen_by_old_times(registry):
    old = {"source_hash": "0" * 64}
    told = explained(registry, measured(FIRST, 10.0), measured(SECOND, 1.0, **old), measured(OTHER, 5.0))
    assert told.chosen == OTHER.id
    assert against(told, SECOND) == "its source has changed since it was measured"
    reason = stays(explained(registry, measured(FIRST, 10.0, **old), measured(SECOND, 1.0)))
    assert reason == f"the first of the ranking, {FIRST.id}: its source has changed since it was measured"


def test_what_the_first_of_the_ranking_took_must_be_known(registry):
    reason = stays(explained(registry, measured(SECOND, 1.0)))
    assert reason == f"the first of the ranking, {FIRST.id}: was not measured"
    wrong = {"timing": None, "refused": "wrong result: y[0]"}
    reason = stays(explained(registry, measured(FIRST, 0, **wrong), measured(SECOND, 1.0)))
    assert "refused when it was measured: wrong result: y[0]" in reason
    told = explained(registry, measured(FIRST, 10.0), measured(SECOND, 0, **wrong), measured(OTHER, 5.0))
    assert told.chosen == OTHER.id
    assert told.verdict.times[-1].microseconds is None


def test_only_exactly_the_problem_counts(registry):
    dispatcher = dispatcher_of(registry, measured(FIRST, 10.0), measured(SECOND, 1.0))
    told = dispatcher.explain(ToyDescriptor(m=4), device=H200)
    assert stays(told) == "it has no entry for exactly this problem (1 of this op)"
    assert dispatcher.select(PROBLEM, device=H200).sku == SECOND


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "NVIDIA H100"}, "measured on NVIDIA H200 (compute capability 9.0), here NVIDIA H100"),
        ({"sm_count": 66}, "measured with 132 multiprocessors, here 66"),
        ({"compute_capability": (9, 1)}, "here NVIDIA H200 (compute capability 9.1)"),
    ],
)
def test_times_of_another_device_mean_nothing(registry, changes, says):
    device = H200.model_copy(update=changes)
    candidates = (measured(FIRST, 10.0), measured(SECOND, 1.0))
    told = dispatcher_of(registry, *candidates).explain(PROBLEM, device=device)
    assert says in told.verdict.reason
    assert not told.verdict.chosen
    assert len(told.verdict.times) == 2, "they are shown still"


def test_explicit_choices_are_honoured(registry):
    candidates = (measured(FIRST, 10.0), measured(SECOND, 1.0), measured(OTHER, 2.0))
    asked = partial(explained, registry, *candidates)
    assert asked(preference=PlanPreference(sku=FIRST.id)).chosen == FIRST.id
    assert asked(preference=PlanPreference(backend="cuda_core")).chosen == OTHER.id
    told = asked(preference=PlanPreference(allow_arch_specific=False))
    # The first that is left is what the others are compared with.
    assert stays(told, SECOND) == "the first of the ranking is the fastest measured"
    assert "preference.allow_arch_specific" in against(told, FIRST)
    with pytest.raises(Unsupported):
        dispatcher_of(registry, *candidates).select(PROBLEM, PlanPreference(backend="numpy"), H200)


def test_a_kernel_that_nobody_registered_is_told_and_does_no_harm(registry):
    gone, elsewhere = (measured(cuda_sku(*where), 1.0) for where in (("sm_80", "gone"), ("sm_100f", "first")))
    told = explained(registry, measured(FIRST, 10.0), gone, elsewhere, measured(SECOND, 9.0))
    assert told.chosen == SECOND.id
    assert {time.against for time in told.verdict.times[:2]} == {"it is not registered here"}
    slow = explained(registry, measured(FIRST, 10.0), measured(toy_sku(), 1.0))
    assert "device: wanted a CPU" in against(slow, toy_sku())
    stays(slow)


def test_behind_the_chosen_kernel_stands_the_ranking(registry):
    """Arrays that the chosen kernel cannot read for their alignment go to the first of the others."""
    tuning = tuned(measured(FIRST, 10.0), measured(SECOND, 1.0))
    judge = Tuned(tuning, "here", driver=lambda device: None, choices=lambda *_: ())
    behind = partial(match.choose, registry, PROBLEM, H200, PlanPreference(), {}, tuned=judge)
    order = [pick := behind()]
    while pick := behind(behind=pick.sku):
        order.append(pick)
    assert [pick.sku.id for pick in order] == [SECOND.id, FIRST.id, LOOSE.id, OTHER.id]
    assert [bool(pick.reason) for pick in order] == [True, False, False, False]


def test_a_cached_plan_asks_no_more(registry, monkeypatch):
    asked = []
    weigh = Tuned.weigh
    monkeypatch.setattr(Tuned, "weigh", lambda self, *rest: asked.append(1) or weigh(self, *rest))
    dispatcher = dispatcher_of(registry, measured(FIRST, 10.0), measured(SECOND, 1.0))
    plans = {id(dispatcher.select(PROBLEM, device=H200)) for _ in range(5)}
    assert len(plans) == len(asked) == 1


# --- devices that are here, and configurations -----------------------------------------------------------------------


class Tiled(Backend):
    """A backend named pycuda that drives a made-up card and computes on the host; `second` has three configurations."""

    spec = next(spec for spec in built_in_registry().backends.values() if spec.name == "pycuda")
    card = H200.model_copy(update={"ordinal": 0})

    def __init__(self, *names, sku=SECOND):
        self.names, self.sku, self.prepared = names, sku, []

    def status(self):
        return BackendStatus(available=True, detail="made up")

    def devices(self):
        return (self.card,)

    def choices(self, sku, problem, device):
        return tuple(Choice(name, 1.0) for name in self.names) if sku == self.sku else ()

    def told(self, sku, problem, device, choice=""):
        return (f"runs with {choice or 'its first'}",)

    def prepare(self, sku, problem, device, choice=""):
        self.prepared.append((sku.variant, choice))
        return HostRunner(problem, lambda problem, *, x, y: np.add(x, x, out=y))


@pytest.fixture
def here(monkeypatch):
    """Say what drives the card that is here."""
    monkeypatch.setattr("skuda.dispatch.select.environment.driver_of", lambda device: "580.65 (CUDA 13.0)")


@pytest.mark.parametrize(
    ("driver", "used"),
    [("580.65 (CUDA 13.0)", True), ("580.99.01 (CUDA 13.0)", True), ("570.86 (CUDA 12.8)", False), ("", False)],
)
def test_times_with_another_major_version_of_the_driver_mean_nothing(registry, here, driver, used):
    candidates = (measured(FIRST, 10.0), measured(SECOND, 1.0))
    told = explained(registry, *candidates, driver=driver, device=Tiled.card, backends=[Tiled(), NumpyBackend()])
    if used:
        assert told.chosen == SECOND.id
    else:
        assert stays(told) == f"measured with driver {driver or 'unknown'}, here 580.65 (CUDA 13.0)"
    # A card that is on paper only has no driver to compare with.
    assert explained(registry, *candidates, driver=driver).chosen == SECOND.id


def test_a_processor_is_told_from_another_by_its_model():
    here = Environment(device=HOST, driver="Xeon, 2 processors", skuda="0")
    assert here.mismatch(HOST, "Xeon, 2 processors") == ""
    assert here.mismatch(HOST, "Xeon, 4 processors") == (
        "measured with processor Xeon, 2 processors, here Xeon, 4 processors"
    )
    assert re.fullmatch(r".+, \d+ processors", driver_of(HOST))


TILES = [measured(FIRST, 10.0), *(measured(SECOND, us, name) for us, name in ((9.0, "a"), (8.0, "b"), (7.0, "gone")))]


def test_a_configuration_that_was_measured_is_prepared_and_told(registry, here):
    backend = Tiled("a", "b")
    dispatcher = dispatcher_of(registry, *TILES, backends=[backend, NumpyBackend()])
    plan = dispatcher.select(PROBLEM)
    assert (plan.sku, plan.choice, backend.prepared) == (SECOND, "b", [("second", "b")])
    np.testing.assert_array_equal(plan.run(x=np.ones(3, np.float32)), [2, 2, 2])
    told = dispatcher.explain(PROBLEM)
    assert told.choice == "b"
    assert "runs with b" in told.notes
    (gone,) = (time for time in told.verdict.times if time.choice == "gone")
    assert gone.against == "there is no such configuration any more"
    assert "not chosen by" not in str(told)
    assert f"8.0 us: {SECOND.id}, b" in str(told)


def test_a_configuration_alone_may_change_where_the_kernel_is_the_first_or_the_only_one(registry, here):
    candidates = [measured(SECOND, us, name) for us, name in ((9.0, "a"), (8.0, "b"))]
    for order, preference in (((SECOND, FIRST), {}), ((FIRST, SECOND), {"sku": SECOND.id})):
        backend = Tiled("a", "b")
        own = Registry([toy_op(*order)])
        plan = dispatcher_of(own, *candidates, backends=[backend, NumpyBackend()]).select(
            PROBLEM, PlanPreference(**preference)
        )
        assert (plan.sku, plan.choice, backend.prepared) == (SECOND, "b", [("second", "b")])


def test_times_of_configurations_that_are_gone_leave_the_ranking_as_it_is(registry, here):
    backend = Tiled("x", "y")
    told = explained(registry, *TILES, device=Tiled.card, backends=[backend, NumpyBackend()])
    assert stays(told) == "the first of the ranking is the fastest measured"
    own = Registry([toy_op(SECOND, FIRST)])
    told = explained(own, *TILES, device=Tiled.card, backends=[Tiled("x", "b"), NumpyBackend()])
    assert stays(told, SECOND) == f"the first of the ranking, {SECOND.id}, x: was not measured"
    told = explained(own, measured(SECOND, 1.0), device=Tiled.card, backends=[Tiled("x"), NumpyBackend()])
    assert "was not measured" in stays(told, SECOND)
    assert against(told, SECOND) == "it has several configurations now"
    assert ("second", "") in backend.prepared or backend.prepared == [("first", "")]


def test_a_plan_keeps_its_configuration_and_is_made_ready_with_it_or_not_at_all(registry, here):
    plan = dispatcher_of(registry, *TILES, backends=[Tiled("a", "b"), NumpyBackend()]).select(PROBLEM)
    copy = Plan.model_validate_json(plan.model_dump_json())
    assert copy == plan
    assert (copy.choice, copy.measured) == ("b", plan.measured)
    assert copy != plan.model_copy(update={"choice": "a"})
    backend = Tiled("a", "b")
    other = Dispatcher(registry, backends=[backend, NumpyBackend()], tuning="")
    assert other.select(PROBLEM).sku == FIRST
    ready = other.prepare(copy)
    assert (ready.sku, ready.choice, backend.prepared[-1]) == (SECOND, "b", ("second", "b"))
    assert other.prepare(copy) is ready
    # One without a measured configuration is not given one by a tuning at hand.
    first = other.prepare(other.select(PROBLEM, PlanPreference(sku=SECOND.id)))
    again = dispatcher_of(registry, *TILES, backends=[Tiled("a", "b"), NumpyBackend()]).prepare(first)
    assert (again.sku, again.choice) == (SECOND, "")
    with pytest.raises(NotPrepared, match="no configuration 'b' any more"):
        Dispatcher(registry, backends=[Tiled("a"), NumpyBackend()], tuning="").prepare(copy)


def linear_candidates(fast, us=5.0):
    """Every tile of the tensor-core kernels, the one named `fast` the fastest."""
    dispatcher = Dispatcher(built_in_registry(), tuning="")
    found = []
    for decision in dispatcher.explain(LINEAR, device=H200).accepted:
        sku = dispatcher.registry.sku(decision.sku)
        for number, name in enumerate(dispatcher.choices(sku, LINEAR, H200) or ("",)):
            is_fast = (sku.variant, sku.backend, name) == fast
            found.append(measured(sku, us if is_fast else 40.0 + number, name))
    return found


@pytest.mark.parametrize(
    ("variant", "tile"),
    [("warpgroup", warpgroup.TILES[5]), ("warpgroup", warpgroup.TILES[11]), ("mma", mma.TILES[7])],
)
def test_tiles_of_the_linear_kernels_are_chosen_by_time(variant, tile):
    fast = (variant, "cuda_core", str(tile))
    backends = Dispatcher(built_in_registry()).backends.values()
    told = explained(built_in_registry(), *linear_candidates(fast), problem=LINEAR, backends=backends)
    assert told.chosen.endswith(f"cuda_core.{variant}")
    assert told.choice == str(tile)
    assert any(note.startswith(f"configuration {tile}: ") for note in told.notes)
    assert len(told.verdict.times) > len(warpgroup.TILES) + len(mma.TILES)


def test_what_was_chosen_by_time_is_compiled_ahead():
    """`skuda compile` fills the cache with what a machine with the same tuning looks for."""
    tile = warpgroup.TILES[5]
    for fast, preference in (
        (("warpgroup", "cuda_core", str(tile)), {}),
        (("warpgroup", "cuda_core", str(tile)), {"backend": "cuda_core"}),
    ):
        dispatcher = Dispatcher(built_in_registry(), tuning=tuned(*linear_candidates(fast), problem=LINEAR))
        plan = dispatcher.select(LINEAR, PlanPreference(**preference), H200)
        configurations = partial(compile_command._configurations, dispatcher)
        problems = {LINEAR.op: list(compile_command._tuned(dispatcher, LINEAR.op))}
        assert problems == {LINEAR.op: [LINEAR]}
        wanted = cubins_of(
            dispatcher.registry.skus_of(LINEAR.op), problems, dispatcher.backends, H200, choices=configurations
        )
        flags = {(one.sku.id, one.launch.choice) for one in wanted}
        assert (plan.sku.id, plan.choice) in flags
        first = dispatcher.choices(plan.sku, LINEAR, H200)[0]
        assert (plan.sku.id, first) in flags, "and what runs without a tuning"


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tuning.json"
    tuned(measured(FIRST, 10.0), measured(SECOND, 8.0)).save(path)
    return path


def test_a_file_says_the_same_as_what_was_saved(file):
    assert Tuning.load(file) == tuned(measured(FIRST, 10.0), measured(SECOND, 8.0))
    assert list(file.parent.iterdir()) == [file], "nothing is left beside it"
    assert "fastest" not in file.read_text()


def test_a_file_that_cannot_be_written_leaves_the_old_one(file, monkeypatch):
    before = file.read_text()

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(InvalidRecord, match=r"tuning\.json: the file must be writable; had disk full"):
        tuned(measured(FIRST, 1.0)).save(file)
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.undo()
    with pytest.raises(InvalidRecord, match="be writable"):
        tuned(measured(FIRST, 1.0)).save(file.parent / "absent" / "file.json")


def test_the_dispatcher_reads_the_file_that_is_named_and_no_other(registry, file, monkeypatch):
    def chosen(**how):
        return Dispatcher(registry, backends=[NumpyBackend()], **how).select(PROBLEM, device=H200).sku

    monkeypatch.delenv("SKUDA_TUNING", raising=False)
    monkeypatch.chdir(file.parent)
    assert chosen() == FIRST, "a file that happens to lie there is nothing"
    assert chosen(tuning=file) == chosen(tuning=str(file)) == chosen(tuning=Tuning.load(file)) == SECOND
    monkeypatch.setenv("SKUDA_TUNING", str(file))
    assert chosen() == SECOND
    assert chosen(tuning="") == FIRST
    told = Dispatcher(registry, backends=[NumpyBackend()]).explain(PROBLEM, device=H200)
    assert told.verdict.origin == str(file)
    monkeypatch.setenv("SKUDA_TUNING", "")
    assert chosen() == FIRST
    monkeypatch.setenv("SKUDA_TUNING", str(file.parent / "absent.json"))
    with pytest.raises(InvalidRecord, match=r"absent\.json: the file must be a file that `skuda tune` wrote"):
        chosen()
    assert chosen(tuning="") == FIRST


def edited(*path, value):
    def edit(record):
        at = record
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        return record

    return edit


def twice(*path):
    def edit(record):
        at = record
        for step in path:
            at = at[step]
        at.append(at[0])
        return record

    return edit


CANDIDATE = ("entries", 0, "candidates", 0)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            edited("kind", value="skuda bench"),
            "the file must be of kind 'skuda tuning', schema 1; had kind 'skuda bench'",
        ),
        (edited("schema_version", value=2), "schema 2"),
        (edited("winner", value="x"), "winner must be one of kind, schema_version"),
        (edited(*CANDIDATE, "fastest", value=True), "fastest must be one of sku"),
        (edited("margin", value="3"), "margin must be a number"),
        (edited("margin", value=-1), "margin must be at least 0"),
        (edited("margin", value=100), "margin must be less than 100"),
        (edited("environment", "skuda", value=1), "skuda must be a string"),
        (edited("environment", "driver", value="580\x1b[2J"), "driver must be one line of printable characters"),
        (
            edited("environment", "device", "name", value="H200\x1b[2J"),
            "device must be one line of printable characters",
        ),
        (edited("environment", "device", "processor", value="tpu"), "processor must be 'cpu' or 'cuda'"),
        (edited("environment", value=None), "environment must"),
        (edited("entries", value={}), "entries must"),
        (edited("entries", 0, "problem", value={}), "Entry.problem.op must be the name of an op"),
        (edited("entries", 0, "problem", "op", value="other"), "Entry.candidates must be kernels of other"),
        (edited("entries", 0, "candidates", value=[]), "candidates must"),
        (edited("entries", 0, "seed", value=-1), "seed must be at least 0"),
        (edited(*CANDIDATE, "sku", value="../../etc"), "SkuIdentity.id must be category.op"),
        (edited(*CANDIDATE, "sku", value="a\nb"), "sku must be the id of a kernel"),
        (edited(*CANDIDATE, "source_hash", value="00"), "source_hash must match"),
        (edited(*CANDIDATE, "choice", value="a\nb"), "choice must be one line"),
        (edited(*CANDIDATE, "timing", value=None), "timing must be given, or else refused must say why"),
        (edited(*CANDIDATE, "refused", value="no"), "timing must be given, or else refused must say why"),
        (edited(*CANDIDATE, "timing", "median", value="1"), "Timing.median must be a number"),
        (edited(*CANDIDATE, "timing", "median", value=-1), "Candidate.timing.median must be at least 0"),
        (twice("entries"), "entries must hold a problem once"),
        (twice("entries", 0, "candidates"), f"Entry.candidates must be measured once each; had {FIRST.id} twice"),
    ],
)
def test_what_is_no_tuning_is_refused_with_file_and_field(file, edit, says):
    file.write_text(json.dumps(edit(json.loads(file.read_text()))))
    with pytest.raises(InvalidRecord) as caught:
        Tuning.load(file)
    assert str(caught.value).startswith(f"tuning {file}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "in JSON"),
        (b"[]", "be of kind"),
        (b"\xff\xfe", "in JSON"),
        (b"{" * 100_000, "in JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "in JSON"),
        (b'{"margin": NaN}', "NaN is no number in JSON"),
        (b'{"kind": "skuda tuning", "kind": "skuda tuning"}', "'kind' is given twice"),
        (b'{"kind": "' + b"\x1b[2J" * 5000 + b'"}', "in JSON"),
    ],
)
def test_hostile_files_are_refused_in_one_short_line(file, content, says):
    file.write_bytes(content)
    with pytest.raises(InvalidRecord, match=re.escape(says)) as caught:
        Tuning.load(file)
    assert len(str(caught.value)) < 800
    assert str(caught.value).isprintable()


def test_a_long_value_is_not_told_whole(file):
    file.write_text(json.dumps(edited("entries", value="x" * 100_000)(json.loads(file.read_text()))))
    with pytest.raises(InvalidRecord) as caught:
        Tuning.load(file)
    assert len(str(caught.value)) < 800


def test_a_nested_problem_is_refused(file):
    text = json.dumps(edited("entries", 0, "problem", "m", value="HERE")(json.loads(file.read_text())))
    file.write_text(text.replace('"HERE"', "[" * 900 + "]" * 900))
    with pytest.raises(InvalidRecord):
        Tuning.load(file)


def test_neither_a_folder_nor_something_huge_is_read(file, monkeypatch):
    with pytest.raises(InvalidRecord, match="had no file there"):
        Tuning.load(file.parent)
    if hasattr(os, "mkfifo"):
        os.mkfifo(file.parent / "pipe")
        with pytest.raises(InvalidRecord, match="had no file there"):
            Tuning.load(file.parent / "pipe")
    monkeypatch.setattr(tuning_module, "_LARGEST", 100)
    with pytest.raises(InvalidRecord, match="more than 0 MiB"):
        Tuning.load(file)


def test_new_entries_replace_those_of_the_same_problem_in_the_same_environment(file):
    before = Tuning.load(file)
    again = tuned(measured(FIRST, 3.0), measured(SECOND, 2.0))
    more = tuned(measured(FIRST, 5.0), problem=ToyDescriptor(m=9))
    merged = before.updated(again).updated(more)
    assert merged.entries == (*again.entries, *more.entries)
    for other, says in (
        (tuned(measured(FIRST, 1.0), device=H100), "device must be"),
        (tuned(measured(FIRST, 1.0), driver="570.1"), "driver must be that of the entries there are"),
        (tuned(measured(FIRST, 1.0), margin=4), "margin must be"),
    ):
        with pytest.raises(InvalidRecord, match=says):
            before.updated(other)


# --- every rank chooses alike ----------------------------------------------------------------------------------------

RANK = """
import sys
from skuda.dispatch import Dispatcher, device_named
from skuda.kernels.quantize import QuantizedLinearDescriptor
d = Dispatcher()
problem = QuantizedLinearDescriptor.model_validate_json(sys.argv[1])
plan = d.select(problem, device=device_named("h200"))
print(plan.sku.id, plan.choice, d.explain(problem, device=device_named("h200")), sep="\\n")
"""


def test_the_same_file_gives_the_same_choice_in_every_process(tmp_path):
    """Many tiles take exactly as long: nothing but the file and the ranking may decide between them."""
    even = [
        c if number == 0 else c.model_copy(update={"timing": timing(7.0)})
        for number, c in enumerate(linear_candidates(()))
    ]
    tuned(*reversed(even), problem=LINEAR).save(tmp_path / "pinned.json")
    told = set()
    for seed, where, language in (("0", "/", "C"), ("1", str(tmp_path), "C.UTF-8"), ("4242", "/tmp", "POSIX")):  # noqa: S108  any folder
        ran = subprocess.run(
            [sys.executable, "-c", RANK, LINEAR.model_dump_json()],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "LC_ALL": language,
                "SKUDA_TUNING": str(tmp_path / "pinned.json"),
                "SKUDA_PLUGINS": "0",
            },
            cwd=where,
            check=True,
            capture_output=True,
            text=True,
        )
        told.add(ran.stdout)
    (one,) = told
    sku, choice = one.splitlines()[:2]
    second = str(warpgroup.ranking(256, 4096, 4096, 132)[1][1])
    assert (sku.rpartition(".")[2], choice) == ("warpgroup", second)
    assert "chosen by" in one
