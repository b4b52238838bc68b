"""Inputs are drawn by role and element, whatever the arguments of an op are called."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import numpy as np
import pytest
from support import draw, fresh

from skuda.registry import Argument, Case, Descriptor, ElementKind, Op, OpCategory, Role
from skuda.registry.op import Values

COUNT = 20_000


class NamedDescriptor(Descriptor):
    """An op whose data and scales have names and elements of their own."""

    op: Literal["named"] = "named"
    category: ClassVar[OpCategory] = OpCategory.QUANTIZATION
    element_field: ClassVar[str] = "element"
    element: ElementKind
    scale: str
    q_min: int = -8
    q_max: int = 7

    def arguments(self):
        """Return input, a scale, output."""
        return (
            Argument("input", Role.INPUT, (self.element,), (COUNT,), flat=True),
            Argument(self.scale, Role.SCALE, (ElementKind.F32,)),
            Argument("output", Role.OUTPUT, (ElementKind.S8,), (COUNT,), flat=True),
        )


def drawn(values, **fields):
    problem = NamedDescriptor(**fields)
    op = Op(NamedDescriptor, lambda: None, (), (), source="a test")
    return draw(op, Case(problem, values), fresh(values, fields)).inputs


@pytest.mark.parametrize("values", get_args(Values))
@pytest.mark.parametrize("scale", ["scale", "multiplier"])
@pytest.mark.parametrize("element", ["s32", "s8", "f32", "f16"])
def test_every_kind_of_values_is_drawn_for_every_element_and_name(element, scale, values):
    inputs = drawn(values, element=element, scale=scale)
    assert inputs.keys() == {"input", scale}
    assert inputs["input"].size == COUNT


def test_s32_inputs_cover_the_whole_range_in_every_magnitude():
    data = drawn("normal", element="s32", scale="multiplier")["input"].astype(np.int64)
    assert (data.min(), data.max()) == (-(2**31), 2**31 - 1)
    magnitudes = np.frexp(np.abs(data).astype(np.float64))[1]
    assert set(magnitudes.reshape(-1).tolist()) >= set(range(1, 32))
