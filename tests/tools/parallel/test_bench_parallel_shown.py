"""A record of `skuda bench-parallel`: its plots, its tables, its place on the page."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure
from support import fresh

from skuda.dispatch.select.tuning import Timing
from skuda.tools.cli import main
from skuda.tools.parallel import command
from skuda.tools.parallel.markdown import parallel_markdown
from skuda.tools.parallel.plot import plots
from skuda.tools.parallel.record import (
    INT8_ALL,
    REAL_ALL,
    WAYS,
    Orders,
    ParallelRecord,
    RowsResult,
    parallel_measurer_hash,
)
from skuda.tools.parallel.trace import Kernel, Trace

KERNELS = ("quantized_linear_streamed", "amax_lanes_1", "ncclDevKernel_AllReduce_Sum_u32_RING_LL")


def result(rows, rng):
    def trace():
        starts, us = rng.integers(0, 50, 3), rng.integers(1, 40, 3)
        made = zip(KERNELS, starts - starts.min(), us, strict=True)
        return Trace.of([Kernel(name=name, stream=0, start=float(start), us=float(us)) for name, start, us in made])

    timings = {way: Timing.of(list(rng.uniform(50, 100, 5))) for way in WAYS}
    return RowsResult(rows=rows, timings=timings, traces={way: (trace(), trace()) for way in WAYS}, compared=3)


@pytest.fixture
def record():
    rng = fresh("shown")
    sizes = {"hidden": 32, "intermediate": 48, "rows": (1, 2048), "repeats": 5, "seed": 1, "patience": 9.0}
    return ParallelRecord(
        device="a card",
        versions={"torch": "2"},
        date="2026-11-23T00:00:00+00:00",
        skuda="0",
        command="skuda bench-parallel --seed 1",
        seconds=1.0,
        measurer_hash=parallel_measurer_hash(),
        orders=Orders(backend="nccl", count=2, **sizes),
        graph=True,
        results=(result(1, rng), result(2048, rng)),
    )


@pytest.fixture
def path(record, tmp_path, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    record.save(tmp_path / "record.json")
    return tmp_path / "record.json"


def wrong(record):
    """The record as if a compiler had failed for many rows."""
    few, many = record.results
    return record.model_copy(update={"results": (few, many.model_copy(update={"wrong": "a_bit | 3"}))})


def test_the_first_plot_has_every_time_and_ratio(record):
    times, _ = plots(record)
    figure = Figure()
    times.draw(figure)
    above, below = figure.axes
    for way in WAYS:
        (drawn,) = (line for line in above.get_lines() if line.get_label() == way)
        (ratios,) = (line for line in below.get_lines() if line.get_label() == way)
        assert list(drawn.get_xdata()) == [1, 2048]
        assert list(drawn.get_ydata()) == [one.timings[way].median for one in record.results]
        assert list(ratios.get_ydata()) == [one.gain(way) for one in record.results]


def test_the_second_plot_has_the_parts_of_each_way_on_all_ranks(record):
    _, parts = plots(record)
    figure = Figure()
    parts.draw(figure)
    (axes,) = figure.axes
    assert [one.get_text() for one in axes.get_yticklabels()] == [
        f"{m}, {way}" for m in (1, 2048) for way in (REAL_ALL, INT8_ALL)
    ]
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    traces = [one.traces[way][0] for one in record.results for way in (REAL_ALL, INT8_ALL)]
    products, _, exposed, idle = widths
    assert products == pytest.approx([100 * one.products / one.total for one in traces])
    assert exposed == pytest.approx([100 * (one.exchange - one.hidden) / one.total for one in traces])
    assert idle == pytest.approx([100 * one.idle / one.total for one in traces])
    assert [sum(shares) for shares in zip(*widths, strict=True)] == pytest.approx([100] * 4)


def test_what_was_not_measured_is_not_drawn(record):
    untraced = tuple(one.model_copy(update={"traces": {}}) for one in record.results)
    (times,) = plots(record.model_copy(update={"results": untraced}))
    assert times.name == "times"
    assert plots(record.model_copy(update={"results": (RowsResult(rows=1, wrong="a bit"),)})) == ()


def test_a_record_is_drawn_and_put_on_the_page(record, path, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["bench-parallel", "--show", str(path), "--plot", str(tmp_path / "plots"), "--html", str(page)]) == 0
    files = [tmp_path / "plots" / name for name in ("times.svg", "trace.svg")]
    assert all(map(type(page).is_file, files))
    assert capsys.readouterr().err.splitlines() == [f"wrote {file}" for file in (*files, page)]
    text = page.read_text()
    for part in ("A gated MLP of 32 x 48 on 2 x a card", record.command, "Where the time goes", "<svg"):
        assert part in text
    assert "measured by other measuring code" not in text
    for one in record.results:
        for way in WAYS:
            assert f">{one.timings[way].median:.1f}<" in text
            assert f">{one.traces[way][0].total:.1f}<" in text


def test_a_wrong_record_is_shown_and_the_status_tells(record, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    wrong(record).save(tmp_path / "wrong.json")
    page = tmp_path / "page.html"
    typed = ["bench-parallel", "--show", str(tmp_path / "wrong.json"), "--markdown", "times", "--html", str(page)]
    assert main(typed) == 1
    found = capsys.readouterr()
    assert "2048 rows: a_bit | 3" in found.err
    heading, _, few, many = found.out.splitlines()
    assert heading.endswith(" | failed |")
    assert few.endswith(" |  |")
    assert many.endswith(r" | a\_bit \| 3 |")
    assert "a_bit | 3" in page.read_text()


def test_markdown_has_the_sections(record, path, capsys):
    whole = parallel_markdown(record)
    for section, lines in (("facts", 6), ("times", 4), ("requirements", 9), ("trace", 10), ("kernels", 63)):
        part = parallel_markdown(record, section)
        assert part in whole
        assert len(part.splitlines()) == lines, section
    first = record.results[0].traces[WAYS[0]][0]
    row = next(line for line in parallel_markdown(record, "trace").splitlines() if line.startswith(f"| 1 | {WAYS[0]}"))
    assert f"| {first.products:.1f} | {first.others:.1f} | {first.exchange:.1f} | {first.hidden:.1f} |" in row
    untraced = tuple(one.model_copy(update={"traces": {}}) for one in record.results)
    assert parallel_markdown(record.model_copy(update={"results": untraced}), "trace") == "Nothing was traced.\n"
    assert main(["bench-parallel", "--show", str(path), "--markdown", "nonsense"]) == 2
    assert "all, facts, times, requirements, trace, kernels" in capsys.readouterr().err


def test_a_place_that_cannot_be_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(command, "_measured", lambda *_: pytest.fail("measured"))
    assert main(["bench-parallel", "--cpu", "--plot", "a.jpg"]) == 2
    assert "bench-parallel: --plot must end in .png" in capsys.readouterr().err
