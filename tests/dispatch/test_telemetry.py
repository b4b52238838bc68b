"""What the dispatcher tells of itself: selections to a callback and to the log, launches as NVTX ranges."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import toykernels.scaled as cuda_toy
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from toy import ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import Dispatcher, PlanPreference, Selection, device_named, log_selection
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.compile.cache import CubinCache
from skuda.registry import CompileError, InvalidProblem, InvalidRecord, MissingDependency, Registry, Unsupported
from skuda.registry.errors import Unaligned
from skuda.tools.show.doctor import examine

SCRIPT = """
from skuda.dispatch import Dispatcher
from skuda.kernels.elementwise import FillDescriptor
import numpy as np
problem = FillDescriptor(numel=4, output_element="f32")
d, e = Dispatcher(), Dispatcher()
for _ in range(3):
    d.run(problem, value=1.0, output=np.empty(4, np.float32))
"""


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    for name in ("SKUDA_LOG", "SKUDA_NVTX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def _own_loggers():
    """Leave the loggers as they were found."""
    loggers = [logging.getLogger(name) for name in ("skuda", "skuda.dispatch", "skuda.compile")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def registry():
    return Registry([toy_op(cuda_sku("sm_90a", "wgmma"), toy_sku(element="f16"), toy_sku())])


def dispatcher_with(registry, *backends, **options):
    return Dispatcher(registry, backends=backends or [NumpyBackend()], **options)


class Refusing(NumpyBackend):
    """A backend whose first preparation, or every one, goes wrong."""

    def __init__(self, error):
        self._error = error

    def prepare(self, sku, problem, device):
        raise self._error


class Picky(NumpyBackend):
    """A backend whose first kernel can read no array."""

    def prepare(self, sku, problem, device):
        runner = super().prepare(sku, problem, device)

        def refuse(arrays, stream):
            raise Unaligned("toy", "x", "an odd address", "be aligned")

        if sku.variant == "first":
            runner.run = refuse
        return runner


def test_a_selection_is_told_once_with_everything_about_it(registry):
    told = []
    dispatcher = dispatcher_with(registry, on_selection=told.append)
    problem = ToyDescriptor(m=3, n=5)
    plan = dispatcher.select(problem)
    assert dispatcher.select(problem) is plan
    (one,) = told
    assert (one.problem, one.device, one.preference, one.sku) == (problem, plan.device, plan.preference, plan.sku)
    assert one.duration > 0
    assert one.preparation > 0
    assert (one.error, one.behind) == (None, None)
    assert one.decisions == dispatcher.explain(problem).decisions
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.sku = None
    assert one.attributes() == {
        "skuda.op": "toy",
        "skuda.problem.m": 3,
        "skuda.problem.n": 5,
        "skuda.problem.k": 1,
        "skuda.problem.element": "f32",
        "skuda.problem.weight_element": "s8",
        "skuda.problem.epilogue": "identity",
        "skuda.device.name": "CPU",
        "skuda.device.processor": "cpu",
        "skuda.device.ordinal": 0,
        "skuda.sku.id": plan.sku.id,
        "skuda.sku.backend": "numpy",
        "skuda.sku.variant": "reference",
        "skuda.guarantee.math_precision": "int8",
        "skuda.guarantee.accumulator": "s32",
        "skuda.guarantee.deterministic": True,
        "skuda.guarantee.bit_stable_on_same_hardware": True,
        "skuda.guarantee.max_ulp": 0,
        "skuda.guarantee.batch_invariant": True,
        "skuda.selection.duration": one.duration,
        "skuda.selection.preparation.duration": one.preparation,
    }


def test_decisions_are_worked_out_only_when_asked_for(registry, monkeypatch):
    told = []
    dispatcher = dispatcher_with(registry, on_selection=told.append)
    asked = []
    real = dispatcher.explain
    monkeypatch.setattr(dispatcher, "explain", lambda *question: asked.append(question) or real(*question))
    dispatcher.select(ToyDescriptor())
    assert not asked
    assert len(told[0].decisions) == 3
    assert told[0].decisions is told[0].decisions
    assert len(asked) == 1


def test_attributes_of_a_card_on_paper_are_such_as_opentelemetry_takes(registry):
    told = []
    dispatcher_with(registry, on_selection=told.append).select(ToyDescriptor(), device=device_named("h200"))
    found = told[0].attributes()
    assert found["skuda.device.compute_capability"] == "9.0"
    assert "skuda.device.ordinal" not in found
    assert found["skuda.sku.variant"] == "wgmma"
    for name, value in found.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+|error\.type", name)
        assert isinstance(value, str | bool | int | float), name
    # A name must not be a namespace of others, too.
    assert not [name for name in found if any(other.startswith(f"{name}.") for other in found)]


def test_a_span_takes_every_attribute(registry):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    told = []
    dispatcher_with(registry, on_selection=told.append).select(ToyDescriptor(), device=device_named("h200"))
    provider.get_tracer("test").start_span("skuda.select", attributes=told[0].attributes()).end()
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes) == told[0].attributes()


def test_a_refusal_and_a_failure_are_told_with_their_error(registry):
    told = []
    dispatcher = dispatcher_with(registry, on_selection=told.append)
    with pytest.raises(Unsupported):
        dispatcher.select(ToyDescriptor(), PlanPreference(backend="pycuda"))
    trouble = CompileError("toy", "no")
    failing = dispatcher_with(registry, Refusing(trouble), on_selection=told.append)
    with pytest.raises(CompileError):
        failing.select(ToyDescriptor())
    refused, failed = told
    assert refused.sku is None
    assert refused.attributes()["error.type"] == "skuda.registry.errors.Unsupported"
    assert not any(decision.accepted for decision in refused.decisions)
    assert failed.sku.variant == "reference"
    assert failed.error is trouble
    assert failed.attributes()["error.type"] == "skuda.registry.errors.CompileError"


def test_the_kernel_that_stands_in_for_unaligned_arrays_is_told_with_whom_it_stands_behind():
    first, second = toy_sku(variant="first"), toy_sku()
    told = []
    dispatcher = dispatcher_with(Registry([toy_op(first, second)]), Picky(), on_selection=told.append)
    for _ in range(2):
        dispatcher.run(ToyDescriptor(m=2), x=np.ones(2, np.float32))
    assert [(one.sku, one.behind) for one in told] == [(first, None), (second, first.id)]
    assert told[1].attributes()["skuda.selection.behind"] == first.id


def test_a_callback_that_raises_stops_nothing_and_is_reported_once(registry, caplog):
    def broken(selection):
        raise ZeroDivisionError("the callback's own")

    dispatcher = dispatcher_with(registry, on_selection=broken)
    for m in range(3):
        assert dispatcher.select(ToyDescriptor(m=m)).sku.variant == "reference"
    (record,) = caplog.records
    assert record.name == "skuda.dispatch"
    assert record.levelno == logging.ERROR
    assert broken.__qualname__ in record.getMessage()
    assert f"{__file__}:" in record.getMessage()
    assert "the callback's own" in caplog.text


def test_a_callback_may_ask_the_dispatcher_itself(registry):
    seen = []

    def curious(selection):
        seen.append(dispatcher.select(selection.problem))

    dispatcher = dispatcher_with(registry, on_selection=curious)
    with ThreadPoolExecutor(1) as pool:  # so that a deadlock fails instead of hanging
        plan = pool.submit(dispatcher.select, ToyDescriptor()).result(timeout=20)
    assert seen == [plan]
    assert seen[0] is plan


def test_threads_that_ask_together_hear_of_one_selection(registry):
    told = []
    dispatcher = dispatcher_with(registry, on_selection=told.append)
    with ThreadPoolExecutor(8) as pool:
        plans = list(pool.map(dispatcher.select, [ToyDescriptor(m=7)] * 64))
    assert len({id(plan) for plan in plans}) == 1
    assert len(told) == 1


def run_with(script=SCRIPT, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKUDA_")}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=60, check=False)


def test_without_the_setting_nothing_is_written():
    done = run_with()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_log_has_a_line_for_the_selection_and_one_for_every_refused_kernel():
    done = run_with(SKUDA_LOG="dispatch", SKUDA_PLUGINS="0")
    assert (done.returncode, done.stdout) == (0, "")
    first, *others = done.stderr.splitlines()
    assert re.fullmatch(
        r"skuda\.dispatch: fill\(numel=4, output_element=f32\) on CPU: "
        r"chose \S+\.fill\.f32\.\S+\.numpy\.reference in [\d.]+ ms, prepared in [\d.]+ ms",
        first,
    )
    from skuda.kernels.catalog import built_in_registry

    refused = [sku.id for sku in built_in_registry().skus_of("fill")]
    assert len(others) == len(refused) - 1
    for line in others:
        found = re.fullmatch(r"skuda\.dispatch: refused (\S+): (.*)", line)
        assert found[1] in refused
        assert re.match(r"\[(arch|element|backend)\] \w+: wanted .+, had .+", found[2])


def test_the_log_goes_to_the_application_where_it_has_handlers_and_never_twice():
    begin = "import logging; logging.basicConfig(format='mine %(name)s %(message)s')\n"
    done = run_with(begin + SCRIPT, SKUDA_LOG="dispatch", SKUDA_PLUGINS="0")
    lines = done.stderr.splitlines()
    assert sum("chose" in line for line in lines) == 1
    assert all(line.startswith("mine skuda.dispatch ") for line in lines)


def test_a_handler_that_writes_nothing_does_not_keep_the_lines_away():
    begin = "import logging; logging.getLogger('skuda').addHandler(logging.NullHandler())\n"
    assert run_with(begin + SCRIPT, SKUDA_LOG="dispatch").stderr.count(": chose ") == 1


def test_an_error_that_is_logged_shows_its_traceback():
    more = "Dispatcher(on_selection=lambda selection: 1 / 0).select(problem)"
    for setting in ("", "dispatch"):
        assert "ZeroDivisionError" in run_with(SCRIPT + more, SKUDA_LOG=setting).stderr


def test_the_root_logger_is_left_alone():
    more = "import logging; root = logging.getLogger(); print(root.level, root.handlers)"
    assert run_with(SCRIPT + more, SKUDA_LOG="dispatch,compile").stdout == "30 []\n"


@pytest.mark.usefixtures("_own_loggers")
def test_an_application_can_have_the_lines_without_the_setting(registry, caplog):
    dispatcher = dispatcher_with(registry, on_selection=log_selection)
    with caplog.at_level(logging.INFO, "skuda.dispatch"):
        dispatcher.select(ToyDescriptor())
        assert len(caplog.records) == 1
    with caplog.at_level(logging.DEBUG, "skuda.dispatch"), pytest.raises(Unsupported):
        dispatcher.select(ToyDescriptor(), PlanPreference(backend="pycuda"))
    told = caplog.messages[1:]
    assert told[0].endswith("on CPU: no kernel")
    assert len(told) == 1 + 3
    assert any("[preference] preference.backend: wanted pycuda, had numpy" in line for line in told)


@pytest.mark.usefixtures("_own_loggers")
def test_a_failure_to_prepare_is_one_line(registry, caplog):
    failing = dispatcher_with(
        registry, Refusing(CompileError("toy", "no", log="two\nlines")), on_selection=log_selection
    )
    with caplog.at_level(logging.INFO, "skuda.dispatch"), pytest.raises(CompileError):
        failing.select(ToyDescriptor())
    (told,) = caplog.messages
    assert "could not be prepared: CompileError: toy: no two lines" in told


@pytest.mark.usefixtures("_own_loggers")
def test_compilations_and_what_the_cache_had_are_logged(tmp_path, monkeypatch, caplog):
    class Compiler:
        def identity(self, source):
            return "a compiler"

        def compile(self, job):
            return b"cubin"

    backend = CudaCoreBackend(CubinCache(tmp_path))
    monkeypatch.setattr(backend, "compiler", Compiler)
    monkeypatch.setattr("skuda.dispatch.compile.provider.placed", lambda sku, steps, cubin: steps)
    problem, device = cuda_toy.ScaledDescriptor(numel=8), device_named("h200")
    sku = next(sku for sku in Registry(cuda_toy.ops(), origin="toy") if sku.backend == "cuda_core")
    launch = backend.launch_of(sku, problem, device)
    backend.cubin(sku, launch, device)
    assert not caplog.messages
    for file in tmp_path.glob("*/*/*.cubin"):
        file.unlink()
    monkeypatch.setenv("SKUDA_LOG", "compile")
    for _ in range(2):
        backend.cubin(sku, launch, device)
    first, second = caplog.messages
    assert re.fullmatch(rf"{re.escape(sku.id)} for sm_90: compiled in [\d.]+ s by a compiler", first)
    assert second == f"{sku.id} for sm_90: found in {backend.cache.folder}"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("SKUDA_LOG", "dispatch,launch", "be one or more of dispatch, compile, separated by commas"),
        ("SKUDA_NVTX", "yes", "be 0 or 1"),
    ],
)
def test_a_value_that_a_setting_cannot_have_is_refused_and_the_doctor_says_so(monkeypatch, name, value, rule):
    monkeypatch.setenv(name, value)
    (found,) = (finding for finding in examine() if finding.section == "Environment" and finding.state != "ok")
    assert (found.name, found.required) == (name, True)
    assert found.detail == f"{value}, must {rule}"
    with pytest.raises(InvalidRecord) as caught:
        Dispatcher()
    assert str(caught.value) == f"the environment: {name} must {rule}; had {value!r}"


class FakeNvtx(types.ModuleType):
    """The calls of the package `nvtx` that are used, written down."""

    def __init__(self):
        super().__init__("nvtx")
        self.calls = []

    def get_domain(self, name):
        self.calls.append(("domain", name))
        return self

    def get_event_attributes(self, message):
        return f"attributes of {message}"

    def push_range(self, attributes):
        self.calls.append(("push", attributes))

    def pop_range(self):
        self.calls.append(("pop",))


@pytest.fixture
def nvtx(monkeypatch):
    module = FakeNvtx()
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return module


@pytest.mark.parametrize("how", ["setting", "argument"])
def test_every_launch_is_a_range_named_by_op_and_sku(registry, monkeypatch, nvtx, how):
    if how == "setting":
        monkeypatch.setenv("SKUDA_NVTX", "1")
    dispatcher = dispatcher_with(registry, nvtx=True if how == "argument" else None)
    assert nvtx.calls == [("domain", "skuda")]
    plan = dispatcher.select(ToyDescriptor(m=2))
    x = np.ones(2, np.float32)
    range_of_it = [("push", f"attributes of toy: {plan.sku.id}"), ("pop",)]
    del nvtx.calls[:]
    assert plan.run(x=x).tolist() == [2, 2]
    assert nvtx.calls == range_of_it
    launch = plan.bind(x=x)
    assert plan.can_implement(x=x)
    assert nvtx.calls == range_of_it
    assert launch().tolist() == [2, 2]
    assert nvtx.calls == range_of_it * 2
    with pytest.raises(InvalidProblem):
        plan.run(x=x, nonsense=x)
    assert nvtx.calls == range_of_it * 3


def test_without_being_asked_a_plan_knows_nothing_of_ranges(registry, monkeypatch, nvtx):
    plan = dispatcher_with(registry).select(ToyDescriptor(m=2))
    assert type(plan._runner) is HostRunner
    monkeypatch.setenv("SKUDA_NVTX", "1")
    assert type(dispatcher_with(registry, nvtx=False).select(ToyDescriptor(m=2))._runner) is HostRunner
    assert nvtx.calls == []


def test_ranges_without_the_package_are_refused_with_the_command_that_brings_it(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(MissingDependency) as caught:
        dispatcher_with(registry, nvtx=True)
    assert caught.value.command == "pip install 'skuda[nvtx]'"
    assert "nvtx" in importlib.metadata.metadata("skuda").get_all("Provides-Extra")
    dispatcher_with(registry)


def test_a_measurement_that_decided_is_told(registry, caplog):
    told = []
    dispatcher_with(registry, on_selection=told.append).select(ToyDescriptor())
    assert not {"skuda.sku.choice", "skuda.selection.measured"} & told[0].attributes().keys()
    measured = dataclasses.replace(told[0], pick=told[0].pick._replace(choice="8 x 8", reason="chosen by a file: 2 us"))
    assert measured.attributes()["skuda.sku.choice"] == "8 x 8"
    assert measured.attributes()["skuda.selection.measured"] == "chosen by a file: 2 us"
    with caplog.at_level(logging.INFO, "skuda.dispatch"):
        log_selection(measured)
    assert f"chose {measured.sku.id}, chosen by a file: 2 us, in " in caplog.text


def test_selections_compare_by_what_was_chosen(registry):
    told = []
    dispatcher_with(registry, on_selection=told.append).select(ToyDescriptor())
    assert told[0] == dataclasses.replace(told[0], error=ValueError(), _explain=lambda: None)
    assert told[0] != dataclasses.replace(told[0], pick=None)
    assert isinstance(told[0], Selection)
