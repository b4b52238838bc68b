"""Plots of a record of ``skuda bench-parallel``: microseconds by rows, and what a replay consists of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from skuda.tools.parallel.record import INT8_ALL, INT8_ONE, REAL_ALL, REAL_ONE, WAYS, ParallelRecord
from skuda.tools.parallel.trace import Trace
from skuda.tools.plot import INK, Plot, finish, line, row_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_LINES = {REAL_ONE: ("#7A7F85", "^"), REAL_ALL: (INK, "v"), INT8_ONE: ("#4A90C2", "p"), INT8_ALL: ("#0072B2", "o")}
_PARTS = {"product": "#0072B2", "other kernel": "#B8860B", "exchange, not hidden": "#D55E00", "idle": "#C9CDD2"}


def plots(record: ParallelRecord) -> tuple[Plot, ...]:
    """Return the plots of a record: times if there are any, and traces if there are any."""
    where = f"on {record.orders.count} ranks, {record.device}, {record.date[:10]}"
    times, parts = f"Time of a gated MLP {where}", f"What a replay consists of {where}"
    found = []
    if any(result.timings for result in record.results):
        found.append(Plot("times", times, 5.4, partial(_times, record, times)))
    traced = [
        (f"{result.rows}, {way}", result.traces[way][0])
        for result in record.results
        for way in (REAL_ALL, INT8_ALL)
        if way in result.traces
    ]
    if traced:
        found.append(Plot("trace", parts, 1.6 + 0.26 * len(traced), partial(_trace, traced, parts)))
    return tuple(found)


def _times(record: ParallelRecord, title: str, figure: FigureBase) -> None:
    """Draw the microseconds of each way by rows, and under them their ratios to ours on all ranks."""
    times, ratios = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.7, 1]})
    for way in WAYS:
        found = [result for result in record.results if way in result.timings]
        style = {**line(*_LINES[way], bold=way == INT8_ALL), "label": way}
        rows = [result.rows for result in found]
        times.plot(rows, [result.timings[way].median for result in found], **style)
        ratios.plot(rows, [result.gain(way) for result in found], **style)
    times.set(xscale="log", yscale="log", ylabel="us")
    ratios.set(xlabel="rows, M", ylabel=f"time over {INT8_ALL}")
    ratios.set_ylim(bottom=0)
    for axes in (times, ratios):
        row_axis(axes, [result.rows for result in record.results])
    times.tick_params(axis="x", labelbottom=False)
    finish(figure, title, first=INT8_ALL)


def _trace(traced: list[tuple[str, Trace]], title: str, figure: FigureBase) -> None:
    """Draw a bar for each traced replay on the first rank: the shares of its parts, which add up to its total."""
    axes: Axes = figure.subplots()
    names = [name for name, _ in traced]
    left = [0.0] * len(traced)
    for at, (part, colour) in enumerate(_PARTS.items()):
        shares = [100 * _parts(trace)[at] / trace.total if trace.total else 0.0 for _, trace in traced]
        axes.barh(names, shares, left=left, color=colour, label=part, zorder=3)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of a replay", xlim=(0, 100), ylabel="rows, way")
    axes.grid(visible=True, axis="x")
    finish(figure, title, first=next(iter(_PARTS)), last="idle")


def _parts(trace: Trace) -> tuple[float, ...]:
    """Return microseconds in the order of `_PARTS`; where a product and another kernel ran, they are the product's."""
    exposed = trace.exchange - trace.hidden
    return trace.products, trace.total - trace.idle - exposed - trace.products, exposed, trace.idle
