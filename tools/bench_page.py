"""``skuda bench``: what the command does around a `Bench`, and how a record is shown."""

from __future__ import annotations

import importlib
import math
import os
import shlex
import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
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
from skuda.tools.bench_cases import read_shapes, select_cases
from skuda.tools.bench_cutlass import CAPABILITY, Cutlass
from skuda.tools.bench_host import cuda_calls, host_costs
from skuda.tools.bench_lab import TorchLab
from skuda.tools.bench_record import BenchRecord, CaseResult, HostCost
from skuda.tools.bench_rivals import rivals_of
from skuda.tools.benching import Bench
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


def run(
    *,
    names: Sequence[str] = (),
    shapes: Sequence[str] = (),
    elements: Sequence[str] = (),
    backend: str | None = None,
    seed: int | None = None,
    repeats: int = 20,
    cutlass: Path | None = None,
    output: Path | None = None,
    show: Path | None = None,
    as_json: bool = False,
) -> int:
    """Measure, or show a record of what was measured.

    Parameters
    ----------
    names : sequence of str
        Ops and groups of them; empty for all.
    shapes, elements : sequence of str
        Instead of the ops' own.
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
    as_json : bool
        The record on standard output instead of tables.

    Returns
    -------
    int
        0; 1 where a case was refused, for example for a wrong result, or where there is no CUDA device.

    Raises
    ------
    InvalidProblem
        For a word that nobody knows, and for torch without CUDA.
    MissingDependency
        Where torch is not installed.
    InvalidRecord
        For a file that is no record.
    """
    if show is not None:
        given: dict[str, object] = {"OPS": names, "--shapes": shapes, "--element": elements, "--backend": backend}
        given |= {"--cutlass": cutlass, "--output": output}
        other = next((name for name, value in given.items() if value), None)
        if other is not None:
            raise InvalidProblem("bench", other, "--show beside it", "be left out: --show measures nothing")
        return _tell(BenchRecord.load(show), Dispatcher().registry, as_json=as_json)
    dispatcher = Dispatcher()
    names, elements = split(names), split(elements)
    sizes = read_shapes(split(shapes))
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
    told: dict[str, Sequence[str]] = {"--shapes": split(shapes), "--element": elements}
    told["--backend"] = (backend,) if backend else ()
    told |= {"--seed": (str(seed),), "--repeats": (str(repeats),), "--cutlass": (str(cutlass),) if cutlass else ()}
    command = command_line(names, told)
    host = partial(_host, dispatcher, device, backend)
    with progress() as report:
        record = bench.run(cases, command=command, host=host, progress=report)
    if output is not None:
        record.save(output)
    status = _tell(record, dispatcher.registry, as_json=as_json)
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
    for line in ("x NAME: its time over ours, above 1 where ours is faster", *told, _FLUSHES[record.flush]):
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
_FLUSHES = {
    "clean": "every run finds the L2 cache full of clean lines of something else",
    "dirty": "every run finds the L2 cache full of dirty lines of something else, and pays for writing them back",
}


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


_ROWS = {"M >= 1024": (1024, math.inf), "64 <= M <= 512": (64, 512), "M <= 16": (1, 16)}
"""What the means of a product are taken over: arithmetic bounds the first and memory the last."""


def means(cases: Sequence[CaseResult]) -> dict[str, dict[str, tuple[float, int]]]:
    """Return geometric means of the ratios of products, by rival and by rows, each with how many cases that are.

    Parameters
    ----------
    cases : sequence of CaseResult
        Of one op; what is no product, and what was refused, counts nowhere.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        for rival in case.rivals if len(case.shape) == 3 else ():
            rows = found.setdefault(rival.name, {})
            for name, (low, high) in _ROWS.items():
                if rival.ratio and low <= case.shape[0] <= high:
                    rows.setdefault(name, []).append(rival.ratio)
    return {
        rival: {name: (statistics.geometric_mean(ratios), len(ratios)) for name, ratios in rows.items()}
        for rival, rows in found.items()
        if rows
    }


def _print_means(console: Console, cases: Sequence[CaseResult]) -> None:
    found = means(cases)
    if not found:
        return
    names = [name for name in _ROWS if any(name in rows for rows in found.values())]
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


def choices(cases: Sequence[CaseResult]) -> list[str]:
    """Say which way of a rival was the fastest for which cases: one line for each.

    Parameters
    ----------
    cases : sequence of CaseResult
        Of one op.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for rival in case.rivals:
            if rival.chosen:
                found.setdefault((rival.name, rival.chosen), []).append("x".join(map(str, case.shape)))
    return [f"{name} by {way}: {words(dict.fromkeys(where))}" for (name, way), where in found.items()]


def _by_kernel(cases: list[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    found: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.sku:
            found.setdefault(case.sku, []).append(case)
    return list(found.items())


def refusals(cases: Sequence[CaseResult], absent: Collection[str] = ()) -> list[str]:
    """Say which rivals refused which cases, and why: one line for each reason.

    Parameters
    ----------
    cases : sequence of CaseResult
        Of one op.
    absent : collection of str
        Rivals to leave out: they are named elsewhere.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for rival in case.rivals:
            if rival.refused and rival.name not in absent:
                found.setdefault((rival.name, rival.refused), []).append(
                    f"{'x'.join(map(str, case.shape))} {case.element}"
                )
    return [
        f"{name} refuses {words(where) if len(where) <= 3 else count(len(where), 'case')}: {reason}"
        for (name, reason), where in found.items()
    ]


def rate(case: CaseResult) -> str:
    """Write what a case's time is worth: TOPS of a product of more than 64 rows, else TB/s.

    Parameters
    ----------
    case : CaseResult
        The case.
    """
    if len(case.shape) == 3 and case.shape[0] > _FEW and case.operations_per_second is not None:
        return f"{_figure(case.operations_per_second / 1e12)} TOPS"
    return "" if case.bytes_per_second is None else f"{_figure(case.bytes_per_second / 1e12)} TB/s"


_FEW = 64
"""Rows up to which reading the weight is what a product costs."""


def _figure(value: float) -> str:
    """Write a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"


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
            console.print(indented(f"{name}: {_figure(value / 1e12)} {unit}", 2))
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
