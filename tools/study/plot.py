"""Plots as data, and their files: equal records give equal bytes."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.files import check as check_writable
from skuda.tools.files import replacing
from skuda.tools.study.record import Record

_INK = "#1b1f24"
_FORMATS = frozenset({".png", ".svg", ".pdf"})
_WIDTH = 9.0
_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 11,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "svg.fonttype": "none",
    # matplotlib would read dollar signs in a name as a formula.
    "text.parse_math": False,
}
_BOLD = ("skuda", "skuda xN", "fake")
_MARKS = {
    **dict.fromkeys(_BOLD, ("#0072B2", "o")),
    **dict.fromkeys(("cutlass", "mixed"), ("#D55E00", "s")),
    **dict.fromkeys(("bf16", "bf16 xN"), (_INK, "v")),
    **dict.fromkeys(("bf16 compiled", "bf16 x1"), ("#7A7F85", "^")),
    **dict.fromkeys(("fp8", "skuda x1"), ("#009E73", "D")),
    "skuda compiled": ("#0072B2", "p"),
    "torchao": ("#4A90C2", "X"),
    "compile": ("#B8860B", "<"),
    "bitsandbytes": ("#C4649A", "P"),
}
"""Colour and marker by name: Okabe and Ito's palette, with light colours darkened to be visible on white."""
_OTHER = ("#7A7F85", "h")


class Series(NamedTuple):
    """Points of one name, which a `line` joins."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = True


class Panel(NamedTuple):
    """Series over axes with the labels `x` and `y`.

    `log` names the axes that are logarithmic: ``xy``, ``x`` or none. `ticks` are those of a logarithmic x axis, and
    `high` is the height in inches.
    """

    series: Sequence[Series]
    x: str
    y: str = ""
    title: str = ""
    log: str = ""
    ticks: Sequence[int] = ()
    high: float = 3.0


def by_rows(
    points: Sequence[tuple[int, Mapping[str, float], Mapping[str, float]]],
    x: str,
    labels: tuple[str, str],
    title: str = "",
) -> tuple[Panel, Panel]:
    """Return a panel of times by rows, and one of ratios to stand below; a point is rows, times and ratios by name."""
    names = dict.fromkeys(name for _, times, _ in points for name in times)
    rows = {name: [m for m, times, _ in points if name in times] for name in names}
    above = [Series(name, rows[name], [times[name] for _, times, _ in points if name in times]) for name in names]
    below = [
        Series(name, rows[name], [ratios.get(name, math.nan) for _, times, ratios in points if name in times])
        for name in names
    ]
    ticks = [m for m, _, _ in points]
    return Panel(above, "", labels[0], title, "xy", ticks), Panel(below, x, labels[1], "", "x", ticks, 1.8)


class Plot(NamedTuple):
    """One plot: the stem of its file, its title, and its panels in rows."""

    name: str
    title: str
    panels: Sequence[Sequence[Panel]]

    @property
    def heights(self) -> list[float]:
        """Heights of the rows in inches."""
        return [max(panel.high for panel in row) for row in self.panels]


def save(record: Record, plots: Sequence[Plot], path: Path) -> list[Path]:
    """Write the plots of a record and return the files.

    A path that ends in ``.png``, ``.svg`` or ``.pdf`` is one file for all plots; any other path is a folder, which is
    created, with one SVG for each plot.

    Raises
    ------
    InvalidProblem
        For another suffix, a file that cannot be written, or a record without plots.
    MissingDependency
        If matplotlib is not installed.
    """
    command, suffix = record.maker(), path.suffix.lower()
    check(command, path)
    if not plots:
        raise InvalidProblem(command, "--plot", str(path), "be left out of a run in which nothing was timed")
    files = {path: plots} if suffix in _FORMATS else {path / f"{plot.name}.svg": [plot] for plot in plots}
    try:
        for file, drawn in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as fresh:
                fresh.write_bytes(rendered(drawn, file.suffix.lower()[1:], record.digest()))
    except OSError as error:
        raise InvalidProblem(command, "--plot", str(path), f"be a place that can be written to ({error})") from error
    return list(files)


def check(command: str, path: Path) -> None:
    """Raise the errors that `save` would raise for a path, before anything is measured."""
    if path.suffix and path.suffix.lower() not in _FORMATS and not path.is_dir():
        raise InvalidProblem(command, "--plot", str(path), "end in .png, .svg or .pdf, or be a folder")
    if find_spec("matplotlib") is None:
        raise MissingDependency("matplotlib", "pip install 'matplotlib>=3.8'")
    is_file = path.suffix.lower() in _FORMATS and os.path.lexists(path)
    check_writable(command, "--plot", path, folder=not is_file)


def rendered(plots: Sequence[Plot], suffix: str, source: str = "") -> bytes:
    """Return plots, one below the other, as the bytes of a ``png``, ``svg`` or ``pdf``.

    `source` becomes the ``Source`` in an SVG's metadata. There is no date and no version of matplotlib in the file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Creator": None, "Source": source},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "png": {"Software": None},
    }
    with rc_context({**_STYLE, "svg.hashsalt": " ".join(plot.name for plot in plots)}):
        heights = [1 + sum(plot.heights) for plot in plots]
        figure = Figure(figsize=(_WIDTH, sum(heights)), dpi=150, layout="constrained", facecolor="white")
        parts: Any = figure.subfigures(len(plots), 1, height_ratios=heights, squeeze=False)
        for plot, (part,) in zip(plots, parts, strict=True):
            draw(plot, part)
        made = io.BytesIO()
        figure.savefig(made, format=suffix, metadata=metadata[suffix])
    if suffix != "svg":
        return made.getvalue()
    # Attributes are rounded down to hundredths of a point, which saves a third of the file.
    return re.sub(rb'"[^"]*\.\d{3}[^"]*"', lambda one: re.sub(rb"(\.\d\d)\d+", rb"\1", one[0]), made.getvalue())


