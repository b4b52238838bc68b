"""The table of cards in README says what the dispatcher and the records say."""

from __future__ import annotations

import json
import re

import pytest
from paths import ROOT

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.kernels.catalog import built_in_registry
from skuda.registry.device import KNOWN_DEVICES
from skuda.tools.verify.evidence import load_records

ROW = re.compile(r"^\| ([^|]+) \| (sm_\d+) \| ([^|]+) \| (yes|no) \| (yes|no) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def cards(cell):
    """Return the devices of a cell that the registry knows."""
    names = {name.lower().replace(" ", ""): name for name in cell.split(", ")}
    return [KNOWN_DEVICES[name] for name in names if name in KNOWN_DEVICES]


def measured_devices():
    records = (json.loads(path.read_text()) for path in (ROOT / "docs" / "evidence").glob("*.json"))
    return {record["device"]["name"] for record in records if record.get("kind") == "skuda bench"}


def test_every_row_has_a_card_to_compare_with():
    assert len(ROWS) >= 3
    assert all(cards(row[0]) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_the_kernels_best_first_and_what_there_are_records_of(row):
    names, arch, kernels, verified, measured = row
    d = Dispatcher(built_in_registry())
    for device in cards(names):
        assert arch == "sm_{}{}".format(*device.compute_capability)
        variants = []
        for rows in (1, 4096):
            fields = {"m": rows, "c_out": 4096, "k": 4096, "q_min": -127, "q_max": 127, "activation_element": "bf16"}
            found = d.explain(d.describe("quantized_linear", **fields), PlanPreference(backend="cuda_core"), device)
            variants += [decision.sku.split(".")[-1] for decision in found.accepted]
        assert re.findall(r"`(\w+)`", kernels) == sorted(
            set(variants), key=["streamed", "warpgroup", "mma", "plain"].index
        )
        assert (device.name in {file.device.name for file in load_records(None).files}) is (verified == "yes")
        assert (device.name in measured_devices()) is (measured == "yes")
