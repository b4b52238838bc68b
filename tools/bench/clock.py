"""Clocks: the host's clock for each call, or CUDA events for replays of CUDA graphs; and NVML, which reads the card."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Replay = Callable[[], object]
_PAUSE = 5e-4
"""Seconds between two readings of a sensor."""
_SM_CLOCK = 1
_POWER_NOW = 186
"""Of NVML's field values: the power of this moment, in mW. The older query returns the average of a second."""


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


class CudaClock:
    """Events of one CUDA device on a separate stream; `cuda` is ``torch.cuda``.

    With a sensor, `readings` get what it reads while the device works.
    """

    def __init__(self, cuda: Any, place: Any, sensor: Sensor | None = None) -> None:
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
            self.readings.append(self._sensor.read())
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


class Reading(NamedTuple):
    """SM clock in MHz, and power in W."""

    mhz: float
    watts: float


class _FieldValue(ctypes.Structure):
    """NVML's ``nvmlFieldValue_t``; the value is the one of an unsigned int."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_uint),
        ("padding", ctypes.c_uint),
    )


class Sensor:
    """One card, by its UUID (``GPU-...``); an OSError if the library or the card is not there or may not be read."""

    def __init__(self, uuid: str, library: str = "libnvidia-ml.so.1") -> None:
        self._nvml, self._card = ctypes.CDLL(library), ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._card))
        self.read()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status:
            raise OSError(f"{name} of NVML returned {status}")

    def read(self) -> Reading:
        """Return clock and power at this moment."""
        clock, power, field = ctypes.c_uint(), ctypes.c_uint(), _FieldValue(field=_POWER_NOW)
        self._call("nvmlDeviceGetClockInfo", self._card, _SM_CLOCK, ctypes.byref(clock))
        self._call("nvmlDeviceGetPowerUsage", self._card, ctypes.byref(power))
        self._nvml.nvmlDeviceGetFieldValues(self._card, 1, ctypes.byref(field))
        return Reading(clock.value, (power.value if field.status or not field.value else field.value) / 1e3)


def median(readings: Iterable[Reading]) -> Reading | None:
    """Return the medians of some readings; None if there are none."""
    found = list(readings)
    return Reading(*(statistics.median(values) for values in zip(*found, strict=True))) if found else None
