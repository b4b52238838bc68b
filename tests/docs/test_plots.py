"""The plots that pages show are those of the records beside them, and `docs/plots.py` makes them."""

from __future__ import annotations

import importlib.util

import pytest
from matplotlib.figure import Figure
from measured import measured, record_of
from paths import ROOT

from skuda.tools.studies.model import ModelRecord

EVIDENCE = ROOT / "docs" / "evidence"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("plots", ROOT / "docs" / "plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plots_of_the_pages_are_those_of_records(program):
    digests = {stem: digest for stem, (digest, _) in program.drawable(EVIDENCE).items()}
    files = {path.relative_to(EVIDENCE).as_posix(): path for path in EVIDENCE.glob("*/*")}
    assert set(files) == program.shown(), "`make plots` draws those that pages show, and no others"
    for name, path in files.items():
        assert program.is_of(path, digests[name.partition("/")[0]]), f"{name} is old: run `make plots`"
        assert path.stat().st_size < 150_000


def layer(us):
    return record_of(*(measured("quantized_linear", (m, 4096, 4096), us, bf16=9.0) for m in (16, 64)))


def test_shown_plots_are_drawn_once_and_all_others_removed(program, tmp_path):
    layer(7.0).save(tmp_path / "run.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old.svg").write_text("")
    (tmp_path / "other.json").write_text('{"kind": "skuda verify"}')
    names = frozenset({"run/layer.svg", "run/nonsense.svg", "gone/layer.svg"})
    assert program.draw(tmp_path, names) == names - {"run/layer.svg"}, "what no record has is returned"
    file = tmp_path / "run" / "layer.svg"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["layer.svg"]
    text = file.read_text()
    file.write_text(text + "\n")
    program.draw(tmp_path, names)
    assert file.read_text() == text + "\n", "a plot of the same record is kept"
    layer(8.0).save(tmp_path / "run.json")
    assert not program.is_of(file, layer(8.0).digest()), "a plot of another record"
    program.draw(tmp_path, names)
    assert program.is_of(file, layer(8.0).digest())


# --- plots -----------------------------------------------------------------------------------------------------------


def test_every_point_of_a_record_is_drawn(program):
    record = ModelRecord.load(EVIDENCE / "h200x2-parallel.json")
    (plot,) = program.plots_of(record)
    rows = [one.rows for one in record.phases]
    want = [(form, rows, [one.times[form] for one in record.phases]) for form in record.phases[0].times]
    assert [tuple(one) for one in plot.panels[0].series] == want


def test_every_point_is_drawn_where_it_belongs(program):
    series = [program.Series("bf16", [1, 16], [4.0, 8.0]), program.Series("skuda", [1, 16], [2.0, 5.0])]
    plain = program.Panel([program.Series("newcomer", [1, 2], [5.0, 6.0])], "rows")
    plot = program.Plot("times", "", [program.Panel(series, "rows", "us", "decode", "xy", (1, 16)), plain])
    figure = Figure()
    program.draw_on(figure, plot)
    axes, other = figure.axes
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert found == {"bf16": ([1, 16], [4.0, 8.0]), "skuda": ([1, 16], [2.0, 5.0])}
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel(), axes.get_title()) == (
        "log",
        "log",
        "rows",
        "decode",
    )
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["skuda", "bf16", "newcomer"], "ours is the first"
    assert other.get_ylim()[0] == 0, "an axis that is not logarithmic begins at 0"
    assert other.get_lines()[0].get_marker() == "h", "an unknown name has a marker, too"


def test_the_same_record_gives_the_same_bytes_without_a_date(program):
    record = layer(7.0)
    (plot,) = program.plots_of(record)
    plot = plot._replace(title="A title with $x_{$<b>")
    text = program.rendered(plot, record.digest())
    assert text == program.rendered(plot, record.digest())
    assert "A title with $x_{$&lt;b&gt;" in text, "no formula, no tag"
    assert "dc:date" not in text
    assert "Matplotlib v" not in text
    assert record.digest() != record.model_copy(update={"seed": 2}).digest()
    assert record.digest() == record.model_copy(update={"method": 0}).digest(), "the same measurements"


def test_pages_name_the_plots_that_they_show(program, tmp_path):
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "README.md").write_text("![a](docs/evidence/h200-bench/layer.svg) and [a record](docs/evidence/x.json)")
    (tmp_path / "docs" / "reference" / "h100.md").write_text("![b](../evidence/h100-bench/fill-f32.svg)")
    assert program.shown(tmp_path) == {"h200-bench/layer.svg", "h100-bench/fill-f32.svg"}
