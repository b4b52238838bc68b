"""What the results of a bench amount to: rates, means, who refused what, and which way of a rival was the fastest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from skuda.tools.bench_record import CaseResult
from skuda.tools.output import count, words

FLUSHES = {
    "clean": "every run finds the L2 cache full of clean lines of something else",
    "dirty": "every run finds the L2 cache full of dirty lines of something else, and pays for writing them back",
}
"""What to say of a record's `flush`."""
ROWS = {"M >= 1024": (1024, math.inf), "64 <= M <= 512": (64, 512), "M <= 16": (1, 16)}
"""What the means of a product are taken over: arithmetic bounds the first and memory the last."""


def means(cases: Sequence[CaseResult]) -> dict[str, dict[str, tuple[float, int]]]:
    """Return geometric means of the ratios of products, by rival and by rows, each with how many cases that are.

    Parameters
    ----------
    cases : sequence of CaseResult
        Of one op; what is no product, and what was refused, counts nowhere.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        for rival in case.rivals if len(case.shape) == 3 else ():
            rows = found.setdefault(rival.name, {})
            for name, (low, high) in ROWS.items():
                if rival.ratio and low <= case.shape[0] <= high:
                    rows.setdefault(name, []).append(rival.ratio)
    return {
        rival: {name: (statistics.geometric_mean(ratios), len(ratios)) for name, ratios in rows.items()}
        for rival, rows in found.items()
        if rows
    }


def choices(cases: Sequence[CaseResult]) -> list[str]:
    """Say which way of a rival was the fastest for which cases: one line for each.

    Parameters
    ----------
    cases : sequence of CaseResult
        Of one op.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for rival in case.rivals:
            if rival.chosen:
                found.setdefault((rival.name, rival.chosen), []).append("x".join(map(str, case.shape)))
    return [f"{name} by {way}: {words(dict.fromkeys(where))}" for (name, way), where in found.items()]


def refusals(cases: Sequence[CaseResult], absent: Collection[str] = ()) -> list[str]:
    """Say which rivals refused which cases, and why: one line for each reason.

    Parameters
    ----------
    cases : sequence of CaseResult
        Of one op.
    absent : collection of str
        Rivals to leave out: they are named elsewhere.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for rival in case.rivals:
            if rival.refused and rival.name not in absent:
                found.setdefault((rival.name, rival.refused), []).append(
                    f"{'x'.join(map(str, case.shape))} {case.element}"
                )
    return [
        f"{name} refuses {words(where) if len(where) <= 3 else count(len(where), 'case')}: {reason}"
        for (name, reason), where in found.items()
    ]


def rate(case: CaseResult) -> str:
    """Write what a case's time is worth: TOPS of a product of more than 64 rows, else TB/s.

    Parameters
    ----------
    case : CaseResult
        The case.
    """
    if len(case.shape) == 3 and case.shape[0] > _FEW and case.operations_per_second is not None:
        return f"{figure(case.operations_per_second / 1e12)} TOPS"
    return "" if case.bytes_per_second is None else f"{figure(case.bytes_per_second / 1e12)} TB/s"


_FEW = 64
"""Rows up to which reading the weight is what a product costs."""


def figure(value: float) -> str:
    """Write a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"
