"""``skuda compile``: fill the cubin cache ahead of time, also for cards that are not present."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Device, Dispatcher, PlanPreference
from skuda.dispatch.backends.base import Backend
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import CompileError, InvalidProblem
from skuda.registry.sku import KernelSku
from skuda.tools.output import (
    OP_WORDS,
    chosen,
    count,
    folded,
    indented,
    nearest,
    plain_table,
    print_json,
    progress,
    records,
    split,
    stdout,
    tell,
    words,
)
from skuda.tools.ship.cubins import Outcome, State, build_cubins, cubins_of
from skuda.tools.words.devices import CARDS, cards_of, named_device
from skuda.tools.words.problem import describe, pairs, read_problems

_FAILURES_SHOWN = 10
_STATES: tuple[State, ...] = ("compiled", "cached", "failed")


@dataclass(frozen=True)
class Request:
    """The options of the command line, as typed.

    Attributes
    ----------
    tokens : sequence of str
        Options that describe one problem of one op.
    descriptors : Path or None
        A list of problems instead; without either, all cases of the ops are compiled.
    ops : sequence of str
        Compile only these; empty for all.
    archs, devices : sequence of str
        Known cards by architecture or by name; if both are empty, the CUDA devices that are present.
    backends : sequence of str
        Backends, or ``all``; empty for those with an available compiler.
    own_options : sequence of str
        Names of the command's own options, suggested for a misspelt one.
    """

    tokens: Sequence[str] = ()
    descriptors: Path | None = None
    ops: Sequence[str] = ()
    archs: Sequence[str] = ()
    devices: Sequence[str] = ()
    backends: Sequence[str] = ()
    own_options: Sequence[str] = ()


def run(request: Request, *, as_json: bool = False) -> int:
    """Run ``skuda compile``; return the exit status: 0; 1 if a cubin failed or nothing fits.

    It raises the errors of `compiled`.
    """
    found = compiled("compile", request)
    if found is None:
        return 1
    print_outcomes(found, as_json=as_json)
    return 1 if any(outcome.state == "failed" for outcome in found) else 0


def compiled(command: str, request: Request) -> list[Outcome] | None:
    """Compile the requested cubins and show the progress; if nothing fits, print a message and return None.

    Raise `InvalidProblem` for an unknown word, and `CompileError` without a compiler or if the cache cannot be written.
    """
    dispatcher = Dispatcher()
    problems, assumed = _problems(command, request, dispatcher)
    targets = _targets(command, request, dispatcher)
    backends = _backends(command, request, dispatcher)
    for trouble in filter(None, (backend.cache.obstacle() for backend in backends.values())):
        raise CompileError(command, trouble)
    for text in pairs(assumed):
        tell(f"assumed {text}", "dim")
    skus = (sku for sku in dispatcher.registry if sku.op in problems)
    wanted = cubins_of(skus, problems, backends, *targets, choices=partial(_configurations, dispatcher))
    if not wanted:
        for_whom = words(device.describe() for device in targets)
        served = "this" if request.tokens else "these ops"
        tell(f"nothing to compile: no kernel of {words(backends)} serves {served} on {for_whom}")
        return None
    with progress() as report:
        return build_cubins(wanted, report)


def print_outcomes(found: Sequence[Outcome], *, as_json: bool = False) -> None:
    """Print the result for every cubin: as a table on a terminal, else as records, or as JSON."""
    folders = sorted({outcome.wanted.backend.cache.folder for outcome in found})
    if as_json:
        print_json({"folders": [str(folder) for folder in folders], "cubins": [_as_json(outcome) for outcome in found]})
    elif stdout().is_terminal:
        _print(stdout(), found, folders)
    else:
        failed = [outcome for outcome in found if outcome.state == "failed"]
        records(_rows(found))
        records(("failure", outcome.wanted.sku.id, outcome.wanted.arch, outcome.reason) for outcome in failed)


def _problems(
    command: str, request: Request, dispatcher: Dispatcher
) -> tuple[dict[str, Sequence[Descriptor]], dict[str, Any]]:
    """Return the problems to compile by op, and the assumed fields of a problem from the command line."""
    tokens, registry = request.tokens, dispatcher.registry
    ops = chosen(command, "--op", request.ops, registry.ops, **OP_WORDS) or tuple(registry.ops)
    if request.descriptors is not None:
        if tokens:
            raise InvalidProblem(command, "--descriptors", tokens[0], "stand without a problem's fields")
        listed = read_problems(command, registry, request.descriptors)
        return {op: [problem for problem in listed if problem.op_name() == op] for op in ops}, {}
    if not tokens:
        return {op: [*_tuned(dispatcher, op), *(case.problem for case in registry.ops[op].cases)] for op in ops}, {}
    if not request.ops or len(ops) != 1:
        near = [f"--{name}" for name in nearest(tokens[0].lstrip("-").partition("=")[0], request.own_options)]
        hint = f" (near: {words(near)})" if near else ""
        rule = f"be an option of the command{hint}, or a field of the one op that --op names"
        raise InvalidProblem(command, "an option", tokens[0], rule)
    problem, assumed = describe(registry.ops[ops[0]], tokens, request.own_options)
    return {ops[0]: [problem]}, assumed


def _tuned(dispatcher: Dispatcher, op: str) -> Iterator[Descriptor]:
    """Return the measured problems of an op that are still valid."""
    for entry in dispatcher.tuning.entries if dispatcher.tuning is not None else ():
        if entry.op == op:
            with suppress(InvalidProblem):
                yield dispatcher.registry.ops[op].descriptor.model_validate(entry.problem)


def _configurations(dispatcher: Dispatcher, sku: KernelSku, problem: Descriptor, device: Device) -> list[str]:
    """Return the configurations in which a kernel may be chosen: the first one, and those that were measured.

    A preference that excludes these may choose another one.
    """
    found = {""}
    if dispatcher.tuning is not None and dispatcher.tuning.entry(problem) is not None:
        for preference in (PlanPreference(), PlanPreference(backend=sku.backend), PlanPreference(sku=sku.id)):
            explained = dispatcher.explain(problem, preference, device)
            if explained.chosen == sku.id:
                found.add(explained.choice)
    return sorted(found)


def _targets(command: str, request: Request, dispatcher: Dispatcher) -> list[Device]:
    """Return the devices to compile for, which need not be present."""
    found = [named_device(command, name, CARDS)[1] for name in split(request.devices)]
    found += [card for arch in split(request.archs) for card in cards_of(command, arch)]
    found = found or [device for device in dispatcher.devices if device.processor == "cuda"]
    if not found:
        rule = f"be given, as no CUDA device is here; cards: {words(CARDS)}"
        raise InvalidProblem(command, "--arch or --device", "neither", rule)
    return list(dict.fromkeys(found))


def _backends(command: str, request: Request, dispatcher: Dispatcher) -> dict[str, CudaBackend[Any]]:
    """Return the backends to compile for: the requested ones, which need a compiler, or all that have one."""
    every: Mapping[str, Backend] = dispatcher.backends
    cuda = {name: backend for name, backend in every.items() if isinstance(backend, CudaBackend)}
    names = chosen(command, "--backend", request.backends, (*cuda, "all"))
    asked = {name: backend for name, backend in cuda.items() if not names or name in names or "all" in names}
    lacking = [f"{name}: {backend.compilers}" for name, backend in asked.items() if backend.compiler() is None]
    if lacking and (names or len(lacking) == len(asked)):
        raise CompileError(command, f"there is no compiler here for {'; for '.join(lacking)}")
    for line in lacking:
        tell(f"left out for want of a compiler: {line}")
    return {name: backend for name, backend in asked.items() if backend.compiler() is not None}


def _rows(found: Sequence[Outcome]) -> list[tuple[str, str, str, int, int, int]]:
    """Return op, backend, architecture, compiled, found in the cache, failed."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for outcome in found:
        sku = outcome.wanted.sku
        counts.setdefault((sku.op, sku.backend, outcome.wanted.arch), Counter())[outcome.state] += 1
    return [(*key, states["compiled"], states["cached"], states["failed"]) for key, states in sorted(counts.items())]


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
    table = plain_table("op", "backend", "arch", *_STATES, numbers=3)
    table.columns[0].no_wrap = True
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
