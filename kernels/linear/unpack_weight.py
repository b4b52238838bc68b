"""Unpack weight: the 8-bit codes of a weight that `pack_weight` made.

Formula
-------
output[n, k] = step[n, g] level[n, k] + least[n, g], exactly, with levels, steps and least codes as
`skuda.kernels.linear.packed` finds them in the bytes; g is k // group_size. In bytes that no packing makes,
b = step level + least + 128 may be above 255: four codes, from a multiple of four on, are one integer, the sum of
256^i b[i], modulo 2^32, and code i is its byte i less 128.

Elements
--------
packed u8, output s8.

Units
-----
`output` has the units of the codes w of `pack_weight`.

Errors
------
`InvalidProblem` for `n` or `k` outside [0, 2^31-1]; a `group_size` other than 32, 64 and 128; an argument that is
missing, unknown, of another element or shape, or that overlaps an output. Whole rows are packed as groups of 128.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from skuda.kernels.linear.pack_weight import INTEGERS, SIZES, drawn
from skuda.kernels.linear.packed import GROUP_SIZES, packed, parts_of, shape_of, unpacked
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Extent, Integer
from skuda.registry.vocabulary import OpCategory

_ELEMENTS = (ElementKind.S8,)


class UnpackWeightDescriptor(Descriptor):
    """Problem of `unpack_weight`.

    Attributes
    ----------
    n, k : int
        Rows and columns of the weight; its packed bytes do not tell them.
    group_size : int
        Elements of a row that share a scale and an offset in the packed weight: 32, 64 or 128.
    output_element : ElementKind
        Element of the codes: s8.
    """

    op: Literal["unpack_weight"] = "unpack_weight"
    category: ClassVar[OpCategory] = OpCategory.SHAPE_LAYOUT
    element_field: ClassVar[str] = "output_element"
    n: Extent
    k: Extent
    group_size: Integer
    output_element: ElementKind = ElementKind.S8
    signature = (
        ArgumentSpec("packed", Role.INPUT, ElementKind.U8, "*packed_shape"),
        ArgumentSpec("output", Role.OUTPUT, "output_element", "n, k"),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.group_size not in GROUP_SIZES:
            self.refuse("group_size", self.group_size, "be 32, 64 or 128, which also stands for whole rows")
        return self

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight."""
        return shape_of(self.n, self.k, self.group_size)


def reference(problem: UnpackWeightDescriptor, *, packed: Any, output: Any) -> None:
    """Write `output`."""
    for index, (rows, columns) in parts_of(problem.n, problem.k):
        output[rows, columns] = unpacked(packed[index], rows.stop - rows.start, columns.stop - columns.start)


def draw(problem: UnpackWeightDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw a packed weight; for values other than ``normal``, any bytes."""
    if values == "zero":
        return {"packed": np.zeros(problem.packed_shape, np.uint8)}
    if values != "normal":
        return {"packed": rng.integers(0, 256, problem.packed_shape, np.uint8)}
    size = problem.group_size
    return {"packed": packed(*drawn((problem.n, problem.k), -(-problem.k // size), size, rng), size)}


def _cases() -> tuple[Case, ...]:
    """Return every size of groups, over weights of every remainder."""
    values: tuple[Values, ...] = ("normal", "special")
    return tuple(
        Case(UnpackWeightDescriptor(n=n, k=k, group_size=group), values[number % 2])
        for number, ((n, k), group) in enumerate((size, group) for size in SIZES for group in GROUP_SIZES)
    )


CASES = _cases()
SKUS = (
    *cuda_skus(
        UnpackWeightDescriptor,
        __name__,
        _ELEMENTS,
        launch="skuda.kernels.linear.pack_launch:unpack_weight",
        guarantee=lambda *_: INTEGERS,
        variant="blocks",
        summary="a block of 16 x 128 codes per warp",
    ),
    *numpy_skus(UnpackWeightDescriptor, __name__, _ELEMENTS, precision_guarantee=INTEGERS),
)
OP = Op(UnpackWeightDescriptor, reference, CASES, SKUS, source="the layout of skuda.kernels.linear.packed", draw=draw)
