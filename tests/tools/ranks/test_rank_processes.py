"""The ranks of `skuda demo --gpus` as processes, and the command."""

import io
import json
import os
import sys
import textwrap
import time

import pytest
from collectives import collectives
from paths import ROOT
from rich.console import Console
from support import dispatcher, fresh

import skuda.tools.ranks.command as command_module
from skuda.dispatch import BackendStatus, Dispatcher
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.shard import on_ranks
from skuda.registry.device import HOST, device_named
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.ranks import carriers
from skuda.tools.ranks.carriers import BROKEN, THREADS, Processes, RankFailed
from skuda.tools.ranks.command import chosen, demo, run_demo
from skuda.tools.ranks.framework import NUMPY
from skuda.tools.ranks.stack import LARGE, SMALL, Sizes
from skuda.tools.ranks.work import BATCHES, WAYS, Task

TINY = Sizes(hidden=32, heads=4, kv_heads=4, intermediate=40, blocks=1, positions=2)


def programmed(tmp_path, text, patience=60.0):
    """Return processes that run a program of the test; it knows `folder` and `rank`."""
    head = f"""
        import json, os, signal, sys, time
        from pathlib import Path
        folder, rank = Path(sys.argv[1]), int(sys.argv[2])
        Path({str(tmp_path)!r}, f"{{rank}}.pid").write_text(str(os.getpid()))
    """
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(head) + textwrap.dedent(text))
    return Processes("gloo", "CPU", patience, (str(program),))


def task_of(rng):
    return Task(sizes=TINY, seed=int(rng.integers(2**32)))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_ended(tmp_path):
    # A rank that was ended while it wrote its number has left none.
    known = filter(None, (path.read_text() for path in tmp_path.glob("*.pid")))
    assert not [pid for pid in known if is_alive(int(pid))]


def test_processes_that_torch_joins_have_the_hash_of_numpy():
    pytest.importorskip("torch")
    task = task_of(fresh("gloo"))
    result = run_demo(task, 3, Processes("gloo", "CPU", 120), dispatcher())
    assert result.distinct["int8"] == 1
    assert result.distinct["bf16"] >= 3
    assert [line.carrier for line in result.lines[::3]] == ["none", "gloo", "gloo", "gloo"]
    # Threads compute the same, with rounded parts too: these are added in the order of the ranks.
    threads = run_demo(task, 3, Processes(THREADS, "CPU", 120), dispatcher())
    assert [line.hashes for line in threads.lines] == [line.hashes for line in result.lines]


def test_what_every_rank_tells_is_in_the_lines(tmp_path):
    text = f"""
        for count in json.loads((folder / "orders.json").read_text())["counts"]:
            if rank < count:
                told = {{b: {{w: f"{{count}} {{rank // 2}} {{b}} {{w}}" for w in {WAYS}}} for b in {tuple(BATCHES)}}}
                (folder / f"{{count}}-{{rank}}.json").write_text(json.dumps(told))
    """
    found = [*programmed(tmp_path, text).run(task_of(fresh("told")), (1, 3))]
    assert [(line.ranks, line.batch) for line in found] == [(count, batch) for count in (1, 3) for batch in BATCHES]
    for line in found:
        different = range((line.ranks + 1) // 2)
        assert line.hashes == {way: tuple(f"{line.ranks} {i} {line.batch} {way}" for i in different) for way in WAYS}
    assert_ended(tmp_path)


@pytest.mark.parametrize("given", [None, "5"])
def test_ranks_share_the_cores_unless_the_caller_says_otherwise(given, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    carrier = programmed(tmp_path, "sys.exit(f\"told {os.environ['OMP_NUM_THREADS']}\")")
    with pytest.raises(RankFailed, match=f"told {given or max(1, (os.cpu_count() or 1) // 2)}$"):
        [*carrier.run(task_of(fresh("threads of a rank")), (2,))]


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("raise ValueError('what happened')", "ValueError: what happened"),
        ("sys.exit(7)", "it exited with 7"),
        ("print('warned of this'); sys.exit(7)", "it exited with 7, and last wrote: warned of this"),
    ],
)
def test_a_rank_that_dies_ends_the_demo_with_its_number(tmp_path, fate, reason):
    rank = int(fresh("dies").integers(3))
    others = f"sys.exit({BROKEN})" if fresh("others").random() < 0.5 else "time.sleep(1000)"
    carrier = programmed(tmp_path, f"if rank == {rank}:\n    {fate}\nelse:\n    {others}\n")
    begun = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        [*carrier.run(task_of(fresh("dying")), (3,))]
    assert (failed.value.ranks, str(failed.value)) == ((rank,), f"rank {rank} failed: {reason}")
    assert time.monotonic() - begun < carrier.patience
    assert_ended(tmp_path)


