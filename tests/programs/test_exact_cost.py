"""The program that times exact models runs every path of it on a tiny model."""

from __future__ import annotations

import json
import re

import pytest
from paths import ROOT


def test_a_tiny_model_has_a_time_for_every_name_of_the_record(tmp_path):
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    import exact_cost

    exact_cost.main(["--tiny", "--layers", "1", "--output", str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    record = json.loads((ROOT / "docs" / "evidence" / "h200-exact.json").read_text())
    names = [[re.sub(r"\d+", "N", name) for name in times] for times in (found, record)]
    assert names[0] == names[1]
    del found["card"]
    assert all(value > 0 for value in found.values())
    assert found["layers"] == 1
