"""Amax: the largest magnitude of every row, from which `amax_quantize` makes the row's scale and codes.

Formula
-------
output[n] = max |C(input[n, :])|. NaN is skipped, or with `nonfinite` propagate counts as an infinity; a row without
numbers, or an empty row, gives +0. The maximum is exact in any order, so the maximum over the parts of a row is the
result of the row.

Elements
--------
input f16, bf16, f32, f64; `output` has the compute type C (f64 for f64 data, f32 otherwise).

Units
-----
`output` is in the units of `input`.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; an argument that is missing, unknown, of another element or shape,
or that overlaps an output.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.kernels import nonfinite
from skuda.kernels.blocks import blocks
from skuda.kernels.dtypes import compute_dtype
from skuda.kernels.offers import cuda_skus, element_flags, numpy_skus
from skuda.kernels.quantize.granularity import PerToken
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.vocabulary import Nonfinite

SIZES = ((17, 64), (0, 8), (5, 0), (1, 1), (3, 7), (9, 256), (260, 16), (2, 4096), (7, 1304), (2, 16400), (1, 70008))
"""n, d of the cases: from less than a chunk to more than the registers of a block."""


class AmaxDescriptor(PerToken):
    """Problem of `amax`.

    Attributes
    ----------
    n, d : int
        Rows and columns.
    input_element : ElementKind
        Element of the data.
    nonfinite : Nonfinite
        ``ignore`` (the range of a row skips a NaN) or ``propagate`` (a NaN counts as an infinity).
    """

    kernel: ClassVar[str] = "amax"
    op: Literal["amax"] = "amax"
    input_element: ElementKind
    nonfinite: Nonfinite = Nonfinite.IGNORE
    element_field: ClassVar[str] = "input_element"
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", "n, d"),
        ArgumentSpec("output", Role.OUTPUT, "compute", "n"),
    )


@np.errstate(all="ignore")  # a signalling NaN warns when it is converted
def reference(problem: AmaxDescriptor, *, input: Any, output: Any) -> None:
    """Write `output` by the formula of the module."""
    compute = compute_dtype(problem.input_element)
    output[...] = 0
    for rows, columns in blocks(input.shape):
        magnitudes = np.abs(input[rows, columns].astype(compute))
        magnitudes[np.isnan(magnitudes)] = nonfinite.in_range(problem)
        output[rows] = np.maximum(output[rows], magnitudes.max(axis=1))


def _cases() -> tuple[Case, ...]:
    """Return every element with rows of every length."""
    values: tuple[Values, ...] = ("normal", "special", "infinite", "normal", "zero")
    plan = [(data, size) for size in SIZES for data in FLOATS] + [(data, SIZES[0]) for data in FLOATS]
    made = [
        Case(AmaxDescriptor(n=n, d=d, input_element=data), values[number % len(values)])
        for number, (data, (n, d)) in enumerate(plan)
    ]
    return (*made, *nonfinite.propagating(made[::3]))


CASES = _cases()


def _flags(data: ElementKind, _: ElementKind | None) -> tuple[str, ...]:
    return element_flags(data, ElementKind.S8)


SKUS = (
    *cuda_skus(
        AmaxDescriptor,
        __name__,
        FLOATS,
        launch="skuda.kernels.quantize.amax_launch:amax",
        flags=_flags,
        entry_point="amax_block",
        summary="one read of every row",
    ),
    *numpy_skus(AmaxDescriptor, __name__, FLOATS),
)
OP = Op(AmaxDescriptor, reference, CASES, SKUS, source="the range of dynamic_range, symmetric, per token")
