"""``skuda compile``: fill the cubin cache ahead of time, also for cards that are not present."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from skuda.dispatch import Device, Dispatcher, PlanPreference
from skuda.dispatch.backends.base import Backend
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import CompileError, InvalidProblem
from skuda.registry.sku import KernelSku
from skuda.tools.options import Archs, Backends, Descriptors, Devices, Json, Ops, Words, own_options
from skuda.tools.output import OP_WORDS, chosen, count, nearest, present, progress, split, table_of, tell, words
from skuda.tools.parse.devices import cards_of, named_device
from skuda.tools.parse.problem import describe, pairs, read_problems
from skuda.tools.ship.cubins import Outcome, State, build_cubins, cubins_of

_FAILURES_SHOWN = 10
_STATES: tuple[State, ...] = ("compiled", "cached", "failed")


def run(
    context: typer.Context,
    *,
    ops: Ops = None,
    descriptors: Descriptors = None,
    archs: Archs = None,
    devices: Devices = None,
    backends: Backends = None,
    as_json: Json = False,
) -> int:
    """Fill the cache of compiled kernels ahead of time.

    Needs a compiler, but no GPU and no driver. Compiles what the cards would look for: every kernel that fits, in each
    configuration that the cases of its op lead to; or what the problems of --descriptors need; or one problem, with its
    fields after `--op NAME`. With SKUDA_TUNING, it also compiles what the measured times choose. Exits with 1 where a
    kernel does not compile.
    """
    found = compiled("compile", context.args, own_options(context), descriptors, ops, archs, devices, backends)
    if not found:
        return 1
    print_outcomes(found, as_json=as_json)
    return 1 if any(outcome.state == "failed" for outcome in found) else 0


def compiled(
    command: str,
    tokens: Sequence[str],
    others: Sequence[str],
    descriptors: Path | None,
    ops: Words,
    archs: Words,
    devices: Words,
    backends: Words,
) -> list[Outcome]:
    """Compile the requested cubins and show the progress; if nothing fits, print a message and return none.

    `tokens` are options that describe one problem of one op, and `others` the names of the command's own options,
    suggested for a misspelt one. Raise `InvalidProblem` for an unknown word, and `CompileError` without a compiler or
    if the cache cannot be written.
    """
    dispatcher = Dispatcher()
    names = chosen(command, "--op", ops, dispatcher.registry.ops, **OP_WORDS)
    if tokens:
        if descriptors is not None:
            raise InvalidProblem(command, "--descriptors", tokens[0], "stand without a problem's fields")
        op = _only_op(command, names, tokens[0], others)
        problem, assumed = describe(dispatcher.registry.ops[op], tokens, others)
        problems = {op: [problem]}
    else:
        problems, assumed = _problems(command, names, descriptors, dispatcher), {}
    targets = _targets(command, devices, archs, dispatcher)
    usable = _backends(command, backends, dispatcher)
    for trouble in filter(None, (backend.cache.obstacle() for backend in usable.values())):
        raise CompileError(command, trouble)
    for text in pairs(assumed):
        tell(f"assumed {text}", "dim")
    skus = (sku for sku in dispatcher.registry if sku.op in problems)
    wanted = cubins_of(skus, problems, usable, *targets, choices=partial(_configurations, dispatcher))
    if not wanted:
        for_whom = words(device.describe() for device in targets)
        served = "this" if tokens else "these ops"
        tell(f"nothing to compile: no kernel of {words(usable)} serves {served} on {for_whom}")
        return []
    with progress() as report:
        return build_cubins(wanted, report)


def print_outcomes(found: Sequence[Outcome], *, as_json: bool = False) -> None:
    """Print how many cubins of every op were compiled, found in the cache, or failed and why; or every one as JSON."""
    folders = sorted({str(outcome.wanted.backend.cache.folder) for outcome in found})
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for outcome in found:
        sku = outcome.wanted.sku
        counts.setdefault((sku.op, sku.backend, outcome.wanted.arch), Counter())[outcome.state] += 1
    rows = [(*key, *(states[state] for state in _STATES)) for key, states in sorted(counts.items())]
    failed = [outcome for outcome in found if outcome.state == "failed"]

    def person(console: Console) -> None:
        console.print(table_of(rows, "op", "backend", "arch", *_STATES, numbers=3))
        for outcome in failed[:_FAILURES_SHOWN]:
            console.print(f"\n{outcome.wanted.sku.id}", style="bold red")
            console.print(f"  for {outcome.wanted.arch}: {outcome.reason}", soft_wrap=True)
        if len(failed) > _FAILURES_SHOWN:
            console.print(f"\nand {len(failed) - _FAILURES_SHOWN} more", style="dim")
        states = Counter(outcome.state for outcome in found)
        console.print(f"\n{count(len(found), 'cubin')}: {words(f'{states[s]} {s}' for s in _STATES if states[s])}.")
        console.print(f"in {words(folders)}", style="dim", soft_wrap=True)

    value = {"folders": folders, "cubins": [_as_json(outcome) for outcome in found]}
    present(value, person, as_json=as_json)


def _problems(
    command: str, ops: Sequence[str], descriptors: Path | None, dispatcher: Dispatcher
) -> dict[str, list[Descriptor]]:
    """Return the problems of a file, or the cases of ops and what was measured, by op."""
    registry = dispatcher.registry
    if descriptors is None:
        return {
            op: [*_tuned(dispatcher, op), *(case.problem for case in registry.ops[op].cases)]
            for op in ops or registry.ops
        }
    listed = read_problems(command, registry, descriptors)
    return {op: [problem for problem in listed if problem.op_name() == op] for op in ops or registry.ops}


def _only_op(command: str, ops: Sequence[str], token: str, others: Sequence[str]) -> str:
    """Return the op whose field a token may be."""
    if len(ops) == 1:
        return ops[0]
    near = [f"--{name}" for name in nearest(token.lstrip("-").partition("=")[0], others)]
    hint = f" (near: {words(near)})" if near else ""
    rule = f"be an option of the command{hint}, or a field of the one op that --op names"
    raise InvalidProblem(command, "an option", token, rule)


def _tuned(dispatcher: Dispatcher, op: str) -> Iterator[Descriptor]:
    """Yield the measured problems of an op that are still valid."""
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


def _targets(command: str, devices: Words, archs: Words, dispatcher: Dispatcher) -> list[Device]:
    """Return the devices to compile for, which need not be present."""
    found = [named_device(command, name, cpu=False)[1] for name in split(devices)]
    found += [card for arch in split(archs) for card in cards_of(command, arch)]
    found = found or [device for device in dispatcher.devices if device.processor == "cuda"]
    if not found:
        rule = "be given, as no CUDA device is here: --device h200, --arch sm_80 ..."
        raise InvalidProblem(command, "--arch or --device", "neither", rule)
    return list(dict.fromkeys(found))


def _backends(command: str, asked: Words, dispatcher: Dispatcher) -> dict[str, CudaBackend[Any]]:
    """Return the backends to compile for: the requested ones, which need a compiler, or all that have one."""
    every: Mapping[str, Backend] = dispatcher.backends
    cuda = {name: backend for name, backend in every.items() if isinstance(backend, CudaBackend)}
    names = chosen(command, "--backend", asked, (*cuda, "all"))
    found = {name: backend for name, backend in cuda.items() if not names or name in names or "all" in names}
    usable = {name: backend for name, backend in found.items() if backend.compiler() is not None}
    lacking = [f"{name}: {backend.compilers}" for name, backend in found.items() if name not in usable]
    if lacking and (names or not usable):
        raise CompileError(command, f"there is no compiler here for {'; for '.join(lacking)}")
    for line in lacking:
        tell(f"left out for want of a compiler: {line}")
    return usable


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
