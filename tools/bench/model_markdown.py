"""Records of ``skuda bench-model`` as Markdown tables for the docs; equal records give equal text."""

from __future__ import annotations

from skuda.tools.bench.markdown import fact_list, judged_table, markdown_table, plain, sections
from skuda.tools.bench.model_judged import judged
from skuda.tools.bench.model_record import ModelRecord


def model_markdown(record: ModelRecord, section: str = "all") -> str:
    """Return a record, or one section of it, as Markdown.

    Parameters
    ----------
    record : ModelRecord
        The record.
    section : str
        ``facts`` (device, versions, ways), ``phases`` (the times), ``requirements``, ``host`` (the cost of a call), or
        ``all`` of these.

    Raises
    ------
    InvalidProblem
        For another section.
    """
    made = {
        "facts": lambda: _facts(record),
        "phases": lambda: _phases(record),
        "requirements": lambda: judged_table(judged(record)),
        "host": lambda: _host(record),
    }
    return sections("bench-model", made, section)


def _facts(record: ModelRecord) -> str:
    return fact_list(
        (
            ("command", f"`{record.command}`"),
            ("device", f"{record.device.describe()}, driver {record.driver or 'unknown'}"),
            ("date", record.date),
            ("stale", record.outdated),
            ("stack", ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in record.sizes.items())),
            ("weights", record.weights),
            ("timed", "replays of a CUDA graph" if record.graph else "calls on the CPU"),
            ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
            *((name, plain(what)) for name, what in record.computes.items()),
            *((f"absent: {name}", plain(reason)) for name, reason in record.absent.items()),
        )
    )


def _phases(record: ModelRecord) -> str:
    """Return the microseconds of a block by phase and way, with the ratio to the fastest of ours, and the gain."""
    names, layers = list(record.computes), record.sizes["layers"]
    rows = []
    for phase in record.phases:
        ways = {way.name: way for way in phase.ways}
        cells = [
            f"{way.timing.median / layers:.1f} ({way.ratio:.2f})"
            if way and way.timing
            else "wrong"
            if phase.wrong
            else "-"
            for way in map(ways.get, names)
        ]
        rows.append((phase.phase, phase.rows, *cells, "-" if phase.gain is None else f"{phase.gain:.2f}"))
    return markdown_table(("phase", "M", *(f"{name}, us a block (x ours)" for name in names), "gain"), rows)


def _host(record: ModelRecord) -> str:
    rows = [
        (cost.name, f"{cost.timing.median:.2f}", f"{cost.timing.p90:.2f}") if cost.timing else (cost.name, "-", "-")
        for cost in record.host
    ]
    return markdown_table(("call", "median, us", "p90, us"), rows) if rows else ""
