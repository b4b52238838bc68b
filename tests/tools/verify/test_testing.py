"""The conformance suite: items, skips and failures as pytest shows them, packages, backends, streams and constraints.

Faults of kernels and runners are in ``tests/tools/verify/test_kit_faults.py``.
"""

from __future__ import annotations

import re
import textwrap
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import distributions
import pytest
from halved import OP, HalvedDescriptor, ToyBackend, toy
from interrupts import elsewhere
from paths import ROOT
from toykernels import scaled

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.compile import compilers as compiling
from skuda.dispatch.compile.cache import CubinCache
from skuda.registry import BackendSpec, Between, Case, InvalidProblem, MultipleOf, Registry, Unsupported
from skuda.registry.device import HOST, device_named
from skuda.registry.source import resolve
from skuda.tools.testing import Conformance
from skuda.tools.verify import checks
from skuda.tools.verify.compare import Broken, NotRun
from skuda.tools.verify.misuse import misuses
from skuda.tools.verify.placement import HostPlacement, Placement
from skuda.tools.verify.trial import Examples, Trial

pytest_plugins = ["pytester"]


def trial_of(sku: Any, backend: Any = None, placement: Placement | None = None, more: tuple[Case, ...] = ()) -> Trial:
    backend = backend or ToyBackend()
    registry = Registry([OP], origin="elsewhere 1.0").register(backend.spec, sku, origin="toys 1.0")
    dispatcher = Dispatcher(registry, backends=[backend, NumpyBackend()])
    device = checks.device_for(dispatcher, sku, dispatcher.devices)
    return Trial(sku, dispatcher, device, placement or HostPlacement(), Examples(OP, 7), more)


def failing(trial: Trial, *names: str) -> dict[str, str]:
    """Return the checks that fail, with what they say."""
    for name in names or checks.CHECKS:
        checks.perform(trial, name)
    return {name: "\n".join(failure.lines()) for name, failure in trial.failures.items()}


def test_each_kind_of_wrong_argument_is_tried():
    trial = trial_of(toy("reference"))
    example = trial.telling
    what = [misuse.what for misuse in misuses(example.case.problem, example.drawn, HostPlacement())]
    n, d = example.case.problem.n, example.case.problem.d
    assert {"an unknown argument", "a stream on a CPU", "no x", "x with a mask", "x of float16"} <= set(what)
    assert {f"x shorter: shape ({n}, {d - 1}), not ({n}, {d})", f"y longer: shape ({n}, {d + 1}), not ({n}, {d})"} <= {
        *what
    }
    assert {f"y of another rank: shape (1, {n}, {d}), not ({n}, {d})", "y whose rows are one", "y over x"} <= set(what)
    assert {"y that is read-only", "y with a mask", "x that is no array"} <= set(what)
    assert len(what) == len(set(what))


# --- constraints and records -----------------------------------------------------------------------------------------


def test_a_constraint_that_is_not_enough_is_found_at_its_edge():
    narrow = toy("raises_beyond_five", constraints=(Between(field="n", maximum=6),))
    assert "ZeroDivisionError" in failing(trial_of(narrow), "meaning")["meaning"]
    fits = toy("raises_beyond_five", constraints=(Between(field="n", maximum=5), MultipleOf(field="d", divisor=2)))
    assert failing(trial_of(fits)) == {}


def test_a_problem_that_a_constraint_refuses_and_a_backend_plans_is_found(monkeypatch):
    trial = trial_of(toy("reference", constraints=(Between(field="n", maximum=5),)))
    monkeypatch.setattr(trial, "plan", lambda problem: None)
    assert "was planned, and its constraints refuse it" in failing(trial, "constraints")["constraints"]


def test_a_kernel_that_refuses_what_its_constraints_accept_fails():
    class Refusing(ToyBackend):
        def prepare(self, sku: Any, problem: Any, device: Any, choice: str = "") -> Any:
            if problem.d == 8:
                raise Unsupported(Dispatcher(Registry([OP])).explain(problem))
            return super().prepare(sku, problem, device)

    said = failing(trial_of(toy("reference"), Refusing()), "meaning")["meaning"]
    assert "its constraints accept this problem; some cases are refused" in said


