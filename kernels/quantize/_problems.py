"""What the affine descriptors are made of: four granularities and six directions, each stated once.

A descriptor class is one of each, so that ``QuantizePerGroupDescriptor`` is ``PerGroup`` plus ``Quantize``.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from skuda.kernels.quantize import _affine
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.registry.elements import ElementKind
from skuda.registry.value import Extent, Int32, Integer, Size
from skuda.registry.vocabulary import OpCategory


def scale_elements(data: ElementKind) -> tuple[ElementKind, ...]:
    """Elements accepted for scales of `data`: the compute type, or the data's own, which is widened."""
    return tuple(dict.fromkeys((data.compute, data)))


class AffineProblem(Descriptor):
    """What granularities and directions have in common."""

    category: ClassVar[OpCategory] = OpCategory.QUANTIZATION
    flat: ClassVar[bool] = False

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data in elements."""
        raise NotImplementedError

    def segments(self, data: ElementKind) -> tuple[Argument, Argument]:
        """Return the arguments ``scale`` and ``zero_point`` for data of element `data`."""
        raise NotImplementedError

    def spread(self) -> _affine.Spread:
        """Return how a scale array spreads over the data."""
        raise NotImplementedError

    def _data(self, name: str, role: Role, element: ElementKind) -> Argument:
        return Argument(name, role, (element,), self.data_shape, flat=self.flat)

    def _check_range(self, q_min: int, q_max: int, code: ElementKind | None) -> None:
        if q_max < q_min:
            self.refuse("q_max", q_max, f"be at least q_min = {q_min}")
        limits = code.integer_range if code is not None else None
        if limits is None:
            return
        for field, value in (("q_min", q_min), ("q_max", q_max)):
            if not limits[0] <= value <= limits[1]:
                self.refuse(field, value, f"lie in [{limits[0]}, {limits[1]}], the range of {code}")


def _segment_arguments(shape: tuple[int, ...], data: ElementKind) -> tuple[Argument, Argument]:
    return (
        Argument("scale", Role.INPUT, scale_elements(data), shape),
        Argument("zero_point", Role.INPUT, (ElementKind.S32,), shape),
    )


class PerTensor(AffineProblem):
    """One scale and zero point for everything.

    Attributes
    ----------
    numel : int
        Number of elements; arrays may have any shape with that many.
    """

    numel: Size
    flat: ClassVar[bool] = True

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data in elements."""
        return (self.numel,)

    def segments(self, data: ElementKind) -> tuple[Argument, Argument]:
        """Return the arguments ``scale`` and ``zero_point``: numbers, or arrays of one element."""
        return (
            Argument("scale", Role.SCALE, scale_elements(data)),
            Argument("zero_point", Role.ZERO_POINT, (ElementKind.S32,)),
        )

    def spread(self) -> _affine.Spread:
        """Return how a scale spreads over the data."""
        return _affine.per_tensor


class _Segmented(AffineProblem):
    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.data_shape)


class PerChannel(_Segmented):
    """One scale and zero point per index along one axis of an array of any rank.

    Attributes
    ----------
    shape : tuple of int
        Shape of the data, without padding.
    axis : int
        The channel axis; negative values count from the end.
    """

    shape: Annotated[tuple[Extent, ...], Field(min_length=1)]
    axis: Integer

    @model_validator(mode="after")
    def _resolve_axis(self) -> Self:
        rank = len(self.shape)
        if not -rank <= self.axis < rank:
            self.refuse("axis", self.axis, f"lie in [{-rank}, {rank - 1}] for rank {rank}")
        if math.prod(self.shape) >= 2**63:
            self.refuse("shape", self.shape, "hold fewer than 2^63 elements")
        # Normalized, so that axis -1 and the axis it means are the same problem.
        object.__setattr__(self, "axis", self.axis % rank)
        return self

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data in elements."""
        return self.shape

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.shape[self.axis]

    def segments(self, data: ElementKind) -> tuple[Argument, Argument]:
        """Return the arguments ``scale`` and ``zero_point``, [channels] each."""
        return _segment_arguments((self.channels,), data)

    def spread(self) -> _affine.Spread:
        """Return how a scale array spreads over the data."""
        return _affine.per_channel(self.axis)


class PerToken(_Segmented):
    """One scale and zero point per row of [n, d].

    Attributes
    ----------
    n : int
        Rows.
    d : int
        Columns.
    """

    n: Extent
    d: Extent

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data in elements."""
        return (self.n, self.d)

    def segments(self, data: ElementKind) -> tuple[Argument, Argument]:
        """Return the arguments ``scale`` and ``zero_point``, [n] each."""
        return _segment_arguments((self.n,), data)

    def spread(self) -> _affine.Spread:
        """Return how a scale array spreads over the data."""
        return _affine.per_token


