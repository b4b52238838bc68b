"""`skuda tune`: what is timed and what is refused, what the command writes, shows and does not do, on real kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import distributions
import numpy as np
import pytest
from paths import HELPERS
from stub_driver.build import build
from toy import ToyDescriptor, toy_op, toy_sku

from skuda.dispatch import Backend, BackendStatus, Dispatcher, Tuning
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.compilers import find_nvrtc
from skuda.kernels.launch import Choice
from skuda.kernels.quantize import SmoothQuantLinearDescriptor
from skuda.kernels.sources import source_hash
from skuda.registry import BackendSpec, InvalidProblem, Registry, Unsupported
from skuda.registry.device import HOST
from skuda.tools.bench import lab
from skuda.tools.bench.lab import HostLab
from skuda.tools.bench.tune import Tuner, environment
from skuda.tools.cli import main
from skuda.tools.frame.run import silent
from skuda.tools.parse import cases as cases_module
from skuda.tools.verify.trial import answer

ANSI = re.compile(r"\x1b\[[0-9;]*m")

# --- what is measured ------------------------------------------------------------------------------------------------


class Odd(Backend):
    """Another CPU backend: y = x + x, in two configurations, one of which may be wrong or fail."""

    spec = BackendSpec(name="odd", processor="cpu")

    def __init__(self, trouble=None):
        self.trouble = trouble
        self.narrow = 0

    def status(self):
        return BackendStatus(available=True, detail="odd 1.0")

    def devices(self):
        return (HOST,)

    def choices(self, sku, problem, device):
        return (Choice("wide", 1.0), Choice("narrow", 2.0))

    def prepare(self, sku, problem, device, choice=""):
        trouble = self.trouble if choice == "narrow" else None
        if trouble == "fails":
            raise RuntimeError("no\x1b[2J room\nfor it")
        self.narrow += choice == "narrow"
        second = self.narrow == 2
        wrong, idle = trouble == "wrong" or (trouble == "second wrong" and second), trouble == "idle"
        idle = idle or (trouble == "second idle" and second)

        def kernel(problem, *, x, y):
            SPENT.append(COSTS[choice])
            if not idle:  # what the kernel before it wrote was right
                y[...] = x + x
            if wrong:
                y[1] = 7

        return HostRunner(problem, kernel)


SPENT = []
"""What kernels say that they cost, in microseconds."""

COSTS = {"wide": 30.0, "narrow": 10.0}


class MadeUpClock(HostLab):
    """A lab whose clock shows what kernels say; the reference says nothing and costs 20."""

    runs = ()

    def measure(self, replays):
        self.runs = []
        for replay in replays:
            SPENT.clear()
            replay()
            self.runs.append(sum(SPENT) or 20.0)
        return self.runs


ODD = toy_sku(backend="odd", variant="fast")


def tuner(trouble=None, **more):
    registry = Registry([Odd.spec, toy_op(ODD, toy_sku())])
    dispatcher = Dispatcher(registry, backends=[Odd(trouble), NumpyBackend()], tuning="")
    return Tuner(dispatcher, HOST, MadeUpClock(registry), seed=3, **more)


def test_every_kernel_is_timed_in_each_configuration_best_first():
    made = tuner(repeats=7)
    seen = []
    (entry,) = made.run([ToyDescriptor(m=5)], lambda *step: seen.append(step))
    assert [(c.sku, c.choice) for c in entry.candidates] == [(ODD.id, "wide"), (ODD.id, "narrow"), (toy_sku().id, "")]
    assert [c.timing.median for c in entry.candidates] == [30.0, 10.0, 20.0]
    assert {c.timing.rounds for c in entry.candidates} == {7}
    assert entry.candidates[0].source_hash == source_hash(ODD)
    assert entry.problem == ToyDescriptor(m=5).model_dump(mode="json")
    assert (entry.seed, entry.date[:2]) == (3, "20")
    # All in turn, so that a clock that drifts hits all alike.
    assert sorted(made.lab.runs[:3]) == sorted(made.lab.runs[3:6]) == [10.0, 20.0, 30.0]
    assert seen == [(0, 3, "compiling"), (0, 3, "tune"), (1, 3, "tune"), (2, 3, "tune")]


@pytest.mark.parametrize(
    ("costs", "rounds"), [((10.0, 21.0), [7, 7, 7]), ((10.0, 10.9), [28, 28, 7]), ((19.0, 20.5), [28] * 3)]
)
def test_those_near_the_fastest_are_timed_again_in_more_rounds(monkeypatch, costs, rounds):
    for choice, us in zip(("wide", "narrow"), costs, strict=True):
        monkeypatch.setitem(COSTS, choice, us)
    made = tuner(repeats=7)
    (entry,) = made.run([ToyDescriptor(m=5)], silent)
    assert [c.timing.rounds for c in entry.candidates] == rounds
    assert [c.timing.median for c in entry.candidates] == [*costs, 20.0]
    again = [us for us, count in zip((*costs, 20.0), rounds, strict=True) if count == 28]
    if again:  # what ran last: these alone, in turn
        assert sorted(made.lab.runs) == sorted(again * 28)
        assert set(made.lab.runs[: len(again)]) == set(again)


def test_the_first_rounds_do_not_count_if_there_are_more(monkeypatch):
    monkeypatch.setitem(COSTS, "wide", 10.2)
    made = tuner(repeats=3)
    slower = iter([0.0] * 3 + [0.0] * 9 + [5.0] * 1000)  # checks, first rounds, further rounds
    measure = made.lab.measure

    def warming(replays):
        return [us + next(slower) for us in measure(replays)]

    made.lab.measure = warming
    (entry,) = made.run([ToyDescriptor(m=5)], silent)
    assert [c.timing.best for c in entry.candidates] == [15.2, 15.0, 20.0]


def test_several_layers_are_timed_at_once():
    made = tuner(repeats=7, layers=3)
    (entry,) = made.run([ToyDescriptor(m=5)], silent)
    assert entry.layers == 3
    assert [c.timing.median for c in entry.candidates] == pytest.approx([30.0, 10.0, 20.0 / 3])
    assert sorted(made.lab.runs[:3]) == [20.0, 30.0, 90.0]
    assert tuner().run([ToyDescriptor(m=5)], silent)[0].layers == 1


def test_layers_share_an_input_and_have_weights_of_their_own(monkeypatch):
    asked, seen = [], []
    monkeypatch.setattr(
        lab, "reference_answer", lambda op, problem, inputs: asked.append(problem) or answer(op, problem, inputs)
    )
    made = tuner(layers=3)
    bound = Tuner._bound
    monkeypatch.setattr(Tuner, "_bound", lambda *given: seen.append(given[-1]) or bound(*given))
    problem = SmoothQuantLinearDescriptor(m=2, n=3, k=4, act_scale=0.1, output_element="f32")
    dispatcher = Dispatcher(tuning="")
    replace(made, dispatcher=dispatcher, lab=HostLab(dispatcher.registry)).run([problem], silent)
    layers = seen[:3]
    assert len({id(arrays["act_q"]) for arrays in layers}) == 1
    for name in ("weight_q", "weight_scale", "output"):
        assert len({id(arrays[name]) for arrays in layers}) == 3
    assert all((arrays["weight_q"] == layers[0]["weight_q"]).all() for arrays in layers)
    assert len(asked) == 1, "their values are equal, so one answer serves all"


def test_its_times_choose():
    made = tuner()
    tuning = Tuning(environment=environment(HOST), entries=made.run([ToyDescriptor(m=5)], silent))
    found = Dispatcher(made.dispatcher.registry, backends=[Odd(), NumpyBackend()], tuning=tuning)
    plan = found.select(ToyDescriptor(m=5))
    assert (plan.sku, plan.choice) == (ODD, "narrow")
    np.testing.assert_array_equal(plan.run(x=np.ones(5, np.float32)), np.full(5, 2))


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("wrong", r"wrong result: y\[1\]: got 7.0 .*1 of 5 elements differ"),
        ("idle", r"wrong result: y\[0\]: got nan .*5 of 5 elements differ"),
        ("fails", r"RuntimeError: no\?\[2J room"),
    ],
)
def test_what_is_wrong_or_fails_is_refused_and_never_timed(trouble, says):
    (entry,) = tuner(trouble).run([ToyDescriptor(m=5)], silent)
    wide, narrow, reference = entry.candidates
    assert narrow.timing is None
    assert re.match(says, narrow.refused)
    assert narrow.refused.isprintable()
    assert wide.timing.median == 30.0
    assert reference.timing.median == 20.0


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("wrong", r"wrong result: y\[1\]: got 7.0 .*1 of 5 elements differ"),
        ("second wrong", r"layer 1: wrong result: y\[1\]: got 7.0 .*1 of 5 elements differ"),
        ("second idle", r"layer 1: wrong result: y\[0\]: got nan .*5 of 5 elements differ"),
    ],
)
def test_every_layer_is_compared(trouble, says):
    (entry,) = tuner(trouble, layers=3).run([ToyDescriptor(m=5)], silent)
    assert re.match(says, entry.candidates[1].refused)
    assert [c.timing is None for c in entry.candidates] == [False, True, False]


def test_a_problem_that_nobody_serves_is_refused_before_anything_is_timed():
    made = tuner()
    with pytest.raises(Unsupported):
        made.run([ToyDescriptor(m=5), ToyDescriptor(element="f64")], silent)
    assert made.lab.runs == ()


def test_only_some_variants_where_they_are_asked_for():
    (entry,) = tuner(variants=frozenset({"fast"})).run([ToyDescriptor(m=5)], silent)
    assert [(c.sku, c.choice) for c in entry.candidates] == [(ODD.id, "wide"), (ODD.id, "narrow")]
    with pytest.raises(InvalidProblem, match=r"--variant must serve every problem, such as .*m=5.*had slow"):
        tuner(variants=frozenset({"slow"})).run([ToyDescriptor(m=5)], silent)


def test_only_one_backend_where_it_is_asked_for():
    (entry,) = tuner(backend="numpy").run([ToyDescriptor(m=5)], silent)
    assert [c.sku for c in entry.candidates] == [toy_sku().id]


# --- the command -----------------------------------------------------------------------------------------------------

PLUGIN = """
    import time
    from skuda.dispatch import Backend, BackendStatus
    from skuda.dispatch.backends.numpy import HostRunner
    from skuda.registry.device import HOST

    def slow(problem, *, x: Any, y: Any) -> None:
        time.sleep(0.005)
        y[...] = 2 * x

    def wrong(problem, *, x: Any, y: Any) -> None:
        y[...] = 3 * x

    class Odd(Backend):
        spec = BackendSpec(name="odd", processor="cpu")
        def status(self):
            return BackendStatus(available=True, detail="odd 1.0")
        def devices(self):
            return (HOST,)
        def prepare(self, sku, problem, device):  # as before there were configurations
            return HostRunner(problem, globals()[sku.entry_point])

    KERNELS = [Op(TwiceDescriptor, reference, (Case(TwiceDescriptor(n=3)),),
                  (sku("odd", "slow"), sku("odd", "wrong"), sku("numpy", "reference")), source="here")]
