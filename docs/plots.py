"""Draw the plots that pages show, each into a folder named after its record in docs/evidence.

Equal records give equal bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import statistics
from ast import literal_eval
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from skuda.tools.bench.record import BenchRecord
from skuda.tools.bench.report import compared
from skuda.tools.files import write_whole
from skuda.tools.frame.record import Record
from skuda.tools.studies.model import INT8_ALL, ModelRecord

ROOT = Path(__file__).resolve().parent.parent
_SHOWN = re.compile(r"evidence/([\w-]+/[\w-]+\.svg)")
_INK = "#1b1f24"
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
_BOLD = ("skuda", "skuda, 4 bits", "skuda, exact", "skuda, exact, 4 bits", "skuda xN", "exact")
_MARKS = {
    **dict.fromkeys(_BOLD, ("#0072B2", "o")),
    "cutlass": ("#D55E00", "s"),
    **dict.fromkeys(("bf16", "bf16 xN"), (_INK, "v")),
    **dict.fromkeys(("bf16 compiled", "bf16 x1"), ("#7A7F85", "^")),
    **dict.fromkeys(("fp8", "skuda x1"), ("#009E73", "D")),
    "skuda compiled": ("#0072B2", "p"),
    "torchao": ("#4A90C2", "X"),
    "compile": ("#B8860B", "<"),
    "bitsandbytes": ("#C4649A", "P"),
    "skuda, 4 bits": ("#4A90C2", "X"),
    "skuda, exact": ("#0A3D62", "d"),
    "skuda, exact, 4 bits": ("#6C5CE7", "*"),
    "int8": ("#D55E00", "s"),
    "W4A16": ("#B8860B", "<"),
}
"""Colour and marker by name: Okabe and Ito's palette, with light colours darkened to be visible on white."""
_OTHER = ("#7A7F85", "h")
_ENGINES = {
    "skuda": "skuda",
    "skudaint4": "skuda, 4 bits",
    "skudaexact": "skuda, exact",
    "skudaint4exact": "skuda, exact, 4 bits",
    "stock": "int8",
    "fp8": "fp8",
    "w4a16": "W4A16",
    "bf16": "bf16",
}
"""Engines of vLLM by their names in a record, ours first. The others run vLLM's own kernels."""


class Series(NamedTuple):
    """Points of one name, which a line joins."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Panel(NamedTuple):
    """Series over axes with the labels `x` and `y`.

    `log` names the axes that are logarithmic: ``xy``, ``x`` or none. Below `least`, a logarithmic y axis is linear, so
    that 0 has a place. `ticks` are those of the x axis, and `high` is the height in inches.
    """

    series: Sequence[Series]
    x: str
    y: str = ""
    title: str = ""
    log: str = ""
    ticks: Sequence[int] = ()
    high: float = 3.4
    least: float = 0.0


class Plot(NamedTuple):
    """One plot: the stem of its file, its title, and its panels, one below the other."""

    name: str
    title: str
    panels: Sequence[Panel]


# --- records ---------------------------------------------------------------------------------------------------------


def plots_of(record: Record) -> list[Plot]:
    """Return the plots of a record, for which it has points."""
    match record:
        case BenchRecord():
            return _layer(record)
        case ModelRecord() if record.ranks:
            return _times(record)
        case _:
            return []


def _layer(record: BenchRecord) -> list[Plot]:
    """Return ``layer``: the speed of the layer and of its rivals over bf16, by rows."""
    cases, names = compared(record, "layer")
    if len(cases) < 2:
        return []
    base = {case.shape: case.times.get("bf16 compiled", case.times.get("bf16", math.nan)) for case in cases}
    series = []
    for name in names:
        mine = [case for case in cases if name in case.times]
        points = [case.shape[0] for case in mine], [base[case.shape] / case.times[name] for case in mine]
        series.append(Series(name, *points))
    ticks = [case.shape[0] for case in cases]
    panel = Panel(series, "rows, M", "speed over bf16", "", "x", ticks)
    return [Plot("layer", f"Linear layer of 4096 x 4096: {record.where}", [panel])]


def _times(record: ModelRecord) -> list[Plot]:
    """Return ``times``: microseconds by rows, and the time of each form over ours on all ranks."""
    points = [(phase.rows, phase.times, phase.ratios) for phase in record.phases if phase.times]
    title = f"Time of a gated MLP on {record.ranks} ranks: {record.where}"
    return [Plot("times", title, by_rows(points))] if points else []


def by_rows(points: Sequence[tuple[int, Mapping[str, float], Mapping[str, float]]]) -> tuple[Panel, Panel]:
    """Return a panel of times by rows, and one of ratios to stand below; a point is rows, times and ratios by name."""
    names = dict.fromkeys(name for _, times, _ in points for name in times)
    mine = {name: [point for point in points if name in point[1]] for name in names}
    above = [Series(name, [m for m, *_ in mine[name]], [times[name] for _, times, _ in mine[name]]) for name in names]
    below = [one._replace(y=[ratios.get(one.name, math.nan) for *_, ratios in mine[one.name]]) for one in above]
    ticks = [m for m, *_ in points]
    label = f"time over {INT8_ALL}"
    return Panel(above, "", "us", "", "xy", ticks, 3.0), Panel(below, "rows, M", label, "", "x", ticks, 1.8)


def policy(courses: Mapping[str, Sequence[Mapping[str, float]]], device: str) -> list[Plot]:
    """Return ``ratio``: ratio of probabilities and KL in each step of ``docs/examples/policy.py``."""
    panels: list[Panel] = []
    for name, label in (("ratio", "largest |ratio - 1|"), ("kl", "KL divergence")):
        series = [Series(way, range(len(course)), [step[name] for step in course]) for way, course in courses.items()]
        least = min((value for one in series for value in one.y if value > 0), default=1.0)
        least = 10.0 ** math.floor(math.log10(least))
        ticks = range(0, max(len(one.x) for one in series), 3)
        panels.append(Panel(series, "step" if panels else "", label, "", "y", ticks, 2.2, least))
    return [Plot("ratio", f"The served and the trained policy before each update, on {device}", panels)]


def engines(text: str, card: str) -> list[Plot]:
    """Return ``steps``: milliseconds of a decode step by sequences, for each engine whose rounds a text has."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, measured in re.findall(r"^round \d+ (\S+) (\{.*\})$", text, re.MULTILINE):
        for what, value in literal_eval(measured).items():
            if what.startswith("step_ms "):
                found[name][int(what.split()[1])].append(value)
    series = [
        Series(label, [*found[name]], [statistics.median(times) for times in found[name].values()])
        for name, label in _ENGINES.items()
        if name in found
    ]
    ticks = sorted({count for times in found.values() for count in times})
    panel = Panel(series, "sequences", "ms a step", "", "xy", ticks)
    return [Plot("steps", f"A decode step of Llama 3 8B's shape in vLLM, on an {card}", [panel])]


