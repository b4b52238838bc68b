"""`skuda bench` without a GPU: what is measured and counted, what is refused, and the command.

Kernels run on the CPU in a lab of NumPy arrays, whose clock is made up.
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from measured import REGISTRY
from stub_cutlass import build, needs_cc
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.select.tuning import Timing
from skuda.kernels.quantize import QuantizePerTensorDescriptor
from skuda.kernels.quantize import fake_quantize as definition
from skuda.registry import BackendSpec, InvalidProblem, OpCategory, Registry
from skuda.registry.device import HOST, device_named
from skuda.registry.errors import MissingDependency
from skuda.tools.bench import bench as bench_module
from skuda.tools.bench import lab
from skuda.tools.bench import rivals as bench_rivals
from skuda.tools.bench.bench import KernelBench
from skuda.tools.bench.lab import Ceiling, HostLab, TorchLab
from skuda.tools.bench.record import BenchRecord, least_work
from skuda.tools.bench.rival import Alternatives, Check, Rival
from skuda.tools.bench.rivals import absence, rivals_of
from skuda.tools.bench.timing import error_line, rounds_each, schedule
from skuda.tools.cli import main
from skuda.tools.frame.run import silent
from skuda.tools.parse import cases as cases_module
from skuda.tools.parse.cases import groups, problem_of, select_cases
from skuda.tools.verify.trial import answer

OPS = REGISTRY.ops
US = 10.0
"""What our kernels take on the made-up clock, in microseconds."""
FAKE = select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32"])


# --- what is measured ------------------------------------------------------------------------------------------------


def test_groups_are_the_whole_family():
    known = groups(REGISTRY)
    assert known["linear"] == ("quantized_linear", "scaled_linear", "smoothquant_linear")
    measured = {OpCategory.QUANTIZATION, OpCategory.ATTENTION, OpCategory.REDUCTION}
    measured |= {OpCategory.SOFTMAX, OpCategory.RANDOM}
    assert set(known["all"]) == {name for name, op in OPS.items() if op.category in measured}
    assert known["cache"] == ("attention", "rope_quantize_append")
    assert known["logits"] == ("argmax", "log_softmax_at", "sample")
    assert not set(known["quantize"]) & set(known["linear"])


def test_defaults_cover_every_op_in_its_elements():
    cases = select_cases(REGISTRY)
    assert {case.op for case in cases} == set(groups(REGISTRY)["all"])
    assert len({case.label for case in cases}) == len(cases)
    assert {case.element.value for case in cases if case.op == "fake_quantize"} == {"bf16", "f32", "f64"}


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


def test_samples_are_of_all_tokens_and_of_a_few():
    cases = select_cases(REGISTRY, ["sample"], [(2, 5), (3, 5)], ["f16"])
    few = "sample, top-k and top-p"
    assert [case.label for case in cases] == ["sample 2x5 f16", "sample 3x5 f16", f"{few} 2x5 f16", f"{few} 3x5 f16"]
    assert [(case.problem.has_top_k, case.problem.has_top_p) for case in cases] == 2 * [(False, False)] + 2 * [
        (True, True)
    ]


@pytest.mark.parametrize("shape", [(1, 1, 100, 32), (1, 200, 128, 32)])
def test_keys_that_do_not_fill_pages_or_lack_new_tokens_are_refused(shape):
    with pytest.raises(InvalidProblem, match="keys must be a multiple of 128, and at least the new tokens"):
        select_cases(REGISTRY, ["attention"], [shape])


# --- the work --------------------------------------------------------------------------------------------------------


ROWS = 128 * 32 * (32 + 4 + 4 * 32) + 256 * 8 * (2 * 32 + 8) + 4 * (2 + 1 + 2)


@pytest.mark.parametrize(
    ("op", "shape", "element", "work"),
    [
        ("fake_quantize", (16, 256), "bf16", (8192 + 8192, 0)),
        ("rms_norm_quantize", (16, 256), "bf16", (2 * 8192 + 512 + 4096 + 16 * 4 + 8192, 0)),
        ("smoothquant_linear", (3, 5, 7), "bf16", (21 + 35 + 20 + 30, 210)),
        ("quantized_linear", (3, 5, 7), "f16", (42 + 35 + 20 + 30, 210)),
        ("scaled_linear", (3, 5, 7), "bf16", (21 + 35 + 20 + 12 + 30, 210)),
        ("scaled_linear", (3, 5, 7), "s32", (21 + 35 + 60, 210)),
        # q and the output; keys and values with their scales; tables. A new token sees all keys.
        ("attention", (3, 1, 256, 64), "bf16", (96 * (64 + 4 + 128) + 768 * 8 * (2 * 64 + 8) + 52, 4 * 64 * 96 * 256)),
        ("attention", (1, 128, 256, 32), "f32", (ROWS, 4 * 32 * 32 * (128 * 256 - 128 * 127 // 2))),
        # Logits, which are most of it; tokens, log-probabilities and entropies.
        ("log_softmax_at", (3, 1000), "f32", (12000 + 24 + 12 + 12, 0)),
        ("argmax", (3, 1000), "bf16", (6000 + 24, 0)),
        ("sample", (3, 1000), "f16", (6000 + 12 + 3 * 24 + 24, 0)),
        # q, k and v; cosines; slots; codes and scales of q; tables.
        ("rope_quantize_append", (2, 3, 128, 32), "f16", (6 * 48 * 64 + 3 * 128 + 6 * (8 * 72 + 32 * 36) + 28, 0)),
    ],
)
def test_work_is_what_the_descriptor_says(op, shape, element, work):
    assert least_work(problem_of(OPS[op].descriptor, shape, element)) == work


def test_work_of_packed_codes_and_empty_problems():
    fields = {"q_min": -8, "q_max": 7, "input_element": "f32", "output_element": "s4"}
    assert least_work(QuantizePerTensorDescriptor(numel=7, **fields)) == (32, 0)
    assert least_work(QuantizePerTensorDescriptor(numel=0, **fields)) == (0, 0)


# --- statistics ------------------------------------------------------------------------------------------------------


def test_timing_sums_samples_up():
    samples = [float(n) for n in range(1, 102)]
    fresh("timing").shuffle(samples)
    assert Timing.of(samples) == Timing(median=51, p10=11, p90=91, best=1, rounds=101)
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


# --- measuring -------------------------------------------------------------------------------------------------------


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
    dispatcher = dispatcher or Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    return KernelBench(dispatcher, HOST, PaperLab(), rivals=lambda problem: tuple(rivals), **{"seed": 5, **more})


def test_every_op_is_measured_and_compared_on_the_cpu():
    cases = select_cases(REGISTRY, ["quantize", "logits"], [(6, 128)])
    fields = bench_of().run(dict.fromkeys(cases, False), silent)
    assert {case.op for case in fields["cases"]} == {*groups(REGISTRY)["quantize"], *groups(REGISTRY)["logits"]}
    for case in fields["cases"]:
        assert case.refused == ""
        assert case.sku.endswith(".cpu.numpy.reference")
        assert len(case.source_hash) == 16
        assert case.timing == Timing(median=US, p10=US, p90=US, best=US, rounds=20)
        assert not case.drawn
    ceilings = fields["ceilings"]
    assert (ceilings.copy_bandwidth, ceilings.bf16, ceilings.fp8) == (1e10, 5e11, None), "the best of each name"
    assert ceilings.notes == ("fp8: RuntimeError: no fp8 here",)
    (drawn,) = bench_of().run(dict.fromkeys(FAKE, True), silent)["cases"]
    assert drawn.drawn


def test_rivals_run_in_turn_in_the_same_rounds():
    bench = bench_of(rivals=(Rival("twice", "the same", taking(20.0)), Rival("half", "less", taking(5.0))), repeats=4)
    result = bench.measure(FAKE[0])
    assert result.ratios == {"twice": 2.0, "half": 0.5}
    assert bench.lab.measured[-1] == [US, 20.0, 5.0, 20.0, 5.0, US, 5.0, US, 20.0, US, 20.0, 5.0]
    assert bench.lab.tidied == 1


def test_a_rival_that_refuses_or_is_absent_is_named(monkeypatch):
    looked = []
    monkeypatch.setattr(bench_rivals, "find_spec", looked.append)
    gone = Rival("gone", "the same", taking(1.0), "nowhere")
    bench = bench_of(rivals=(gone, Rival("bad", "the same", refusing), Rival("ok", "the same", taking(30.0))))
    cases = select_cases(REGISTRY, ["fake_quantize"], [(2, 8), (4, 8)], ["f32"])
    fields = bench.run(dict.fromkeys(cases, False), silent)
    assert fields["absent"] == {"gone": "nowhere is not installed; run: pip install nowhere"}
    assert looked == ["nowhere"], "looked for once a run"
    for case in fields["cases"]:
        found = {rival.name: rival for rival in case.rivals}
        assert found["gone"].refused == fields["absent"]["gone"]
        assert found["bad"].refused == "ValueError: M must exceed 16"
        assert found["bad"].timing is found["gone"].timing is None
        assert case.ratios == {"ok": 3.0}


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
        return Alternatives({name: one(us) for name, us in times.items()}, (Check(problem, inputs, written),))

    return Rival("many", "the fastest of its alternatives", make)


def test_the_fastest_of_several_alternatives_is_the_rival():
    bench = bench_of(rivals=(alternatives(slow=40.0, near=25.0, none=None, fast=20.0),), repeats=4)
    case = bench.measure(FAKE[0])
    (rival,) = case.rivals
    assert (rival.chosen, case.ratios, rival.timing.rounds, rival.refused) == ("fast", {"many": 2.0}, 4, "")
    warm, first = [[40.0], [25.0], [20.0]], [40.0, 25.0, 20.0]
    quick = [25.0, 20.0, 20.0, 25.0, 25.0, 20.0, 20.0, 25.0, 25.0, 20.0]
    at = bench.lab.measured.index(quick)
    assert bench.lab.measured[at - 4 : at] == [*warm, first], "each runs once before, and once to drop the slow"
    assert bench.lab.measured[at + 1] == [20.0], "compared"


@pytest.mark.parametrize(
    ("rival", "says"),
    [
        (alternatives(one=None, other=None), "ValueError: not this shape"),
        (alternatives(), "there is no alternative"),
        (alternatives(outputs="never written", slow=9.0, fast=2.0), r"fast: wrong result: output\[0\]: got nan"),
    ],
)
def test_alternatives_that_fail_or_are_wrong_are_not_timed(rival, says):
    case = bench_of(rivals=(rival, Rival("ok", "the same", taking(30.0)))).measure(FAKE[0])
    bad, _ = case.rivals
    assert re.search(says, bad.refused)
    assert (bad.timing, bad.chosen) == (None, "")
    assert case.ratios == {"ok": 3.0}


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
    case = bench.measure(select_cases(REGISTRY, ["fake_quantize"], [(8, 8)], ["f32"])[0])
    assert re.search(says, case.refused)
    assert case.sku.endswith(f"toycpu.{entry}")
    assert (case.timing, case.rivals) == (None, ())
    assert len(bench.lab.measured) == entry.startswith(("wrong", "unwritten")), "one replay, to compare"


def test_a_problem_without_a_kernel_is_refused_and_the_rest_goes_on():
    cases = select_cases(REGISTRY, ["fake_quantize"], [(2, 8)], ["f32", "bf16"])
    found = bench_of(backend="pycuda").run(dict.fromkeys(cases, False), silent)["cases"]
    assert [case.refused.startswith("no kernel for fake_quantize") for case in found] == [True, True]
    assert {case.sku for case in found} == {""}


def test_a_lost_device_does_not_cost_the_record():
    bench = bench_of()

    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    bench.lab.mismatch = bench.lab.tidy = lost
    (case,) = bench.run(dict.fromkeys(FAKE, False), silent)["cases"]
    assert case.refused == "RuntimeError: an illegal memory access was encountered"


@pytest.mark.parametrize("ulps", [0, 1])
def test_a_kernel_may_be_as_far_off_as_it_promises(ulps):
    own = next(iter(OPS["fake_quantize"].skus)).precision_guarantee
    dispatcher = dispatcher_with("one_ulp_off", precision_guarantee=own.model_copy(update={"max_ulp": ulps}))
    case = bench_of(dispatcher).measure(select_cases(REGISTRY, ["fake_quantize"], [(8, 8)], ["f32"])[0])
    assert case.refused.startswith("wrong result: output[3]") is (ulps == 0)


# --- rivals ----------------------------------------------------------------------------------------------------------


def test_every_problem_has_rivals_that_say_what_they_compute():
    for case in select_cases(REGISTRY):
        rivals = rivals_of(case.problem)
        names = [rival.name for rival in rivals]
        assert len(set(names)) == len(names)
        assert all(rival.computes for rival in rivals)
        assert ("fp8" in names) is case.op.endswith("linear")
        assert ("torchao" in names) is (case.op == "quantized_linear")
        assert ("flash" in names) is (case.op == "attention")
    layer = {
        rival.name: rival for rival in rivals_of(problem_of(OPS["quantized_linear"].descriptor, (1, 2, 3), "bf16"))
    }
    assert set(layer) == {"cutlass", "vllm", "bf16", "bf16 compiled", "fp8", "torchao"}
    assert [name for name, rival in layer.items() if "quantized before" in rival.computes] == ["cutlass"]


def test_absence_says_why(tmp_path, monkeypatch):
    (tmp_path / "brokenrival.py").write_text("raise OSError('libcudart.so.99 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert absence(Rival("a", "b", taking(1.0))) == ""
    assert absence(Rival("a", "b", taking(1.0), "json.decoder")) == ""
    assert absence(Rival("a", "b", taking(1.0), "nosuchrival")).endswith("run: pip install nosuchrival")
    said_so = absence(Rival("a", "b", taking(1.0), "brokenrival"))
    assert said_so == "brokenrival cannot be imported: OSError: libcudart.so.99 is missing"
    assert error_line(ValueError("")) == "ValueError: no reason given"
    assert len(error_line(ValueError("x" * 999))) == 240


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def skuda(capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    def run(*arguments):
        status = main(["bench", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(bench_module, "Dispatcher", lambda: Dispatcher(REGISTRY, backends=(NumpyBackend(),)))


@pytest.fixture
def on_paper(monkeypatch):
    """A CUDA device that torch would see, whose problems the CPU solves; returns the functions that name rivals."""
    card = HOST.model_copy(update={"name": "a card", "processor": "cuda"})
    dispatcher = Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    monkeypatch.setattr(bench_module, "Dispatcher", lambda: dispatcher)
    monkeypatch.setattr(Dispatcher, "devices", (card, HOST))
    monkeypatch.setattr(bench_module, "TorchLab", lambda device: PaperLab())

    def bench(dispatcher, device, lab, seed, repeats, backend, *, rivals):
        asked.append(rivals)
        return KernelBench(dispatcher, HOST, lab, seed, repeats, backend, rivals=lambda problem: ())

    asked = []
    monkeypatch.setattr(bench_module, "KernelBench", bench)
    return asked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fake_quantise"], "OPS must be an op"),
        (["linear", "--shapes", "4x4"], "MxNxK"),
        (["--shapes", "four"], "ROWSxCOLUMNS"),
        (["dynamic_range", "--shapes", "3x4x5"], "--shapes must be ROWSxCOLUMNS for dynamic_range; had 3x4x5"),
        (["quantize_per_group", "--shapes", "3x4"], "axis_size must be a multiple of group_size = 128"),
        (["--element", "s8"], "--element must be one of"),
        (["--backend", "opencl"], "--backend must be one of pycuda, cuda_core, numpy"),
        (["--repeats", "0"], "repeats"),
        (["--seed", "-1"], "seed"),
        (["--show", "nowhere.json"], "nowhere.json"),
        (["linear", "--show", "nowhere.json"], "OPS must be left out: --show measures nothing"),
        (["--m", "4", "--show", "nowhere.json"], "--m must be left out"),
        (["linear", "--shapes", "llama"], "a file of those, or a model: llama-3-8b, llama-3-70b, minilm; had 'llama'"),
        (["--shapes", "minilm", "--m", "0"], "--m must be whole numbers above 0"),
        (["--m", "4"], "--m must stand beside --shapes with a model"),
        (["--output", "x", "--show", "nowhere.json"], "--output must be left out"),
        (["--cutlass", "x", "--show", "nowhere.json"], "--cutlass must be left out"),
        (
            ["linear", "--cutlass", "nowhere"],
            "--cutlass must be a folder of what this builds, alone: bash ",
        ),
        (["quantize", "--random", "3"], "--random must stand beside a product, such as linear; had amax, "),
        (["linear", "--random", "0"], "random"),
        (["linear", "--rivals", "cuttlass"], "--rivals must be one of cutlass, vllm, bf16"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(skuda, no_cuda, arguments, says):
    status, out, err = skuda(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_without_a_device_or_torch_it_says_what_to_do(skuda, no_cuda, monkeypatch):
    status, out, err = skuda("linear")
    assert (status, out) == (1, "")
    assert "needs a CUDA device" in err
    assert "skuda doctor" in err
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"torch, .* run: pip install torch"):
        TorchLab(device_named("h200"))


def test_a_run_is_recorded_and_shown_again(skuda, on_paper, tmp_path):
    path = tmp_path / "out.json"
    typed = ("fake_quantize", "--shapes", "4x8,2x8", "--element", "f32", "--seed", "7", "--output", path)
    status, out, err = skuda(*typed)
    assert (status, err) == (0, "")
    record = BenchRecord.load(path)
    assert record.command == "skuda bench fake_quantize --shapes 4x8,2x8 --element f32 --seed 7"
    assert [case.shape for case in record.cases] == [(4, 8), (2, 8)]
    assert (record.seed, record.repeats, record.flush, record.outdated) == (7, 20, "clean", "")
    sku = "quantization.fake_quantize.f32.plain.cpu.numpy.reference"
    assert {case.sku for case in record.cases} == {sku}
    rows = [line.split(" | ")[:3] for line in out.splitlines() if "x8 | f32" in line]
    assert rows == [[f"| {shape}", "f32", "10.0"] for shape in ("4x8", "2x8")]
    assert skuda("--show", path) == (0, out, "")
    assert skuda("--show", path, "--json") == (0, path.read_text(), "")
    wrong = record.cases[0].model_copy(update={"refused": "wrong result: x", "timing": None})
    record.model_copy(update={"cases": (wrong,)}).save(path)
    assert skuda("--show", path)[0] == 1


def test_one_record_has_products_other_ops_and_random_shapes(skuda, on_paper, tmp_path, monkeypatch):
    path, few = tmp_path / "out.json", ((5, 48, 528), (7, 528, 48))
    monkeypatch.setattr(cases_module, "random_products", lambda count, seed: few if (count, seed) == (2, 7) else ())
    typed = ("smoothquant_linear", "amax", "--shapes", "3x16x16,4x8", "--random", "2", "--element", "bf16")
    assert skuda(*typed, "--seed", "7", "--repeats", "1", "--output", path)[0] == 0
    record = BenchRecord.load(path)
    assert {(case.op, case.shape, case.drawn) for case in record.cases} == {
        ("smoothquant_linear", (3, 16, 16), False),
        ("amax", (4, 8), False),
        *(("smoothquant_linear", shape, True) for shape in few),
    }
    assert "smoothquant_linear amax --shapes 3x16x16,4x8" in record.command
    assert "--random 2" in record.command
    problems = {case.drawn: problem_of(OPS[case.op].descriptor, case.shape, "bf16") for case in record.cases[-2:]}
    product = problem_of(OPS["smoothquant_linear"].descriptor, (3, 16, 16), "bf16")
    assert [rival.name for rival in on_paper[-1](problems[True])] == ["cutlass", "vllm", "bf16"]
    assert [rival.name for rival in on_paper[-1](product)] == ["cutlass", "vllm", "bf16", "fp8"]
    assert skuda(*typed, "--seed", "7", "--repeats", "1", "--rivals", "fp8,bf16")[0] == 0
    for problem in (problems[True], product):
        assert [rival.name for rival in on_paper[-1](problem)] == ["bf16", "fp8"], "in their usual order"


@needs_cc
def test_cutlass_is_found_in_its_folder_for_its_card_only(skuda, on_paper, tmp_path, monkeypatch):
    folder = build(tmp_path / "built here", "t64x64x256")
    path = tmp_path / "out.json"
    typed = ("linear", "--shapes", "2x8x16", "--seed", "7", "--repeats", "2", "--cutlass", folder, "--output", path)
    product = problem_of(OPS["smoothquant_linear"].descriptor, (2, 8, 16), "bf16")
    assert skuda(*typed)[0] == 0
    again = BenchRecord.load(path).command
    assert again == f"skuda bench linear --shapes 2x8x16 --seed 7 --repeats 2 --cutlass '{folder}'"
    rival = on_paper[-1](product)[0]
    assert absence(rival) == "its objects run on compute capability 9.0 only, and the device's is unknown"
    card = Dispatcher.devices[0].model_copy(update={"compute_capability": (9, 0)})
    monkeypatch.setattr(Dispatcher, "devices", (card,))
    assert skuda(*typed)[0] == 0
    rival = on_paper[-1](product)[0]
    assert (rival.name, absence(rival)) == ("cutlass", "")
    assert "the fastest of 1 configuration for this shape" in rival.computes
    assert skuda(*typed[:-4])[0] == 0
    assert "no folder of built objects is named" in absence(on_paper[-1](product)[0])
