"""Plots of a record of ``skuda bench``: rooflines, speed by rows, time by bytes, and bandwidth by op."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

from skuda.tools.bench.drawing import COLUMNS, bandwidth, moved, points, roofline, speed, throughput
from skuda.tools.bench.record import BenchRecord, CaseResult
from skuda.tools.bench.summary import largest
from skuda.tools.plot import Plot

_LARGE = 1024
"""Rows from which a product is bound by arithmetic and not by memory."""


def plots(record: BenchRecord) -> tuple[Plot, ...]:
    """Return the plots for which a record has points.

    Every product and element gets a roofline, the speed by rows of every weight that was measured with several numbers
    of rows, and the throughput at large numbers of rows. The other ops share two plots: the time by bytes, and the
    bandwidth at each op's largest shape.
    """
    found = []
    timed = [case for case in record.cases if case.timing is not None and case.bytes]
    products = [case for case in timed if case.operations]
    for op, element in dict.fromkeys((case.op, case.element) for case in products):
        mine = [case for case in products if (case.op, case.element) == (op, element)]
        what = f"{op} {element} on {_where(record)}"
        # The fields of a record are arbitrary text, and this one becomes a file name.
        stem = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{op}-{element}")
        title = f"Roofline of {what}"
        found.append(Plot(f"roofline-{stem}", title, 5.4, partial(roofline, points(mine), record, title)))
        weights = _by_weight(mine)
        if weights:
            title = f"Speed by rows of {what}"
            blocks = math.ceil(len(weights) / COLUMNS)
            draw = partial(speed, weights, title)
            found.append(Plot(f"speed-{stem}", title, 1.1 + 4.4 * blocks, draw))
        large = [case for case in mine if case.shape[0] >= _LARGE]
        if large:
            title = f"Throughput of {what}"
            found.append(Plot(f"throughput-{stem}", title, 4.2, partial(throughput, points(large), title)))
    others = [case for case in timed if not case.operations]
    if others:
        title = f"Time by bytes on {_where(record)}"
        found.append(Plot("bytes", title, 5.4, partial(moved, points(others), record, title)))
        title = f"Bandwidth at the largest shape on {_where(record)}"
        rows = len({case.op for case in others})
        draw = partial(bandwidth, points(largest(others)), record, title)
        found.append(Plot("bandwidth", title, 1.7 + 0.24 * rows, draw))
    return tuple(found)


def _where(record: BenchRecord) -> str:
    return f"{record.device.name}, {record.date[:10]}"


def _by_weight(cases: Sequence[CaseResult]) -> dict[tuple[int, ...], list[CaseResult]]:
    """Return the cases of each weight, by N and K and in order of M, if there are several."""
    found: dict[tuple[int, ...], list[CaseResult]] = {}
    for case in cases:
        found.setdefault(case.shape[1:], []).append(case)
    return {
        weight: sorted(mine, key=lambda case: case.shape)
        for weight, mine in found.items()
        if len({case.shape for case in mine}) > 1
    }