def test_ranks_write_what_they_found_when_another_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(carriers, "_GRACE", 60.0)
    text = f"""
        if rank == 1:
            Path({str(tmp_path)!r}, "fails").touch()
            sys.exit(7)
        while not Path({str(tmp_path)!r}, "fails").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        Path({str(tmp_path)!r}, f"{{rank}}.found").touch()
    """
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed: it exited with 7$"):
        [*programmed(tmp_path, text).run(task_of(fresh("written")), (3,))]
    assert {path.name for path in tmp_path.glob("*.found")} == {"0.found", "2.found"}
    assert time.monotonic() - begun < 60
    assert_ended(tmp_path)


def test_threads_that_fail_end_the_demo(tmp_path):
    carrier = programmed(tmp_path, "raise ValueError('what happened')")._replace(backend=THREADS)
    with pytest.raises(RankFailed, match="rank 0, 1, 2 failed: ValueError: what happened"):
        [*carrier.run(task_of(fresh("threads fail")), (1, 3))]


def test_ranks_that_take_too_long_are_named_and_ended(tmp_path):
    carrier = programmed(tmp_path, "time.sleep(1000)", patience=0.5)
    with pytest.raises(RankFailed, match=r"rank 0, 1, 2 failed: nothing was heard for 0\.5 s"):
        [*carrier.run(task_of(fresh("slow")), (3,))]
    assert_ended(tmp_path)


def test_ranks_that_were_all_left_alone_tell_what_they_heard(tmp_path):
    carrier = programmed(tmp_path, f"sys.stderr.write('rank 0 of the group is gone'); sys.exit({BROKEN})")
    with pytest.raises(RankFailed, match="rank 0, 1 failed: rank 0 of the group is gone"):
        [*carrier.run(task_of(fresh("alone")), (2,))]


