"""Drawing the measurements of a bench on figures of matplotlib, which is imported by whoever makes the figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from skuda.tools.bench_record import BenchRecord, CaseResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

OURS = "skuda"
INK = "#1b1f24"
"""Colour of text, axes and ceilings; a page that has its own puts that in its place."""

_DATA = {
    OURS: ("#0072B2", "o"),
    "cutlass": ("#D55E00", "s"),
    "bf16": (INK, "v"),
    "int_mm": ("#009E73", "D"),
    "compile": ("#B8860B", "^"),
    "fp8": ("#C4649A", "P"),
    "torchao": ("#4A90C2", "X"),
    "eager": ("#7A7F85", "<"),
    "builtin": ("#009E73", "D"),
    "bitsandbytes": ("#C4649A", "P"),
    "cupy": ("#4A90C2", "X"),
}
"""Colour and marker by name, after Okabe and Ito, the light ones darkened until they show on white. Whoever shares a
plot is told apart by the marker too."""
_OTHER = ("#7A7F85", "h")
_NO_JOB = frozenset({"copy"})
"""Who does not do the op's work: a copy moves other bytes, and its bandwidth is the ceiling that is drawn."""
_TERA = 1e12
COLUMNS = 3
"""Plots beside each other, at most."""


class Point(NamedTuple):
    """What one contestant did in one case; the time in microseconds."""

    case: CaseResult
    who: str
    us: float

    @property
    def intensity(self) -> float:
        """Operations per byte that the problem has to move, the same for everybody."""
        return self.case.operations / self.case.bytes

    @property
    def tops(self) -> float:
        """Operations per second, in units of 10^12."""
        return self.case.operations / self.us * 1e6 / _TERA

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the problem has to move, in units of 10^12."""
        return self.case.bytes / self.us * 1e6 / _TERA


def points(cases: Iterable[CaseResult]) -> list[Point]:
    """Return what was timed, ours first in every case.

    Parameters
    ----------
    cases : iterable of CaseResult
        Refused ones have no points.
    """
    found = []
    for case in cases:
        timed = {OURS: case.timing} | {r.name: r.timing for r in case.rivals if r.name not in _NO_JOB}
        found += [Point(case, who, timing.median) for who, timing in timed.items() if timing is not None and case.bytes]
    return found


def _series(found: Iterable[Point]) -> dict[str, list[Point]]:
    """Return points by contestant, in the order in which they first appear."""
    by_name: dict[str, list[Point]] = {}
    for point in found:
        by_name.setdefault(point.who, []).append(point)
    return by_name


def _style(who: str, **more: Any) -> dict[str, Any]:
    colour, marker = _DATA.get(who, _OTHER)
    ours = who == OURS
    return {
        "color": colour,
        "marker": marker,
        "markersize": 6 if ours else 5,
        "markeredgecolor": colour,
        "markerfacecolor": colour if ours else "none",
        "markeredgewidth": 1.1,
        "linewidth": 1.8 if ours else 1.0,
        # Hollow markers over a full one: all of them show where they meet.
        "zorder": 3 if ours else 4,
        "label": who,
        **more,
    }


_DOTS: dict[str, Any] = {"linestyle": "none"}
_BOUND = "ceiling"
_CEILING: dict[str, Any] = {"color": INK, "linewidth": 1.2, "zorder": 2}


def roofline(found: Sequence[Point], record: BenchRecord, title: str, figure: FigureBase) -> None:
    """Draw a roofline: TOPS over arithmetic intensity, below what copies and products of the same run reached.

    Parameters
    ----------
    found : sequence of Point
        Of products, at least one.
    record : BenchRecord
        Whose ceilings.
    title : str
        Its title.
    figure : FigureBase
        The figure, or a part of one.
    """
    axes = _logarithmic(figure, "operations per byte that the problem has to move", "TOPS")
    bandwidth, fp8, bf16 = (
        value / _TERA if value else None
        for value in (record.ceilings.copy_bandwidth, record.ceilings.fp8, record.ceilings.bf16)
    )
    low, high = min(p.intensity for p in found) / 2, max(p.intensity for p in found) * 2
    bottom, top = min(p.tops for p in found) / 2, max([p.tops for p in found] + [c for c in (fp8, bf16) if c]) * 2
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top)
    if bandwidth:
        # As far as the highest ceiling, where arithmetic takes over.
        end = min(high, (fp8 or bf16 or top) / bandwidth)
        axes.plot([low, end], [low * bandwidth, end * bandwidth], **_CEILING)
        _name_line(axes, f"copy, {bandwidth:.2f} TB/s", (max(low, bottom / bandwidth), end), bandwidth)
    for value, name, dashes in ((fp8, "fp8 product", "-"), (bf16, "bf16 product", "--")):
        if value:
            start = max(low, value / bandwidth) if bandwidth else low
            axes.plot([start, high], [value, value], linestyle=dashes, **_CEILING)
            told = f"{name}\n{value:.0f} TFLOP/s"
            axes.annotate(told, (high, value), (4, 0), textcoords="offset points", va="center", size=8)
    for who, mine in _series(found).items():
        axes.plot([p.intensity for p in mine], [p.tops for p in mine], **_style(who, **_DOTS))
    _finish(figure, title)


def _name_line(axes: Axes, text: str, ends: tuple[float, float], slope: float, *, below: bool = False) -> None:
    """Write along a line through the origin of logarithmic axes, where no points are: a third of the way up."""
    x = ends[0] * (ends[1] / ends[0]) ** 0.3
    angle = math.degrees(math.atan(slope))
    along: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "transform_rotates_text": True}
    place: dict[str, Any] = {"y": x * slope / 1.15, "va": "top"} if below else {"y": 1.06 * x * slope, "va": "bottom"}
    axes.text(x=x, s=text, size=8, **place, **along)


def _logarithmic(figure: FigureBase, x: str, y: str) -> Axes:
    axes: Axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    _plain_numbers(axes)
    axes.grid(visible=True)
    return axes


def _plain_numbers(axes: Axes) -> None:
    """Write 1000 and not a power of ten where an axis is logarithmic."""
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda *_: "")


def speed(weights: dict[tuple[int, ...], list[CaseResult]], title: str, figure: FigureBase) -> None:
    """Draw speed by rows: TOPS below the ceiling, and under them everybody's time over ours, for every weight.

    Parameters
    ----------
    weights : dict of (int, int) to list of CaseResult
        Timed cases by N and K, in order of M.
    title, figure
        See `roofline`.
    """
    columns = min(COLUMNS, len(weights))
    blocks = math.ceil(len(weights) / columns)
    grid = figure.subplots(2 * blocks, columns, squeeze=False, gridspec_kw={"height_ratios": [1.7, 1] * blocks})
    for unused in range(len(weights), blocks * columns):
        for part in (0, 1):
            grid[2 * (unused // columns) + part][unused % columns].set_axis_off()
    for number, ((n, k), cases) in enumerate(weights.items()):
        row, column = 2 * (number // columns), number % columns
        speed, ratio = grid[row][column], grid[row + 1][column]
        _speed_of(speed, ratio, cases)
        speed.set_title(f"N = {n}, K = {k}")
        if column == 0:
            speed.set_ylabel("TOPS")
            ratio.set_ylabel("time over ours")
        ratio.set_xlabel("rows, M")
    _finish(figure, title)


def _speed_of(speed: Axes, ratio: Axes, cases: list[CaseResult]) -> None:
    ratio.sharex(speed)
    rows = [case.shape[0] for case in cases]
    bounds = [
        (m, case.operations / us * 1e6 / _TERA) for m, case in zip(rows, cases, strict=True) if (us := _floor(case))
    ]
    if bounds:
        speed.plot(*zip(*bounds, strict=True), label=_BOUND, **_CEILING)
    ours = {case.shape: case.timing.median for case in cases if case.timing is not None}
    for who, mine in _series(points(cases)).items():
        m = [p.case.shape[0] for p in mine]
        speed.plot(m, [p.tops for p in mine], **_style(who))
        ratio.plot(m, [p.us / ours[p.case.shape] for p in mine], **_style(who))
    speed.set(xscale="log", yscale="log")
    ratio.set_ylim(bottom=0)
    for axes in (speed, ratio):
        _plain_numbers(axes)
        axes.set_xticks(rows, [str(m) for m in rows])
        axes.set_xticks([], minor=True)
        axes.tick_params(axis="x", labelrotation=60 if len(rows) > 6 else 0)
        axes.grid(visible=True)
    speed.tick_params(axis="x", labelbottom=False)


def _floor(case: CaseResult) -> float | None:
    """Return the microseconds of a case at the ceiling; None where there is no ceiling."""
    return case.ceiling_share * case.timing.median if case.ceiling_share and case.timing else None


def moved(found: Sequence[Point], record: BenchRecord, title: str, figure: FigureBase) -> None:
    """Draw the time over the bytes that a problem has to move, above what a copy of as many takes.

    Parameters
    ----------
    found : sequence of Point
        At least one.
    record, title, figure
        See `roofline`.
    """
    axes = _logarithmic(figure, "MB that the problem has to move", "us")
    for who, mine in _series(found).items():
        axes.plot([p.case.bytes / 1e6 for p in mine], [p.us for p in mine], **_style(who, **_DOTS))
    bandwidth = record.ceilings.copy_bandwidth
    bottom, top = min(p.us for p in found) / 1.5, max(p.us for p in found) * 1.5
    low, high = min(p.case.bytes for p in found) / 1.5e6, max(p.case.bytes for p in found) * 1.5 / 1e6
    axes.set(xlim=(low, high), ylim=(bottom, top))
    if bandwidth:
        slope = 1e12 / bandwidth
        axes.plot([low, high], [low * slope, high * slope], **_CEILING)
        _name_line(axes, f"copy, {bandwidth / _TERA:.2f} TB/s", (max(low, bottom / slope), high), slope, below=True)
    _finish(figure, title)


def bandwidth(found: Sequence[Point], record: BenchRecord, title: str, figure: FigureBase) -> None:
    """Draw the bandwidth of everybody, op by op, with a plot for each element.

    Parameters
    ----------
    found : sequence of Point
        One case of every op and element.
    record, title, figure
        See `roofline`.
    """
    ops = sorted({p.case.op for p in found}, reverse=True)
    elements = sorted({p.case.element for p in found})
    grid = figure.subplots(1, len(elements), squeeze=False, sharex=True, sharey=True)[0]
    for axes, element in zip(grid, elements, strict=True):
        mine = [p for p in found if p.case.element == element]
        for who, theirs in _series(mine).items():
            axes.plot([p.bandwidth for p in theirs], [ops.index(p.case.op) for p in theirs], **_style(who, **_DOTS))
        if record.ceilings.copy_bandwidth:
            axes.axvline(record.ceilings.copy_bandwidth / _TERA, **_CEILING)
        axes.set_title(element)
        axes.set_yticks(range(len(ops)), ops)
        axes.set_ylim(-0.6, len(ops) - 0.4)
        axes.set_xlabel("TB/s; line: copy")
        axes.grid(visible=True)
    grid[0].set_xlim(0, 1.06 * grid[0].get_xlim()[1])
    _finish(figure, title)


def _finish(figure: FigureBase, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    every: Any = figure.axes
    told = [axes.get_legend_handles_labels() for axes in every]
    found = {label: handle for handles, labels in told for handle, label in zip(handles, labels, strict=True)}
    # Who is compared first, then with what.
    names = sorted(found, key=lambda name: (name == _BOUND, name != OURS))
    figure.legend([found[name] for name in names], names, loc="outside lower center", ncols=min(8, len(names)))
