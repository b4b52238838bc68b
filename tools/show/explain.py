"""``skuda explain``: which kernel would run, and why the others would not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.text import Text

from skuda.dispatch import Decision, Dispatcher, Explanation, PlanPreference
from skuda.dispatch.select.explanation import Verdict
from skuda.dispatch.shard import ShardedExplanation, Shards, explain_shards
from skuda.registry.errors import InvalidProblem
from skuda.registry.guarantee import PrecisionRequirement
from skuda.registry.op import Op
from skuda.registry.reason import Reason
from skuda.registry.registry import Registry
from skuda.tools.options import All, File, Json, Number, Word, Words, flag, option, own_options
from skuda.tools.output import (
    OP_WORDS,
    count,
    facts,
    folded,
    indented,
    new_console,
    one_of,
    plain_table,
    present,
    split,
    words,
)
from skuda.tools.parse.devices import named_device, served_by
from skuda.tools.parse.problem import (
    aliases_of,
    assumptions,
    convert,
    default_words,
    describe,
    fields_of,
    option_of,
    pairs,
    short,
    type_words,
)

_ANOTHER_FUNCTION = ("element", "aux_element", "layout", "epilogue")
"""Codes of reasons that mean that a kernel computes something else, and not the same thing elsewhere."""

_OPTIONS = {
    "preference.sku": "--sku",
    "preference.backend": "--backend",
    "preference.allow_arch_specific": "--no-arch-specific",
    "preference.max_workspace_bytes": "--max-workspace-bytes",
}
"""The options of preferences."""

_SHOWN = 8
"""Accepted kernels and measured times that get a row."""


def run(
    context: typer.Context,
    *,
    device: Annotated[str, option("NAME", "Plan for here (without it), cpu, h200, l4, sm_89 ...")] = "here",
    backend: Annotated[Word, option("NAME", "Insist on this backend.", "--backend", "--prefer-backend")] = None,
    sku: Annotated[Word, option("ID", "Insist on this kernel.")] = None,
    require: Annotated[Words, option("PROMISE", "Insist on a promise, such as deterministic,max_ulp=0.")] = None,
    max_workspace_bytes: Annotated[Number, option("BYTES", "Refuse kernels that need more scratch.")] = None,
    no_arch_specific: Annotated[
        bool, flag("--no-arch-specific", help="Refuse kernels for one chip or family only (sm_90a).")
    ] = False,
    tuning: Annotated[File, option("FILE", "Use these measured times; else those that SKUDA_TUNING names.")] = None,
    shards: Annotated[
        Words, option("FIELD=VALUE", "Split a linear layer over ranks: axis=k,count=2, and input, output, chunks.")
    ] = None,
    show_all: All = False,
    as_json: Json = False,
    show_help: Annotated[bool, flag("--help", "-h", help="This page; after an op's name, its fields too.")] = False,
) -> int:
    """Say which kernel would run, and why the others would not.

    Every field of the op is an option. Exits with 1 where no kernel serves the problem.
    """
    if show_help:
        typer.echo(context.get_help())
        if not context.args:
            return 0
    dispatcher = Dispatcher(tuning=tuning)
    registry = dispatcher.registry
    op, rest = _op_of(registry, context.args)
    if show_help:
        return _show_fields(op)
    card = None if device == "here" else named_device("explain", device, others=("here",))[1]
    one_of("explain", "--backend", backend, registry.backends)
    ids = [each.id for each in registry.skus_of(op.name)]
    more = f"`skuda list --skus --op {op.name}` names all"
    one_of("explain", "--sku", sku, ids, kind=f"a kernel of {op.name}", more=more)
    preference = PlanPreference(
        backend=backend,
        sku=sku,
        require=PrecisionRequirement(**_given("--require", require, fields_of(PrecisionRequirement))),
        max_workspace_bytes=max_workspace_bytes,
        allow_arch_specific=not no_arch_specific,
    )
    problem, assumed = describe(op, rest, own_options(context))
    if shards:
        fields = {name: Shards.model_fields[name] for name in ("axis", "count", "input", "output", "chunks")}
        split_as = Shards(**_given("--shards", shards, fields))
        return _explain_shards(
            explain_shards(dispatcher, problem, split_as, preference, card), assumed, as_json=as_json
        )
    found = dispatcher.explain(problem, preference, card)
    served = served_by(registry, found.device.name, found.device.compute_capability)
    found = found.model_copy(update={"notes": (*found.notes, *filter(None, [served]))})
    notes = (*(f"assumed {text}" for text in pairs(assumed)), *found.notes)
    present(
        found.model_copy(update={"notes": notes}).model_dump(mode="json") if as_json else None,
        lambda console: _print(console, registry, found, assumed, show_all=show_all),
        as_json=as_json,
    )
    return 0 if found.chosen is not None else 1


def _explain_shards(found: ShardedExplanation, assumed: dict[str, Any], *, as_json: bool) -> int:
    text = "\n".join([str(found), *(f"  assumed {text}" for text in pairs(assumed))])
    present(found.model_dump(mode="json"), lambda console: console.print(text), as_json=as_json)
    return 0 if found.refused is None else 1


def _show_fields(op: Op) -> int:
    aliases = {field: alias for alias, field in aliases_of(op.descriptor).items()}
    assumed = assumptions(op, {})
    table = plain_table("option", "takes", "default", indent=2)
    for name, field in fields_of(op.descriptor).items():
        option = option_of(name) + (f", --{aliases[name]}" if name in aliases else "")
        default = f"{short(assumed[name])} (assumed)" if name in assumed else default_words(field)
        table.add_row("", option, type_words(field), default)
    new_console().print(f"\nFields of {op.name}:")
    new_console().print(table)
    return 0


def _op_of(registry: Registry, tokens: Sequence[str]) -> tuple[Op, list[str]]:
    rest = list(tokens)
    # The op comes first; if options come before it, it is the only word that is the name of an op.
    at = 0 if rest and not rest[0].startswith("-") else next((i for i, t in enumerate(rest) if t in registry.ops), None)
    if at is None:
        raise InvalidProblem("explain", "OP", "nothing", "be named first; `skuda list` names the ops")
    name = rest.pop(at)
    one_of("explain", "OP", name, registry.ops, **OP_WORDS)
    return registry.ops[name], rest


def _given(name: str, given: Words, fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Return the fields of a record that an option gives as words such as ``name=value``; a name alone is true."""
    asked: dict[str, Any] = {}
    for item in split(given):
        field, equals, text = item.partition("=")
        field = field.strip().replace("-", "_")
        one_of("explain", name, field, fields)
        asked[field] = convert(fields[field], text.strip() if equals else "true")
    return asked


