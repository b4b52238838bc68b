"""In what two locks differ: kernels, what they promise, and who gets which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from skuda.registry.guarantee import PrecisionGuarantee, exceeds
from skuda.tools.locking import Answer, Lock

SAME_SPEED = 1.25
"""Predicted times that differ by no more than this factor are of one speed class: a small refit is no other choice."""

Kind = Literal[
    "unsupported", "supported", "kernel", "weaker", "stronger", "otherwise", "slower", "faster", "ranking", "trouble",
    "row removed", "row added", "SKU removed", "SKU added", "SKU weaker", "SKU stronger", "SKU otherwise",
]  # fmt: skip
Change = Literal["weaker", "stronger", "otherwise"]
KINDS: dict[Kind, str] = {
    "unsupported": "served by no kernel any more",
    "supported": "served by a kernel now",
    "kernel": "another kernel",
    "weaker": "a weaker guarantee",
    "stronger": "a stronger guarantee",
    "otherwise": "another arithmetic under the same promises",
    "slower": f"slower by more than {SAME_SPEED}, as predicted",
    "faster": f"faster by more than {SAME_SPEED}, as predicted",
    "ranking": "the same kernel, at another place of the ranking",
    "trouble": "a launch rule that fails, or does so no more",
    "row removed": "asked about no more",
    "row added": "asked about now",
    "SKU removed": "kernels that are gone",
    "SKU added": "new kernels",
    "SKU weaker": "kernels that promise less",
    "SKU stronger": "kernels that promise more",
    "SKU otherwise": "kernels that compute in another arithmetic under the same promises",
}
"""What a difference can be, worst first, in words."""


class Difference(NamedTuple):
    """One thing in which two locks differ.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    op : str
        The op.
    what : str
        Problem and device, or the id of a kernel.
    old, new : str
        What there was, and is.
    """

    kind: Kind
    op: str
    what: str
    old: str
    new: str


def compare(old: Lock, new: Lock) -> list[Difference]:
    """Return in what two locks differ, worst first.

    Predicted times count where they are of another speed class; see `SAME_SPEED`.
    """
    found = [*_compare_skus(old, new), *_compare_answers(old, new)]
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(found, key=lambda difference: order[difference.kind])


def _compare_skus(old: Lock, new: Lock) -> Iterator[Difference]:
    kinds: dict[Change, Kind] = {"weaker": "SKU weaker", "stronger": "SKU stronger", "otherwise": "SKU otherwise"}
    for sku in dict.fromkeys((*old.promised, *new.promised)):
        op, was, now = sku.split(".")[1], old.promised.get(sku), new.promised.get(sku)
        if was is None or now is None:
            kind: Kind = "SKU removed" if now is None else "SKU added"
            yield Difference(kind, op, sku, was.describe() if was else "", now.describe() if now else "")
        elif change := _guarantee_change(was, now):
            yield Difference(kinds[change], op, sku, was.describe(), now.describe())


def _compare_answers(old: Lock, new: Lock) -> Iterator[Difference]:
    before, after = dict(old.answers()), dict(new.answers())
    for place in dict.fromkeys((*before, *after)):
        op, problem, device = place
        was, now = before.get(place), after.get(place)
        what = f"{problem} on {device}"
        if was is None or now is None:
            yield Difference("row removed" if now is None else "row added", op, what, str(was or ""), str(now or ""))
            continue
        for kind in _changes(old, new, was, now):
            told = [str(was), str(now)]
            if kind in {"weaker", "stronger", "otherwise"}:
                told = [lock.promised[answer.sku or ""].describe() for lock, answer in ((old, was), (new, now))]
            elif kind == "ranking":
                told = [f"behind {answer.rank}" for answer in (was, now)]
            yield Difference(kind, op, what, *told)


def _changes(old: Lock, new: Lock, was: Answer, now: Answer) -> Iterator[Kind]:
    if was.sku is None or now.sku is None:
        if was.sku is not None:
            yield "unsupported"
        elif now.sku is not None:
            yield "supported"
        return
    if was.sku != now.sku:
        yield "kernel"
    elif was.rank != now.rank:
        yield "ranking"
    yield from filter(None, (_guarantee_change(old.promised[was.sku], new.promised[now.sku]), _speed_change(was, now)))
    if bool(was.why) != bool(now.why):
        yield "trouble"


def _speed_change(was: Answer, now: Answer) -> Literal["slower", "faster"] | None:
    if was.us is None or now.us is None:
        return None
    if max(was.us, now.us) <= min(was.us, now.us) * SAME_SPEED:
        return None
    return "slower" if now.us > was.us else "faster"


def _guarantee_change(old: PrecisionGuarantee, new: PrecisionGuarantee) -> Change | None:
    """Say how a promise changed; weaker where anything that was promised is not, whatever else is promised more."""
    if old == new:
        return None
    if exceeds(old, new) is not None:
        return "weaker"
    return "stronger" if exceeds(new, old) is not None else "otherwise"


def summary(differences: Sequence[Difference], most: int | None) -> Iterator[str]:
    """Return differences as lines: by kind, then by op with how many there are, then the first ones of each.

    Parameters
    ----------
    differences : sequence of Difference
        As `compare` returns them.
    most : int or None
        How many of each kind and op are told; None for all.
    """
    groups: dict[Kind, dict[str, list[Difference]]] = {}
    for difference in differences:
        groups.setdefault(difference.kind, {}).setdefault(difference.op, []).append(difference)
    for kind, ops in groups.items():
        yield f"{KINDS[kind]}: {sum(map(len, ops.values()))}"
        for op, mine in ops.items():
            yield f"  {op}: {len(mine)}"
            for difference in mine[:most]:
                yield f"    {difference.what}"
                yield from (
                    f"      {sign} {text}" for sign, text in (("-", difference.old), ("+", difference.new)) if text
                )
            if most is not None and len(mine) > most:
                yield f"    and {len(mine) - most} more"
