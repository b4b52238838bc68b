"""The tables of a record of ``skuda bench``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from skuda.kernels.catalog import built_in_registry
from skuda.tools.bench.record import OURS, BenchRecord, CaseResult
from skuda.tools.frame.view import Facts, Parts, Sections, Table
from skuda.tools.output import count, words

_ROWS = {"M >= 1000": (1000, math.inf), "64 <= M < 1000": (64, 999), "M < 64": (1, 63)}
"""Classes of rows for the means of a product: the first is bound by arithmetic and the last by memory."""
_FEW = 64
"""Rows up to which a product is bound by reading the weight, and attention by reading the keys."""
_COMPARED = {"layer": "quantized_linear", "product": "smoothquant_linear"}
"""Ops that are shown beside what else a user could run: a layer, and its product alone, whose codes are given."""
_SIZES = (4096, 4096)
"""N and K of both."""
_TERA = 1e12
_NO_JOB = "copy"
"""A rival of older records that does not do the op's work; its bandwidth is the ceiling."""


def sections(record: BenchRecord) -> Sections:
    """Return the sections.

    ``cases`` (a table for every op), ``means`` (geometric means of products by rows), ``facts``, ``layer`` and
    ``product`` (see `_COMPARED`), and every op.
    """
    ops = {title: _cases(title, list(cases), record) for title, cases in groupby(record.cases, key=_title)}
    return {
        "cases": tuple(part for parts in ops.values() for part in parts),
        "means": _means(record),
        "facts": (_facts(record),),
        **{name: _by_rows(*compared(record, name)) for name in _COMPARED},
        **{title: parts[:1] for title, parts in ops.items()},
    }


def apart(record: BenchRecord) -> list[str]:
    """Return the sections that repeat others."""
    return [*_COMPARED, *dict.fromkeys(map(_title, record.cases))]


def _title(case: CaseResult) -> str:
    title = case.label.partition(f" {case.size} ")[0]
    return f"{title}, random shapes" if case.drawn else title


def names_of(cases: Iterable[CaseResult]) -> list[str]:
    """Return the rivals that were timed in any of the cases."""
    return list(dict.fromkeys(name for case in cases for name in case.times if name not in (OURS, _NO_JOB)))


def _cases(title: str, cases: Sequence[CaseResult], record: BenchRecord) -> Parts:
    """Return the table of an op, and notes on what was refused."""
    names, registry = names_of(cases), built_in_registry()
    rows = []
    for case in cases:
        kernel = ".".join(case.sku.split(".")[-2:]) + (" (stale)" if case.stale(registry) else "")
        us = case.times.get(OURS)
        what = "refused" if us is None else f"{us:.{int(us < 1000)}f}"
        ratios = (ratio(case.ratios.get(name)) for name in names)
        rate, share = _rate(case), _share(case, record)
        rows.append((case.size, case.element, what, rate, share, *ratios, kernel))
    headings = ("shape", "element", "us", "rate", "of ceiling", *(f"x {name}" for name in names), "kernel")
    table = Table(headings, rows, title)
    wrong = [f"{case.label}: {case.refused}" for case in cases if case.refused]
    return (table, *wrong, *_refusals(cases, record.absent))


def _rate(case: CaseResult) -> str:
    """Format a case's rate: TOPS of a product, or attention, of more than 64 rows, else TB/s."""
    if case.timing is None:
        return ""
    many = case.operations > 0 and case.shape[len(case.shape) == 4] > _FEW
    amount, unit = (case.operations, "TOPS") if many else (case.bytes, "TB/s")
    return f"{_figure(amount / case.timing.median * 1e6 / _TERA)} {unit}"


def _share(case: CaseResult, record: BenchRecord) -> str:
    """Format the least time at the ceilings over the median: 100% is as fast as the ceiling."""
    least = record.ceilings.least(case.bytes, case.operations)
    return f"{least / case.timing.median:.0%}" if least and case.timing else ""


def ratio(value: float | None) -> str:
    """Format a time over ours; a dash stands for None."""
    return "-" if value is None else f"{value:.{2 if value < 100 else 0}f}"


