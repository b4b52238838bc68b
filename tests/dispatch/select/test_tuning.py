"""Selection by measured times: when a time changes the choice, and which tuning files are refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from fakes import FakeCuda
from toy import EXACT, ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import (
    KNOWN_DEVICES,
    Dispatcher,
    Explanation,
    Plan,
    PlanPreference,
    Tuning,
)
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.select import match
from skuda.dispatch.select import tuning as tuning_module
from skuda.dispatch.select.environment import Environment, driver_of
from skuda.dispatch.select.measured import Tuned
from skuda.dispatch.select.tuning import Candidate, Timing, TuningEntry
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.launch import Choice
from skuda.kernels.quantize import QuantizedLinearDescriptor
from skuda.kernels.sources import source_hash
from skuda.registry import InvalidRecord, NotPrepared, Registry, Unsupported
from skuda.registry.device import HOST
from skuda.registry.guarantee import falls_short
from skuda.tools.ship import compile as compile_command
from skuda.tools.ship.cubins import cubins_of

H100, H200 = KNOWN_DEVICES["h100"], KNOWN_DEVICES["h200"]
CARD = FakeCuda("h200").cards[0]
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
    entry = TuningEntry(problem=problem.model_dump(mode="json"), date="2026-01-02", seed=1, candidates=candidates)
    return Tuning(environment=Environment(device=device, driver=driver, skuda="0.1.0"), margin=margin, entries=(entry,))


def dispatcher_of(registry, *candidates, backend=None, **how):
    backends = [*filter(None, [backend]), NumpyBackend()]
    return Dispatcher(registry, backends=backends, tuning=tuned(*candidates, **how) if candidates else "")


def explained(registry, *candidates, preference=None, device=H200, problem=PROBLEM, **how):
    dispatcher = dispatcher_of(registry, *candidates, problem=problem, **how)
    explanation = dispatcher.explain(problem, preference or PlanPreference(), device)
    plan = dispatcher.select(problem, preference or PlanPreference(), device)
    assert (plan.sku.id, plan.choice) == (explanation.chosen, explanation.choice), "what is explained is what is done"
    assert bool(plan.measured) is explanation.verdict.chosen
    return explanation


def stays(explanation, sku=FIRST):
    """Check that the ranking decided; give the reason."""
    assert explanation.chosen == sku.id
    assert not explanation.verdict.chosen
    assert [d.rank for d in explanation.accepted] == list(range(len(explanation.accepted)))
    return explanation.verdict.reason


def against(explanation, sku):
    (found,) = (time.against for time in explanation.verdict.times if time.sku == sku.id)
    return found


def test_the_fastest_is_chosen_and_everything_says_so(registry):
    dispatcher = dispatcher_of(registry, measured(FIRST, 10.0), measured(SECOND, 8.0), measured(OTHER, 8.5))
    plan = dispatcher.select(PROBLEM, device=H200)
    assert plan.sku == SECOND
    assert plan.notes == (plan.measured,)
    assert "8.0 us measured, 20.0 % faster than the 10.0 us of the first of the ranking" in plan.measured
    explanation = dispatcher.explain(PROBLEM, device=H200)
    # The chosen one first; the others keep their order.
    assert [d.sku for d in explanation.accepted] == [SECOND.id, FIRST.id, LOOSE.id, OTHER.id]
    assert [d.rank for d in explanation.accepted] == [0, 1, 2, 3]
    assert [time.microseconds for time in explanation.verdict.times] == [8.0, 8.5, 10.0]
    assert "chosen by a tuning of this program: 8.0 us measured" in str(explanation)
    assert f"    10.0 us: {FIRST.id}" in str(explanation)
    again = Explanation.model_validate_json(explanation.model_dump_json())
    assert again == explanation
    assert str(again) == str(explanation)


@pytest.mark.parametrize(
    ("us", "margin", "flips"), [(9.8, 3, False), (8.0, 20, False), (7.9, 20, True), (9.8, 1, True)]
)
def test_only_a_gain_beyond_the_margin_counts(registry, us, margin, flips):
    explanation = explained(registry, measured(FIRST, 10.0), measured(SECOND, us), margin=margin)
    assert explanation.verdict.chosen is flips
    if not flips:
        compared = f"is {10 * (10.0 - us):.1f} % faster than the 10.0 us of the first of the ranking"
        assert f"{compared}, which is within the margin of {margin} %" in stays(explanation)


def test_the_first_of_the_ranking_stays_where_it_is_the_fastest_or_as_fast(registry):
    for us in (10.0, 11.0):
        reason = stays(explained(registry, measured(FIRST, 10.0), measured(SECOND, us), margin=0))
        assert reason == "the first of the ranking is the fastest measured"


def test_between_kernels_within_the_margin_of_each_other_the_ranking_decides(registry, here):
    def chosen(*times, backend=None):
        candidates = [measured(*one) for one in ((FIRST, 10.0), *times)]
        how = {"backend": backend, "device": CARD} if backend else {}
        explanation = explained(registry, *candidates, **how)
        return explanation.chosen, explanation.choice

    # Two compilers, one source: the clock alone must not flip between them.
    assert chosen((SECOND, 5.05), (OTHER, 5.0)) == (SECOND.id, "")
    assert chosen((SECOND, 5.2), (OTHER, 5.0)) == (OTHER.id, "")
    # What is near the fastest, but not beyond the margin before the first, does not count.
    assert chosen((SECOND, 9.75), (OTHER, 9.6)) == (OTHER.id, "")
    # Within a kernel the fastest configuration is taken: nothing else depends on it.
    assert chosen((SECOND, 5.05, "a"), (SECOND, 5.0, "b"), backend=Tiled("a", "b")) == (SECOND.id, "b")
    assert chosen((SECOND, 5.0, "b"), (SECOND, 5.0, "a"), backend=Tiled("a", "b")) == (SECOND.id, "a")


@pytest.mark.parametrize("less", [{"batch_invariant": False}, {"max_ulp": 1}, {"max_ulp": None}])
def test_a_weaker_promise_is_never_chosen_however_fast(less):
    weak = cuda_sku("sm_80", "weak", precision_guarantee=EXACT.model_copy(update=less))
    registry = Registry([toy_op(FIRST, weak, SECOND)])
    candidates = [measured(FIRST, 10.0), measured(weak, 0.1), measured(SECOND, 9.0)]
    explanation = explained(registry, *candidates)
    assert explanation.chosen == SECOND.id
    assert against(explanation, weak) == f"promises less than the first of the ranking: {next(iter(less))}"
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
    explanation = explained(registry, measured(FIRST, 10.0), measured(SECOND, 1.0, **old), measured(OTHER, 5.0))
    assert explanation.chosen == OTHER.id
    assert against(explanation, SECOND) == "its source has changed since it was measured"
    reason = stays(explained(registry, measured(FIRST, 10.0, **old), measured(SECOND, 1.0)))
    assert reason == f"the first of the ranking, {FIRST.id}: its source has changed since it was measured"


def test_what_the_first_of_the_ranking_took_must_be_known(registry):
    reason = stays(explained(registry, measured(SECOND, 1.0)))
    assert reason == f"the first of the ranking, {FIRST.id}: was not measured"
    wrong = {"timing": None, "refused": "wrong result: y[0]"}
    reason = stays(explained(registry, measured(FIRST, 1.0, **wrong), measured(SECOND, 1.0)))
    assert "refused when it was measured: wrong result: y[0]" in reason
    explanation = explained(registry, measured(FIRST, 10.0), measured(SECOND, 1.0, **wrong), measured(OTHER, 5.0))
    assert explanation.chosen == OTHER.id
    assert explanation.verdict.times[-1].microseconds is None


def test_only_exactly_the_problem_counts(registry):
    dispatcher = dispatcher_of(registry, measured(FIRST, 10.0), measured(SECOND, 1.0))
    explanation = dispatcher.explain(ToyDescriptor(m=4), device=H200)
    assert stays(explanation) == "it has no entry for exactly this problem (1 of this op)"
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
    explanation = dispatcher_of(registry, *candidates).explain(PROBLEM, device=device)
    assert says in explanation.verdict.reason
    assert not explanation.verdict.chosen
    assert len(explanation.verdict.times) == 2, "they are shown still"


def test_explicit_choices_are_honoured(registry):
    candidates = (measured(FIRST, 10.0), measured(SECOND, 1.0), measured(OTHER, 2.0))
    asked = partial(explained, registry, *candidates)
    assert asked(preference=PlanPreference(sku=FIRST.id)).chosen == FIRST.id
    assert asked(preference=PlanPreference(backend="cuda_core")).chosen == OTHER.id
    explanation = asked(preference=PlanPreference(allow_arch_specific=False))
    # The first that is left is what the others are compared with.
    assert stays(explanation, SECOND) == "the first of the ranking is the fastest measured"
    assert "preference.allow_arch_specific" in against(explanation, FIRST)
    with pytest.raises(Unsupported):
        dispatcher_of(registry, *candidates).select(PROBLEM, PlanPreference(backend="numpy"), H200)


def test_a_kernel_that_nobody_registered_is_reported_and_does_no_harm(registry):
    gone, elsewhere = (measured(cuda_sku(*where), 1.0) for where in (("sm_80", "gone"), ("sm_100f", "first")))
    explanation = explained(registry, measured(FIRST, 10.0), gone, elsewhere, measured(SECOND, 9.0))
    assert explanation.chosen == SECOND.id
    assert {time.against for time in explanation.verdict.times[:2]} == {"it is not registered here"}
    slow = explained(registry, measured(FIRST, 10.0), measured(toy_sku(), 1.0))
    assert "device: wanted a CPU" in against(slow, toy_sku())
    stays(slow)


def test_behind_the_chosen_kernel_stands_the_ranking(registry):
    """Arrays that the chosen kernel cannot read for their alignment go to the first of the others."""
    tuning = tuned(measured(FIRST, 10.0), measured(SECOND, 1.0))
    judge = Tuned(tuning, "here", driver=lambda device: None, choices=lambda *_: ())
    behind = partial(match.choose, registry, PROBLEM, H200, PlanPreference(), match.ALL_AVAILABLE, tuned=judge)
    order = [pick := behind()]
    while pick := behind(behind=pick.sku):
        order.append(pick)
    assert [pick.sku.id for pick in order] == [SECOND.id, FIRST.id, LOOSE.id, OTHER.id]
    assert [bool(pick.reason) for pick in order] == [True, False, False, False]


class Tiled(FakeCuda):
    """An H200 on which `second` has the given configurations."""

    def __init__(self, *names):
        super().__init__("h200")
        self.names = names

    def choices(self, sku, problem, device):
        return tuple(Choice(name, 1.0) for name in self.names) if sku == SECOND else ()

    def describe_choice(self, sku, problem, device, choice=""):
        return (f"runs with {choice or 'its first'}",)


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
    explanation = explained(registry, *candidates, driver=driver, device=CARD, backend=Tiled())
    if used:
        assert explanation.chosen == SECOND.id
    else:
        assert stays(explanation) == f"measured with driver {driver or 'unknown'}, here 580.65 (CUDA 13.0)"
    # A card that is on paper only has no driver to compare with.
    assert explained(registry, *candidates, driver=driver).chosen == SECOND.id


def test_a_processor_differs_from_another_by_its_model():
    here = Environment(device=HOST, driver="Xeon, 2 processors", skuda="0")
    assert here.mismatch(HOST, "Xeon, 2 processors") == ""
    assert here.mismatch(HOST, "Xeon, 4 processors") == (
        "measured with processor Xeon, 2 processors, here Xeon, 4 processors"
    )
    assert re.fullmatch(r".+, \d+ processors", driver_of(HOST))


TILES = [measured(FIRST, 10.0), *(measured(SECOND, us, name) for us, name in ((9.0, "a"), (8.0, "b"), (7.0, "gone")))]


def test_a_configuration_that_was_measured_is_prepared_and_reported(registry, here):
    backend = Tiled("a", "b")
    dispatcher = dispatcher_of(registry, *TILES, backend=backend)
    plan = dispatcher.select(PROBLEM)
    assert (plan.sku, plan.choice, backend.prepared) == (SECOND, "b", [("second", "b")])
    np.testing.assert_array_equal(plan.run(x=np.ones(3, np.float32)), [2, 2, 2])
    explanation = dispatcher.explain(PROBLEM)
    assert explanation.choice == "b"
    assert "runs with b" in explanation.notes
    (gone,) = (time for time in explanation.verdict.times if time.choice == "gone")
    assert gone.against == "there is no such configuration any more"
    assert "not chosen by" not in str(explanation)
    assert f"8.0 us: {SECOND.id}, b" in str(explanation)


def test_a_configuration_alone_may_change_where_the_kernel_is_the_first_or_the_only_one(registry, here):
    candidates = [measured(SECOND, us, name) for us, name in ((9.0, "a"), (8.0, "b"))]
    for order, preference in (((SECOND, FIRST), {}), ((FIRST, SECOND), {"sku": SECOND.id})):
        backend = Tiled("a", "b")
        own = Registry([toy_op(*order)])
        plan = dispatcher_of(own, *candidates, backend=backend).select(PROBLEM, PlanPreference(**preference))
        assert (plan.sku, plan.choice, backend.prepared) == (SECOND, "b", [("second", "b")])


def test_times_of_configurations_that_are_gone_leave_the_ranking_as_it_is(registry, here):
    backend = Tiled("x", "y")
    explanation = explained(registry, *TILES, device=CARD, backend=backend)
    assert stays(explanation) == "the first of the ranking is the fastest measured"
    own = Registry([toy_op(SECOND, FIRST)])
    explanation = explained(own, *TILES, device=CARD, backend=Tiled("x", "b"))
    assert stays(explanation, SECOND) == f"the first of the ranking, {SECOND.id}, x: was not measured"
    explanation = explained(own, measured(SECOND, 1.0), device=CARD, backend=Tiled("x"))
    assert "was not measured" in stays(explanation, SECOND)
    assert against(explanation, SECOND) == "it has several configurations now"
    assert ("second", "") in backend.prepared or backend.prepared == [("first", "")]


def test_a_plan_keeps_its_configuration_and_is_made_ready_with_it_or_not_at_all(registry, here):
    plan = dispatcher_of(registry, *TILES, backend=Tiled("a", "b")).select(PROBLEM)
    copy = Plan.model_validate_json(plan.model_dump_json())
    assert copy == plan
    assert (copy.choice, copy.measured) == ("b", plan.measured)
    assert copy != plan.model_copy(update={"choice": "a"})
    backend = Tiled("a", "b")
    other = dispatcher_of(registry, backend=backend)
    assert other.select(PROBLEM).sku == FIRST
    ready = other.prepare(copy)
    assert (ready.sku, ready.choice, backend.prepared[-1]) == (SECOND, "b", ("second", "b"))
    assert other.prepare(copy) is ready
    # One without a measured configuration is not given one by a tuning at hand.
    first = other.prepare(other.select(PROBLEM, PlanPreference(sku=SECOND.id)))
    again = dispatcher_of(registry, *TILES, backend=Tiled("a", "b")).prepare(first)
    assert (again.sku, again.choice) == (SECOND, "")
    with pytest.raises(NotPrepared, match="no configuration 'b' any more"):
        dispatcher_of(registry, backend=Tiled("a")).prepare(copy)


def linear_candidates(fast=(), us=40.0):
    """Every configuration of every kernel that serves `LINEAR`, `fast` (variant, backend, number) the fastest."""
    dispatcher = Dispatcher(built_in_registry(), tuning="")
    found = []
    for decision in dispatcher.explain(LINEAR, device=H200).accepted:
        sku = dispatcher.registry.sku(decision.sku)
        for number, name in enumerate(dispatcher.choices(sku, LINEAR, H200) or ("",)):
            found.append(measured(sku, 5.0 if (sku.variant, sku.backend, number) == fast else us + number, name))
    return found


@pytest.mark.parametrize("variant", ["warpgroup", "mma"])
def test_a_configuration_of_a_linear_kernel_is_chosen_by_time_and_compiled_ahead(variant):
    """`skuda compile` fills the cache with what a machine with the same tuning looks for."""
    candidates = linear_candidates((variant, "cuda_core", 3))
    (fast,) = (each for each in candidates if each.timing.median == 5.0)
    dispatcher = Dispatcher(built_in_registry(), tuning=tuned(*candidates, problem=LINEAR))
    plan, explanation = dispatcher.select(LINEAR, device=H200), dispatcher.explain(LINEAR, device=H200)
    assert (plan.sku.id, plan.choice) == (explanation.chosen, explanation.choice) == (fast.sku, fast.choice)
    assert any(note.startswith(f"configuration {fast.choice}: ") for note in explanation.notes)
    assert len(explanation.verdict.times) == len(candidates)
    configurations = partial(compile_command._configurations, dispatcher)
    problems = {LINEAR.op: list(compile_command._tuned(dispatcher, LINEAR.op))}
    assert problems == {LINEAR.op: [LINEAR]}
    wanted = cubins_of(
        dispatcher.registry.skus_of(LINEAR.op), problems, dispatcher.backends, H200, choices=configurations
    )
    flags = {(one.sku.id, one.launch.choice) for one in wanted}
    assert {(fast.sku, fast.choice), (fast.sku, dispatcher.choices(plan.sku, LINEAR, H200)[0])} <= flags


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tuning.json"
    tuned(measured(FIRST, 10.0), measured(SECOND, 8.0)).save(path)
    return path


def test_a_file_says_the_same_as_what_was_saved(file):
    assert Tuning.load(file) == tuned(measured(FIRST, 10.0), measured(SECOND, 8.0))
    assert list(file.parent.iterdir()) == [file], "nothing is left beside it"
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
    explanation = Dispatcher(registry, backends=[NumpyBackend()]).explain(PROBLEM, device=H200)
    assert explanation.verdict.origin == str(file)
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


CANDIDATE = ("entries", 0, "candidates", 0)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            edited("kind", value="skuda bench"),
            "the file must be of kind 'skuda tuning', schema 1; had kind 'skuda bench'",
        ),
        (edited("winner", value="x"), "winner must be one of kind, schema_version"),
        (edited("margin", value=100), "margin must be less than 100"),
        (edited("environment", "driver", value="580\x1b[2J"), "driver must be one line of printable characters"),
        (edited("entries", 0, "problem", value={}), "TuningEntry.problem.op must be the name of an op"),
        (edited("entries", 0, "problem", "op", value="other"), "TuningEntry.candidates must be kernels of other"),
        (edited(*CANDIDATE, "sku", value="../../etc"), "SkuIdentity.id must be category.op"),
        (edited(*CANDIDATE, "timing", value=None), "timing must be given, or else refused must say why"),
        (edited(*CANDIDATE, "timing", "median", value=-1), "Timing.median must be greater than 0"),
        (lambda record: record | {"entries": record["entries"] * 2}, "entries must hold a problem once"),
        (
            lambda record: record["entries"][0]["candidates"].append(record["entries"][0]["candidates"][0]) or record,
            f"TuningEntry.candidates must be measured once each; had {FIRST.id} twice",
        ),
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
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "in JSON"),
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


def test_neither_a_folder_nor_something_huge_is_read(file, monkeypatch):
    with pytest.raises(InvalidRecord, match="had no file there"):
        Tuning.load(file.parent)
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
    times = (timing(7.0 if number else 10.0) for number in itertools.count())
    even = [each.model_copy(update={"timing": time}) for each, time in zip(linear_candidates(), times, strict=False)]
    tuned(*reversed(even), problem=LINEAR).save(tmp_path / "pinned.json")
    printed = set()
    for seed, where, language in (("0", "/", "C"), ("4242", str(tmp_path), "C.UTF-8")):
        settings = {"SKUDA_TUNING": str(tmp_path / "pinned.json"), "SKUDA_PLUGINS": "0"}
        env = os.environ | settings | {"PYTHONHASHSEED": seed, "LC_ALL": language}
        command = [sys.executable, "-c", RANK, LINEAR.model_dump_json()]
        ran = subprocess.run(command, env=env, cwd=where, check=True, capture_output=True, text=True)
        printed.add(ran.stdout)
    (one,) = printed
    assert tuple(one.splitlines()[:2]) == (even[1].sku, even[1].choice), "the next of the ranking"
    assert "chosen by" in one
