"""A record of ``skuda bench-parallel`` as tables for a terminal, and as rows for a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from skuda.tools.output import count, heading, plain_table
from skuda.tools.parallel.record import INT8_ALL, INT8_ONE, REAL_ALL, WAYS, ParallelRecord, judged
from skuda.tools.parallel.trace import Trace, waiting
from skuda.tools.requirement import print_judged

PARTS = ("products", "others", "exchange", "hidden", "waiting", "idle", "total")
"""What a trace is broken down into."""
NOTES = (
    "us of a replay on rank 0, traced when everything was timed; exchange includes waiting for other ranks; "
    "hidden: of it, behind kernels of the rank; waiting: of it, what exceeds the shortest on any rank"
)


def rows_of(record: ParallelRecord) -> Iterator[tuple[object, ...]]:
    """Yield rows, way, median, p10 and p90 in us, ratio, what failed, and the parts of the trace in us."""
    for result in record.results:
        for way, timing in result.timings.items():
            parts = parts_of(result.traces.get(way, ()))
            yield result.rows, way, timing.median, timing.p10, timing.p90, result.gain(way), "", *parts
        if result.wrong:
            yield result.rows, "", "", "", "", "", result.wrong, *parts_of(())


def parts_of(traces: tuple[Trace, ...]) -> tuple[float | None, ...]:
    """Return microseconds of the first rank in the order of `PARTS`; None for each that is not known."""
    if not traces:
        return (None,) * len(PARTS)
    first = traces[0]
    return first.products, first.others, first.exchange, first.hidden, waiting(traces), first.idle, first.total


def microseconds(us: float | None) -> str:
    """Return a part of a trace as text."""
    return "" if us is None else f"{us:.1f}"


def print_record(console: Console, record: ParallelRecord, *, kernels: bool) -> None:
    """Print a record for a person; with kernels, every kernel of the traces, too."""
    orders = record.orders
    console.print(f"gated MLP {orders.hidden} x {orders.intermediate} on {orders.count} ranks, {record.device}, us")
    table = plain_table("rows", *WAYS, f"{INT8_ONE} over {INT8_ALL}", f"{REAL_ALL} over {INT8_ALL}", numbers=0)
    for result in record.results:
        times = [f"{result.timings[way].median:.1f}" if way in result.timings else "" for way in WAYS]
        gains = (result.gain(INT8_ONE), result.gain(REAL_ALL))
        table.add_row(str(result.rows), *times, *("" if gain is None else f"{gain:.2f}x" for gain in gains))
    console.print(table)
    if any(result.traces for result in record.results):
        _print_traces(console, record, kernels=kernels)
    if record.outdated:
        console.print(f"stale: {record.outdated}", style="yellow")
    print_judged(console, judged(record))
    console.print(f"{record.device}, {record.date}; again: {record.command}", soft_wrap=True)


def _print_traces(console: Console, record: ParallelRecord, *, kernels: bool) -> None:
    table = plain_table("rows", "way", *PARTS, "timed", numbers=2)
    for result in record.results:
        for way, traces in result.traces.items():
            parts = map(microseconds, parts_of(traces))
            table.add_row(str(result.rows), way, *parts, f"{result.timings[way].median:.1f}")
    console.print(heading("Where the time goes"))
    console.print(table)
    console.print(Text(NOTES, style="dim"))
    if kernels:
        for result in record.results:
            for way, traces in result.traces.items():
                _print_kernels(console, f"{count(result.rows, 'row')}, {way}", traces[0])


def _print_kernels(console: Console, title: str, trace: Trace) -> None:
    console.print(heading(title))
    table = plain_table("start", "us", "stream", "kind", "kernel", numbers=0)
    for column in table.columns[3:]:
        column.justify = "left"
    for one in trace.kernels:
        table.add_row(f"{one.start:.1f}", f"{one.us:.1f}", str(one.stream), one.kind, one.name)
    console.print(table)
    if trace.left_out:
        console.print(Text(f"and {trace.left_out} shorter ones", style="dim"))