# --- drawing ---------------------------------------------------------------------------------------------------------


def rendered(plot: Plot, source: str = "") -> str:
    """Return a plot as SVG; `source` becomes the ``Source`` in its metadata, without a date or matplotlib's version."""
    metadata: Any = {"Date": None, "Creator": None, "Source": source}
    with rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=(_WIDTH, 1 + sum(_heights(plot))), dpi=150, layout="constrained", facecolor="white")
        draw_on(figure, plot)
        made = io.BytesIO()
        figure.savefig(made, format="svg", metadata=metadata)
    # Attributes are rounded down to hundredths of a point, which saves a third of the file.
    rounded = re.sub(rb'"[^"]*\.\d{3}[^"]*"', lambda one: re.sub(rb"(\.\d\d)\d+", rb"\1", one[0]), made.getvalue())
    return rounded.decode()


def _heights(plot: Plot) -> list[float]:
    return [panel.high for panel in plot.panels]


def draw_on(figure: Any, plot: Plot) -> None:
    """Draw a plot on a figure of matplotlib, with one legend for all panels."""
    grid = figure.subplots(len(plot.panels), 1, squeeze=False, gridspec_kw={"height_ratios": _heights(plot)})
    for (axes,), panel in zip(grid, plot.panels, strict=True):
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
        if axis == "y" and panel.least:
            axes.set_yscale("symlog", linthresh=panel.least)
        else:
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
    width, order = (1.8, 3) if bold else (1.0, 4)
    marks = {"marker": marker, "markersize": 5 + bold, "markeredgecolor": colour, "markerfacecolor": fill}
    return {"color": colour, "linewidth": width, "zorder": order, "linestyle": "-", **marks}


# --- files -----------------------------------------------------------------------------------------------------------


def shown(root: Path = ROOT) -> frozenset[str]:
    """Return the plots that README and the pages show, as ``RECORD/PLOT.svg``."""
    pages = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    return frozenset(name for page in pages for name in _SHOWN.findall(page.read_text(encoding="utf-8")))


def draw(folder: Path, names: frozenset[str]) -> frozenset[str]:
    """Draw plots of the records in a folder, remove all others, and return the names that no record has.

    A plot that was drawn from the same record is kept, so that the version of matplotlib does not matter.
    """
    missing = set(names)
    for old in folder.glob("*/*.svg"):
        if old.relative_to(folder).as_posix() not in names:
            old.unlink()
    for stem, (digest, plots) in drawable(folder).items():
        for plot in plots:
            name = f"{stem}/{plot.name}.svg"
            if name in names:
                missing.discard(name)
                file = folder / name
                if not is_of(file, digest):
                    file.parent.mkdir(exist_ok=True)
                    write_whole(file, rendered(plot, digest))
    return frozenset(missing)


def drawable(folder: Path) -> dict[str, tuple[str, list[Plot]]]:
    """Return the digest and the plots of every record in a folder, by the stem of its file.

    They are records of studies, what ``docs/examples/policy.py`` wrote, and what a program printed of vLLM's engines.
    """
    records: dict[Path, Record] = {**BenchRecord.files(folder), **ModelRecord.files(folder)}
    found = {path.stem: (record.digest(), plots_of(record)) for path, record in records.items()}
    for path in sorted({*folder.glob("*-policy.json"), *folder.glob("*-vllm-engines.txt")}):
        text = path.read_text(encoding="utf-8")
        plots = policy(**json.loads(text)) if path.suffix == ".json" else engines(text, path.stem.split("-")[0].upper())
        found[path.stem] = hashlib.sha256(text.encode()).hexdigest()[:16], plots
    return found


def is_of(file: Path, digest: str) -> bool:
    """Return whether a plot was drawn from the record with a digest."""
    return file.exists() and f"<dc:source>{digest}</dc:source>" in file.read_text(encoding="utf-8")


if __name__ == "__main__":
    if missing := draw(ROOT / "docs" / "evidence", shown()):
        raise SystemExit(f"pages show plots that no record has: {', '.join(sorted(missing))}")
