"""Sample: a token drawn from the softmax of every row, by temperature, top-k and top-p.

Formula
-------
For each row, z, w and S are those of `skuda.kernels.sampling.weights`: z = RN(logit / temperature), and an integer
weight w for every token. The tokens that may be drawn are a prefix of all in order of z, the largest first, of equal
ones that of the lower index first:
- top-k: the first `top_k`; all for a `top_k` below 1 or at least v. S_k is the sum of their weights.
- top-p: of these the ones that have less than L before them: a sum of weights, L = max(1, floor(RN_f64(f64(top_p)
  f64(S_k)))). All for a `top_p` of at least 1; the first alone for one of at most 0.
S' is the sum of their weights. A random integer R in [0, S') decides: token[n] = the least index i for which the sum of
the weights w[j], j <= i, of tokens that may be drawn is above R. R = floor(r S' / 2^64), and r is the u64 of the first
two words, the low one first, of Philox4x32-10; its key is `seed`, and its counter `position`, then `sequence`, low
words first. So a token has the probability w / S', up to 2^-64, and the result depends only on the row, its parameters
and these three numbers: neither on the batch nor on the order of any sum, because sums of integers are exact.
At temperature 0 the token is that of the largest logit, of equal ones that of the lowest index.
The token is -1, which no embedding has, where there is no distribution: a row with a NaN or plus infinity among its z,
or with nothing but minus infinity, or without tokens; a temperature that is negative, NaN or infinite; a NaN `top_p`,
also at temperature 0.

Gumbel noise would need a random number and two logarithms for each token, and floating-point maxima of sums: here it is
one random number for a row, no logarithm, and probabilities that are quotients of integers.

Elements
--------
logits f16, bf16, f32; temperature and top_p f32; top_k s32; seed, sequence and position s64; token s64 or s32.

Units
-----
The temperature divides logits; `top_p` is a probability; `token` counts columns from 0.

Errors
------
`InvalidProblem` for `n` outside [0, 2^31-1], `v` outside [0, 2^22], 2^31 or more parts of 4096 tokens in all rows; an
argument that is missing, unknown, of another element or shape, or that overlaps an output.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.sampling.drawn import SIZES, data, temperatures
from skuda.kernels.sampling.philox import draws
from skuda.kernels.sampling.weights import (
    CONSTRAINTS,
    ELEMENTS,
    TOKENS,
    LogitsProblem,
    differences,
    integers,
    largest,
    powers,
    scaled,
)
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.vocabulary import OpCategory

Array = npt.NDArray[Any]
NOTHING = -1
"""The token of a row without a distribution."""


class SampleDescriptor(LogitsProblem):
    """Problem of `sample`; for the other fields see `LogitsProblem`.

    Attributes
    ----------
    has_top_k, has_top_p : bool
        Whether rows have a `top_k`, and a `top_p`. Kernels that need neither read a row once less.
    """

    op: Literal["sample"] = "sample"
    category: ClassVar[OpCategory] = OpCategory.RANDOM
    has_top_k: bool = False
    has_top_p: bool = False
    element_field: ClassVar[str] = "input_element"
    signature = (
        ArgumentSpec("logits", Role.INPUT, "input_element", "n, v"),
        ArgumentSpec("temperature", Role.INPUT, ElementKind.F32, "n"),
        ArgumentSpec("top_k", Role.INPUT, ElementKind.S32, "n", when={"has_top_k": (True,)}),
        ArgumentSpec("top_p", Role.INPUT, ElementKind.F32, "n", when={"has_top_p": (True,)}),
        ArgumentSpec("seed", Role.INPUT, ElementKind.S64, "n"),
        ArgumentSpec("sequence", Role.INPUT, ElementKind.S64, "n"),
        ArgumentSpec("position", Role.INPUT, ElementKind.S64, "n"),
        ArgumentSpec("token", Role.OUTPUT, "token_element", "n"),
    )


@np.errstate(all="ignore")  # infinities and NaN are valid here
def reference(problem: SampleDescriptor, *, logits: Any, temperature: Any, token: Any, **rest: Any) -> None:
    """Write `token`."""
    if not problem.v:
        token[:] = NOTHING
        return
    random = draws(rest["seed"], rest["sequence"], rest["position"])
    top_k, top_p = rest.get("top_k"), rest.get("top_p")
    for rows in problem.blocks():
        divisor = temperature[rows]
        greedy = divisor == 0
        z = scaled(logits[rows], np.where(greedy, np.float32(1), divisor))
        m, has = largest(z)
        has &= (divisor >= 0) & (divisor < np.inf)
        w = integers(powers(differences(z, m)))
        if top_p is not None:
            has &= ~np.isnan(top_p[rows])
        for row in np.flatnonzero(has & ~greedy):
            at = rows.start + row
            k = problem.v if top_k is None or top_k[at] < 1 else int(top_k[at])
            p = 1.0 if top_p is None else float(top_p[at])
            _keep(z[row], w[row], k, p)
        sums = w.cumsum(axis=1)
        wanted = [int(r) * int(total) >> 64 for r, total in zip(random[rows], sums[:, -1], strict=True)]
        drawn = (sums > np.array(wanted)[:, None]).argmax(axis=1)
        token[rows] = np.where(has, np.where(greedy, z.argmax(axis=1), drawn), NOTHING)


def _keep(z: Array, w: Array, k: int, p: float) -> None:
    """Set the weights of the tokens of a row that may not be drawn to 0."""
    if k >= len(z) and p >= 1:
        return
    order = np.argsort(-z, kind="stable")
    w[order[k:]] = 0
    if p < 1:
        sums = w[order].cumsum()
        least = max(1, int(np.floor(np.float64(p) * np.float64(sums[-1])))) if p > 0 else 1
        w[order[1:][sums[:-1] >= least]] = 0


def draw(problem: SampleDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw inputs; for ``normal`` values, every row has a distribution."""
    n, v = problem.n, problem.v
    inputs = {"logits": data(problem, values, rng)}
    found = temperatures(n, values, rng)
    inputs["temperature"] = np.where(rng.random(n) < 0.1, np.float32(0), found)
    if problem.has_top_k:
        small = rng.integers(0, np.minimum(v, 50) + 1, n)
        inputs["top_k"] = np.where(rng.random(n) < 0.3, rng.integers(-1, v + 2, n), small).astype(np.int32)
    if problem.has_top_p:
        p = np.where(rng.random(n) < 0.2, rng.choice([0, 1, -1, 2, 1e-30, 1 - 2**-24], n), rng.random(n))
        if values != "normal":
            p = np.where(rng.random(n) < 0.1, rng.choice([np.nan, np.inf, -np.inf], n), p)
        inputs["top_p"] = p.astype(np.float32)
    for name in ("seed", "sequence", "position"):
        some = rng.integers(-(2**63), 2**63, n)
        inputs[name] = np.where(rng.random(n) < 0.5, some, rng.integers(0, 1000, n))
    return inputs


def _cases() -> tuple[Case, ...]:
    """Return every element with rows of every length."""
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero")
    plan = [(size, element) for size in (*SIZES, SIZES[4]) for element in ELEMENTS]
    return tuple(
        Case(
            SampleDescriptor(
                n=n,
                v=v,
                has_top_k=number % 2 == 1,
                has_top_p=number % 8 in (1, 2, 4, 7),
                input_element=element,
                token_element=TOKENS[number % 4 // 2],
            ),
            values[max(number - len(ELEMENTS) + 1, 0) % len(values)],
        )
        for number, ((n, v), element) in enumerate(plan)
    )


CASES = _cases()
SKUS = (
    *cuda_skus(
        SampleDescriptor,
        __name__,
        ELEMENTS,
        constraints=CONSTRAINTS,
        launch="skuda.kernels.sampling.sampling_launch:sample",
        summary="parts of rows: maxima, sums, then the token",
    ),
    *numpy_skus(SampleDescriptor, __name__, ELEMENTS, constraints=CONSTRAINTS),
)
OP = Op(SampleDescriptor, reference, CASES, SKUS, source="Salmon et al., Parallel random numbers, 2011", draw=draw)
