"""What the ops on logits mean: against other arithmetic, in any order and batch, and as probabilities."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import oracle
import pytest
from scipy.stats import chi2
from support import assert_same_bits, fresh, run

from skuda.kernels.sampling import ArgmaxDescriptor, LogSoftmaxAtDescriptor, SampleDescriptor
from skuda.kernels.sampling.log_softmax_at import draw as drawn_tokens
from skuda.kernels.sampling.philox import draws, philox
from skuda.kernels.sampling.weights import logarithm, powers
from skuda.registry import InvalidProblem

F32 = np.float32


def at_tokens(logits, tokens, temperature=None):
    """Return `logprob` and `entropy` of f32 logits."""
    n, v = logits.shape
    fields = {"n": n, "v": v, "t": tokens.shape[1], "has_temperature": temperature is not None}
    inputs = {"logits": logits, "tokens": tokens} | ({} if temperature is None else {"temperature": temperature})
    found = run(LogSoftmaxAtDescriptor(input_element="f32", **fields), inputs)
    return found["logprob"], found["entropy"]


def sampled_tokens(logits, **given):
    """Return the tokens of f32 logits; parameters are numbers, or one for each row."""
    n, v = logits.shape
    given = {"temperature": 1.0, "seed": 0, "sequence": 0, "position": np.arange(n)} | given
    dtypes = {"temperature": F32, "top_p": F32, "top_k": np.int32}
    rows = {name: np.broadcast_to(value, n).astype(dtypes.get(name, np.int64)) for name, value in given.items()}
    has = {f"has_{name}": name in given for name in ("top_k", "top_p")}
    return run(SampleDescriptor(n=n, v=v, input_element="f32", **has), {"logits": logits, **rows})["token"]


# --- the fixed sequences ---------------------------------------------------------------------------------------------


def test_powers_are_within_their_bound_and_vanish_at_the_end():
    rng = fresh()
    c = np.concatenate([-33 * rng.random(200_000), -np.exp(-30 * rng.random(100_000)), [0, -0.0, -1e-45]]).astype(F32)
    exact = np.exp(c.astype(np.float64)) * 2.0**40
    assert np.abs(powers(c) / exact - 1).max() <= 1.73e-7
    assert powers(c).max() == 2.0**40
    assert powers(np.zeros(1, F32))[0] == 2.0**40
    last = powers(np.full(1, -33, F32))[0]
    assert max(last, 33 * last) < 0.5  # neither a weight nor a term of the entropy


def test_the_logarithm_is_that_of_mpmath_in_all_but_its_last_bits():
    rng = fresh()
    total = np.exp2(rng.uniform(40, 62, 3000)).astype(np.int64)
    total = np.concatenate([total, 2**40 + np.exp2(rng.uniform(0, 40, 1000)).astype(np.int64), [2**40, 2**41, 2**62]])
    with mpmath.workprec(120):
        for each, found in zip(total.tolist(), logarithm(total).tolist(), strict=True):
            want = mpmath.log(mpmath.mpf(float(each)) / 2**40)
            assert abs(found - want) <= 2.0**-51 * abs(want), each
    assert logarithm(np.array([2**40]))[0] == 0


@pytest.mark.parametrize("temperature", [None, 0.6, 1.7])
@pytest.mark.parametrize("spread", [0.01, 1, 6, 40])
def test_log_probabilities_and_entropies_are_within_their_bounds(spread, temperature):
    rng = fresh(spread, temperature)
    n, v = 5, int(rng.integers(1, 30_000))
    x, tokens = (spread * rng.standard_normal((n, v))).astype(F32), rng.integers(0, v, (n, 9))
    divisor = None if temperature is None else np.full(n, temperature, F32)
    logprob, entropy = at_tokens(x, tokens, divisor)
    z = (x if divisor is None else x / divisor[:, None]).astype(np.float64)
    d = z - z.max(1, keepdims=True)
    log = np.log(np.exp(d).sum(1))
    p = np.exp(d - log[:, None])
    first, second = -(p * d).sum(1), (p * d * d).sum(1)
    bound = 1.8e-7 + 2.0**-24 * first + 2.0**-41 * v
    want = np.take_along_axis(d, tokens, 1) - log[:, None]
    assert (np.abs(logprob - want) <= bound[:, None] + np.spacing(np.abs(logprob))).all()
    bound = 2 * (1 + first) * bound + 2.0**-23 * (first + second)
    assert (np.abs(entropy - (log + first)) <= bound + np.spacing(entropy)).all()


# --- what does not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["normal", "special"])
@pytest.mark.parametrize("element", ["f32", "f16", "bf16"])
def test_order_and_padding_of_the_vocabulary_change_no_bit(element, values):
    rng = fresh(element, values)
    n, v, t, pad = 6, int(rng.integers(2, 9000)), 4, int(rng.integers(1, 5000))
    problem = LogSoftmaxAtDescriptor(n=n, v=v, t=t, input_element=element, has_temperature=True)
    inputs = drawn_tokens(problem, values, rng)
    inputs["tokens"] = rng.integers(0, v, (n, t))
    want = run(problem, inputs)
    where = rng.permutation(v + pad)
    logits = np.concatenate([inputs["logits"], np.full((n, pad), -np.inf, inputs["logits"].dtype)], axis=1)
    moved = {"logits": logits[:, np.argsort(where)], "tokens": where[inputs["tokens"]]}
    got = run(problem.model_copy(update={"v": v + pad}), inputs | moved)
    for name in want:
        assert_same_bits(got[name], want[name], name)


# --- random numbers --------------------------------------------------------------------------------------------------

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_known_answers(counter, key, want):
    assert philox(np.array([counter]), np.array([key]))[0].tolist() == want
    number = counter[0] << 32 | counter[0]
    assert oracle.philox_words((number, number), number) == want
    signed = np.array([0 if not counter[0] else -1])
    assert int(draws(signed, signed, signed)[0]) == want[1] << 32 | want[0]


def fits(tokens, probabilities):
    """Whether counts of tokens are as probable as their probabilities say; wrong in one of 10^9 cases."""
    counts, n = np.bincount(tokens, minlength=len(probabilities)), len(tokens)
    assert not counts[probabilities == 0].any()
    rare = probabilities * n < 10  # one bin
    want = np.append(probabilities[~rare], probabilities[rare].sum()) * n
    seen = np.append(counts[~rare], counts[rare].sum())
    want, seen = (want[:-1], seen[:-1]) if want[-1] < 10 else (want, seen)
    return ((seen - want) ** 2 / want).sum() < chi2.isf(1e-9, len(want) - 1)


@pytest.mark.parametrize("varied", ["seed", "sequence", "position"])
def test_tokens_are_as_frequent_as_their_weights(varied):
    rng = fresh(varied)
    n, v = 20_000, 300
    x, temperature = (2 * rng.standard_normal(v)).astype(F32), rng.uniform(0.5, 2)
    given = {"seed": 5, "sequence": 7, "position": 9, varied: rng.integers(-(2**62), 2**62) + np.arange(n)}
    tokens = sampled_tokens(np.broadcast_to(x, (n, v)), temperature=temperature, **given)
    p = np.exp((x - x.max()) / temperature)
    assert fits(tokens, p / p.sum())
    assert not fits(tokens, np.roll(p, 1) / p.sum())


@pytest.mark.parametrize(
    ("x", "given", "allowed"),
    [
        ([1, 3, 2, 3, 0, 3], {"top_k": 2}, [1, 3]),  # of equal ones the first
        ([1, 3, 2, 3, 0, 3], {"top_k": 4}, [1, 2, 3, 5]),
        ([1, 3, 2, 3, 0, 3], {"top_k": 0}, [0, 1, 2, 3, 4, 5]),
        ([1, 3, 2, 3, 0, 3], {"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ([1, 3, 2, 3, 0, 3], {"top_k": -1}, [0, 1, 2, 3, 4, 5]),
        ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1]),  # the sum of those before the third is not below the limit
        ([0, 0, 0, 0], {"top_p": 0.5001}, [0, 1, 2]),
        ([0, 0, 0, 0], {"top_p": 1}, [0, 1, 2, 3]),
        ([0, 0, 0, 0], {"top_p": 1 - 2**-24}, [0, 1, 2, 3]),
        ([0, 0, 0, 0], {"top_p": 0}, [0]),
        ([0, 0, 0, 0], {"top_p": -np.inf}, [0]),
        ([1, 0, 2, 0], {"top_p": 1e-30}, [2]),
        ([0, 0, 0, 0, 0, 0], {"top_k": 4, "top_p": 0.5}, [0, 1]),  # the share of what top-k leaves
        ([0, -np.inf, 0, -100], {"top_k": 4}, [0, 2]),  # nothing has a weight of 0
    ],
)
def test_exactly_the_allowed_tokens_are_drawn(x, given, allowed):
    tokens = sampled_tokens(np.broadcast_to(np.array(x, F32), (3000, len(x))), **given)
    assert sorted(set(tokens.tolist())) == allowed


# --- the ends --------------------------------------------------------------------------------------------------------

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("row", "temperature", "want"),
    [
        ([1, 2, NAN], 1, None),
        ([1, 2, INF], 1, None),
        ([-INF] * 3, 1, None),
        ([3e38, 0, 0], 1e-3, None),  # overflows
        ([-3e38] * 3, 1e-3, None),
        ([1, 2, 3], -1, None),
        ([1, 2, 3], NAN, None),
        ([1, 2, 3], INF, None),
        ([-INF, 5, -INF], 1, 1),
        ([-3e38, 3e38, 0], 1, 1),
        ([1, 2, 3], 0, "greedy"),
        ([1, 3, 3], -0.0, "greedy"),
    ],
)
def test_rows_without_a_distribution_give_nan_and_minus_one(row, temperature, want):
    x, given = np.array([row], F32), np.array([temperature], F32)
    logprob, entropy = at_tokens(x, np.array([[0, 1, 2]]), given)
    token = sampled_tokens(x, temperature=given, top_k=3, top_p=0.99)[0]
    if want == 1:
        assert (token, logprob[0, 1], entropy[0]) == (1, 0, 0)
        return
    assert np.isnan(logprob).all()
    assert np.isnan(entropy).all()
    assert token == (row.index(max(row)) if want == "greedy" else -1)


def test_a_token_outside_of_the_vocabulary_has_no_probability():
    logprob, entropy = at_tokens(np.zeros((1, 4), F32), np.array([[-1, 4, 2**62, -(2**63), 3]]))
    assert np.isnan(logprob[0, :4]).all()
    assert logprob[0, 4] == F32(-math.log(4))
    assert entropy[0] == F32(math.log(4))


def test_a_vocabulary_without_tokens():
    logprob, entropy = at_tokens(np.zeros((2, 0), F32), np.zeros((2, 1), np.int64))
    assert np.isnan([*logprob.ravel(), *entropy]).all()
    assert sampled_tokens(np.zeros((2, 0), F32)).tolist() == [-1, -1]


def test_a_top_p_that_is_nan_gives_minus_one_at_any_temperature():
    assert sampled_tokens(np.zeros((2, 3), F32), temperature=[0, 1], top_p=NAN).tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("kind", "fields", "field", "rule"),
    [
        (ArgmaxDescriptor, {"v": 0}, "v", "be at least 1"),
        (SampleDescriptor, {"v": 2**22 + 1}, "v", "be at most 4194304"),
        (SampleDescriptor, {"n": 2**31 - 1, "v": 5000}, "n", "be less than 1073741824"),
    ],
)
def test_a_problem_that_has_no_meaning_is_refused(kind, fields, field, rule):
    with pytest.raises(InvalidProblem, match=rule) as caught:
        kind(**{"n": 1, "v": 8, "input_element": "f32"} | fields)
    assert caught.value.field == field


def test_a_sum_of_the_largest_weights_does_not_wrap():
    v = 2**22
    logprob, entropy = at_tokens(np.zeros((1, v), F32), np.array([[v - 1]]))
    assert logprob[0, 0] == F32(-math.log(v))
    assert entropy[0] == F32(math.log(v))
    assert 0 <= sampled_tokens(np.zeros((1, v), F32))[0] < v
