"""``skuda tune``: the problems that it times, and what is shown of a file of times."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from skuda.dispatch import Dispatcher, Tuning
from skuda.dispatch.select.tuning import MARGIN, Candidate, TuningEntry
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, InvalidRecord, Unsupported
from skuda.registry.registry import Registry
from skuda.registry.text import printable
from skuda.tools.bench.lab import HostLab, TorchLab
from skuda.tools.bench.tune import Tuner, environment
from skuda.tools.files import check
from skuda.tools.frame.run import fresh_seed, refuse_beside_show, shown, silent
from skuda.tools.frame.view import Parts, Table
from skuda.tools.options import (
    Backend,
    Element,
    File,
    Json,
    Number,
    Random,
    Repeats,
    Seed,
    Show,
    Words,
    flag,
    number,
    option,
    own_options,
)
from skuda.tools.output import OP_WORDS, chosen, one_of, progress, split, tell, words
from skuda.tools.parse.cases import random_shapes, rank_of, select_cases, select_ops
from skuda.tools.parse.problem import describe, pairs
from skuda.tools.parse.shapes import read_shapes

_SHOWN = 8
"""Candidates of a problem that a report shows, besides the refused ones."""


def run(
    context: typer.Context,
    *,
    shapes: Annotated[Words, option("SHAPE", "These shapes: ROWSxCOLUMNS, or MxNxK for a product.")] = None,
    random: Random = None,
    element: Element = None,
    backend: Backend = None,
    variant: Annotated[Words, option("NAME", "Only kernels of these variants.")] = None,
    output: Annotated[File, option("FILE", "Write the times here.")] = None,
    update: Annotated[bool, flag("--update", help="Add new problems to a file that exists.")] = False,
    margin: Annotated[
        float | None, option("PERCENT", "A kernel must be so much faster than the first one; else 3.")
    ] = None,
    repeats: Repeats = None,
    layers: Annotated[
        Number, number("Launch a kernel so often in a graph, as layers of a model; 1 if left out.", most=99)
    ] = None,
    seed: Seed = None,
    show: Show = None,
    as_json: Json = False,
) -> int:
    """Time every kernel of a problem, in each configuration.

    The problems are shapes of ops, as in `skuda bench`, or one with its fields:
    `skuda tune quantized_linear --m 8 --n 4096 --k 4096`. Results are compared before they are timed; a wrong one is
    refused, and the exit status is 1. Without --output, the times are only printed. A file changes a choice only where
    it is named: by SKUDA_TUNING, or as Dispatcher(tuning=FILE); `skuda explain` says how.
    """
    given = {name: value for name, value in locals().items() if name not in ("context", "show", "as_json")}
    options = {"ops": tuple(context.args)} | {name: value for name, value in given.items() if value is not None}
    if show is not None:
        refuse_beside_show("tune", tune, options)
        return _show(Tuning.load(show), as_json=as_json)
    if update and output is None:
        raise InvalidProblem("tune", "--update", "no file", "stand beside --output FILE, the file to add problems to")
    try:
        found = tune(**options, own_options=own_options(context))
    except Unsupported as error:
        tell(str(error), "red")
        return 1
    _show(found, as_json=as_json)
    use = "nothing was written: --output FILE keeps the times in a file that SKUDA_TUNING can name"
    if output is not None:
        named = f"SKUDA_TUNING={shlex.quote(str(output))} uses it, or Dispatcher(tuning={str(output)!r})"
        use = f"written to {output}; {named}"
    tell(use, "dim")
    refused = [candidate for entry in found.entries for candidate in entry.candidates if candidate.refused]
    for candidate in refused:
        tell(f"refused: {candidate.label}: {candidate.refused}")
    return 1 if refused else 0


def tune(
    ops: Sequence[str] = (),
    output: Path | None = None,
    *,
    update: bool = False,
    own_options: Sequence[str] = (),
    shapes: Sequence[str] = (),
    random: int | None = None,
    element: Sequence[str] = (),
    backend: str | None = None,
    variant: Sequence[str] = (),
    repeats: int = 20,
    layers: int = 1,
    seed: int | None = None,
    margin: float | None = None,
) -> Tuning:
    """Measure, write the file if there is one, and return the new times."""
    if output is not None:
        check("tune", "--output", output)
    # The default tuning is off, because it must not change the ranking to compare with.
    dispatcher = Dispatcher(tuning="")
    registry, device = dispatcher.registry, dispatcher.devices[0]
    one_of("tune", "--backend", backend, registry.backends)
    seed = fresh_seed() if seed is None else seed
    drawn = {"--shapes": split(shapes), "--element": split(element), "--random": random}
    problems = list(dict.fromkeys(_problems(registry, ops, drawn, seed, own_options)))
    variants = frozenset(chosen("tune", "--variant", variant, sorted({sku.variant for sku in registry})))
    fresh = Tuning(environment=environment(device), margin=MARGIN if margin is None else margin)
    before = fresh if output is None else _before(output, fresh, update=update, keep_margin=margin is None)
    lab = TorchLab(device) if device.processor == "cuda" else HostLab(registry)
    with progress() as report:
        tuner = Tuner(dispatcher, device, lab, seed, repeats, backend, variants=variants, layers=layers)
        found = before.model_copy(update={"entries": tuner.run(problems, report or silent)})
    if output is not None:
        before.updated(found).save(output)
    return found


def _problems(
    registry: Registry, ops: Sequence[str], drawn: dict[str, Any], seed: int, own_options: Sequence[str]
) -> list[Descriptor]:
    """Return problems of ops and groups of ops, or one problem of an op from the options behind it."""
    leading = list(takewhile(lambda token: not token.startswith("-"), ops))
    names, rest = split(leading), ops[len(leading) :]
    if not names:
        raise InvalidProblem("tune", "OPS", "nothing", "be named first; `skuda list` names the ops")
    if not rest:
        ranks = {rank_of(registry.ops[op]) for op in select_ops(registry, names, command="tune")}
        sizes = read_shapes(drawn["--shapes"], ranks, command="tune")
        sizes += random_shapes(registry, names, drawn["--random"], seed, command="tune")
        return [case.problem for case in select_cases(registry, names, sizes, drawn["--element"], command="tune")]
    for name, value in drawn.items():
        if value:
            raise InvalidProblem("tune", name, f"{rest[0]} beside it", "be left out where an op's fields are given")
    if len(names) > 1:
        raise InvalidProblem("tune", "OPS", f"{rest[0]} behind {len(names)} of them", "be one where its fields follow")
    one_of("tune", "OPS", names[0], registry.ops, **OP_WORDS)
    problem, assumed = describe(registry.ops[names[0]], rest, own_options)
    for text in pairs(assumed):
        tell(f"assumed {text}", "dim")
    return [problem]


def _before(path: Path, fresh: Tuning, *, update: bool, keep_margin: bool) -> Tuning:
    """Return the tuning to which new problems are added, before anything is measured.

    Raise `InvalidRecord` for an existing file that is not to be updated, or that was made in another environment.
    """
    if not path.exists():
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


def _show(tuning: Tuning, *, as_json: bool) -> int:
    where = tuning.environment
    about = {
        "device": f"{where.device.describe()}, {where.driver or 'driver unknown'}",
        "margin": f"{tuning.margin:g} %",
    }
    about["versions"] = words(f"{name} {version}" for name, version in {"skuda": where.skuda, **where.versions}.items())
    sections: dict[str, Parts] = {"times": (about, *(part for entry in tuning.entries for part in _report(entry)))}
    shown("tune", sections, tuning.model_dump_json(indent=2) + "\n", as_json=as_json)
    return 0


def _ordered(entry: TuningEntry) -> list[Candidate]:
    return sorted(entry.candidates, key=lambda one: one.timing.median if one.timing else float("inf"))


def _problem(entry: TuningEntry) -> str:
    """Format a problem without control characters, because a file's text must not control a terminal."""
    return printable(" ".join(pairs({name: value for name, value in entry.problem.items() if name != "op"})))


def _report(entry: TuningEntry) -> Parts:
    """Return the fastest candidates of a problem, and those that were refused."""
    ordered = _ordered(entry)
    kept = [one for at, one in enumerate(ordered) if at < _SHOWN or one.refused]
    names = [" ".join(one.sku.split(".")[-3:]) + (f": {one.choice}" if one.choice else "") for one in kept]
    timings = [(name, one.timing) for name, one in zip(names, kept, strict=True) if one.timing]
    rows = [(name, *(f"{us:.1f}" for us in (one.median, one.p10, one.p90))) for name, one in timings]
    refused = [f"{name}: {one.refused}" for name, one in zip(names, kept, strict=True) if one.refused]
    how = f", one of {entry.layers} launches in a graph" if entry.layers > 1 else ""
    more = f"{len(ordered) - len(kept)} more are slower; " if len(kept) < len(ordered) else ""
    fields = f"--tuning FILE with the op's fields says what this changes; {entry.date}, seed {entry.seed}{how}"
    title = f"{entry.op} {_problem(entry)}"
    return Table(("kernel", "us", "p10", "p90"), rows, title), *refused, f"{more}`skuda explain {entry.op}` {fields}"
