"""`skuda bench-model --ranks` on processes of the CPU: its record, and the faults of a rank."""

from __future__ import annotations

import pytest
from support import fresh

from skuda.tools.cli import main
from skuda.tools.frame.view import markdown
from skuda.tools.studies.model import (
    RANKED,
    ModelRecord,
    sections,
)

TYPED = ["bench-model", "--ranks", "2", "--cpu", "--hidden", "32", "--intermediate", "48", "--repeats", "2"]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return a function that runs the command with a fault, and returns the exit status and the record."""
    pytest.importorskip("torch")
    import rank_faults

    from skuda.tools.studies import parallel_rank, processes

    monkeypatch.setattr(processes, "_GRACE", 60.0)  # however busy the machine is

    def run(rows, fault="parallel"):
        monkeypatch.setattr(parallel_rank, "work", getattr(rank_faults, fault))
        path = tmp_path / "r.json"
        seed = str(int(fresh("ranks").integers(1 << 30)))
        status = main([*TYPED, "--rows", rows, "--seed", seed, "--output", str(path)])
        return status, ModelRecord.load(path)

    return run


# --- on processes ----------------------------------------------------------------------------------------------------


def test_equal_bits_are_timed_and_recorded(recorded, capsys):
    status, record = recorded("1,5")
    assert status == 0, record.wrong
    assert [(one.rows, one.with_numpy, one.compared) for one in record.phases] == [(1, 1, 3), (5, 0, 3)]
    assert all(tuple(one.times) == tuple(RANKED) for one in record.phases)
    assert record.outdated == ""
    assert not record.graph
    times, *_ = sections(record)["phases"]
    assert markdown((times,)) in capsys.readouterr().out
    for option in ("--ranks 2", "--rows 1,5", "--hidden 32", "--intermediate 48", "--cpu", "--repeats 2"):
        assert option in record.command


def test_a_wrong_bit_on_one_rank_is_not_timed(recorded, capsys):
    status, record = recorded("2,3", "parallel_with_a_wrong_bit")
    assert status == 1
    for result in record.phases:
        assert (result.times, result.compared) == ({}, 0)
        assert result.wrong.startswith("all ranks, called, rank 1, differs from one rank, called: [0, 31]")
    assert "mlp 2: all ranks" in capsys.readouterr().err


def test_a_difference_from_numpy_is_not_timed(recorded):
    status, record = recorded("1", "parallel_unlike_numpy")
    assert status == 1
    assert record.phases[0].wrong.startswith("one rank, called, differs from NumPy: ")
    assert record.phases[0].times == {}


def test_a_rank_that_dies_fails_what_follows(recorded):
    status, record = recorded("1,3,4", "parallel_that_dies")
    assert status == 1
    first, second, third = record.phases
    assert first.times
    assert second.wrong.startswith("rank 1 failed: it exited with 7")
    assert second.wrong.endswith("; rank 1 has no result")
    assert third.wrong.endswith("; rank 0, 1 has no result")


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["0", "x", "1,-2"])
def test_bad_rows_are_refused(rows, capsys):
    assert main([*TYPED, "--rows", rows]) == 2
    assert "--rows must be integers from 1" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "says"), [("--ranks 2 --layers 3", "--layers"), ("--rows 1", "--rows")])
def test_options_of_the_other_form_are_refused(typed, says, capsys):
    assert main(["bench-model", "--cpu", *typed.split()]) == 2
    assert f"{says} must" in capsys.readouterr().err
