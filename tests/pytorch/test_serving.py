"""An engine is a folder: one of a few lines serves a layer by `skuda.serving`, with the bits of `skuda.torch`."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support import fresh
from tensors import normal

from skuda.dispatch.shard import on_ranks
from skuda.functional import default_dispatcher
from skuda.registry.errors import InvalidProblem
from skuda.serving import preparation, tokens
from skuda.serving.blocks import BlockCache, Shape, append_and_attend, cut, problems, token_bytes, unturned
from skuda.serving.exchange import product_of_columns
from skuda.torch import DynamicLinear, StaticLinear, log_probs, sample
from skuda.torch.formats import TO_INT8

PAGES, KV_HEADS, HEADS, SIZE, WIDTH = 12, 2, 4, 128, 50
PAGE = 128


class Engine:
    """Sequences in blocks of one allocation. A step takes new tokens of some sequences, one after the other."""

    def __init__(self, dtype):
        shape = (PAGES, KV_HEADS, PAGE, token_bytes(SIZE))
        self.cache = cut(torch.zeros(shape, dtype=torch.int8), KV_HEADS, SIZE)
        self.free, self.blocks, self.lengths, self.dtype = list(range(PAGES))[::-1], {}, {}, dtype

    def step(self, new):
        """Return the attention of new queries, keys and values (tokens, heads, size) by sequence."""
        for name, (query, *_) in new.items():
            self.lengths[name] = self.lengths.get(name, 0) + len(query)
            held = self.blocks.setdefault(name, [])
            held += [self.free.pop() for _ in range(-(-self.lengths[name] // PAGE) - len(held))]
        most = max(len(self.blocks[name]) for name in new)
        table = [self.blocks[name] + [0] * (most - len(self.blocks[name])) for name in new]
        starts = np.cumsum([0, *(len(each[0]) for each in new.values())])
        tables = (table, [self.lengths[name] for name in new], starts.tolist())
        tables = tuple(torch.tensor(each, dtype=torch.int32) for each in tables)
        query, key, value = (torch.cat([each[at] for each in new.values()]) for at in range(3))
        output = torch.full_like(query, torch.nan)
        append_and_attend(self.cache, tables, query, key, value, output, scale=0.1, window=None)
        return dict(zip(new, output.split([len(each[0]) for each in new.values()]), strict=True))


def drawn(rng, length, dtype=torch.bfloat16):
    return tuple(normal(rng, length, heads, SIZE).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))


@torch.no_grad()
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch_and_chunks():
    rng = fresh()
    rows = {"a": drawn(rng, 150), "b": drawn(rng, 9), "c": drawn(rng, 131)}
    alone = {name: Engine(torch.bfloat16).step({name: each})[name] for name, each in rows.items()}
    engine, done, found = Engine(torch.bfloat16), dict.fromkeys(rows, 0), {name: [] for name in rows}
    while any(done[name] < len(rows[name][0]) for name in rows):
        step = {}
        for name in rng.permutation(list(rows)):
            count = int(rng.integers(0, 70))
            part = tuple(each[done[name] : done[name] + count] for each in rows[name])
            if len(part[0]):
                step[str(name)], done[name] = part, done[name] + count
        for name, output in (engine.step(step) if step else {}).items():
            found[name].append(output)
    for name, want in alone.items():
        assert torch.equal(torch.cat(found[name]).view(torch.int16), want.view(torch.int16))


def test_memory_of_another_shape_is_refused():
    shape = (PAGES, KV_HEADS, PAGE, token_bytes(SIZE))
    for memory in (torch.zeros(shape), torch.zeros((*shape[:3], 7), dtype=torch.int8)):
        with pytest.raises(InvalidProblem, match="kv_cache must be int8 of shape"):
            cut(memory, KV_HEADS, SIZE)
    assert BlockCache._fields == ("k_codes", "k_scale", "v_codes", "v_scale")


@torch.no_grad()
def test_tokens_and_log_probabilities_are_those_of_skuda_torch():
    rng = fresh()
    logits = normal(rng, 6, WIDTH)
    seed, position = (torch.from_numpy(rng.integers(0, 2**40, 6)) for _ in range(2))
    got = tokens.draw(logits, seed, position, None, None)
    assert torch.equal(got, sample(logits, seed=seed, sequence=torch.zeros_like(seed), position=position))
    assert torch.equal(tokens.log_probabilities(logits, got[:, None])[:, 0], log_probs(logits, got)[0])
    logits[3] = torch.nan
    assert tokens.greedy(logits)[3] == tokens.draw(logits, seed, position, None, None)[3] == -1
    said = []
    log = logging.getLogger("test")
    log.warning = lambda *given: said.append(given)
    undefined = tokens.Undefined(log, "hint")
    assert (undefined.settle(tokens.greedy(logits)) >= 0).all()
    assert (undefined.rows, len(said)) == (1, 1)
    assert "hint" in said[0]


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static", "shifted"])
def test_ranks_with_columns_have_the_bits_of_the_whole_layer(kind, count):
    rng = fresh(kind, count)
    n, k = 24, 96
    codes, scale = TO_INT8(normal(rng, n, k))
    bias, rows = normal(rng, n), normal(rng, 5, k)
    more = {} if kind == "dynamic" else {"input_scale": torch.tensor([0.03])}
    if kind == "shifted":
        more["input_zero_point"] = torch.tensor([7], dtype=torch.int32)
    whole = DynamicLinear(codes, scale, bias) if kind == "dynamic" else StaticLinear(codes, scale, bias, **more)
    given = {"input_scale": more.get("input_scale"), "zero_point": more.get("input_zero_point")}
    if kind == "static":
        given["zero"] = torch.zeros(1, dtype=torch.int32)
    want = whole(rows) if kind != "static" else None

    def work(group):
        part = slice(group.rank * k // count, (group.rank + 1) * k // count)

        def reduce(tensor, how):
            return torch.as_tensor(getattr(group, how)(tensor))

        mine = rows[:, part], codes[:, part].contiguous(), scale[:, None]
        return product_of_columns(*mine, reduce, k=k, bias=bias, **given)

    every = on_ranks(count, work)
    for found in every:
        assert torch.equal(found, every[0] if want is None else want)
    if want is None:  # an engine's symmetric static codes are -128..127; a layer's are -127..127
        inner = rows.clamp(-127 * 0.03, 127 * 0.03)
        clamped = product_of_columns(inner, codes, scale[:, None], lambda one, _: one, k=k, bias=bias, **given)
        assert torch.equal(clamped, whole(inner))


def test_wanted_problems_are_prepared_for_every_number_of_rows(caplog):
    log = logging.getLogger("an engine")
    every = problems(
        Shape(3, 2, PAGES, KV_HEADS, 4, HEADS, SIZE), torch.bfloat16, 0.1, None, unturned(torch.device("cpu")).fields
    )
    preparation.want(every, 5)
    with caplog.at_level(logging.INFO):
        found = preparation.prepare("cpu", log)
    assert found is not None
    assert not found.failed
    assert preparation.prepare("cpu", log) is None
    preparation.select(every, "cpu")
    assert all(default_dispatcher().explain(problem, device="cpu").chosen for problem in every)
