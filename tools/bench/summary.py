"""Summaries of a bench: rates, geometric means, the chosen alternatives of rivals, and refusals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from skuda.tools.bench.record import CaseResult
from skuda.tools.output import count, words

FLUSHES = {
    "clean": "every run finds the L2 cache full of clean lines of something else",
    "dirty": "every run finds the L2 cache full of dirty lines of something else, and pays for writing them back",
}
"""The text for a record's `flush`."""
ROWS = {"M >= 1000": (1000, math.inf), "64 <= M < 1000": (64, 999), "M < 64": (1, 63)}
"""Classes of rows for the means of a product: the first is bound by arithmetic and the last by memory."""
_LARGE = "M * N * K >= 2^33"
_FEW = 64
"""Rows up to which a product is bound by reading the weight."""


class Mean(NamedTuple):
    """The geometric mean of some ratios, their number, the lowest, and the size of its case."""

    mean: float
    cases: int
    lowest: float
    size: str


def means(cases: Sequence[CaseResult], *, large: bool = False) -> dict[str, dict[str, Mean]]:
    """Return geometric means of the ratios of one op's products, by rival and by rows.

    With `large`, there is a class of large products besides. Cases that are not products or were refused are left out.
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for case in cases:
        for rival in case.rivals if len(case.shape) == 3 else ():
            rows = found.setdefault(rival.name, {})
            names = [name for name, (low, high) in ROWS.items() if low <= case.shape[0] <= high]
            if large and math.prod(case.shape) >= 1 << 33:
                names.append(_LARGE)
            for name in names if rival.ratio else ():
                rows.setdefault(name, []).append((rival.ratio or 0.0, case.size))
    return {
        rival: {
            name: Mean(statistics.geometric_mean(ratio for ratio, _ in rows[name]), len(rows[name]), *min(rows[name]))
            for name in (*ROWS, _LARGE)
            if name in rows
        }
        for rival, rows in found.items()
        if rows
    }


def band_cells(cases: Sequence[CaseResult]) -> list[tuple[str, ...]]:
    """Return the means as text: rival, class, geometric mean, number of cases, lowest ratio and its case."""
    return [
        (f"x {rival}", band, f"{mean.mean:.3f}", str(mean.cases), f"{mean.lowest:.3f}", mean.size)
        for rival, bands in means(cases, large=True).items()
        for band, mean in bands.items()
    ]


def choices(cases: Sequence[CaseResult]) -> list[str]:
    """Return one line for each alternative of a rival that was the fastest, with its cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for rival in case.rivals:
            if rival.chosen:
                found.setdefault((rival.name, rival.chosen), []).append(case.size)
    return [f"{name} by {chosen}: {words(dict.fromkeys(where))}" for (name, chosen), where in found.items()]


def refusals(cases: Sequence[CaseResult], absent: Collection[str] = ()) -> list[str]:
    """Return one line for each reason for which rivals refused cases; rivals in `absent` are left out."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for rival in case.rivals:
            if rival.refused and rival.name not in absent:
                found.setdefault((rival.name, rival.refused), []).append(f"{case.size} {case.element}")
    return [
        f"{name} refuses {words(where) if len(where) <= 3 else count(len(where), 'case')}: {reason}"
        for (name, reason), where in found.items()
    ]


def largest(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Return the case of every op and element that moves the most bytes."""
    found = {(case.op, case.element): case for case in sorted(cases, key=lambda case: case.bytes)}
    return list(found.values())


def rate(case: CaseResult) -> str:
    """Format a case's rate: TOPS of a product of more than 64 rows, else TB/s."""
    if len(case.shape) == 3 and case.shape[0] > _FEW and case.operations_per_second is not None:
        return f"{figure(case.operations_per_second / 1e12)} TOPS"
    return "" if case.bytes_per_second is None else f"{figure(case.bytes_per_second / 1e12)} TB/s"


def timed_rivals(cases: Iterable[CaseResult]) -> list[str]:
    """Return the rivals that were timed in any of the cases."""
    return list(dict.fromkeys(rival.name for case in cases for rival in case.rivals if rival.timing))


def clocked(cases: Iterable[CaseResult]) -> bool:
    """Whether the clock was read while any of the products ran."""
    return any(case.operations_per_cycle for case in cases)


def per_clock(case: CaseResult) -> str:
    """Format a product's TOPS per GHz of the actual clock, and that clock."""
    if case.operations_per_cycle is None or case.mhz is None:
        return ""
    return f"{figure(case.operations_per_cycle / 1e3)} at {case.mhz / 1e3:.2f}"


def cells(case: CaseResult, rivals: Sequence[str]) -> tuple[str, ...]:
    """Format a timed case: size, element, microseconds, rate, share of the ceiling, and the rivals' ratios."""
    us = case.timing.median if case.timing else 0.0
    share = "" if case.ceiling_share is None else f"{case.ceiling_share:.0%}"
    ratios = {rival.name: rival.ratio for rival in case.rivals}
    base = (case.size, case.element, f"{us:.{int(us < 1000)}f}", rate(case), share)
    return (*base, *(ratio(ratios.get(name)) for name in rivals))


def mean_cells(cases: Sequence[CaseResult]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the classes of rows that occur, and for each rival its name and its mean in each class, as text."""
    found = means(cases)
    names = [name for name in ROWS if any(name in by_rows for by_rows in found.values())]

    def text(mean: Mean | None) -> str:
        return "-" if mean is None else f"{mean.mean:.2f} ({mean.cases})"

    return names, [(f"x {rival}", *(text(by_rows.get(name)) for name in names)) for rival, by_rows in found.items()]


def ratio(value: float | None) -> str:
    """Format a ratio; a dash stands for None."""
    return "-" if value is None else f"{value:.{2 if value < 100 else 0}f}"


def figure(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"
