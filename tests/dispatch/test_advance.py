"""Once everything for any number of rows is ready, no number compiles or loads anything."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from fakes import loading_cuda, toy_dispatcher
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.advance import Rows, needed, rows_of
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.dispatch.select import match
from skuda.dispatch.telemetry import KERNELS, Kernels, Loaded
from skuda.kernels.attention import AttentionDescriptor, RopeQuantizeAppendDescriptor
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.linear import QuantizedLinearDescriptor, ScaledLinearDescriptor
from skuda.registry import CompileError
from skuda.registry.device import KNOWN_DEVICES

OPS = {op.name: op for op in built_in_ops()}
PACKED = {"weight_element": "s4", "group_size": 128}
PLANTED = {
    # n, k: a wide layer and a narrow one; with 4 bits; zero points; a K that only mma.sync takes
    "wide": {"n": 1024, "k": 512},
    "narrow": {"n": 64, "k": 2048},
    "packed": {"n": 512, "k": 1024, **PACKED},
    "zero points": {"n": 256, "k": 256, "has_act_zero_point": True},
    "odd": {"n": 100, "k": 200},
}


@pytest.fixture
def backend(tmp_path, monkeypatch):
    return loading_cuda(monkeypatch, tmp_path)


def scaled(name, m=1):
    return ScaledLinearDescriptor(m=m, output_element="bf16", act_scale_scope="token", **PLANTED[name])


def asked(dispatcher, problem, device):
    """The kernel of a problem, without `needed`."""
    runtime = dispatcher._runtime
    pick = match.choose(runtime.registry, problem, device, NO_PREFERENCE, runtime.obstacles)
    return pick and (pick.sku, runtime.backends[pick.sku.backend].kernel_of(pick.sku, problem, device, pick.choice)[0])


def kernels(dispatcher, rows, device):
    runtime = dispatcher._runtime
    found = needed(dispatcher._planner, runtime, rows, device)
    return {(each.sku, each.flags) for each in found}


@pytest.mark.parametrize("name", [*OPS, *PLANTED])
def test_it_finds_what_each_number_of_rows_chooses_and_nothing_else(name):
    rng, dispatcher = fresh(), Dispatcher()
    cases = [scaled(name)] if name in PLANTED else [case.problem for case in OPS[name].cases]
    for card, number in zip(("h200", "a100"), rng.integers(len(cases), size=2), strict=True):
        device = KNOWN_DEVICES[card]
        for rows in rows_of(cases[number], 400 if name in PLANTED else 60):
            every = {asked(dispatcher, rows.at(count), device) for count in range(1, rows.most + 1)}
            assert kernels(dispatcher, [rows], device) == every - {None}


def test_two_numbers_of_attention_stand_for_all_pairs():
    dispatcher, device, tokens, sequences = Dispatcher(), KNOWN_DEVICES["h200"], 60, 12
    for heads, kv_heads, size in ((4, 4, 128), (10, 2, 128), (8, 1, 64), (48, 4, 128), (7, 1, 32)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": size, "pages": 90, "most_blocks": 8}
        of = {"scale": 0.1, "output_element": "bf16"}, {"most_positions": 900, "rotated": 0, "input_element": "bf16"}
        for kind, more in zip((AttentionDescriptor, RopeQuantizeAppendDescriptor), of, strict=True):
            rows = list(rows_of(kind(tokens=9, sequences=4, **sizes, **more), tokens))
            every = {
                asked(dispatcher, kind(tokens=count, sequences=of_them, **sizes, **more), device)
                for of_them in range(1, sequences + 1)
                for count in range(of_them, tokens + 1)
            }
            assert kernels(dispatcher, rows, device) == every


def test_no_number_of_rows_loads_anything_later(backend, caplog, monkeypatch, tmp_path):
    dispatcher, rng = Dispatcher(backends=[backend]), fresh()
    dynamic = {"q_min": -127, "q_max": 127, "activation_element": "f16", "output_element": "f32"}
    problems = [*(scaled(name) for name in PLANTED), QuantizedLinearDescriptor(m=1, c_out=256, k=512, **dynamic)]
    rows = [each for problem in problems for each in rows_of(problem, 300)]
    steps = []
    first = dispatcher.prepare_rows(rows, "cuda", lambda *step: steps.append(step))
    assert (first.compiled, first.found, first.failed) == (first.kernels, 0, ())
    assert first.kernels == len(backend.jobs) == len(backend.loaded) > len(problems)
    assert steps == [(done, first.kernels) for done in range(1, first.kernels + 1)]
    again = dispatcher.prepare_rows(rows, "cuda")
    assert (again.kernels, again.compiled, again.found) == (first.kernels, 0, 0)
    for each in rows:
        for count in {1, each.most, *rng.integers(1, each.most + 1, 60).tolist()}:
            dispatcher.select(each.at(count), device="cuda")
    assert len(backend.jobs) == first.kernels
    # A planted fault: one configuration is left out.
    victim, _ = list(backend._kernels.items())[int(rng.integers(first.kernels))]
    del backend._kernels[victim]
    dispatcher._planner._plans.clear()
    KERNELS.watch(logging.getLogger("skuda.test").warning)
    late = len(KERNELS.late)
    for each in rows:
        for count in range(1, each.most + 1):
            dispatcher.select(each.at(count), device="cuda")
    KERNELS.watch(None)
    assert [(one.sku, one.built) for one in KERNELS.late[late:]] == [(victim[0].id, False)]
    assert victim[0].id in caplog.text
    filled = Dispatcher(backends=[loading_cuda(monkeypatch, tmp_path)]).prepare_rows(rows, "cuda")
    assert (filled.compiled, filled.found) == (0, first.kernels)


def test_a_kernel_that_cannot_be_prepared_stops_no_other(monkeypatch, tmp_path):
    def fails(job):
        return "-DTOKENS=8" in job.flags

    backend = loading_cuda(monkeypatch, tmp_path, fails=fails)
    jobs, dispatcher = backend.jobs, Dispatcher(backends=[backend])
    found = dispatcher.prepare_rows(rows_of(scaled("wide"), 64), "cuda")
    assert len(found.failed) == sum(map(fails, jobs)) > 0
    assert found.compiled + len(found.failed) == found.kernels > len(found.failed)
    assert "no good" in found.failed[0][1]
    assert f"{len(found.failed)} failed" in str(found)
    with pytest.raises(CompileError, match="no good"):
        dispatcher.select(scaled("wide"), device="cuda")


def test_a_cpu_and_no_problems_need_nothing():
    dispatcher = toy_dispatcher()
    assert dispatcher.prepare_rows([], "cpu").kernels == 0
    assert Dispatcher().prepare_rows(rows_of(scaled("wide"), 8), "cpu").kernels == 0


def test_what_is_planned_inside_is_recorded():
    dispatcher, device = Dispatcher(), KNOWN_DEVICES["h200"]
    with dispatcher.recorded() as found, dispatcher.recorded():
        for _ in range(2):
            dispatcher.select(scaled("wide"), device=device)
    dispatcher.select(scaled("narrow"), device=device)
    assert found == {(scaled("wide"), device)}


def test_late_kernels_are_counted_and_told_of_ever_less_often():
    counts, lines = Kernels(), []
    counts.add(Loaded("before", built=True, seconds=1))
    counts.watch(lines.append)
    with counts.expected():
        counts.add(Loaded("expected", built=False, seconds=1))
    for number in range(1, 71):
        counts.add(Loaded(f"late {number}", built=number % 2 == 0, seconds=1))
    assert (counts.compiled, counts.found, len(counts.late)) == (36, 36, 70)
    told = [int(line.split()[1]) for line in lines]
    assert told == [*range(1, 17), 32, 64]
    assert Counter(word for line in lines for word in ("compiled", "loaded") if word in line)["compiled"] == 10


def test_a_problem_without_rows_stands_for_itself():
    (case,) = [case.problem for case in OPS["quantize_per_tensor"].cases][:1]
    assert list(rows_of(case, 9)) == [Rows(case, (), 1)]
