"""The plots in docs/evidence are those of the records beside them, and `docs/plots.py` makes them."""

from __future__ import annotations

import importlib.util
import json

import pytest
from measured import measured, record_of
from paths import ROOT

from skuda.tools.bench import model_plot
from skuda.tools.bench import plot as bench_plot
from skuda.tools.bench.model_record import ModelRecord
from skuda.tools.bench.record import BenchRecord
from skuda.tools.parallel import plot as parallel_plot
from skuda.tools.parallel.record import ParallelRecord
from skuda.tools.plot import digest
from skuda.tools.report.measured import KINDS
from skuda.tools.train import plot as train_plot
from skuda.tools.train.record import TrainRecord

PLOTS = {
    BenchRecord: bench_plot.plots,
    ModelRecord: model_plot.plots,
    ParallelRecord: parallel_plot.plots,
    TrainRecord: train_plot.plots,
}
NAMES = {kind.model_fields["kind"].default: kind for kind in KINDS}
FILES = [
    (NAMES[kind], path)
    for path in sorted((ROOT / "docs" / "evidence").glob("*.json"))
    if (kind := json.loads(path.read_text()).get("kind")) in NAMES
]


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("plots", ROOT / "docs" / "plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda each: getattr(each, "stem", None))
def test_the_plots_in_the_docs_are_those_of_the_records_beside_them(kind, path):
    record = kind.load(path)
    files = sorted(path.with_suffix("").glob("*"))
    assert [file.name for file in files] == sorted(f"{plot.name}.svg" for plot in PLOTS[kind](record)), "`make plots`"
    for file in files:
        assert f"<dc:source>{digest(record)}</dc:source>" in file.read_text(), f"{file} is old: run `make plots`"
        assert file.stat().st_size < 150_000


def test_every_kind_of_measurement_has_plots():
    assert set(PLOTS) == set(KINDS)
    assert len(FILES) >= 3


def test_old_plots_are_replaced(program, tmp_path, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    record_of(measured("fake_quantize", (1024, 4096), 7.0)).save(tmp_path / "run.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "old.svg").write_text("")
    (tmp_path / "other.json").write_text('{"kind": "skuda verify"}')
    program.draw(tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["bandwidth.svg", "bytes.svg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "run", "run.json"]


def test_a_record_that_cannot_be_drawn_is_an_error(program, tmp_path, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    refused = measured("fake_quantize", (1024, 4096), 7.0).model_copy(update={"timing": None, "refused": "wrong"})
    record_of(refused).save(tmp_path / "run.json")
    with pytest.raises(RuntimeError, match="cannot draw"):
        program.draw(tmp_path)
