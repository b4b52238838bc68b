"""Draw the measurements of a bench on matplotlib figures; the caller imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from skuda.tools.bench.record import BenchRecord, CaseResult
from skuda.tools.plot import INK, finish, line, plain_numbers, row_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

OURS = "skuda"

_DATA = {
    OURS: ("#0072B2", "o"),
    "cutlass": ("#D55E00", "s"),
    "skuda compiled": ("#0072B2", "p"),
    "bf16": (INK, "v"),
    "bf16 compiled": ("#7A7F85", "^"),
    "int_mm": ("#009E73", "D"),
    "compile": ("#B8860B", "^"),
    "fp8": ("#C4649A", "P"),
    "torchao": ("#4A90C2", "X"),
    "eager": ("#7A7F85", "<"),
    "builtin": ("#009E73", "D"),
    "bitsandbytes": ("#C4649A", "P"),
    "cupy": ("#4A90C2", "X"),
}
"""Colour and marker by name: Okabe and Ito's palette, with light colours darkened to be visible on white."""
_OTHER = ("#7A7F85", "h")
_NO_JOB = frozenset({"copy"})
"""Contestants that do not do the op's work: a copy moves other bytes, and its bandwidth is drawn as the ceiling."""
_TERA = 1e12
COLUMNS = 3
"""Largest number of plots in a row."""


class Point(NamedTuple):
    """The time of one contestant in one case, in microseconds."""

    case: CaseResult
    who: str
    us: float

    @property
    def intensity(self) -> float:
        """Operations per byte that the problem has to move; the same for every contestant."""
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
    """Return a point for every time, ours first in each case; a refused case has no points."""
    found = []
    for case in cases:
        timed = {OURS: case.timing} | {r.name: r.timing for r in case.rivals if r.name not in _NO_JOB}
        found += [Point(case, who, timing.median) for who, timing in timed.items() if timing is not None and case.bytes]
    return found


def _series(found: Iterable[Point]) -> dict[str, list[Point]]:
    """Return points by contestant, in order of first appearance."""
    by_name: dict[str, list[Point]] = {}
    for point in found:
        by_name.setdefault(point.who, []).append(point)
    return by_name


def style(who: str, **more: Any) -> dict[str, Any]:
    """Return matplotlib's arguments for the points of a contestant, by name."""
    return {**line(*_DATA.get(who, _OTHER), bold=who == OURS), "label": who, **more}


_DOTS: dict[str, Any] = {"linestyle": "none"}
_BOUND = "ceiling"
_CEILING: dict[str, Any] = {"color": INK, "linewidth": 1.2, "zorder": 2}


def roofline(found: Sequence[Point], record: BenchRecord, title: str, figure: FigureBase) -> None:
    """Draw a roofline of products: TOPS over arithmetic intensity, below the ceilings of the run."""
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
        # The axis ends at the highest ceiling, where the bound changes from memory to arithmetic.
        end = min(high, (fp8 or bf16 or top) / bandwidth)
        axes.plot([low, end], [low * bandwidth, end * bandwidth], **_CEILING)
        _name_line(axes, f"copy, {bandwidth:.2f} TB/s", (max(low, bottom / bandwidth), end), bandwidth)
    for value, name, dashes in ((fp8, "fp8 product", "-"), (bf16, "bf16 product", "--")):
        if value:
            start = max(low, value / bandwidth) if bandwidth else low
            axes.plot([start, high], [value, value], linestyle=dashes, **_CEILING)
            label = f"{name}\n{value:.0f} TFLOP/s"
            axes.annotate(label, (high, value), (4, 0), textcoords="offset points", va="center", size=8)
    for who, mine in _series(found).items():
        axes.plot([p.intensity for p in mine], [p.tops for p in mine], **style(who, **_DOTS))
    finish(figure, title, first=OURS, last=_BOUND)


def _name_line(axes: Axes, text: str, ends: tuple[float, float], slope: float, *, below: bool = False) -> None:
    """Write text along a line through the origin of logarithmic axes, a third of the way up, where no points are."""
    x = ends[0] * (ends[1] / ends[0]) ** 0.3
    angle = math.degrees(math.atan(slope))
    along: dict[str, Any] = {"rotation": angle, "rotation_mode": "anchor", "transform_rotates_text": True}
    place: dict[str, Any] = {"y": x * slope / 1.15, "va": "top"} if below else {"y": 1.06 * x * slope, "va": "bottom"}
    axes.text(x=x, s=text, size=8, **place, **along)


def _logarithmic(figure: FigureBase, x: str, y: str) -> Axes:
    axes: Axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    plain_numbers(axes)
    axes.grid(visible=True)
    return axes


