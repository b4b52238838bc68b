"""The stack of `skuda demo --gpus`: its arithmetic, its cuts, and one hash where nothing is rounded between ranks."""

import io
import json
from dataclasses import dataclass

import numpy as np
import pytest
from rich.console import Console
from support import dispatcher, fresh

import skuda.tools.ranks.command as command_module
from skuda.dispatch.shard import on_ranks, split
from skuda.registry.device import HOST
from skuda.tools.ranks.carriers import lines
from skuda.tools.ranks.command import demo, run_demo
from skuda.tools.ranks.framework import BF16, NUMPY, attend, exponential, torch_on, total
from skuda.tools.ranks.render import render
from skuda.tools.ranks.stack import SMALL, Cut, Sizes
from skuda.tools.ranks.work import BATCHES, WAYS, Task, hash_of, hashes_of


def drawn_task(rng):
    """Return a small task; neither heads nor the MLP divide evenly by every number of ranks."""
    sizes = Sizes(hidden=64, heads=8, kv_heads=4, intermediate=int(rng.integers(70, 130)), blocks=2, positions=4)
    return Task(sizes=sizes, seed=int(rng.integers(2**32)))


def drawn_heads(rng, sequences, heads, positions=8, head=16):
    shape = (sequences, positions, heads)
    loud = 10 ** rng.uniform(-2, 2)
    q = (loud * rng.standard_normal((*shape, 2, head))).astype(BF16)
    k, v = (rng.standard_normal((*shape, head)).astype(BF16) for _ in range(2))
    return q, k, v


def test_attention_is_attention():
    q, k, v = drawn_heads(fresh("attention"), 3, 2)
    got = attend(NUMPY, q, k, v)
    q, k, v = (part.astype(np.float64) for part in (q, k, v))
    scores = np.einsum("btkqd,bskd->btkqs", q, k) * 16**-0.5
    hidden = np.triu(np.ones((8, 8), bool), 1)[:, None, None]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("btkqs,bskd->btkqd", weights / weights.sum(-1, keepdims=True), v)
    # Rounding to bf16 is half of 2^-8; the scores of loud queries are hundreds, known to some 1e-5.
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8, atol=2e-2)


def test_attention_sees_nothing_of_other_sequences_heads_and_later_positions():
    rng = fresh("attention alone")
    q, k, v = drawn_heads(rng, 5, 4)
    whole = attend(NUMPY, q, k, v)
    for _ in range(4):
        one, heads, last = rng.integers(5), slice(int(rng.integers(4)), 4), int(rng.integers(1, 9))
        at = (slice(one, one + 1), slice(0, 8), heads)
        alone = attend(NUMPY, q[at], k[at], v[at])
        assert alone.tobytes() == np.ascontiguousarray(whole[at]).tobytes()
        later = [part.copy() for part in (q, k, v)]
        for part in later:
            part[:, last:] = 1
        assert attend(NUMPY, *later)[:, :last].tobytes() == np.ascontiguousarray(whole[:, :last]).tobytes()


def test_torch_and_numpy_attend_with_the_same_bits():
    pytest.importorskip("torch")
    rng, torch = fresh("frameworks"), torch_on("cpu")
    for heads in (0, 1, 3):
        parts = drawn_heads(rng, int(rng.integers(1, 4)), heads)
        there = torch.fetched(attend(torch, *map(torch.sent, parts)))
        here = attend(NUMPY, *parts)
        assert (there.dtype, there.shape, there.tobytes()) == (here.dtype, here.shape, here.tobytes())


def test_arrays_survive_the_way_to_torch_and_back():
    pytest.importorskip("torch")
    rng, torch = fresh("there and back"), torch_on("cpu")
    for dtype in (BF16, np.float32, np.int8):
        array = (100 * rng.standard_normal((3, 4))).astype(dtype)
        there = torch.sent(array)
        np.testing.assert_array_equal(torch.fetched(there), array)
        np.testing.assert_array_equal(torch.fetched(torch.octets(there)), NUMPY.octets(array))
    assert torch.fetched(torch.bf16(torch.octets(torch.sent(np.ones(4, BF16))))).tolist() == [1.0] * 4


