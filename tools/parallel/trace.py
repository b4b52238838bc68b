"""What a rank did while something was replayed: its kernels, and how long it was busy with which kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from skuda.registry.value import Real, Size, Value

Kind = Literal["product", "exchange", "other"]

MARK = "skuda replay "
"""Begins the name of a range that is one replay; the rest names what is replayed."""
MOST_KERNELS = 60
"""Kernels in a table; of more, the longest are kept."""
_LONGEST_NAME = 72
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
# What torch copies within a GPU is a kernel in a graph.
_EXCHANGES = re.compile(r"nccl|^gloo:|^Memcpy (PtoP|DtoD)|symmetric_memory", re.IGNORECASE)
# The kernel whose name ends so quantizes the rows of a product that follows it.
_PRODUCTS = re.compile(r"linear(?!\w*_codes$)|gemm|gemv|nvjet|cutlass|splitk|::(add|b)?mm$|::matmul$", re.IGNORECASE)
_NOISE = re.compile(r"^void |\(anonymous namespace\)::|at::native::")


class Kernel(Value):
    """A kernel, or an op on the CPU.

    Attributes
    ----------
    name : str
        As the profiler names it, shortened.
    stream : int
        Streams, or threads of the CPU, are numbered in the order of their first kernels.
    start, us : float
        Microseconds: its start, from that of the first kernel, and its duration.
    """

    name: str
    stream: Size
    start: Real
    us: Real

    @property
    def kind(self) -> Kind:
        """Whether it multiplies matrices, exchanges with other ranks, or does something else."""
        if _EXCHANGES.search(self.name):
            return "exchange"
        return "product" if _PRODUCTS.search(self.name) else "other"


class Trace(Value):
    """One replay on one rank.

    Attributes
    ----------
    products, others, exchange : float
        Microseconds in which at least one kernel of a kind ran; an exchange includes the wait for other ranks.
    hidden : float
        Microseconds in which an exchange and a kernel of another kind ran.
    idle : float
        Microseconds between the first start and the last end in which nothing ran.
    total : float
        Microseconds from the first start to the last end.
    kernels : tuple of Kernel
        In the order of their starts.
    left_out : int
        Shorter kernels that are counted above, but are not in `kernels`.
    """

    products: Real
    others: Real
    exchange: Real
    hidden: Real
    idle: Real
    total: Real
    kernels: tuple[Kernel, ...]
    left_out: Size = 0

    @classmethod
    def of(cls, kernels: Sequence[Kernel]) -> Trace:
        """Return the trace of the kernels of one replay, at least one."""
        products, others, exchange = (
            _merged((one.start, one.start + one.us) for one in kernels if one.kind == kind)
            for kind in ("product", "other", "exchange")
        )
        local, every = _merged(products + others), _merged(products + others + exchange)
        total = extent(kernels)
        longest = sorted(kernels, key=lambda one: -one.us)[:MOST_KERNELS]
        return cls(
            products=_length(products),
            others=_length(others),
            exchange=_length(exchange),
            hidden=max(0.0, round(_length(local) + _length(exchange) - _length(every), 3)),
            idle=max(0.0, round(total - _length(every), 3)),
            total=total,
            kernels=tuple(sorted(longest, key=lambda one: one.start)),
            left_out=len(kernels) - len(longest),
        )


def waiting(traces: Sequence[Trace]) -> float | None:
    """Return how much longer the first rank's exchanges took than each took on the rank where it was shortest.

    A rank that comes early to an exchange waits in it for the last. None where the ranks' exchanges do not correspond.
    """
    each = [[kernel for kernel in trace.kernels if kernel.kind == "exchange"] for trace in traces]
    if any(trace.left_out for trace in traces) or len({tuple(one.name for one in found) for found in each}) != 1:
        return None
    longer: float = sum(at[0].us - min(one.us for one in at) for at in zip(*each, strict=True))
    return round(longer, 3)


def extent(kernels: Sequence[Kernel]) -> float:
    """Return the microseconds from the first start to the last end; infinite without kernels."""
    if not kernels:
        return float("inf")
    return round(max(one.start + one.us for one in kernels) - min(one.start for one in kernels), 3)


def extents(replays: Sequence[Sequence[Kernel]]) -> list[float]:
    """Return the extent of each replay; infinite for one with other kernels than most, of which records were lost."""
    names = [tuple(sorted(one.name for one in kernels)) for kernels in replays]
    usual = Counter(names).most_common(1)[0][0] if names else ()
    return [extent(kernels) if name == usual else float("inf") for kernels, name in zip(replays, names, strict=True)]


def median_at(slowest: Sequence[float]) -> int | None:
    """Return the place of the median of what is finite; None if nothing is."""
    finite = sorted((us, at) for at, us in enumerate(slowest) if us < float("inf"))
    return finite[len(finite) // 2][1] if finite else None


class _Event(NamedTuple):
    """A complete event: times in microseconds of the host's clock."""

    kind: str
    name: str
    start: float
    end: float
    thread: object
    arguments: Mapping[str, Any]

    def holds(self, other: _Event) -> bool:
        """Whether another event starts within this one."""
        return self.start <= other.start < self.end


