"""`skuda bench-parallel` on processes of the CPU: its record, and that faults of a rank are found and end."""

from __future__ import annotations

import textwrap
import time

import pytest
from support import fresh

pytest.importorskip("torch")

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidRecord
from skuda.tools.cli import main
from skuda.tools.parallel import command
from skuda.tools.parallel.command import Request, run
from skuda.tools.parallel.record import INT8_ALL, INT8_ONE, REAL_ALL, WAYS, ParallelRecord, judged
from skuda.tools.parallel.trace import waiting
from skuda.tools.ranks import carriers

TINY = {"hidden": 32, "intermediate": 48, "cpu": True, "repeats": 2, "patience": 100.0}
# Nothing is compiled: that takes seconds, and is not what these tests are about.
HEAD = """
    import os, sys, time
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch
    from pathlib import Path
    from skuda.tools.parallel import worker
    number = int(sys.argv[2])
"""
TAIL = """
    worker.run(Path(sys.argv[1]), number)
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Return a function that gives the exit status and the record of a run whose ranks have a fault."""

    def record(fault="", **more):
        program, path = tmp_path / "program.py", tmp_path / "record.json"
        program.write_text("".join(map(textwrap.dedent, (HEAD, fault, TAIL))))
        monkeypatch.setattr(command, "_PROGRAM", (str(program),))
        monkeypatch.setattr(carriers, "_GRACE", TINY["patience"])  # however busy the machine is
        seed = int(fresh("bench-parallel").integers(1 << 30))
        return run(Request(**TINY | {"seed": seed} | more), output=path), ParallelRecord.load(path)

    return record


def test_equal_bits_are_timed_traced_recorded_and_shown(recorded, tmp_path, capsys, monkeypatch):
    status, record = recorded(rows=("1", "5"))
    assert status == 0, record.wrong
    assert [(one.rows, one.with_numpy) for one in record.results] == [(1, 1), (5, 0)]
    assert all(tuple(one.timings) == WAYS and one.compared for one in record.results)
    assert not record.outdated
    assert not record.untraced
    for result in record.results:
        assert tuple(result.traces) == WAYS
        assert all(len(traces) == record.orders.count for traces in result.traces.values())
        for way, traces in result.traces.items():
            assert waiting(traces) is not None
            for trace in traces:
                assert bool(trace.exchange) == (way in (REAL_ALL, INT8_ALL))
                assert sum(one.kind == "product" for one in trace.kernels) == 2
                assert trace.total >= trace.products + trace.others > trace.products > 0
        names = [one.name for one in result.traces[INT8_ALL][0].kernels if one.name.startswith("skuda::")]
        ours = ("quantized_linear", "silu_mul_amax", "amax_quantize", "scaled_linear", "rescale")
        assert names == [f"skuda::{name}" for name in ours]
    found = judged(record)
    assert found.requirements[0].met
    assert {one.met for one in found.requirements[1:]} == {None}
    assert "the device is cpu" in found.unlike
    capsys.readouterr()
    assert main(["bench-parallel", "--show", str(tmp_path / "record.json")]) == 0
    shown = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in shown] == [[str(one.rows), way] for one in record.results for way in WAYS]
    assert shown[-1][-1] == str(record.results[-1].traces[INT8_ALL][0].total)
    assert main(["bench-parallel", "--show", str(tmp_path / "record.json"), "--json"]) == 0
    assert ParallelRecord.model_validate_json(capsys.readouterr().out) == record
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["bench-parallel", "--show", str(tmp_path / "record.json")]) == 0
    told = capsys.readouterr().out
    assert told.count("skuda::amax_quantize") == 2
    assert "Where the time goes" in told


def test_what_a_profiler_loses_is_told_and_the_rest_is_there(recorded, capsys):
    fault = """
        right = worker.replays
        def loses(events):
            found = right(events)
            if number == 1:
                found["2 skuda x1"] = [(), (), ()]
            return found
        worker.replays = loses
    """
    status, record = recorded(fault, rows=("2",))
    assert status == 0
    assert tuple(record.results[0].timings) == WAYS
    assert tuple(record.results[0].traces) == tuple(way for way in WAYS if way != INT8_ONE)
    assert record.untraced == "2 rows skuda x1; the profiler recorded no whole replay"
    assert record.untraced in capsys.readouterr().err


def test_a_rank_that_dies_in_the_trace_leaves_the_times(recorded):
    fault = """
        right = worker.Bench.traces
        def dies(self, file):
            if number == 1:
                os._exit(7)
            return right(self, file)
        worker.Bench.traces = dies
    """
    started = time.monotonic()
    status, record = recorded(fault, rows=("1",))
    assert status == 0
    assert tuple(record.results[0].timings) == WAYS
    assert record.untraced.startswith("1 rows bf16 x1, ")
    assert "rank 1 failed" in record.untraced
    assert time.monotonic() - started < TINY["patience"]


