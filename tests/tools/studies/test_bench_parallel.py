"""`skuda bench-parallel` on processes of the CPU: its record, its goals, and the faults of a rank."""

from __future__ import annotations

import pytest
from support import fresh

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import device_named
from skuda.tools.cli import main
from skuda.tools.studies.parallel import (
    FORMS,
    INT8_ALL,
    INT8_ONE,
    REAL_ALL,
    MlpJob,
    ParallelRecord,
    RowsResult,
    sections,
)
from skuda.tools.study.view import markdown

JOB = MlpJob(backend="nccl", count=2, seed=1, hidden=8192, intermediate=28672, rows=(16,), repeats=2)
TYPED = ["bench-parallel", "--cpu", "--hidden", "32", "--intermediate", "48", "--repeats", "2"]


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
        seed = str(int(fresh("bench-parallel").integers(1 << 30)))
        status = main([*TYPED, "--rows", rows, "--seed", seed, "--output", str(path)])
        return status, ParallelRecord.load(path)

    return run


# --- on processes ----------------------------------------------------------------------------------------------------


def test_equal_bits_are_timed_and_recorded(recorded, capsys):
    status, record = recorded("1,5")
    assert status == 0, record.wrong
    assert [(one.rows, one.with_numpy, one.compared) for one in record.results] == [(1, 1, 3), (5, 0, 3)]
    assert all(tuple(one.timings) == FORMS for one in record.results)
    assert record.outdated == ""
    assert not record.graph
    times, *_ = sections(record)["times"]
    assert markdown((times,)) in capsys.readouterr().out
    assert record.command.startswith("skuda bench-parallel --rows 1,5 --hidden 32 --intermediate 48 --cpu --repeats 2")


def test_a_wrong_bit_on_one_rank_is_not_timed(recorded, capsys):
    status, record = recorded("2,3", "parallel_with_a_wrong_bit")
    assert status == 1
    for result in record.results:
        assert (result.timings, result.compared) == ({}, 0)
        assert result.wrong.startswith("all ranks, called, rank 1, differs from one rank, called: [0, 31]")
    assert "2 rows: all ranks" in capsys.readouterr().err


def test_a_difference_from_numpy_is_not_timed(recorded):
    status, record = recorded("1", "parallel_unlike_numpy")
    assert status == 1
    assert record.results[0].wrong.startswith("one rank, called, differs from NumPy: ")
    assert record.results[0].timings == {}


def test_a_compiler_that_fails_is_named_and_the_rest_is_timed(recorded):
    status, record = recorded("2", "parallel_without_a_compiler")
    (result,) = record.results
    assert status == 1
    assert result.wrong == "all ranks, compiled: RuntimeError: no such compiler"
    assert tuple(result.timings) == FORMS


def test_a_rank_that_dies_fails_what_follows(recorded):
    status, record = recorded("1,3,4", "parallel_that_dies")
    assert status == 1
    first, second, third = record.results
    assert first.timings
    assert second.wrong.startswith("rank 1 failed: it exited with 7")
    assert second.wrong.endswith("; rank 1 has no result")
    assert third.wrong.endswith("; rank 0, 1 has no result")


# --- a record --------------------------------------------------------------------------------------------------------


def result(rows, **times):
    return RowsResult(rows=rows, timings={form: Timing.of([us]) for form, us in times.items()}, compared=3)


def record_of(*results, **changes):
    fields = {"device": device_named("h200"), "date": "2026-02-03T04:05:06+00:00", "skuda": "0", "command": "c"}
    return ParallelRecord(**{**fields, "orders": JOB, "graph": True, "results": results, **changes})


def of(few, many):
    """Return a record of ours on all ranks, on one, and of bf16 on all, for 16, 128 and 2,048 rows."""
    names = (INT8_ALL, INT8_ONE, REAL_ALL)
    between = result(128, **dict.fromkeys(names, 1.0))
    return record_of(
        result(16, **dict(zip(names, few, strict=True))), between, result(2048, **dict(zip(names, many, strict=True)))
    )


def verdicts(record):
    table, *why = sections(record)["requirements"]
    return [str(row[3]) for row in table.rows], " ".join(map(str, why))


def test_figures_are_judged_by_rows_and_only_for_the_run_that_they_are_for():
    assert verdicts(of((10.0, 16.0, 15.0), (10.0, 18.0, 17.0))) == (["met"] * 5, "")
    assert verdicts(of((10.0, 15.9, 15.0), (10.0, 18.0, 16.9)))[0] == ["met", "missed", "met", "met", "missed"]
    there = of((10.0, 16.0, 15.0), (10.0, 18.0, 17.0))
    for changes, said in (
        ({"device": "CPU"}, "the device is CPU, not NVIDIA H200"),
        ({"graph": False}, "no CUDA graph is timed"),
        ({"orders": JOB.model_copy(update={"count": 4})}, "there are 4 ranks, not 2"),
        ({"orders": JOB.model_copy(update={"hidden": 4096})}, "the sizes are not those of Llama 3 70B"),
    ):
        found, why = verdicts(there.model_copy(update=changes))
        assert found == ["met", *["not judged"] * 4]
        assert said in why
    wrong = there.model_copy(update={"results": (result(3), RowsResult(rows=16, wrong="a bit"))})
    assert verdicts(wrong)[0][0] == "missed"
    assert wrong.wrong == ("16 rows: a bit",)


def test_the_table_has_every_time_and_what_failed():
    record = of((10.0, 16.0, 15.0), (10.0, 18.0, 17.0))
    table, *notes = sections(record)["times"]
    assert table.rows[0] == (16, "-", "15.0", "16.0", "10.0", "1.60", "1.50")
    assert notes == []
    failed = record_of(RowsResult(rows=16, wrong="rank 1 failed"))
    assert [str(part) for part in sections(failed)["times"][1:]] == ["16 rows: rank 1 failed"]


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["0", "x", "1,-2"])
def test_bad_rows_are_refused(rows, capsys):
    assert main(["bench-parallel", "--cpu", "--rows", rows]) == 2
    assert "--rows must be integers from 1" in capsys.readouterr().err


def test_without_enough_gpus_the_cpu_must_be_named(capsys):
    pytest.importorskip("torch")
    assert main(["bench-parallel", "--gpus", "64"]) == 1
    assert "64 GPUs are needed" in capsys.readouterr().err
