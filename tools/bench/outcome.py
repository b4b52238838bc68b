"""The effect of a tuning on a device, as tables for a terminal, for Markdown and for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher, Tuning
from skuda.dispatch.select.explanation import Measured, Verdict
from skuda.dispatch.select.tuning import Candidate, Entry
from skuda.registry.errors import InvalidProblem
from skuda.registry.registry import Registry
from skuda.tools.bench.markdown import markdown_table
from skuda.tools.output import heading, indented, plain_table, words
from skuda.tools.words.problem import pairs

_SHOWN = 8
"""Candidates of a problem that a terminal shows, besides the refused, the chosen and the first one."""


class Outcome(NamedTuple):
    """The dispatcher's verdict on an entry, and what would run on the tuning's device.

    `picked` is the kernel and its configuration; None if no kernel here serves the problem.
    """

    entry: Entry
    verdict: Verdict
    picked: tuple[str, str] | None


def outcome_of(dispatcher: Dispatcher, tuning: Tuning, entry: Entry) -> Outcome:
    """Return the dispatcher's verdict on an entry; if the entry cannot be used, the verdict gives the reason."""
    device = tuning.environment.device
    op = dispatcher.registry.ops.get(entry.op)
    reason = "the op is not registered here"
    if op is not None:
        try:
            problem = op.descriptor.model_validate(entry.problem)
        except InvalidProblem as error:
            reason = f"the op has changed: {error}"
        else:
            explained = dispatcher.explain(problem, device=device)
            sku = dispatcher.registry.sku(explained.chosen or "")
            if sku is not None and explained.verdict is not None and tuning.entry(problem) is entry:
                choice = explained.choice or next(iter(dispatcher.choices(sku, problem, device)), "")
                return Outcome(entry, explained.verdict, (sku.id, choice))
            reason = "no kernel here serves it" if sku is None else "the op has more fields now"
    times = (
        Measured(sku=c.sku, choice=c.choice, microseconds=c.timing and c.timing.median, against=c.refused or reason)
        for c in entry.candidates
    )
    return Outcome(entry, Verdict(origin="", chosen=False, reason=reason, times=tuple(times)), None)


def rows(result: Outcome) -> Iterator[tuple[object, ...]]:
    """Yield one row per candidate, the fastest first.

    The fields are op, problem, kernel, configuration, median, p10, p90, rounds, state (``chosen`` by its time,
    ``first`` if the ranking stays, else empty), and the reason against it.
    """
    entry, verdict, picked = result
    problem = _printable({name: value for name, value in entry.problem.items() if name != "op"})
    timings = {(c.sku, c.choice): c.timing for c in entry.candidates}
    for measured in verdict.times:
        t = timings[measured.sku, measured.choice]
        times = (t.median, t.p10, t.p90, t.rounds) if t else (None,) * 4
        runs = (measured.sku, measured.choice) == picked
        state = ("chosen" if verdict.chosen else "first") if runs else ""
        yield (entry.op, problem, measured.sku, measured.choice, *times, state, measured.against)


def _printable(fields: dict[str, Any]) -> str:
    """Format fields without control characters, because a file's text must not control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(pairs(fields)))


def tuning_markdown(found: Iterable[Outcome], registry: Registry) -> str:
    """Return a Markdown table of the first candidate of the ranking, the fastest one, and the one that would run."""
    return markdown_table(_HEADINGS, (_markdown_row(outcome, registry) for outcome in found))


_HEADINGS = ("op", "problem", "candidates", "first of the ranking", "us", "fastest", "us", "runs")


def _markdown_row(result: Outcome, registry: Registry) -> tuple[object, ...]:
    entry, verdict, picked = result
    medians = [(c.timing.median, c) for c in entry.candidates if c.timing is not None]
    best = min(medians, key=lambda one: one[0])[1] if medians else entry.candidates[0]
    op = registry.ops.get(entry.op)
    usual = {name: field.default for name, field in op.descriptor.model_fields.items()} if op is not None else {}
    problem = _printable({name: value for name, value in entry.problem.items() if value != usual.get(name)})

    def cells(candidate: Candidate) -> tuple[str, str]:
        us = f"{candidate.timing.median:.1f}" if candidate.timing is not None else "-"
        return _short_name(candidate.sku, candidate.choice), us

    runs = "-" if picked is None else f"{_short_name(*picked)}, {'by time' if verdict.chosen else 'by rank'}"
    return (entry.op, problem, len(entry.candidates), *cells(entry.candidates[0]), *cells(best), runs)


def _short_name(sku: str, choice: str) -> str:
    return " ".join(sku.split(".")[-2:]) + (f": {choice}" if choice else "")


def print_tuning(console: Console, tuning: Tuning, found: Sequence[Outcome]) -> None:
    """Print the environment of a tuning, and the fastest candidates of every problem."""
    where = tuning.environment
    console.print(heading(f"{where.device.describe()}, {where.driver or 'driver unknown'}"))
    versions = [f"{name} {version}" for name, version in {"skuda": where.skuda, **where.versions}.items()]
    console.print(f"{words(versions)}; margin {tuning.margin:g} %", style="dim")
    for result in found:
        console.print()
        candidates = list(rows(result))
        op, problem, *_ = candidates[0]
        console.print(Text.assemble((str(op), "bold cyan"), f" {problem}"), soft_wrap=False)
        how = f", one of {result.entry.layers} launches in a graph" if result.entry.layers > 1 else ""
        console.print(indented(Text(f"{result.entry.date}, seed {result.entry.seed}{how}", style="dim"), 2))
        style = "green" if result.verdict.chosen else ""
        reason = result.verdict.reason
        line = f"chosen by time: {reason}" if result.verdict.chosen else f"the ranking stays: {reason}"
        console.print(indented(Text(line, style=style), 2))
        table = plain_table("us", "p10", "p90", "", "kernel", indent=2)
        for column in table.columns[1:4]:
            column.justify = "right"
        shown = [row for at, row in enumerate(candidates) if at < _SHOWN or row[8] or row[9]]
        for _, _, sku, choice, median, p10, p90, _, state, against in shown:
            kernel = Text(" ".join(str(sku).split(".")[-3:]) + (f": {choice}" if choice else ""))
            if against:
                kernel.append(f"\n{against}", style="yellow")
            times = (f"{us:.1f}" if isinstance(us, float) else "-" for us in (median, p10, p90))
            table.add_row("", *times, Text(str(state), style="green"), kernel)
        console.print(table)
        if len(shown) < len(candidates):
            console.print(indented(Text(f"{len(candidates) - len(shown)} more are slower", style="dim"), 2))
    console.print()