_Find = Callable[[_Event], list[tuple[_Event, object]]]
"""Returns what belongs to a range, with the stream or thread of each."""


def replays(events: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[Kernel, ...]]]:
    """Return the kernels of each replay, in the order of their starts, by the name of what is replayed.

    A kernel belongs to the range in which it was launched. All kernels of a graph have the correlation id of its
    launch. Where nothing ran on a device, kernels are the ops that the range's thread calls, and what gloo does on any
    thread.

    Parameters
    ----------
    events : iterable of dict
        ``traceEvents`` of the file that `torch.profiler.profile.export_chrome_trace` writes. Replays are ranges of
        `torch.profiler.record_function` whose names begin with `MARK`.
    """
    every = sorted(_complete(events), key=lambda event: (event.start, -event.end))
    marks = [event for event in every if event.kind == "user_annotation" and event.name.startswith(MARK)]
    on_device = [event for event in every if event.kind in _ON_DEVICE]
    find = _launched(on_device, every) if on_device else _called(every)
    found: dict[str, list[tuple[Kernel, ...]]] = {}
    for mark in marks:
        found.setdefault(mark.name.removeprefix(MARK), []).append(_kernels(find(mark)))
    return found


def _complete(events: Iterable[Mapping[str, Any]]) -> Iterator[_Event]:
    for event in events:
        if event.get("ph") == "X":
            kind, name, start = event.get("cat", ""), event["name"], float(event["ts"])
            yield _Event(kind, name, start, start + float(event["dur"]), event.get("tid"), event.get("args", {}))


def _launched(on_device: Sequence[_Event], every: Sequence[_Event]) -> _Find:
    """Return a function from a range to what was launched in it."""
    by_launch: dict[object, list[_Event]] = {}
    for event in on_device:
        by_launch.setdefault(event.arguments.get("correlation"), []).append(event)
    launches = [event for event in every if event.kind in _LAUNCHES and event.arguments.get("correlation") in by_launch]

    def find(mark: _Event) -> list[tuple[_Event, object]]:
        inside = dict.fromkeys(event.arguments["correlation"] for event in launches if mark.holds(event))
        return [(event, event.arguments.get("stream")) for name in inside for event in by_launch[name]]

    return find


def _called(every: Sequence[_Event]) -> _Find:
    """Return a function from a range to the ops that it calls, without those that other ops call."""

    def find(mark: _Event) -> list[tuple[_Event, object]]:
        found, end = [], mark.start
        for event in every:
            if not mark.holds(event):
                continue
            if event.kind == "user_annotation" and event.name.startswith("gloo:"):
                found.append((event, event.thread))
            elif event.kind == "cpu_op" and event.thread == mark.thread and event.start >= end:
                end = event.end
                if not event.name.startswith("c10d::"):  # these only start what gloo does
                    found.append((event, event.thread))
        return found

    return find


def _kernels(found: Sequence[tuple[_Event, object]]) -> tuple[Kernel, ...]:
    ordered = sorted(found, key=lambda one: one[0].start)
    streams = {stream: number for number, stream in enumerate(dict.fromkeys(stream for _, stream in ordered))}
    return tuple(
        Kernel(
            name=shortened(event.name),
            stream=streams[stream],
            start=round(event.start - ordered[0][0].start, 3),
            us=round(event.end - event.start, 3),
        )
        for event, stream in ordered
    )


def shortened(name: str) -> str:
    """Return a kernel's name without what every name has, without its arguments, and cut where it is long."""
    name = _NOISE.sub("", name)
    head, bracket, _ = name.partition("(")
    name = name if "<" in head or not bracket else head.strip()
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time without their overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return round(sum(end - start for start, end in spans), 3)
