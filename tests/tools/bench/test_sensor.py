"""SM clock and power: how NVML is asked, when, and what a record keeps of it."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from skuda.tools.bench.clock import CudaClock
from skuda.tools.bench.sensor import Reading, Sensor, median

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
    def build(**told):
        source, library = tmp_path / "nvml.c", tmp_path / f"nvml{len(list(tmp_path.iterdir()))}.so"
        source.write_text(_NVML)
        told = {"INIT": 0, "CLOCK": 0, "FIELD": 0, **told}
        flags = (f"-D{name}={value}" for name, value in told.items())
        subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
        return str(library)

    return build


@needs_cc
def test_a_card_is_read_by_its_uuid(nvml):
    assert Sensor("GPU-1234", nvml()).read() == Reading(1755.0, 700.25)
    assert Sensor("GPU-1234", nvml(FIELD=3)).read() == Reading(1755.0, 650.5), "a driver without the newer query"


@needs_cc
@pytest.mark.parametrize(
    ("uuid", "told", "says"),
    [
        ("GPU-1234", {"INIT": 9}, "nvmlInit_v2 of NVML returned 9"),
        ("GPU-5678", {}, "nvmlDeviceGetHandleByUUID of NVML returned 6"),
        ("GPU-1234", {"CLOCK": 4}, "nvmlDeviceGetClockInfo of NVML returned 4"),
    ],
)
def test_what_nvml_refuses_is_an_error_that_says_so(nvml, uuid, told, says):
    with pytest.raises(OSError, match=says):
        Sensor(uuid, nvml(**told))


def test_without_the_library_it_is_an_error():
    with pytest.raises(OSError, match="libnosuch"):
        Sensor("GPU-1234", "libnosuch.so.1")


def test_readings_are_summed_up_by_their_medians():
    assert median([Reading(1, 30), Reading(9, 10), Reading(2, 20)]) == Reading(2, 20)
    assert median([]) is None


def test_the_card_is_read_while_it_works_and_not_in_between(monkeypatch):
    """The last event passes after its third query."""
    log = []

    class Event:
        def record(self):
            log.append("event")

        def query(self):
            log.append("query")
            return log.count("query") == 3

        def elapsed_time(self, end):
            return 0.001

    class Read:
        def read(self):
            log.append("read")
            return Reading(1000.0 + log.count("read"), 5.0)

    monkeypatch.setattr("skuda.tools.bench.clock.time", SimpleNamespace(sleep=lambda seconds: log.append("sleep")))
    cuda = SimpleNamespace(
        Stream=lambda place: None,
        stream=lambda stream: nullcontext(),
        synchronize=lambda: log.append("synchronize"),
        Event=lambda enable_timing: Event(),
    )
    clock = CudaClock(cuda, "cuda:0", Read())
    run = lambda: log.append("run")  # noqa: E731  one line is clearer
    assert clock.measure([run, run]) == [1.0, 1.0]
    watched = ["read", "query", "sleep", "read", "query", "sleep", "read", "query"]
    assert log == ["synchronize", *("event", "run", "event") * 2, *watched, "synchronize"]
    assert median(clock.readings) == Reading(1002.0, 5.0)
    log.clear()
    assert (clock.measure([]), clock.measure([run])) == ([], [1.0])
    assert "read" not in log, "an estimate is not worth a reading"
