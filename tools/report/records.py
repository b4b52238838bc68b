"""Runs of ``skuda verify`` and of ``skuda bench`` on the report page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from xml.etree.ElementTree import Element

from skuda.dispatch.select.tuning import Timing
from skuda.registry.registry import Registry
from skuda.tools.bench.model_record import ModelRecord
from skuda.tools.bench.plot import plots
from skuda.tools.bench.record import BenchRecord, CaseResult, Ceilings, HostCost
from skuda.tools.bench.summary import FLUSHES, ROWS, choices, figure, means, rate, refusals, timed_rivals
from skuda.tools.output import count
from skuda.tools.plot import Plot, drawable, rendered
from skuda.tools.report.kernels import Row
from skuda.tools.report.markup import Cell, Node, drawing, el, facts, number, row, table
from skuda.tools.verify.evidence import EvidenceFile, by_op


def evidence(files: Sequence[EvidenceFile], rows: Iterable[Row]) -> Element:
    """Return the runs of ``skuda verify``, the latest first, with failures and how many `rows` rest on each."""
    resting = [(each.status.device, each.status.date) for each in rows if each.status.word in ("verified", "failed")]
    latest = sorted(files, key=lambda file: file.date, reverse=True)
    parts = [_run(file, resting.count((file.device.name, file.date))) for file in latest]
    if not parts:
        parts = [el("p", "No run is recorded here: ", el("code", "skuda verify"), " makes one.")]
    return el("section", el("h2", "Verified", id="verified"), *parts)


def _run(file: EvidenceFile, current: int) -> Element:
    tried = [sku for sku in file.skus if sku.verdict != "skipped"]
    about = [
        ("driver", file.driver),
        ("versions", versions(file.versions)),
        ("seed", str(file.seed) + (", quick" if file.quick else "")),
        ("result", f"{count(len(tried), 'kernel')} run, {len(file.failed)} failed"),
        ("today", f"{current} of the kernels above rest on it"),
    ]
    lines = (
        row([el("code", c.op), *(number(n, f"{n:,}") for n in (c.verified, c.failed, c.skipped, c.cases, c.outputs))])
        for c in by_op(file.skus)
    )
    headings = ("op", "verified", "failed", "skipped", "cases", "outputs compared")
    label = f"{when(file)}, by op"
    failures = [
        row([el("code", sku.sku), sku.first_failure.describe() if sku.first_failure else sku.note])
        for sku in file.failed
    ]
    return el(
        "article",
        el("h3", when(file)),
        facts(about),
        table(f"Failures on {when(file)}", ("kernel", "first failure"), failures) if failures else None,
        el("details", el("summary", "By op"), table(label, headings, lines)),
    )


def when(run: EvidenceFile | BenchRecord | ModelRecord) -> str:
    """Return where and when a run was made."""
    return f"{run.device.describe()}, {run.date[:16].replace('T', ' ')} UTC"


def versions(found: dict[str, str]) -> str:
    """Return versions by name as a line."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def bench(record: BenchRecord, registry: Registry, name: str) -> Iterator[Element]:
    """Yield a run of ``skuda bench``: its tables and its plots; a case whose kernel has changed since is marked."""
    about: list[tuple[str, Node]] = [
        ("driver", record.driver),
        ("versions", versions(record.versions)),
        ("command", el("code", record.command)),
        ("stale", record.outdated),
        ("ceilings", _ceilings(record.ceilings)),
        ("cache", FLUSHES[record.flush]),
        *((f"{rival} is absent", reason) for rival, reason in record.absent.items()),
    ]
    yield el("article", el("h3", when(record)), facts(about))
    for op, group in groupby(record.cases, key=lambda case: case.op):
        yield _op(op, list(group), record, registry)
    yield from hosts("What a launch of a tiny kernel costs the host", record.host)
    yield from drawn(plots(record), name)