def test_without_a_trace_there_is_none_and_figures_are_judged_by_rows(recorded, tmp_path):
    status, record = recorded(rows=("1",), trace=False)
    assert status == 0
    assert tuple(record.results[0].timings) == WAYS
    assert record.results[0].traces == {}
    assert not record.untraced
    assert "--no-trace" in record.command
    before_traces = record.model_dump_json(exclude={"untraced": True, "orders": {"trace"}, "results": {0: {"traces"}}})
    (tmp_path / "old.json").write_text(before_traces)
    assert ParallelRecord.load(tmp_path / "old.json") == record
    orders = record.orders.model_copy(update={"hidden": 8192, "intermediate": 28672})

    def of(few, many):
        def result(rows, times):
            ways = dict(zip((INT8_ALL, INT8_ONE, REAL_ALL), times, strict=True))
            timings = {way: Timing.of([us, us]) for way, us in ways.items()}
            return record.results[0].model_copy(update={"rows": rows, "timings": timings})

        update = {"orders": orders, "device": "NVIDIA H200", "graph": True}
        between = result(128, (1.0, 1.0, 1.0))
        made = record.model_copy(update=update | {"results": (result(16, few), between, result(2048, many))})
        return [one.met for one in judged(made).requirements]

    assert of((10.0, 16.0, 15.0), (10.0, 18.0, 17.0)) == [True] * 5
    assert of((10.0, 15.9, 15.0), (10.0, 18.0, 16.9)) == [True, False, True, True, False]


def test_a_wrong_bit_on_one_rank_is_not_timed(recorded, capsys):
    fault = """
        from skuda.torch import RowLinear
        right = RowLinear.forward
        def wrong(self, input):
            found = right(self, input)
            if number == 1:
                found.view(torch.int16)[..., -1] ^= 1
            return found
        RowLinear.forward = wrong
    """
    status, record = recorded(fault, rows=("2", "3"))
    assert status == 1
    for result in record.results:
        assert result.timings == {}
        assert result.wrong.startswith("all ranks, called, rank 1, differs from one rank, called: [0, 31]")
    assert judged(record).requirements[0].met is False
    assert "2 rows: all ranks" in capsys.readouterr().err


def test_a_compiler_that_fails_is_told_and_the_rest_is_timed(recorded):
    fault = """
        def failing(*_, **__):
            raise RuntimeError("no such compiler")
        worker.Bench._compiled = failing
    """
    status, record = recorded(fault, rows=("2",))
    (result,) = record.results
    assert status == 1
    assert result.wrong == "all ranks, compiled: RuntimeError: no such compiler"
    assert tuple(result.timings) == WAYS


def test_a_rank_that_dies_fails_what_follows(recorded):
    fault = """
        right = worker.Bench.measure
        def dies(self, rows):
            if number == 1 and rows == 3:
                os._exit(7)
            return right(self, rows)
        worker.Bench.measure = dies
    """
    started = time.monotonic()
    status, record = recorded(fault, rows=("1", "3", "4"))
    assert status == 1
    assert [bool(one.wrong) for one in record.results] == [False, True, True]
    assert record.results[0].timings
    assert record.results[1].wrong.startswith("rank 1 failed: it exited with 7")
    assert record.results[1].wrong.endswith("; rank 1 told nothing")
    assert record.results[2].wrong.endswith("; rank 0, 1 told nothing")
    assert time.monotonic() - started < TINY["patience"]


def test_ranks_that_hang_are_ended(recorded):
    fault = """
        worker.Bench.measure = lambda self, rows: time.sleep(1000)
    """
    status, record = recorded(fault, rows=("1",), patience=15.0)
    assert status == 1
    assert "nothing was heard" in record.results[0].wrong


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        (["--rows", "0"], "be integers from 1"),
        (["--rows", "x"], "be integers from 1"),
        (["--show", "no.json", "--gpus", "3"], "stand alone"),
        (["--show", "no.json"], "be readable JSON"),
    ],
)
def test_bad_options_are_refused(typed, what, capsys):
    given = [] if typed[0] == "--show" else ["--cpu"]
    assert main(["bench-parallel", *given, *typed]) == 2
    assert what in capsys.readouterr().err


def test_another_record_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"kind": "skuda bench", "schema_version": 1}')
    with pytest.raises(InvalidRecord, match="skuda bench-parallel --output FILE"):
        ParallelRecord.load(path)


def test_without_enough_gpus_the_cpu_must_be_asked_for(capsys, monkeypatch):
    class OnlyHost:
        devices = (HOST,)

    monkeypatch.setattr(command, "Dispatcher", OnlyHost)
    assert main(["bench-parallel"]) == 1
    assert "--cpu" in capsys.readouterr().err
