"""Clocks on paper: what is timed between which events, how a call becomes a graph, and how NVML is read."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from skuda.tools.bench.clock import CudaClock, HostClock, Reading, Sensor, median

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stub of NVML with")

_NVML = r"""
#include <string.h>
typedef struct {
  unsigned field, scope;
  long long stamp, latency;
  int kind, status;
  union { double d; unsigned u; } v;
} value;
static int card;
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) {
  *found = &card;
  return strcmp(uuid, "GPU-1234") ? 6 : 0;
}
int nvmlDeviceGetClockInfo(void *at, int kind, unsigned *mhz) {
  *mhz = 1755;
  return at == &card && kind == 1 ? CLOCK : 2;
}
int nvmlDeviceGetPowerUsage(void *at, unsigned *mw) { *mw = 650500; return at == &card ? 0 : 2; }
int nvmlDeviceGetFieldValues(void *at, int count, value *out) {
  out->status = FIELD;
  if (at == &card && count == 1 && out->field == 186) out->v.u = 700250;
  return 0;
}
"""


@pytest.fixture
def nvml(tmp_path):
    def build(**codes):
        source, library = tmp_path / "nvml.c", tmp_path / f"nvml{len(list(tmp_path.iterdir()))}.so"
        source.write_text(_NVML)
        codes = {"INIT": 0, "CLOCK": 0, "FIELD": 0, **codes}
        flags = (f"-D{name}={value}" for name, value in codes.items())
        subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        return str(library)

    return build


@needs_cc
def test_a_card_is_read_by_its_uuid(nvml):
    assert Sensor("GPU-1234", nvml()).read() == Reading(1755.0, 700.25)
    assert Sensor("GPU-1234", nvml(FIELD=3)).read() == Reading(1755.0, 650.5), "a driver without the newer query"


@needs_cc
@pytest.mark.parametrize(
    ("uuid", "codes", "says"),
    [
        ("GPU-1234", {"INIT": 9}, "nvmlInit_v2 of NVML returned 9"),
        ("GPU-5678", {}, "nvmlDeviceGetHandleByUUID of NVML returned 6"),
        ("GPU-1234", {"CLOCK": 4}, "nvmlDeviceGetClockInfo of NVML returned 4"),
    ],
)
def test_what_nvml_refuses_is_an_error_that_says_so(nvml, uuid, codes, says):
    with pytest.raises(OSError, match=says):
        Sensor(uuid, nvml(**codes))


def test_without_the_library_it_is_an_error():
    with pytest.raises(OSError, match="libnosuch"):
        Sensor("GPU-1234", "libnosuch.so.1")


def test_readings_are_summed_up_by_their_medians():
    assert median([Reading(1, 30), Reading(9, 10), Reading(2, 20)]) == Reading(2, 20)
    assert median([]) is None


# --- runs and graphs -------------------------------------------------------------------------------------------------


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

        def query():
            self.log.append("query")
            return self.log.count("query") == 3

        return SimpleNamespace(record=lambda: self.log.append("event"), query=query, elapsed_time=lambda end: 0.002)


def test_the_card_is_read_while_it_works_and_not_in_between(monkeypatch):
    """The last event passes after its third query."""
    cuda = FakeCuda()
    log = cuda.log

    def read():
        log.append("read")
        return Reading(1000.0 + log.count("read"), 5.0)

    monkeypatch.setattr("skuda.tools.bench.clock.time", SimpleNamespace(sleep=lambda seconds: log.append("sleep")))
    clock = CudaClock(cuda, "cuda:0", SimpleNamespace(read=read))
    run = lambda: log.append("run")  # noqa: E731  one line is clearer
    assert clock.measure([run, run]) == [2.0, 2.0]
    watched = ["read", "query", "sleep", "read", "query", "sleep", "read", "query"]
    assert log == ["synchronize", *("event", "run", "event") * 2, *watched, "synchronize"]
    assert median(clock.readings) == Reading(1002.0, 5.0)
    log.clear()
    assert (clock.measure([]), clock.measure([run])) == ([], [2.0])
    assert "read" not in log, "an estimate is not worth a reading"


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
def test_a_call_is_warm_before_it_is_captured(careful):
    cuda, runs = FakeCuda(), []
    replay = CudaClock(cuda, "cuda:0").capture(lambda: runs.append((cuda.mode, "capture" in cuda.log)), careful=careful)
    warm, captured = ("default", False), ("default", True)
    assert runs == [warm, *([("error", False)] if careful else []), captured]
    replay()
    assert (len(runs), cuda.log[-1]) == (2 + careful, "replay")


def test_a_call_that_waits_for_the_device_is_refused():
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


def test_the_host_times_each_call_behind_a_flush(monkeypatch):
    now, log = [0], []
    monkeypatch.setattr("skuda.tools.bench.clock.time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def taking(name, us):
        def call():
            log.append(name)
            now[0] += us * 1000

        return call

    clock = HostClock()
    call = clock.capture(taking("a", 3))
    assert log == ["a"], "warm"
    assert clock.measure([call, taking("b", 5)], taking("flush", 100)) == [3.0, 5.0]
    assert log[1:] == ["flush", "a", "flush", "b"]
