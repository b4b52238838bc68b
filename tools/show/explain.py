"""``skuda explain``: which kernel would run, and why the others would not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from skuda.dispatch import Dispatcher, Explanation, PlanPreference
from skuda.dispatch.shard import ShardedExplanation, Shards
from skuda.registry.errors import InvalidProblem
from skuda.registry.guarantee import PrecisionRequirement
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.tools.output import OP_WORDS, plain_table, records, refuse, split, stdout
from skuda.tools.show.explanation import Page
from skuda.tools.words.devices import named_device
from skuda.tools.words.problem import (
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


def run(
    tokens: Sequence[str],
    *,
    device: str = "here",
    prefer_backend: str | None = None,
    sku: str | None = None,
    require: Sequence[str] = (),
    max_workspace_bytes: int | None = None,
    no_arch_specific: bool = False,
    tuning: Path | None = None,
    shards: Sequence[str] = (),
    own_options: Sequence[str] = (),
    show_all: bool = False,
    show_fields: bool = False,
    as_json: bool = False,
) -> int:
    """Run ``skuda explain``; return 0, or 1 if no kernel serves the problem.

    Parameters
    ----------
    tokens : sequence of str
        The op's name and the options that describe the problem.
    tuning : Path or None
        A file of measured times; None for the one that ``SKUDA_TUNING`` names.
    shards : sequence of str
        Fields of `Shards` as ``axis=k``; none for one device.
    own_options : sequence of str
        Names of the command's own options, suggested for a misspelt one.
    show_all : bool
        Whether every refused kernel gets a row.
    show_fields : bool
        Whether to print only the op's fields as options.
    device, prefer_backend, sku, require, max_workspace_bytes, no_arch_specific, as_json
        The command's options.
    """
    dispatcher = Dispatcher(tuning=tuning)
    registry = dispatcher.registry
    op, rest = _op_of(registry, tokens)
    if show_fields:
        return _show_fields(op)
    planned_for = None if device == "here" else named_device("explain", device, others=("here",))[1]
    _check_names(registry, op, prefer_backend, sku)
    preference = PlanPreference(
        backend=prefer_backend,
        sku=sku,
        require=_requirement(require),
        max_workspace_bytes=max_workspace_bytes,
        allow_arch_specific=not no_arch_specific,
    )
    problem, assumed = describe(op, rest, own_options)
    if shards:
        told = dispatcher.explain_shards(problem, _shards(shards), preference, planned_for)
        return _explain_shards(told, assumed, as_json=as_json)
    explanation = dispatcher.explain(problem, preference, planned_for)
    if as_json:
        notes = (*(f"assumed {text}" for text in pairs(assumed)), *explanation.notes)
        print(explanation.model_copy(update={"notes": notes}).model_dump_json(indent=2))  # noqa: T201
    elif stdout().is_terminal:
        Page(stdout(), registry, explanation, assumed).print(show_all=show_all)
    else:
        _print_records(explanation, assumed)
    return 0 if explanation.chosen is not None else 1


def _explain_shards(explanation: ShardedExplanation, assumed: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(explanation.model_dump_json(indent=2))  # noqa: T201
    elif stdout().is_terminal:
        stdout().print("\n".join([str(explanation), *(f"  assumed {text}" for text in pairs(assumed))]))
    else:
        records(
            (
                *(("assumed", name, short(value)) for name, value in assumed.items()),
                *(("step", s.name, " ".join(map(str, s.ranks)), s.explanation.question()) for s in explanation.steps),
                *(("chosen", s.name, s.explanation.chosen) for s in explanation.steps),
                *(("exchange", t.what, t.sent, t.microseconds) for t in explanation.transfers),
            )
        )
    return 0 if explanation.refused is None else 1


def _show_fields(op: Op) -> int:
    shorter = {field: alias for alias, field in aliases_of(op.descriptor).items()}
    assumed = assumptions(op, {})
    table = plain_table("option", "takes", "default", indent=2)
    for name, field in fields_of(op.descriptor).items():
        option = option_of(name) + (f", --{shorter[name]}" if name in shorter else "")
        default = f"{short(assumed[name])} (assumed)" if name in assumed else default_words(field)
        table.add_row("", option, type_words(field), default)
    console = stdout()
    console.print(f"\nFields of {op.name}:")
    console.print(table)
    return 0


def _op_of(registry: Registry, tokens: Sequence[str]) -> tuple[Op, list[str]]:
    rest = list(tokens)
    # The op comes first; if options come before it, it is the only word that is an op's name.
    at = 0 if rest and not rest[0].startswith("-") else next((i for i, t in enumerate(rest) if t in registry.ops), None)
    if not rest or at is None:
        raise InvalidProblem("explain", "OP", "nothing", "be named first; `skuda list` names the ops")
    name = rest.pop(at)
    if name not in registry.ops:
        refuse("explain", "OP", name, registry.ops, **OP_WORDS)
    return registry.ops[name], rest


def _check_names(registry: Registry, op: Op, backend: str | None, sku: str | None) -> None:
    if backend is not None and backend not in registry.backends:
        refuse("explain", "--prefer-backend", backend, registry.backends)
    ids = [each.id for each in registry.skus_of(op.name)]
    if sku is not None and sku not in ids:
        more = f"`skuda list --skus --op {op.name}` names all"
        refuse("explain", "--sku", sku, ids, kind=f"a kernel of {op.name}", more=more)


def _requirement(given: Sequence[str]) -> PrecisionRequirement:
    return PrecisionRequirement(**_given("--require", given, fields_of(PrecisionRequirement)))


def _shards(given: Sequence[str]) -> Shards:
    fields = {name: Shards.model_fields[name] for name in ("axis", "count", "input", "output", "chunks")}
    return Shards(**_given("--shards", given, fields))


def _given(option: str, given: Sequence[str], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Return the fields of a record that an option gives as words such as ``name=value``; a name alone is true."""
    asked: dict[str, Any] = {}
    for item in split(given):
        name, equals, text = item.partition("=")
        name = name.strip().replace("-", "_")
        if name not in fields:
            refuse("explain", option, name, fields)
        asked[name] = convert(fields[name], text.strip() if equals else "true")
    return asked


def _print_records(explanation: Explanation, assumed: dict[str, Any]) -> None:
    problem = {name: value for name, value in explanation.problem.items() if name != "op"}
    preference = explanation.preference.model_dump(mode="json", exclude_defaults=True)
    records(
        (
            ("op", explanation.op),
            *(("problem", name, short(value)) for name, value in problem.items()),
            *(("assumed", name, short(value)) for name, value in assumed.items()),
            *(("preference", *pair) for pair in preference.items()),
            ("device", explanation.device.describe()),
            *(("note", note) for note in explanation.notes),
            ("chosen", explanation.chosen, *filter(None, [explanation.choice])),
            *_measured(explanation),
            *(("accepted", decision.sku, decision.rank) for decision in explanation.accepted),
            *(
                ("refused", decision.sku, "; ".join(map(str, decision.reasons)), "; ".join(decision.changes))
                for decision in explanation.refused
            ),
        )
    )


def _measured(explanation: Explanation) -> Iterator[tuple[object, ...]]:
    verdict = explanation.verdict
    if verdict is not None:
        yield ("tuning", verdict.origin, "chosen" if verdict.chosen else "not chosen", verdict.reason)
        for measured in verdict.times:
            yield ("measured", measured.sku, measured.choice, measured.microseconds, measured.against)