def test_a_kernel_without_a_case_fails_unless_one_is_brought():
    sku = toy("reference", element="f64")
    assert "give the suite `cases` that fit" in failing(trial_of(sku), "record")["record"]
    more = (Case(HalvedDescriptor(n=20, d=33, element="f64")),)
    assert failing(trial_of(sku, more=more)) == {}


def test_a_record_without_a_summary_fails():
    assert failing(trial_of(toy("reference", summary="")), "record").keys() == {"record"}


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no nvrtc")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"flags": ("-Dfloat=nonsense",)}, "for sm_80: "),
        ({"launch": f"{__name__}:one_too_few"}, "parameters"),
        ({"launch": f"{__name__}:no_launch"}, "its launch rule fails: no such card"),
    ],
)
def test_wrong_source_or_parameters_fail_without_a_gpu(tmp_path, changes, words):
    sku = scaled.sku("scaled", "cuda_core", summary="a toy", **changes)
    op = replace(scaled.ops()[0], skus=(sku,))
    registry = Registry([*scaled.ops()[1:], op], origin="toys 1.0")
    dispatcher = Dispatcher(registry, backends=[CudaCoreBackend(CubinCache(tmp_path))])
    found = failing(Trial(sku, dispatcher, HOST, HostPlacement(), Examples(op, 7)), "compiles")
    assert set(found) == ({"compiles"} if words else set())
    assert words in found.get("compiles", "")


def test_an_interrupt_while_threads_start_ends_those_that_wait(monkeypatch):
    first, barrier = iter([ThreadPoolExecutor.submit]), threading.Barrier

    def submit(*given):
        for begin in first:
            return begin(*given)
        raise KeyboardInterrupt

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            checks.check_threads(trial_of(toy("reference")))

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(threading, "Barrier", lambda parties: barrier(parties, timeout=20))
    elsewhere(interrupted, 10)


def one_too_few(problem, device):
    launch = scaled.scaled(problem, device)
    step, *_ = launch.steps
    return launch._replace(steps=(step._replace(parameters=step.parameters[:-1]),))


def no_launch(problem, device):
    raise ValueError("no such card")


# --- backends and packages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "answer", "words"),
    [
        ("status", BackendStatus(available=True, detail=""), "must give a detail"),
        ("status", BackendStatus(available=False, detail="no luck"), "where it does not work, a remedy"),
        ("status", BackendStatus(available=False, detail="no", remedy="try again"), "available=False, and devices"),
        ("status", "fine", "must return a BackendStatus"),
        ("status", OSError("no driver"), r"status\(\) must not raise; raised OSError: no driver"),
        ("devices", (), r"available=True, and devices\(\) returns \(\)"),
        ("devices", (device_named("cpu"),), "cpu Devices with an ordinal"),
        ("devices", (HOST.model_copy(update={"processor": "cuda"}),), "cpu Devices"),
    ],
)
def test_a_backend_that_is_not_honest_about_itself_fails(method, answer, words):
    dispatcher, backend = trial_of(toy("reference")).dispatcher, ToyBackend()
    checks.check_status(backend, dispatcher)

    def status():
        if isinstance(answer, Exception):
            raise answer
        return answer

    setattr(backend, method, status)
    with pytest.raises(Broken, match=words):
        checks.check_status(backend, dispatcher)


def test_a_backend_that_is_not_registered_fails():
    with pytest.raises(Broken, match="its BackendSpec is not registered"):
        checks.check_status(ToyBackend(), Dispatcher(Registry([OP])))


def test_kernels_that_cannot_run_here_give_the_reason():
    class Absent(ToyBackend):
        def status(self):
            return BackendStatus(available=False, detail="no abacus", remedy="buy one")

        def devices(self):
            return ()

    with pytest.raises(NotRun, match=r"backend toycpu: no abacus \(buy one\)"):
        trial_of(toy("reference"), Absent())
    dispatcher = Dispatcher(Registry(scaled.ops()), backends=[CudaCoreBackend(), NumpyBackend()])
    with pytest.raises(NotRun, match="backend pycuda: no such backend is installed"):
        checks.device_for(dispatcher, scaled.sku("scaled", "pycuda"), dispatcher.devices)


