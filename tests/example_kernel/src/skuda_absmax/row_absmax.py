"""Row absmax: the largest magnitude in every row, which calibration divides by.

Formula
-------
output[n] = max over d of |input[n, d]|, exactly; NaN is skipped, and a row without a number gives 0.

Elements
--------
input f32, f16, bf16; output f32.

Units
-----
`output` is in the units of `input`.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; an argument that is missing, unknown, of another element or shape,
or that overlaps the output.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.dispatch import Constant, Device, Launch, Leading, Pointer, Step, cuda_skus, numpy_skus
from skuda.registry import ArgumentSpec, Case, Descriptor, ElementKind, Extent, Op, OpCategory, Role

ELEMENTS = (ElementKind.F32, ElementKind.F16, ElementKind.BF16)


class RowAbsmaxDescriptor(Descriptor):
    """Problem of `row_absmax`.

    Attributes
    ----------
    n, d : int
        Rows and columns.
    input_element : ElementKind
        Element of the input.
    """

    op: Literal["row_absmax"] = "row_absmax"
    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    element_field: ClassVar[str] = "input_element"
    n: Extent
    d: Extent
    input_element: ElementKind
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", "n, d"),
        ArgumentSpec("output", Role.OUTPUT, ElementKind.F32, "n"),
    )


def reference(problem: RowAbsmaxDescriptor, *, input: Any, output: Any) -> None:
    """Write `output`; see the module."""
    output[...] = np.fmax.reduce(np.abs(input.astype(np.float32)), axis=1, initial=0)


def launch(problem: RowAbsmaxDescriptor, device: Device) -> Launch:
    """Give every row a block, as many as fill the card a few times."""
    rows, columns = (Constant(ElementKind.S64, size) for size in (problem.n, problem.d))
    parameters = (Pointer("input"), Leading("input"), Pointer("output"), rows, columns)
    grid = (min(problem.n, 8 * max(device.sm_count, 1)), 1, 1)
    return Launch((Step("row_absmax", grid, (256, 1, 1), parameters),))


CASES = tuple(
    Case(RowAbsmaxDescriptor(n=n, d=d, input_element=element), values)
    for element in ELEMENTS
    for n, d, values in (
        (0, 3, "normal"),
        (3, 0, "normal"),
        (1, 1, "normal"),
        (5, 257, "special"),
        (40, 1000, "normal"),
    )
)
SKUS = (
    *cuda_skus(
        RowAbsmaxDescriptor, __name__, ELEMENTS, launch=f"{__name__}:launch", variant="rows", summary="a block per row"
    ),
    *numpy_skus(RowAbsmaxDescriptor, __name__, ELEMENTS),
)
OP = Op(RowAbsmaxDescriptor, reference, CASES, SKUS, source="an example")