"""
SLOW, REFERENCE = (f"unary_elementwise.twice.f32.plain.cpu.{name}" for name in ("odd.slow", "numpy.reference"))
FILE = "tuning.json"
TWICE = ["tune", "twice", "--n", "5000", "--repeats", "5"]
KEPT = [*TWICE, "--output", FILE]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with a backend and two kernels for it: one slow, one wrong."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delenv("SKUDA_TUNING", raising=False)
    monkeypatch.setenv("SKUDA_PLUGINS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def make():
        points = {"backends": {"odd": "odd_package:Odd"}, "kernels": {"odd": "odd_package:KERNELS"}}
        distributions.install(tmp_path / "site", "odd_package", **points)
        (tmp_path / "site" / "odd_package.py").write_text(textwrap.dedent(distributions.TWICE + PLUGIN))

    yield make
    sys.modules.pop("odd_package", None)


@pytest.fixture
def skuda(capsys):
    def run(*arguments):
        return main(arguments), *capsys.readouterr()

    return run


def test_two_cpu_backends_from_the_shell_to_a_run(install, skuda, monkeypatch):
    install()
    status, out, err = skuda(*KEPT, "--seed", "4")
    assert status == 1, err
    assert "odd.wrong: wrong result: y[0]" in err
    assert f"written to {FILE}; SKUDA_TUNING={FILE} uses it, or Dispatcher(tuning='{FILE}')" in err
    assert list(Path().iterdir()) == [Path(FILE)]
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][2:]
    assert [row[0].removeprefix("| ") for row in rows][:2] == [
        " ".join(sku.split(".")[-3:]) for sku in (REFERENCE, SLOW)
    ]
    assert float(rows[1][1]) > 5000
    assert len(rows) == 2
    assert ": wrong result" in out
    # Nobody uses it who did not name it.
    problem = Dispatcher().describe("twice", n=5000)
    assert Dispatcher().select(problem).sku.id == SLOW
    monkeypatch.setenv("SKUDA_TUNING", FILE)
    dispatcher = Dispatcher()
    x = np.arange(5000, dtype=np.float32)
    np.testing.assert_array_equal(dispatcher.run(problem, x=x), 2 * x)
    assert dispatcher.select(problem).sku.id == REFERENCE
    assert f"chosen by {FILE}" in dispatcher.select(problem).measured
    assert Dispatcher().select(Dispatcher().describe("twice", n=5001)).sku.id == SLOW
    # Tuning again compares with the ranking, not with what was tuned before.
    skuda(*TWICE, "--output", "again.json")
    assert [c.sku for c in Tuning.load(Path("again.json")).entries[0].candidates][0::2] == [SLOW, REFERENCE]
    skuda(*TWICE, "--output", "odd.json", "--backend", "odd")
    assert {".odd." in c.sku for c in Tuning.load(Path("odd.json")).entries[0].candidates} == {True}


def test_without_a_file_the_times_are_printed_and_nothing_is_written(install, skuda):
    install()
    status, out, err = skuda(*TWICE)
    assert (status, out.count("\n| ")) == (1, 4), "heading, rule and two kernels"
    assert "nothing was written: --output FILE keeps the times in a file that SKUDA_TUNING can name" in err
    assert not list(Path().iterdir())
    status, out, err = skuda(*TWICE, "--update")
    assert (status, out) == (2, "")
    assert "--update must stand beside --output FILE" in err


def test_explain_says_what_was_measured(install, skuda, monkeypatch):
    install()
    skuda(*KEPT)
    asked = ["explain", "twice", "--n", "5000"]
    assert "tuning" not in skuda(*asked)[1]
    _, out, _ = skuda(*asked, "--tuning", FILE)
    assert f"\nchosen\n  {REFERENCE}\n" in out
    assert f"measured, by {FILE}\nchosen by time: " in out
    found = json.loads(skuda(*asked, "--tuning", FILE, "--json")[1])["verdict"]
    assert "faster than the" in found["reason"]
    assert {one["sku"] for one in found["times"]} == {REFERENCE, SLOW, SLOW.replace("slow", "wrong")}
    monkeypatch.setenv("SKUDA_TUNING", FILE)
    assert skuda(*asked)[1] == out
    found = json.loads(skuda(*asked, "--json")[1])["verdict"]
    assert found["chosen"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, page, _ = skuda(*asked)
    page = ANSI.sub("", page)
    assert f"measured, by {FILE}" in page
    assert re.search(r"\d us cpu odd slow", page)
    assert "refused when it was measured: wrong result" in re.sub(r"\s+", " ", page)
    assert max(map(len, page.splitlines())) <= 80


def test_a_terminal_shows_the_fastest_and_the_refused(install, skuda, monkeypatch):
    install()
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = skuda(*TWICE, "--output", "my times.json", "--margin", "2.5")
    page = ANSI.sub("", out)
    said = " ".join(ANSI.sub("", err).split())
    assert "SKUDA_TUNING='my times.json' uses it, or Dispatcher(tuning='my times.json')" in said
    assert "refused: " in said
    assert "margin: 2.5 %" in page
    assert re.search(r"numpy reference +\| \d+\.\d +\| \d+\.\d +\| \d+\.\d +\|\n", page)
    assert re.search(r"\n[^|\n]+: wrong result: y\[0\]", page)
    status, again, err = skuda("tune", "--show", "my times.json")
    assert (status, err, ANSI.sub("", again)) == (0, "", page)
    tuning = json.loads(skuda("tune", "--show", "my times.json", "--json")[1])
    assert tuning == json.loads(Path("my times.json").read_text())


def test_a_terminal_leaves_out_slow_candidates_and_says_so(skuda, monkeypatch, tmp_path):
    made = tuner()
    (entry,) = made.run([ToyDescriptor(m=5)], silent)
    many = tuple(entry.candidates[0].model_copy(update={"choice": f"tile {n}"}) for n in range(10))
    many = entry.model_copy(update={"candidates": many})
    Tuning(environment=environment(HOST), entries=(many,)).save(tmp_path / "t.json")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "2 more are slower" in ANSI.sub("", skuda("tune", "--show", str(tmp_path / "t.json"))[1])


def test_layers_are_in_the_file_and_on_the_page(install, skuda, monkeypatch):
    install()
    assert skuda(*KEPT, "--layers", "4")[0] == 1  # one kernel is wrong
    (entry,) = Tuning.load(Path(FILE)).entries
    assert entry.layers == 4
    assert skuda(*TWICE[:3], "6000", "--output", FILE, "--update")[0] == 1
    assert [entry.layers for entry in Tuning.load(Path(FILE)).entries] == [4, 1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    page = " ".join(ANSI.sub("", skuda("tune", "--show", FILE)[1]).split())
    assert page.count(", one of 4 launches in a graph") == 1
    for typed, says in (
        (("tune", "--show", FILE, "--layers", "2"), "--layers must be left out"),
        ((*TWICE, "--output", "x", "--layers", "0"), "--layers"),
    ):
        status, _, err = skuda(*typed)
        assert status == 2
        assert says in ANSI.sub("", err)


def test_a_file_of_absent_kernels_is_shown_safely(install, skuda, monkeypatch):
    install()
    skuda(*KEPT)
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    record = json.loads(Path(FILE).read_text())
    record["entries"][0]["problem"]["more"] = "\x1b[2J"
    Path("old.json").write_text(json.dumps(record))
    for name, colour in ((FILE, ""), ("old.json", ""), ("old.json", "1")):
        monkeypatch.setenv("FORCE_COLOR", colour)
        status, out, _ = skuda("tune", "--show", name)
        assert status == 0
        assert "5000" in out
        assert "\x1b[2J" not in out


def test_more_problems_are_taken_in_only_where_it_is_asked_for(install, skuda):
    install()
    skuda(*KEPT)
    before = Path(FILE).read_text()
    other = ["tune", "fake_quantize", "--shapes", "8x16,4x4", "--element", "f16", "--repeats", "3", "--output", FILE]
    status, out, err = skuda(*other)
    assert (status, out) == (2, "")
    assert f"--output must be a new file, or stand beside --update; had {FILE}" in err
    assert Path(FILE).read_text() == before
    assert skuda(*other, "--update")[0] == 0
    found = Tuning.load(Path(FILE))
    assert [entry.op for entry in found.entries] == ["twice", "fake_quantize", "fake_quantize"]
    assert json.loads(before)["entries"][0] == found.entries[0].model_dump(mode="json")
    text = Path(FILE).read_text()
    for old, new, name in (
        ('"driver": "', '"driver": "another ', "driver"),
        ('"numpy": "', '"numpy": "0', "the version of numpy"),
        ('"margin": 3.0', '"margin": 4.0', "margin"),
    ):
        Path(FILE).write_text(text.replace(old, new))
        status, _, err = skuda(*other, "--update", "--margin", "3")
        assert status == 2
        assert f"{name} must be that of the entries there are" in err
    assert skuda(*other, "--update")[0] == 0, "the file's own margin is kept"
    assert Tuning.load(Path(FILE)).margin == 4


def test_random_products_are_measured_in_the_variants_that_are_named(skuda, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cases_module, "random_products", lambda count, seed: ((3, 16, 32), (seed, 32, 16))[:count])
    typed = ("smoothquant_linear", "--random", "2", "--element", "bf16", "--repeats", "1", "--backend", "numpy")
    assert skuda("tune", *typed, "--seed", "5", "--variant", "reference", "--output", "x.json")[0] == 0
    tuning = Tuning.load(Path("x.json"))
    assert [[entry.problem[name] for name in "mnk"] for entry in tuning.entries] == [[3, 16, 32], [5, 32, 16]]
    assert {candidate.sku.rpartition(".")[2] for entry in tuning.entries for candidate in entry.candidates} == {
        "reference"
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "OPS must be named first"),
        (["--n", "3"], "OPS must be named first"),
        (["fake_quantise"], "OPS must be an op that can be measured"),
        (["thrice", "--n", "3"], "OPS must be a registered op"),
        (["fill", "dynamic_range", "--numel", "3"], "OPS must be one where its fields follow"),
        (["fill", "--numel", "3", "--shapes", "3x4"], "--shapes must be left out where an op's fields are given"),
        (["fill", "--numels", "3"], "perhaps --numel"),
        (["fake_quantize", "--shapes", "3"], "tune: --shapes must be ROWSxCOLUMNS"),
        (["fake_quantize", "--element", "s8"], "tune: --element must be one of"),
        (["fill", "--numel", "3", "--backend", "metal"], "--backend must be one of"),
        (["fill", "--numel", "3", "--margin", "-1"], "margin must be at least 0"),
        (["fill", "--numel", "3", "--output", "absent/x.json"], "--output must be a file in a folder that exists"),
        (["fill", "--show", "x.json"], "OPS must be left out: --show measures nothing"),
        (["fill", "--numel", "3", "--random", "3"], "--random must be left out where an op's fields are given"),
        (["fake_quantize", "--random", "3"], "tune: --random must stand beside a product"),
        (["linear", "--variant", "wrapgroup"], "--variant must be one of"),
        (["--random", "3", "--show", "x.json"], "--random must be left out: --show measures nothing"),
        (["--show", "x.json"], "the file must be a file that `skuda tune` wrote"),
    ],
)
def test_bad_input_is_reported_in_one_line_and_nothing_is_written(skuda, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    status, out, err = skuda("tune", *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1 + err.count("skuda: assumed ")
    assert not list(Path().iterdir())


def test_where_nobody_serves_the_problem_the_answer_is_no(skuda, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = skuda("tune", "fill", "--numel", "3", "--backend", "pycuda")
    assert status == 1
    assert "no kernel for fill" in err
    assert not list(Path().iterdir())


# --- a driver that is real enough ------------------------------------------------------------------------------------

RULE = """
from skuda.kernels.launch import Choice
from toykernels.scaled import scaled

