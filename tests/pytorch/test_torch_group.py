"""Groups over torch.distributed: the results of collectives, and errors that name the rank at fault."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch
from processes import ran_on_ranks, returned
from support import assert_same_bits, fresh

from skuda.dispatch.shard import GroupBroken, GroupMismatch
from skuda.dispatch.shard.shards import span, split
from skuda.registry import InvalidProblem
from skuda.torch import TorchGroup

COUNT = 3


def drawn_collectives(rng):
    given = []
    for dtype in (np.int8, np.int32, np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        sizes = split(7, COUNT) if rng.random() < 0.5 else tuple(rng.multinomial(7, [1 / COUNT] * COUNT).tolist())
        arrays = [rng.integers(-100, 100, (7, 7)).astype(dtype) for _ in range(COUNT)]
        given.append({"arrays": arrays, "sizes": sizes})
    return [*given, {"arrays": given[1]["arrays"], "sizes": (7, *[0] * (COUNT - 1))}]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return what ranks were given, and what they did, by work; all in the same processes."""
    rng, folder = fresh("ranks"), tmp_path_factory.mktemp("ranks")
    cases, seed = drawn_collectives(rng), int(rng.integers(2**31))
    works = dict.fromkeys(("wrong_arrays", "another_problem", "another_order", "copies_asked_for"), ())
    works |= {"collectives": (cases,), "collectives_copied": (cases, folder)}
    for work in ("copied", "copied_without_waiting"):
        (folder / work).mkdir()
        works[work] = seed, folder / work
    return cases, ran_on_ranks("group_worker", works, COUNT, folder)


@pytest.mark.parametrize("work", ["collectives", "collectives_copied"])
def test_collectives_are_what_they_say(ranks, work):
    cases, found = ranks
    for rank, results in enumerate(returned(found[work])):
        if work == "collectives":
            texts, (summed, gathered), results = results  # noqa: PLW2901  what else they do is alike
            assert_same_bits(summed, np.full((2, 3), COUNT, np.int32))
            assert_same_bits(gathered, np.repeat(np.arange(COUNT, dtype=np.int8), 6).reshape(-1, 3))
            assert texts == tuple(f"rank {other} says \u00fc" for other in range(COUNT))
        for case, got in zip([case for case in cases for _ in range(2)], results, strict=True):
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
    for said in returned(ranks[1]["wrong_arrays"]):
        arrays, others = said[:-4], said[-4:]
        words = ("have 3 elements", "have none", "be floating", "have 1 elements", "be 0 or 1", "each of", "into")
        words = (*("be s32",) * 4, *words) * 2
        for text, word in zip(arrays, words, strict=True):
            assert word in text
        assert all("must be a" in text for text in others), others


def test_ranks_copy_into_each_others_memory(ranks):
    """Rooms are used again and again, and never before what came is read."""
    for wrong, made in returned(ranks[1]["copied"]):
        assert not wrong
        assert 1 <= made < 40
    assert any(wrong for wrong, _ in ranks[1]["copied_without_waiting"]), "the test must see ranks that do not wait"


def test_copies_are_refused_where_there_are_no_gpus(ranks):
    for error in ranks[1]["copies_asked_for"]:
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


@pytest.mark.parametrize(
    ("work", "words"),
    [("another_problem", "problem"), ("another_order", "first.*second|second.*first")],
)
def test_ranks_that_do_something_else_are_refused_on_every_rank(ranks, work, words):
    for error in ranks[1][work]:
        assert isinstance(error, GroupMismatch)
        assert re.search(words, str(error))
        assert [rank for rank, _ in error.ranks] == [0, 1]


@pytest.mark.parametrize("how", ["killed", "killed_in_chunks", "silent"])
def test_a_rank_that_does_not_answer_is_named_to_all_others(how, tmp_path):
    found = ran_on_ranks("group_worker", {how: (tmp_path,) if how == "silent" else ()}, COUNT, tmp_path)[how]
    assert found.pop(1) is None
    for error in found:
        assert isinstance(error, GroupBroken), error
        assert error.ranks == (1,)


def test_what_is_no_group_is_refused():
    with pytest.raises(InvalidProblem, match="init_process_group"):
        TorchGroup()
