"""Log-softmax at given tokens: their log-probabilities, and the entropy of every row.

Formula
-------
For each row, z, m, c, E, w and S are those of `skuda.kernels.sampling.weights`: integer weights w about 2^40 exp(z -
m), and their exact sum S. l = ln(S / 2^40) is a fixed sequence in f64.
logprob[n, t] = RN_f32(RN_f64(RN_f64(z[token] - m) - l)), where token = tokens[n, t];
entropy[n] = RN_f32(RN_f64(l + RN_f64(f64(A) / f64(S)))), where A is the exact sum of the integers rne(RN_f32(-c E)). S
and A are sums of integers, so results do not depend on the order of the vocabulary, nor on how it is divided among
threads, blocks or ranks. Tokens of minus infinity, as padding of a vocabulary for example, change no bit. Before its
last rounding, a log-probability differs from the exact one of these z by at most b = 1.8e-7 + 2^-24 D1 + 2^-41 v, and
an entropy by at most 2 (1 + D1) b + 2^-23 (D1 + D2); D1 and D2 are the means of m - z and of its square.
NaN: all results of a row that has no distribution: with a NaN or plus infinity among its z, or nothing but minus
infinity, or no token at all; and of one whose temperature is not a positive finite number. Also the log-probability of
a token outside [0, v). That of a token of minus infinity is minus infinity.

Elements
--------
logits f16, bf16, f32; tokens s64 or s32; temperature, logprob and entropy f32.

Units
-----
Natural logarithms. The temperature divides logits.

Errors
------
`InvalidProblem` for `n` outside [0, 2^31-1], `v` outside [0, 2^22], 2^31 or more parts of 4096 tokens in all rows; an
argument that is missing, unknown, of another element or shape, or that overlaps an output.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.sampling.drawn import SIZES, data, temperatures
from skuda.kernels.sampling.weights import (
    CONSTRAINTS,
    ELEMENTS,
    TOKENS,
    LogitsProblem,
    differences,
    integers,
    largest,
    logarithm,
    powers,
    scaled,
)
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Extent
from skuda.registry.vocabulary import OpCategory


class LogProbabilities(NamedTuple):
    """The op's result."""

    logprob: Any
    """Log-probabilities of the given tokens, f32 [n, t]."""
    entropy: Any
    """Entropies of the rows, f32 [n]."""


class LogSoftmaxAtDescriptor(LogitsProblem):
    """Problem of `log_softmax_at`; for the other fields see `LogitsProblem`.

    Attributes
    ----------
    t : int
        Given tokens of each row.
    has_temperature : bool
        Whether logits are divided by a temperature.
    """

    op: Literal["log_softmax_at"] = "log_softmax_at"
    category: ClassVar[OpCategory] = OpCategory.SOFTMAX
    t: Extent
    has_temperature: bool = False
    element_field: ClassVar[str] = "input_element"
    result = LogProbabilities
    signature = (
        ArgumentSpec("logits", Role.INPUT, "input_element", "n, v"),
        ArgumentSpec("tokens", Role.INPUT, "token_element", "n, t"),
        ArgumentSpec("temperature", Role.INPUT, ElementKind.F32, "n", when={"has_temperature": (True,)}),
        ArgumentSpec("logprob", Role.OUTPUT, ElementKind.F32, "n, t"),
        ArgumentSpec("entropy", Role.OUTPUT, ElementKind.F32, "n"),
    )


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(
    problem: LogSoftmaxAtDescriptor,
    *,
    logits: Any,
    tokens: Any,
    logprob: Any,
    entropy: Any,
    temperature: Any = None,
) -> None:
    """Write `logprob` and `entropy`."""
    if not problem.v:
        logprob[:], entropy[:] = np.nan, np.nan
        return
    for rows in problem.blocks():
        divisor = None if temperature is None else temperature[rows]
        z = scaled(logits[rows], divisor)
        m, has = largest(z)
        if divisor is not None:
            has &= (divisor > 0) & (divisor < np.inf)
        c = differences(z, m)
        e = powers(c)
        total = integers(e).sum(axis=1)
        rest = integers(-c * e).sum(axis=1)
        log = np.where(has, logarithm(total), np.nan)
        entropy[rows] = log + rest.astype(np.float64) / total.astype(np.float64)
        token = tokens[rows].astype(np.int64)
        outside = (token < 0) | (token >= problem.v)
        of_token = np.take_along_axis(z, np.where(outside, 0, token), axis=1).astype(np.float64)
        found = of_token - m[:, None] - log[:, None]
        logprob[rows] = np.where(outside, np.nan, found)


def draw(problem: LogSoftmaxAtDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw inputs; for values other than ``normal``, some tokens are outside of the vocabulary."""
    shape, dtype = (problem.n, problem.t), np.dtype(f"i{problem.token_element.bits // 8}")
    tokens = rng.integers(0, max(problem.v, 1), shape).astype(dtype)
    if values != "normal":
        outside = np.array([-1, problem.v, np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        tokens = np.where(rng.random(shape) < 0.2, rng.choice(outside, shape), tokens)
    inputs = {"logits": data(problem, values, rng), "tokens": tokens}
    return inputs | ({"temperature": temperatures(problem.n, values, rng)} if problem.has_temperature else {})


def _cases() -> tuple[Case, ...]:
    """Return every element with rows of every length."""
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero")
    plan = [(size, element) for size in SIZES for element in ELEMENTS]
    return tuple(
        Case(
            LogSoftmaxAtDescriptor(
                n=n,
                v=v,
                t=(3, 1, 40, 0, 2)[number % 5] if number >= len(ELEMENTS) else 3,
                has_temperature=number % 2 == 1,
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
        LogSoftmaxAtDescriptor,
        __name__,
        ELEMENTS,
        constraints=CONSTRAINTS,
        launch="skuda.kernels.sampling.sampling_launch:log_softmax_at",
        summary="parts of rows: maxima, then sums",
    ),
    *numpy_skus(LogSoftmaxAtDescriptor, __name__, ELEMENTS, constraints=CONSTRAINTS),
)
OP = Op(LogSoftmaxAtDescriptor, reference, CASES, SKUS, source="the softmax of a language model", draw=draw)
