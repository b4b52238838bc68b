"""Groups over torch.distributed: the results of collectives, and errors that name the rank at fault."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from shards import WAYS, cuttable, part, wanted_of
from support import assert_same_bits, draw, fresh, run

from skuda.dispatch.shard import GroupBroken, GroupMismatch, Shards
from skuda.dispatch.shard.shards import span, split
from skuda.kernels.catalog import built_in_ops
from skuda.registry import InvalidProblem
from skuda.registry.elements import ElementKind
from skuda.torch import TorchGroup

WORKER = Path(__file__).with_name("group_worker.py")


COUNT = 3


def on_processes(folder, works, **given):
    """Return the result or the error of every rank for each work; None for a rank that was killed."""
    for work in works:
        (folder / work).mkdir()
        (folder / work / "given").write_bytes(pickle.dumps(given.get(work)))
    command = [sys.executable, WORKER, folder, str(COUNT), *works]
    started = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE) for rank in range(COUNT)]
    try:
        errors = [process.communicate(timeout=300)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = {}
    for work in works:
        outs = [folder / work / f"{rank}.out" for rank in range(COUNT)]
        for rank, out in enumerate(outs):
            assert out.exists() or started[rank].returncode, errors[rank]
        # Written by the worker.
        found[work] = [pickle.loads(out.read_bytes()) if out.exists() else None for out in outs]  # noqa: S301
    return found


def drawn_collectives(rng):
    given = []
    for dtype in (np.int8, np.int32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        sizes = split(7, COUNT) if rng.random() < 0.5 else tuple(rng.multinomial(7, [1 / COUNT] * COUNT).tolist())
        arrays = [rng.integers(-100, 100, (7, 7)).astype(dtype) for _ in range(COUNT)]
        given.append({"arrays": arrays, "sizes": sizes})
    return [*given, {"arrays": given[1]["arrays"], "sizes": (7, *[0] * (COUNT - 1))}]


def drawn_layers(rng):
    """Return problems, shards, each rank's inputs, and the output of the whole layer."""
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
        shards = Shards(axis=axis, count=COUNT, input=held, output=back)
        if shards.divisible:
            shards = shards.model_copy(update={"chunks": int(rng.integers(1, 6))})
        inputs = cuttable(case.problem, shards, draw(op, case, rng).inputs)
        given.append((case.problem, shards, [part(case.problem, shards, rank, inputs) for rank in range(COUNT)]))
        wanted.append(run(case.problem, inputs)["output"])
    return given, wanted


WORKS = (
    *("wrong_arrays", "collectives", "copied", "copied_without_waiting"),
    *("another_problem", "another_order", "copies_asked_for"),
)
LAYERS = ("layers", "layers_copied")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what ranks were given, what they should compute, and what they did, by work; all in the same processes."""
    rng = fresh("ranks")
    layers, wanted = drawn_layers(rng)
    given = {"collectives": drawn_collectives(rng), "layers": layers, "layers_copied": layers}
    given |= dict.fromkeys(("copied", "copied_without_waiting"), int(rng.integers(2**31)))
    return given, wanted, on_processes(tmp_path_factory.mktemp("ranks"), (*WORKS, *LAYERS), **given)


def test_collectives_are_what_they_say(ranks):
    given, _, found = ranks
    for rank, result in enumerate(found["collectives"]):
        assert not isinstance(result, Exception), result
        texts, (summed, gathered), results = result
        assert_same_bits(summed, np.full((2, 3), COUNT, np.int32))
        assert_same_bits(gathered, np.repeat(np.arange(COUNT, dtype=np.int8), 6).reshape(-1, 3))
        assert texts == tuple(f"rank {other} says \u00fc" for other in range(COUNT))
        for case, got in zip([case for case in given["collectives"] for _ in range(2)], results, strict=True):
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


def test_arrays_that_a_collective_would_change_or_lose_are_refused(ranks):
    for said in ranks[2]["wrong_arrays"]:
        assert not isinstance(said, Exception), said
        arrays, others = said[:-4], said[-4:]
        words = ("have 3 elements", "have none", "be floating", "have 1 elements", "be 0 or 1", "each of", "into")
        words = (*("be s32",) * 4, *words) * 2
        for text, word in zip(arrays, words, strict=True):
            assert word in text
        assert all("must be a" in text for text in others), others


def test_ranks_copy_into_each_others_memory(ranks):
    """Rooms are used again and again, and never before what came is read."""
    for result in ranks[2]["copied"]:
        assert not isinstance(result, Exception), result
        wrong, made = result
        assert not wrong
        assert 1 <= made < 40
    assert any(wrong for wrong, _ in ranks[2]["copied_without_waiting"]), "the test must see ranks that do not wait"


def test_copies_are_refused_where_there_are_no_gpus(ranks):
    for error in ranks[2]["copies_asked_for"]:
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


@pytest.mark.parametrize("work", LAYERS)
def test_layers_have_the_bits_of_one_device(ranks, work):
    given, wanted, found = ranks
    for rank, results in enumerate(found[work]):
        assert not isinstance(results, Exception), results
        for number, whole in enumerate(wanted):
            problem, shards, _ = given[work][number]
            want = wanted_of(whole, problem, shards, rank)
            for got in results[2 * number : 2 * number + 2]:
                assert_same_bits(got, want, f"rank {rank}, {problem!r} over {shards!r}")


@pytest.mark.parametrize(
    ("work", "words"),
    [("another_problem", "problem"), ("another_order", "first.*second|second.*first")],
)
def test_ranks_that_do_something_else_are_refused_on_every_rank(ranks, work, words):
    for error in ranks[2][work]:
        assert isinstance(error, GroupMismatch)
        assert re.search(words, str(error))
        assert [rank for rank, _ in error.ranks] == [0, 1]


@pytest.mark.parametrize("how", ["killed", "killed_in_chunks", "silent"])
def test_a_rank_that_does_not_answer_is_named_to_all_others(how, tmp_path):
    found = on_processes(tmp_path, [how])[how]
    assert found.pop(1) is None
    for error in found:
        assert isinstance(error, GroupBroken), error
        assert error.ranks == (1,)


def test_what_is_no_group_is_refused():
    with pytest.raises(InvalidProblem, match="init_process_group"):
        TorchGroup()