def test_the_exponential_is_one():
    x = -20 * fresh("exp").random(1000).astype(np.float32)
    np.testing.assert_allclose(exponential(NUMPY, x), np.exp(x.astype(np.float64)), rtol=2e-5)  # as it says
    assert exponential(NUMPY, np.zeros(1, np.float32)) == 1
    assert exponential(NUMPY, np.array([-1e30], np.float32)) == exponential(NUMPY, np.array([-80], np.float32)) > 0


def test_totals_fold_the_upper_half_onto_the_lower():
    x = np.array([[1, 2**-24, -1, 2**-24]], np.float32)
    assert total(x).tolist() == [2**-23]
    assert total(x[:, :1]).tolist() == [1]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_parts_of_the_ranks_are_the_whole(count):
    task = drawn_task(fresh("cuts", count))
    whole = Cut(task.sizes, 1, 0).blocks(task.seed, NUMPY)
    ranks = [[*Cut(task.sizes, count, rank).blocks(task.seed, NUMPY)] for rank in range(count)]
    kv = np.multiply(task.sizes.head, split(task.sizes.kv_heads, count))
    inner = np.array(split(task.sizes.intermediate, count, 16))
    for number, block in enumerate(whole):
        parts = [rank[number] for rank in ranks]
        for name in ("o", "down"):
            joined = np.concatenate([getattr(part, name).codes for part in parts], axis=1)
            np.testing.assert_array_equal(joined, getattr(block, name).codes)
            assert all(getattr(part, name).scales.tolist() == getattr(block, name).scales.tolist() for part in parts)
        for name, widths in (("qkv", (2 * kv, kv, kv)), ("gate_up", (inner, inner))):
            for field in ("codes", "scales"):
                columns = [
                    np.split(getattr(getattr(part, name), field), np.cumsum([width[rank] for width in widths])[:-1])
                    for rank, part in enumerate(parts)
                ]
                joined = np.concatenate([column[i] for i in range(len(widths)) for column in columns])
                np.testing.assert_array_equal(joined, getattr(getattr(block, name), field))
            assert getattr(block, name).n == sum(getattr(parts[0], name).sizes)


def test_bf16_has_exactly_the_weights_of_int8():
    task = drawn_task(fresh("weights"))
    for block in Cut(task.sizes, 1, 0).blocks(task.seed, NUMPY):
        for layer in (block.qkv, block.o, block.gate_up, block.down):
            exact = layer.codes.astype(np.float64) * layer.scales[:, None]
            assert layer.real.dtype == BF16
            np.testing.assert_array_equal(layer.real.astype(np.float64), exact)


def test_int8_has_one_hash_and_rounded_parts_have_several():
    task = drawn_task(fresh("hashes"))
    result = run_demo(task, 4, Faulty(Passing), dispatcher())
    assert [(line.ranks, line.batch) for line in result.lines] == [
        (ranks, batch) for ranks in (1, 1, 2, 3, 4) for batch in BATCHES
    ]
    assert result.passed
    assert result.distinct["int8"] == 1
    assert result.distinct["sliced int8"] >= 4
    assert result.distinct["bf16"] >= 4
    # One rank has nothing to round, and all ways compute the same function.
    assert result.lines[0].hashes["sliced int8"] == result.lines[0].hashes["int8"]
    assert all(20 < figure < 60 for figure in result.sqnr_db.values())


def test_a_hash_is_that_of_every_bit():
    rng = fresh("hash")
    array = rng.standard_normal((4, 8)).astype(BF16)
    other = array.copy()
    other.view(np.uint16)[rng.integers(4), rng.integers(8)] ^= 1 << rng.integers(16)
    assert hash_of(array) == hash_of(np.asfortranarray(array)) != hash_of(other)
    assert len(hash_of(array)) == 12


def test_other_seeds_and_rows_have_other_hashes():
    rng = fresh("other")
    task = drawn_task(rng)
    other = task.model_copy(update={"seed": task.seed + 1})
    found = [run_demo(one, 1, Faulty(Passing), dispatcher()).lines[0].hashes for one in (task, other)]
    assert all(found[0][way] != found[1][way] for way in WAYS)
    drawn = task.sequences()
    assert len({row.tobytes() for row in drawn}) == len(drawn) == max(map(len, BATCHES.values()))
    assert {chosen.index(0) for chosen in BATCHES.values()} == {0, 4}


