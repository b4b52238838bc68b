"""Telemetry: selections go to a callback and to the log, and launches are NVTX ranges."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from unittest.mock import Mock, call

import numpy as np
import pytest
import toykernels.scaled as cuda_toy
from fakes import fake_compiler
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from toy import ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import Dispatcher, PlanPreference, device_named, log_selection
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
    """A backend that prepares nothing."""

    def prepare(self, sku, problem, device):
        raise CompileError("toy", "no", log="two\nlines")


class Picky(NumpyBackend):
    """A backend whose first kernel can read no array."""

    def prepare(self, sku, problem, device):
        runner = super().prepare(sku, problem, device)

        def refuse(arrays, stream):
            raise Unaligned("toy", "x", "an odd address", "be aligned")

        if sku.variant == "first":
            runner.run = refuse
        return runner


def test_a_selection_is_reported_once_with_everything_about_it(registry):
    events = []
    dispatcher = dispatcher_with(registry, on_selection=events.append)
    problem = ToyDescriptor(m=3, n=5)
    plan = dispatcher.select(problem)
    assert dispatcher.select(problem) is plan
    (one,) = events
    assert (one.problem, one.device, one.preference, one.sku) == (problem, plan.device, plan.preference, plan.sku)
    assert one.duration > 0
    assert one.preparation > 0
    assert (one.error, one.behind) == (None, None)
    assert one.decisions == dispatcher.explain(problem).decisions
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.sku = None
    expected = {"skuda.op": "toy", "skuda.problem.m": 3, "skuda.device.name": "CPU", "skuda.sku.id": plan.sku.id}
    expected |= {"skuda.guarantee.max_ulp": 0, "skuda.selection.duration": one.duration}
    assert one.attributes().items() >= expected.items()


def test_a_span_of_opentelemetry_takes_every_attribute(registry):
    events = []
    dispatcher_with(registry, on_selection=events.append).select(ToyDescriptor(), device=device_named("h200"))
    found = events[0].attributes()
    assert found["skuda.device.compute_capability"] == "9.0"
    assert "skuda.device.ordinal" not in found
    assert found["skuda.sku.variant"] == "wgmma"
    # A name must not be a namespace of others, too.
    assert not [name for name in found if any(other.startswith(f"{name}.") for other in found)]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("test").start_span("skuda.select", attributes=found).end()
    (span,) = exporter.get_finished_spans()
    assert dict(span.attributes) == found


def test_a_refusal_and_a_failure_are_reported_with_their_error(registry):
    events = []
    dispatcher = dispatcher_with(registry, on_selection=events.append)
    with pytest.raises(Unsupported):
        dispatcher.select(ToyDescriptor(), PlanPreference(backend="pycuda"))
    failing = dispatcher_with(registry, Refusing(), on_selection=events.append)
    with pytest.raises(CompileError):
        failing.select(ToyDescriptor())
    refused, failed = events
    assert refused.sku is None
    assert refused.attributes()["error.type"] == "skuda.registry.errors.Unsupported"
    assert not any(decision.accepted for decision in refused.decisions)
    assert failed.sku.variant == "reference"
    assert isinstance(failed.error, CompileError)
    assert failed.attributes()["error.type"] == "skuda.registry.errors.CompileError"


def test_the_kernel_that_stands_in_for_unaligned_arrays_is_reported_with_whom_it_stands_behind():
    first, second = toy_sku(variant="first"), toy_sku()
    events = []
    dispatcher = dispatcher_with(Registry([toy_op(first, second)]), Picky(), on_selection=events.append)
    for _ in range(2):
        dispatcher.run(ToyDescriptor(m=2), x=np.ones(2, np.float32))
    assert [(one.sku, one.behind) for one in events] == [(first, None), (second, first.id)]
    assert events[1].attributes()["skuda.selection.behind"] == first.id


def test_a_callback_that_raises_stops_nothing_and_is_reported_once(registry, caplog):
    def broken(selection):
        assert dispatcher.select(selection.problem).problem == selection.problem, "it may ask the dispatcher"
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


def run_with(script=SCRIPT, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SKUDA_")}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=60, check=False)


LOGGERS = {
    "not asked for": ("", {}, 0, ""),
    "a handler of the application": (
        "import logging; logging.basicConfig(format='mine %(name)s %(message)s')\n",
        {"SKUDA_LOG": "dispatch"},
        1,
        "mine skuda.dispatch ",
    ),
    "a handler that writes nothing": (
        "import logging; logging.getLogger('skuda').addHandler(logging.NullHandler())\n",
        {"SKUDA_LOG": "dispatch,compile"},
        1,
        "skuda.dispatch: ",
    ),
}


@pytest.mark.parametrize(("begin", "settings", "count", "beginning"), LOGGERS.values(), ids=LOGGERS)
def test_a_line_appears_once_and_the_root_logger_is_left_alone(begin, settings, count, beginning):
    end = "import logging; root = logging.getLogger(); print(root.level, len(root.handlers))"
    done = run_with(begin + SCRIPT + end, SKUDA_PLUGINS="0", **settings)
    lines = done.stderr.splitlines()
    assert sum("chose" in line for line in lines) == count
    assert all(line.startswith(beginning) for line in lines)
    assert done.stdout == f"30 {int('basicConfig' in begin)}\n"


@pytest.mark.usefixtures("_own_loggers")
def test_an_application_can_have_the_lines_without_the_setting(registry, caplog):
    dispatcher = dispatcher_with(registry, on_selection=log_selection)
    failing = dispatcher_with(registry, Refusing(), on_selection=log_selection)
    with caplog.at_level(logging.INFO, "skuda.dispatch"):
        dispatcher.select(ToyDescriptor())
        with pytest.raises(CompileError):
            failing.select(ToyDescriptor())
    assert len(caplog.messages) == 2
    assert "could not be prepared: CompileError: toy: no two lines" in caplog.messages[1]
    with caplog.at_level(logging.DEBUG, "skuda.dispatch"), pytest.raises(Unsupported):
        dispatcher.select(ToyDescriptor(), PlanPreference(backend="pycuda"))
    refused, *reasons = caplog.messages[2:]
    assert refused.endswith("on CPU: no kernel")
    assert len(reasons) == 3
    assert any("[preference] preference.backend: wanted pycuda, had numpy" in line for line in reasons)


@pytest.mark.usefixtures("_own_loggers")
def test_compilations_and_what_the_cache_had_are_logged(tmp_path, monkeypatch, caplog):
    backend = CudaCoreBackend(CubinCache(tmp_path))
    fake_compiler(monkeypatch, backend)
    monkeypatch.setattr("skuda.dispatch.compile.provider.read_kernels", lambda _: {})
    problem, device = cuda_toy.ScaledDescriptor(numel=8), device_named("h200")
    sku = next(sku for sku in Registry(cuda_toy.ops(), origin="toy") if sku.backend == "cuda_core")
    launch = backend.launch_of(sku, problem, device)
    backend.cubin(sku, launch, device)
    assert not caplog.messages
    for file in tmp_path.glob("*/*.cubin"):
        file.unlink()
    monkeypatch.setenv("SKUDA_LOG", "compile")
    for _ in range(2):
        backend.cubin(sku, launch, device)
    first, second = caplog.messages
    assert re.fullmatch(rf"{re.escape(sku.id)} for sm_90: compiled in [\d.]+ s by fake 1.0", first)
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


@pytest.mark.parametrize("how", ["setting", "argument"])
def test_every_launch_is_a_range_named_by_op_and_sku(registry, monkeypatch, how):
    module = Mock()
    monkeypatch.setitem(sys.modules, "nvtx", module)
    if how == "setting":
        monkeypatch.setenv("SKUDA_NVTX", "1")
    assert type(dispatcher_with(registry, nvtx=False).select(ToyDescriptor(m=2))._prepared.runner) is HostRunner
    dispatcher = dispatcher_with(registry, nvtx=True if how == "argument" else None)
    domain = module.get_domain.return_value
    plan = dispatcher.select(ToyDescriptor(m=2))
    assert module.mock_calls == [
        call.get_domain("skuda"),
        call.get_domain().get_event_attributes(message=f"toy: {plan.sku.id}"),
    ]
    x = np.ones(2, np.float32)
    one_range = [call.push_range(domain.get_event_attributes.return_value), call.pop_range()]
    domain.reset_mock()
    assert plan.run(x=x).tolist() == [2, 2]
    assert domain.mock_calls == one_range
    launch = plan.bind(x=x)
    assert plan.can_implement(x=x)
    assert domain.mock_calls == one_range
    assert launch().tolist() == [2, 2]
    assert domain.mock_calls == one_range * 2
    with pytest.raises(InvalidProblem):
        plan.run(x=x, nonsense=x)
    assert domain.mock_calls == one_range * 3


def test_ranges_without_the_package_are_refused_with_the_command_that_brings_it(registry, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(MissingDependency) as caught:
        dispatcher_with(registry, nvtx=True)
    assert caught.value.command == "pip install 'skuda[nvtx]'"
    assert "nvtx" in importlib.metadata.metadata("skuda").get_all("Provides-Extra")
    dispatcher_with(registry)


def test_a_measurement_that_decided_is_reported(registry, caplog):
    events = []
    dispatcher_with(registry, on_selection=events.append).select(ToyDescriptor())
    assert not {"skuda.sku.choice", "skuda.selection.measured"} & events[0].attributes().keys()
    measured = dataclasses.replace(
        events[0], pick=events[0].pick._replace(choice="8 x 8", reason="chosen by a file: 2 us")
    )
    assert measured.attributes()["skuda.sku.choice"] == "8 x 8"
    assert measured.attributes()["skuda.selection.measured"] == "chosen by a file: 2 us"
    with caplog.at_level(logging.INFO, "skuda.dispatch"):
        log_selection(measured)
    assert f"chose {measured.sku.id}, chosen by a file: 2 us, in " in caplog.text
