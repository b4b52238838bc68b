"""Records of ``skuda bench`` as Markdown tables for README and docs; equal records give equal text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from skuda.registry.registry import Registry
from skuda.tools.bench.record import BenchRecord, CaseResult
from skuda.tools.bench.summary import (
    ROWS,
    band_cells,
    cells,
    clocked,
    largest,
    mean_cells,
    per_clock,
    ratio,
    timed_rivals,
)
from skuda.tools.output import refuse, words
from skuda.tools.requirement import HEADINGS, Judged


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; line breaks and bars inside a cell are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(_cell(value) for value in line) + " |\n" for line in lines)


def judged_table(judged: Judged) -> str:
    """Return the requirements on a record as a Markdown table, with the note on what is not judged."""
    table = markdown_table(HEADINGS, (one.cells for one in judged.requirements))
    return f"{table}\n{judged.note[:1].upper()}{judged.note[1:]}.\n" if judged.note else table


def sections(command: str, made: Mapping[str, Callable[[], str]], section: str) -> str:
    """Return one section of a record, or ``all`` that are not empty; raise `InvalidProblem` for an unknown one."""
    if section not in (*made, "all"):
        refuse(command, "--markdown", section, ("all", *made))
    if section in made:
        return made[section]()
    return "\n".join(text for make in made.values() if (text := make()))


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a Markdown list; empty values are left out."""
    return "".join(f"- {what}: {value}\n" for what, value in facts if value)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def bench_markdown(record: BenchRecord, registry: Registry, section: str = "all") -> str:
    """Return a record, or one section of it, as Markdown; a kernel that differs from the registry's is marked stale.

    Parameters
    ----------
    record : BenchRecord
        The record.
    registry : Registry
        The registered kernels.
    section : str
        ``facts`` (device, versions, rivals), ``cases`` (a table for every op), ``means`` (geometric means of products
        by rows), ``bands`` (the same with the lowest ratio of each), ``bandwidth`` (the other ops at their largest
        shapes), ``host`` (the costs of a launch on the host), ``all`` of these but bands, or an op for its table alone.

    Raises
    ------
    InvalidProblem
        For another section.
    """
    ops = {op: list(group) for op, group in groupby(record.cases, key=lambda case: case.op)}
    if section in ops:
        return _cases(ops[section], registry)
    made: dict[str, Callable[[], str]] = {
        "facts": lambda: _facts(record),
        "cases": lambda: "\n".join(f"### {op}\n\n{_cases(cases, registry)}" for op, cases in ops.items()),
        "means": lambda: _means(ops),
        "bands": lambda: _bands(ops),
        "bandwidth": lambda: _bandwidth(record),
        "host": lambda: _host(record),
    }
    if section not in (*made, "all"):
        refuse("bench", "--markdown", section, ("all", *made, *ops))
    if section in made:
        return made[section]()
    return "\n".join(text for name, make in made.items() if name != "bands" and (text := make()))


def _facts(record: BenchRecord) -> str:
    found = record.ceilings
    known = (("copy", found.copy_bandwidth, "TB/s"), ("bf16 product", found.bf16, "TFLOP/s"))
    ceilings = [
        f"{what} {value / 1e12:,.{0 if value >= 1e14 else 2}f} {unit}"
        for what, value, unit in (*known, ("fp8 product", found.fp8, "TFLOP/s"))
        if value is not None
    ]
    ceilings += [f"empty kernel {found.empty:.2f} us"] if found.empty is not None else []
    timed = ((one.name, one.computes, case.op) for case in record.cases for one in case.rivals if one.timing)
    rivals: dict[str, dict[str, dict[str, None]]] = {}
    for name, computes, op in timed:
        rivals.setdefault(name, {}).setdefault(computes, {})[op] = None
    facts = [
        ("command", f"`{record.command}`"),
        ("device", f"{record.device.describe()}, driver {record.driver or 'unknown'}"),
        ("date", record.date),
        ("stale", record.outdated),
        ("rounds", f"{record.repeats} of everything; inputs drawn from seed {record.seed}"),
        ("L2 cache", record.flush),
        ("ceilings", ", ".join(ceilings)),
        ("versions", ", ".join(f"{key} {value}" for key, value in record.versions.items())),
        *(
            # A rival may compute something different for another op.
            (f"x {name}" + (f", {words(plain(op) for op in ops)}" if len(several) > 1 else ""), plain(computes))
            for name, several in rivals.items()
            for computes, ops in several.items()
        ),
        *((f"absent: {name}", plain(reason)) for name, reason in record.absent.items()),
    ]
    return fact_list(facts)


