"""A record of ``skuda bench-model`` as tables for a terminal, and as rows for a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from skuda.tools.bench.model_judged import judged
from skuda.tools.bench.model_record import ModelRecord, PhaseResult
from skuda.tools.output import heading, indented, plain_table
from skuda.tools.requirement import print_judged


def rows(record: ModelRecord) -> Iterator[tuple[object, ...]]:
    """Yield phase, rows, cache, way, median, p10 and p90 in us, ratio, error, rounds, and what went wrong."""
    for phase in record.phases:
        for way in phase.ways:
            timing = way.timing
            times = (timing.median, timing.p10, timing.p90) if timing else (None, None, None)
            rounds = timing.rounds if timing else None
            shape = (phase.phase, phase.rows, phase.cache)
            yield (*shape, way.name, *times, way.ratio, way.error, rounds, way.refused or phase.wrong)
    for cost in record.host:
        times = (cost.timing.median, cost.timing.p10, cost.timing.p90) if cost.timing else (None, None, None)
        yield ("host", None, None, cost.name, *times, None, None, None, cost.refused)


def print_record(console: Console, record: ModelRecord) -> None:
    """Print a record for a person."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in record.sizes.items())
    console.print(heading(f"Llama stack: {sizes}"))
    console.print(indented(Text(record.weights, style="dim"), 2))
    names = list(record.computes)
    table = plain_table("phase", *(f"{name} us" for name in names), "gain", indent=2, numbers=1)
    for phase in record.phases:
        table.add_row("", Text(f"{phase.phase} {phase.rows}", style="cyan"), *_cells(phase))
    table.add_row("", "weights MiB", *(f"{record.bytes[n] / 2**20:.1f}" if n in record.bytes else "" for n in names))
    console.print(table)
    timed = "replays of a CUDA graph" if record.graph else "calls on the CPU, without a graph"
    notes = [
        f"{timed}; times are those of all layers; (NAME: x) is its time over the fastest of ours",
        "gain: the faster of the bf16 ways over the fastest of ours",
        *(f"{name}: {what}" for name, what in record.computes.items()),
    ]
    for line in notes:
        console.print(indented(Text(line, style="dim"), 2))
    warnings = [f"stale: {record.outdated}"] if record.outdated else []
    warnings += [f"{name} is absent: {reason}" for name, reason in record.absent.items()]
    for line in warnings:
        console.print(indented(Text(line, style="yellow"), 2))
    for cost in record.host:
        text = f"{cost.timing.median:.1f} us a call" if cost.timing else cost.refused
        console.print(indented(Text(f"host, {cost.name}: {text}"), 2))
    print_judged(console, judged(record))
    again = f"{record.device.describe()}, driver {record.driver or 'unknown'}, {record.date}; again: {record.command}"
    console.print(again, soft_wrap=True)


def _cells(phase: PhaseResult) -> list[Text]:
    cells = []
    for way in phase.ways:
        if way.timing is None:
            cells.append(Text("wrong" if phase.wrong else "-", style="bold red" if phase.wrong else "dim"))
        else:
            cells.append(Text(f"{way.timing.median:.1f} ({way.ratio:.2f}x)"))
    return [*cells, Text("" if phase.gain is None else f"{phase.gain:.2f}x", style="bold")]