def hosts(label: str, costs: Sequence[HostCost]) -> Iterator[Element]:
    """Yield the table of costs on the host, if there are any."""
    if costs:
        lines = (row([cost.name, *_host(cost.timing), cost.refused]) for cost in costs)
        yield el("article", el("h4", label), table(label, ("way", "us", "p90", "note"), lines))


def drawn(found: Sequence[Plot], name: str) -> Iterator[Element]:
    """Yield plots, or how to get them where matplotlib is not installed; `name` is unique on the page."""
    if not drawable():
        yield el("p", "Plots need matplotlib: ", el("code", "pip install 'matplotlib>=3.8'"))
        return
    for at, plot in enumerate(found):
        yield drawing(rendered([plot], "svg", inline=True), f"{name}-{at}", plot.title)


def _host(timing: Timing | None) -> tuple[Cell, Cell]:
    median, p90 = (timing.median, timing.p90) if timing else (None, None)
    return number(median, f"{median or 0:.2f}"), number(p90, f"{p90 or 0:.2f}")


def _ceilings(found: Ceilings) -> str:
    known = (
        ("copy", found.copy_bandwidth, "TB/s"),
        ("bf16 product", found.bf16, "TFLOP/s"),
        ("fp8 product", found.fp8, "TFLOP/s"),
    )
    rates = [f"{name} {figure(value / 1e12)} {unit}" for name, value, unit in known if value is not None]
    return "; ".join((*rates, *found.notes))


def _op(op: str, cases: list[CaseResult], record: BenchRecord, registry: Registry) -> Element:
    names = timed_rivals(cases)
    computes = dict.fromkeys(
        f"x {rival.name}: {rival.computes}" for case in cases for rival in case.rivals if rival.timing
    )
    headings = ("shape", "element", "us", "p10 to p90", "rate", "of ceiling", *(f"x {n}" for n in names), "kernel")
    lines = (_case(case, names, registry) for case in cases)
    notes = [*computes, *refusals(cases, record.absent), *choices(cases)]
    return el(
        "article",
        el("h4", el("code", op)),
        table(f"{op} on {record.device.name}", headings, lines),
        _means(op, cases),
        el(
            "details",
            el("summary", "What x means, who refused what"),
            el("p", "x NAME is its time over ours: above 1 where ours is faster."),
            el("ul", *(el("li", note) for note in notes)),
        ),
    )


def _case(case: CaseResult, names: Sequence[str], registry: Registry) -> Element:
    shape = Cell(case.size, " ".join(f"{size:09}" for size in case.shape))
    if case.timing is None:
        return row([shape, case.element, *("",) * (4 + len(names)), Cell(f"refused: {case.refused}", None, "bad")])
    t = case.timing
    ratios = {rival.name: rival.ratio for rival in case.rivals}
    worth = case.operations_per_second or case.bytes_per_second
    mark = el("span", "~ stale: changed since", class_="badge stale") if case.stale(registry) else None
    return row(
        [
            shape,
            case.element,
            number(t.median, f"{t.median:.1f}"),
            number(t.p10, f"{t.p10:.1f} to {t.p90:.1f}"),
            number(worth, rate(case)),
            number(case.ceiling_share, f"{case.ceiling_share or 0:.0%}"),
            *(ratio(ratios.get(name)) for name in names),
            Cell(el("span", el("code", " ".join(case.sku.split(".")[-3:]), title=case.sku), mark), case.sku),
        ]
    )


def ratio(value: float | None) -> Cell:
    """Return a cell of a time over ours."""
    return number(value, f"{value or 0:.2f}", "good" if (value or 0) >= 1 else "bad")


def _means(op: str, cases: Sequence[CaseResult]) -> Element | None:
    found = means(cases)
    if not found:
        return None
    names = [name for name in ROWS if any(name in rows for rows in found.values())]
    lines = (
        row([f"x {rival}", *(ratio(rows[name][0] if name in rows else None) for name in names)])
        for rival, rows in found.items()
    )
    return table(f"Geometric means of {op}", ("geometric mean", *names), lines)
