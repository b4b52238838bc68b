"""Records of every study: their files, and what is refused on loading."""

from __future__ import annotations

import json

import pytest
from measured import some_record
from paths import ROOT

from skuda.dispatch import Tuning
from skuda.dispatch.select.environment import Environment
from skuda.dispatch.select.tuning import Timing
from skuda.registry import InvalidRecord
from skuda.registry.device import HOST
from skuda.tools.bench.record import BenchRecord
from skuda.tools.cli import main
from skuda.tools.studies.model import ModelRecord

EVIDENCE = ROOT / "docs" / "evidence"
KINDS = (BenchRecord, ModelRecord)
STORED = {path: record for kind in KINDS for path, record in kind.files(EVIDENCE).items()}
ONE = {kind: next(path for path, record in STORED.items() if isinstance(record, kind)) for kind in KINDS}
"""A stored record of each study."""


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_record_of_the_docs_loads_and_is_saved_as_it_was(path, tmp_path):
    record = STORED[path]
    record.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    assert type(record).load(tmp_path / "again.json") == record


def test_no_record_of_the_docs_is_forgotten():
    kinds = {"skuda bench", "skuda bench-model"}
    files = [path for path in EVIDENCE.glob("*.json") if json.loads(path.read_text()).get("kind") in kinds]
    assert sorted(STORED) == sorted(files)


def test_the_evidence_stays_small():
    files = [path for path in EVIDENCE.rglob("*") if path.is_file()]
    assert len(files) <= 30
    kinds = {".json": "records", ".svg": "plots", ".txt": "what other programs printed"}
    assert {path.suffix for path in files} <= kinds.keys()


def test_a_file_has_a_line_for_every_case_and_numbers_of_six_digits(tmp_path):
    record = some_record()
    case = record.cases[0].model_copy(update={"timing": Timing.of([1 / 3, 2 / 3])})
    record = record.model_copy(update={"cases": (case, *record.cases[1:])})
    text = record.text()
    assert sum(line.startswith('  {"label":') for line in text.splitlines()) == len(record.cases)
    assert '"timing":{"median":0.5,"p10":0.366667,"p90":0.633333,"best":0.333333,"rounds":2}' in text
    assert '"refused":""' not in text, "defaults are left out"
    assert json.loads(text)["kind"] == "skuda bench"
    again = BenchRecord.parse(text)
    assert again.text() == text
    path = tmp_path / "new folder" / "r.json"
    again.save(path)
    assert BenchRecord.load(path) == again


# --- what is refused -------------------------------------------------------------------------------------------------


def first_timing(found):
    """Return the first timing below some JSON."""
    if isinstance(found, dict) and "median" in found:
        return found
    members = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return next(filter(None, map(first_timing, members)), None)


@pytest.mark.parametrize(("name", "value"), [("median", 0), ("p10", 1e9), ("p90", 1e-9), ("best", 1e9), ("rounds", 0)])
@pytest.mark.parametrize("kind", [BenchRecord, ModelRecord])
def test_times_that_cannot_be_are_refused(kind, name, value, tmp_path, capsys):
    found = json.loads(ONE[kind].read_text())
    first_timing(found)[name] = value
    path = tmp_path / "r.json"
    path.write_text(json.dumps(found))
    with pytest.raises(InvalidRecord, match=r"must (be|stand)"):
        kind.load(path)
    assert main([kind.maker(), "--show", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "member"),
    [(BenchRecord, "cases"), (ModelRecord, "phases")],
)
def test_a_record_of_nothing_is_refused(kind, member, tmp_path):
    found = json.loads(ONE[kind].read_text()) | {member: []}
    (tmp_path / "r.json").write_text(json.dumps(found))
    with pytest.raises(InvalidRecord, match=member):
        kind.load(tmp_path / "r.json")


def test_a_tuning_of_nothing_is_refused(tmp_path):
    Tuning(environment=Environment(device=HOST, driver="", versions={}, skuda="0")).save(tmp_path / "t.json")
    with pytest.raises(InvalidRecord, match="entries"):
        Tuning.load(tmp_path / "t.json")


@pytest.mark.parametrize("kind", ONE, ids=lambda kind: kind.maker())
def test_another_file_is_refused(kind, tmp_path):
    path = tmp_path / "r.json"
    for content, rule in (
        ("{", "be readable JSON"),
        ("[]", f"be a record of kind 'skuda {kind.maker()}', schema 1"),
        ('{"kind": "skuda verify", "schema_version": 1}', f"`skuda {kind.maker()} --output FILE` makes one"),
        (json.dumps(json.loads(ONE[kind].read_text()) | {"schema_version": 2}), "schema 1"),
        (json.dumps(json.loads(ONE[kind].read_text()) | {"date": 3}), "date"),
    ):
        path.write_text(content)
        with pytest.raises(InvalidRecord, match=rule):
            kind.load(path)
    with pytest.raises(InvalidRecord, match="be readable JSON"):
        kind.load(tmp_path / "absent.json")
    assert kind.files(None) == {}
    path.write_text('{"kind": "another kind"}')
    assert kind.files(tmp_path) == {}
