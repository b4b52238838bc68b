"""Clocks: the host's clock for each call, or CUDA events for replays of CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

Replay = Callable[[], object]


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
    """Events of one CUDA device on a separate stream; `cuda` is ``torch.cuda``."""

    def __init__(self, cuda: Any, place: Any) -> None:
        self._cuda, self._stream = cuda, cuda.Stream(place)

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
        cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

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
