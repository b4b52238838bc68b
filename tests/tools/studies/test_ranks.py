"""`skuda demo --gpus`: one hash in int8 on every number of ranks, and a fault that shows as several."""

from __future__ import annotations

import json

import pytest
from support import fresh

from skuda.registry import InvalidProblem
from skuda.registry.device import HOST
from skuda.tools.studies import commands, ranks
from skuda.tools.studies.commands import RankFailed, demo
from skuda.tools.studies.ranks import BATCHES, FORMS
from skuda.tools.study.run import NoDevice

TINY = {"gloo": (64, 112, 2)}


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs the demo on the CPU with a fault, and returns status, output and errors."""
    pytest.importorskip("torch")
    import rank_faults

    from skuda.tools.studies import processes, ranks_rank

    monkeypatch.setattr(ranks, "SIZES", TINY)
    monkeypatch.setattr(commands, "_SEED", int(fresh("demo").integers(1 << 31)))
    monkeypatch.setattr(processes, "_GRACE", 60.0)

    def run(count, fault="hashes", **options):
        monkeypatch.setattr(ranks_rank, "work", getattr(rank_faults, fault))
        status = demo(count, device="host", **{"as_json": False, **options})
        return status, *capsys.readouterr()

    return run


def test_int8_has_one_hash_and_rounded_parts_have_several(run):
    status, out, err = run(3)
    lines = [line[2:-2].split(" | ") for line in out.splitlines() if line.startswith("| ")]
    rows = [[row[0].replace("none", "0"), *row[2:]] for row in lines[2:-1]]
    assert (status, err) == (0, "skuda: PASS: int8 has one hash\n")
    assert [(row[0], row[1]) for row in rows] == [(str(count), batch) for count in range(4) for batch in BATCHES]
    int8, sliced, real = ([row[at] for row in rows] for at in (2, 3, 4))
    assert len(set(int8)) == 1
    assert all(len(one) == 12 for one in int8)
    # One rank has nothing to round, and sliced layers compute the same function there.
    assert set(sliced[:6]) == set(int8)
    assert len(set(sliced)) >= 3
    assert len(set(real)) >= 3


@pytest.mark.parametrize("fault", ["rounds_sums", "drops_a_rank", "one_rank_is_off", "local_maxima"])
def test_a_fault_among_ranks_shows_several_hashes_and_fails(run, fault):
    status, out, err = run(2, fault, as_json=True)
    record = json.loads(out[out.index("{") :])
    assert status == 1
    assert record["distinct"]["int8"] > 1
    assert err.startswith("skuda: FAIL: int8 has ")


def test_a_terminal_shows_every_hash_and_marks_what_differs(run, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(2, "one_rank_is_off")
    assert status == 1
    assert "2 hashes" in out or "3 hashes" in out
    assert "\x1b[33m" in out, "yellow"
    for form in FORMS:
        assert form in out


def test_a_rank_that_dies_ends_the_demo(run):
    with pytest.raises(RankFailed, match="rank 1 failed: killed by SIGKILL"):
        run(2, "is_killed")


@pytest.mark.parametrize("count", [0, -1, 9, 10**20])
def test_a_number_of_ranks_that_cannot_be_is_refused(count):
    with pytest.raises(InvalidProblem, match="--gpus must be at least 1 and at most 8"):
        demo(count, as_json=False, device="host")


def test_another_device_is_refused():
    with pytest.raises(InvalidProblem, match="--device must be one of auto, gpu, host; had 'moon'"):
        demo(2, as_json=False, device="moon")


def test_where_the_ranks_run(monkeypatch):
    asked = []

    def place(count, *, cpu):
        asked.append(cpu)
        raise NoDevice("2 GPUs are needed")

    monkeypatch.setattr(commands, "place_of_ranks", place)
    monkeypatch.setattr(commands, "_need_torch", lambda: None)
    for device in ("auto", "gpu", "host"):
        with pytest.raises(InvalidProblem, match="suit this machine: 2 GPUs are needed; --device host does that"):
            demo(2, as_json=False, device=device)
    here = any(one.processor == "cuda" for one in commands.Dispatcher().devices)
    assert asked == [not here, False, True]
    assert HOST.processor == "cpu"
