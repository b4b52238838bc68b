"""Groups over torch.distributed: the bits of the definition, and errors that name who is at fault."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from shards import WAYS, part, wanted_of
from support import assert_same_bits, draw, fresh, run

torch = pytest.importorskip("torch")

from skuda.dispatch.shard import GroupBroken, GroupMismatch, Shards  # noqa: E402
from skuda.dispatch.shard.shards import span, split  # noqa: E402
from skuda.kernels.catalog import built_in_ops  # noqa: E402
from skuda.registry import InvalidProblem  # noqa: E402
from skuda.registry.elements import ElementKind  # noqa: E402
from skuda.torch import TorchGroup  # noqa: E402  torch may be absent

WORKER = Path(__file__).with_name("group_worker.py")


def on_processes(count, folder, work, given=None):
    """What became of every rank: its result, or the error that it got; None where it was killed."""
    (folder / "given").write_bytes(pickle.dumps(given))
    started = [
        subprocess.Popen([sys.executable, WORKER, str(rank), str(count), folder, work], stderr=subprocess.PIPE)
        for rank in range(count)
    ]
    try:
        told = [process.communicate(timeout=200)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = []
    for rank in range(count):
        out = folder / f"{rank}.out"
        if started[rank].returncode == 0 or out.exists():
            assert out.exists(), told[rank]
            found.append(pickle.loads(out.read_bytes()))  # noqa: S301  of the worker
        else:
            found.append(None)
    return found


@pytest.mark.parametrize("count", [3])
def test_collectives_are_what_they_say(count, tmp_path):
    rng = fresh(count)
    given = []
    for dtype in (np.int8, np.int32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        sizes = split(7, count) if rng.random() < 0.5 else tuple(rng.multinomial(7, [1 / count] * count).tolist())
        arrays = [rng.integers(-100, 100, (7, 7)).astype(dtype) for _ in range(count)]
        given.append({"arrays": arrays, "sizes": sizes})
    given.append({"arrays": [one["arrays"] for one in given][1], "sizes": (7, *[0] * (count - 1))})
    for rank, result in enumerate(on_processes(count, tmp_path, "collectives", given)):
        assert not isinstance(result, Exception), result
        texts, (summed, gathered), found = result
        assert_same_bits(summed, np.full((2, 3), count, np.int32))
        assert_same_bits(gathered, np.repeat(np.arange(count, dtype=np.int8), 6).reshape(-1, 3))
        assert texts == tuple(f"rank {other} says \u00fc" for other in range(count))
        for case, got in zip([case for case in given for _ in range(2)], found, strict=True):
            arrays, sizes = case["arrays"], case["sizes"]
            long = np.concatenate([a[:n] for a, n in zip(arrays, sizes, strict=True)])
            wide = np.concatenate([a[:, :n] for a, n in zip(arrays, sizes, strict=True)], axis=1)
            for axis, want in enumerate((long, wide)):
                for name in ("gather", "started", "into"):
                    assert_same_bits(got[f"{name} {axis}"], want)
            if arrays[0].dtype.kind == "f":
                assert_same_bits(got["max"], np.maximum.reduce(arrays))
            if arrays[0].dtype == np.int32:
                total = np.add.reduce(arrays, dtype=np.int32)
                assert_same_bits(got["sum"], total)
                assert_same_bits(got["sum rows"], total[span(sizes, rank)])
                assert_same_bits(got["started rows"], total[span(sizes, rank)])


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_copy_into_each_others_memory(count, tmp_path):
    """Rooms are used again and again, and never before what came is read."""
    seed = int(fresh(count).integers(2**31))
    for found in on_processes(count, tmp_path, "copied", seed):
        assert not isinstance(found, Exception), found
        wrong, made = found
        assert not wrong, seed
        assert 1 <= made < 40


def test_ranks_that_do_not_wait_overwrite_what_is_not_read(tmp_path):
    found = on_processes(3, tmp_path, "copied_without_waiting", int(fresh("planted").integers(2**31)))
    assert any(wrong for wrong, _ in found)


def test_copies_are_refused_where_there_are_no_gpus(tmp_path):
    for error in on_processes(2, tmp_path, "copies_asked_for"):
        assert isinstance(error, InvalidProblem)
        assert "copies" in str(error)


@pytest.mark.parametrize(
    ("reaches", "wanted", "hosts", "other", "able"),
    [
        (True, True, "one one", "True", True),
        (False, True, "one one", "True", False),
        (True, False, "one one", "True", False),
        (True, True, "one two", "True", False),
        (True, True, "one one", "False", False),
    ],
)
def test_gpus_copy_only_where_all_can_and_want_to(monkeypatch, reaches, wanted, hosts, other, able):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, other: reaches and other == 1)
    group = TorchGroup.__new__(TorchGroup)
    group._device, group._where = torch.device("cuda", 0), tuple(f"{host} 7" for host in hosts.split())
    group.exchange = lambda text: (text, other)
    assert group._reach_each_other(wanted=wanted) is able


@pytest.mark.parametrize(("count", "work"), [(2, "layers"), (4, "layers"), (3, "layers_copied")])
def test_layers_have_the_bits_of_one_device(count, work, tmp_path):
    rng = fresh(count)
    cases = [
        (op, case)
        for op in built_in_ops()
        if op.name.endswith("_linear")
        for case in op.cases
        if case.problem.output is not ElementKind.S32 and case.problem.compute is case.problem.output.compute
    ]
    given, wanted = [], []
    for number in rng.choice(len(cases), 24, replace=False):
        op, case = cases[number]
        axis, held, back = WAYS[rng.integers(len(WAYS))]
        shards = Shards(axis=axis, count=count, input=held, output=back)
        if shards.divisible:
            shards = shards.model_copy(update={"chunks": int(rng.integers(1, 6))})
        inputs = draw(op, case, rng).inputs
        given.append((case.problem, shards, [part(case.problem, shards, rank, inputs) for rank in range(count)]))
        wanted.append(run(case.problem, inputs)["output"])
    for rank, found in enumerate(on_processes(count, tmp_path, work, given)):
        assert not isinstance(found, Exception), found
        for number, whole in enumerate(wanted):
            problem, shards, _ = given[number]
            want = wanted_of(whole, problem, shards, rank)
            for got in found[2 * number : 2 * number + 2]:
                assert_same_bits(got, want, f"rank {rank}, {problem!r} over {shards!r}")


def test_another_problem_is_refused_on_every_rank(tmp_path):
    for error in on_processes(3, tmp_path, "another_problem"):
        assert isinstance(error, GroupMismatch)
        assert error.what == "problem"
        assert [rank for rank, _ in error.ranks] == [0, 1]


def test_another_order_is_refused_on_every_rank(tmp_path):
    for error in on_processes(3, tmp_path, "another_order"):
        assert isinstance(error, GroupMismatch)
        assert "first" in str(error)
        assert "second" in str(error)


@pytest.mark.parametrize("how", ["killed", "killed_in_chunks"])
def test_a_killed_rank_is_named_to_all_others(how, tmp_path):
    found = on_processes(3, tmp_path, how)
    assert found.pop(1) is None
    for error in found:
        assert isinstance(error, GroupBroken), error
        assert error.ranks == (1,)


def test_a_silent_rank_is_named_after_the_timeout(tmp_path):
    found = on_processes(3, tmp_path, "silent")
    assert found.pop(1) is None
    for error in found:
        assert isinstance(error, GroupBroken), error
        assert error.ranks == (1,)


def test_what_is_no_group_is_refused():
    with pytest.raises(InvalidProblem, match="init_process_group"):
        TorchGroup()