CHOICES = (Choice("256 threads", 1.0), Choice("64 threads", 2.0))

def rule(problem, device, choice=""):
    launch = scaled(problem, device)
    name = choice or CHOICES[0].name
    (step,) = launch.steps
    threads = int(name.split()[0])
    return launch._replace(steps=(step._replace(block=(threads, 1, 1)),), flags=(f"-DTHREADS={threads}",),
                           choices=CHOICES, choice=name)
"""
PROCESS = """
import sys
from pathlib import Path
from fakes import FakeArray
from toykernels import scaled as toy
from skuda.dispatch import Dispatcher, Tuning
from skuda.kernels.sources import source_hash
from skuda.dispatch.select.tuning import Timing
from skuda.dispatch.select.tuning import Candidate, TuningEntry
from skuda.registry import Op, Case, Registry
from skuda.tools.bench.tune import environment

problem = toy.ScaledDescriptor(numel=32)
sku = toy.sku("scaled", "cuda_core", launch="tiled_rule:rule")
registry = Registry([Op(toy.ScaledDescriptor, toy.reference, (Case(problem),), (sku,), source="here")])
d = Dispatcher(registry, tuning="")
def measured(choice, us):
    timing = Timing(median=us, p10=us, p90=us, best=us, rounds=9)
    return Candidate(sku=sku.id, choice=choice, source_hash=source_hash(sku), timing=timing)
