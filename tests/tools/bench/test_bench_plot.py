"""`skuda bench --plot`: every measured point is drawn where it belongs, below the ceilings of the same run."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from matplotlib.figure import Figure
from measured import measured, record_of, some_record

from skuda.registry import InvalidProblem
from skuda.tools import plot as drawings
from skuda.tools.bench.drawing import points
from skuda.tools.bench.plot import plots
from skuda.tools.bench.record import Ceilings
from skuda.tools.cli import main
from skuda.tools.plot import digest, rendered, save

NAMES = [
    *(f"{kind}-smoothquant_linear-bf16" for kind in ("roofline", "speed", "throughput")),
    "bytes",
    "bandwidth",
]


def drawn(record, name):
    """Return the axes of a plot."""
    (plot,) = (plot for plot in plots(record) if plot.name == name)
    figure = Figure()
    plot.draw(figure)
    return figure.axes


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_a_record_has_the_plots_that_it_has_points_for():
    record = some_record()
    assert [plot.name for plot in plots(record)] == NAMES
    assert all("NVIDIA H200" in plot.title and "2026-02-03" in plot.title for plot in plots(record))
    only = record_of(*(case for case in record.cases if case.op == "fake_quantize"))
    assert [plot.name for plot in plots(only)] == NAMES[3:]
    assert [plot.name for plot in plots(record_of(record.cases[2]))] == NAMES[:1], "one number of rows is no line"
    assert plots(record_of(record.cases[-1])) == ()


def test_points_are_what_was_timed_without_who_does_something_else():
    found = [(p.case.shape, p.who, p.us) for p in points(some_record().cases)]
    assert found[:3] == [
        ((16, 512, 512), "skuda", 5.0),
        ((16, 512, 512), "bf16", 10.0),
        ((1024, 512, 512), "skuda", 8.0),
    ]
    assert len(found) == 2 + 3 + 2 + 2 + 2 + 2
    case = measured("smoothquant_linear", (100, 1000, 1000), 2.0)
    (point,) = points([case])
    assert point.tops == pytest.approx(2 * 100 * 1000 * 1000 / 2e-6 / 1e12)
    assert point.bandwidth == pytest.approx(case.bytes / 2e-6 / 1e12)
    assert point.intensity == pytest.approx(2e8 / case.bytes)


def test_the_roofline_has_every_point_of_its_op_and_the_ceilings():
    record = some_record()
    (axes,) = drawn(record, NAMES[0])
    found = lines(axes)
    mine = [p for p in points(record.cases) if p.case.op == "smoothquant_linear"]
    for who in ("skuda", "bf16", "int_mm"):
        theirs = [p for p in mine if p.who == who]
        assert found[who] == ([p.intensity for p in theirs], [p.tops for p in theirs])
    ceilings = [line for line in axes.get_lines() if line.get_marker() == "None"]
    slope, fp8, bf16 = (line.get_xydata() for line in ceilings)
    assert slope[:, 1] / slope[:, 0] == pytest.approx([4.0, 4.0])
    assert list(slope[-1]) == pytest.approx([400.0, 1600.0])
    assert list(fp8[:, 1]) == [1600.0, 1600.0]
    assert list(bf16[:, 1]) == [800.0, 800.0]
    said = " ".join(text.get_text() for text in axes.texts)
    assert re.search(r"copy, 4\.00 TB/s.*fp8 product\s1600 TFLOP/s.*bf16 product\s800", said, re.DOTALL)


def test_speed_by_rows_stands_below_the_ceiling_and_above_everybodys_time_over_ours():
    speed, ratio = drawn(some_record(), NAMES[1])
    assert speed.get_title() == "N = 512, K = 512"
    found = lines(speed)
    assert found["skuda"] == ([16, 1024], pytest.approx([16 * 2**19 / 5e6, 1024 * 2**19 / 8e6]))
    assert found["int_mm"][0] == [1024]
    # The ceiling of 16 rows is memory, of 1024 rows too at this width: bytes over bandwidth.
    cases = [case for case in some_record().cases if case.shape[1:] == (512, 512)]
    floors = [case.operations / (case.bytes / 4e12) / 1e12 for case in cases]
    assert found["ceiling"] == ([16, 1024], pytest.approx(floors))
    assert lines(ratio)["bf16"] == ([16, 1024], [2.0, 0.5])
    assert lines(ratio)["skuda"][1] == [1.0, 1.0]


def test_the_throughput_of_many_rows_is_a_bar_for_bf16_cutlass_and_ours():
    cases = [
        measured("smoothquant_linear", (m, 512, 512), 5.0, bf16=10.0, int_mm=2.0, **more)
        for m, more in ((512, {}), (1024, {"cutlass": 4.0}), (2048, {}))
    ]
    (axes,) = drawn(record_of(*cases), NAMES[2])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1024x512x512", "2048x512x512"]
    work = [m * 2**19 / 1e6 for m in (1024, 2048)]
    found = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert found == {
        "bf16, torch": pytest.approx([work[0] / 10, work[1] / 10]),
        "int8, fastest CUTLASS": pytest.approx([work[0] / 4]),
        "int8, skuda": pytest.approx([work[0] / 5, work[1] / 5]),
    }
    (theirs,) = next(bars for bars in axes.containers if "CUTLASS" in bars.get_label())
    assert 0 < theirs.get_center()[0] + 0.5 < 1, "it stands at the first shape"


def test_bytes_and_bandwidth_show_the_other_ops():
    record = some_record()
    (axes,) = drawn(record, "bytes")
    found = lines(axes)
    assert [len(found[who][0]) for who in ("skuda", "compile", "bitsandbytes")] == [3, 2, 1]
    assert "copy" not in found
    assert found["skuda"] == ([case.bytes / 1e6 for case in record.cases[3:6]], [7.0, 14.0, 5.0])
    panels = {axes.get_title(): axes for axes in drawn(record, "bandwidth")}
    assert set(panels) == {"bf16", "f16"}
    largest = record.cases[4]
    assert lines(panels["bf16"])["skuda"] == ([pytest.approx(largest.bytes / 14.0e6)], [0])
    assert [label.get_text() for label in panels["bf16"].get_yticklabels()] == ["fake_quantize", "dynamic_range"]


def test_without_ceilings_the_points_are_drawn_alone():
    record = some_record(ceilings=Ceilings())
    for name in NAMES:
        for axes in drawn(record, name):
            assert not [line for line in axes.get_lines() if line.get_marker() == "None"]
    assert rendered(plots(record), "png")[:4] == b"\x89PNG"


def test_many_weights_wrap_and_an_unknown_rival_has_a_marker():
    cases = [
        measured("smoothquant_linear", (m, n, 512), m / 10, newcomer=m / 20)
        for n in (256, 512, 768, 1024)
        for m in (16, 32)
    ]
    axes = drawn(record_of(*cases), NAMES[1])
    assert sum(one.get_title() != "" for one in axes) == 4
    assert len([one for one in axes if one.axison]) == 8
    assert "newcomer" in lines(axes[0])


def test_facets_have_ticks_of_their_own():
    cases = [
        measured("smoothquant_linear", (m, n, 512), 1.0) for n in (256, 512, 768, 1024) for m in (n // 256, 16, 64 + n)
    ]
    axes = {one.get_title(): one for one in drawn(record_of(*cases), NAMES[1])}
    for n in (256, 512, 768, 1024):
        assert list(axes[f"N = {n}, K = 512"].get_xticks()) == [n // 256, 16, 64 + n]


def test_names_in_a_record_are_neither_places_nor_formulas(tmp_path):
    case = measured("smoothquant_linear", (16, 512, 512), 5.0)
    record = record_of(case.model_copy(update={"op": "../up/$x_{$<b>"}))
    (file,) = save(record, plots(record), tmp_path / "plots")
    assert (file.parent, file.name) == (tmp_path / "plots", "roofline-_up_x__b_-bf16.svg")
    assert "../up/$x_{$&lt;b&gt;" in file.read_text()


def test_the_same_record_gives_the_same_bytes_without_a_date():
    record = some_record()
    for suffix in ("svg", "png", "pdf"):
        # The last one has a plot for each element beside each other.
        made = rendered(plots(record)[-1:], suffix)
        assert made == rendered(plots(record)[-1:], suffix), suffix
    text = rendered(plots(record)[:1], "svg", source=digest(record)).decode()
    assert digest(record) in text
    assert "dc:date" not in text
    assert "Matplotlib v" not in text
    assert digest(record) != digest(record.model_copy(update={"seed": 2}))


def test_files(tmp_path):
    record = some_record()
    folder = tmp_path / "deep" / "folder"
    assert [path.name for path in save(record, plots(record), folder)] == [f"{name}.svg" for name in NAMES]
    for path in folder.iterdir():
        assert ET.parse(path).getroot().tag.endswith("svg")  # noqa: S314  just written
    few = record_of(record.cases[2], record.cases[3])
    for name, start in (("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")):
        assert save(few, plots(few), tmp_path / name) == [tmp_path / name]
        assert (tmp_path / name).read_bytes().startswith(start)


def test_what_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, says in (
        (tmp_path / "a.jpg", r"--plot must end in \.png, \.svg or \.pdf, or be a folder"),
        (tmp_path / "file" / "a.png", "be a place that can be written"),
        (tmp_path / "file", "be a place that can be written"),
    ):
        with pytest.raises(InvalidProblem, match=says):
            save(some_record(), plots(some_record()), path)
    with pytest.raises(InvalidProblem, match="be left out of a run in which nothing was timed"):
        save(some_record(), (), tmp_path / "a.png")


@pytest.fixture
def skuda(capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    def run(*arguments):
        status = main(["bench", *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_the_command_draws_a_record_and_says_where(skuda, tmp_path):
    path = tmp_path / "r.json"
    record_of(measured("fake_quantize", (1024, 4096), 7.0)).save(path)
    status, out, err = skuda("--show", path, "--plot", tmp_path / "plots")
    assert (status, out.count("\n")) == (0, 1)
    assert [Path(line.removeprefix("wrote ")).name for line in err.splitlines()] == ["bytes.svg", "bandwidth.svg"]
    assert (tmp_path / "plots" / "bytes.svg").is_file()
    status, out, err = skuda("--show", path, "--plot", "a.jpg")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_without_matplotlib_it_says_so_before_anything_is_measured(skuda, monkeypatch, tmp_path):
    monkeypatch.setattr(drawings, "find_spec", lambda name: None if name == "matplotlib" else util.find_spec(name))
    status, out, err = skuda("linear", "--plot", tmp_path / "a.png")
    assert (status, out) == (2, "")
    assert err == "skuda: matplotlib is not installed; run: pip install 'matplotlib>=3.8'\n"
