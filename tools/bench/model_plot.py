"""Plots of a record of ``skuda bench-model``: microseconds a block, and time over ours, by rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from skuda.tools.bench.drawing import OURS, style
from skuda.tools.bench.model_record import ModelRecord, PhaseResult
from skuda.tools.plot import Plot, finish, row_axis

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase


def plots(record: ModelRecord) -> tuple[Plot, ...]:
    """Return the plot of a record, with a column for each phase that was timed; none without times."""
    by_phase: dict[str, list[PhaseResult]] = {}
    for phase in sorted(record.phases, key=lambda phase: (phase.phase, phase.rows)):
        if any(way.timing is not None for way in phase.ways):
            by_phase.setdefault(phase.phase, []).append(phase)
    if not by_phase:
        return ()
    title = f"Time of a block of {record.sizes['hidden']} channels on {record.device.name}, {record.date[:10]}"
    return (Plot("blocks", title, 5.4, partial(_blocks, by_phase, record, title)),)


def _blocks(by_phase: dict[str, list[PhaseResult]], record: ModelRecord, title: str, figure: FigureBase) -> None:
    """Draw the microseconds a block by rows, and under them each way's time over the fastest of ours."""
    grid = figure.subplots(2, len(by_phase), squeeze=False, gridspec_kw={"height_ratios": [1.7, 1]})
    for column, (name, phases) in enumerate(by_phase.items()):
        times, ratios = grid[0][column], grid[1][column]
        ratios.sharex(times)
        for who in record.computes:
            found = [(phase.rows, way) for phase in phases for way in phase.ways if way.name == who and way.timing]
            rows = [m for m, _ in found]
            layers = record.sizes["layers"]
            times.plot(rows, [way.timing.median / layers for _, way in found if way.timing], **style(who))
            ratios.plot(rows, [way.ratio for _, way in found], **style(who))
        times.set(xscale="log", yscale="log")
        ratios.set_ylim(bottom=0)
        for axes in (times, ratios):
            row_axis(axes, [phase.rows for phase in phases])
        times.tick_params(axis="x", labelbottom=False)
        times.set_title(name)
        ratios.set_xlabel("sequences, M" if name == "decode" else "positions, M")
        if column == 0:
            times.set_ylabel("us a block")
            ratios.set_ylabel("time over the fastest of ours")
    finish(figure, title, first=OURS)
