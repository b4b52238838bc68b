"""Clocks on paper: what is timed between which events, and how a call becomes a graph."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from skuda.tools.bench.clock import CudaClock, HostClock

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
