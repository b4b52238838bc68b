"""Every planted fault fails its check, in the suite as in `skuda verify`; what is right passes."""

from __future__ import annotations

import re

import pytest
from planted import BASES, FAULTS, dispatcher_of, sku_of
from support import SEED, sampled

from skuda.registry.device import HOST
from skuda.tools.verify.checks import CHECKS, perform
from skuda.tools.verify.placement import HostPlacement
from skuda.tools.verify.trial import Examples, Trial
from skuda.tools.verify.verification import verify


def trial_of(name: str, base: str = "") -> Trial:
    sku = sku_of(name, base)
    dispatcher = dispatcher_of(sku)
    return Trial(sku, dispatcher, HOST, HostPlacement(), Examples(dispatcher.registry.ops[sku.op], SEED))


@pytest.mark.filterwarnings("ignore:a slow path")
@pytest.mark.parametrize("name", sampled(FAULTS, 45))
def test_a_planted_fault_fails_its_check(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fault, trial = FAULTS[name], trial_of(name)
    perform(trial, fault.check)
    failure = trial.failures.get(fault.check)
    assert failure is not None, f"passes with seed {SEED}"
    assert re.search(fault.says, "\n".join(failure.lines())), failure


@pytest.mark.parametrize("base", sampled(BASES, 3))
def test_what_is_right_passes_every_check(base):
    trial = trial_of("right", base)
    for name in CHECKS:
        perform(trial, name)
    assert trial.failures == {}, f"with seed {SEED}"
    untested = {name for name, reason in trial.checks.items() if reason}
    assert untested <= {"streams", "constraints", "large", "compiles", "batch_invariant"}


def test_a_promise_without_a_case_for_it_is_not_recorded():
    trial = trial_of("right", "channel")
    perform(trial, "batch_invariant")
    assert (trial.failures, trial.checks["batch_invariant"]) == ({}, "no case has two independent rows")


@pytest.mark.parametrize("name", ["inner_stride_ignored", "checking_nothing", "works_in_its_input", "warns"])
@pytest.mark.filterwarnings("ignore:a slow path")
def test_verification_finds_what_the_suite_finds_and_says_the_same(name):
    fault, trial = FAULTS[name], trial_of(name)
    perform(trial, fault.check)
    found = verify(trial.dispatcher, HOST, skus=[trial.sku.id], seed=SEED)
    assert [one.verdict for one in found.skus] == ["failed"]
    (failure,) = [failure for failure in found.skus[0].failures if failure.check == fault.check]
    assert failure.lines() == trial.failures[fault.check].lines()


def test_a_failure_shows_the_layouts_and_how_many_cases_fail():
    trial = trial_of("inner_stride_ignored")
    perform(trial, "meaning")
    first, problem, *more = trial.failures["meaning"].lines()
    assert re.match(r"meaning: output\[\d+, \d+\] is -?\d+ \(0x..\), must be -?\d+ \(0x..\); \d+ of \d+", first)
    assert problem.startswith('problem: {"n":17,"d":33')
    assert more[0] == "layouts: contiguous, wide, misaligned, crooked, reversed pass; transposed, strided fail"
    assert re.match(r"\d+ more cases fail this check", more[1])


def test_a_case_is_repeated_by_its_number_and_seed():
    trial = trial_of("wrong_beyond_4096_k")
    perform(trial, "meaning")
    failure = trial.failures["meaning"]
    found = verify(trial.dispatcher, HOST, skus=[trial.sku.id], seed=SEED, cases=[failure.case])
    (again,) = [each for each in found.skus[0].failures if each.check == "meaning"]
    assert (again.case, again.at, again.got, again.more) == (failure.case, failure.at, failure.got, 0)
    assert found.skus[0].cases == 3, "one case, drawn three times"
