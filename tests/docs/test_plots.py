"""The plots that pages show are those of the records beside them, and `docs/plots.py` makes them."""

from __future__ import annotations

import importlib.util

import pytest
from measured import measured, record_of
from paths import ROOT

from skuda.tools.studies.commands import records

EVIDENCE = ROOT / "docs" / "evidence"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("plots", ROOT / "docs" / "plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plots_of_the_pages_are_there_and_of_the_records_beside_them(program):
    stored = {path.stem: record for path, (_, record) in records(EVIDENCE).items()}
    files = {path.relative_to(EVIDENCE).as_posix(): path for path in EVIDENCE.glob("*/*")}
    assert set(files) == program.shown(), "`make plots` draws those that pages show, and no others"
    for name, path in files.items():
        assert program.is_of(path, stored[name.partition("/")[0]]), f"{name} is old: run `make plots`"
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
    assert not program.is_of(file, layer(8.0)), "a plot of another record"
    program.draw(tmp_path, names)
    assert program.is_of(file, layer(8.0))


def test_pages_name_the_plots_that_they_show(program, tmp_path):
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    (tmp_path / "README.md").write_text("![a](docs/evidence/h200-bench/layer.svg) and [a record](docs/evidence/x.json)")
    (tmp_path / "docs" / "reference" / "h100.md").write_text("![b](../evidence/h100-bench/fill-f32.svg)")
    assert program.shown(tmp_path) == {"h200-bench/layer.svg", "h100-bench/fill-f32.svg"}