def _figure(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 else f"{value:.1g}"


def _refusals(cases: Sequence[CaseResult], absent: Collection[str]) -> list[str]:
    """Return a line for each reason for which rivals refused cases; rivals in `absent` are left out."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for one in case.rivals:
            if one.refused and one.name not in absent:
                found.setdefault((one.name, one.refused), []).append(f"{case.size} {case.element}")
    named = (
        (name, words(where) if len(where) <= 3 else count(len(where), "case"), why)
        for (name, why), where in found.items()
    )
    return [f"{name} refuses {where}: {why}" for name, where, why in named]


def _means(record: BenchRecord) -> Parts:
    """Return geometric means of the ratios of products, by rival and rows."""
    rows = []
    for title, group in groupby(record.cases, key=_title):
        cases = [case for case in group if len(case.shape) == 3]
        for name in names_of(cases):
            found = [(case.shape[0], case.ratios[name]) for case in cases if name in case.ratios]
            classes = ([each for m, each in found if low <= m <= high] for low, high in _ROWS.values())
            rows.append((title, f"x {name}", *map(_mean, classes)))
    about = "x NAME is the time of a rival over ours: above 1, ours is faster. In brackets: the lowest of how many."
    return (Table(("op", "geometric mean", *_ROWS), rows, "Geometric means"), about) if rows else ()


def _mean(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} of {len(ratios)})" if ratios else "-"


def _facts(record: BenchRecord) -> Facts:
    limits = record.ceilings
    rates = {"copy": limits.copy_bandwidth, "bf16 product": limits.bf16, "fp8 product": limits.fp8}
    ceilings = [f"{name} {_figure(value / _TERA)} T/s" for name, value in rates.items() if value is not None]
    ceilings += [f"empty kernel {limits.empty:.2f} us"] if limits.empty is not None else []
    computes: dict[str, dict[str, dict[str, None]]] = {}
    for case in record.cases:
        for one in case.rivals:
            if one.timing:
                computes.setdefault(one.name, {}).setdefault(one.computes, {})[case.op] = None
    # A rival may compute something different for another op.
    rivals = {
        f"x {name}" + (f", {words(ops)}" if len(several) > 1 else ""): text
        for name, several in computes.items()
        for text, ops in several.items()
    }
    clocks = [case.mhz for case in record.cases if case.mhz]
    watts = [case.watts for case in record.cases if case.watts]
    own = {
        "SM clock": f"{min(clocks):.0f} to {max(clocks):.0f} MHz" if clocks else "",
        "power": f"{min(watts):.0f} to {max(watts):.0f} W" if watts else "",
        "rounds": f"{record.repeats} of everything; inputs drawn from seed {record.seed}",
        "L2 cache": "every run finds the L2 cache full of clean lines of something else",
        "ceilings": words(ceilings) + " (bytes, or operations)",
        "notes": words(limits.notes),
    }
    return record.facts(**own, **rivals, **{f"absent: {name}": why for name, why in record.absent.items()})


def compared(record: BenchRecord, what: str) -> tuple[list[CaseResult], list[str]]:
    """Return the timed cases of a ``layer`` or a ``product``, by rows, and the rivals that did the same work.

    Rivals that got an activation in codes where ours did not, or wrote sums where ours wrote results, are left out.
    """
    timed = (case for case in record.cases if case.timing and not case.drawn)
    found = [case for case in timed if (case.op, case.shape[1:], case.element) == (_COMPARED[what], _SIZES, "bf16")]
    rivals = [one for case in found for one in case.rivals]
    less = {one.name for one in rivals if "quantized before" in one.computes or "no dequantization" in one.computes}
    names = [OURS, *(name for name in names_of(found) if name not in less)]
    return sorted(found, key=lambda case: case.shape), names


def _by_rows(cases: Sequence[CaseResult], names: Sequence[str]) -> Parts:
    rows = [(case.shape[0], *(f"{case.times[n]:.1f}" if n in case.times else "-" for n in names)) for case in cases]
    return (Table(("M", *(f"{name}, us" for name in names)), rows),) if rows else ()
