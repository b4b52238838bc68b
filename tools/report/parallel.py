"""Runs of ``skuda bench-parallel`` on the report page."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from skuda.tools.parallel.plot import plots
from skuda.tools.parallel.record import INT8_ALL, INT8_ONE, REAL_ALL, WAYS, ParallelRecord, RowsResult, judged
from skuda.tools.parallel.terminal import NOTES, PARTS, microseconds, parts_of
from skuda.tools.report.markup import Cell, Node, el, facts, number, row, table
from skuda.tools.report.models import requirements
from skuda.tools.report.records import drawn, ratio, versions


def parallel(record: ParallelRecord, name: str) -> Iterator[Element]:
    """Yield a run of ``skuda bench-parallel``."""
    orders = record.orders
    about: list[tuple[str, Node]] = [
        ("versions", versions(record.versions)),
        ("command", el("code", record.command)),
        ("stale", record.outdated),
        ("timed", "replays of a CUDA graph" if record.graph else "calls on the CPU, without a graph"),
        ("not traced", record.untraced),
    ]
    where = f"{orders.count} x {record.device}, {record.date[:16].replace('T', ' ')} UTC"
    yield el("article", el("h3", f"A gated MLP of {orders.hidden} x {orders.intermediate} on {where}"), facts(about))
    headings = ("M", *WAYS, f"{INT8_ONE} over {INT8_ALL}", f"{REAL_ALL} over {INT8_ALL}", "failed")
    label = f"Microseconds on {where}"
    yield el("article", el("h4", "Microseconds"), table(label, headings, map(_times, record.results)))
    yield requirements(judged(record), f"Requirements on the MLP on {where}")
    lines = [
        row([number(one.rows, str(one.rows)), way, *(number(us, microseconds(us)) for us in parts_of(traces))])
        for one in record.results
        for way, traces in one.traces.items()
    ]
    if lines:
        parts = table(f"Parts of a replay on {where}", ("M", "way", *PARTS), lines)
        yield el("article", el("h4", "Where the time goes"), parts, el("p", NOTES))
    yield from drawn(plots(record), name)


def _times(result: RowsResult) -> Element:
    medians = (result.timings[way].median if way in result.timings else None for way in WAYS)
    gains = (result.gain(way) for way in (INT8_ONE, REAL_ALL))
    failed = Cell(result.wrong, None, "bad" if result.wrong else "")
    rows = number(result.rows, str(result.rows))
    return row([rows, *(number(us, microseconds(us)) for us in medians), *map(ratio, gains), failed])