def _print(
    console: Console, registry: Registry, found: Explanation, assumed: dict[str, Any], *, show_all: bool
) -> None:
    """Print an explanation; `assumed` are the fields that were not given. With `show_all`, each kernel gets a row."""
    paper = ", planned on paper" if found.device.ordinal is None and found.device.processor != "cpu" else ""
    console.print(Text.assemble((found.op, "bold cyan"), f" on {found.device.describe()}", (paper, "dim")))
    wishes = found.preference.model_dump(mode="json", exclude_defaults=True)
    wishes |= wishes.pop("require", {})
    # Required fields come before those with a default.
    fields = registry.ops[found.op].descriptor.model_fields
    stated = {name: value for name, value in found.problem.items() if name not in ("op", *assumed)}
    stated = dict(sorted(stated.items(), key=lambda item: not fields[item[0]].is_required()))
    rows = (("problem", stated, ""), ("assumed", assumed, "yellow"), ("insist", wishes, ""))
    console.print(facts((label, Text(" ".join(pairs(values)), style=style)) for label, values, style in rows if values))
    sku = registry.sku(found.chosen) if found.chosen is not None else None
    if sku is None:
        console.print("\nno kernel serves this problem here", style="bold red")
    else:
        console.print("\nchosen", style="bold green")
        console.print(indented(Text(folded(sku.id, console.width - 2), style="green"), 2))
        if found.choice:
            console.print(indented(Text(f"configuration {found.choice}", style="green"), 2))
        console.print(indented(sku.precision_guarantee.describe(), 2))
    most = None if show_all else _SHOWN
    _print_accepted(console, registry, found, most)
    _print_refused(console, found, show_all=show_all)
    if found.verdict is not None:
        _print_measured(console, found.verdict, most)
    for note in found.notes:
        console.print(f"note: {note}", style="yellow")


