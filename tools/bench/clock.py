"""Clocks: the host's clock for each call, or CUDA events for replays of CUDA graphs; and readings of the card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Replay = Callable[[], object]
_PAUSE = 5e-4
"""Seconds between two readings of a sensor."""


class HostClock:
    """The host's clock."""

    def capture(self, call: Replay, *, careful: bool = True) -> Replay:  # noqa: ARG002  nothing waits for a CPU
        """Warm a call up and return it."""
        call()
        return call

    def measure(self, replays: Sequence[Replay], flush: Replay = lambda: None) -> list[float]:
        """Run each call in order after an untimed flush; return the microseconds of each."""
        times = []
        for replay in replays:
            flush()
            start = time.perf_counter_ns()
            replay()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return times


class Reading(NamedTuple):
    """SM clock in MHz, and power in W."""

    mhz: float
    watts: float


class CudaClock:
    """Events of one CUDA device on a separate stream; `cuda` is ``torch.cuda``.

    With a sensor, `readings` get what it returns while the device works.
    """

    def __init__(self, cuda: Any, place: Any, sensor: Callable[[], Reading] | None = None) -> None:
        self._cuda, self._stream, self._sensor = cuda, cuda.Stream(place), sensor
        self.readings: list[Reading] = []

    def capture(self, call: Replay, *, careful: bool = True) -> Replay:
        """Warm a call up, capture it as a CUDA graph, and return a function that replays the graph.

        Errors of the call are raised. A careful capture runs the call once more, and raises RuntimeError if the call
        waits for the device.
        """
        cuda, stream = self._cuda, self._stream
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            call()
            stream.synchronize()
            if careful:
                self._refuse_waiting(call)
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                kept = call()
        cuda.synchronize()

        # The graph holds addresses only, so the objects that own the memory must live as long as the graph.
        def replay(_kept: object = (call, kept)) -> None:
            graph.replay()

        return replay

    def measure(self, replays: Sequence[Replay], flush: Replay = lambda: None) -> list[float]:
        """Time each call with two events after a flush, which keeps the device busy while the host enqueues."""
        cuda = self._cuda
        # Work on other streams, such as overwriting the outputs, must be finished first.
        cuda.synchronize()
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in replays]
        with cuda.stream(self._stream):
            for replay, (start, end) in zip(replays, events, strict=True):
                flush()
                start.record()
                replay()
                end.record()
        if len(events) > 1:  # a single run is an estimate, and a reading takes longer than most of them
            self._watch(events[-1][1])
        cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def _watch(self, last: Any) -> None:
        """Read the sensor at least once, and then until the last event has passed."""
        while self._sensor is not None:
            self.readings.append(self._sensor())
            if last.query():
                return
            time.sleep(_PAUSE)

    def _refuse_waiting(self, call: Replay) -> None:
        self._cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise RuntimeError(f"it waits for the device, so no graph can hold it: {error}") from error
        finally:
            self._cuda.set_sync_debug_mode("default")
            self._stream.synchronize()


def median(readings: Iterable[Reading]) -> Reading | None:
    """Return the medians of some readings; None if there are none."""
    found = list(readings)
    return Reading(*(statistics.median(values) for values in zip(*found, strict=True))) if found else None
