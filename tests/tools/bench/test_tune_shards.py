"""`skuda tune --shard` and `skuda merge`: all parts hold what one run measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skuda.dispatch import Tuning
from skuda.tools.cli import main

TYPED = ("fake_quantize,dynamic_range", "--shapes", "4x4,2x8,8x2,5x5", "--element", "f32,f16", "--backend", "numpy")
RUN = ("tune", *TYPED, "--repeats", "1", "--seed", "7")


@pytest.fixture
def skuda(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    monkeypatch.delenv("SKUDA_TUNING", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


def measured(path):
    """What a file says, without times and dates."""
    record = json.loads(Path(path).read_text())
    for entry in record["entries"]:
        del entry["date"]
        for candidate in entry["candidates"]:
            del candidate["timing"]
    return record


@pytest.mark.parametrize("count", [1, 3, 14])
def test_the_merged_times_are_those_of_the_problems_of_one_run(skuda, count):
    files = []
    for index in range(1, count + 1):
        status, _, err = skuda(*RUN, "--shard", f"{index}/{count}")
        files.append(f"tuning-cpu-{index}-of-{count}.json")
        size = len(Tuning.load(files[-1]).entries)
        assert status == 0
        told = f"shard {index}/{count}: {size} of 12" if size else f"shard {index}/{count} is empty: there are 12"
        assert err.startswith(f"skuda: {told} problems\n")
    status, out, err = skuda("merge", *reversed(files), "--output", "all.json")
    shards = "1 shard" if count == 1 else f"{count} shards"
    assert (status, out, err) == (0, f"{shards}: 12 problems; written to all.json\n", "")
    assert skuda(*RUN, "--output", "one.json")[0] == 0
    assert measured("all.json") == measured("one.json")
    assert "shard" not in measured("one.json")
    parts = {entry for file in files for entry in Tuning.load(file).entries}
    assert set(Tuning.load("all.json").entries) == parts, "each with its own times"


@pytest.fixture
def parts(skuda):
    for index in (1, 2):
        skuda(*RUN, "--shard", f"{index}/2", "--output", f"{index}.json")
    return [json.loads(Path(f"{index}.json").read_text()) for index in (1, 2)]


@pytest.fixture
def refused(skuda):
    def merge(parts):
        for index, part in enumerate(parts, 1):
            Path(f"{index}.json").write_text(json.dumps(part))
        names = [f"{index}.json" for index in range(1, len(parts) + 1)]
        status, out, err = skuda("merge", *names, "--output", "all.json")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert not Path("all.json").exists()
        return err

    return merge


def test_contradictions_and_gaps_are_refused(parts, refused):
    first, second = parts
    environment = second["environment"]
    for changed, says in (
        ({"margin": 4}, "2.json: margin must be that of 1.json, 3.0; had 4.0"),
        ({"environment": {**environment, "driver": "another"}}, "2.json: driver must be that of 1.json"),
        ({"environment": {**environment, "skuda": "0"}}, "2.json: skuda must be that of 1.json"),
        (
            {"environment": {**environment, "device": {**environment["device"], "name": "x"}}},
            "2.json: device must be that of 1.json",
        ),
        ({"shard": {**second["shard"], "total": 99}}, "2.json: shard.total must be that of 1.json, 12; had 99"),
        ({"shard": {**second["shard"], "list_hash": "0" * 64}}, "2.json: shard.list_hash must be"),
        ({"entries": second["entries"][1:]}, "2.json: entries must be the 6 of shard 2/2 of a list of 12; had 5"),
        ({"entries": second["entries"][::-1]}, "entries must be those of the list that all files are shards of"),
        ({"entries": [*second["entries"], first["entries"][0]]}, "2.json: entries must be there once; 1.json holds it"),
        ({"kind": "skuda verify"}, "2.json"),
    ):
        assert says in refused([first, {**second, **changed}])
    assert "missing: 2; had 1 of 2" in refused([first])


def test_a_record_of_a_verification_does_not_go_with_times(skuda, parts):
    typed = ("verify", "--device", "cpu", "--op", "fill", "--quick", "--seed", "7", "--shard", "2/2")
    assert skuda(*typed, "--output", "verified.json")[0] == 0
    status, _, err = skuda("merge", "1.json", "verified.json", "--output", "all.json")
    assert status == 2
    assert "verified.json: kind must be that of 1.json, skuda tuning; had skuda verify" in err


def test_no_file_of_times_is_replaced(skuda, parts):
    Path("there.json").write_text("mine")
    status, _, err = skuda("merge", "1.json", "2.json", "--output", "there.json")
    assert status == 2
    assert "--output must be a new file; had there.json, which is there" in err
    assert Path("there.json").read_text() == "mine"


def test_only_the_same_shard_updates_the_file_of_a_shard(skuda, parts):
    for more in ((), ("--shard", "2/2")):
        status, _, err = skuda(*RUN, *more, "--update", "--output", "1.json")
        assert status == 2
        assert "shard must be that of the entries there are, 1/2" in err
    assert skuda(*RUN, "--shard", "1/2", "--update", "--output", "1.json")[0] == 0
    assert skuda("merge", "1.json", "2.json", "--output", "all.json")[0] == 0


def test_a_shard_is_not_shown_beside_another_file(skuda, parts):
    status, _, err = skuda("tune", "--show", "1.json", "--shard", "1/2")
    assert status == 2
    assert "--shard must be left out: --show measures nothing" in err
    assert skuda("tune", "--show", "1.json")[0] == 0