@pytest.mark.full
def test_a_rank_of_torch_that_is_killed_ends_the_command(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    text = """
        import skuda.tools.ranks.rank as program
        from skuda.tools.ranks.work import Task
        outputs = Task.outputs
        def killed(self, group, *rest):
            if group.count == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return outputs(self, group, *rest)
        Task.outputs = killed
        program.run(folder, rank)
    """
    carrier = programmed(tmp_path, text, patience=120.0)
    monkeypatch.setattr(command_module, "chosen", lambda *_: (carrier, TINY, ""))
    assert run_command(3) == (2, "", "skuda demo: rank 1 failed: killed by SIGKILL\n")
    assert_ended(tmp_path)


@pytest.mark.full
def test_joined_processes_compute_what_the_definition_says(tmp_path):
    """The same program on threads and on processes, with arrays of NumPy and of torch."""
    pytest.importorskip("torch")
    seed = int(fresh("collectives").integers(2**32))
    text = f"""
        sys.path.insert(0, {str(ROOT / "tests" / "tools" / "ranks")!r})
        from datetime import timedelta
        from torch import distributed
        from collectives import collectives
        from skuda.tools.ranks.framework import NUMPY, torch_on
        from skuda.torch import TorchGroup
        where = (folder / "rendezvous").as_uri()
        distributed.init_process_group("gloo", where, timedelta(seconds=60), 3, rank)
        for framework in (NUMPY, torch_on("cpu")):
            found = collectives(TorchGroup(), framework, {seed})
            Path({str(tmp_path)!r}, f"{{framework.name}}-{{rank}}").write_text(found)
        told = {{b: {{w: "" for w in {WAYS}}} for b in {tuple(BATCHES)}}}
        (folder / f"3-{{rank}}.json").write_text(json.dumps(told))
        distributed.barrier()
        distributed.destroy_process_group()
    """
    [*programmed(tmp_path, text, patience=120.0).run(task_of(fresh("orders")), (3,))]
    want = on_ranks(3, lambda group: collectives(group, NUMPY, seed))
    for name in ("numpy", "torch"):
        assert [tmp_path.joinpath(f"{name}-{rank}").read_text() for rank in range(3)] == want


# --- the command -----------------------------------------------------------------------------------------------------


def run_command(ranks, **options):
    out, err = io.StringIO(), io.StringIO()
    options = {"as_json": False, "dispatcher": dispatcher()} | options
    status = demo(ranks, console=Console(file=out, width=80), errors=Console(file=err), **options)
    return status, out.getvalue(), err.getvalue()


class WithCards(CudaCoreBackend):
    """A backend that says that two cards are here."""

    def status(self):
        return BackendStatus(available=True, detail="on paper")

    def devices(self):
        return tuple(device_named("h200").model_copy(update={"ordinal": ordinal}) for ordinal in range(2))


def test_where_the_ranks_run():
    here, cards = Dispatcher(backends=[NumpyBackend()]), Dispatcher(backends=[WithCards(), NumpyBackend()])
    assert chosen(4, "auto", here, lambda _: object()) == (Processes("gloo", HOST.name), SMALL, "")
    assert chosen(4, "host", cards, lambda _: object()) == (Processes("gloo", HOST.name), SMALL, "")
    carrier, sizes, note = chosen(4, "host", here, lambda _: None)
    assert (carrier, sizes) == (Processes(THREADS, HOST.name), SMALL)
    assert "torch is not installed" in note
    for where in ("auto", "gpu"):
        assert chosen(2, where, cards, lambda _: object()) == (Processes("nccl", "NVIDIA H200"), LARGE, "")
        with pytest.raises(InvalidProblem, match=r"--gpus must be at most 2.*--device host.*had 3"):
            chosen(3, where, cards, lambda _: object())
        with pytest.raises(MissingDependency, match="pip install torch"):
            chosen(2, where, cards, lambda _: None)
    with pytest.raises(InvalidProblem, match=r"--device must be host or auto.*had gpu"):
        chosen(2, "gpu", here)


@pytest.mark.parametrize("ranks", [0, -1, 9, 10**20])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks):
    status, out, err = run_command(ranks)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--gpus must be at least 1 and at most 8" in err


def test_a_device_of_another_name_and_options_of_the_other_demo_are_refused():
    assert "one of auto, gpu, host" in run_command(2, device="moon")[2]
    for option in ("--plot", "--framework"):
        status, out, err = run_command(2, others={option: "given", "--other": None})
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"{option} must be left out where --gpus is given" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_without_torch_the_ranks_are_threads(monkeypatch, as_json):
    seed = int(fresh("threads").integers(2**32))
    monkeypatch.setattr(command_module, "SMALL", TINY.model_copy(update={"kv_heads": 2}))
    monkeypatch.setattr(command_module, "SEED", seed)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(chosen, "__defaults__", (lambda _: None,))
    status, out, err = run_command(2, as_json=as_json)
    assert (status, err.count("\n")) == (0, 1)
    assert "the ranks are threads" in err
    if as_json:
        result = json.loads(out)
        assert (result["passed"], result["seed"], result["distinct"]["int8"]) == (True, seed, 1)
        assert [line["carrier"] for line in result["lines"][:: len(BATCHES)]] == ["none", "threads", "threads"]
    else:
        assert f"seed {seed}" in out
        assert out.splitlines()[-1] == "PASS  int8: one hash in 12 outputs"
