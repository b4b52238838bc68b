"""A record of ``skuda bench`` as tables for a terminal, and as rows for a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from skuda.registry.registry import Registry
from skuda.tools.bench.record import BenchRecord, CaseResult
from skuda.tools.bench.summary import (
    FLUSHES,
    band_cells,
    cells,
    choices,
    clocked,
    figure,
    mean_cells,
    per_clock,
    refusals,
    timed_rivals,
)
from skuda.tools.output import count, folded, heading, indented, plain_table, words

_WATCHED = ("x cutlass", "x bf16")
"""Rivals whose lowest ratios a terminal shows."""
_WIDE = 100
"""Columns of a terminal from which a table of products has its headings on one line."""


def rows(record: BenchRecord) -> Iterator[tuple[object, ...]]:
    """Yield one row per case and rival: op, shape, element, name, median, p10, p90, best, ratio, kernel or refusal.

    The rows of our kernels end with SM clock and power, if they were read.
    """
    for case in record.cases:
        where = (case.op, case.size, case.element)
        t = case.timing
        ours = (t.median, t.p10, t.p90, t.best, 1.0) if t else (None,) * 5
        clock = () if case.mhz is None else (f"{case.mhz:.0f} MHz", f"{case.watts or 0:.0f} W")
        yield (*where, "skuda", *ours, case.refused or case.sku, *clock)
        for rival in case.rivals:
            r = rival.timing
            theirs = (r.median, r.p10, r.p90, r.best, rival.ratio) if r else (None,) * 5
            chosen = f"{rival.chosen}: " if rival.chosen else ""
            yield (*where, rival.name, *theirs, rival.refused or f"{chosen}{rival.computes}")
    for cost in record.host:
        h = cost.timing
        times = (h.median, h.p10, h.p90, h.best) if h else (None,) * 4
        yield ("host", None, None, cost.name, *times, None, cost.refused)


def print_record(console: Console, record: BenchRecord, registry: Registry) -> None:
    """Print a record's tables; a case whose kernel differs from the registry's is marked."""
    for op, group in groupby(record.cases, key=lambda case: case.op):
        cases = list(group)
        console.print(heading(op))
        _print_cases(console, cases)
        _print_means(console, cases)
        _print_notes(console, record, cases, registry)
    rivals = (rival for case in record.cases for rival in case.rivals if rival.timing)
    computes = dict.fromkeys(f"{rival.name}: {rival.computes}" for rival in rivals)
    for line in ("x NAME: its time over ours, above 1 where ours is faster", *computes, FLUSHES[record.flush]):
        console.print(indented(Text(line, style="dim"), 2))
    if record.outdated:
        console.print(indented(Text(f"stale: {record.outdated}", style="yellow"), 2))
    for name, reason in record.absent.items():
        console.print(indented(Text(f"{name} is absent: {reason}", style="yellow"), 2))
    console.print()
    _print_ceilings(console, record)
    _print_host(console, record)
    seconds = f"{record.seconds:.0f} s" if record.seconds >= 1 else "less than a second"
    console.print(
        f"{count(len(record.cases), 'case')} on {record.device.describe()}, driver {record.driver or 'unknown'}, "
        f"{record.date}, in {seconds}; again: {record.command}",
        soft_wrap=True,
    )


def _print_cases(console: Console, cases: Sequence[CaseResult]) -> None:
    names = timed_rivals(cases)
    # In a narrow terminal the headings are folded first, then the shapes; a number is never broken.
    blank = " " if console.width >= _WIDE else "\n"
    clock = (f"TOPS/{blank.strip(' ')}GHz",) if clocked(cases) else ()
    headings = ("shape", "", "us", "rate", "ceiling", *(f"x{blank}{name}" for name in names), *clock)
    table = plain_table(*headings, indent=2)
    for column in table.columns[2:]:
        column.no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for case in cases:
        shape = Text(case.size, style="cyan")
        if case.timing is None:
            blanks = ("",) * (2 + len(names) + len(clock))
            table.add_row("", shape, case.element, Text("refused", style="bold red"), *blanks)
            continue
        _, element, us, rate, ceiling, *ratios = cells(case, names)
        table.add_row("", shape, element, us, rate, ceiling, *map(_coloured, ratios), *(per_clock(case) for _ in clock))
    console.print(table)


def _print_means(console: Console, cases: Sequence[CaseResult]) -> None:
    names, rows = mean_cells(cases)
    if not rows:
        return
    table = plain_table("geometric mean", *(f"{name} (of)" for name in names), indent=2)
    for column in table.columns[2:]:
        column.justify = "right"
    for rival, *means in rows:
        table.add_row("", rival, *map(_coloured, means))
    console.print(table)
    for rival, band, _, _, lowest, size in band_cells(cases):
        if rival in _WATCHED:
            console.print(indented(Text(f"lowest {rival}, {band}: {lowest} at {size}", style="dim"), 2))


def _coloured(text: str) -> Text:
    """Colour a ratio: green if ours is faster."""
    value, blank, count = text.partition(" ")
    style = "" if not value else "dim" if value == "-" else "green" if float(value) >= 1 else "red"
    return Text(value, style=style).append(blank + count, style="dim")


def _print_notes(console: Console, record: BenchRecord, cases: Sequence[CaseResult], registry: Registry) -> None:
    """Print the kernels that ran, the refusals, and the fastest alternatives of rivals."""
    by_kernel: dict[str, list[CaseResult]] = {}
    for case in cases:
        by_kernel.setdefault(case.sku, []).append(case)
    for sku, group in by_kernel.items():
        if not sku:
            continue
        mark = Text(" stale: the kernel has changed since", style="yellow") if group[0].stale(registry) else Text()
        console.print(indented(Text(folded(sku, console.width - 2), style="dim").append_text(mark), 2))
        entries = dict.fromkeys(step.partition(" ")[0] for case in group for step in case.steps)
        if entries:
            console.print(indented(Text(f"runs {words(entries)}", style="dim"), 4))
    for case in cases:
        if case.refused:
            console.print(indented(Text(f"{case.label}: {case.refused}", style="red"), 2))
    for line in refusals(cases, record.absent):
        console.print(indented(Text(line, style="yellow"), 2))
    for line in choices(cases):
        console.print(indented(Text(line, style="dim"), 2))
    console.print()


def _print_ceilings(console: Console, record: BenchRecord) -> None:
    found = record.ceilings
    known = (
        ("copy, read + write", found.copy_bandwidth, "TB/s"),
        ("bf16 product", found.bf16, "TFLOP/s"),
        ("fp8 product, the rate of int8", found.fp8, "TFLOP/s"),
    )
    console.print(heading("ceilings of this run"))
    for name, value, unit in known:
        if value is not None:
            console.print(indented(f"{name}: {figure(value / 1e12)} {unit}", 2))
    if found.empty is not None:
        console.print(indented(f"empty kernel: {found.empty:.2f} us", 2))
    for note in found.notes:
        console.print(indented(Text(note, style="yellow"), 2))
    console.print()


def _print_host(console: Console, record: BenchRecord) -> None:
    if not record.host:
        return
    console.print(heading("host, one launch of a tiny kernel"))
    table = plain_table("call", "us", "p90", indent=2)
    for cost in record.host:
        if cost.timing is not None:
            table.add_row("", cost.name, f"{cost.timing.median:.2f}", f"{cost.timing.p90:.2f}")
        else:
            table.add_row("", cost.name, Text("-", style="dim"), Text(cost.refused, style="yellow"))
    console.print(table)
    console.print()
