"""Fill: every element is the value.

Formula
-------
output = value, rounded to the element (nearest, ties to even).

Elements
--------
f16, bf16, f32, f64, s8, u8, s32, s4, u4 (two to a byte, low nibble first, every row starting at a byte).

Units
-----
`value` is in the output's own units.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1]; a value that the element cannot represent (too large, or for integers
not whole); an output that is of another element or shape.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.kernels.blocks import blocks, write
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.op import Case, Op
from skuda.registry.value import Size
from skuda.registry.vocabulary import OpCategory

ELEMENTS = (*FLOATS, *CODES, ElementKind.S32)


class FillDescriptor(Descriptor):
    """Problem of `fill`.

    Attributes
    ----------
    numel : int
        Number of elements.
    output_element : ElementKind
        Element of the output.
    """

    op: Literal["fill"] = "fill"
    category: ClassVar[OpCategory] = OpCategory.UNARY_ELEMENTWISE
    element_field: ClassVar[str] = "output_element"
    numel: Size
    output_element: ElementKind
    signature = (
        ArgumentSpec("value", Role.VALUE, "output_element"),
        ArgumentSpec("output", Role.OUTPUT, "output_element", "numel", flat=True),
    )


def reference(problem: FillDescriptor, *, value: Any, output: Any) -> None:
    """Write `output` by the formula of the module."""
    if not problem.output_element.is_packed:
        output[...] = value
        return
    # A packed output shows only its bytes; `numel` decides whether its last byte holds one element or two.
    columns = problem.numel if output.ndim == 1 else 2 * output.shape[-1]
    for index in blocks((*output.shape[:-1], columns)):
        shape = tuple(at.stop - at.start for at in index)
        write(output, problem.output_element, index, np.full(shape, value, np.int16))


CASES = tuple(
    Case(FillDescriptor(numel=numel, output_element=element))
    for element in ELEMENTS
    for numel in (0, 1, 7, 1000, 140_001)
)
SKUS = (
    *cuda_skus(FillDescriptor, __name__, ELEMENTS, launch="skuda.kernels.elementwise.fill_launch:fill"),
    *numpy_skus(FillDescriptor, __name__, ELEMENTS),
)
OP = Op(FillDescriptor, reference, CASES, SKUS, source="baracuda_kernels fill, as smoothquant.rs uses it")
