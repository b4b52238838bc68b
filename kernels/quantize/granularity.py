"""Which elements share a scale and a zero point: per tensor, per channel, per token or per group.

A descriptor of the affine family combines one granularity with one direction: ``QuantizePerGroupDescriptor`` is
`PerGroup` and `Quantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from skuda.kernels.blocks import Index
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.value import Extent, Int32, Integer, Size
from skuda.registry.vocabulary import OpCategory, Scaling

Spread = Callable[[Any, Index], Any]
"""Maps (scale or zero point, box of the data) to values that broadcast against the box."""


def per_tensor(values: Any, index: Index) -> Any:  # noqa: ARG001  a `Spread`
    """Spread one value over all elements."""
    return values


def per_channel(axis: int) -> Spread:
    """Spread one value per index along `axis`."""

    def spread(values: npt.NDArray[Any], index: Index) -> npt.NDArray[Any]:
        return values[index[axis]].reshape((-1, *(1,) * (len(index) - axis - 1)))

    return spread


per_token = per_channel(0)


def per_group(size: int) -> Spread:
    """Spread one value per run of `size` elements along the last of two axes."""

    def spread(values: npt.NDArray[Any], index: Index) -> npt.NDArray[Any]:
        rows, columns = index
        return np.asarray(values[rows][:, np.arange(columns.start, columns.stop) // size])

    return spread


def bounds_of_case(code: ElementKind, number: int, *, raised: bool) -> tuple[int, int]:
    """Return ``q_min`` and ``q_max`` of an op's case, by its number if the codes have 16 bits.

    Others have the range of `code`, less its first value if `raised`.
    """
    if code.is_split:
        return ((-32_639, 32_639), (-300, 32_639), (-128, 32_000))[number % 7 % 3]
    low, high = code.integer_range or (0, 0)
    return low + raised, high


class Granularity(NamedTuple):
    """How data divide into segments, each with one scale and one zero point.

    Attributes
    ----------
    shape : tuple of int
        Shape of the data in elements.
    segments : tuple of int
        Shape of an array of scales or zero points.
    spread : callable
        How such an array spreads over the data.
    segmentation : (int, int) or None
        (inner, channels): element e of the flattened data has segment (e // inner) % channels; None per tensor.
    """

    shape: tuple[int, ...]
    segments: tuple[int, ...]
    spread: Spread
    segmentation: tuple[int, int] | None = None


DATA, SEGMENTS = "data", "segments"
"""What a direction declares as the axes of its data and of its scales. A granularity says which axes these are."""

SCALE = ArgumentSpec("scale", Role.INPUT, "scale_elements", SEGMENTS)
ZERO_POINT = ArgumentSpec("zero_point", Role.INPUT, ElementKind.S32, SEGMENTS)
STATIC_SCALE = (
    ArgumentSpec("scale", Role.SCALE, "scale_elements", when={"scaling": (Scaling.STATIC,)}),
    ArgumentSpec("zero_point", Role.ZERO_POINT, ElementKind.S32, when={"scaling": (Scaling.STATIC,)}),
)
"""One given scale and zero point of an op that may also find scales itself."""


class AffineProblem(Descriptor):
    """The base of granularities and directions.

    Attributes
    ----------
    kernel : str
        Name of the direction: its ``.cu`` and the kernels in it have this name.
    data_axes, segment_axes : str
        Axes of the granularity, in place of `DATA` and `SEGMENTS`.
    """

    category: ClassVar[OpCategory] = OpCategory.QUANTIZATION
    kernel: ClassVar[str]
    data_axes: ClassVar[str] = DATA
    segment_axes: ClassVar[str] = SEGMENTS

    @classmethod
    def declared(cls) -> tuple[ArgumentSpec, ...]:
        """Return the signature with the axes of the granularity."""
        axes = {DATA: cls.data_axes, SEGMENTS: cls.segment_axes}
        return tuple(replace(each, axes=axes.get(each.axes, each.axes)) for each in cls.signature)

    @property
    def granularity(self) -> Granularity:
        """How the data divide into segments."""
        raise NotImplementedError

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the data in elements."""
        return self.granularity.shape

    @property
    def data_element(self) -> ElementKind:
        """Element of the floating data."""
        element: ElementKind = getattr(self, self.element_field)
        return element

    @property
    def compute(self) -> ElementKind:
        """The compute type C."""
        return self.data_element.compute

    @property
    def scale_elements(self) -> tuple[ElementKind, ...]:
        """The compute type C, or the data's own element, which is widened."""
        data = self.data_element
        return tuple(dict.fromkeys((data.compute, data)))

    def check_bounds(self, q_min: int, q_max: int, code: ElementKind | None) -> None:
        """Refuse bounds that are out of order or, where `code` is given, outside its range."""
        if q_max < q_min:
            self.refuse("q_max", q_max, f"be at least q_min = {q_min}")
        limits = code.integer_range if code is not None else None
        if limits is None:
            return
        for field, value in (("q_min", q_min), ("q_max", q_max)):
            if not limits[0] <= value <= limits[1]:
                self.refuse(field, value, f"lie in [{limits[0]}, {limits[1]}], the range of {code}")


class Bounded(AffineProblem):
    """A direction that clamps codes to [q_min, q_max], and whose floating data are its input."""

    q_min: Int32
    q_max: Int32
    input_element: ElementKind
    element_field: ClassVar[str] = "input_element"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        self.check_bounds(self.q_min, self.q_max, getattr(self, "output_element", None))
        return self


class PerTensor(AffineProblem):
    """One scale and zero point for everything.

    Attributes
    ----------
    numel : int
        Number of elements; arrays may have any shape with that many.
    """

    data_axes: ClassVar[str] = "numel"
    segment_axes: ClassVar[str] = ""
    numel: Size

    @classmethod
    def declared(cls) -> tuple[ArgumentSpec, ...]:
        """Return the signature with data of any shape, and with numbers as scale and zero point."""
        numbers = {"scale": Role.SCALE, "zero_point": Role.ZERO_POINT}
        return tuple(
            replace(each, flat=each.axes == cls.data_axes, role=numbers.get(each.name, each.role))
            for each in super().declared()
        )

    @property
    def granularity(self) -> Granularity:
        """One segment for all elements."""
        return Granularity((self.numel,), (), per_tensor)


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

    data_axes: ClassVar[str] = "*shape"
    segment_axes: ClassVar[str] = "channels"
    shape: Annotated[tuple[Extent, ...], Field(min_length=1)]
    axis: Integer

    @model_validator(mode="after")
    def _resolve_axis(self) -> Self:
        rank = len(self.shape)
        if not -rank <= self.axis < rank:
            self.refuse("axis", self.axis, f"lie in [{-rank}, {rank - 1}] for rank {rank}")
        if math.prod(self.shape) >= 2**63:
            self.refuse("shape", self.shape, "hold fewer than 2^63 elements")
        # Normalized: axis -1 and the last axis describe the same problem.
        object.__setattr__(self, "axis", self.axis % rank)
        return self

    @property
    def channels(self) -> int:
        """Size of the channel axis."""
        return self.shape[self.axis]

    @property
    def granularity(self) -> Granularity:
        """One segment per channel."""
        inner = math.prod(self.shape[self.axis + 1 :])
        return Granularity(self.shape, (self.channels,), per_channel(self.axis), (inner, self.channels))


class PerToken(_Segmented):
    """One scale and zero point per row of [n, d].

    Attributes
    ----------
    n : int
        Rows.
    d : int
        Columns.
    """

    data_axes: ClassVar[str] = "n, d"
    segment_axes: ClassVar[str] = "n"
    n: Extent
    d: Extent

    @property
    def granularity(self) -> Granularity:
        """One segment per row."""
        return Granularity((self.n, self.d), (self.n,), per_token, (self.d, self.n))


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

    data_axes: ClassVar[str] = "outer_size, axis_size"
    segment_axes: ClassVar[str] = "outer_size, num_groups"
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
    def granularity(self) -> Granularity:
        """One segment per group."""
        segments = (self.outer_size, self.num_groups)
        shape, segmentation = (self.outer_size, self.axis_size), (self.group_size, math.prod(segments))
        return Granularity(shape, segments, per_group(self.group_size), segmentation)
