"""Both ops on one cache: however a sequence is appended and asked for, every token's output has the same bits."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest
from harness import emulator
from harness.binding import ran
from support import assert_same_bits, fresh, run

from skuda.kernels.attention import attention, rope_quantize_append
from skuda.kernels.attention.cache import PAGE, cache_arguments
from skuda.registry.argument import Role
from skuda.registry.device import KNOWN_DEVICES

HEADS, KV_HEADS, SIZE, MOST_BLOCKS, PAGES = 4, 2, 32, 5, 20
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": SIZE, "pages": PAGES, "most_blocks": MOST_BLOCKS}
WIDTHS = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}


def by_kernel(problem, inputs):
    """Run on the CPU the CUDA kernel that is the first to serve a problem, of those that plain C++ can express."""
    op = attention.OP if problem.op == "attention" else rope_quantize_append.OP
    able = (each for each in op.skus if each.backend == "pycuda" and not each.arch.is_specific)
    sku = next(e for e in able if e.key == problem.key() and not any(rule.check(problem) for rule in e.constraints))
    placed = ran(sku, problem, inputs, KNOWN_DEVICES["a100"], fresh("layout"))
    return {a.name: placed[a.name].array for a in problem.arguments() if a.role in (Role.OUTPUT, Role.STATE)}


class Server:
    """A cache full of anything, and sequences in pages of any order."""

    def __init__(self, rng, runner, tokens, **fields):
        self.rng, self.runner, self.tokens, self.fields = rng, runner, tokens, fields
        self.free = [int(page) for page in rng.permutation(PAGES)]
        self.table = np.full((len(tokens), MOST_BLOCKS), -1, np.int32)
        angles = np.arange(PAGE * MOST_BLOCKS)[:, None] / 100 ** (np.arange(SIZE // 2) / SIZE)
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        problem = attention.AttentionDescriptor(tokens=0, sequences=0, scale=1.0, output_element="f32", **SIZES)
        self.cache = {}
        for argument in (each.of(problem) for each in cache_arguments(Role.INPUT)):
            codes = rng.integers(-128, 128, argument.shape).astype(np.int8)
            scales = rng.choice(np.float32([np.nan, np.inf, -1]), argument.shape)
            self.cache[argument.name] = codes if argument.name.endswith("codes") else scales

    def serve(self, pieces, pad=0):
        """Append tokens of sequences, given as (sequence, first, end), and return the attention of each piece.

        Before each piece that begins its sequence, there are `pad` rows of padding.
        """
        rows = {name: [] for name in WIDTHS}
        starts = [0]
        for s, first, end in pieces:
            for block in range(first // PAGE, -(-end // PAGE)):
                if self.table[s, block] < 0:
                    self.table[s, block] = self.free.pop()
            padding = pad * (first == 0)
            for name, parts in rows.items():
                own = self.tokens[s][name]
                parts += [np.full((padding, own.shape[1]), np.nan, own.dtype), own[first:end]]
            starts.append(starts[-1] + padding + end - first)
        names = [s for s, _, _ in pieces]
        tables = {"block_table": self.table[names], "starts": np.int32(starts)}
        tables["lengths"] = np.int32([end for _, _, end in pieces])
        new = {name: np.concatenate(parts) for name, parts in rows.items()}
        sizes = SIZES | {"tokens": starts[-1], "sequences": len(pieces)}
        append = rope_quantize_append.RopeQuantizeAppendDescriptor(
            **sizes, rotated=SIZE, most_positions=len(self.cos_sin), input_element="f32"
        )
        made = self.runner(append, new | tables | self.cache | {"cos_sin": self.cos_sin})
        self.cache = {name: made.pop(name) for name in self.cache}
        attend = attention.AttentionDescriptor(**sizes, scale=0.2, output_element="f32", **self.fields)
        output = self.runner(attend, made | tables | self.cache)["output"]
        ends = zip(starts[1:], pieces, strict=True)
        return [output[stop - (end - first) : stop] for stop, (_, first, end) in ends]


def drawn(rng, n):
    return {name: rng.standard_normal((n, width)).astype(np.float32) for name, width in WIDTHS.items()}


def cuts(rng, n, count):
    """Return pieces of a sequence of n tokens."""
    return list(pairwise([0, *sorted(rng.choice(np.arange(1, n), count, replace=False).tolist()), n]))


RUNNERS = [
    pytest.param(run, (520, 570), {"window": None}, id="reference"),
    pytest.param(run, (150, 260), {"window": 60}, id="reference with a window"),
    pytest.param(
        by_kernel,
        (131, 136),
        {"window": None},
        id="kernels",
        marks=pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler"),
    ),
]


@pytest.mark.parametrize(("runner", "lengths", "mask"), RUNNERS)
def test_every_token_has_the_same_bits_in_every_way(runner, lengths, mask):
    rng = fresh(lengths, mask)
    n, other = (int(rng.integers(*lengths)) for _ in range(2))
    tokens = [drawn(rng, n), drawn(rng, other)]
    # The third begins like the first.
    tokens.append({name: np.concatenate([tokens[0][name][:PAGE], drawn(rng, 40)[name]]) for name in WIDTHS})
    third = PAGE + 40

    def server():
        return Server(rng, runner, tokens, **mask)

    (want,) = server().serve([(0, 0, n)])
    (want_third,) = server().serve([(2, 0, third)])
    assert np.isfinite(want).all()
    assert_same_bits(want_third[:PAGE], want[:PAGE], "a prefix")

    one = server()
    chunks = [one.serve([(0, *piece)])[0] for piece in cuts(rng, n, 4)]
    assert_same_bits(np.concatenate(chunks), want, "in chunks")

    single = server()
    begun = n - (70 if runner is run else 6)
    found = single.serve([(0, 0, begun)])
    found += [single.serve([(0, at, at + 1)])[0] for at in range(begun, n)]
    assert_same_bits(np.concatenate(found), want, "token by token")

    both = server()
    mine, others = cuts(rng, n, 3), cuts(rng, other, 3)
    pairs = zip(mine, others, strict=True)
    parts = [both.serve([(1, *b), (0, *a)], pad=int(rng.integers(3)))[1] for a, b in pairs]
    assert_same_bits(np.concatenate(parts), want, "beside another sequence, padded")

    shared = server()
    shared.serve([(0, 0, n)])
    shared.table[2, 0] = shared.table[0, 0]
    before = {name: array[shared.table[0, 0]].copy() for name, array in shared.cache.items()}
    rest, again = shared.serve([(2, PAGE, third), (1, 0, other)])[0], shared.table[0, 0]
    assert_same_bits(rest, want_third[PAGE:], "after a shared prefix")
    for name, array in shared.cache.items():
        assert_same_bits(array[again], before[name], f"the shared page of {name}")
