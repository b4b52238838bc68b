"""``skuda bench``: what the command does around a `Bench`, and how a record is shown."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.dispatch.device import Device
from skuda.registry.errors import InvalidProblem
from skuda.registry.registry import Registry
from skuda.tools import bench_plot
from skuda.tools.bench_cases import rank_of, select_cases, select_ops
from skuda.tools.bench_cutlass import CAPABILITY, Cutlass
from skuda.tools.bench_host import cuda_calls, host_costs
from skuda.tools.bench_lab import TorchLab
from skuda.tools.bench_record import BenchRecord, CaseResult, HostCost
from skuda.tools.bench_rivals import rivals_of
from skuda.tools.bench_summary import FLUSHES, ROWS, choices, figure, means, rate, refusals
from skuda.tools.benching import Bench
from skuda.tools.evidence import load_records
from skuda.tools.model_shapes import read_rows, read_shapes
from skuda.tools.output import (
    count,
    folded,
    heading,
    indented,
    plain_table,
    progress,
    records,
    refuse,
    split,
    stderr,
    stdout,
    words,
)
from skuda.tools.report.page import check as check_html
from skuda.tools.report.page import save as save_html


def run(
    *,
    names: Sequence[str] = (),
    shapes: Sequence[str] = (),
    m: Sequence[str] = (),
    elements: Sequence[str] = (),
    backend: str | None = None,
    seed: int | None = None,
    repeats: int = 20,
    cutlass: Path | None = None,
    output: Path | None = None,
    show: Path | None = None,
    plot: Path | None = None,
    html: Path | None = None,
    as_json: bool = False,
) -> int:
    """Measure, or show a record of what was measured.

    Parameters
    ----------
    names : sequence of str
        Ops and groups of them; empty for all.
    shapes, elements : sequence of str
        Instead of the ops' own; see `skuda.tools.model_shapes.read_shapes`.
    m : sequence of str
        Numbers of rows at which the shapes of models are taken.
    backend : str or None
        The backend to insist on.
    seed : int or None
        What inputs are drawn from; None for a fresh one.
    repeats : int
        Rounds of everything that is not too slow for that.
    cutlass : Path or None
        A folder of objects that ``tools/cutlass/build.sh`` built; None leaves CUTLASS out.
    output : Path or None
        Where the record goes.
    show : Path or None
        A record to show; nothing is measured.
    plot : Path or None
        Where its plots go; see `skuda.tools.bench_plot.save`.
    html : Path or None
        Where the report page goes.
    as_json : bool
        The record on standard output instead of tables.

    Returns
    -------
    int
        0; 1 where a case was refused, for example for a wrong result, or where there is no CUDA device.

    Raises
    ------
    InvalidProblem
        For a word that nobody knows, a file that cannot be written, and for torch without CUDA.
    MissingDependency
        Where torch, or matplotlib for plots, is not installed.
    InvalidRecord
        For a file that is no record.
    """
    if plot is not None:
        bench_plot.check(plot)
    if html is not None:
        check_html("bench", html)
    if show is not None:
        given: dict[str, object] = {"OPS": names, "--shapes": shapes, "--m": m, "--element": elements}
        given |= {"--backend": backend, "--cutlass": cutlass, "--output": output}
        other = next((name for name, value in given.items() if value), None)
        if other is not None:
            raise InvalidProblem("bench", other, "--show beside it", "be left out: --show measures nothing")
        record, registry = BenchRecord.load(show), Dispatcher().registry
        status = _tell(record, registry, as_json=as_json)
        _draw(record, registry, plot, html)
        return status
    dispatcher = Dispatcher()
    names, shapes, elements = split(names), split(shapes), split(elements)
    ranks = {rank_of(dispatcher.registry.ops[op]) for op in select_ops(dispatcher.registry, names)}
    sizes = read_shapes(shapes, ranks, read_rows(split(m)))
    cases = select_cases(dispatcher.registry, names, sizes, elements)
    if backend is not None and backend not in dispatcher.registry.backends:
        refuse("bench", "--backend", backend, tuple(dispatcher.registry.backends))
    products = Cutlass.load(cutlass) if cutlass is not None else ""
    device = next((found for found in dispatcher.devices if found.processor == "cuda"), None)
    if device is None:
        line = "a bench needs a CUDA device, and none is here: `skuda doctor` says what is missing"
        stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)
        return 1
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    rivals = partial(rivals_of, cutlass=_able(products, device))
    bench = Bench(dispatcher, device, TorchLab(device), seed=seed, repeats=repeats, backend=backend, rivals=rivals)
    told: dict[str, Sequence[str]] = {"--shapes": shapes, "--m": split(m), "--element": elements}
    told["--backend"] = (backend,) if backend else ()
    told |= {"--seed": (str(seed),), "--repeats": (str(repeats),), "--cutlass": (str(cutlass),) if cutlass else ()}
    command = command_line(names, told)
    host = partial(_host, dispatcher, device, backend)
    with progress() as report:
        record = bench.run(cases, command=command, host=host, progress=report)
    if output is not None:
        record.save(output)
    status = _tell(record, dispatcher.registry, as_json=as_json)
    _draw(record, dispatcher.registry, plot, html)
    if stdout().is_terminal and not as_json:
        line = f"recorded in {output}" if output else "not recorded: --output FILE does that"
        stdout().print(line, style="dim", soft_wrap=True)
    return status


def _able(products: Cutlass | str, device: Device) -> Cutlass | str:
    """Return CUTLASS, or why the device cannot run it."""
    if isinstance(products, Cutlass) and device.compute_capability != CAPABILITY:
        has = ".".join(map(str, device.compute_capability or ("unknown",)))
        return f"its objects run on compute capability 9.0 only, and the device's is {has}"
    return products


def _host(dispatcher: Dispatcher, device: Device, backend: str | None) -> tuple[HostCost, ...]:
    torch: Any = importlib.import_module("torch")
    return host_costs(cuda_calls(dispatcher, device, backend), torch.cuda.synchronize)


def command_line(names: Sequence[str], options: dict[str, Sequence[str]]) -> str:
    """Return the command that does a run again.

    Parameters
    ----------
    names : sequence of str
        Ops and groups.
    options : dict
        Values by option; those without any are left out.
    """
    given = [part for name, values in options.items() if values for part in (name, ",".join(values))]
    return shlex.join(["skuda", "bench", *names, *given])


def _tell(record: BenchRecord, registry: Registry, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        print_record(stdout(), record, registry)
    else:
        records(rows(record))
    return 1 if record.refused else 0


def _draw(record: BenchRecord, registry: Registry, plot: Path | None, html: Path | None) -> None:
    """Write what was asked for of plots and page, and say where they are."""
    made = bench_plot.save(record, plot) if plot is not None else []
    if html is not None:
        save_html("bench", html, registry, load_records(), (record,))
        made.append(html)
    for path in made:
        stderr().print(f"wrote {path}", style="dim", soft_wrap=True)


def rows(record: BenchRecord) -> Iterator[tuple[object, ...]]:
    """Give one row per case and rival: op, shape, element, who, median, p10, p90, best, ratio, kernel or refusal.

    Parameters
    ----------
    record : BenchRecord
        The record.
    """
    for case in record.cases:
        where = (case.op, "x".join(map(str, case.shape)), case.element)
        t = case.timing
        ours = (t.median, t.p10, t.p90, t.best, 1.0) if t else (None,) * 5
        yield (*where, "skuda", *ours, case.refused or case.sku)
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
    """Print a record's tables.

    Parameters
    ----------
    console : Console
        Where to.
    record : BenchRecord
        The record.
    registry : Registry
        What is registered today: a case whose kernel has changed since is marked.
    """
    for op, group in groupby(record.cases, key=lambda case: case.op):
        _print_op(console, record, op, list(group), registry)
    rivals = (rival for case in record.cases for rival in case.rivals if rival.timing)
    told = dict.fromkeys(f"{rival.name}: {rival.computes}" for rival in rivals)
    for line in ("x NAME: its time over ours, above 1 where ours is faster", *told, FLUSHES[record.flush]):
        console.print(indented(Text(line, style="dim"), 2))
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


_WIDE = 100
"""Columns of a terminal from which on a table of products has its headings in one line."""


def _print_op(console: Console, record: BenchRecord, op: str, cases: list[CaseResult], registry: Registry) -> None:
    console.print(heading(op))
    timed = {rival.name for case in cases for rival in case.rivals if rival.timing}
    names = [name for name in dict.fromkeys(rival.name for case in cases for rival in case.rivals) if name in timed]
    # What is short of width folds its headings, and then its shapes; a figure stays whole.
    blank = " " if console.width >= _WIDE else "\n"
    table = plain_table("shape", "", "us", "rate", "ceiling", *(f"x{blank}{name}" for name in names), indent=2)
    for column in table.columns[2:]:
        column.no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for case in cases:
        shape = Text("x".join(map(str, case.shape)), style="cyan")
        if case.timing is None:
            table.add_row("", shape, case.element, Text("refused", style="bold red"), *("",) * (2 + len(names)))
            continue
        ratios = {rival.name: rival.ratio for rival in case.rivals}
        ceiling = "" if case.ceiling_share is None else f"{case.ceiling_share:.0%}"
        cells = (_ratio(ratios.get(name)) for name in names)
        us = case.timing.median
        table.add_row("", shape, case.element, f"{us:.{int(us < 1000)}f}", rate(case), ceiling, *cells)
    console.print(table)
    _print_means(console, cases)
    _print_notes(console, record, cases, registry)


def _print_notes(console: Console, record: BenchRecord, cases: list[CaseResult], registry: Registry) -> None:
    """Say what ran, what was refused, and which ways rivals took."""
    for sku, group in _by_kernel(cases):
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


def _print_means(console: Console, cases: Sequence[CaseResult]) -> None:
    found = means(cases)
    if not found:
        return
    names = [name for name in ROWS if any(name in rows for rows in found.values())]
    table = plain_table("geometric mean", *(f"{name} (of)" for name in names), indent=2)
    for column in table.columns[2:]:
        column.justify = "right"
    for rival, rows in found.items():
        cells = (_mean(rows.get(name)) for name in names)
        table.add_row("", f"x {rival}", *cells)
    console.print(table)


def _mean(found: tuple[float, int] | None) -> Text:
    if found is None:
        return _ratio(None)
    mean, cases = found
    return _ratio(mean).append(f" ({cases})", style="dim")


def _by_kernel(cases: list[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    found: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.sku:
            found.setdefault(case.sku, []).append(case)
    return list(found.items())


def _ratio(value: float | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(f"{value:.2f}" if value < 100 else f"{value:.0f}", style="green" if value >= 1 else "red")


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
    for note in found.notes:
        console.print(indented(Text(note, style="yellow"), 2))
    console.print()


def _print_host(console: Console, record: BenchRecord) -> None:
    if not record.host:
        return
    console.print(heading("host, one launch of a tiny kernel"))
    table = plain_table("way", "us", "p90", indent=2)
    for cost in record.host:
        if cost.timing is not None:
            table.add_row("", cost.name, f"{cost.timing.median:.2f}", f"{cost.timing.p90:.2f}")
        else:
            table.add_row("", cost.name, Text("-", style="dim"), Text(cost.refused, style="yellow"))
    console.print(table)
    console.print()
