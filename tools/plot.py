"""Plots of records: one file for each or for all, with equal bytes for equal records."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.files import check as check_writable
from skuda.tools.files import replacing
from skuda.tools.output import stderr
from skuda.tools.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

INK = "#1b1f24"
"""Colour of text, axes and ceilings; the report page replaces it with its own."""
_FORMATS = frozenset({".png", ".svg", ".pdf"})
_WIDTH = 9.0


@dataclass(frozen=True)
class Plot:
    """One plot of a record: the stem of its file, its title, its height in inches, and the function that draws it."""

    name: str
    title: str
    height: float
    draw: Callable[[FigureBase], None]


def save(record: Record, found: Sequence[Plot], path: Path) -> list[Path]:
    """Write the plots of a record and return the files.

    A path that ends in ``.png``, ``.svg`` or ``.pdf`` is one file for all plots; any other path is a folder, which is
    created, with one SVG per plot.

    Raises
    ------
    InvalidProblem
        For another suffix, a file that cannot be written, or a record without plots.
    MissingDependency
        If matplotlib is not installed.
    """
    command = record.maker()
    check(command, path)
    if not found:
        raise InvalidProblem(command, "--plot", str(path), "be left out of a run in which nothing was timed")
    whole = path.suffix.lower() in _FORMATS
    try:
        (path.parent if whole else path).mkdir(parents=True, exist_ok=True)
        together = {path: found} if whole else {path / f"{plot.name}.svg": [plot] for plot in found}
        for file, drawn in together.items():
            content = rendered(drawn, file.suffix.lower()[1:], source=digest(record))
            with replacing(file) as fresh:
                fresh.write_bytes(content)
    except OSError as error:
        raise InvalidProblem(command, "--plot", str(path), f"be a place that can be written to ({error})") from error
    return list(together)


def save_and_tell(record: Record, found: Sequence[Plot], path: Path) -> None:
    """Do what `save` does, and name the files on standard error."""
    for file in save(record, found, path):
        stderr().print(f"wrote {file}", style="dim", soft_wrap=True)


def check(command: str, path: Path) -> None:
    """Raise the errors that `save` would raise for a path, before anything is measured."""
    if path.suffix and path.suffix.lower() not in _FORMATS and not path.is_dir():
        raise InvalidProblem(command, "--plot", str(path), "end in .png, .svg or .pdf, or be a folder")
    if not drawable():
        raise MissingDependency("matplotlib", "pip install 'matplotlib>=3.8'")
    whole = path.suffix.lower() in _FORMATS and os.path.lexists(path)
    check_writable(command, "--plot", path, folder=not whole)


def drawable() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.titlesize": 11,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    # matplotlib would read dollar signs in a name as a formula.
    "text.parse_math": False,
}


def rendered(found: Sequence[Plot], suffix: str, *, source: str = "", inline: bool = False) -> bytes:
    """Return plots, one below the other, as the bytes of a file; equal records give equal bytes.

    `suffix` is ``png``, ``svg`` or ``pdf``; `source` is the ``Source`` in an SVG's metadata. `inline` leaves the
    background out, for the report page.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # The metadata has no date and no version of matplotlib, so that equal records give equal files.
    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Creator": None, "Source": source},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "png": {"Software": None},
    }
    with rc_context({**_STYLE, "svg.hashsalt": " ".join(plot.name for plot in found)}):
        size = (_WIDTH, sum(plot.height for plot in found))
        figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="none" if inline else "white")
        if len(found) == 1:
            found[0].draw(figure)
        else:
            parts: Any = figure.subfigures(len(found), 1, height_ratios=[plot.height for plot in found])
            for plot, part in zip(found, parts, strict=True):
                plot.draw(part)
        made = io.BytesIO()
        figure.savefig(made, format=suffix, transparent=inline, metadata=metadata[suffix])
    return _LONG.sub(_shortened, made.getvalue().decode()).encode() if suffix == "svg" else made.getvalue()


_LONG = re.compile(r'"[^"]*\.\d{3}[^"]*"')


def _shortened(attribute: re.Match[str]) -> str:
    """Round an attribute's numbers down to hundredths of a point, which saves a third of the file."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])


def digest(record: Record) -> str:
    """Return a hash of a record for the ``Source`` of its plots, so that a plot of another record is detected."""
    return hashlib.sha256(record.model_dump_json(exclude=record.undrawn).encode()).hexdigest()[:16]


def line(colour: str, marker: str, *, bold: bool = False) -> dict[str, Any]:
    """Return matplotlib's arguments for the points of one contestant; those of a bold one are filled."""
    return {
        "color": colour,
        "marker": marker,
        "markersize": 6 if bold else 5,
        "markeredgecolor": colour,
        "markerfacecolor": colour if bold else "none",
        "markeredgewidth": 1.1,
        "linewidth": 1.8 if bold else 1.0,
        # Hollow markers over a filled one stay visible where they overlap.
        "zorder": 3 if bold else 4,
    }


def row_axis(axes: Axes, rows: Sequence[int]) -> None:
    """Give an axis of numbers of rows a tick for each of them, and plain numbers to logarithmic axes."""
    plain_numbers(axes)
    axes.set_xticks(rows, [str(m) for m in rows])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelrotation=60 if len(rows) > 6 else 0)
    axes.grid(visible=True)


def plain_numbers(axes: Axes) -> None:
    """Write 1000 instead of a power of ten on a logarithmic axis."""
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda *_: "")


def finish(figure: FigureBase, title: str, *, first: str = "", last: str = "") -> None:
    """Give a figure its title, and one legend for all of its axes, with a first and a last label if they are there."""
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    every: Any = figure.axes
    legends = [axes.get_legend_handles_labels() for axes in every]
    found = {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}
    names = sorted(found, key=lambda name: (name == last, name != first))
    figure.legend([found[name] for name in names], names, loc="outside lower center", ncols=min(8, len(names)))