def test_a_package_that_registers_nothing_gets_advice():
    dispatcher = trial_of(toy("reference")).dispatcher
    checks.check_loaded(dispatcher, "Toys")
    with pytest.raises(Broken, match=r"(?s)nothing is registered by 'toyss'.*name in pyproject\.toml.*pip install -e"):
        checks.check_loaded(dispatcher, "toyss")


def test_an_op_without_documentation_fails():
    with pytest.raises(Broken, match="has no Formula, Elements, Units, Errors"):
        checks.check_op(OP, trial_of(toy("reference")).dispatcher)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"packge": "x"}, "packge: the suite has no such attribute; did you mean package?"),
        ({"package": "x", "seeds": 3}, "seeds: the suite has no such attribute; did you mean seed?"),
        ({"package": "x", "placements": print}, "did you mean placement?"),
        ({"package": 3}, "package must be a str"),
        ({"package": "x", "cases": Case(HalvedDescriptor(n=1, d=1))}, "cases a tuple of Case"),
    ],
)
def test_a_misspelt_attribute_of_a_suite_gets_advice(attributes, words):
    with pytest.raises(TypeError, match=words):
        type("TestMine", (Conformance,), attributes)


# --- streams, on a card that does not exist --------------------------------------------------------------------------


class Deferred:
    """A stream: work that waits for its turn."""

    def __init__(self):
        self.work = []


class DeferredPlacement(HostPlacement):
    """Memory of the host for a device that runs what is enqueued when it is waited for."""

    def late(self, call):
        stream = Deferred()
        stream.work.append(call.rewrite)
        return stream

    def finish(self, stream):
        for work in stream.work:
            work()


class Card(ToyBackend):
    spec = BackendSpec(name="toycpu", processor="cuda")
    way = "listens"

    def devices(self):
        return (device_named("h200").model_copy(update={"ordinal": 0}),)

    def prepare(self, sku, problem, device, choice=""):
        runner, way = HostRunner(problem, resolve(sku.source, sku.entry_point)), self.way
        run = runner.run

        def enqueue(arrays, stream):
            if stream is None or way == "is deaf":
                return run(arrays, None)
            if way == "refuses":
                raise InvalidProblem("halved", "stream", "a stream", "be None")
            stream.work.append(lambda: run(arrays, None))
            return arrays["y"]

        runner.run = enqueue
        return runner


@pytest.mark.parametrize(
    ("way", "words"), [("listens", ""), ("is deaf", "did not wait for earlier work"), ("refuses", "")]
)
def test_a_backend_that_ignores_the_stream_fails(way, words):
    backend = Card()
    backend.way = way
    trial = trial_of(toy("reference", arch="sm_80"), backend, DeferredPlacement())
    found = failing(trial, "streams")
    assert set(found) == ({"streams"} if words else set())
    assert words in found.get("streams", "")
    assert trial.checks["streams"].startswith("it refuses the stream") is (way == "refuses")
    other = trial_of(toy("reference", arch="sm_80"), backend)
    checks.perform(other, "streams")
    assert other.checks["streams"] == "numpy cannot hold inputs back; install torch"


# --- as pytest shows it ----------------------------------------------------------------------------------------------

SUITE = """
import os
from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry import Registry
from halved import LOOSE, OP, ToyBackend, toy
from skuda.tools.testing import Conformance

def by_process(problem, *, x, y):
    y[...] = os.getpid()

def by_hash_seed(problem, *, x, y):
    y[...] = hash("skuda")

class TestToys(Conformance):
    package = "toys"

    @classmethod
    def dispatcher(cls):
        skus = [toy("reference"), toy("wrong_at_one_place")]
        skus += (toy(name, LOOSE, source=__name__) for name in ("by_process", "by_hash_seed"))
        registry = Registry([OP], origin="elsewhere 1.0").register(ToyBackend.spec, *skus, origin="toys 1.0")
        return Dispatcher(registry, backends=[ToyBackend(), NumpyBackend()])
"""
HEAVY, LOADED = "test_loading_imports_nothing_heavy", "test_package_is_loaded"


