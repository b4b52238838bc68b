"""Requantize: 32-bit sums to integer codes, by a multiplier.

Formula
-------
output = clamp(rne(RN(f32(input) * multiplier)) + zero_point, q_min, q_max); RN rounds to f32, rne to the nearest
integer, both with ties to even.

Elements
--------
input s32; output s8, u8; `multiplier` f32; `zero_point` s32.

Units
-----
`multiplier` is output codes per step of `input`.

Errors
------
`InvalidProblem` for `numel` outside [0, 2^63-1]; `q_max` below `q_min` or bounds outside the range of `output_element`;
an argument that is missing, unknown, of another element or shape, or that overlaps an output; a multiplier that is 0 or
not finite.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np

from skuda.kernels.blocks import blocks
from skuda.kernels.launch import Columns, Launch, Leading, Number, Parameter, Pointer, Rows, Step, s32
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.granularity import DATA, Bounded, PerTensor
from skuda.registry import ArgumentSpec, Case, ElementKind, Op, Role

SUMS, CODES = (ElementKind.S32,), (ElementKind.S8, ElementKind.U8)


class RequantizeDescriptor(Bounded, PerTensor):
    """Problem of `requantize`; for `numel` see `PerTensor`.

    Attributes
    ----------
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    input_element : ElementKind
        Element of the sums: s32.
    output_element : ElementKind
        Element of the codes: s8 or u8.
    """

    kernel: ClassVar[str] = "requantize"
    op: Literal["requantize"] = "requantize"
    aux_field: ClassVar[str | None] = "output_element"
    output_element: ElementKind
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", DATA),
        ArgumentSpec("multiplier", Role.SCALE, ElementKind.F32),
        ArgumentSpec("zero_point", Role.ZERO_POINT, ElementKind.S32),
        ArgumentSpec("output", Role.OUTPUT, "output_element", DATA),
    )


@np.errstate(all="ignore")
def reference(problem: RequantizeDescriptor, *, input: Any, multiplier: Any, zero_point: Any, output: Any) -> None:
    """Write `output` by the formula of the module."""
    factor = np.asarray(multiplier, np.float32).reshape(())
    shift = np.asarray(zero_point).reshape(())
    for at in blocks(input.shape):
        steps = np.rint(input[at].astype(np.float32) * factor).astype(np.float64)
        output[at] = affine.clamp_codes(steps, shift, problem.q_min, problem.q_max)


def launch(problem: RequantizeDescriptor, device: Any) -> Launch:
    """Give every thread some elements."""
    grid = (min(-(-problem.numel // 256), 8 * max(device.sm_count, 1)), 1, 1)
    parameters: tuple[Parameter, ...] = (
        *(Pointer("input"), Leading("input"), Pointer("output"), Leading("output")),
        *(Pointer("multiplier"), Number("multiplier", ElementKind.F32)),
        *(Pointer("zero_point"), Number("zero_point", ElementKind.S32)),
        *s32(problem.q_min, problem.q_max),
        *(Rows(), Columns()),
    )
    steps = (Step("requantize", grid, (256, 1, 1), parameters),) if problem.numel else ()
    return Launch(steps, view=("input", "output"))


CASES = tuple(
    Case(RequantizeDescriptor(numel=numel, q_min=low, q_max=high, input_element="s32", output_element=code), values)
    for code, low, high in (("s8", -128, 127), ("u8", 3, 200))
    for numel in (0, 1, 1000)
    for values in ("normal", "special", "ties")
)
SKUS = (
    *cuda_skus(RequantizeDescriptor, __name__, SUMS, CODES, launch=f"{__name__}:launch", summary="one sum at a time"),
    *numpy_skus(RequantizeDescriptor, __name__, SUMS, CODES),
)
OP = Op(RequantizeDescriptor, reference, CASES, SKUS, source="a test of CONTRIBUTING.md")