class PerGroup(_Segmented):
    """One scale and zero point per run of `group_size` along the last axis of [outer_size, axis_size].

    Attributes
    ----------
    outer_size : int
        Rows: the product of the leading axes.
    axis_size : int
        Columns.
    group_size : int
        Elements that share a scale; divides `axis_size`.
    """

    outer_size: Extent
    axis_size: Extent
    group_size: Annotated[Integer, Field(gt=0, lt=2**31)]

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.axis_size % self.group_size:
            self.refuse("axis_size", self.axis_size, f"be a multiple of group_size = {self.group_size}")
        return self

    @property
    def num_groups(self) -> int:
        """Groups per row."""
        return self.axis_size // self.group_size

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data in elements."""
        return (self.outer_size, self.axis_size)

    def segments(self, data: ElementKind) -> tuple[Argument, Argument]:
        """Return the arguments ``scale`` and ``zero_point``, [outer_size, num_groups] each."""
        return _segment_arguments((self.outer_size, self.num_groups), data)

    def spread(self) -> _affine.Spread:
        """Return how a scale array spreads over the data."""
        return _affine.per_group(self.group_size)


class Quantize(AffineProblem):
    """Floating data to integer codes.

    Attributes
    ----------
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    input_element : ElementKind
        Element of the data: f16, bf16, f32 or f64.
    output_element : ElementKind
        Element of the codes: s8, u8, s4 or u4.
    """

    q_min: Int32
    q_max: Int32
    input_element: ElementKind
    output_element: ElementKind
    element_field: ClassVar[str] = "input_element"
    aux_field: ClassVar[str | None] = "output_element"

    @model_validator(mode="after")
    def _range(self) -> Self:
        self._check_range(self.q_min, self.q_max, self.output_element)
        return self

    def arguments(self) -> tuple[Argument, ...]:
        """Return input, scale, zero_point, output."""
        return (
            self._data("input", Role.INPUT, self.input_element),
            *self.segments(self.input_element),
            self._data("output", Role.OUTPUT, self.output_element),
        )


class QuantizeBackward(AffineProblem):
    """Straight-through gradient of `Quantize`.

    Attributes
    ----------
    q_min, q_max : int
        The forward's bounds.
    input_element : ElementKind
        Element of the forward's input and of the gradients.
    output_element : ElementKind or None
        The forward's; when given, the bounds are checked against it. It does not change the result.
    """

    q_min: Int32
    q_max: Int32
    input_element: ElementKind
    output_element: ElementKind | None = None
    element_field: ClassVar[str] = "input_element"
    in_place: ClassVar[bool] = True

    @model_validator(mode="after")
    def _range(self) -> Self:
        self._check_range(self.q_min, self.q_max, self.output_element)
        return self

    def arguments(self) -> tuple[Argument, ...]:
        """Return d_output, input, scale, zero_point, d_input."""
        return (
            self._data("d_output", Role.INPUT, self.input_element),
            self._data("input", Role.INPUT, self.input_element),
            *self.segments(self.input_element),
            self._data("d_input", Role.OUTPUT, self.input_element),
        )


class Dequantize(AffineProblem):
    """Integer codes to floating data.

    Attributes
    ----------
    input_element : ElementKind
        Element of the codes: s8, u8, s4 or u4.
    output_element : ElementKind
        Element of the data: f16, bf16, f32 or f64.
    """

    input_element: ElementKind
    output_element: ElementKind
    element_field: ClassVar[str] = "output_element"
    aux_field: ClassVar[str | None] = "input_element"

    def arguments(self) -> tuple[Argument, ...]:
        """Return input, scale, zero_point, output."""
        return (
            self._data("input", Role.INPUT, self.input_element),
            *self.segments(self.output_element),
            self._data("output", Role.OUTPUT, self.output_element),
        )


class DequantizeBackward(AffineProblem):
    """Gradient of `Dequantize` with respect to the codes, as if they were real numbers.

    Attributes
    ----------
    input_element : ElementKind or None
        The forward's; it does not change the result.
    output_element : ElementKind
        Element of the gradients.
    """

    input_element: ElementKind | None = None
    output_element: ElementKind
    element_field: ClassVar[str] = "output_element"
    in_place: ClassVar[bool] = True

    def arguments(self) -> tuple[Argument, ...]:
        """Return d_output, scale, d_input."""
        scale, _ = self.segments(self.output_element)
        return (
            self._data("d_output", Role.INPUT, self.output_element),
            scale,
            self._data("d_input", Role.OUTPUT, self.output_element),
        )


class _Fake(AffineProblem):
    """What both directions of fake quantization have in common."""

    q_min: Int32
    q_max: Int32
    input_element: ElementKind
    element_field: ClassVar[str] = "input_element"
    in_place: ClassVar[bool] = True

    @model_validator(mode="after")
    def _range(self) -> Self:
        self._check_range(self.q_min, self.q_max, None)
        return self


class FakeQuantize(_Fake):
    """Quantize and dequantize without leaving floating point.

    Attributes
    ----------
    q_min, q_max : int
        Bounds of the codes, inclusive; any s32 integers, since no code is stored.
    input_element : ElementKind
        Element of input and output: f16, bf16, f32 or f64.
    """

    def arguments(self) -> tuple[Argument, ...]:
        """Return input, scale, zero_point, output."""
        return (
            self._data("input", Role.INPUT, self.input_element),
            *self.segments(self.input_element),
            self._data("output", Role.OUTPUT, self.input_element),
        )


class FakeQuantizeBackward(_Fake):
    """Straight-through gradient of `FakeQuantize`.

    Attributes
    ----------
    q_min, q_max : int
        The forward's bounds.
    input_element : ElementKind
        Element of the forward's input and of the gradients.
    """

    def arguments(self) -> tuple[Argument, ...]:
        """Return d_output, input, scale, zero_point, d_input."""
        return (
            self._data("d_output", Role.INPUT, self.input_element),
            self._data("input", Role.INPUT, self.input_element),
            *self.segments(self.input_element),
            self._data("d_input", Role.OUTPUT, self.input_element),
        )
