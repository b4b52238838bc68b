"""`skuda bench` without a GPU: what is measured and counted, what is refused, and what a record says.

Kernels run on the CPU in a lab of NumPy arrays, whose clock is made up.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from paths import ROOT
from stub_cutlass import build, needs_cc
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.select.tuning import Timing
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear import quantized_linear as layer
from skuda.kernels.quantize import QuantizePerTensorDescriptor
from skuda.kernels.quantize import fake_quantize as definition
from skuda.registry import BackendSpec, Case, InvalidProblem, InvalidRecord, OpCategory, Registry, Role
from skuda.registry.descriptor import storage_shape
from skuda.registry.device import HOST, device_named
from skuda.registry.errors import MissingDependency
from skuda.tools.bench import command, lab
from skuda.tools.bench import record as bench_records
from skuda.tools.bench import rivals as bench_rivals
from skuda.tools.bench.bench import Bench
from skuda.tools.bench.chain import Chain, chained
from skuda.tools.bench.clock import CudaClock
from skuda.tools.bench.command import command_line
from skuda.tools.bench.cupy import elementwise, serves
from skuda.tools.bench.cutlass import rival as bench_cutlass
from skuda.tools.bench.cutlass.rival import Configuration, Cutlass, build_command, refusal
from skuda.tools.bench.host import host_costs
from skuda.tools.bench.lab import Ceiling, HostLab, Sizes, TorchLab
from skuda.tools.bench.markdown import bench_markdown
from skuda.tools.bench.measurement import error_line, max_ulps, rounds_each, schedule
from skuda.tools.bench.record import (
    BenchRecord,
    CaseResult,
    Ceilings,
    HostCost,
    RivalResult,
    measurer_hash,
)
from skuda.tools.bench.rivals import Alternatives, Rival, absence, rivals_of
from skuda.tools.bench.sensor import Reading
from skuda.tools.bench.summary import band_cells, choices, means, rate, refusals
from skuda.tools.bench.work import Work, work_of
from skuda.tools.cli import main
from skuda.tools.verify.evidence import load_records
from skuda.tools.verify.trial import answer
from skuda.tools.words import cases as cases_module
from skuda.tools.words.cases import groups, problem_of, select_cases

REGISTRY = built_in_registry()
OPS = {op.name: op for op in built_in_ops()}
US = 10.0
"""What our kernels take on the made-up clock, in microseconds."""


# ----------------------------------------------------------------------------------------------------- what is measured


def test_groups_are_the_whole_family():
    known = groups(REGISTRY)
    assert known["linear"] == ("quantized_linear", "scaled_linear", "smoothquant_linear")
    assert set(known["all"]) == {name for name, op in OPS.items() if op.category is OpCategory.QUANTIZATION}
    assert not set(known["quantize"]) & set(known["linear"])


def test_defaults_cover_every_op_in_its_elements():
    cases = select_cases(REGISTRY)
    assert {case.op for case in cases} == set(groups(REGISTRY)["all"])
    assert len({case.label for case in cases}) == len(cases)
    found = {op: [(case.shape, case.element.value) for case in cases if case.op == op] for op in OPS}
    assert len(found["dynamic_range"]) == 14
    assert ((65536, 8192), "f16") in found["dynamic_range"]
    assert found["quantize_per_group_backward"] == [
        ((16384, 8192), "bf16"),
        ((16384, 8192), "f32"),
        ((8192, 8192), "f64"),
    ]
    assert [each for each in found["fake_quantize"] if each[1] == "f32"] == [
        ((1024, 1024), "f32"),
        ((4096, 4096), "f32"),
        ((16384, 8192), "f32"),
    ]
    assert len(found["smoothquant_linear"]) == len(found["quantized_linear"]) == 20
    assert ((2048, 8192, 28672), "bf16") in found["smoothquant_linear"]
    assert found["scaled_linear"] == [
        *(((m, 4096, 4096), "bf16") for m in (1, 16, 128, 1024, 4096)),
        ((4096, 4096, 4096), "s32"),
    ]


def test_shapes_and_elements_replace_the_defaults():
    cases = select_cases(REGISTRY, ["fake_quantize"], [(3, 4), (5, 6)])
    assert [(case.shape, case.element) for case in cases] == [
        ((3, 4), "f32"),
        ((5, 6), "f32"),
        ((3, 4), "bf16"),
        ((5, 6), "bf16"),
        ((3, 4), "f64"),
        ((5, 6), "f64"),
    ]
    (case,) = select_cases(REGISTRY, ["quantized_linear"], [(3, 4, 5)], ["f16"])
    assert (case.problem.m, case.problem.c_out, case.problem.k) == (3, 4, 5)
    assert (case.problem.activation_element, case.problem.output, case.problem.weight_element) == ("f16", "f16", "s8")
    f32 = select_cases(REGISTRY, ["dynamic_range"], elements=["f32"])
    assert [case.shape for case in f32] == [case.shape for case in select_cases(REGISTRY, ["dynamic_range"])][:7]
    both = select_cases(REGISTRY, ["all"], [(3, 128), (3, 4, 5)], ["bf16"])
    assert {(case.op.endswith("linear"), len(case.shape)) for case in both} == {(True, 3), (False, 2)}


@pytest.mark.parametrize(
    ("names", "shapes", "elements", "says"),
    [
        (["fake_quantise"], [], [], "OPS must be an op of the quantization family or a group .*fake_quantize"),
        (["fill"], [], [], "OPS must be"),
        ([], [], ["s8"], "--element must be one of .*bf16.*; had 's8'"),
        (["linear"], [(3, 4)], [], "--shapes must be MxNxK .* for quantized_linear, scaled_linear, .*; had 3x4"),
        (["dynamic_range"], [(3, 4, 5)], [], "--shapes must be ROWSxCOLUMNS for dynamic_range; had 3x4x5"),
        (["quantize_per_group"], [(3, 4)], [], "axis_size must be a multiple of group_size = 128"),
    ],
)
def test_what_cannot_be_measured_is_refused(names, shapes, elements, says):
    with pytest.raises(InvalidProblem, match=says):
        select_cases(REGISTRY, names, shapes, elements)


# ------------------------------------------------------------------------------------------------------------- the work


@pytest.mark.parametrize(
    ("op", "shape", "element", "work"),
    [
        ("fake_quantize", (16, 256), "bf16", Work(8192, 8192, 0)),
        ("fake_quantize_backward", (16, 256), "bf16", Work(2 * 8192, 8192, 0)),
        ("quantize_per_tensor", (16, 256), "f16", Work(8192, 4096, 0)),
        ("quantize_per_channel", (16, 256), "f32", Work(16384 + 256 * 8, 4096, 0)),
        ("quantize_per_token_backward", (16, 256), "f64", Work(2 * 32768 + 16 * 12, 32768, 0)),
        ("dequantize_per_group", (16, 256), "bf16", Work(4096 + 32 * 8, 8192, 0)),
        ("dequantize_per_group_backward", (16, 256), "bf16", Work(8192 + 32 * 4, 8192, 0)),
        ("dynamic_range", (16, 256), "bf16", Work(8192, 4096 + 16 * 8, 0)),
        ("rms_norm_quantize", (16, 256), "bf16", Work(2 * 8192 + 512, 4096 + 16 * 4 + 8192, 0)),
        ("layer_norm_quantize", (16, 256), "f32", Work(2 * 16384 + 2 * 1024, 4096 + 16 * 4 + 16384, 0)),
        ("smoothquant_linear", (3, 5, 7), "bf16", Work(21 + 35 + 20, 30, 210)),
        ("quantized_linear", (3, 5, 7), "f16", Work(42 + 35 + 20, 30, 210)),
        ("scaled_linear", (3, 5, 7), "bf16", Work(21 + 35 + 20 + 12, 30, 210)),
        ("scaled_linear", (3, 5, 7), "s32", Work(21 + 35, 60, 210)),
    ],
)
def test_work_is_what_the_descriptor_says(op, shape, element, work):
    assert work_of(problem_of(OPS[op].descriptor, shape, element)) == work
    assert work.bytes == work.read + work.written


def test_work_of_packed_codes_and_empty_problems():
    fields = {"q_min": -8, "q_max": 7, "input_element": "f32", "output_element": "s4"}
    assert work_of(QuantizePerTensorDescriptor(numel=7, **fields)) == Work(28, 4, 0)
    assert work_of(QuantizePerTensorDescriptor(numel=0, **fields)) == Work(0, 0, 0)


def test_work_is_the_arrays_that_a_run_takes():
    rng = fresh("work")
    for case in select_cases(REGISTRY, ["quantize"], [(6, 256)], ["f32", "f64"]):
        drawn = draw(OPS[case.op], Case(case.problem), rng)
        made = [a for a in case.problem.arguments() if a.role is Role.OUTPUT]
        scalars = {a.name for a in case.problem.arguments() if a.is_scalar}
        arrays = {name: value for name, value in drawn.inputs.items() if name not in scalars}
        # Scales of f64 data may come narrower; the first element is what counts.
        sizes = {a.name: storage_dtype(a.elements[0]).itemsize for a in case.problem.arguments()}
        work = work_of(case.problem)
        assert work.read == sum(value.size * sizes[name] for name, value in arrays.items()), case.label
        shapes = [(storage_shape(a.shape, a.elements[0]), sizes[a.name]) for a in made]
        assert work.written == sum(int(np.prod(shape)) * size for shape, size in shapes), case.label


# ----------------------------------------------------------------------------------------------------------- statistics


def test_timing_sums_samples_up():
    samples = [float(n) for n in range(101)]
    fresh("timing").shuffle(samples)
    assert Timing.of(samples) == Timing(median=50, p10=10, p90=90, best=0, rounds=101)
    assert Timing.of([3.0]) == Timing(median=3, p10=3, p90=3, best=3, rounds=1)


def test_rounds_are_those_asked_for_as_far_as_a_budget_goes():
    estimates = {"fast": 5.0, "even": 2e4, "slow": 5e4, "slower": 3e5, "slowest": 2e6}
    assert rounds_each(estimates, 20, 0.4) == {"fast": 20, "even": 20, "slow": 8, "slower": 3, "slowest": 1}
    assert rounds_each({"slower": 3e5, "free": 0.0}, 2, 0.4) == {"slower": 2, "free": 2}


def test_everybody_runs_in_turn_and_the_slow_are_spread():
    assert schedule({"a": 4, "b": 4, "c": 2}) == ["a", "b", "b", "c", "a", "a", "b", "a", "b", "c"]
    assert schedule({}) == []
    rounds = {"ours": 20, "slow": 3, "once": 1}
    many = schedule(rounds)
    assert {name: many.count(name) for name in rounds} == rounds
    at = [number for number, name in enumerate(many) if name == "slow"]
    assert min(b - a for a, b in pairwise(at)) > 4


def test_the_lower_ceiling_bounds():
    ceilings = Ceilings(copy_bandwidth=4e12, bf16=7e14, fp8=1.4e15)
    assert ceilings.bound(Work(4_000_000, 0, 0)) == ("memory", 1.0)
    assert ceilings.bound(Work(4_000_000, 0, int(2.8e9))) == ("compute", 2.0)
    assert ceilings.bound(Work(12_000_000, 0, int(2.8e9))) == ("memory", 3.0)
    assert Ceilings().bound(Work(1, 1, 1)) == ("memory", None)
    assert Ceilings(fp8=1e12).bound(Work(1, 1, 10**6)) == ("compute", 1.0)
    first = Ceilings(copy_bandwidth=3.0, empty=2.5, notes=("x",))
    last = Ceilings(copy_bandwidth=4.0, fp8=1.0, empty=2.0, notes=("x",))
    assert first.best(last) == last.best(first) == last, "the shortest time, but the highest rates"


# ------------------------------------------------------------------------------------------------------------ measuring


class PaperLab(HostLab):
    """NumPy arrays, and a clock that says what each replay costs."""

    def __init__(self):
        super().__init__(REGISTRY)
        self.measured, self.captured = [], []
        self.tidied = 0

    def capture(self, call, *, careful=True):
        self.captured.append(super().capture(call, careful=careful))
        return call

    def measure(self, replays):
        for replay in replays:
            replay()
        times = [getattr(replay, "us", US) for replay in replays]
        self.measured.append(times)
        return times

    def ceilings(self):
        def refuse():
            raise RuntimeError("no fp8 here\nand more")

        def taking(us):
            call = lambda: None  # noqa: E731  a function of its own each time
            call.us = us
            return lambda: call

        return (
            Ceiling("copy_bandwidth", 10**6, taking(100.0)),
            Ceiling("copy_bandwidth", 10**6, taking(250.0), graph=False),
            Ceiling("bf16", 10**6, taking(2.0)),
            Ceiling("fp8", 1, refuse),
        )

    def tidy(self):
        self.tidied += 1


def taking(us):
    def make(problem, inputs):
        call = lambda: None  # noqa: E731  a function of its own each time
        call.us = us
        return call

    return make


def refusing(problem, inputs):
    raise ValueError("M must exceed 16\nsecond line")


def bench_of(dispatcher=None, rivals=(), **more):
    lab = PaperLab()
    dispatcher = dispatcher or Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    return Bench(dispatcher, HOST, lab, rivals=lambda problem: tuple(rivals), **{"seed": 5, **more})


def record_of(*names, rivals=(), shape=(6, 128), elements=("f32",), **more):
    cases = select_cases(REGISTRY, names, [shape], elements)
    return bench_of(rivals=rivals, **more).run(
        cases, command="skuda bench", host=lambda: (HostCost(name="x", refused="y"),)
    )


def test_every_op_is_measured_and_compared_on_the_cpu():
    record = record_of(*groups(REGISTRY)["quantize"], elements=())
    assert record.refused == ()
    assert {case.op for case in record.cases} == set(groups(REGISTRY)["quantize"])
    for case in record.cases:
        assert case.sku.endswith(".cpu.numpy.reference")
        assert len(case.source_hash) == 64
        assert case.timing == Timing(median=US, p10=US, p90=US, best=US, rounds=20)
        assert case.bytes_per_second == pytest.approx(case.bytes / US * 1e6)
        assert case.ceiling_share == pytest.approx(case.bytes / 1e10 / (US / 1e6))
    (linear,) = record_of("smoothquant_linear", shape=(3, 5, 7)).cases
    assert linear.operations_per_second == pytest.approx(210 / US * 1e6)
    assert linear.bound == "memory", "no fp8 ceiling"


def test_rivals_run_in_turn_in_the_same_rounds():
    bench = bench_of(rivals=(Rival("twice", "the same", taking(20.0)), Rival("half", "less", taking(5.0))), repeats=4)
    result = bench.measure(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"])[0]).judged(Ceilings())
    assert {rival.name: rival.ratio for rival in result.rivals} == {"twice": 2.0, "half": 0.5}
    assert bench.lab.measured[-1] == [US, 20.0, 5.0, 20.0, 5.0, US, 5.0, US, 20.0, US, 20.0, 5.0]
    assert bench.lab.tidied == 1
    assert result.ceiling_share is None


def test_what_is_faster_outside_a_graph_is_timed_outside():
    made = []

    def make(problem, inputs):
        made.append(taking(7.0)(problem, inputs))
        return made[-1]

    bench = bench_of(rivals=(Rival("in", "the same", make), Rival("out", "the same", make, graph=False)))
    result = bench.measure(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"])[0])
    assert [rival.timing.median for rival in result.rivals] == [7.0, 7.0]
    assert [call in bench.lab.captured for call in made] == [True, False]


def test_a_rival_that_refuses_or_is_absent_is_named(monkeypatch):
    looked = []
    monkeypatch.setattr(bench_rivals, "find_spec", looked.append)
    gone = Rival("gone", "the same", taking(1.0), "nowhere.at.all")
    bad = Rival("bad", "the same", refusing)
    bench = bench_of(rivals=(gone, bad, Rival("ok", "the same", taking(30.0))))
    record = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(2, 8), (4, 8)], ["f32"]), command="")
    assert record.absent == {"gone": "nowhere is not installed; run: pip install nowhere"}
    assert looked == ["nowhere"], "looked for once a run"
    for case in record.cases:
        found = {rival.name: rival for rival in case.rivals}
        assert found["gone"].refused == record.absent["gone"]
        assert found["bad"].refused == "ValueError: M must exceed 16"
        assert found["bad"].timing is found["gone"].timing is None
        assert found["ok"].ratio == 3.0
    assert refusals(record.cases, ["gone"]) == ["bad refuses 2x8 f32, 4x8 f32: ValueError: M must exceed 16"]


def alternatives(outputs=None, **times):
    """A rival with an alternative for each name, which takes so many microseconds, or raises without a number."""

    def make(problem, inputs):
        def one(us):
            def call():
                if us is None:
                    raise ValueError("not this shape")
                for name, wanted in answer(OPS[problem.op_name()], problem, inputs).items():
                    if outputs is None:
                        written[name][...] = wanted

            call.us = us
            return call

        written = PaperLab().outputs(problem)
        return Alternatives({name: one(us) for name, us in times.items()}, written)

    return Rival("many", "the fastest of its alternatives", make)


def test_the_fastest_of_several_alternatives_is_the_rival():
    bench = bench_of(rivals=(alternatives(slow=40.0, near=25.0, none=None, fast=20.0),), repeats=4)
    cases = select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"])
    (case,) = bench.run(cases, command="").cases
    (rival,) = case.rivals
    assert (rival.chosen, rival.ratio, rival.timing.rounds, rival.refused) == ("fast", 2.0, 4, "")
    warm, first = [[40.0], [25.0], [20.0]], [40.0, 25.0, 20.0]
    quick = [25.0, 20.0, 20.0, 25.0, 25.0, 20.0, 20.0, 25.0, 25.0, 20.0]
    at = bench.lab.measured.index(quick)
    assert bench.lab.measured[at - 4 : at] == [*warm, first], "each runs once before, and once to drop the slow"
    assert bench.lab.measured[at + 1 :][:2] == [[20.0], [20.0]], "compared, then estimated"
    assert choices([case]) == ["many by fast: 2x8"]


@pytest.mark.parametrize(
    ("rival", "says"),
    [
        (alternatives(one=None, other=None), "ValueError: not this shape"),
        (alternatives(), "there is no alternative"),
        (alternatives(outputs="never written", slow=9.0, fast=2.0), r"fast: wrong result: output\[0\]: got nan"),
    ],
)
def test_alternatives_that_fail_or_are_wrong_are_not_timed(rival, says):
    bench = bench_of(rivals=(rival, Rival("ok", "the same", taking(30.0))))
    (case,) = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"]), command="").cases
    bad, fine = case.rivals
    assert re.search(says, bad.refused)
    assert (bad.timing, bad.ratio, bad.chosen) == (None, None, "")
    assert fine.ratio == 3.0


class ToyBackend(NumpyBackend):
    """A CPU backend that is no reference."""

    spec = BackendSpec(name="toycpu", processor="cpu")


def wrong_at_one_place(problem, *, input, scale, zero_point, output):
    definition.reference(problem, input=input, scale=scale, zero_point=zero_point, output=output)
    output.reshape(-1)[3] += 1 + abs(output.reshape(-1)[3])


def unwritten(problem, *, input, scale, zero_point, output):
    kept = output.reshape(-1)[-1].copy()
    definition.reference(problem, input=input, scale=scale, zero_point=zero_point, output=output)
    output.reshape(-1)[-1] = kept


def breaks(problem, *, input, scale, zero_point, output):
    raise InvalidProblem("fake_quantize", "input", "trouble", "be fine")


def one_ulp_off(problem, *, input, scale, zero_point, output):
    definition.reference(problem, input=input, scale=scale, zero_point=zero_point, output=output)
    output.reshape(-1)[3] = np.nextafter(output.reshape(-1)[3], np.float32(np.inf))


def runs_out_of_memory(problem, *, input, scale, zero_point, output):
    raise MemoryError("2 GB wanted\nand more")


def dispatcher_with(entry, **changes):
    own = next(sku for sku in OPS["fake_quantize"].skus if sku.backend == "numpy" and sku.element == "f32")
    changes = {"backend": "toycpu", "variant": entry, "source": __name__, "entry_point": entry, **changes}
    sku = own.model_copy(update=changes)
    registry = Registry([ToyBackend.spec, OPS["fake_quantize"], sku], origin="toy")
    return Dispatcher(registry, backends=(ToyBackend(), NumpyBackend()))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("wrong_at_one_place", r"wrong result: output\[3\]: got .* \(0x\w{8}\), want .*; 1 of 64 elements differ"),
        ("unwritten", r"wrong result: output\[63\]: got nan"),
        ("breaks", "input must be fine; had trouble"),
        ("runs_out_of_memory", "^MemoryError: 2 GB wanted$"),
    ],
)
def test_wrong_results_are_not_timed(entry, says):
    bench = bench_of(dispatcher_with(entry), rivals=(Rival("never", "the same", taking(1.0)),))
    record = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(8, 8)], ["f32"]), command="")
    (case,) = record.refused
    assert re.search(says, case.refused)
    assert case.sku.endswith(f"toycpu.{entry}")
    assert (case.timing, case.rivals, case.bytes_per_second) == (None, (), None)
    # Once before and once after for each of the three ceilings that there are, and one replay to compare.
    assert len(bench.lab.measured) == 6 + entry.startswith(("wrong", "unwritten"))


def test_a_problem_without_a_kernel_is_refused_and_the_rest_goes_on():
    bench = bench_of(backend="pycuda")
    record = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32", "bf16"]), command="")
    assert [case.refused.startswith("no kernel for fake_quantize") for case in record.cases] == [True, True]
    assert {case.sku for case in record.cases} == {""}


def test_a_lost_device_does_not_cost_the_record():
    bench = bench_of()

    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    bench.lab.mismatch = bench.lab.tidy = lost
    record = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"]), command="", host=lost)
    said_so = "RuntimeError: an illegal memory access was encountered"
    assert [case.refused for case in record.cases] == [said_so]
    assert record.host == (HostCost(name="all", refused=said_so),)


def test_the_seed_draws_the_same_inputs_again():
    case = select_cases(REGISTRY, ["fake_quantize"], [(4, 8)], ["f32"])[0]
    seen = []
    for seed in (1, 1, 2):
        bench = bench_of(seed=seed)
        original = bench.lab.draw
        bench.lab.draw = lambda problem, drawn, original=original: seen.append(drawn) or original(problem, drawn)
        bench.measure(case)
    assert seen[0] == seen[1] != seen[2]


class SensedLab(PaperLab):
    """A card whose clock and power are read: first something old, then what holds during the rounds of a case."""

    def __init__(self):
        super().__init__()
        self.read = [Reading(1.0, 1.0), Reading(1500.0, 650.0)]

    def reading(self):
        return self.read.pop(0) if self.read else None


def test_a_result_has_the_clock_of_its_own_rounds_and_what_a_cycle_did(skuda, tmp_path, monkeypatch):
    bench = replace(bench_of(rivals=(Rival("twice", "the same", taking(20.0)),)), lab=SensedLab())
    cases = select_cases(REGISTRY, ["smoothquant_linear"], [(96, 8, 16), (2, 8, 16)], ["f32"])
    record = bench.run(cases, command="")
    first, second = record.cases
    assert (first.mhz, first.watts) == (1500.0, 650.0)
    assert first.operations_per_cycle == pytest.approx(2 * 96 * 8 * 16 / (US * 1e-6) / 1500e6)
    assert (second.mhz, second.watts, second.operations_per_cycle) == (None, None, None)
    path = tmp_path / "r.json"
    record.save(path)
    assert BenchRecord.load(path) == record
    ours = [line.split("\t") for line in skuda("--show", path)[1].splitlines() if "\tskuda\t" in line]
    assert [row[10:] for row in ours] == [["1500 MHz", "650 W"], []]
    assert "| 96x8x16 | f32 | 10.0 | 0.00246 TOPS | " in bench_markdown(record, REGISTRY, "cases")
    assert "| 2.00 | 0.00164 at 1.50 |" in bench_markdown(record, REGISTRY, "cases")
    assert "TOPS/GHz" not in bench_markdown(some_record(), REGISTRY, "cases")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for width, heading in ((80, r"GHz *\n"), (140, r"TOPS/GHz *\n")):
        monkeypatch.setenv("COLUMNS", str(width))
        text = re.sub(r"\x1b\[[0-9;]*m", "", skuda("--show", path)[1])
        assert re.search(heading, text)
        assert re.search(r"96x8x16 .* 0\.00164 at 1\.50\n", text)


def test_a_card_that_cannot_be_read_is_noted_once():
    bench = bench_of()
    bench.lab.unwatched = "SM clock and power are not read: no NVML"
    notes = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"]), command="").ceilings.notes
    assert notes == ("SM clock and power are not read: no NVML", "fp8: RuntimeError: no fp8 here")


def test_an_empty_kernel_bounds_everything_from_below_and_is_timed_as_everything_else(skuda, tmp_path, monkeypatch):
    bench, times = bench_of(), [3.0, 2.5]
    calls = []

    def make():
        call = lambda: calls.append("empty")  # noqa: E731  a function of its own each time
        call.us = times.pop(0)
        return call

    monkeypatch.setattr(bench.lab, "ceilings", lambda: (Ceiling("empty", 0, make),))
    record = bench.run(select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"]), command="")
    assert (record.ceilings.empty, record.ceilings.copy_bandwidth) == (2.5, None)
    assert len(bench.lab.captured) == 3, "ours, and the empty kernel before and after"
    assert len(calls) == 2 * (1 + 20)
    assert "- ceilings: empty kernel 2.50 us\n" in bench_markdown(record, REGISTRY, "facts")
    record.save(tmp_path / "r.json")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "empty kernel: 2.50 us" in skuda("--show", tmp_path / "r.json")[1]


# --------------------------------------------------------------------------------------------------------------- chains


def chain_of(layers=3, dispatcher=None):
    dispatcher = dispatcher or Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    return Chain(dispatcher, HOST, PaperLab(), seed=5, repeats=4, layers=layers)


@pytest.mark.parametrize("op", ["quantized_linear", "smoothquant_linear"])
def test_a_chain_feeds_every_layer_with_what_the_one_before_wrote_and_times_them_together(op):
    case = chained(*select_cases(REGISTRY, [op], [(3, 16, 16)], ["bf16"]))
    bench, compared = chain_of(), []
    mismatch = bench.lab.mismatch
    bench.lab.mismatch = lambda op, problem, inputs, outputs, ulps: (
        compared.append((inputs, outputs)) or mismatch(op, problem, inputs, outputs, ulps)
    )
    result = bench.measure(case).judged(Ceilings())
    assert result.refused == ""
    assert (result.layers, result.size, result.label) == (3, "3x16x16, 3 layers", f"{case.label}, 3 layers")
    assert result.timing == Timing(median=US / 3, p10=US / 3, p90=US / 3, best=US / 3, rounds=4)
    assert result.operations == 2 * 3 * 16 * 16, "of one layer"
    source = case.problem.arguments()[0].name
    assert len(compared) == 3
    for (_, before), (inputs, _) in pairwise(compared):
        assert inputs[source] is before["output"]
    weights = [inputs["weight_q"] for inputs, _ in compared]
    assert not any(np.array_equal(one, other) for one, other in pairwise(weights))
    assert bench.lab.measured[-1][0] == US, "one graph holds all layers"
    assert [rival.name for rival in result.rivals] == ["bf16"]


CALLS = count()


def wrong_in_one_of_three(problem, *, output, **arrays):
    layer.reference(problem, output=output, **arrays)
    if next(CALLS) % 3 == 1:
        output[0, 1] += 1 + abs(output[0, 1])


def test_a_layer_that_is_wrong_later_in_the_chain_is_refused():
    own = next(sku for sku in OPS["quantized_linear"].skus if (sku.backend, sku.element) == ("numpy", "bf16"))
    changes = {"backend": "toycpu", "variant": "x", "source": __name__, "entry_point": "wrong_in_one_of_three"}
    registry = Registry([ToyBackend.spec, OPS["quantized_linear"], own.model_copy(update=changes)], origin="toy")
    bench = chain_of(dispatcher=Dispatcher(registry, backends=(ToyBackend(),)))
    case = chained(*select_cases(REGISTRY, ["quantized_linear"], [(3, 16, 16)], ["bf16"]))
    result = bench.measure(case)
    assert result.refused.startswith("layer 1: wrong result: output[0, 1]: got ")
    assert result.timing is None


def test_a_chain_is_of_square_products_whose_output_is_their_input():
    static = chained(*select_cases(REGISTRY, ["smoothquant_linear"], [(3, 16, 16)], ["bf16"])).problem
    assert (static.output_element, static.activation_element) == ("s8", "s8")
    for op, shape in (("smoothquant_linear", (3, 16, 32)), ("fake_quantize", (16, 16))):
        with pytest.raises(InvalidProblem, match="--chain must stand beside products with N = K only; had " + op):
            chained(*select_cases(REGISTRY, [op], [shape], ["f32"]))


@pytest.mark.parametrize("ulps", [0, 1])
def test_a_kernel_may_be_as_far_off_as_it_promises(ulps):
    own = next(iter(OPS["fake_quantize"].skus)).precision_guarantee
    dispatcher = dispatcher_with("one_ulp_off", precision_guarantee=own.model_copy(update={"max_ulp": ulps}))
    record = bench_of(dispatcher).run(select_cases(REGISTRY, ["fake_quantize"], [(8, 8)], ["f32"]), command="")
    assert [case.refused.startswith("wrong result: output[3]") for case in record.cases] == [ulps == 0]


def test_a_promised_distance_is_granted():
    problem = problem_of(OPS["fake_quantize"].descriptor, (2, 8), "f32")
    sku = next(iter(OPS["fake_quantize"].skus))
    loose = sku.precision_guarantee.model_copy(update={"max_ulp": 2})
    any_distance = sku.precision_guarantee.model_copy(update={"max_ulp": None})
    assert max_ulps(sku, problem) == 0
    assert max_ulps(sku.model_copy(update={"precision_guarantee": loose}), problem) == 2
    assert max_ulps(sku.model_copy(update={"precision_guarantee": any_distance}), problem) is None


# --------------------------------------------------------------------------------------------------------------- rivals


def test_every_problem_has_rivals_that_say_what_they_compute():
    for case in select_cases(REGISTRY):
        rivals = rivals_of(case.problem)
        names = [rival.name for rival in rivals]
        assert len(set(names)) == len(names)
        assert all(rival.computes for rival in rivals)
        assert ("fp8" in names) is case.op.endswith("linear")
        assert ("copy" in names) is not case.op.endswith("linear")
        assert ("bitsandbytes" in names) is (case.op == "dynamic_range")
        assert ("cupy" in names) is (re.fullmatch(r"(fake_|de)?quantize(_per_[a-z]+)?", case.op) is not None)
        assert ("builtin" in names) is (
            case.op.startswith("fake_") or re.fullmatch(r"quantize_per_[a-z]+", case.op) is not None
        )
    for op in groups(REGISTRY)["linear"]:
        rivals = rivals_of(problem_of(OPS[op].descriptor, (1, 2, 3), "bf16"))
        told = {rival.name: rival.computes for rival in rivals}["fp8"]
        assert ("quantized before" in told) is (op == "quantized_linear")


# ----------------------------------------------------------------------------------------------------------------- CuPy


class Shared(np.ndarray):
    """An array that torch and CuPy both have."""

    device = nullcontext()


class Kernel:
    """What CuPy would make of an expression that is Python too."""

    def __init__(self, inputs, outputs, body, name):
        self.names = [part.split() for part in inputs.split(", ")]
        self.text = body.removeprefix("y = ")

    def __call__(self, *arrays):
        *given, y = arrays
        values = {name: value for (_, name), value in zip(self.names, given, strict=True)}
        known = {"min": np.minimum, "max": np.maximum, "rint": np.rint, "S": values["scale"].dtype.type}
        with np.errstate(over="ignore", under="ignore"):
            y[...] = eval(self.text, known, values).astype(y.dtype)  # noqa: S307  our own expression


@pytest.fixture
def cupy(monkeypatch):
    """CuPy and torch over NumPy arrays, and the streams that were asked for."""

    def stream(pointer):
        streams.append(pointer)
        return nullcontext()

    def as_tensor(value, dtype, device):
        return np.asarray(value, dtype).view(Shared)

    streams = []
    kinds = {name: np.dtype(name) for name in ("float16", "float32", "float64", "int8", "int32")}
    cuda = SimpleNamespace(current_stream=lambda: SimpleNamespace(cuda_stream=77))
    empty = lambda shape, dtype, device: np.full(shape, 99).astype(dtype).view(Shared)  # noqa: E731  one line is clearer
    torch = SimpleNamespace(cuda=cuda, empty=empty, as_tensor=as_tensor, Tensor=Kernel, **kinds)
    same = SimpleNamespace(
        from_dlpack=lambda array: array, ElementwiseKernel=Kernel, cuda=SimpleNamespace(ExternalStream=stream)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", same)
    return streams


@pytest.mark.parametrize("element", ["f16", "f32", "f64"])
def test_cupy_computes_what_the_op_means_on_the_stream_of_torch(cupy, element):
    served = [case for case in select_cases(REGISTRY, ["quantize"], [(6, 256)], [element]) if serves(case.problem)]
    assert len(served) == 12
    for case in served:
        inputs = PaperLab().draw(case.problem, int(fresh("cupy").integers(2**31)))
        want = answer(OPS[case.op], case.problem, inputs)["output"]
        shared = {n: v.view(Shared) if isinstance(v, np.ndarray) else v for n, v in inputs.items()}
        call = elementwise(case.problem, shared)
        assert cupy == []
        got = np.asarray(call())
        assert np.array_equal(got.reshape(want.shape), want, equal_nan=True), case.label
        assert cupy == [77]
        cupy.clear()


# -------------------------------------------------------------------------------------------------------------- CUTLASS


SOURCES = Path(bench_cutlass.__file__).resolve().parent
STATIC = {"m": 16, "n": 8, "k": 32, "act_scale": 0.5}


def static(**changes):
    return OPS["smoothquant_linear"].descriptor(**{**STATIC, "output_element": "bf16", **changes})


def dynamic(**changes):
    fields = {"m": 16, "c_out": 8, "k": 32, "q_min": -127, "q_max": 127, "activation_element": "bf16", **changes}
    return OPS["quantized_linear"].descriptor(**fields)


def scaled(**changes):
    fields = {"m": 16, "n": 8, "k": 32, "output_element": "bf16", **changes}
    return OPS["scaled_linear"].descriptor(**fields)


def test_cutlass_serves_what_it_was_built_for():
    assert refusal(static()) == refusal(dynamic()) == refusal(scaled()) == ""
    assert refusal(dynamic(activation_element="f16", output_element="bf16")) == ""
    told = {case.label: refusal(case.problem) for case in select_cases(REGISTRY, ["linear"])}
    assert told.pop("scaled_linear 4096x4096x4096 s32") == "built for a bf16 output, not s32"
    assert list(told.values()) == [""] * 45


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (static(activation_element="u8"), "built for s8 by s8, not u8 by s8"),
        (dynamic(q_min=0, q_max=255), "built for s8 by s8, not u8 by s8"),
        (static(weight_element="u8"), "built for s8 by s8, not s8 by u8"),
        (static(act_zero_point=3), "built without zero points"),
        (dynamic(has_weight_zero_point=True), "built without zero points"),
        (scaled(has_act_zero_point=True), "built without zero points"),
        (static(epilogue="bias_relu"), "built without an epilogue such as bias_relu"),
        (static(output_element="f16"), "built for a bf16 output, not f16"),
        (static(output_element="s8"), "built for a bf16 output, not s8"),
        (dynamic(activation_element="f32"), "built for a bf16 output, not f32"),
        (dynamic(activation_element="f64", output_element="bf16"), "built for scales in f32, not f64"),
        (static(k=24), "K must be a multiple of 16 and N of 8"),
        (dynamic(c_out=12), "K must be a multiple of 16 and N of 8"),
    ],
)
def test_cutlass_refuses_the_rest_with_the_reason(problem, says):
    assert refusal(problem) == says
    with pytest.raises(ValueError, match=re.escape(says)):
        rivals_of(problem, Cutlass(()))[0].make(problem, {})


def test_without_a_folder_cutlass_is_absent_and_the_command_is_told():
    for problem in (static(), dynamic(), scaled()):
        rival = rivals_of(problem)[0]
        assert (rival.name, rival.away) == ("cutlass", absence(rival))
        assert f"run: {build_command()}, then bench with --cutlass FOLDER" in rival.away
        assert ("activation quantized before" in rival.computes) is (problem.op_name() == "quantized_linear")
    script, folder = shlex.split(build_command())[1:]
    assert (Path(script), folder) == (SOURCES / "build.sh", "FOLDER")
    elsewhere = rivals_of(problem_of(OPS["fake_quantize"].descriptor, (2, 8), "f32"))
    assert "cutlass" not in {rival.name for rival in elsewhere}


def test_the_build_script_is_a_script_and_builds_what_the_source_can(tmp_path):
    script = SOURCES / "build.sh"
    subprocess.run(["bash", "-n", script], check=True)
    bare = subprocess.run(["bash", script], check=False, capture_output=True, text=True)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert "build.sh FOLDER" in bare.stderr
    wrong = subprocess.run(["bash", script, tmp_path, "t1x1"], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2
    names = wrong.stderr.removeprefix("no configuration t1x1; there are: ").split()
    assert len(names) == 12
    count = sum(len(Configuration(name, None).options) for name in names)
    assert count == 2 + 6 * 3 + 4 * 6, "plain kernels have no scheduler to tune"
    source, text = (SOURCES / "cutlass_rival.cu").read_text(), script.read_text()
    macros = set(re.findall(r"-D(RIVAL_\w+)", text))
    assert len(macros) == 8
    assert macros <= set(re.findall(r"RIVAL_\w+", source))
    for symbol in ("name", "tune", "workspace", "run"):
        assert re.search(rf"^RIVAL_EXPORT .*\b{symbol}\(", source, re.MULTILINE)


def addresses(*arrays):
    return tuple(array.ctypes.data for array in arrays)


@needs_cc
def test_an_object_is_called_as_it_is_declared(tmp_path):
    (one,) = Cutlass.load(build(tmp_path / "built", "t64x256x128_pp")).configurations
    problem = static(m=3)
    inputs = PaperLab().draw(problem, 1)
    want = answer(OPS["smoothquant_linear"], problem, inputs)["output"]
    output, space = np.zeros((3, 8), np.uint16), np.zeros(64, np.uint8)
    scale = np.full(3, 0.5, np.float32)
    operands = (inputs["act_q"], inputs["weight_q"], scale, inputs["weight_scale"].astype(np.float32), output)
    one.run(addresses(*operands), (3, 8, 32), (8, 0, 0), workspace=(space.ctypes.data, 64))
    assert np.array_equal(output.view(want.dtype), want)
    assert [one.library.tuned_to(at) for at in range(3)] == [8, 0, 0]
    with pytest.raises(ValueError, match="t64x256x128_pp: K must be a multiple of 16 and N of 8"):
        one.run(addresses(*operands), (3, 8, 24))
    with pytest.raises(ValueError, match="the workspace is too small"):
        one.run(addresses(*operands), (3, 8, 32))
    (bad,) = Cutlass.load(build(tmp_path / "bad", "t64x64x256", fails=107)).configurations
    with pytest.raises(RuntimeError, match="t64x64x256: the launch failed with CUTLASS status 7"):
        bad.run(addresses(*operands), (3, 8, 32))


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(InvalidProblem, match=r"--cutlass must be a folder with the objects that this builds: bash .*"):
        Cutlass.load(tmp_path)
    (tmp_path / "x.so").write_text("no object")
    with pytest.raises(InvalidProblem, match=r"--cutlass must hold what this builds.*x\.so, which does not load"):
        Cutlass.load(tmp_path)


@needs_cc
def test_an_object_with_another_interface_is_refused(tmp_path):
    (tmp_path / "y.c").write_text("int other(void) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "y.so", tmp_path / "y.c"], check=True)
    with pytest.raises(InvalidProblem, match=r"y\.so, which does not load: .*run"):
        Cutlass.load(tmp_path)


# ----------------------------------------------------------------------------------------------------------------- lab


class FakeCuda:
    """What the clock takes of `torch.cuda`; everything that it is asked to do is written down in `log`."""

    def __init__(self):
        self.log, self.mode = [], "default"

    def Stream(self, place):  # noqa: N802  torch's name
        note = lambda what: lambda *_: self.log.append(what)  # noqa: E731  one line is clearer
        return SimpleNamespace(wait_stream=note("wait for stream"), synchronize=note("synchronize stream"))

    def current_stream(self):
        return None

    def stream(self, stream):
        return nullcontext()

    def synchronize(self):
        self.log.append("synchronize")

    def set_sync_debug_mode(self, mode):
        self.mode = mode

    def CUDAGraph(self):  # noqa: N802  torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    def graph(self, graph, *, stream, capture_error_mode):
        self.log.append("capture")
        return nullcontext()

    def Event(self, *, enable_timing):  # noqa: N802  torch's name
        assert enable_timing
        return SimpleNamespace(record=lambda: self.log.append("event"), elapsed_time=lambda end: 0.002)


def test_every_run_on_a_gpu_stands_between_events_behind_a_flush():
    cuda = FakeCuda()
    clock = CudaClock(cuda, "cuda:0")
    log = lambda what: lambda: cuda.log.append(what)  # noqa: E731  a function of its own each time
    assert clock.measure([log("a"), log("b")], log("flush")) == [2.0, 2.0]
    assert cuda.log == [
        "synchronize",
        *("flush", "event", "a", "event"),
        *("flush", "event", "b", "event"),
        "synchronize",
    ]


@pytest.mark.parametrize("careful", [True, False])
def test_a_call_is_warm_before_it_is_captured_and_replayed_without_the_host(careful):
    cuda, runs = FakeCuda(), []
    replay = CudaClock(cuda, "cuda:0").capture(lambda: runs.append((cuda.mode, "capture" in cuda.log)), careful=careful)
    warm, captured = ("default", False), ("default", True)
    assert runs == [warm, *([("error", False)] if careful else []), captured]
    replay()
    assert (len(runs), cuda.log[-1]) == (2 + careful, "replay")


def test_a_call_that_waits_for_the_device_is_refused_and_other_errors_stay_what_they_are():
    for message, says in (
        ("called a synchronizing operation", "it waits for the device, so no graph can hold it: called"),
        ("out of memory", "^out of memory$"),
    ):
        cuda = FakeCuda()

        def call(cuda=cuda, message=message):
            if cuda.mode == "error":
                raise RuntimeError(message)

        with pytest.raises(RuntimeError, match=says):
            CudaClock(cuda, "cuda:0").capture(call)
        assert cuda.mode == "default"
        assert "capture" not in cuda.log


def test_a_flush_is_larger_than_the_cache():
    l2 = device_named("h200").l2_cache
    assert Sizes.of(l2).flushed >= 4 * l2
    assert Sizes.of(0).flushed >= 1 << 26


def test_absence_says_why(tmp_path, monkeypatch):
    (tmp_path / "brokenrival.py").write_text("raise OSError('libcudart.so.99 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert absence(Rival("a", "b", taking(1.0))) == ""
    assert absence(Rival("a", "b", taking(1.0), "json.decoder")) == ""
    assert absence(Rival("a", "b", taking(1.0), "nosuchrival.x")).endswith("run: pip install nosuchrival")
    said_so = absence(Rival("a", "b", taking(1.0), "brokenrival"))
    assert said_so == "brokenrival cannot be imported: OSError: libcudart.so.99 is missing"
    assert error_line(ValueError("")) == "ValueError: no reason given"
    assert len(error_line(ValueError("x" * 999))) == 240


# ----------------------------------------------------------------------------------------------------------------- host


def test_host_costs_are_per_call_and_interleaved():
    now, order = [0], []

    def of(name, us):
        def call():
            order.append(name)
            now[0] += us * 1000

        return call

    calls = {"slow": of("slow", 4), "absent": "no nvcc", "fast": of("fast", 2)}
    found = {
        cost.name: cost
        for cost in host_costs(calls, lambda: order.append("wait"), burst=3, rounds=2, clock=lambda: now[0])
    }
    assert list(found) == ["slow", "absent", "fast"]
    assert (found["slow"].timing.median, found["fast"].timing.median) == (4.0, 2.0)
    assert (found["absent"].timing, found["absent"].refused) == (None, "no nvcc")
    once = ["wait", "slow", "slow", "slow", "wait", "fast", "fast", "fast"]
    assert order == [*["slow"] * 3, *["fast"] * 3, *once, *once, "wait"]


# -------------------------------------------------------------------------------------------------------------- records


def some_record(**changes):
    rivals = (Rival("twice", "half of it", taking(20.0)), Rival("bad", "the same", refusing))
    record = record_of("fake_quantize", "quantize_per_token", rivals=rivals)
    return record.model_copy(update=changes)


def test_a_record_survives_its_file(tmp_path):
    record = some_record(device=device_named("h200"), driver="1", seconds=3.5)
    path = tmp_path / "deep" / "bench.json"
    record.save(path)
    assert BenchRecord.load(path) == record
    found = json.loads(path.read_text())
    assert (found["kind"], found["schema_version"], found["seed"]) == ("skuda bench", 1, 5)
    assert found["ceilings"]["notes"] == ["fp8: RuntimeError: no fp8 here"]
    assert [p.name for p in path.parent.iterdir()] == ["bench.json"]
    assert found["flush"] == "clean"
    del found["flush"]
    (tmp_path / "old.json").write_text(json.dumps(found))
    assert BenchRecord.load(tmp_path / "old.json").flush == "dirty", "as it was before records said so"
    assert load_records(path.parent).files == (), "evidence of `skuda verify` stands in the same folder"
    earlier = record.model_copy(update={"date": "2020-01-01"})
    earlier.save(path.with_name("z.json"))
    (path.parent / "other.json").write_text('{"kind": "skuda verify"}')
    assert BenchRecord.files(path.parent) == {path: record, path.with_name("z.json"): earlier}
    (path.parent / "other.json").write_text("{")
    with pytest.raises(InvalidRecord, match=r"other\.json"):
        BenchRecord.files(path.parent)


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "x.json"
    for text, says in (
        ("{", "readable JSON"),
        ("[1]", "be a record of kind 'skuda bench', schema 1"),
        ('{"kind": "skuda verify", "schema_version": 1}', "had kind 'skuda verify', schema 1"),
        ('{"kind": "skuda bench", "schema_version": 2}', "had kind 'skuda bench', schema 2"),
        ('{"kind": "skuda bench", "schema_version": 1}', r"x\.json.*must be given"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidRecord, match=says):
            BenchRecord.load(path)
    with pytest.raises(InvalidRecord, match="readable JSON"):
        BenchRecord.load(tmp_path / "absent.json")


def test_a_record_of_other_measuring_code_is_outdated(monkeypatch):
    record = some_record(measurer_hash=measurer_hash())
    assert record.outdated == ""
    monkeypatch.setattr(bench_records, "measurer_hash", lambda: "another")
    assert record.outdated == "measured by other measuring code"
    assert "- stale: measured by other measuring code\n" in bench_markdown(record, REGISTRY, "facts")
    assert some_record().outdated, "a record from before there was the hash"


def test_a_record_of_another_kernel_is_stale():
    case = some_record().cases[0]
    assert not case.stale(REGISTRY)
    assert case.model_copy(update={"source_hash": "0" * 64}).stale(REGISTRY)
    assert case.model_copy(update={"sku": "quantization.gone"}).stale(REGISTRY)
    assert not case.model_copy(update={"sku": ""}).stale(REGISTRY)


def test_rates_are_bytes_of_whatever_memory_bounds_and_of_few_rows():
    fields = {
        "label": "",
        "op": "x",
        "shape": (65, 8, 8),
        "element": "f32",
        "problem": {},
        "bytes": 4 * 10**6,
        "operations": 10**9,
    }
    case = CaseResult(**fields, timing=Timing.of([2.0]))
    for fp8, bound, share in ((2e15, "memory", 0.5), (1e14, "compute", 5.0)):
        judged = case.judged(Ceilings(copy_bandwidth=4e12, fp8=fp8))
        assert (judged.bound, judged.ceiling_share) == (bound, pytest.approx(share))
        assert rate(judged) == "500 TOPS"
        for shape in ((64, 8, 8), (1, 8, 8), (65, 8)):
            assert rate(judged.model_copy(update={"shape": shape})) == "2 TB/s"
    assert rate(CaseResult(**fields)) == ""


def product_case(shape, **ratios):
    fields = {"label": "x", "op": "quantized_linear", "element": "bf16", "problem": {}, "bytes": 1, "operations": 1}
    told = ((name, ratio, "" if ratio else "no") for name, ratio in ratios.items())
    rivals = tuple(RivalResult(name=name, computes="c", ratio=ratio, refused=refused) for name, ratio, refused in told)
    return CaseResult(**fields, shape=shape, rivals=rivals)


def test_means_are_geometric_and_by_rows():
    cases = [
        product_case((1, 8, 8), a=None, b=0.5),
        product_case((16, 8, 8), a=0.25, b=2.0),
        product_case((63, 8, 8), a=4.0),
        product_case((64, 8, 8), a=12.0),
        product_case((999, 8, 8), a=3.0),
        product_case((1000, 2**13, 2**10), a=1.5, never=None),
        product_case((2**13, 2**10, 2**10), a=6.0),
        product_case((2048, 8), a=9.0),
    ]
    found = means(cases)
    assert list(found) == ["a", "b"]
    assert found["a"] == {
        "M < 64": (pytest.approx(1.0), 2, 0.25, "16x8x8"),
        "64 <= M < 1000": (pytest.approx(6.0), 2, 3.0, "999x8x8"),
        "M >= 1000": (pytest.approx(3.0), 2, 1.5, "1000x8192x1024"),
    }
    assert found["b"] == {"M < 64": (pytest.approx(1.0), 2, 0.5, "1x8x8")}
    assert means(cases, large=True)["a"] == found["a"] | {"M * N * K >= 2^33": (6.0, 1, 6.0, "8192x1024x1024")}
    assert means([]) == means([], large=True) == {}
    assert ("x a", "M < 64", "1.000", "2", "0.250", "16x8x8") in band_cells(cases)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def skuda(capsys, monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    def run(*arguments):
        status = main(["bench", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(command, "Dispatcher", lambda: Dispatcher(REGISTRY, backends=(NumpyBackend(),)))


@pytest.fixture
def on_paper(monkeypatch):
    """A CUDA device that torch would see, whose problems the CPU solves."""
    card = HOST.model_copy(update={"name": "a card", "processor": "cuda"})
    dispatcher = Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    monkeypatch.setattr(command, "Dispatcher", lambda: dispatcher)
    monkeypatch.setattr(Dispatcher, "devices", (card, HOST))
    monkeypatch.setattr(command, "TorchLab", lambda device: PaperLab())

    def bench(dispatcher, device, lab, *, rivals, **how):
        asked.append(rivals)
        return bench_of(dispatcher, **how)

    def chain(dispatcher, device, lab, *, layers, rivals, **how):
        return Chain(dispatcher, HOST, lab, layers=layers, **how)

    asked = []
    monkeypatch.setattr(command, "Bench", bench)
    monkeypatch.setattr(command, "Chain", chain)
    monkeypatch.setattr(command, "launch_costs", lambda *_: ())
    return asked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fake_quantise"], "fake_quantize"),
        (["linear", "--shapes", "4x4"], "MxNxK"),
        (["--shapes", "four"], "ROWSxCOLUMNS"),
        (["--element", "s8"], "--element must be one of"),
        (["--backend", "opencl"], "--backend must be one of pycuda, cuda_core, numpy"),
        (["--repeats", "0"], "repeats"),
        (["--seed", "-1"], "seed"),
        (["--show", "nowhere.json"], "nowhere.json"),
        (["linear", "--show", "nowhere.json"], "OPS must be left out: --show measures nothing"),
        (["--op", "linear", "--show", "nowhere.json"], "OPS must be left out"),
        (["--m", "4", "--show", "nowhere.json"], "--m must be left out"),
        (["--op", "fake_quantise"], "OPS must be"),
        (["linear", "--shapes", "llama"], "a file of those, or a model: llama-3-8b, llama-3-70b, minilm; had 'llama'"),
        (["--shapes", "minilm", "--m", "0"], "--m must be whole numbers above 0"),
        (["--m", "4"], "--m must stand beside --shapes with a model"),
        (["--output", "x", "--show", "nowhere.json"], "--output must be left out"),
        (["--cutlass", "x", "--show", "nowhere.json"], "--cutlass must be left out"),
        (["linear", "--cutlass", "nowhere"], "--cutlass must be a folder with the objects that this builds: bash "),
        (
            ["quantize", "--random", "3"],
            "--random must stand beside a product, such as linear; had amax, amax_quantize, ",
        ),
        (["linear", "--random", "0"], "random"),
        (["--random", "3", "--show", "nowhere.json"], "--random must be left out"),
        (["linear", "--shapes", "2x4x8", "--chain", "4"], "--chain must stand beside products with N = K only"),
        (["linear", "--shapes", "2x4x4", "--chain", "1"], "chain"),
        (["linear", "--rivals", "cuttlass"], "--rivals must be one of cutlass, bf16, int_mm"),
    ],
)
def test_bad_arguments_are_told_in_one_line(skuda, no_cuda, arguments, says):
    status, out, err = skuda(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_without_a_device_it_says_what_to_do(skuda, no_cuda):
    status, out, err = skuda("linear")
    assert (status, out) == (1, "")
    assert "needs a CUDA device" in err
    assert "skuda doctor" in err


def test_without_torch_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"torch, .* run: pip install torch"):
        TorchLab(device_named("h200"))


def test_a_run_is_recorded_and_shown_again(skuda, on_paper, tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    status, out, err = skuda(
        "fake_quantize", "--shapes", "4x8,2x8", "--element", "f32", "--seed", "7", "--output", path
    )
    assert (status, err) == (0, "")
    record = BenchRecord.load(path)
    assert record.command == "skuda bench fake_quantize --shapes 4x8,2x8 --element f32 --seed 7 --repeats 20"
    assert [case.shape for case in record.cases] == [(4, 8), (2, 8)]
    lines = [line.split("\t") for line in out.splitlines()]
    sku = "quantization.fake_quantize.f32.plain.cpu.numpy.reference"
    assert lines == [
        ["fake_quantize", s, "f32", "skuda", "10.0", "10.0", "10.0", "10.0", "1.0", sku] for s in ("4x8", "2x8")
    ]
    assert skuda("--show", path) == (0, out, "")
    status, shown, _ = skuda("--show", path, "--json")
    assert (status, BenchRecord.model_validate_json(shown)) == (0, record)
    wrong = record.cases[0].model_copy(update={"refused": "wrong result: x", "timing": None})
    record.model_copy(update={"cases": (wrong,)}).save(path)
    assert skuda("--show", path)[0] == 1


def test_a_model_gives_each_op_its_shapes_and_the_command_names_it(skuda, on_paper, tmp_path):
    path = tmp_path / "out.json"
    typed = ("--shapes", "minilm", "--m", "2,3", "--element", "f32", "--seed", "7", "--repeats", "1", "--output", path)
    assert skuda("quantize_per_token", "--op", "quantized_linear", *typed)[0] == 0
    record = BenchRecord.load(path)
    command = "skuda bench quantize_per_token quantized_linear --shapes minilm --m 2,3 --element f32 --seed 7"
    assert record.command == f"{command} --repeats 1"
    found = {op: {case.shape for case in record.cases if case.op == op} for op in {case.op for case in record.cases}}
    assert found == {
        "quantize_per_token": {(m, n) for m in (2, 3) for n in (384, 1536)},
        "quantized_linear": {(m, n, k) for m in (2, 3) for n, k in ((384, 384), (1536, 384), (384, 1536))},
    }


def test_random_products_are_drawn_from_the_seed_and_have_few_rivals(skuda, on_paper, tmp_path, monkeypatch):
    path, few = tmp_path / "out.json", ((5, 512, 528), (7, 528, 512))
    monkeypatch.setattr(cases_module, "random_products", lambda count, seed: few if (count, seed) == (2, 7) else ())
    typed = ("smoothquant_linear", "--random", "2", "--element", "bf16", "--repeats", "1", "--output", path)
    assert skuda(*typed, "--seed", "7")[0] == 0
    record = BenchRecord.load(path)
    assert record.command == "skuda bench smoothquant_linear --element bf16 --random 2 --seed 7 --repeats 1"
    assert tuple(case.shape for case in record.cases) == few
    assert [rival.name for rival in on_paper[-1](static())] == ["cutlass", "bf16"]
    assert skuda(*typed, "--seed", "7", "--rivals", "fp8,bf16", "--shapes", "3x16x16")[0] == 0
    assert [rival.name for rival in on_paper[-1](static())] == ["bf16", "fp8"], "in their usual order"
    again = BenchRecord.load(path)
    assert [case.shape for case in again.cases] == [(3, 16, 16), *few]
    assert "--rivals fp8,bf16 --random 2" in again.command
    assert skuda("smoothquant_linear", "--shapes", "3x16x16", "--rivals", "no", "--repeats", "1")[0] == 2
    assert skuda("--show", path, "--markdown", "bands")[0] == 0


def test_a_chain_is_recorded_as_such(skuda, on_paper, tmp_path):
    path = tmp_path / "out.json"
    typed = ("linear", "--shapes", "2x16x16", "--element", "bf16", "--chain", "4", "--repeats", "1", "--output", path)
    assert skuda(*typed)[0] == 0
    record = BenchRecord.load(path)
    assert [(case.op, case.layers) for case in record.cases] == [
        ("quantized_linear", 4),
        ("scaled_linear", 4),
        ("smoothquant_linear", 4),
    ]
    assert "--chain 4" in record.command
    assert "2x16x16, 4 layers" in skuda("--show", path)[1]


@needs_cc
def test_cutlass_is_found_where_the_folder_says_and_runs_on_its_card_only(skuda, on_paper, tmp_path, monkeypatch):
    folder = build(tmp_path / "built here", "t64x64x256")
    path = tmp_path / "out.json"
    typed = ("linear", "--shapes", "2x8x16", "--seed", "7", "--repeats", "2", "--cutlass", folder, "--output", path)
    assert skuda(*typed)[0] == 0
    again = BenchRecord.load(path).command
    assert again == f"skuda bench linear --shapes 2x8x16 --seed 7 --repeats 2 --cutlass '{folder}'"
    rival = on_paper[-1](static())[0]
    assert absence(rival) == "its objects run on compute capability 9.0 only, and the device's is unknown"
    card = Dispatcher.devices[0].model_copy(update={"compute_capability": (9, 0)})
    monkeypatch.setattr(Dispatcher, "devices", (card,))
    assert skuda(*typed)[0] == 0
    rival = on_paper[-1](static())[0]
    assert (rival.name, absence(rival)) == ("cutlass", "")
    assert "the fastest of 1 configuration for this shape" in rival.computes
    assert skuda(*typed[:-4])[0] == 0
    assert "no folder of built objects is named" in absence(on_paper[-1](static())[0])


def test_the_table_of_products_ends_with_means_and_says_who_won(skuda, tmp_path, monkeypatch):
    def timed(shape, us, **more):
        theirs = RivalResult(name="cutlass", computes="the fastest", timing=Timing.of([us]), **more)
        return product_case(shape).model_copy(update={"timing": Timing.of([10.0]), "rivals": (theirs,)})

    cases = (
        timed((16, 28672, 8192), 5.0, chosen="s64x16x256"),
        timed((4096, 14336, 4096), 20.0, chosen="t256x128x128_co_c1x2 swizzle=8"),
        timed((8192, 8192, 8192), 80.0, chosen="t256x128x128_co_c1x2 swizzle=8"),
    )
    record = some_record(flush="clean")
    ceilings = Ceilings(copy_bandwidth=1e12, fp8=1e12)
    path = tmp_path / "r.json"
    record.model_copy(update={"cases": tuple(case.judged(ceilings) for case in cases)}).save(path)
    rows = [line.split("\t") for line in skuda("--show", path)[1].splitlines()]
    assert rows[1][-1] == "s64x16x256: the fastest"
    for width in (80, 140):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
        text = re.sub(r"\x1b\[[0-9;]*m", "", skuda("--show", path)[1])
        assert re.search(r"16x28672x8192 +bf16 +10\.0 +1e-07 TB/s .* 0\.50", text)
        assert re.search(r"4096x14336x4096 +bf16 +10\.0 +1e-07 TOPS .* 2\.00", text)
        assert re.search(r"geometric mean +M >= 1000 \(of\) +M < 64 \(of\)\n", text)
        assert re.search(r"\n +x cutlass +4\.00 \(2\) +0\.50 \(1\)\n", text)
        assert "lowest x cutlass, M >= 1000: 2.000 at 4096x14336x4096\n" in text
        assert "lowest x cutlass, M < 64: 0.500 at 16x28672x8192\n" in text
        assert "cutlass by s64x16x256: 16x28672x8192\n" in text
        folded = " ".join(text.split())
        assert "cutlass by t256x128x128_co_c1x2 swizzle=8: 4096x14336x4096, 8192x8192x8192" in folded
        assert "full of clean lines" in folded
    record.model_copy(update={"flush": "dirty"}).save(path)
    text = re.sub(r"\x1b\[[0-9;]*m", "", skuda("--show", path)[1])
    assert "dirty lines" in " ".join(text.split())
    assert "geometric mean" not in text


def test_the_table_says_what_the_record_says(skuda, tmp_path, monkeypatch):
    record = some_record(
        absent={"gone": "gone is not installed; run: pip install gone"},
        ceilings=Ceilings(copy_bandwidth=4.28e12, bf16=7e14, notes=("fp8: no",)),
        host=(HostCost(name="plan.run", timing=Timing.of([4.5])), HostCost(name="other", refused="no nvcc")),
    )
    first, second = record.cases
    steps = ("entry_a grid 1x2 block 256", "entry_b grid 1 block 32")
    old = first.model_copy(update={"source_hash": "0" * 64, "steps": steps})
    gone = RivalResult(name="gone", computes="the same", refused="gone is not installed; run: pip install gone")
    bad = second.model_copy(update={"timing": None, "refused": "wrong result: output[0]", "rivals": (gone,)})
    path = tmp_path / "r.json"
    record.model_copy(update={"cases": (old, bad)}).save(path)
    for width in (80, 140):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
        status, out, err = skuda("--show", path)
        text = re.sub(r"\x1b\[[0-9;]*m", "", out)
        assert (status, err) == (1, "")
        assert re.search(r"6x128 +f32 +10\.0 +0\.0006 TB/s +6% +2\.00", text)
        assert ("x twice" in text) is (width == 140)
        assert re.search(r" x\n.* twice\n", text) or width == 140
        assert "x NAME: its time over ours" in text
        assert re.search(r"6x128 +f32 +refused", text)
        assert "quantize_per_token 6x128 f32: wrong result: output[0]" in text
        assert "stale: the kernel has changed since" in " ".join(text.split())
        assert text.count("stale") == 1
        assert "bad refuses 6x128 f32: ValueError: M must exceed 16" in text
        assert "gone is absent: gone is not installed" in text
        assert "gone refuses" not in text
        assert "twice: half of it" in text
        assert "runs entry_a, entry_b" in text
        assert "copy, read + write: 4.28 TB/s" in text
        assert "bf16 product: 700 TFLOP/s" in text
        assert "fp8: no" in text
        assert re.search(r"plan\.run +4\.50 +4\.50", text)
        assert "no nvcc" in text
        assert "…" not in text


def test_a_record_names_the_code_that_measured(skuda, tmp_path, monkeypatch):
    record, path = some_record(), tmp_path / "r.json"
    assert record.measurer_hash == measurer_hash()
    monkeypatch.setenv("FORCE_COLOR", "1")
    for changes, marked in (({}, False), ({"measurer_hash": "0" * 64}, True)):
        record.model_copy(update=changes).save(path)
        assert ("measured by other measuring code" in skuda("--show", path)[1]) is marked
    old = json.loads(path.read_text())
    del old["measurer_hash"]
    path.write_text(json.dumps(old))
    assert BenchRecord.load(path).measurer_hash == ""


EDITS = (
    ("clock.py", "* 1e3", "* 1e4", True),
    ("measurement.py", "_FEWEST = 3", "_FEWEST = 4", True),
    ("lab.py", "self._written.zero_()", "pass", True),
    ("lab.py", "# The answer is kept", "# An answer is kept", False),
    ("record.py", 'return "memory", memory', 'return "memory", None', False),
)
EDITED = """
from pathlib import Path
from skuda.tools.bench import record

before = record.measurer_hash()
for name, old, new, counts in {edits}:
    path = Path(record.__file__).with_name(name)
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new))
    record.measurer_hash.cache_clear()
    assert (record.measurer_hash() != before) is counts, old
    path.write_text(text)
"""


def test_what_the_hash_of_the_measuring_code_counts(tmp_path):
    """On a copy of the package."""
    (tmp_path / "skuda").mkdir()
    for path in (ROOT / ".typing" / "skuda").iterdir():
        if path.is_dir():
            shutil.copytree(path, tmp_path / "skuda" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, tmp_path / "skuda" / path.name)
    command = [sys.executable, "-c", EDITED.format(edits=EDITS)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True)


def test_a_command_line_can_be_typed_again():
    told = {"--shapes": ("1x2", "3x4"), "--element": (), "--seed": ("3",)}
    assert command_line(("linear",), told) == "skuda bench linear --shapes 1x2,3x4 --seed 3"
