"""Plots of a record of ``skuda train-check``: the loss over the steps, and held-out bits per byte."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from skuda.tools.plot import INK, Plot, finish, line
from skuda.tools.train.record import BASELINE, FIGURES, TrainRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

_LINES = {BASELINE: (INK, "v"), "fake": ("#0072B2", "o"), "mixed": ("#D55E00", "s")}
_OTHER = ("#7A7F85", "h")


def plots(record: TrainRecord) -> tuple[Plot, ...]:
    """Return the plots of a record; none without ways."""
    if not record.ways:
        return ()
    where = f"{record.device}, {record.date[:10]}"
    loss, bits = f"Training loss on {where}", f"Held-out bits per byte on {where}"
    return (
        Plot("loss", loss, 4.4, partial(_loss, record, loss)),
        Plot("held-out", bits, 2.8, partial(_held_out, record, bits)),
    )


def _loss(record: TrainRecord, title: str, figure: FigureBase) -> None:
    """Draw the mean loss of every interval at its last step."""
    axes: Axes = figure.subplots()
    for result in record.ways:
        steps = [min(at * record.every, record.steps) for at in range(1, len(result.losses) + 1)]
        axes.plot(steps, result.losses, **_style(result.way, markersize=2.5))
    axes.set(xlabel="step", ylabel=f"nats per byte, mean of {record.every}")
    axes.grid(visible=True)
    finish(figure, title, first=BASELINE)


def _held_out(record: TrainRecord, title: str, figure: FigureBase) -> None:
    """Draw the bits per byte of each way by how the model runs, and the bound above those of bf16 as trained."""
    axes: Axes = figure.subplots()
    names = list(dict.fromkeys(name for result in record.ways for name in result.held_out))[::-1]
    for result in record.ways:
        at = [names.index(name) for name in result.held_out]
        axes.plot(list(result.held_out.values()), at, **_style(result.way, linestyle="none"))
        if result.way == BASELINE:
            bound = result.held_out["trained"] * (1 + record.tolerance / 100)
            label = f"{BASELINE} + {record.tolerance:g} %"
            axes.axvline(bound, color=INK, linewidth=1.2, linestyle="--", zorder=2, label=label)
    axes.set_yticks(range(len(names)), [FIGURES.get(name, name).rpartition(", ")[2] for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel("bits per byte")
    axes.grid(visible=True)
    finish(figure, title, first=BASELINE)


def _style(way: str, **more: Any) -> dict[str, Any]:
    return {**line(*_LINES.get(way, _OTHER), bold=way != BASELINE), "label": way, **more}