# --- faults ----------------------------------------------------------------------------------------------------------


@dataclass
class Passing:
    """A group that passes everything on; those below change one thing."""

    group: object

    def __getattr__(self, name):
        return getattr(self.group, name)


class RoundingSums(Passing):
    def sum(self, array):
        return self.group.sum(array.astype(BF16).astype(np.int32))

    def sum_rows(self, array, sizes):
        return self.group.sum_rows(array.astype(BF16).astype(np.int32), sizes)


class DroppingARank(Passing):
    def sum(self, array):
        return self.group.sum(array * (self.group.rank != self.group.count - 1 or self.group.count == 1))

    def sum_rows(self, array, sizes):
        return self.group.sum_rows(array * (self.group.rank != self.group.count - 1 or self.group.count == 1), sizes)


class LocalMaxima(Passing):
    def max(self, array):
        self.group.max(array)
        return array


class OneRankIsOff(Passing):
    """The second rank gets sums of its own: doubled, since one more is at times lost where they are rounded."""

    def sum(self, array):
        return self.group.sum(array) * (1 + (self.group.rank == 1))

    def sum_rows(self, array, sizes):
        return self.group.sum_rows(array, sizes) * (1 + (self.group.rank == 1))


@dataclass
class Faulty:
    """Threads whose groups have a fault."""

    fault: type

    def run(self, task, counts):
        for count in counts:
            ranks = on_ranks(count, lambda group: hashes_of(task.outputs(self.fault(group), NUMPY, dispatcher(), HOST)))
            yield from lines(count, "threads", "numpy", "CPU", ranks)


def run_command(monkeypatch, fault, task, **options):
    monkeypatch.setattr(command_module, "chosen", lambda *_: (Faulty(fault), task.sizes, ""))
    out, err = io.StringIO(), io.StringIO()
    console = Console(file=out, width=80)
    status = demo(3, console=console, errors=Console(file=err), dispatcher=dispatcher(), **options)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("fault", [RoundingSums, DroppingARank, LocalMaxima, OneRankIsOff])
def test_a_faulty_group_shows_several_hashes_and_fails(fault, monkeypatch):
    task = drawn_task(fresh("faults", fault.__name__))
    status, out, err = run_command(monkeypatch, fault, task, as_json=True)
    result = json.loads(out)
    assert status == 1
    assert result["passed"] is False
    assert result["distinct"]["int8"] > 1
    assert err.startswith("FAIL  int8: ")


def test_without_a_fault_the_same_command_passes(monkeypatch):
    task = drawn_task(fresh("no fault"))
    status, out, err = run_command(monkeypatch, Passing, task, as_json=False)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "PASS  int8: one hash in 21 outputs"


def test_ranks_that_differ_are_all_shown():
    task = drawn_task(fresh("differ"))
    result = run_demo(task, 2, Faulty(OneRankIsOff), dispatcher())
    (line,) = [line for line in result.lines if line.ranks == 2 and line.batch == "alone"]
    out = io.StringIO()
    render(result, Console(file=out, width=80))
    assert set(line.hashes["int8"]) <= set(out.getvalue().split())
    assert "FAIL" in out.getvalue()


def test_the_report_fits_80_columns_and_shows_every_hash():
    result = run_demo(drawn_task(fresh("report")), 4, Faulty(Passing), dispatcher())
    out = io.StringIO()
    render(result, Console(file=out, width=80))
    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text
    for line in result.lines:
        for hashes in line.hashes.values():
            assert hashes[0] in text
    assert f"1 hash        {result.distinct['sliced int8']} hashes" in text
    assert text.splitlines()[-1].startswith("PASS")


def test_the_stack_that_is_shown_can_be_cut_for_every_number_of_ranks():
    for count in range(1, SMALL.kv_heads + 1):
        cut = Cut(SMALL, count, 0)
        assert sum(cut.joined) == SMALL.hidden
        assert min(cut.joined) > 0
        assert sum(cut.inner) == SMALL.intermediate
    assert SMALL.head & (SMALL.head - 1) == 0