def _print_accepted(console: Console, registry: Registry, found: Explanation, most: int | None) -> None:
    accepted = found.accepted
    console.print(f"\n{count(len(found.decisions), 'candidate')}, {len(accepted)} accepted", style="bold")
    promised = {sku.id: sku.precision_guarantee.describe() for sku in registry.skus_of(found.op)}
    for number, decision in enumerate(accepted[:most], 1):
        other = promised[decision.sku] != promised[accepted[0].sku]
        console.print(indented(f"{number}. {_end(decision.sku)}" + f": {promised[decision.sku]}" * other, 2))
    _print_left_out(console, accepted, most)


def _print_left_out(console: Console, rows: Sequence[object], most: int | None) -> None:
    if most is not None and len(rows) > most:
        console.print(f"  {len(rows) - most} more: --all shows them", style="dim")


def _print_refused(console: Console, found: Explanation, *, show_all: bool) -> None:
    """Print the refused kernels that compute the problem, and what the others compute instead.

    Kernels with the same reasons share a row. With `show_all`, every kernel has its own.
    """
    others = [d for d in found.refused if any(reason.code in _ANOTHER_FUNCTION for reason in d.reasons)]
    groups: dict[object, list[Decision]] = {}
    for decision in found.refused:
        if show_all or decision not in others:
            groups.setdefault(decision.sku if show_all else decision.reasons, []).append(decision)
    table = plain_table(indent=2)
    for width in (None, 30, None):
        table.add_column(max_width=width, overflow="fold")
    for members in groups.values():
        names = (decision.sku if decision in others else _end(decision.sku) for decision in members)
        why = Text("\n").join(map(_remedy, members[0].reasons))
        table.add_row("", Text("refused", style="red"), "\n".join(names), why)
    console.print(table)
    if others and not show_all:
        instead: dict[str, dict[str, None]] = {}
        for reason in (reason for decision in others for reason in decision.reasons):
            if reason.code in _ANOTHER_FUNCTION:
                instead.setdefault(f"{reason.field} = {reason.had}", {})[reason.wanted] = None
        console.print(f"  {count(len(others), 'kernel')} for other problems; --all shows them. Instead of", style="dim")
        for had, wanted in instead.items():
            console.print(indented(f"{had}: {words(wanted)}", 4), style="dim")


def _end(sku_id: str) -> str:
    """Return the parts of an id that differ between kernels that compute the same."""
    return " ".join(sku_id.split(".")[-3:])


def _remedy(reason: Reason) -> Text:
    """Format a reason and its remedy; the expected value is part of the remedy, and preferences are options here."""
    option = _OPTIONS.get(reason.field, reason.field)
    against, change = f"{option}: had {reason.had}", reason.change.replace(reason.field, option)
    if reason.code == "arch":
        return Text(f"needs {reason.wanted}", style="yellow")
    if reason.code == "preference":
        against, change = f"{option} speaks against it", f"drop {option}"
    elif reason.code == "guarantee":
        name = reason.field.rpartition(".")[2]
        against, change = f"{name}: asked for {reason.wanted}, promises {reason.had}", "relax --require"
    return Text.assemble(against, " ", (f"-> {change}", "yellow"))


def _print_measured(console: Console, verdict: Verdict, most: int | None) -> None:
    console.print(f"\nmeasured, by {verdict.origin}", style="bold")
    outcome = "chosen by time" if verdict.chosen else "the ranking stays"
    console.print(f"{outcome}: {verdict.reason}", style="green" if verdict.chosen else "yellow")
    table = plain_table(indent=2)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for each in verdict.times[:most]:
        took = "not timed" if each.microseconds is None else f"{each.microseconds:.1f} us"
        name = _end(each.sku) + (f": {each.choice}" if each.choice else "")
        table.add_row("", took, Text.assemble(name, (f"\n{each.against}" if each.against else "", "yellow")))
    console.print(table)
    _print_left_out(console, verdict.times, most)
