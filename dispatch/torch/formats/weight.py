"""`WeightFormat`: how the weight of a layer lies in memory and in files. All that depends on it is here.

A layer holds a weight of shape (N, K) as a tensor of codes, in a form of the format's own, and one f32 scale for each
output channel, (N, 1). A code stands for an integer of 8 or 16 bits, and the weight is that integer times the scale.

`docs/format.md` shows how a format is added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor

from skuda.kernels.linear import packed
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats.reading import ConfigFields, Tensors

if TYPE_CHECKING:
    from skuda.torch.formats.feedback import Moments

Axis = Literal["n", "k"]


class CodedWeight(NamedTuple):
    """The weight of a layer.

    Attributes
    ----------
    codes : tensor
        In the form of a format.
    scale : tensor of shape (N,) or (N, 1), f32
        Real units per code of each output channel.
    k : int
        K.
    """

    codes: Tensor
    scale: Tensor
    k: int


class Difference(NamedTuple):
    """How far a layer is from its file.

    Attributes
    ----------
    largest, mean : float
        The largest difference of an element of the weight, and the root mean square of all, over that of the elements.
    weights_only : bool
        Whether activations are floats there, and have 8 bits here.
    """

    largest: float = 0.0
    mean: float = 0.0
    weights_only: bool = False

    @classmethod
    def of(cls, errors: Tensor, squares: Tensor, whole: Tensor, count: int) -> Self:
        """Return it, given differences, squares of all, those of the file's elements, and how many there are."""
        total, square = (float(each.sum(dtype=torch.float64)) for each in (whole, squares))
        return cls(float(errors.amax()) / sqrt(total / count), sqrt(square / total)) if total else cls()


class StoredWeight(ABC):
    """How the file of a checkpoint holds the weights of a group of layers, as the config of the file says. A value."""

    method: ClassVar[str | None] = None
    """The config's ``quant_method``, if all its fields are about weights. Tensors `qweight` then name the layers."""
    own: ClassVar[bool] = False
    """Whether only skuda reads such a file."""
    converts: ClassVar[bool] = False
    """Whether the tensors in the file are others than those of a layer."""
    dynamic: ClassVar[bool] = False
    """Whether the scales of activations must be dynamic."""
    beside: ClassVar[tuple[int, ...]] = (8, 16)
    """The bits that dynamic activations may have."""
    name: ClassVar[str]
    """The name of the format of the weights."""
    group_size: int | None = None
    """Elements of K with one scale of their own, for formats that have groups."""
    file_formats: ClassVar[tuple[str, ...]]
    """What the config's ``format`` may be."""

    @property
    def file_format(self) -> str:
        """The config's ``format``."""
        return self.file_formats[0]

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the fields of the config's ``weights``."""

    @classmethod
    @abstractmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> Self | None:
        """Take the fields of a config's ``weights``; or return None, and take nothing, if they are of another kind.

        Raises
        ------
        InvalidRecord
            For a field with a meaning that skuda does not know. The error names it.
        """

    @abstractmethod
    def read(
        self, found: Tensors, shape: tuple[int, int], approximate: str | None = None
    ) -> tuple[Tensor, Tensor, Difference]:
        """Read the weight of a layer.

        Parameters
        ----------
        found : Tensors
            The layer's tensors, read as copies. All that belong to the weight are taken.
        shape : tuple of int
            N and K.
        approximate : str, optional
            The format, ``"int4"`` or ``"int8"``, of a weight that no layer holds exactly.

        Returns
        -------
        codes : tensor
            In the form of the format of a layer.
        scale : tensor of shape (N, 1)
        difference : Difference
            0 where the weight is that of the file.

        Raises
        ------
        InvalidRecord
            For a tensor that is missing, or has another dtype, shape or range; and, without `approximate`, for a weight
            that no layer holds exactly.
        """