def speed(weights: dict[tuple[int, ...], list[CaseResult]], title: str, figure: FigureBase) -> None:
    """Draw speed by rows for every weight: TOPS below the ceiling, and under them each rival's time over ours.

    `weights` are timed cases by N and K, in order of M.
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
    finish(figure, title, first=OURS, last=_BOUND)


THROUGHPUT = {"bf16": "bf16, torch", "cutlass": "int8, fastest CUTLASS", OURS: "int8, skuda"}
"""The contestants in a plot of throughput, and their names in the legend."""


def throughput(found: Sequence[Point], title: str, figure: FigureBase) -> None:
    """Draw TOPS by shape as grouped bars for the contestants in `THROUGHPUT`.

    `found` are points of products, at least one of them ours.
    """
    axes: Axes = figure.subplots()
    shapes = list(dict.fromkeys(p.case.shape for p in found))
    series = {who: mine for who, mine in _series(found).items() if who in THROUGHPUT}
    width = 0.85 / len(series)
    for number, who in enumerate(name for name in THROUGHPUT if name in series):
        first = (number - (len(series) - 1) / 2) * width
        at = [shapes.index(p.case.shape) + first for p in series[who]]
        style: dict[str, Any] = {"color": _DATA[who][0], "label": THROUGHPUT[who], "zorder": 3}
        bars = axes.bar(at, [p.tops for p in series[who]], width, **style)
        axes.bar_label(bars, fmt="%.0f", size=6, padding=1)
    axes.set_xticks(range(len(shapes)), ["x".join(map(str, shape)) for shape in shapes], rotation=20)
    axes.set(xlabel="M x N x K", ylabel="TOPS")
    axes.grid(visible=True, axis="y")
    finish(figure, title, first=OURS, last=_BOUND)


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
        speed.plot(m, [p.tops for p in mine], **style(who))
        ratio.plot(m, [p.us / ours[p.case.shape] for p in mine], **style(who))
    speed.set(xscale="log", yscale="log")
    ratio.set_ylim(bottom=0)
    for axes in (speed, ratio):
        row_axis(axes, rows)
    speed.tick_params(axis="x", labelbottom=False)


def _floor(case: CaseResult) -> float | None:
    """Return the microseconds of a case at the ceiling, or None without a ceiling."""
    return case.ceiling_share * case.timing.median if case.ceiling_share and case.timing else None


def moved(found: Sequence[Point], record: BenchRecord, title: str, figure: FigureBase) -> None:
    """Draw time over the bytes that a problem has to move, with the time of a copy of as many bytes as the bound."""
    axes = _logarithmic(figure, "MB that the problem has to move", "us")
    for who, mine in _series(found).items():
        axes.plot([p.case.bytes / 1e6 for p in mine], [p.us for p in mine], **style(who, **_DOTS))
    bandwidth = record.ceilings.copy_bandwidth
    bottom, top = min(p.us for p in found) / 1.5, max(p.us for p in found) * 1.5
    low, high = min(p.case.bytes for p in found) / 1.5e6, max(p.case.bytes for p in found) * 1.5 / 1e6
    axes.set(xlim=(low, high), ylim=(bottom, top))
    if bandwidth:
        slope = 1e12 / bandwidth
        axes.plot([low, high], [low * slope, high * slope], **_CEILING)
        _name_line(axes, f"copy, {bandwidth / _TERA:.2f} TB/s", (max(low, bottom / slope), high), slope, below=True)
    finish(figure, title, first=OURS, last=_BOUND)


def bandwidth(found: Sequence[Point], record: BenchRecord, title: str, figure: FigureBase) -> None:
    """Draw the bandwidth of every contestant by op, one plot per element; `found` has one case per op and element."""
    ops = sorted({p.case.op for p in found}, reverse=True)
    elements = sorted({p.case.element for p in found})
    grid = figure.subplots(1, len(elements), squeeze=False, sharex=True, sharey=True)[0]
    for axes, element in zip(grid, elements, strict=True):
        mine = [p for p in found if p.case.element == element]
        for who, theirs in _series(mine).items():
            axes.plot([p.bandwidth for p in theirs], [ops.index(p.case.op) for p in theirs], **style(who, **_DOTS))
        if record.ceilings.copy_bandwidth:
            axes.axvline(record.ceilings.copy_bandwidth / _TERA, **_CEILING)
        axes.set_title(element)
        axes.set_yticks(range(len(ops)), ops)
        axes.set_ylim(-0.6, len(ops) - 0.4)
        axes.set_xlabel("TB/s; line: copy")
        axes.grid(visible=True)
    grid[0].set_xlim(0, 1.06 * grid[0].get_xlim()[1])
    finish(figure, title, first=OURS, last=_BOUND)
