"""Groups of threads: the results of collectives, and errors that name the rank at fault."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support import assert_same_bits, dispatcher, fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.shard import Group, GroupBroken, GroupMismatch, Shards, on_ranks, select_shards
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.linear import QuantizedLinearDescriptor
from skuda.registry import InvalidProblem, Registry


@pytest.mark.parametrize("count", [1, 2, 5])
def test_collectives_are_what_they_say(count):
    rng = fresh(count)
    data = rng.integers(-(2**30) // count, 2**30 // count, (count, 7, 3), dtype=np.int32)
    reals = rng.standard_normal((count, 7)).astype(np.float32)
    rows = tuple(rng.multinomial(7, [1 / count] * count).tolist())
    widths = tuple(range(count))

    def work(group):
        assert isinstance(group, Group)
        assert group.count == count
        mine = np.full((7, widths[group.rank]), group.rank)
        return (
            group.exchange(f"rank {group.rank}"),
            group.max(reals[group.rank]),
            group.sum(data[group.rank]),
            group.sum_rows(data[group.rank], rows),
            group.gather(mine, 1, widths),
        )

    found = on_ranks(count, work)
    for texts, most, total, _, wide in found:
        assert texts == tuple(f"rank {rank}" for rank in range(count))
        assert_same_bits(most, reals.max(axis=0))
        assert_same_bits(total, data.sum(axis=0, dtype=np.int32))
        assert wide.tolist() == [[rank for rank in range(count) for _ in range(rank)]] * 7
    assert_same_bits(np.concatenate([one[3] for one in found]), data.sum(axis=0, dtype=np.int32))


@pytest.mark.parametrize("arguments", [(10**6, str), (0, str), (1.5, str), ("2", str), (2, 5)])
def test_no_group_is_made_of_wrong_arguments(arguments):
    with pytest.raises(InvalidProblem, match=r"on_ranks: (count|work) must be a"):
        on_ranks(*arguments)


def refusals_of(work):
    """What the first of two ranks is told when it makes a mistake; the other waits for it."""
    found = errors_of(2, lambda group: work(group) if group.rank == 0 else group.exchange("here"))
    assert isinstance(found[0], InvalidProblem)
    assert isinstance(found[1], GroupBroken)
    return str(found[0])


@pytest.mark.parametrize("element", [np.float32, np.uint64, np.int16, np.uint32])
def test_sums_of_other_elements_than_s32_and_s64_are_refused(element):
    array = np.full((2, 3), 1.5).astype(element)
    for call in (
        lambda group: group.sum(array),
        lambda group: group.sum_rows(array, (1, 1)),
        lambda group: group.start_sum_rows(array, (1, 1)),
    ):
        assert f"be s32 or s64, so that the sum is exact; had elements {np.dtype(element)}" in refusals_of(call)


def test_what_has_no_maximum_is_refused():
    assert "a NaN" in refusals_of(lambda group: group.max(np.float32([1, np.nan])))
    assert "elements bool" in refusals_of(lambda group: group.max(np.ones(2, bool)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, (1, 1)), "1 elements along axis 0"),
        ((2, (1, 1)), "axis must be 0 or 1"),
        ((0, (2,)), "one size for each of the 2 ranks"),
        ((0, (2, -1)), "one size for each of the 2 ranks"),
        ((0, (2, 1), np.zeros((3, 2), np.float32)), "into must be a ndarray of int32, shape [3, 2]"),
        ((0, (2, 1), np.zeros((2, 2), np.int32)), "into must be a ndarray of int32, shape [3, 2]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments, words):
    assert words in refusals_of(lambda group: group.start_gather(np.ones((2, 2), np.int32), *arguments))


def test_parts_of_other_elements_or_sizes_are_refused_on_every_rank():
    mine = [np.ones((2, 2), np.int32), np.ones((2, 2), np.int8)]
    assert "int8" in str(mismatches_of(2, lambda group: group.gather(mine[group.rank], 0, (2, 2)))[0])
    sizes = [(2, 3), (1, 2)]
    assert "[2, 3]" in str(mismatches_of(2, lambda group: group.gather(mine[0], 0, sizes[group.rank]))[0])


def errors_of(count, work, **how):
    """The error that each rank gets."""
    found = {}

    def tried(group):
        try:
            work(group)
        except Exception as error:
            found[group.rank] = error
            raise

    with pytest.raises(Exception) as raised:  # noqa: PT011  checked below
        on_ranks(count, tried, **how)
    assert raised.value in found.values()
    return found


def mismatches_of(count, work):
    """The error of each rank, all of which are told of a mismatch."""
    found = errors_of(count, work)
    assert set(found) == set(range(count))
    assert {type(error) for error in found.values()} == {GroupMismatch}
    return list(found.values())


def test_a_rank_that_dies_is_named_to_all_others():
    def work(group):
        if group.rank == 1:
            raise RuntimeError("out of luck")
        group.sum(np.zeros(3, np.int32))

    found = errors_of(3, work)
    assert isinstance(found.pop(1), RuntimeError)
    assert set(found) == {0, 2}
    for error in found.values():
        assert isinstance(error, GroupBroken)
        assert error.ranks == (1,)
        assert "rank 1" in str(error)
        assert "out of luck" in str(error)


def test_a_rank_that_leaves_early_is_named_at_once():
    def work(group):
        group.exchange("here")
        if group.rank:
            group.exchange("still here")

    found = errors_of(3, work)
    assert {error.ranks for error in found.values()} == {(0,)}
    assert "had finished" in str(found[1])


def test_a_rank_that_is_silent_is_named_after_the_patience():
    over = threading.Event()

    def work(group):
        if group.rank == 2:
            over.wait(60)
        else:
            try:
                group.exchange("here")
            finally:
                over.set()

    began = time.monotonic()
    found = errors_of(3, work, patience=0.3)
    assert time.monotonic() - began < 30
    assert {error.ranks for error in found.values()} in ({(2,)}, {(2,), (0, 2)}, {(2,), (1, 2)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros((2, 3), np.int32), np.zeros((3, 3), np.int32)),
        (np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_on_every_rank(one, other):
    for error in mismatches_of(3, lambda group: group.max(other if group.rank == 1 else one)):
        assert "rank 0 has" in str(error)
        assert "rank 1 has" in str(error)


def with_fewer_ops():
    return Dispatcher(Registry(op for op in built_in_ops() if op.name != "fill"), backends=[NumpyBackend()])


def problem(**fields):
    given = {"m": 3, "c_out": 4, "k": 8, "q_min": -127, "q_max": 127, "activation_element": "f32"}
    return QuantizedLinearDescriptor(**given | fields)


@pytest.mark.parametrize(
    ("mine", "what"),
    [
        ({"problem": problem(c_out=5)}, "problem"),
        ({"shards": Shards(axis="k", count=3, output="rows")}, "shards"),
        ({"shards": Shards(axis="k", count=3, sizes=(8, 0, 0))}, "shards"),
        ({"name": "down"}, "layer"),
        ({"dispatcher": with_fewer_ops()}, "registry"),
    ],
)  # fmt: skip
def test_ranks_that_selected_differently_are_refused_on_every_rank(mine, what):
    def work(group):
        given = {"problem": problem(), "shards": Shards(axis="k", count=3), "name": "up", "dispatcher": dispatcher()}
        given |= mine if group.rank == 1 else {}
        plan = select_shards(given["dispatcher"], given["problem"], given["shards"], device="cpu")
        plan.bind(group, given["name"])

    for error in mismatches_of(3, work):
        assert error.what == what
        assert [rank for rank, _ in error.ranks] == [0, 1]


def test_layers_in_another_order_are_refused_and_compute_nothing():
    inputs = {
        "activation": np.ones((3, 4), np.float32),
        "weight_q": np.ones((4, 4), np.int8),
        "weight_scale": np.ones(4, np.float32),
    }

    def work(group):
        plan = select_shards(dispatcher(), problem(), Shards(axis="k", count=2))
        layers = [plan.bind(group, name) for name in ("first", "second")]
        for layer in reversed(layers) if group.rank else layers:
            layer.run(**inputs)

    for error in mismatches_of(2, work):
        assert "first" in str(error)
        assert "second" in str(error)


def test_a_plan_for_another_number_of_ranks_is_refused():
    plan = select_shards(dispatcher(), problem(), Shards(axis="k", count=2))
    with pytest.raises(InvalidProblem, match="have the 2 ranks of the plan"):
        on_ranks(3, plan.bind)
