"""The implementation of ``skuda tune``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from rich.console import Console

from skuda.dispatch import KNOWN_DEVICES, Device, Dispatcher, Tuning
from skuda.dispatch.select.tuning import MARGIN, Entry
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, InvalidRecord, Unsupported
from skuda.registry.registry import Registry
from skuda.tools.bench.lab import HostLab, TorchLab
from skuda.tools.bench.outcome import outcome_of, print_tuning, rows, tuning_markdown
from skuda.tools.bench.tuner import Tuner, environment
from skuda.tools.files import check
from skuda.tools.output import chosen, progress, records, refuse, split, stderr, stdout
from skuda.tools.words.cases import random_shapes, rank_of, select_cases, select_ops
from skuda.tools.words.problem import describe, pairs
from skuda.tools.words.shapes import read_shapes


@dataclass(frozen=True)
class Request:
    """The options of ``skuda tune``; `skuda tune --help` explains each.

    `tokens` are ops and groups of ops, or one op and the options that describe one problem of it; `own_options` are the
    names of the command's own options, suggested for a misspelt one.
    """

    tokens: Sequence[str] = ()
    shapes: Sequence[str] = ()
    random: int | None = None
    elements: Sequence[str] = ()
    backend: str | None = None
    variants: Sequence[str] = ()
    repeats: int = 20
    layers: int = 1
    seed: int | None = None
    margin: float | None = None
    own_options: Sequence[str] = ()


def run(
    request: Request,
    *,
    output: Path | None = None,
    update: bool = False,
    show: Path | None = None,
    markdown: bool = False,
    as_json: bool = False,
) -> int:
    """Measure and write a tuning, or show one.

    Parameters
    ----------
    request : Request
        The problems to measure and how.
    output : Path or None
        The file to write; None for a name after the device, in the working directory.
    update : bool
        Whether to add the new problems to an existing file.
    show : Path or None
        A tuning to show; nothing is measured.
    markdown, as_json : bool
        Whether to print a Markdown table, or JSON, instead of tables.

    Returns
    -------
    int
        0; 1 if a kernel was refused, for example for a wrong result, or if no kernel serves a problem.

    Raises
    ------
    InvalidProblem
        For bad input.
    InvalidRecord
        For a file that is not a tuning, or that must not be replaced.
    """
    if show is not None:
        given: dict[str, object] = {"OPS": request.tokens, "--shapes": request.shapes, "--element": request.elements}
        given |= {"--random": request.random, "--variant": request.variants}
        given |= {"--backend": request.backend, "--output": output, "--update": update}
        given |= {"--margin": request.margin is not None, "--layers": request.layers > 1}
        other = next((name for name, value in given.items() if value), None)
        if other is not None:
            raise InvalidProblem("tune", other, "--show beside it", "be left out: --show measures nothing")
        _print(Tuning.load(show), markdown=markdown, as_json=as_json)
        return 0
    # The default tuning is off, because it must not change the ranking to compare with.
    dispatcher = Dispatcher(tuning="")
    if request.backend is not None and request.backend not in dispatcher.registry.backends:
        refuse("tune", "--backend", request.backend, tuple(dispatcher.registry.backends))
    seed = int.from_bytes(os.urandom(4), "little") if request.seed is None else request.seed
    request = replace(request, seed=seed, variants=split(request.variants))
    problems = list(dict.fromkeys(_problems(dispatcher.registry, request)))
    known = sorted({sku.variant for sku in dispatcher.registry})
    chosen("tune", "--variant", request.variants, known)
    device = dispatcher.devices[0]
    path = output or Path(f"tuning-{_slug(device)}.json")
    margin = MARGIN if request.margin is None else request.margin
    fresh = Tuning(environment=environment(device), margin=margin)
    before = _before(path, fresh, update=update, keep_margin=request.margin is None)
    try:
        entries = _measured(dispatcher, device, request, problems) if problems else ()
    except Unsupported as error:
        stderr().print(f"skuda: {error}", style="red", soft_wrap=True)
        return 1
    found = before.model_copy(update={"entries": entries})
    before.updated(found).save(path)
    _print(found, markdown=markdown, as_json=as_json)
    return _tell_use(found, path, stdout() if stdout().is_terminal and not as_json else stderr())


def _measured(
    dispatcher: Dispatcher, device: Device, request: Request, problems: Sequence[Descriptor]
) -> tuple[Entry, ...]:
    lab = TorchLab(device) if device.processor == "cuda" else HostLab(dispatcher.registry)
    tuner = Tuner(
        dispatcher,
        device,
        lab,
        seed=request.seed or 0,
        repeats=request.repeats,
        layers=request.layers,
        backend=request.backend,
        variants=frozenset(request.variants),
    )
    with progress() as report:
        return tuner.run(problems, report)


def _problems(registry: Registry, request: Request) -> list[Descriptor]:
    tokens, shapes, elements = request.tokens, split(request.shapes), split(request.elements)
    leading = list(takewhile(lambda token: not token.startswith("-"), tokens))
    names, rest = split(leading), tokens[len(leading) :]
    if not names:
        raise InvalidProblem("tune", "OPS", "nothing", "be named first; `skuda list` names the ops")
    if not rest:
        ranks = {rank_of(registry.ops[op]) for op in select_ops(registry, names, command="tune")}
        sizes = read_shapes(shapes, ranks, command="tune")
        sizes += random_shapes(registry, names, request.random, request.seed or 0, command="tune")
        return [case.problem for case in select_cases(registry, names, sizes, elements, command="tune")]
    if shapes or elements or request.random:
        option = "--shapes" if shapes else "--element" if elements else "--random"
        raise InvalidProblem("tune", option, f"{rest[0]} beside it", "be left out where an op's fields are given")
    if len(names) > 1:
        raise InvalidProblem("tune", "OPS", f"{rest[0]} behind {len(names)} of them", "be one where its fields follow")
    if names[0] not in registry.ops:
        refuse("tune", "OPS", names[0], registry.ops, kind="a registered op", more="`skuda list` names all")
    problem, assumed = describe(registry.ops[names[0]], rest, request.own_options)
    for text in pairs(assumed):
        stderr().print(f"skuda: assumed {text}", style="dim", soft_wrap=True)
    return [problem]


def _slug(device: Device) -> str:
    """Return a device's short name for a file name: its known name, or its own one in lower case."""
    known = {card.name: name for name, card in KNOWN_DEVICES.items()}
    name = known.get(device.name, device.name.lower().removeprefix("nvidia "))
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _before(path: Path, fresh: Tuning, *, update: bool, keep_margin: bool) -> Tuning:
    """Return the tuning to which new problems are added, before anything is measured.

    Raise `InvalidRecord` for an existing file that is not to be updated, or that was made in another environment.
    """
    check("tune", "--output", path)
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


def _print(tuning: Tuning, *, markdown: bool, as_json: bool) -> None:
    dispatcher = Dispatcher(tuning=tuning)
    found = [outcome_of(dispatcher, tuning, entry) for entry in tuning.entries]
    if markdown:
        sys.stdout.write(tuning_markdown(found, dispatcher.registry))
    elif as_json:
        sys.stdout.write(tuning.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        print_tuning(stdout(), tuning, found)
    else:
        records(row for outcome in found for row in rows(outcome))


def _tell_use(tuning: Tuning, path: Path, console: Console) -> int:
    """Print how to use the file and which kernels were refused; return the exit status, 1 if there are any."""
    use = f"written to {path}; SKUDA_TUNING={shlex.quote(str(path))} uses it, or Dispatcher(tuning={str(path)!r})"
    console.print(use, style="dim", soft_wrap=True)
    refused = [candidate for entry in tuning.entries for candidate in entry.candidates if candidate.refused]
    for candidate in refused:
        stderr().print(f"skuda: refused: {candidate.label}: {candidate.refused}", style="yellow", soft_wrap=True)
    return 1 if refused else 0
