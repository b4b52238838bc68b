"""A split layer in chunks of rows: the order of its steps, the number of chunks, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_same_bits, fresh

from skuda.dispatch.shard import NVLINK, Link, Shards, Traffic
from skuda.dispatch.shard.layer import LayerInput, RankWork, ShardSchedule, run
from skuda.registry.errors import InvalidRecord

ROWS = 7
CHUNKS = (3, 2, 2)


class Recorded:
    """A group of one rank that writes down what is started and what is waited for."""

    rank, count = 0, 1

    def __init__(self):
        self.events = []

    def did(self, what, result):
        """Write an event down; return its result."""
        self.events.append(what)
        return result

    def started(self, what, result):
        self.events.append(f"start {what}")
        return lambda: self.did(f"wait for {what}", result)

    def start_sum_rows(self, array, sizes):
        assert sizes == (len(array),)
        return self.started(f"sums {array[0, 0]}", array)

    def start_gather(self, array, axis, sizes, into=None):
        assert sizes == (array.shape[axis],)
        if into is None:
            return self.started(f"codes {array[0, 0]}", array)
        into[...] = array
        return self.started(f"output {array[0, 0]}", into)


def on_one(shards, of_rank):
    """What happens, where the rows of each chunk hold its number."""
    numbers = np.repeat(np.arange(len(CHUNKS)), CHUNKS)[:, None] * np.ones((1, 4), int)
    schedule = ShardSchedule(shards, (ROWS,), (4,), (4,), per_row=True, scattered=True, chunks=CHUNKS)
    group = Recorded()
    steps = of_rank(group)
    output = run(schedule, steps, group, LayerInput(numbers, np.arange(ROWS)))
    assert_same_bits(output, numbers)
    return group.events


def test_sums_are_exchanged_behind_the_product_of_the_next_chunk():
    def steps(group):
        def rescale(sums, about):
            chunk = int(sums.products[0, 0])
            assert about.scale.tolist() == list(range(sum(CHUNKS[:chunk]), sum(CHUNKS[: chunk + 1])))
            return group.did(f"rescale {chunk}", sums.products)

        return RankWork(sums=lambda codes: group.did(f"product {codes[0, 0]}", codes), rescale=rescale)

    assert on_one(Shards(axis="k", count=1), steps) == [
        *("product 0", "start sums 0"),
        *("product 1", "start sums 1", "wait for sums 0", "rescale 0", "start output 0"),
        *("product 2", "start sums 2", "wait for sums 1", "rescale 1", "start output 1"),
        *("wait for sums 2", "rescale 2", "start output 2"),
        *(f"wait for output {chunk}" for chunk in range(3)),
    ]


@pytest.mark.parametrize("given", ["columns", "whole"])
def test_codes_are_gathered_ahead_and_outputs_behind(given):
    def steps(group):
        return RankWork(layer=lambda chunk: group.did(f"product {chunk.data[0, 0]}", chunk.data))

    ahead = given == "columns"
    events = on_one(Shards(axis="n", count=1, input=given, output="whole"), steps)
    expected = [f"start codes {chunk}" for chunk in range(3)] if ahead else []
    for chunk in range(3):
        expected += [f"wait for codes {chunk}"] if ahead else []
        expected += [f"product {chunk}", f"start output {chunk}"]
    assert events == expected + [f"wait for output {chunk}" for chunk in range(3)]


def traffic(**fields):
    return Traffic(**{"m": 2048, "n": 8192, "k": 28672, "output_bytes": 2, "dynamic": True} | fields)


OWNED = [{"axis": "k", "output": "rows"}, {"axis": "n"}, {"axis": "n", "input": "rows", "output": "whole"}]
WHOLE = (
    Shards(axis="k", count=2),
    Shards(axis="n", count=2, input="columns", output="whole"),
    Shards(axis="n", count=2, output="whole"),
)


@pytest.mark.parametrize("shards", WHOLE)
def test_large_layers_run_in_chunks_of_whole_tiles_where_that_pays(shards):
    for m in (1024, 2048, 8192, int(fresh(shards).integers(1024, 20_000))):
        chunks = traffic(m=m).chunks(shards)
        assert sum(chunks) == m
        assert len(chunks) > 1
        assert all(rows % (128 * shards.count) == 0 for rows in chunks[:-1])
    far = Link(latency_us=1e4, gigabytes_per_s=NVLINK.gigabytes_per_s)
    for change in ({"link": far}, {"count": 1}):
        assert traffic().chunks(shards.model_copy(update=change)) == (2048,)
    assert traffic(n=256, k=256).chunks(shards) == (2048,)


def test_as_many_chunks_as_are_asked_for_but_none_without_rows():
    rng = fresh()
    for shards in WHOLE:
        for m in (0, 1, 3, 4, 300, int(rng.integers(5, 5000))):
            number = int(rng.integers(1, 9))
            chunks = traffic(m=m).chunks(shards.model_copy(update={"chunks": number}))
            assert sum(chunks) == m
            assert len(chunks) == max(1, min(m, number))
            assert all(chunks) or m == 0


@pytest.mark.parametrize("fields", OWNED)
def test_there_are_no_chunks_where_a_rank_owns_rows_or_columns(fields):
    assert traffic().chunks(Shards(count=2, **fields)) == (2048,)
    assert Shards(count=2, chunks=1, **fields).chunks == 1
    with pytest.raises(InvalidRecord, match="chunks must be 1 or left out"):
        Shards(count=2, chunks=2, **fields)
