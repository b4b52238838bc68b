"""``skuda diff``: the differences between two locks in kernels, guarantees and selections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from rich.console import Console

from skuda.registry.guarantee import PrecisionGuarantee, exceeds
from skuda.tools.options import All, Json, argument
from skuda.tools.output import present, tell
from skuda.tools.ship.lock import Answer, Lock, read_lock

_FIRST = 3
"""Number of differences of one kind and op that are printed by default."""

SAME_SPEED = 1.25
"""Largest factor between predicted times that count as equal, so that a small refit of a model is no difference."""

KINDS = {
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
"""The kinds of differences, worst first, with their descriptions."""


def run(
    old: Annotated[Path, argument("OLD", "What `skuda lock` wrote before.")],
    new: Annotated[Path, argument("NEW", "What it writes now.")],
    *,
    show_all: All = False,
    as_json: Json = False,
) -> int:
    """Say which problems get another kernel, promise or speed.

    Exits with 0 where nothing differs, with 1 where anything does. Predicted times count where they differ by more
    than a factor of 1.25.
    """
    found = compare(read_lock("OLD", old), read_lock("NEW", new))

    def person(console: Console) -> None:
        for line in summary(found, None if show_all else _FIRST):
            console.print(line, style=None if line.startswith(" ") else "bold", soft_wrap=True)

    value = [{**difference._asdict(), "means": KINDS[difference.kind]} for difference in found]
    present(value, person, as_json=as_json)
    if not found:
        tell("no difference", "green")
    return 1 if found else 0


class Difference(NamedTuple):
    """One difference between two locks.

    `kind` is one of `KINDS`; `what` is problem and device, or the id of a kernel; `old` and `new` are from each lock.
    """

    kind: str
    op: str
    what: str
    old: str
    new: str


def compare(old: Lock, new: Lock) -> list[Difference]:
    """Return the differences between two locks, worst first.

    Predicted times differ if their ratio exceeds `SAME_SPEED`.
    """
    found = [*_compare_skus(old, new), *_compare_answers(old, new)]
    return sorted(found, key=lambda difference: list(KINDS).index(difference.kind))


def _compare_skus(old: Lock, new: Lock) -> Iterator[Difference]:
    for sku in dict.fromkeys((*old.promised, *new.promised)):
        op, was, now = sku.split(".")[1], old.promised.get(sku), new.promised.get(sku)
        change = "removed" if now is None else "added" if was is None else _guarantee_change(was, now)
        if change:
            texts = [guarantee.describe() if guarantee is not None else "" for guarantee in (was, now)]
            yield Difference(f"SKU {change}", op, sku, *texts)


def _compare_answers(old: Lock, new: Lock) -> Iterator[Difference]:
    before, after = dict(old.answers()), dict(new.answers())
    for place in dict.fromkeys((*before, *after)):
        op, problem, device = place
        was, now = before.get(place), after.get(place)
        what, texts = f"{problem} on {device}", [str(was or ""), str(now or "")]
        if was is None or now is None:
            yield Difference("row removed" if now is None else "row added", op, what, *texts)
        elif was.kernel is None or now.kernel is None:
            if was.kernel != now.kernel:
                yield Difference("unsupported" if now.kernel is None else "supported", op, what, *texts)
        else:
            if was.kernel != now.kernel:
                yield Difference("kernel", op, what, *texts)
            elif was.rank != now.rank:
                yield Difference("ranking", op, what, f"behind {was.rank}", f"behind {now.rank}")
            promises = old.promised[was.kernel], new.promised[now.kernel]
            change = _guarantee_change(*promises)
            if change:
                yield Difference(change, op, what, *(promise.describe() for promise in promises))
            change = _speed_change(was, now)
            if change:
                yield Difference(change, op, what, *texts)
            if bool(was.why) != bool(now.why):
                yield Difference("trouble", op, what, *texts)


def _speed_change(was: Answer, now: Answer) -> str | None:
    if was.us is None or now.us is None or max(was.us, now.us) <= min(was.us, now.us) * SAME_SPEED:
        return None
    return "slower" if now.us > was.us else "faster"


def _guarantee_change(old: PrecisionGuarantee, new: PrecisionGuarantee) -> str | None:
    """Describe the change of a guarantee; it is weaker if it lacks any old guarantee, whatever it adds."""
    if old == new:
        return None
    if exceeds(old, new) is not None:
        return "weaker"
    return "stronger" if exceeds(new, old) is not None else "otherwise"


def summary(differences: Sequence[Difference], most: int | None) -> Iterator[str]:
    """Yield lines by kind, then by op with the number of differences, then the first `most`; None for all."""
    groups: dict[str, dict[str, list[Difference]]] = {}
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