def plain(text: str) -> str:
    """Escape the characters that Markdown reads as emphasis."""
    return text.replace("*", "\\*").replace("_", "\\_")


def _cases(cases: Sequence[CaseResult], registry: Registry) -> str:
    names = timed_rivals(cases)
    clock = ("TOPS/GHz",) if clocked(cases) else ()

    def row(case: CaseResult) -> tuple[str, ...]:
        if case.timing is None:
            return (case.size, case.element, "refused", plain(case.refused), *[""] * (len(names) + len(clock) + 2))
        stale = " (stale)" if case.stale(registry) else ""
        return (
            *cells(case, names),
            *(per_clock(case) for _ in clock),
            f"`{'.'.join(case.sku.split('.')[-2:])}`{stale}",
        )

    headings = ("shape", "element", "us", "rate", "of ceiling", *(f"x {name}" for name in names), *clock, "kernel")
    return markdown_table(headings, map(row, cases))


def _means(ops: dict[str, list[CaseResult]]) -> str:
    found = {op: mean_cells(cases) for op, cases in ops.items()}
    names = [name for name in ROWS if any(name in mine for mine, _ in found.values())]
    rows = [
        (op, rival, *(dict(zip(mine, means, strict=True)).get(name, "-") for name in names))
        for op, (mine, by_rival) in found.items()
        for rival, *means in by_rival
    ]
    return markdown_table(("op", "geometric mean (of)", *names), rows) if rows else ""


def _bands(ops: dict[str, list[CaseResult]]) -> str:
    rows = [(op, *cells) for op, cases in ops.items() for cells in band_cells(cases)]
    return markdown_table(("op", "rival", "products", "geometric mean", "of", "lowest", "at"), rows) if rows else ""


def _bandwidth(record: BenchRecord) -> str:
    """Return one row per op: bandwidth and its share of a copy at the largest shape, and geometric means of rivals."""
    timed = [case for case in record.cases if case.timing and not case.operations]
    cases, elements = largest(timed), sorted({case.element for case in timed})
    names = [name for name in timed_rivals(timed) if name != "copy"]

    def row(op: str, mine: list[CaseResult]) -> tuple[str, ...]:
        speeds = {case.element: ", ".join(cells(case, ())[3:]) for case in mine}
        ratios = [[r.ratio for case in mine for r in case.rivals if r.name == name and r.ratio] for name in names]
        geometric = (ratio(statistics.geometric_mean(found) if found else None) for found in ratios)
        return (f"`{op}`", *(speeds.get(element, "") for element in elements), *geometric)

    by_op = groupby(sorted(cases, key=lambda case: case.op), key=lambda case: case.op)
    rows = [row(op, list(mine)) for op, mine in by_op]
    return markdown_table(("op", *elements, *(f"x {name}" for name in names)), rows) if rows else ""


def _host(record: BenchRecord) -> str:
    rows = [
        (cost.name, f"{cost.timing.median:.2f}", f"{cost.timing.p90:.2f}") if cost.timing else (cost.name, "-", "-")
        for cost in record.host
    ]
    return markdown_table(("call", "median, us", "p90, us"), rows) if rows else ""
