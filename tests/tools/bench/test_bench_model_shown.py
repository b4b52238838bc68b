"""A record of `skuda bench-model`, made on the CPU: its plot, its tables, its place on the page, its requirements."""

from __future__ import annotations

import re

import pytest
from matplotlib.figure import Figure
from support import fresh

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import HOST, device_named
from skuda.tools.bench import model_command, model_record
from skuda.tools.bench.model_judged import GAINS, LLAMA_3_8B, judged
from skuda.tools.bench.model_markdown import model_markdown
from skuda.tools.bench.model_plot import plots
from skuda.tools.bench.model_record import ModelRecord, PhaseResult
from skuda.tools.bench.record import HostCost
from skuda.tools.cli import main

pytest.importorskip("torch")

from skuda.tools.bench import llama
from skuda.tools.bench.lab import Sizes, TorchLab
from skuda.tools.bench.model import ModelBench
from skuda.tools.bench.ways import WAYS


@pytest.fixture(scope="module")
def record():
    sizes = llama.Sizes(hidden=32, intermediate=48, heads=4, kv_heads=2, layers=2)
    lab = TorchLab(HOST, Sizes(flushed=1 << 12))
    bench = ModelBench(HOST, lab, sizes, (WAYS[0], WAYS[2]), seed=int(fresh("bench").integers(1 << 30)), repeats=2)
    return bench.run((("decode", 3, 5), ("decode", 1, 5), ("prefill", 4, 4)), "skuda bench-model --cpu")


@pytest.fixture
def path(record, tmp_path, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    record.save(tmp_path / "record.json")
    return tmp_path / "record.json"


def test_the_plot_has_every_time_a_block_and_every_ratio(record):
    (plot,) = plots(record)
    figure = Figure()
    plot.draw(figure)
    axes = figure.axes
    assert [one.get_title() for one in axes] == ["decode", "prefill", "", ""]
    ways = {(phase.rows, way.name): way for phase in record.phases for way in phase.ways}
    for who in ("bf16", "skuda"):
        (times,) = (line for line in axes[0].get_lines() if line.get_label() == who)
        (ratios,) = (line for line in axes[2].get_lines() if line.get_label() == who)
        assert list(times.get_xdata()) == list(ratios.get_xdata()) == [1, 3]
        assert list(times.get_ydata()) == [ways[m, who].timing.median / 2 for m in (1, 3)]
        assert list(ratios.get_ydata()) == [ways[m, who].ratio for m in (1, 3)]
    assert [line.get_label() for line in axes[1].get_lines()] == ["bf16", "skuda"]


def test_without_times_there_is_no_plot(record):
    wrong = tuple(
        phase.model_copy(
            update={"wrong": "a bit", "ways": tuple(w.model_copy(update={"timing": None}) for w in phase.ways)}
        )
        for phase in record.phases
    )
    assert plots(record.model_copy(update={"phases": wrong})) == ()


def test_a_record_is_drawn_and_put_on_the_page(record, path, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["bench-model", "--show", str(path), "--plot", str(tmp_path / "plots"), "--html", str(page)]) == 0
    assert (tmp_path / "plots" / "blocks.svg").is_file()
    assert capsys.readouterr().err.splitlines() == [f"wrote {tmp_path / 'plots' / 'blocks.svg'}", f"wrote {page}"]
    text = page.read_text()
    for part in ("A whole model on CPU", record.command, "Microseconds of a block on CPU", "equal on 9 inputs", "<svg"):
        assert part in text
    assert "measured by other measuring code" not in text
    for phase in record.phases:
        for way in phase.ways:
            assert f">{way.timing.median / 2:.1f}<" in text


def test_a_stale_record_looks_stale(record, path, tmp_path, capsys, monkeypatch):
    record.model_copy(update={"measurer_hash": "0" * 64}).save(path)
    page = tmp_path / "page.html"
    assert main(["bench-model", "--show", str(path), "--markdown", "facts", "--html", str(page)]) == 0
    assert "- stale: measured by other measuring code\n" in capsys.readouterr().out
    assert "measured by other measuring code" in page.read_text()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["bench-model", "--show", str(path)]) == 0
    assert "stale: measured by other" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "skuda bench", "schema_version": 1}'])
