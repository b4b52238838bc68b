"""``skuda list``: the registered ops and kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.arch import ArchSku
from skuda.registry.elements import ElementKind
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.tools.options import Evidence, Json, Ops, Words, flag, option
from skuda.tools.output import OP_WORDS, chosen, count, folded, plain_table, present, split, tell, words
from skuda.tools.parse.devices import named_device, served_by
from skuda.tools.show.kernels import (
    Found,
    Judge,
    elements_of,
    evidence_words,
    judge_of,
    legend,
    promise,
    tell_aside,
    unique,
)
from skuda.tools.verify.evidence import load_records


def run(
    *,
    ops: Ops = None,
    elements: Annotated[Words, option("KIND", "Only kernels for these elements.", "--element", "--elem")] = None,
    archs: Annotated[Words, option("ARCH", "Only kernels for these architectures.", "--arch")] = None,
    devices: Annotated[Words, option("NAME", "Only kernels that run on these cards, such as l4.", "--device")] = None,
    backends: Annotated[Words, option("NAME", "Only kernels of these backends.", "--backend")] = None,
    skus: Annotated[bool, flag("--skus", help="One line per kernel: its id.")] = False,
    evidence: Evidence = None,
    as_json: Json = False,
) -> int:
    """List the ops, or every kernel.

    Filters may be repeated and may hold several values, separated by commas. An architecture or a card without kernels
    of its own lists the older ones that run on it.
    """
    dispatcher = Dispatcher()
    tell_aside(dispatcher)
    registry = dispatcher.registry
    names = chosen("list", "--op", ops, registry.ops, **OP_WORDS)
    kinds = chosen("list", "--element", elements, map(str, ElementKind))
    allowed = _archs(registry, chosen("list", "--arch", archs, map(str, ArchSku)), split(devices))
    chosen_backends = chosen("list", "--backend", backends, registry.backends)

    def passes(sku: KernelSku) -> bool:
        return (
            (not kinds or sku.element in kinds or sku.aux_element in kinds)
            and (allowed is None or sku.arch in allowed)
            and (not chosen_backends or sku.backend in chosen_backends)
        )

    # An op without kernels is listed too, unless filters ask for kernels.
    filtered = bool(kinds or chosen_backends) or allowed is not None
    found = [
        (op, kernels)
        for op in sorted(registry.ops.values(), key=lambda op: (op.category, op.name))
        if not names or op.name in names
        if (kernels := tuple(filter(passes, registry.skus_of(op.name)))) or not filtered
    ]
    judge = judge_of(registry, load_records(evidence))
    if skus:
        _print_skus(registry, [sku for _, kernels in found for sku in kernels], judge, as_json=as_json)
    else:
        _print_ops(found, judge, as_json=as_json)
    return 0


def _archs(registry: Registry, archs: Sequence[str], devices: Sequence[str]) -> set[ArchSku] | None:
    """Return the architectures that pass ``--arch`` and ``--device``, or None for all; say which older ones serve."""
    registered = {sku.arch for sku in registry}
    asked = [(name, ArchSku(name).capability) for name in archs if name not in registered]
    passing = {ArchSku(name) for name in archs} & registered
    for device in devices:
        name, card = named_device("list", device)
        asked.append((card.name, card.compute_capability))
    for name, capability in asked:
        passing |= {arch for arch in registered if arch.runs_on(capability)}
        note = served_by(registry, name, capability)
        if note:
            tell(note)
    return passing if archs or devices else None


def _print_ops(found: Found, judge: Judge, *, as_json: bool) -> None:
    values = [_op_facts(op, skus, judge) for op, skus in found]
    present(values, lambda console: _print_table(console, found, judge), as_json=as_json)


def _op_facts(op: Op, skus: Sequence[KernelSku], judge: Judge) -> dict[str, Any]:
    judged = [judge(sku) for sku in skus]
    places = {name: unique(sku.arch for sku in skus if sku.backend == name) for name in unique(s.backend for s in skus)}
    return {
        "op": op.name,
        "category": op.category,
        "summary": op.summary,
        "elements": unique(sku.element for sku in skus),
        "aux_elements": unique(sku.aux_element for sku in skus),
        "archs": unique(sku.arch for sku in skus),
        "backends": places,
        "skus": len(skus),
        "promise": promise(skus),
        "evidence": Counter(each.word for each in judged),
        "verified_on": unique(each.device for each in judged if each.word == "verified"),
    }


def _print_table(console: Console, found: Found, judge: Judge) -> None:
    if not found:
        console.print("no op passes these filters", style="yellow")
        return
    table = plain_table("op", "elements", "archs", "SKUs", "error")
    table.columns[3].justify = "right"
    used: set[str] = set()
    category = None
    for op, skus in found:
        if op.category != category:
            category = op.category
            table.add_row(Text(f"{category}", style="bold"))
        failed = any(judge(sku).word == "failed" for sku in skus)
        text = "failed" if failed else promise(skus).replace("bit-exact", "exact").replace("<= ", "")
        table.add_row(
            Text(op.name, style="cyan"),
            elements_of(skus, used),
            " ".join(unique(sku.arch for sku in skus if sku.arch is not ArchSku.CPU)) or "cpu",
            str(len(skus)),
            Text(text, style="bold red" if failed else "green" if text == "exact" else "yellow"),
        )
    console.print(table)
    every = [sku for _, skus in found for sku in skus]
    console.print(f"\n{count(len(found), 'op')}, {count(len(every), 'kernel')}: {evidence_words(every, judge)}.")
    if used:
        console.print(f"{legend(used)}.", style="dim")
    console.print("`skuda show OP` describes an op, `skuda list --skus` names the kernels.", style="dim")


def _print_skus(registry: Registry, skus: Sequence[KernelSku], judge: Judge, *, as_json: bool) -> None:
    def as_value(sku: KernelSku) -> dict[str, object]:
        facts = {"id": sku.id, "origin": registry.origin(sku.id), "evidence": judge(sku).word}
        return {**facts, "device": judge(sku).device, "sku": sku.model_dump(mode="json")}

    def person(console: Console) -> None:
        for sku in skus:
            console.print(folded(sku.id, console.width))
        by_backend = words(f"{number} {name}" for name, number in Counter(sku.backend for sku in skus).items())
        console.print(f"{count(len(skus), 'kernel')}" + (f": {by_backend}" if skus else ""), style="dim")

    present(list(map(as_value, skus)) if as_json else None, person, as_json=as_json)
