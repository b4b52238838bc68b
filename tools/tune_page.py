"""``skuda tune``: what the command does around a `Tuner`, and how a tuning is shown."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from skuda.dispatch import KNOWN_DEVICES, Device, Dispatcher, Tuning
from skuda.dispatch.explanation import Measured, Verdict
from skuda.dispatch.tuning import MARGIN, Entry
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, InvalidRecord, Unsupported
from skuda.registry.registry import Registry
from skuda.tools.bench_cases import rank_of, select_cases, select_ops
from skuda.tools.bench_lab import Lab, TorchLab
from skuda.tools.explain_page import pairs
from skuda.tools.host_lab import HostLab
from skuda.tools.model_shapes import read_shapes
from skuda.tools.output import (
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
from skuda.tools.problem import describe
from skuda.tools.tuning import Tuner, environment

_SHOWN = 8
"""Candidates of a problem that a page shows, beside those with something to say."""


def run(
    tokens: Sequence[str] = (),
    *,
    shapes: Sequence[str] = (),
    elements: Sequence[str] = (),
    backend: str | None = None,
    output: Path | None = None,
    update: bool = False,
    margin: float | None = None,
    repeats: int = 20,
    seed: int | None = None,
    show: Path | None = None,
    own_options: Sequence[str] = (),
    as_json: bool = False,
) -> int:
    """Measure and write a tuning, or show one.

    Parameters
    ----------
    tokens : sequence of str
        Ops and groups of them; or one op and the options that describe one problem of it.
    shapes, elements : sequence of str
        The problems of the ops; those of ``skuda bench`` where left out.
    backend : str or None
        Only kernels of this backend.
    output : Path or None
        Where the tuning goes; None for a name after the device, in the working directory.
    update : bool
        Whether a file that is there takes the new problems in.
    margin : float or None
        Per cent by which a kernel must be faster than the first of the ranking; None for `MARGIN`, or what the file
        has.
    repeats : int
        Rounds of everything that is not too slow for that.
    seed : int or None
        What inputs are drawn from; None for a fresh one.
    show : Path or None
        A tuning to show; nothing is measured.
    own_options : sequence of str
        Names of the command's own options, to suggest for a misspelt one.
    as_json : bool
        The tuning on standard output instead of tables.

    Returns
    -------
    int
        0; 1 where a kernel was refused, for example for a wrong result, or where none serves a problem.

    Raises
    ------
    InvalidProblem
        For bad input.
    InvalidRecord
        For a file that is no tuning, or that must not be replaced.
    """
    if show is not None:
        given: dict[str, object] = {"OPS": tokens, "--shapes": shapes, "--element": elements, "--backend": backend}
        given |= {"--output": output, "--update": update, "--margin": margin is not None}
        other = next((name for name, value in given.items() if value), None)
        if other is not None:
            raise InvalidProblem("tune", other, "--show beside it", "be left out: --show measures nothing")
        return _tell(Tuning.load(show), None, as_json=as_json)
    # What was tuned before must not change the ranking that is compared with.
    dispatcher = Dispatcher(tuning="")
    if backend is not None and backend not in dispatcher.registry.backends:
        refuse("tune", "--backend", backend, tuple(dispatcher.registry.backends))
    problems = _problems(dispatcher.registry, tokens, split(shapes), split(elements), own_options)
    device = dispatcher.devices[0]
    path = output or Path(f"tuning-{_slug(device)}.json")
    fresh = Tuning(environment=environment(device), margin=MARGIN if margin is None else margin)
    before = _before(path, fresh, update=update, keep_margin=margin is None)
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    lab: Lab = TorchLab(device) if device.processor == "cuda" else HostLab(dispatcher.registry)
    tuner = Tuner(dispatcher, device, lab, seed=seed, repeats=repeats, backend=backend)
    try:
        with progress() as report:
            entries = tuner.run(problems, report)
    except Unsupported as error:
        stderr().print(f"skuda: {error}", style="red", soft_wrap=True)
        return 1
    found = before.model_copy(update={"entries": entries})
    before.updated(found).save(path)
    return _tell(found, path, as_json=as_json)


def _problems(
    registry: Registry,
    tokens: Sequence[str],
    shapes: Sequence[str],
    elements: Sequence[str],
    own_options: Sequence[str],
) -> list[Descriptor]:
    leading = list(takewhile(lambda token: not token.startswith("-"), tokens))
    names, rest = split(leading), tokens[len(leading) :]
    if not names:
        raise InvalidProblem("tune", "OPS", "nothing", "be named first; `skuda list` names the ops")
    if not rest:
        ranks = {rank_of(registry.ops[op]) for op in select_ops(registry, names, command="tune")}
        sizes = read_shapes(shapes, ranks, command="tune")
        return [case.problem for case in select_cases(registry, names, sizes, elements, command="tune")]
    if shapes or elements:
        option = "--shapes" if shapes else "--element"
        raise InvalidProblem("tune", option, f"{rest[0]} beside it", "be left out where an op's fields are given")
    if len(names) > 1:
        raise InvalidProblem("tune", "OPS", f"{rest[0]} behind {len(names)} of them", "be one where its fields follow")
    if names[0] not in registry.ops:
        refuse("tune", "OPS", names[0], registry.ops, kind="a registered op", more="`skuda list` names all")
    problem, assumed = describe(registry.ops[names[0]], rest, own_options)
    for text in pairs(assumed):
        stderr().print(f"skuda: assumed {text}", style="dim", soft_wrap=True)
    return [problem]


def _slug(device: Device) -> str:
    """Return a short name of a device for a file: that under which cards are known here, else its own."""
    known = {card.name: name for name, card in KNOWN_DEVICES.items()}
    name = known.get(device.name, device.name.lower().removeprefix("nvidia "))
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _before(path: Path, fresh: Tuning, *, update: bool, keep_margin: bool) -> Tuning:
    """Return what new problems are added to, before anything is measured.

    Raises
    ------
    InvalidRecord
        For a file that is there and is not to be updated, or was made in another environment.
    """
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise InvalidRecord("tune", "--output", str(path), "be in a folder that is there")
        return fresh
    if not update:
        raise InvalidRecord("tune", "--output", f"{path}, which is there", "be a new file, or stand beside --update")
    before = Tuning.load(path)
    fresh = fresh.model_copy(update={"margin": before.margin}) if keep_margin else fresh
    try:
        return before.updated(fresh)
    except InvalidRecord as error:
        must = f"{error.must}; another --output keeps both"
        raise InvalidRecord(f"tuning {path}", error.field, error.had, must) from error


def _tell(tuning: Tuning, path: Path | None, *, as_json: bool) -> int:
    """Print a tuning, and where it was written to if it is a new one."""
    dispatcher = Dispatcher(tuning=tuning)
    found = [_result(dispatcher, tuning, entry) for entry in tuning.entries]
    if as_json:
        sys.stdout.write(tuning.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        _print(stdout(), tuning, found)
    else:
        records(row for result in found for row in _rows(result))
    if path is None:
        return 0
    use = f"written to {path}; SKUDA_TUNING={shlex.quote(str(path))} uses it, or Dispatcher(tuning={str(path)!r})"
    console = stdout() if stdout().is_terminal and not as_json else stderr()
    console.print(use, style="dim", soft_wrap=True)
    refused = [candidate for entry in tuning.entries for candidate in entry.candidates if candidate.refused]
    for candidate in refused:
        stderr().print(f"skuda: refused: {candidate.label}: {candidate.refused}", style="yellow", soft_wrap=True)
    return 1 if refused else 0


class _Result(NamedTuple):
    """What the dispatcher makes of an entry on such a device.

    Attributes
    ----------
    entry : Entry
        The entry.
    verdict : Verdict
        What comes of its times.
    picked : (str, str) or None
        Kernel and configuration that would run; None where none would.
    """

    entry: Entry
    verdict: Verdict
    picked: tuple[str, str] | None


def _result(dispatcher: Dispatcher, tuning: Tuning, entry: Entry) -> _Result:
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
                return _Result(entry, explained.verdict, (sku.id, choice))
            reason = "no kernel here serves it" if sku is None else "the op has more fields now"
    times = (
        Measured(sku=c.sku, choice=c.choice, microseconds=c.timing and c.timing.median, against=c.refused or reason)
        for c in entry.candidates
    )
    return _Result(entry, Verdict(origin="", chosen=False, reason=reason, times=tuple(times)), None)


def _rows(result: _Result) -> Iterator[tuple[object, ...]]:
    """Give one row per candidate, the fastest first.

    Each is op, problem, kernel, configuration, median, p10, p90, rounds, what it is (``chosen`` by its time, ``first``
    of the ranking where that stays, else nothing), and what speaks against it.
    """
    entry, verdict, picked = result
    fields = " ".join(pairs({name: value for name, value in entry.problem.items() if name != "op"}))
    # Whatever a file says, it does nothing to a terminal.
    problem = "".join(character if character.isprintable() else "?" for character in fields)
    timings = {(c.sku, c.choice): c.timing for c in entry.candidates}
    for measured in verdict.times:
        t = timings[measured.sku, measured.choice]
        times = (t.median, t.p10, t.p90, t.rounds) if t else (None,) * 4
        runs = (measured.sku, measured.choice) == picked
        state = ("chosen" if verdict.chosen else "first") if runs else ""
        yield (entry.op, problem, measured.sku, measured.choice, *times, state, measured.against)


def _print(console: Console, tuning: Tuning, found: Sequence[_Result]) -> None:
    where = tuning.environment
    console.print(heading(f"{where.device.describe()}, {where.driver or 'driver unknown'}"))
    told = [f"{name} {version}" for name, version in {"skuda": where.skuda, **where.versions}.items()]
    console.print(f"{words(told)}; margin {tuning.margin:g} %", style="dim")
    for result in found:
        console.print()
        rows = list(_rows(result))
        op, problem, *_ = rows[0]
        console.print(Text.assemble((str(op), "bold cyan"), f" {problem}"), soft_wrap=False)
        console.print(indented(Text(f"{result.entry.date}, seed {result.entry.seed}", style="dim"), 2))
        style = "green" if result.verdict.chosen else ""
        reason = result.verdict.reason
        line = f"chosen by time: {reason}" if result.verdict.chosen else f"the ranking stays: {reason}"
        console.print(indented(Text(line, style=style), 2))
        table = plain_table("us", "p10", "p90", "", "kernel", indent=2)
        for column in table.columns[1:4]:
            column.justify = "right"
        shown = [row for at, row in enumerate(rows) if at < _SHOWN or row[8] or row[9]]
        for _, _, sku, choice, median, p10, p90, _, state, against in shown:
            kernel = Text(" ".join(str(sku).split(".")[-3:]) + (f": {choice}" if choice else ""))
            if against:
                kernel.append(f"\n{against}", style="yellow")
            times = (f"{us:.1f}" if isinstance(us, float) else "-" for us in (median, p10, p90))
            table.add_row("", *times, Text(str(state), style="green"), kernel)
        console.print(table)
        if len(shown) < len(rows):
            console.print(indented(Text(f"{len(rows) - len(shown)} more are slower", style="dim"), 2))
    console.print()
