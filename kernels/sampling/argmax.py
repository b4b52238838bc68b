"""Argmax: the index of the largest logit of every row.

Formula
-------
token[n] = the least i with logits[n, i] equal to the largest logit of the row, where minus zero equals plus zero. A NaN
counts as larger than any number: in a row with NaN, token[n] is the least i of one. The result is exact in any order of
evaluation.

Elements
--------
logits f16, bf16, f32; token s64 or s32.

Units
-----
`token` counts columns from 0.

Errors
------
`InvalidProblem` for `n` outside [0, 2^31-1], `v` outside [1, 2^22], 2^31 or more parts of 4096 tokens in all rows; an
argument that is missing, unknown, of another element or shape, or that overlaps an output.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.sampling.drawn import SIZES, data
from skuda.kernels.sampling.weights import CONSTRAINTS, ELEMENTS, TOKENS, LogitsProblem, scaled
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.op import Case, Op, Values
from skuda.registry.vocabulary import OpCategory


class ArgmaxDescriptor(LogitsProblem):
    """Problem of `argmax`; for its fields see `LogitsProblem`. `v` is at least 1."""

    op: Literal["argmax"] = "argmax"
    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    element_field: ClassVar[str] = "input_element"
    signature = (
        ArgumentSpec("logits", Role.INPUT, "input_element", "n, v"),
        ArgumentSpec("token", Role.OUTPUT, "token_element", "n"),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.v < 1:
            self.refuse("v", self.v, "be at least 1: an empty row has no largest logit")
        return self


def reference(problem: ArgmaxDescriptor, *, logits: Any, token: Any) -> None:
    """Write `token`."""
    for rows in problem.blocks():
        token[rows] = scaled(logits[rows], None).argmax(axis=1)


def draw(problem: ArgmaxDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw logits, some of them equal."""
    return {"logits": data(problem, values, rng)}


def _cases() -> tuple[Case, ...]:
    """Return every element with rows of every length."""
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero")
    plan = [(size, element) for size in SIZES if size[1] for element in ELEMENTS]
    return tuple(
        Case(
            ArgmaxDescriptor(n=n, v=v, input_element=element, token_element=TOKENS[number % 4 // 2]),
            values[max(number - len(ELEMENTS) + 1, 0) % len(values)],
        )
        for number, ((n, v), element) in enumerate(plan)
    )


CASES = _cases()
SKUS = (
    *cuda_skus(
        ArgmaxDescriptor,
        __name__,
        ELEMENTS,
        constraints=CONSTRAINTS,
        launch="skuda.kernels.sampling.sampling_launch:argmax",
        summary="parts of rows, then the row",
    ),
    *numpy_skus(ArgmaxDescriptor, __name__, ELEMENTS, constraints=CONSTRAINTS),
)
OP = Op(ArgmaxDescriptor, reference, CASES, SKUS, source="torch.argmax", draw=draw)
