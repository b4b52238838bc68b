"""Plots as data become files: every point where it belongs, and the same bytes for the same record."""

from __future__ import annotations

from importlib import util
from xml.etree import ElementTree as ET

import pytest
from matplotlib.figure import Figure
from measured import record_of, some_record

from skuda.registry import InvalidProblem
from skuda.registry.errors import MissingDependency
from skuda.tools.study import plot as drawing
from skuda.tools.study.plot import Panel, Plot, Series, by_rows, check, draw, rendered, save

SERIES = [Series("bf16", [1, 16], [4.0, 8.0]), Series("skuda", [1, 16], [2.0, 5.0], line=False)]
PLOT = Plot("times", "A title with $x_{$<b>", [[Panel(SERIES, "rows", "us", "decode", "xy", (1, 16))]])


def drawn(plot):
    figure = Figure()
    draw(plot, figure)
    return figure


def test_every_point_is_drawn_where_it_belongs():
    figure = drawn(PLOT)
    (axes,) = figure.axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert found == {"bf16": ([1, 16], [4.0, 8.0]), "skuda": ([1, 16], [2.0, 5.0])}
    assert [line.get_linestyle() for line in axes.get_lines()] == ["-", "None"]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel(), axes.get_title()) == (
        "log",
        "log",
        "rows",
        "decode",
    )
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["skuda", "bf16"], "ours is the first"


def test_an_axis_that_is_not_logarithmic_begins_at_zero_and_an_unknown_name_has_a_marker():
    (axes,) = drawn(Plot("a", "", [[Panel([Series("newcomer", [1, 2], [5.0, 6.0])], "rows")]])).axes
    assert axes.get_ylim()[0] == 0
    assert axes.get_lines()[0].get_marker() == "h"


def test_times_and_ratios_stand_over_the_rows_at_which_each_was_timed():
    points = [(1, {"a": 4.0, "b": 2.0}, {"a": 2.0, "b": 1.0}), (16, {"b": 3.0}, {})]
    above, below = by_rows(points, "rows, M", ("us", "time over b"), "decode")
    assert [(one.name, one.x, one.y) for one in above.series] == [("a", [1], [4.0]), ("b", [1, 16], [2.0, 3.0])]
    assert below.series[0] == Series("a", [1], [2.0])
    assert below.series[1].y[0] == 1.0
    assert below.series[1].y[1] != below.series[1].y[1], "without ours there is no ratio"
    assert (above.y, below.y, below.x, above.ticks, above.title) == ("us", "time over b", "rows, M", [1, 16], "decode")


def test_the_same_record_gives_the_same_bytes_without_a_date():
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        made = rendered([PLOT], suffix)
        assert made == rendered([PLOT], suffix), suffix
        assert made.startswith(start)
    record = some_record()
    text = rendered([PLOT], "svg", record.digest()).decode()
    assert f"<dc:source>{record.digest()}</dc:source>" in text
    assert "A title with $x_{$&lt;b&gt;" in text, "no formula, no tag"
    assert "dc:date" not in text
    assert "Matplotlib v" not in text
    assert record.digest() != record.model_copy(update={"seed": 2}).digest()
    assert record.digest() == record.model_copy(update={"measurer_hash": ""}).digest(), "the same measurements"


def test_files(tmp_path):
    record, other = record_of(some_record().cases[0]), PLOT._replace(name="other")
    folder = tmp_path / "deep" / "folder"
    assert [path.name for path in save(record, [PLOT, other], folder)] == ["times.svg", "other.svg"]
    for path in folder.iterdir():
        assert ET.parse(path).getroot().tag.endswith("svg")  # noqa: S314  just written
    for name, start in (("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")):
        assert save(record, [PLOT, other], tmp_path / name) == [tmp_path / name]
        assert (tmp_path / name).read_bytes().startswith(start)


def test_what_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.png", tmp_path / "file"):
        with pytest.raises(InvalidProblem, match=r"be a (place|file)"):
            save(some_record(), [PLOT], path)
    with pytest.raises(InvalidProblem, match=r"--plot must end in \.png, \.svg or \.pdf, or be a folder"):
        check("bench", tmp_path / "a.jpg")
    with pytest.raises(InvalidProblem, match="be left out of a run in which nothing was timed"):
        save(some_record(), (), tmp_path / "a.png")


def test_without_matplotlib_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(drawing, "find_spec", lambda name: None if name == "matplotlib" else util.find_spec(name))
    with pytest.raises(MissingDependency, match=r"matplotlib is not installed; run: pip install 'matplotlib>=3\.8'"):
        check("bench", tmp_path / "a.png")
