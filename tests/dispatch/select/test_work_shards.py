"""`WorkShard`: shards of a list are disjoint, equal, mixed and together the list, on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest
from support import fresh

from skuda.dispatch.select.work import WorkShard, hash_of
from skuda.registry import InvalidRecord


def shards(count, names):
    return [WorkShard.of(index + 1, count, names) for index in range(count)]


def test_shards_are_disjoint_equal_and_together_the_list_in_its_order():
    rng = fresh("shards")
    for total, count in ((0, 1), (0, 3), (1, 1), (3, 8), (8, 8), *rng.integers((0, 1), (300, 40), (60, 2)).tolist()):
        names = [f"piece {number}" for number in range(total)]
        made = shards(count, names)
        picked = [shard.pick(names) for shard in made]
        assert sorted(chain(*picked)) == sorted(names), (total, count)
        assert all(mine == sorted(mine, key=names.index) for mine in picked)
        assert {len(mine) for mine in picked} <= {total // count, -(-total // count)}
        assert [shard.size for shard in made] == [len(mine) for mine in picked]
        assert {(shard.total, shard.list_hash) for shard in made} == {(total, hash_of(names))}


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_list_that_repeats_itself_gives_no_shard_all_of_one_kind(count):
    pieces = range(3 * count * count)
    for shard in shards(count, list(map(str, pieces))):
        mine = shard.pick(pieces)
        assert Counter(piece % count for piece in mine) == dict.fromkeys(range(count), 3)
        # Neither does a list that ends with what is large.
        assert sum(piece >= 2 * count * count for piece in mine) == count


def test_the_hash_is_that_of_the_names_and_their_order():
    lists = (["a", "b"], ["b", "a"], ["a"], ["ab"], ["a", "b", ""], ["a,b"], ['a", "b'], [])
    assert len({hash_of(names) for names in lists}) == len(lists)
    assert hash_of(iter(["a", "b"])) == hash_of(["a", "b"])


def test_the_shard_of_a_kernel_does_not_depend_on_the_process():
    code = (
        "from skuda.dispatch.select.work import WorkShard; from skuda.dispatch import Dispatcher;"
        "names = [sku.id for sku in Dispatcher(tuning='').registry];"
        "shard = WorkShard.of(2, 3, names); print(shard.list_hash, *shard.pick(names))"
    )
    environment = {**os.environ, "SKUDA_PLUGINS": "0"}
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert len(told.pop().split()) > 100


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"index": 0}, "index must be at least 1"),
        ({"index": 5}, "index must be at most the count, 4"),
        ({"count": 0}, "count must be at least 1"),
        ({"index": 1.0}, "index must be an integer"),
        ({"total": -1}, "total must be at least 0"),
        ({"list_hash": "abc"}, "list_hash must match"),
    ],
)
def test_what_is_no_shard_is_refused(changes, says):
    with pytest.raises(InvalidRecord, match=says):
        WorkShard(**{"index": 2, "count": 4, "total": 9, "list_hash": hash_of("abc"), **changes})
