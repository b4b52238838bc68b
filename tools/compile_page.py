"""``skuda compile``: the cubin cache filled ahead of time, for cards that need not be here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from skuda.dispatch import KNOWN_DEVICES, Device, Dispatcher, PlanPreference, Tuning, device_named
from skuda.dispatch.backends.base import Backend
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import CompileError, InvalidProblem, InvalidRecord
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.cubins import Outcome, State, build_cubins, cubins_of
from skuda.tools.explain_page import pairs
from skuda.tools.output import (
    count,
    folded,
    indented,
    nearest,
    plain_table,
    print_json,
    progress,
    records,
    refuse,
    split,
    stderr,
    stdout,
    words,
)
from skuda.tools.problem import describe
from skuda.tools.problem_list import read_problems

_FAILURES_SHOWN = 10
_STATES: tuple[State, ...] = ("compiled", "cached", "failed")
_CARDS = {name: device for name, device in KNOWN_DEVICES.items() if device.processor == "cuda"}


@dataclass(frozen=True)
class Request:
    """What the command line asks for, as typed.

    Attributes
    ----------
    command : str
        Who asks, for messages.
    tokens : sequence of str
        Options that describe one problem of one op.
    descriptors : Path or None
        A list of problems instead; without either, all cases of the ops.
    ops : sequence of str
        Only these; empty for all.
    archs, devices : sequence of str
        For all known cards of these architectures, or for these cards; both empty for the CUDA devices here.
    backends : sequence of str
        For these, ``all`` among them; empty for those that have a compiler here.
    own_options : sequence of str
        Names of the command's own options, to suggest for a misspelt one.
    """

    command: str
    tokens: Sequence[str] = ()
    descriptors: Path | None = None
    ops: Sequence[str] = ()
    archs: Sequence[str] = ()
    devices: Sequence[str] = ()
    backends: Sequence[str] = ()
    own_options: Sequence[str] = ()

    def refuse(self, what: str, had: str, known: Iterable[str], **more: str) -> NoReturn:
        """Refuse a word that is not known; see `output.refuse`."""
        refuse(self.command, what, had, known, **more)


def run(request: Request, *, as_json: bool = False) -> int:
    """Compile what cards would look for at run time, and print what came of it.

    Parameters
    ----------
    request : Request
        What is asked for.
    as_json : bool
        Every cubin, on standard output.

    Returns
    -------
    int
        0; 1 where a cubin failed, or where nothing fits.

    Raises
    ------
    InvalidProblem
        For a word that nobody knows.
    CompileError
        Without a compiler, or where the cache cannot be written.
    """
    found = compiled(request)
    if not found:
        return 1
    print_outcomes(found, as_json=as_json)
    return 1 if any(outcome.state == "failed" for outcome in found) else 0


def compiled(request: Request) -> list[Outcome]:
    """Compile what is asked for, showing how far it is; empty, and told, where nothing fits.

    Raises
    ------
    InvalidProblem, CompileError
        As `run`.
    """
    dispatcher = Dispatcher()
    registry = dispatcher.registry
    names = split(request.ops)
    for name in names:
        if name not in registry.ops:
            request.refuse("--op", name, registry.ops, kind="a registered op", more="`skuda list` names all")
    problems, assumed = _problems(request, registry, names)
    if not request.tokens and request.descriptors is None and dispatcher.tuning is not None:
        problems = {op: [*_tuned(registry, dispatcher.tuning, op), *found] for op, found in problems.items()}
    targets = _targets(request, dispatcher)
    chosen = _backends(request, dispatcher)
    for folder_trouble in filter(None, (backend.cache.obstacle() for backend in chosen.values())):
        raise CompileError(request.command, folder_trouble)
    for text in pairs(assumed):
        stderr().print(f"skuda: assumed {text}", style="dim", soft_wrap=True)
    skus = (sku for sku in registry if sku.op in problems)
    wanted = cubins_of(skus, problems, chosen, *targets, choices=partial(_configurations, dispatcher))
    if not wanted:
        for_whom = words(device.describe() for device in targets)
        served = "this" if request.tokens else "these ops"
        line = f"nothing to compile: no kernel of {words(chosen)} serves {served} on {for_whom}"
        stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)
        return []
    with progress() as report:
        return build_cubins(wanted, report)


def print_outcomes(found: Sequence[Outcome], *, as_json: bool = False) -> None:
    """Print what came of every cubin: a table, records where nobody looks, or JSON."""
    folders = sorted({outcome.wanted.backend.cache.folder for outcome in found})
    if as_json:
        print_json({"folders": [str(folder) for folder in folders], "cubins": [_as_json(outcome) for outcome in found]})
    elif stdout().is_terminal:
        _print(stdout(), found, folders)
    else:
        failed = [outcome for outcome in found if outcome.state == "failed"]
        records(_rows(found))
        records(("failure", outcome.wanted.sku.id, outcome.wanted.arch, outcome.reason) for outcome in failed)


def _tuned(registry: Registry, tuning: Tuning, op: str) -> Iterator[Descriptor]:
    """Return the problems of an op that were measured, those that are problems of it still."""
    for entry in tuning.entries:
        if entry.op == op:
            with suppress(InvalidProblem):
                yield registry.ops[op].descriptor.model_validate(entry.problem)


def _configurations(dispatcher: Dispatcher, sku: KernelSku, problem: Descriptor, device: Device) -> list[str]:
    """Return the configurations in which a kernel may be chosen: the first it has, and those that were measured.

    Another one may be chosen where a preference leaves less to choose from.
    """
    found = {""}
    if dispatcher.tuning is not None and dispatcher.tuning.entry(problem) is not None:
        for preference in (PlanPreference(), PlanPreference(backend=sku.backend), PlanPreference(sku=sku.id)):
            explained = dispatcher.explain(problem, preference, device)
            if explained.chosen == sku.id:
                found.add(explained.choice)
    return sorted(found)


def _problems(
    request: Request, registry: Registry, ops: Sequence[str]
) -> tuple[dict[str, Sequence[Descriptor]], dict[str, Any]]:
    """Return the problems to compile for by op, and what was assumed about a given one."""
    tokens = request.tokens
    if request.descriptors is not None:
        if tokens:
            raise InvalidProblem(request.command, "--descriptors", tokens[0], "stand without a problem's fields")
        listed = read_problems(request.command, registry, request.descriptors)
        chosen = ops or registry.ops
        return {op: [p for p in listed if p.op_name() == op] for op in chosen}, {}
    if not tokens:
        return {name: [case.problem for case in registry.ops[name].cases] for name in ops or registry.ops}, {}
    if len(ops) != 1:
        near = [f"--{name}" for name in nearest(tokens[0].lstrip("-").partition("=")[0], request.own_options)]
        rule = "be an option of the command" + (f" (near: {words(near)})" if near else "")
        raise InvalidProblem(
            request.command, "an option", tokens[0], f"{rule}, or a field of the one op that --op names"
        )
    problem, assumed = describe(registry.ops[ops[0]], tokens, request.own_options)
    return {ops[0]: [problem]}, assumed


def _targets(request: Request, dispatcher: Dispatcher) -> list[Device]:
    archs, devices = split(request.archs), split(request.devices)
    found = [_card(request, name) for name in devices] + [card for name in archs for card in _cards_of(request, name)]
    if not archs and not devices:
        found = [device for device in dispatcher.devices if device.processor == "cuda"]
        if not found:
            rule = f"be given, as no CUDA device is here; cards: {words(_CARDS)}"
            raise InvalidProblem(request.command, "--arch or --device", "neither", rule)
    return list(dict.fromkeys(found))


def _card(request: Request, name: str) -> Device:
    try:
        found = device_named(name)
    except InvalidRecord:
        request.refuse("--device", name, _CARDS)
    return found if found.processor == "cuda" else request.refuse("--device", name, _CARDS)


def _cards_of(request: Request, name: str) -> list[Device]:
    """Return the known cards of an architecture; a suffix makes no difference, as a card runs both kinds of kernels."""
    known = {
        arch.value: arch for arch in ArchSku if any(arch.capability == c.compute_capability for c in _CARDS.values())
    }
    if name not in known:
        request.refuse("--arch", name, known)
    return [card for card in _CARDS.values() if card.compute_capability == known[name].capability]


def _backends(request: Request, dispatcher: Dispatcher) -> dict[str, CudaBackend[Any]]:
    """Return the backends to compile for.

    Raises
    ------
    CompileError
        Where one that was asked for has no compiler, or none has.
    """
    names = split(request.backends)
    every: Mapping[str, Backend] = dispatcher.backends
    cuda = {name: backend for name, backend in every.items() if isinstance(backend, CudaBackend)}
    for name in names:
        if name not in cuda and name != "all":
            request.refuse("--backend", name, (*cuda, "all"))
    asked = {name: backend for name, backend in cuda.items() if not names or name in names or "all" in names}
    lacking = [f"{name}: {backend.compilers}" for name, backend in asked.items() if backend.compiler() is None]
    if lacking and (names or len(lacking) == len(asked)):
        raise CompileError(request.command, f"there is no compiler here for {'; for '.join(lacking)}")
    for line in lacking:
        stderr().print(f"skuda: left out for want of a compiler: {line}", style="yellow", soft_wrap=True)
    return {name: backend for name, backend in asked.items() if backend.compiler() is not None}


def _rows(found: Sequence[Outcome]) -> list[tuple[str, str, str, int, int, int]]:
    """Return op, backend, architecture, compiled, found in the cache, failed."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for outcome in found:
        sku = outcome.wanted.sku
        counts.setdefault((sku.op, sku.backend, outcome.wanted.arch), Counter())[outcome.state] += 1
    return [
        (*key, counted["compiled"], counted["cached"], counted["failed"]) for key, counted in sorted(counts.items())
    ]


