"""Records of ``skuda bench-parallel`` as Markdown tables for the docs; equal records give equal text."""

from __future__ import annotations

from collections.abc import Iterator

from skuda.tools.bench.markdown import fact_list, judged_table, markdown_table, plain, sections
from skuda.tools.output import count
from skuda.tools.parallel.record import INT8_ALL, INT8_ONE, REAL_ALL, WAYS, ParallelRecord, RowsResult, judged
from skuda.tools.parallel.terminal import PARTS, microseconds, parts_of


def parallel_markdown(record: ParallelRecord, section: str = "all") -> str:
    """Return a record, or one section of it, as Markdown.

    Parameters
    ----------
    record : ParallelRecord
        The record.
    section : str
        ``facts`` (device, versions, what failed), ``times`` (of each way), ``requirements``, ``trace`` (where the time
        goes), ``kernels`` (each of them on the first rank), or ``all`` of these.

    Raises
    ------
    InvalidProblem
        For another section.
    """
    made = {
        "facts": lambda: _facts(record),
        "times": lambda: _times(record),
        "requirements": lambda: judged_table(judged(record)),
        "trace": lambda: _trace(record),
        "kernels": lambda: "\n".join(_kernels(record)),
    }
    return sections("bench-parallel", made, section)


def _facts(record: ParallelRecord) -> str:
    orders = record.orders
    return fact_list(
        (
            ("command", f"`{record.command}`"),
            ("device", f"{orders.count} x {record.device}"),
            ("date", record.date),
            ("stale", record.outdated),
            ("MLP", f"{orders.hidden} x {orders.intermediate}"),
            ("timed", "replays of a CUDA graph" if record.graph else "calls on the CPU"),
            ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
            ("not traced", plain(record.untraced)),
            *((f"failed for {count(one.rows, 'row')}", plain(one.wrong)) for one in record.wrong),
        )
    )


def _times(record: ParallelRecord) -> str:
    """Return the microseconds of each way by rows, and the ratios to ours on all ranks."""
    headings = ("M", *(f"{way}, us" for way in WAYS), f"{INT8_ONE} over {INT8_ALL}", f"{REAL_ALL} over {INT8_ALL}")
    failed = ("failed",) if record.wrong else ()
    return markdown_table((*headings, *failed), (_row(one, len(failed)) for one in record.results))


def _row(result: RowsResult, failed: int) -> tuple[object, ...]:
    times = (f"{result.timings[way].median:.1f}" if way in result.timings else "-" for way in WAYS)
    gains = (result.gain(way) for way in (INT8_ONE, REAL_ALL))
    said = (plain(result.wrong),)[:failed]
    return (result.rows, *times, *("-" if gain is None else f"{gain:.2f}" for gain in gains), *said)


def _trace(record: ParallelRecord) -> str:
    """Return microseconds: the parts of each traced replay on the first rank, and what was timed."""
    found = [(one, way, traces) for one in record.results for way, traces in one.traces.items()]
    rows = (
        (one.rows, way, *map(microseconds, parts_of(traces)), f"{one.timings[way].median:.1f}")
        for one, way, traces in found
    )
    return markdown_table(("M", "way", *PARTS, "timed"), rows) if found else "Nothing was traced.\n"


def _kernels(record: ParallelRecord) -> Iterator[str]:
    for result in record.results:
        for way, (first, *_) in result.traces.items():
            rows = ((f"{k.start:.1f}", f"{k.us:.1f}", k.stream, k.kind, f"`{k.name}`") for k in first.kernels)
            left = f"\nLeft out: {count(first.left_out, 'shorter kernel')}.\n" if first.left_out else ""
            table = markdown_table(("start, us", "us", "stream", "kind", "kernel"), rows)
            yield f"### {count(result.rows, 'row')}, {way}\n\n{table}{left}"