def draw(plot: Plot, figure: Any) -> None:
    """Draw a plot on a figure of matplotlib, with one legend for all panels."""
    columns, ratios = max(map(len, plot.panels)), {"height_ratios": plot.heights}
    grid = figure.subplots(len(plot.panels), columns, squeeze=False, gridspec_kw=ratios)
    for row, panels in zip(grid, plot.panels, strict=True):
        for axes, panel in zip(row, panels, strict=False):
            _draw_panel(axes, panel)
    figure.suptitle(plot.title, x=0.01, ha="left", weight="bold")
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handles = {name: handle for legend in legends for handle, name in legend}
    names = sorted(handles, key=lambda name: name not in _BOLD)  # ours is the first
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=min(8, len(names)))


def _draw_panel(axes: Any, panel: Panel) -> None:
    for one in panel.series:
        axes.plot(one.x, one.y, label=one.name, **_style(one))
    for axis in panel.log:
        axes.set(**{f"{axis}scale": "log"})
        ruler = getattr(axes, f"{axis}axis")
        ruler.set_major_formatter(lambda value, _: f"{value:g}")  # 1000, not a power of ten
        ruler.set_minor_formatter(lambda *_: "")
    if panel.ticks:
        axes.set_xticks(panel.ticks, [str(tick) for tick in panel.ticks])
        axes.set_xticks([], minor=True)
        axes.tick_params(axis="x", labelrotation=60 if len(panel.ticks) > 6 else 0)
    if "y" not in panel.log:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title)
    axes.grid(visible=True)


def _style(one: Series) -> dict[str, Any]:
    (colour, marker), bold = _MARKS.get(one.name, _OTHER), one.name in _BOLD
    fill = colour if bold else "none"
    # Hollow markers over a filled one stay visible where they overlap.
    width, order, line = (1.8, 3, "-") if bold else (1.0, 4, "-")
    marks = {"marker": marker, "markersize": 5 + bold, "markeredgecolor": colour, "markerfacecolor": fill}
    return {"color": colour, "linewidth": width, "zorder": order, "linestyle": line if one.line else "none", **marks}