def _as_json(outcome: Outcome) -> dict[str, Any]:
    sku, launch, _, device, _ = outcome.wanted
    return {
        "sku": sku.id,
        "arch": outcome.wanted.arch,
        "device": device.name,
        "flags": [*sku.flags, *launch.flags],
        "state": outcome.state,
        "reason": outcome.reason,
    }


def _print(console: Console, found: Sequence[Outcome], folders: Sequence[Path]) -> None:
    table = plain_table("op", "backend", "arch", *_STATES)
    table.columns[0].no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for op, backend, arch, *counts in _rows(found):
        styles = ("green", "default", "bold red")
        shown = (Text(str(n), style=style if n else "dim") for n, style in zip(counts, styles, strict=True))
        table.add_row(Text(op, style="cyan"), backend, arch, *shown)
    console.print(table)
    failed = [outcome for outcome in found if outcome.state == "failed"]
    for outcome in failed[:_FAILURES_SHOWN]:
        console.print()
        console.print(folded(outcome.wanted.sku.id, console.width), style="bold red")
        reason = re.sub(rf"^{re.escape(outcome.wanted.sku.id)}: ", "", outcome.reason)
        console.print(indented(Text(f"for {outcome.wanted.arch}: {reason}"), 2))
    if len(failed) > _FAILURES_SHOWN:
        console.print(f"\nand {len(failed) - _FAILURES_SHOWN} more", style="dim")
    states = Counter(outcome.state for outcome in found)
    console.print()
    console.print(f"{count(len(found), 'cubin')}: {words(f'{states[s]} {s}' for s in _STATES if states[s])}.")
    console.print(f"in {words(folders)}", style="dim", soft_wrap=True)
