"""An explanation as text: the problem, the choice, and the reasons against the other kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skuda.dispatch import Decision, Explanation
from skuda.dispatch.select.explanation import Verdict
from skuda.registry.reason import Reason
from skuda.registry.registry import Registry
from skuda.tools.output import count, facts, folded, heading, indented, plain_table, words
from skuda.tools.words.problem import pairs

_ANOTHER_FUNCTION = ("element", "aux_element", "layout", "epilogue")
"""Fields whose reasons mean that a kernel computes something else, and not the same thing elsewhere."""

_OPTIONS = {
    "preference.sku": "--sku",
    "preference.backend": "--prefer-backend",
    "preference.allow_arch_specific": "--no-arch-specific",
    "preference.max_workspace_bytes": "--max-workspace-bytes",
}
"""The options of preferences."""

_ACCEPTED_SHOWN, _NAMED, _REPEATED_LENGTH = 8, 4, 120


@dataclass(frozen=True)
class _Group:
    """Refused kernels that share one row.

    `reasons` apply to all of them, one per field; empty if there are too many. `more` of them are also refused for
    other reasons.
    """

    decisions: list[Decision]
    reasons: tuple[Reason, ...]
    more: int = 0


def _computes_it(decision: Decision) -> bool:
    """Whether a kernel computes the problem, so that only device and preferences speak against it."""
    return all(reason.code not in _ANOTHER_FUNCTION for reason in decision.reasons)


def _groups(refused: Iterable[Decision], common: set[Reason]) -> list[_Group]:
    """Group refused kernels that would need the same changes, the nearest to acceptance first.

    Kernels that compute something else are grouped by the one field that differs; if several differ, only their names
    are given.
    """
    grouped: dict[tuple[bool, int, tuple[str, ...]], list[tuple[Decision, list[Reason]]]] = defaultdict(list)
    for decision in refused:
        other = not _computes_it(decision)
        shown = [r for r in decision.reasons if r not in common and (not other or r.code in _ANOTHER_FUNCTION)]
        far = other and len(shown) > 1
        fields = () if far else tuple(f"{reason.code} {reason.field}" for reason in shown)
        grouped[other, 2 if far else len(shown), fields].append((decision, [] if far else shown))
    rows = []
    for key in sorted(grouped, key=lambda key: key[:2]):
        members = grouped[key]
        more = sum(len(set(decision.reasons) - common) > len(shown) > 0 for decision, shown in members)
        rows.append(_Group([decision for decision, _ in members], _merged([shown for _, shown in members]), more))
    return rows


def _merged(shown: list[list[Reason]]) -> tuple[Reason, ...]:
    """Merge the reasons of kernels that are refused over the same fields into one reason per field."""
    return tuple(
        reasons[0].model_copy(
            update={
                "wanted": _either(reason.wanted for reason in reasons),
                "had": _either(reason.had for reason in reasons),
            }
        )
        for reasons in zip(*shown, strict=True)
    )


def _either(texts: Iterable[str]) -> str:
    unique = list(dict.fromkeys(texts))
    text = " or ".join(unique)
    return text if len(unique) == 1 or len(text) <= _REPEATED_LENGTH else f"one of {len(unique)} values"


class Page:
    """An explanation on a terminal; `assumed` are the fields that were not given, with their values."""

    def __init__(self, console: Console, registry: Registry, explanation: Explanation, assumed: dict[str, Any]) -> None:
        self.console, self.registry, self.explanation, self.assumed = console, registry, explanation, assumed
        parts = [decision.sku.split(".") for decision in explanation.decisions]
        self.differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]

    def print(self, *, show_all: bool) -> None:
        """Print everything; with `show_all`, each kernel gets a row."""
        self._question()
        self._answer()
        if self.explanation.decisions:
            self._candidates(show_all=show_all)
        if self.explanation.verdict is not None:
            self._measured(self.explanation.verdict, show_all=show_all)
        for note in self.explanation.notes:
            self.console.print(f"note: {note}", style="yellow")

    def _say(self, text: Text, indent: int = 0) -> None:
        self.console.print(indented(text, indent))

    def _question(self) -> None:
        explanation, device = self.explanation, self.explanation.device
        paper = ", planned on paper" if device.ordinal is None and device.processor != "cpu" else ""
        self._say(Text.assemble((explanation.op, "bold cyan"), f" on {device.describe()}", (paper, "dim")))
        wishes = explanation.preference.model_dump(mode="json", exclude_defaults=True)
        wishes |= wishes.pop("require", {})
        rows = (("problem", self._stated(), ""), ("assumed", self.assumed, "yellow"), ("insist", wishes, ""))
        said = ((label, Text(" ".join(pairs(values)), style=style)) for label, values, style in rows if values)
        self.console.print(facts(said))
        self.console.print()

    def _stated(self) -> dict[str, Any]:
        """Return the problem without its assumed fields; required fields come before those with a default."""
        values = {name: v for name, v in self.explanation.problem.items() if name not in ("op", *self.assumed)}
        fields = self.registry.ops[self.explanation.op].descriptor.model_fields
        return dict(sorted(values.items(), key=lambda item: not fields[item[0]].is_required()))

    def _answer(self) -> None:
        chosen = self.explanation.chosen
        if chosen is None:
            self._say(Text("no kernel serves this problem here", style="bold red"))
            return
        self._say(Text("chosen", style="bold green"))
        self._say(Text(folded(chosen, self.console.width - 2), style="green"), indent=2)
        if self.explanation.choice:
            self._say(Text(f"configuration {self.explanation.choice}", style="green"), indent=2)
        sku = self.registry.sku(chosen)
        if sku is not None:
            self._say(Text(sku.precision_guarantee.describe()), indent=2)

    def _label(self, decision: Decision) -> str:
        """Return the parts of an id that differ between kernels; the common part is printed once above."""
        parts = decision.sku.split(".")
        if _computes_it(decision):
            return " ".join(parts[-3:])
        return " ".join(part for part, differs in zip(parts, self.differs, strict=True) if differs)

    def _candidates(self, *, show_all: bool) -> None:
        explanation = self.explanation
        accepted, refused = explanation.accepted, explanation.refused
        self.console.print()
        self._say(heading(f"{count(len(explanation.decisions), 'candidate')}, {len(accepted)} accepted"))
        near = next((d for d in explanation.decisions if _computes_it(d)), None)
        if near is not None:
            stem = near.sku.rsplit(".", 3)[0]
            self._say(Text(folded(f"ids: {stem}.*.*.*", self.console.width), style="dim"))
        table = plain_table()
        for width in (None, 30, None):
            table.add_column(max_width=width, overflow="fold")
        table.columns[0].no_wrap = True
        shown = accepted if show_all else accepted[:_ACCEPTED_SHOWN]
        for decision in shown:
            first = decision.rank == 0
            verdict = Text("chosen", style="green") if first else Text(f"{(decision.rank or 0) + 1}.")
            table.add_row(verdict, self._label(decision), "" if first else self._promise(decision.sku))
        if len(accepted) > len(shown):
            table.add_row("", f"{len(accepted) - len(shown)} more accepted", "")
        groups = self._refused(table, refused, show_all=show_all)
        self.console.print(table)
        if groups < len(refused) or len(shown) < len(accepted):
            self._say(Text("--all gives every kernel a row", style="dim"))

    def _measured(self, verdict: Verdict, *, show_all: bool) -> None:
        self.console.print()
        self._say(heading(f"measured, by {verdict.origin}"))
        outcome = "chosen by time" if verdict.chosen else "the ranking stays"
        self._say(Text(f"{outcome}: {verdict.reason}", style="green" if verdict.chosen else "yellow"))
        table = plain_table()
        for how in ("right", "left"):
            table.add_column(justify=how, overflow="fold")
        shown = verdict.times if show_all else verdict.times[:_ACCEPTED_SHOWN]
        for measured in shown:
            took = "not timed" if measured.microseconds is None else f"{measured.microseconds:.1f} us"
            name = " ".join(measured.sku.split(".")[-3:]) + (f": {measured.choice}" if measured.choice else "")
            text = Text(name)
            if measured.against:
                text.append(f"\n{measured.against}", style="yellow")
            table.add_row(took, text)
        self.console.print(table)
        if len(shown) < len(verdict.times):
            self._say(Text(f"{len(verdict.times) - len(shown)} more were measured; --all shows them", style="dim"))

    def _refused(self, table: Table, refused: tuple[Decision, ...], *, show_all: bool) -> int:
        """Add the refused kernels to a table and return how many rows they took."""
        common: set[Reason] = set()
        if len(refused) > 1 and not show_all:
            common = set.intersection(*(set(decision.reasons) for decision in refused))
        if common:
            first = [reason for reason in refused[0].reasons if reason in common]
            table.add_row(Text("refused", style="red"), f"all {len(refused)} below", _why(first))
        groups = [_Group([d], d.reasons) for d in refused] if show_all else _groups(refused, common)
        for group in groups:
            table.add_row(Text("refused", style="red"), self._who(group.decisions), self._because(group))
        return len(groups)

    def _promise(self, sku_id: str) -> str:
        sku = self.registry.sku(sku_id)
        return sku.precision_guarantee.describe() if sku is not None else ""

    def _who(self, decisions: list[Decision]) -> str:
        if len(decisions) == 1 or (len(decisions) <= _NAMED and _computes_it(decisions[0])):
            return "\n".join(self._label(decision) for decision in decisions)
        return count(len(decisions), "kernel")

    def _because(self, group: _Group) -> Text:
        text = _why(group.reasons)
        if not group.reasons:
            fields = {r.field for d in group.decisions for r in d.reasons if r.code in _ANOTHER_FUNCTION}
            text = Text(
                f"differ in two or more of {words(sorted(fields))}" if fields else "nothing but that", style="dim"
            )
        elif group.more:
            which = f"{group.more} of them are " if group.more < len(group.decisions) else ""
            text.append(f"\n{which}refused for more than that", style="dim")
        return text


def _why(reasons: Sequence[Reason]) -> Text:
    return Text("\n").join(_one(reason) for reason in reasons)


def _one(reason: Reason) -> Text:
    """Format a reason and its remedy; the expected value is part of the remedy, and preferences are options here."""
    option = _OPTIONS.get(reason.field, reason.field)
    against, change = f"{option}: had {reason.had}", reason.change.replace(reason.field, option)
    if reason.code == "preference":
        against, change = f"{option} speaks against it", f"drop {option}"
    elif reason.code == "guarantee":
        name = reason.field.rpartition(".")[2]
        against, change = f"{name}: asked for {reason.wanted}, promises {reason.had}", "relax --require"
    return Text.assemble(against, " ", (f"-> {change}", "yellow"))
