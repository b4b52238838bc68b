"""Plots of a record of ``skuda bench``: rooflines, speed by rows, time by bytes, and bandwidth by op."""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.bench.drawing import COLUMNS, INK, bandwidth, moved, points, roofline, speed, throughput
from skuda.tools.bench.record import BenchRecord, CaseResult
from skuda.tools.bench.summary import largest
from skuda.tools.files import check as check_writable
from skuda.tools.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

_FORMATS = frozenset({".png", ".svg", ".pdf"})
_WIDTH = 9.0
_LARGE = 1024
"""Rows from which a product is bound by arithmetic and not by memory."""


@dataclass(frozen=True)
class Plot:
    """One plot of a record: the stem of its file, its title, its height in inches, and the function that draws it."""

    name: str
    title: str
    height: float
    draw: Callable[[FigureBase], None]


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


def save(record: BenchRecord, path: Path) -> list[Path]:
    """Write a record's plots and return the files.

    A path that ends in ``.png``, ``.svg`` or ``.pdf`` is one file for all plots; any other path is a folder, which is
    created, with one SVG per plot.

    Raises
    ------
    InvalidProblem
        For another suffix, a file that cannot be written, or a record without times.
    MissingDependency
        If matplotlib is not installed.
    """
    check(path)
    found = plots(record)
    if not found:
        raise InvalidProblem("bench", "--plot", str(path), "be left out of a run in which nothing was timed")
    whole = path.suffix.lower() in _FORMATS
    try:
        (path.parent if whole else path).mkdir(parents=True, exist_ok=True)
        together = {path: found} if whole else {path / f"{plot.name}.svg": [plot] for plot in found}
        for file, drawn in together.items():
            content = rendered(drawn, file.suffix.lower()[1:], source=digest(record))
            with replacing(file) as fresh:
                fresh.write_bytes(content)
    except OSError as error:
        raise InvalidProblem("bench", "--plot", str(path), f"be a place that can be written to ({error})") from error
    return list(together)


def check(path: Path) -> None:
    """Raise the errors that `save` would raise for a path, before anything is measured."""
    if path.suffix and path.suffix.lower() not in _FORMATS and not path.is_dir():
        raise InvalidProblem("bench", "--plot", str(path), "end in .png, .svg or .pdf, or be a folder")
    if not drawable():
        raise MissingDependency("matplotlib", "pip install 'matplotlib>=3.8'")
    whole = path.suffix.lower() in _FORMATS and os.path.lexists(path)
    check_writable("bench", "--plot", path, folder=not whole)


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


def digest(record: BenchRecord) -> str:
    """Return a hash of a record for the ``Source`` of its plots, so that a plot of another record is detected."""
    # These are not in any plot, and older records lack them.
    of_cases = {"mhz", "watts", "operations_per_cycle", "layers"}
    lacked: Any = {"measurer_hash": True, "ceilings": {"empty"}, "cases": {"__all__": of_cases}}
    return hashlib.sha256(record.model_dump_json(exclude=lacked).encode()).hexdigest()[:16]


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
