"""``skuda explain``: which kernel would run, and why the others would not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skuda.dispatch import KNOWN_DEVICES, Device, Dispatcher, Explanation, PlanPreference, device_named
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.registry.guarantee import PrecisionRequirement
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.tools.explain_page import Page, pairs, short
from skuda.tools.output import plain_table, records, refuse, split, stdout
from skuda.tools.problem import aliases_of, assumptions, convert, default_words, describe, fields_of, type_words


@dataclass(frozen=True)
class Wishes:
    """What the command line insists on, as typed; see `PlanPreference`."""

    device: str = "here"
    backend: str | None = None
    sku: str | None = None
    require: tuple[str, ...] = ()
    max_workspace_bytes: int | None = None
    allow_arch_specific: bool = True


def run(
    tokens: Sequence[str],
    wishes: Wishes,
    *,
    tuning: Path | None = None,
    own_options: Sequence[str] = (),
    show_all: bool = False,
    as_json: bool = False,
) -> int:
    """Explain the choice for a problem.

    Parameters
    ----------
    tokens : sequence of str
        The op's name and the options that describe the problem.
    wishes : Wishes
        Device and preferences.
    tuning : Path or None
        A file of measured times; None for what ``SKUDA_TUNING`` names.
    own_options : sequence of str
        Names of the command's own options, to suggest for a misspelt one.
    show_all : bool
        Whether every refused kernel gets a row.
    as_json : bool
        Print `Explanation.model_dump_json`; the assumed values are among its notes.

    Returns
    -------
    int
        Exit status: 0, or 1 where no kernel serves the problem.

    Raises
    ------
    SkudaError
        For bad input.
    """
    dispatcher = Dispatcher(tuning=tuning)
    op, rest = _op_of(dispatcher.registry, tokens)
    device = _device_of(wishes.device)
    preference = _preference_of(dispatcher.registry, op, wishes)
    problem, assumed = describe(op, rest, own_options)
    explanation = dispatcher.explain(problem, preference, device)
    if as_json:
        notes = (*(f"assumed {text}" for text in pairs(assumed)), *explanation.notes)
        print(explanation.model_copy(update={"notes": notes}).model_dump_json(indent=2))  # noqa: T201
    else:
        console = stdout()
        if console.is_terminal:
            Page(console, dispatcher.registry, explanation, assumed).print(show_all=show_all)
        else:
            _print_records(explanation, assumed)
    return 0 if explanation.chosen is not None else 1


def show_fields(op_name: str) -> int:
    """Print the fields of an op as options.

    Raises
    ------
    InvalidProblem
        For an unknown op.
    """
    op, _ = _op_of(Dispatcher().registry, (op_name,))
    shorter = {field: alias for alias, field in aliases_of(op.descriptor).items()}
    assumed = assumptions(op, {})
    table = plain_table("option", "takes", "default", indent=2)
    for name, field in fields_of(op.descriptor).items():
        option = f"--{name.replace('_', '-')}" + (f", --{shorter[name]}" if name in shorter else "")
        default = f"{short(assumed[name])} (assumed)" if name in assumed else default_words(field)
        table.add_row("", option, type_words(field), default)
    console = stdout()
    console.print(f"\nFields of {op.name}:")
    console.print(table)
    return 0


def _op_of(registry: Registry, tokens: Sequence[str]) -> tuple[Op, list[str]]:
    rest = list(tokens)
    # The op comes first; where options come before it, it is the one word that is an op's name.
    at = 0 if rest and not rest[0].startswith("-") else next((i for i, t in enumerate(rest) if t in registry.ops), None)
    if not rest or at is None:
        raise InvalidProblem("explain", "OP", "nothing", "be named first; `skuda list` names the ops")
    name = rest.pop(at)
    if name not in registry.ops:
        refuse("explain", "OP", name, registry.ops, kind="a registered op", more="`skuda list` names all")
    return registry.ops[name], rest


def _device_of(name: str) -> Device | None:
    try:
        return None if name == "here" else device_named(name)
    except InvalidRecord:
        return refuse("explain", "--device", name, ("here", *KNOWN_DEVICES))


def _preference_of(registry: Registry, op: Op, wishes: Wishes) -> PlanPreference:
    if wishes.backend is not None and wishes.backend not in registry.backends:
        refuse("explain", "--prefer-backend", wishes.backend, registry.backends)
    if wishes.sku is not None and wishes.sku not in {sku.id for sku in registry.skus_of(op.name)}:
        ids = [sku.id for sku in registry.skus_of(op.name)]
        rule = f"a kernel of {op.name}"
        refuse("explain", "--sku", wishes.sku, ids, kind=rule, more=f"`skuda list --skus --op {op.name}` names all")
    fields = fields_of(PrecisionRequirement)
    asked: dict[str, Any] = {}
    for item in split(wishes.require):
        name, equals, text = item.partition("=")
        name = name.strip().replace("-", "_")
        if name not in fields:
            refuse("explain", "--require", name, fields)
        asked[name] = convert(fields[name], text.strip() if equals else "true")
    return PlanPreference(
        backend=wishes.backend,
        sku=wishes.sku,
        require=PrecisionRequirement(**asked),
        max_workspace_bytes=wishes.max_workspace_bytes,
        allow_arch_specific=wishes.allow_arch_specific,
    )


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
