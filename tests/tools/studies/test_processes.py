"""Ranks as processes: what they save arrives, and one that fails, dies or hangs ends the others."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from skuda.registry.device import HOST, device_named
from skuda.tools.frame.run import NoDevice

pytest.importorskip("torch")

import rank_faults

from skuda.tools.studies import processes
from skuda.tools.studies.processes import RankJob, place_of_ranks, run_ranks

JOB = RankJob(backend="gloo", count=2, seed=5)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ended(found):
    return not any(is_alive(one["pid"]) for one in found if one)


def test_what_every_rank_saved_last_is_returned(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found, failed = run_ranks(rank_faults.found, JOB)
    assert failed == ""
    assert [(one["rank"], one["count"], one["seed"]) for one in found] == [(rank, 2, 5) for rank in range(2)]
    assert {one["threads"] for one in found} == {max(1, (os.cpu_count() or 1) // 2)}, "they share the cores"
    assert ended(found)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (one,), _ = run_ranks(rank_faults.found, JOB.model_copy(update={"count": 1}))
    assert one["threads"] == 1, "unless the caller says otherwise"


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (rank_faults.raises, "ValueError: what happened"),
        (rank_faults.is_killed, "killed by SIGKILL"),
        (rank_faults.exits, "it exited with 7"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(work, reason, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE", 20.0 if work is rank_faults.exits else 1.0)
    begun = time.monotonic()
    found, failed = run_ranks(work, JOB)
    assert failed == f"rank 1 failed: {reason}"
    assert time.monotonic() - begun < rank_faults.LONG
    assert ended(found)
    assert found[0]["rank"] == 0, "what was saved is kept"


def test_ranks_that_hang_are_named_and_ended(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    found, failed = run_ranks(rank_faults.hangs, JOB)
    assert failed == "rank 0, 1 failed: nothing was heard for 0.5 s"
    assert ended(found)


def test_where_ranks_run(monkeypatch):
    cards = tuple(device_named("h200").model_copy(update={"ordinal": ordinal}) for ordinal in range(2))
    monkeypatch.setattr(processes, "Dispatcher", lambda: SimpleNamespace(devices=(*cards, HOST)))
    assert place_of_ranks(2, cpu=False) == (cards[0], "nccl")
    assert place_of_ranks(3, cpu=True) == (HOST, "gloo")
    with pytest.raises(NoDevice, match="3 GPUs are needed, and 2 are here"):
        place_of_ranks(3, cpu=False)
