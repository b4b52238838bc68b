"""Plots of a record of ``skuda bench``: rooflines, speed by rows, time by bytes, and bandwidth op by op."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.bench_drawing import COLUMNS, INK, bandwidth, moved, points, roofline, speed
from skuda.tools.bench_record import BenchRecord, CaseResult

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

_FORMATS = frozenset({".png", ".svg", ".pdf"})
_WIDTH = 9.0


@dataclass(frozen=True)
class Plot:
    """One plot of a record.

    Attributes
    ----------
    name : str
        Stem of its file.
    title : str
        What it shows.
    size : (float, float)
        Inches.
    draw : callable
        Takes the figure, or the part of one, that it fills.
    """

    name: str
    title: str
    size: tuple[float, float]
    draw: Callable[[FigureBase], None]


def plots(record: BenchRecord) -> tuple[Plot, ...]:
    """Return the plots that a record has points for.

    For every product and element a roofline, and the speed by rows of every weight that was measured with several
    numbers of rows; for everything else the time by bytes, and the bandwidth at each op's largest shape.

    Parameters
    ----------
    record : BenchRecord
        The record.
    """
    found = []
    timed = [case for case in record.cases if case.timing is not None and case.bytes]
    products = [case for case in timed if case.operations]
    for op, element in dict.fromkeys((case.op, case.element) for case in products):
        mine = [case for case in products if (case.op, case.element) == (op, element)]
        told = f"{op} {element} on {_where(record)}"
        # A record may say anything, and this names files.
        stem = re.sub(r"[^A-Za-z0-9_-]+", "_", f"{op}-{element}")
        title = f"Roofline of {told}"
        found.append(Plot(f"roofline-{stem}", title, (_WIDTH, 5.4), partial(roofline, points(mine), record, title)))
        weights = _by_weight(mine)
        if weights:
            title = f"Speed by rows of {told}"
            blocks = math.ceil(len(weights) / COLUMNS)
            draw = partial(speed, weights, title)
            found.append(Plot(f"speed-{stem}", title, (_WIDTH, 1.1 + 4.4 * blocks), draw))
    others = [case for case in timed if not case.operations]
    if others:
        title = f"Time by bytes on {_where(record)}"
        found.append(Plot("bytes", title, (_WIDTH, 5.4), partial(moved, points(others), record, title)))
        title = f"Bandwidth at the largest shape on {_where(record)}"
        rows = len({case.op for case in others})
        draw = partial(bandwidth, points(_largest(others)), record, title)
        found.append(Plot("bandwidth", title, (_WIDTH, 1.7 + 0.24 * rows), draw))
    return tuple(found)


def save(record: BenchRecord, path: Path) -> list[Path]:
    """Write a record's plots.

    Parameters
    ----------
    record : BenchRecord
        The record.
    path : Path
        A file that ends in ``.png``, ``.svg`` or ``.pdf`` for all of them below each other; else a folder, which is
        made, for one SVG each.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    InvalidProblem
        For a suffix that is neither, a file that cannot be written, and a record in which nothing was timed.
    MissingDependency
        Where matplotlib is not installed.
    """
    check(path)
    found = plots(record)
    if not found:
        raise InvalidProblem("bench", "--plot", str(path), "be left out of a run in which nothing was timed")
    whole = path.suffix.lower() in _FORMATS
    try:
        (path.parent if whole else path).mkdir(parents=True, exist_ok=True)
        if whole:
            path.write_bytes(rendered(found, path.suffix.lower()[1:], source=digest(record)))
            return [path]
        files = [path / f"{plot.name}.svg" for plot in found]
        for plot, file in zip(found, files, strict=True):
            file.write_bytes(rendered([plot], "svg", source=digest(record)))
    except OSError as error:
        raise InvalidProblem("bench", "--plot", str(path), f"be a place that can be written to ({error})") from error
    return files


def check(path: Path) -> None:
    """Refuse what `save` could not serve, before anything is measured.

    Parameters
    ----------
    path : Path
        See `save`.

    Raises
    ------
    InvalidProblem, MissingDependency
        See `save`.
    """
    if path.suffix and path.suffix.lower() not in _FORMATS and not path.is_dir():
        raise InvalidProblem("bench", "--plot", str(path), "end in .png, .svg or .pdf, or be a folder")
    if not drawable():
        raise MissingDependency("matplotlib", "pip install 'matplotlib>=3.8'")


def drawable() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def rendered(found: Sequence[Plot], suffix: str, *, source: str = "", inline: bool = False) -> bytes:
    """Return plots, one below the other, as the bytes of a file; the same for the same record.

    Parameters
    ----------
    found : sequence of Plot
        At least one.
    suffix : str
        ``png``, ``svg`` or ``pdf``.
    source : str
        What an SVG says that it was made from.
    inline : bool
        For a page: without a background.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
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
        # A name may hold what matplotlib would take for a formula.
        "text.parse_math": False,
        "svg.hashsalt": " ".join(plot.name for plot in found),
    }
    with rc_context(style):
        size = (_WIDTH, sum(plot.size[1] for plot in found))
        figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="none" if inline else "white")
        if len(found) == 1:
            found[0].draw(figure)
        else:
            parts: Any = figure.subfigures(len(found), 1, height_ratios=[plot.size[1] for plot in found])
            for plot, part in zip(found, parts, strict=True):
                plot.draw(part)
        made = io.BytesIO()
        # Nothing of today's date, and nothing of matplotlib's version.
        told: dict[str, dict[str, Any]] = {
            "svg": {"Date": None, "Creator": None, "Source": source},
            "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
            "png": {"Software": None},
        }
        figure.savefig(made, format=suffix, transparent=inline, metadata=told[suffix])
    return _LONG.sub(_shortened, made.getvalue().decode()).encode() if suffix == "svg" else made.getvalue()


_LONG = re.compile(r'"[^"]*\.\d{3}[^"]*"')


def _shortened(attribute: re.Match[str]) -> str:
    """Cut the numbers of an attribute to hundredths of a point: a third of the file."""
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])


def digest(record: BenchRecord) -> str:
    """Return what a plot's ``Source`` says of its record, so that a plot of another one can be told.

    Parameters
    ----------
    record : BenchRecord
        The record.
    """
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()[:16]


def _where(record: BenchRecord) -> str:
    return f"{record.device.name}, {record.date[:10]}"


def _by_weight(cases: Sequence[CaseResult]) -> dict[tuple[int, ...], list[CaseResult]]:
    """Return cases by N and K, in order of M, where there are several."""
    found: dict[tuple[int, ...], list[CaseResult]] = {}
    for case in cases:
        found.setdefault(case.shape[1:], []).append(case)
    return {
        weight: sorted(mine, key=lambda case: case.shape)
        for weight, mine in found.items()
        if len({case.shape for case in mine}) > 1
    }


def _largest(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Return the case that moves the most of every op and element."""
    found: dict[tuple[str, str], CaseResult] = {}
    for case in sorted(cases, key=lambda case: case.bytes):
        found[case.op, case.element] = case
    return list(found.values())
