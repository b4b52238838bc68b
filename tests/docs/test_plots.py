"""The plots that pages show are those of the records beside them, and `docs/plots.py` makes them."""

from __future__ import annotations

import importlib.util
import json
import math

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


def test_the_plots_of_the_pages_are_there_and_of_the_records_beside_them(program):
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


def test_the_layer_is_drawn_by_rows_over_bf16(program):
    times = {"bf16 compiled": 30.0, "fp8": 20.0}
    cases = [measured("quantized_linear", (m, 4096, 4096), us, **times) for m, us in ((16, 10.0), (64, 12.0))]
    (plot,) = program.plots_of(record_of(measured("quantized_linear", (8, 512, 512), 1.0), *reversed(cases)))
    (panel,) = plot.panels
    assert (plot.name, panel.ticks, panel.log) == ("layer", [16, 64], "x")
    assert {one.name: (one.x, one.y) for one in panel.series} == {
        "skuda": ([16, 64], [3.0, 2.5]),
        "bf16 compiled": ([16, 64], [1.0, 1.0]),
        "fp8": ([16, 64], [1.5, 1.5]),
    }
    assert program.plots_of(record_of(cases[0])) == [], "one point is no curve"


def test_engines_are_drawn_by_sequences_ours_first(program, tmp_path):
    said = "loaded after 9 s\nround 0 fp8 {'step_ms 1': 3.0, 'step_ms 16': 5.0, 'prefill 8x2048': 9}\n"
    said += "round 0 skuda {'step_ms 1': 2.0}\nround 1 skuda {'step_ms 1': 4.0}\nround 0 unknown {'step_ms 1': 1.0}\n"
    (tmp_path / "h100-vllm-engines.txt").write_text(said)
    ((stem, (_, (plot,))),) = program.drawable(tmp_path).items()
    assert (stem, plot.name) == ("h100-vllm-engines", "steps")
    assert plot.title.endswith("on an H100")
    assert [(one.name, one.x, one.y) for one in plot.panels[0].series] == [
        ("skuda", [1], [3.0]),
        ("fp8", [1, 16], [3.0, 5.0]),
    ]


def test_times_and_ratios_stand_over_the_rows_at_which_each_was_timed(program):
    points = [(1, {"a": 4.0, "b": 2.0}, {"a": 2.0, "b": 1.0}), (16, {"b": 3.0}, {})]
    above, below = program.by_rows(points)
    assert [tuple(one) for one in above.series] == [("a", [1], [4.0]), ("b", [1, 16], [2.0, 3.0])]
    assert tuple(below.series[0]) == ("a", [1], [2.0])
    assert below.series[1].y == pytest.approx([1.0, math.nan], nan_ok=True), "without ours there is no ratio"
    assert (above.log, below.log, below.x, above.ticks) == ("xy", "x", "rows, M", [1, 16])


def test_every_point_of_a_record_is_drawn(program):
    record = ModelRecord.load(EVIDENCE / "h200x2-parallel.json")
    (plot,) = program.plots_of(record)
    rows = [one.rows for one in record.phases]
    want = [(form, rows, [one.times[form] for one in record.phases]) for form in record.phases[0].times]
    assert [tuple(one) for one in plot.panels[0].series] == want


def test_a_course_of_policies_is_drawn_with_a_place_for_zero(program, tmp_path):
    ratios, divergences = [3e-4, 0.0, 2e-5], [5e-9, 0.0, 7e-12]
    bf16 = [{"ratio": ratio, "kl": kl, "reward": 0.5} for ratio, kl in zip(ratios, divergences, strict=True)]
    exact = [{"ratio": 0.0, "kl": 0.0, "reward": 0.5}] * 3
    text = json.dumps({"device": "cuda", "courses": {"bf16": bf16, "exact": exact}})
    (tmp_path / "x-policy.json").write_text(text)
    ((stem, (digest, (plot,))),) = program.drawable(tmp_path).items()
    assert (stem, plot.name) == ("x-policy", "ratio")
    for panel, values, least in zip(plot.panels, (ratios, divergences), (1e-5, 1e-12), strict=True):
        assert [(one.name, [*one.x], one.y) for one in panel.series] == [
            ("bf16", [0, 1, 2], values),
            ("exact", [0, 1, 2], [0.0, 0.0, 0.0]),
        ]
        assert panel.least == pytest.approx(least)
    figure = Figure()
    program.draw_on(figure, plot)
    assert [axes.get_yscale() for axes in figure.axes] == ["symlog", "symlog"]
    assert program.draw(tmp_path, frozenset({"x-policy/ratio.svg"})) == frozenset()
    assert program.is_of(tmp_path / "x-policy" / "ratio.svg", digest)
    (tmp_path / "x-policy.json").write_text(text.replace("0.0003", "0.0004"))
    assert not program.is_of(tmp_path / "x-policy" / "ratio.svg", program.drawable(tmp_path)["x-policy"][0])


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
