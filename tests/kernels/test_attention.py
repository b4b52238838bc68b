"""Attention: its error, and that a row's bits depend on the row and on the keys it sees alone."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from attention_error import attended, drawn
from support import assert_same_bits, fresh, run

from skuda.kernels.attention import AttentionDescriptor
from skuda.kernels.attention.attention import OP
from skuda.kernels.attention.attention_launch import split
from skuda.kernels.attention.cache import PAGE, column_of
from skuda.kernels.attention.exp2 import power_of_two
from skuda.kernels.launch import MOST_ZEROS, ZEROS
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.errors import InvalidProblem

POISON = np.array([np.nan, np.inf, -np.inf, -1, 1e38], np.float32)


# --- the power of two ------------------------------------------------------------------------------------------------


def test_power_of_two_is_close_and_at_most_one():
    u = np.arange(386 * 2**15, 512 * 2**15 + 1, dtype=np.float32) / 2**15  # all there are
    power = power_of_two(u)
    assert np.abs(power / np.exp2(u.astype(np.float64) - 512) - 1).max() <= 8.57e-5
    assert power.max() == power[-1] == 1
    assert (np.diff(power) >= 0).all()


def test_the_scale_of_exponents_is_rounded_to_f64_and_then_to_f32():
    rng = fresh()
    log2_e = Fraction("1.4426950408889634073599246810018921374266459541529859")
    while True:
        even = int(rng.integers(2**22, 2**23)) * 2
        half = Fraction(2 * even + 1, 2**24)  # half-way between two f32, of which the lower one is even
        scale = float(half / log2_e)
        if half < Fraction(scale) * log2_e and float(Fraction(scale) * log2_e) == half:
            break
    problem = AttentionDescriptor(**SIZES | REST | {"scale": scale})
    assert problem.exponent == even / 2**23, "rounded once, it is the next one"


# --- a cache of whole sequences --------------------------------------------------------------------------------------


def coded(x):
    """Codes and scales of rows; those of zeros have the scale 0."""
    scale = (np.abs(x).max(-1) / np.float32(127)).astype(np.float32)
    return np.rint(x / np.where(scale == 0, 1, scale)[..., None]).astype(np.int8), scale


class World:
    """Sequences of random length, each with q, k and v of every position."""

    def __init__(self, rng, lengths, heads=4, kv_heads=2, head_size=32, **fields):
        self.rng, self.lengths = rng, lengths
        self.fields = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "scale": 0.4} | fields
        self.q = [coded(rng.standard_normal((n, heads, head_size))) for n in lengths]
        self.k = [coded(rng.standard_normal((n, kv_heads, head_size))) for n in lengths]
        self.v = [coded(rng.standard_normal((n, kv_heads, head_size)) * self.sizes(n)) for n in lengths]

    def sizes(self, n):
        """Values differ in size from token to token, and some are zeros."""
        sizes = np.exp2(self.rng.normal(0, 4, n)) * (self.rng.random(n) > 0.2)
        return sizes[:, None, None].astype(np.float32)

    def attend(self, pieces, spare=3, shared=()):
        """Run rows of sequences, each given as (sequence, first row, end); return one array of rows per piece.

        The sequence has as many keys as `end`. Pages are in random order, with `spare` unused ones; slots that no piece
        names are poisoned. Pieces of the sequences in `shared` use the same pages.
        """
        rng, kv_heads, d = self.rng, self.fields["kv_heads"], self.fields["head_size"]
        needed = [-(-end // PAGE) for _, _, end in pieces]
        most, count = max(needed) + 1, sum(needed) + spare
        free = list(rng.permutation(count))
        k_codes = rng.integers(-127, 128, (count, kv_heads, PAGE, d)).astype(np.int8)
        v_codes = rng.integers(-127, 128, (count, kv_heads, d, PAGE)).astype(np.int8)
        k_scale, v_scale = (rng.choice(POISON, (count, kv_heads, PAGE)) for _ in range(2))
        table = np.full((len(pieces), most), -7, np.int32)
        pages = {}
        for i, (s, _, end) in enumerate(pieces):
            for block in range(needed[i]):
                key = (s, block) if s in shared else (s, block, i)
                page = table[i, block] = pages[key] if key in pages else pages.setdefault(key, free.pop())
                rows = slice(block * PAGE, min(end, (block + 1) * PAGE))
                at = np.arange(rows.stop - rows.start)
                (k, k_size), (v, v_size) = ((part[0][rows], part[1][rows]) for part in (self.k[s], self.v[s]))
                k_codes[page, :, at], v_codes[page, :, :, column_of(at)] = k, v
                k_scale[page, :, at], v_scale[page, :, at] = k_size, v_size
        q = [tuple(part[first:end] for part in self.q[s]) for s, first, end in pieces]
        starts = np.cumsum([0, *(len(codes) for codes, _ in q)]).astype(np.int32)
        arrays = {
            "q_codes": np.concatenate([codes for codes, _ in q]),
            "q_scale": np.concatenate([scale for _, scale in q]),
            "k_codes": k_codes,
            "k_scale": k_scale,
            "v_codes": v_codes,
            "v_scale": v_scale,
            "block_table": table,
            "lengths": np.array([end for _, _, end in pieces], np.int32),
            "starts": starts,
        }
        sizes = {"tokens": int(starts[-1]), "sequences": len(pieces), "pages": count, "most_blocks": most}
        problem = AttentionDescriptor(**({"output_element": "f32"} | sizes | self.fields))
        output = run(problem, arrays)["output"]
        return np.split(output, starts[1:-1])


MASKS = [{}, {"window": 1}, {"window": 150}, {"heads": 3, "kv_heads": 3}, {"kv_heads": 1, "head_size": 64}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_row_has_the_same_bits_however_it_is_asked_for(mask):
    rng = fresh("rows", mask)
    n = int(rng.integers(520, 700))
    world = World(rng, (n, 131, 1), **mask)
    (whole,) = world.attend([(0, 0, n)])
    assert np.isfinite(whole).all()
    cuts = [0, *sorted(rng.choice(np.arange(1, n), 4, replace=False).tolist()), n]
    for first, end in pairwise(cuts):
        (piece,) = world.attend([(0, first, end)])
        assert_same_bits(piece, whole[first:end], f"rows {first} to {end} of {n}")
    some = [*rng.integers(0, n, 3).tolist(), 127, 128, 511, 512]
    for row in some:
        (alone,) = world.attend([(0, row, row + 1)])
        assert_same_bits(alone, whole[row : row + 1], f"row {row} alone")
    batch = world.attend([(1, 0, 131), (0, 300, n), (2, 0, 1), *((0, row, row + 1) for row in some)], shared=(0,))
    assert_same_bits(batch[1], whole[300:], "in a batch, pages shared")
    assert_same_bits(np.concatenate(batch[3:]), whole[some], "step by step, pages shared")
    assert_same_bits(batch[0], world.attend([(1, 0, 131)])[0], "the first of a batch")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, 2.0**106])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_row_is_nan_where_it_sees_a_wrong_scale(name, value):
    rng = fresh(name, value)
    world = World(rng, (400,), window=130)
    (clean,) = world.attend([(0, 0, 400)])
    at = int(rng.integers(0, 400))
    getattr(world, name)[0][1][at, 0] = value
    (got,) = world.attend([(0, 0, 400)])
    seen = (np.arange(400) >= at) & (np.arange(400) < at + 130)
    touched = np.broadcast_to(seen[:, None] & (np.arange(4) < 2), (400, 4))
    assert np.isnan(got[touched]).all()
    assert_same_bits(got[~touched], clean[~touched])


@pytest.mark.parametrize("size", [2.0**16, 2.0**17, 2.0**40, 2.0**100])
def test_scores_beyond_two_to_the_23_are_nan(size):
    world = World(fresh(size), (3,), heads=1, kv_heads=1, scale=1.0)
    codes, scale = world.k[0]
    world.q[0][0][:], world.q[0][1][:] = 1, 1
    codes[:] = [[[1]], [[2]], [[3]]]
    scale[:], scale[1] = 1, size  # the products of codes are 32, 64 and 96
    (got,) = world.attend([(0, 0, 3)])
    assert np.isfinite(got[0]).all()
    if size > 2.0**16:
        assert np.isnan(got[1:]).all()
    else:
        v, v_scale = world.v[0]
        np.testing.assert_allclose(got[1:, 0], np.stack([v[1, 0] * v_scale[1, 0]] * 2), rtol=1e-2)


# --- errors ----------------------------------------------------------------------------------------------------------

SIZES = {"tokens": 4, "heads": 4, "kv_heads": 2, "head_size": 64, "sequences": 2, "pages": 5, "most_blocks": 3}
REST = {"scale": 1.0, "output_element": "f32"}


@pytest.mark.parametrize(
    ("field", "value", "more"),
    [
        *(("head_size", d, {}) for d in (0, 16, 80, 96, 256)),
        ("heads", 3, {}),
        ("heads", 0, {}),
        ("kv_heads", 0, {}),
        ("scale", 0.0, {}),
        ("scale", -1.0, {}),
        ("scale", 3e38, {}),
        ("scale", 1e-50, {}),
        ("window", 0, {}),
        ("window", 5, {"causal": False}),
        ("most_blocks", 2**24, {}),
    ],
)
def test_a_wrong_problem_is_refused_by_name(field, value, more):
    with pytest.raises(InvalidProblem, match=rf"\b{field}\b"):
        AttentionDescriptor(**SIZES | REST | more | {field: value})


GOOD = {"block_table": [[0, 1, 4], [2, -9, 99]], "lengths": [384, 100], "starts": [0, 3, 4]}
BAD = {
    "a page that is not there": ("block_table", [[0, 1, 5], [2, 0, 0]], r"block_table\[0, 2\]"),
    "a negative page": ("block_table", [[0, 1, 2], [-1, 0, 0]], r"block_table\[1, 0\]"),
    "a negative length": ("lengths", [384, -1], r"lengths\[1\]"),
    "more keys than the table": ("lengths", [385, 100], r"lengths\[0\]"),
    "starts that decrease": ("starts", [0, 3, 2], r"starts\[2\]"),
    "starts after 0": ("starts", [1, 3, 4], r"starts\[0\]"),
    "starts beyond the rows": ("starts", [0, 3, 5], r"starts\[2\]"),
}


@pytest.mark.parametrize(("name", "value", "message"), [("lengths", GOOD["lengths"], None), *BAD.values()])
def test_wrong_tables_are_refused_with_their_place(name, value, message):
    rng = fresh(name, value)
    problem = AttentionDescriptor(**SIZES | REST)
    arrays = {
        "q_codes": rng.integers(-127, 128, (4, 4, 64)).astype(np.int8),
        "q_scale": np.ones((4, 4), np.float32),
        "k_codes": np.zeros((5, 2, PAGE, 64), np.int8),
        "k_scale": np.ones((5, 2, PAGE), np.float32),
        "v_codes": np.zeros((5, 2, 64, PAGE), np.int8),
        "v_scale": np.ones((5, 2, PAGE), np.float32),
    } | {key: np.array(table, np.int32) for key, table in (GOOD | {name: value}).items()}
    if message is None:
        run(problem, arrays)
        return
    with pytest.raises(InvalidProblem, match=message):
        run(problem, arrays)


def test_columns_of_a_page_hold_each_position_once():
    assert sorted(column_of(np.arange(PAGE))) == list(range(PAGE))
    assert [int(column_of(p)) for p in (0, 1, 2, 8, 9, 15, 16, 127)] == [0, 1, 4, 2, 3, 15, 16, 127]


# --- error -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [128, 2048])
def test_the_error_is_that_of_the_codes(count):
    for kind, (q, k, v, scale) in drawn(count, seed=int(fresh(count).integers(2**31))).items():
        got, want, of_sizes = attended(q, k, v, scale)
        # Powers of two have an error of 1 / 11,700. Weights are rounded to 1 / 65,280 of the largest that their block
        # can have: at most 1 / 1,020 of a value, where all 128 are rounded the same way, which random ones are not.
        assert (np.abs(got - want) <= 2.2e-4 * of_sizes + 4e-4 * np.abs(v).max()).all(), kind


# --- which kernel, and how many blocks share a row -------------------------------------------------------------------


def decoding(count, blocks, **fields):
    """Return a problem with `count` sequences, and one new token for each of them unless `fields` say otherwise."""
    sizes = {"tokens": count, "heads": 32, "kv_heads": 8, "head_size": 128, "sequences": count, "pages": 9}
    return AttentionDescriptor(**sizes | {"most_blocks": blocks, "scale": 0.1, "output_element": "bf16"} | fields)


@pytest.mark.parametrize(
    ("fields", "variant"),
    [
        ({}, "split"),
        ({"tokens": 64}, "split"),
        ({"tokens": 65}, "warpgroup"),
        ({"tokens": 65, "head_size": 64}, "plain"),
        ({"tokens": 0}, "split"),
        ({"sequences": 0}, "split"),
        ({"tokens": 17, "sequences": 0}, "warpgroup"),
        ({"tokens": 2**28, "sequences": 2**28, "head_size": 32}, "plain"),
        ({"kv_heads": 1, "heads": 65, "pages": 0}, "plain"),
        ({"kv_heads": 2**28, "heads": 2**28, "head_size": 32, "pages": 0}, "plain"),
    ],
)
def test_few_rows_for_each_sequence_are_spread(fields, variant):
    problem = decoding(4, 8, **fields)
    chosen = next(
        sku for sku in OP.skus if sku.element == "bf16" and not any(rule.check(problem) for rule in sku.constraints)
    )
    assert chosen.variant == variant


@pytest.mark.parametrize(
    ("sequences", "blocks", "splits", "teams"),
    [
        *((*each, 1) for each in [(1, 256, 64), (4, 1024, 16), (64, 8, 1), (64, 256, 1), (256, 256, 1), (1, 2**23, 1)]),
        *((*each, 2) for each in [(1, 2, 1), (1, 0, 1), (1, 9, 3), (16, 9, 3)]),
    ],
)
def test_blocks_share_a_row_until_the_card_is_full(sequences, blocks, splits, teams):
    launch = split(decoding(sequences, blocks), KNOWN_DEVICES["h200"])
    scratch = dict(launch.scratch)
    assert (launch.steps[0].entry[-3:], launch.steps[0].grid) == (f"8_{teams}", (8 * sequences, splits, 1))
    assert (scratch == {}) == (splits == 1)
    assert scratch.pop(ZEROS, 0) <= MOST_ZEROS
    assert sum(scratch.values()) <= 128 << 20
    card = KNOWN_DEVICES["rtx4090"]
    for tokens in (sequences, 3 * sequences):
        assert split(decoding(sequences, blocks, tokens=tokens), card).steps[0].shared <= card.shared_memory