def test_another_file_is_refused_and_nothing_is_drawn(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    typed = ["bench-model", "--show", str(tmp_path / "other.json"), "--plot", str(tmp_path / "plots")]
    assert main(typed) == 2
    assert re.search("readable JSON|must be a record of kind 'skuda bench-model'", capsys.readouterr().err)
    assert not (tmp_path / "plots").exists()


def test_a_place_that_cannot_be_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(model_command, "_measured", lambda *_: pytest.fail("measured"))
    assert main(["bench-model", "--cpu", "--plot", "a.jpg"]) == 2
    assert "bench-model: --plot must end in .png" in capsys.readouterr().err


def test_markdown_has_the_sections(record, path, capsys):
    whole = model_markdown(record)
    for section in ("facts", "phases", "requirements", "host"):
        part = model_markdown(record, section)
        assert part
        assert part in whole
    assert len(model_markdown(record, "phases").splitlines()) == 2 + 3
    assert main(["bench-model", "--show", str(path), "--markdown", "nonsense"]) == 2
    assert "all, facts, phases, requirements, host" in capsys.readouterr().err


# --- requirements ----------------------------------------------------------------------------------------------------


def full(record, *, gain=2.0, rival=1.5, **changes):
    """The record as if it were the one that the requirements are for, with one gain and one ratio of rivals."""
    ratios = {"bf16": gain, "bf16 compiled": gain + 1, "skuda": 1.0, "torchao": rival, "bitsandbytes": rival + 1}
    ways = tuple({"name": name, "timing": Timing.of([ratio]), "ratio": ratio} for name, ratio in ratios.items())
    phases = tuple(PhaseResult(phase=p, rows=m, cache=m, compared=3, ways=ways) for p, m in GAINS)
    host = tuple(
        HostCost(name=name, timing=Timing.of([us])) for name, us in (("F.linear", 10.0), ("DynamicLinear", 13.0))
    )
    fields = {"device": device_named("h200"), "graph": True, "sizes": LLAMA_3_8B, "phases": phases, "host": host}
    return record.model_copy(update=fields | {"bytes": {"bf16": 100, "skuda": 51}} | changes)


def missed(record):
    return [one.what for one in judged(record).requirements if one.met is False]


def test_the_requirements_are_for_what_is_measured_by_default(record):
    assert model_command.Request().sizes == LLAMA_3_8B
    assert {(phase, rows) for phase, rows, _ in model_command.Request().phases} == set(GAINS)
    found = judged(full(record))
    assert found.note == ""
    assert {one.met for one in found.requirements} == {True}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"gain": 1.62}, ["decode 1:", "prefill 2048:", "prefill 8192:"]),
        ({"rival": 1.2}, ["torchao over"]),
        ({"bytes": {"bf16": 100, "skuda": 53}}, ["bytes of weights"]),
        (
            {
                "host": (
                    HostCost(name="F.linear", timing=Timing.of([1.0])),
                    HostCost(name="DynamicLinear", timing=Timing.of([1.4])),
                )
            },
            ["DynamicLinear on the host"],
        ),
    ],
)
def test_what_is_beyond_its_bound_is_missed(record, changes, what):
    found = missed(full(record, **changes))
    assert len(found) == len(what)
    assert all(one.startswith(start) for one, start in zip(found, what, strict=True))


def test_what_is_absent_or_measured_elsewhere_is_not_judged(record):
    alone = tuple(
        phase.model_copy(update={"ways": tuple(way for way in phase.ways if way.name == "bf16")})
        for phase in full(record).phases
    )
    verdicts = [one.verdict for one in judged(full(record, phases=alone)).requirements]
    assert verdicts == ["met", *["not judged"] * 7, "met", "met"], "a gain over eager alone says nothing"
    for changes in ({"device": HOST}, {"graph": False}, {"sizes": record.sizes}):
        found = judged(full(record, gain=1.0, **changes))
        assert found.note
        assert [one.met for one in found.requirements] == [True, *[None] * 9]


def test_a_wrong_bit_is_missed_anywhere(record):
    wrong = record.model_copy(update={"phases": (record.phases[0].model_copy(update={"wrong": "a bit"}),)})
    assert missed(wrong) == ["bits of ours, eager, compiled and replayed"]
    assert ModelRecord.model_validate(wrong.model_dump()).outdated == ""
    assert model_record.model_measurer_hash() == wrong.measurer_hash
