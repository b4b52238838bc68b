"""The program that times 4-bit weights: what it records on a CPU, and that a wrong result stops it."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")


def test_tiny_layers_are_timed_on_a_cpu_and_rivals_that_are_away_say_so(tmp_path):
    import int4_times

    path = tmp_path / "times.json"
    assert int4_times.main(["--repeats", "2", "--output", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["card"] == "CPU"
    assert [each["m"] for each in record["times"]] == [1, 3]
    for each in record["times"]:
        assert set(each["us"]) == {"W4A8", "W8A8", "bf16"}
        assert min(each["us"].values()) > 0
        assert set(each["refused"]) == {"torch, int4 x bf16"}


@pytest.mark.parametrize("way", ["ours", "rival"])
def test_a_wrong_result_is_not_timed(way, tmp_path, monkeypatch):
    import int4_times

    if way == "ours":
        monkeypatch.setattr(int4_times.Measurement, "mismatch", lambda *_: "wrong result: output[0, 0]")
    else:
        monkeypatch.setattr(int4_times.functional, "linear", lambda x, weight: 1.5 * x @ weight.T)
    path = tmp_path / "times.json"
    assert int4_times.main(["--repeats", "2", "--output", str(path)]) == (way == "ours")
    for each in json.loads(path.read_text())["times"]:
        wrong = {"W4A8": "wrong result", "W8A8": "wrong result"} if way == "ours" else {"bf16": "its error is"}
        assert all(each["refused"][name].startswith(why) for name, why in wrong.items())
        assert not wrong.keys() & each["us"].keys()
