"""Records are stamped again only where nothing that runs has changed, and a forged stamp is seen."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT
from restamp import Answer, fate_of, without_repeated

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.sources import source_hash
from skuda.tools.verify.evidence import EvidenceFile, load_records
from skuda.tools.verify.stamps import stamp

REGISTRY = built_in_registry()
HAD = Answer("old", "", "nvcc 13.0.88", "code", "launches")


@pytest.mark.parametrize(
    ("now", "base", "fate"),
    [
        (HAD, None, "unchanged"),
        (HAD._replace(source_hash="new"), None, "stamped"),
        (HAD._replace(source_hash="new", machine_code="other"), None, "stale"),
        (HAD._replace(source_hash="new", launches="other"), None, "stale"),
        (HAD._replace(source_hash="new", compiler="nvcc 13.1.2"), None, "compiled by another compiler"),
        (HAD._replace(source_hash="new", compiler="x"), HAD._replace(compiler="x"), "stamped"),
        (HAD._replace(source_hash="new", compiler="x", machine_code="y"), HAD._replace(compiler="x"), "stale"),
        (HAD._replace(machine_code="other"), None, "wrong"),
        (Answer(), None, "stale"),
    ],
)
def test_the_fate_of_a_kernel(now, base, fate):
    assert fate_of(HAD, now, base) == fate


def test_records_have_the_launches_of_today_and_a_forged_stamp_is_seen(tmp_path):
    def fresh(one):
        sku = REGISTRY.sku(one.sku)
        return one.launches and sku and source_hash(sku)[:16] == one.source_hash

    record = next(file for file in load_records().files if any(map(fresh, file.skus)))
    made = [one for one in record.skus if fresh(one)][:3]
    for one in made:
        sku = REGISTRY.sku(one.sku)
        backend = Dispatcher().backends[sku.backend]
        found = stamp(sku, [c.problem for c in REGISTRY.ops[sku.op].cases], record.device, backend, compiles=False)
        assert found.launches == one.launches
    forged = record.model_copy(update={"skus": (made[0].model_copy(update={"launches": "0" * 16}),)})
    forged.save(tmp_path / "f.json")
    program = [sys.executable, str(ROOT / "tests/programs/restamp.py"), "--check", "1", str(tmp_path / "f.json")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"{made[0].sku} has another stamp than its own sources" in done.stdout


def test_a_kernel_of_a_later_record_is_left_out_of_an_earlier_one():
    record = next(iter(EvidenceFile.files(ROOT / "docs/evidence").values()))
    later = record.model_copy(update={"date": "2999-01-01", "skus": record.skus[:2]})
    elsewhere = later.model_copy(update={"device": later.device.model_copy(update={"name": "another"})})
    assert without_repeated(record, [record, later]).skus == record.skus[2:]
    assert without_repeated(record, [record, elsewhere]) == record
    assert without_repeated(later, [record, later]) == later