candidates = (measured("256 threads", 9.0), measured("64 threads", 5.0))
entry = TuningEntry(problem=problem.model_dump(mode="json"), date="now", seed=1, candidates=candidates)
Tuning(environment=environment(d.devices[0]), entries=(entry,)).save(Path("pinned.json"))
arrays = {"x": FakeArray((32,), address=0x1000000000010000), "y": FakeArray((32,), address=0x1000000000020000)}
for tuning in ("", "pinned.json"):
    plan = Dispatcher(registry, tuning=tuning).select(problem)
    plan.run(scale=0.5, **arrays)
    print(plan.choice, plan.notes[:2], sep="|")
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stub driver with")
@pytest.mark.skipif(find_nvrtc() is None, reason="no NVRTC wheels")
@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings are not installed")
def test_the_configuration_reaches_the_compiler_and_the_driver(tmp_path):
    (tmp_path / "stub").mkdir()
    stub = build(tmp_path / "stub").parent
    (tmp_path / "tiled_rule.py").write_text(RULE)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SKUDA_", "CUDA_"))}
    ran = subprocess.run(
        [sys.executable, "-c", PROCESS],
        env=clean
        | {
            "LD_LIBRARY_PATH": str(stub),
            "SKUDA_CACHE_DIR": str(tmp_path / "cache"),
            "SKUDA_STUB_LOG": str(tmp_path / "log"),
            "SKUDA_PLUGINS": "0",
            "PYTHONPATH": os.pathsep.join((str(HELPERS), str(tmp_path))),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    first, second = (line.split("|") for line in ran.stdout.splitlines())
    assert first[0] == ""
    assert "configuration 256 threads" in first[1]
    assert second[0] == "64 threads"
    assert "chosen by pinned.json: 5.0 us measured, 44.4 % faster" in second[1]
    assert "configuration 64 threads" in second[1]
    blocks = [line.split()[5] for line in (tmp_path / "log").read_text().splitlines() if " cuLaunchKernel" in line]
    assert blocks == ["256,1,1", "64,1,1"]
    cubins = CubinCache(tmp_path / "cache").survey()
    assert sorted(entry.facts.flags[-1] for entry in cubins) == ["-DTHREADS=256", "-DTHREADS=64"]