class WeightFormat(ABC):
    """The form of the codes of a weight. Formats are values: equal ones have the same form.

    The codes of some output channels, or of some elements of K, are part of those of the whole weight: a view of them.
    """

    name: ClassVar[str]
    """Its name in configs: ``weights`` of `skuda.torch.Dynamic`."""
    dtype: ClassVar[torch.dtype]
    """Dtype of the codes."""
    element: ClassVar[ElementKind]
    """``weight_element`` of the ops for what `operand` returns."""
    fields: ClassVar[Mapping[str, str]] = {}  # torch's compiler takes a dict
    """The fields of a layer's op that its tensors do not show."""
    units: ClassVar[Mapping[str, int]] = MappingProxyType({"n": 1, "k": 1})
    """How many output channels, and elements of K, can only be cut together."""
    k_axis: ClassVar[int] = 1
    """The axis of the codes along which K lies. Output channels are axis 0."""
    even: ClassVar[int] = 1
    """What the lengths of parts are multiples of, along both axes, where nobody chooses them."""
    files: ClassVar[tuple[type[StoredWeight], ...]]
    """The ways in which files hold such weights."""
    group_size: int | None = None
    """Elements of K with one scale of their own, for formats that have groups."""
    calibrated: ClassVar[bool] = False
    """Whether `quantize` takes ``moments``, those of the layer's inputs."""

    @classmethod
    @abstractmethod
    def of(cls, codes: Tensor, n: int, k: int | None) -> Self | None:
        """Return the format of codes, given their shape and dtype, or None if they are not of this one.

        `k` is None if only the codes can tell it.
        """

    @classmethod
    @abstractmethod
    def wanted(cls, n: int, k: int | None) -> str:
        """Say in words what `of` takes, for errors."""

    @classmethod
    @abstractmethod
    def layout(cls, subject: str, group_size: object, *, symmetric: bool) -> Self:
        """Return the format of what `quantize` makes with these options.

        Raises
        ------
        InvalidProblem
            For options that it does not have. 128 and False are the defaults.
        """

    @classmethod
    @abstractmethod
    def quantize(cls, weight: Tensor, group_size: int = 128, *, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        """Return the codes, and the scales (N,), f32, of a weight (N, K), f16, bf16 or f32.

        Raises
        ------
        InvalidProblem
            If the weight is not a finite matrix of such a dtype, or for options that `layout` refuses.
        """

    @abstractmethod
    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return the shape of the codes."""

    @abstractmethod
    def integers(self, codes: Tensor, n: int, k: int) -> Tensor:
        """Return what the codes stand for, s8 or s16 of shape (N, K)."""

    def operand(self, codes: Tensor, n: int, k: int) -> Tensor:  # noqa: ARG002  for formats that kernels do not read
        """Return the tensor that the ops take: the codes themselves, if kernels read them.

        Another tensor must differ from the codes in its shape or dtype. It is made again in every call.
        """
        return codes

    def sizes(self, n: int) -> dict[str, int]:  # noqa: ARG002  for formats that have units
        """Return the fields of an op of sums that its tensors do not show, but for `fields`."""
        return {}

    def shape_of_weight(self, codes: Tensor, n: int, k: int | None) -> tuple[int, int]:  # noqa: ARG002  for units
        """Return N and K, given them as `of` gets them."""
        assert k is not None
        return n, k

    def join(self, codes: Sequence[Tensor]) -> Tensor:
        """Return the codes of weights one after the other along N. All but the last have whole units."""
        return torch.cat(list(codes))

    def cut(self, codes: Tensor, axis: Axis, start: int, stop: int) -> Tensor:
        """Return the codes of some output channels, or elements of K: a view.

        Raises
        ------
        InvalidProblem
            For ends that are within a unit, or outside.
        """
        return cast("Tensor", packed.cut(codes, axis, start, stop, self.units))

    def fits(self, axis: Axis, sizes: Sequence[int]) -> bool:
        """Return whether `cut` gives consecutive parts of these lengths, which add up to the whole axis."""
        return packed.fits(axis, sizes, self.units)

    def lengths(self, axis: Axis, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of parts of the codes for lengths in output channels or elements of K."""
        return tuple(-(-size // self.units[axis]) for size in sizes)

    def per_row(self, codes: Tensor) -> bool:  # noqa: ARG002  for formats with groups
        """Whether the weight was quantized with one group a row, though the format has smaller ones."""
        return False

    def text(self) -> str:
        """Return what the representation of a layer says about its weight, with a comma in front; or nothing."""
        return ""

    @abstractmethod
    def stored(self) -> StoredWeight:
        """Return how a file holds the tensors of a layer as they are."""

    @classmethod
    def stored_for_others(
        cls,
        weights: Mapping[str, CodedWeight],  # noqa: ARG003  for formats whose own form only skuda reads
    ) -> Mapping[str, tuple[Mapping[str, Tensor], StoredWeight]] | None:
        """Return the tensors of weights, by layer, in a form that other projects read, and how the file holds them.

        None if there is no such form that is read as the same bits.
        """
        return None


FORMATS: dict[str, type[WeightFormat]] = {}
"""The formats by name. `register_format` adds one."""


def register_format(kind: type[WeightFormat]) -> None:
    """Add a format.

    Raises
    ------
    InvalidProblem
        If there is another format of this name.
    """
    known = FORMATS.get(kind.name, kind)  # that of an import which was interrupted afterwards has the same name
    if (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise InvalidProblem("register_format", "name", shown(kind.name), "be new")
    FORMATS[kind.name] = kind


def stored_weights() -> Iterator[type[StoredWeight]]:
    """Yield the ways in which files hold weights. The first that knows a config's fields takes them."""
    for kind in FORMATS.values():
        yield from kind.files


def format_of(subject: str, codes: Tensor, n: int, k: int | None) -> WeightFormat:
    """Return the format of codes of n output channels, and of k elements if the codes do not tell.

    Raises
    ------
    InvalidProblem
        If they are codes of no format.
    """
    for kind in FORMATS.values():
        found = kind.of(codes, n, k)
        if found is not None:
            return found
    rule = f"be {', or '.join(kind.wanted(n, k) for kind in FORMATS.values())}"
    raise InvalidProblem(subject, "weight", f"{codes.dtype} of shape {list(codes.shape)}", rule)


class Quantizer(NamedTuple):
    """Quantizes weights as a config says. `quantizer` makes one.

    Attributes
    ----------
    format : WeightFormat
        The format of the codes.
    group_size : int
    symmetric : bool
    moments : Moments, optional
        Those of the inputs of the layer, for formats that take them.
    """

    format: WeightFormat
    group_size: int = 128
    symmetric: bool = False
    moments: Moments | None = None

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales (N,); see `WeightFormat.quantize`."""
        more: Any = {} if self.moments is None else {"moments": self.moments}
        return type(self.format).quantize(weight, self.group_size, symmetric=self.symmetric, **more)


def quantizer(subject: str, weights: object, group_size: object = 128, *, symmetric: object = False) -> Quantizer:
    """Return what quantizes weights, given the options of a config.

    Raises
    ------
    InvalidProblem
        For an unknown format, or options that it does not have.
    """
    if not isinstance(weights, str) or weights not in FORMATS:
        raise InvalidProblem(subject, "weights", shown(weights), f"be {' or '.join(map(repr, FORMATS))}")
    if not isinstance(symmetric, bool):
        raise InvalidProblem(subject, "symmetric", shown(symmetric), "be True or False")
    made = FORMATS[weights].layout(subject, group_size, symmetric=symmetric)
    return Quantizer(made, cast("int", group_size), symmetric)  # `layout` has checked it