@pytest.mark.parametrize(
    ("code", "records", "kind", "check", "words"),
    [
        ("import numba", "records", "Mine", HEAVY, "loading its plug-ins imports numba; import them wher"),
        ("raise RuntimeError('boom')", "records", "Mine", LOADED, "toy-plugin 1.0 (skuda.kernels) is set aside: *boom"),
        ("", "record", "Mine", LOADED, "has no attribute 'record'"),
        ("", "records", "Plain", LOADED, "must construct a skuda.dispatch.Backend whose"),
    ],
)
def test_a_package_that_is_heavy_or_broken_gets_advice(pytester, monkeypatch, code, records, kind, check, words):
    module = f"toy_plugin_{abs(hash((code, records, kind)))}"
    points = {"kernels": {"fine": f"{module}:{records}"}, "backends": {"mine": f"{module}:{kind}"}}
    distributions.install(pytester.path, "toy-plugin", **points)
    pytester.makepyfile(numba="")
    rest = "from halved import OP, ToyBackend, toy\nrecords = [OP, toy('wrong_at_one_place')]"
    pytester.makepyfile(**{module: f"{code}\n{rest}\nclass Mine(ToyBackend): pass\nclass Plain: pass"})
    suite = "from skuda.tools.testing import Conformance\nclass TestIt(Conformance):\n    package = 'Toy_Plugin'"
    pytester.makepyfile(test_it=suite)
    monkeypatch.syspath_prepend(str(pytester.path))
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "package or heavy")
    ran.assert_outcomes(passed=1, failed=1)
    ran.stdout.fnmatch_lines_random([f"*{check}*", f"*{words}*"])


def test_every_check_of_every_kernel_is_a_readable_item(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    pytester.makepyfile(test_toys=textwrap.dedent(SUITE))
    wrong, moody, seeded = (
        f"unary_elementwise.halved.f32.plain.cpu.toycpu.{name}"
        for name in ("wrong_at_one_place", "by_process", "by_hash_seed")
    )
    some = "meaning or bit_stable or streams or package or record or heavy or threads or honest"
    ran = pytester.runpytest_inprocess("-rfs", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", some)
    ran.stdout.fnmatch_lines_random(
        [
            f"FAILED *::TestToys::test_meaning[[]{wrong}[]]*",
            f"FAILED *::TestToys::test_bit_stable[[]{moody}[]]*",
            f"FAILED *::TestToys::test_bit_stable[[]{seeded}[]]*",
            wrong,
            "meaning: y[[]2, 1[]] is *, must be *elements differ; case 0 (normal, contiguous)",
            "problem: *",
            "bit_stable: another process gets other bits",
            f"to repeat it: SKUDA_TEST_SEED=* pytest 'test_toys.py::TestToys::test_meaning[[]{wrong}[]]'",
            "SKIPPED*a CPU has no streams*",
            "SKIPPED*'toys' is not an installed package with plug-ins*",
        ]
    )
    assert ran.parseoutcomes()["failed"] == 3


def test_a_suite_without_a_package_gets_advice(pytester):
    pytester.makepyfile("from skuda.tools.testing import Conformance\nclass TestMine(Conformance): pass")
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    ran.stdout.fnmatch_lines_random(['*TestMine must name its package: package = "my-package"*'])


def test_the_recipe_for_a_kernel_passes_as_it_is_written(pytester, monkeypatch):
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r'^```\w+ title="(.+?)"\n(.*?)^```$', text, re.MULTILINE | re.DOTALL))
    assert list(blocks) == ["pyproject.toml", "skuda_fast.py", "test_fast.py"]
    for name, code in blocks.items():
        (pytester.path / name).write_text(code)
    project = tomllib.loads(blocks["pyproject.toml"])["project"]
    distributions.install(pytester.path, project["name"], kernels=project["entry-points"]["skuda.kernels"])
    monkeypatch.syspath_prepend(str(pytester.path))
    ran = pytester.runpytest_inprocess("test_fast.py", "-p", "no:cacheprovider")
    ran.assert_outcomes(passed=13, skipped=6)
