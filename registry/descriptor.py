"""Descriptors: one concrete problem, without its arrays."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import Any, ClassVar, NamedTuple

from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.value import Value
from skuda.registry.vocabulary import EpilogueKind, LayoutSku, OpCategory


class FunctionalKey(NamedTuple):
    """The fields that a kernel must match exactly; they are compared first."""

    category: OpCategory
    op: str
    element: ElementKind
    aux_element: ElementKind | None
    layout: LayoutSku | None
    epilogue: EpilogueKind | None


class Role(StrEnum):
    """What an argument is for."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    SCALE = "scale"
    """A finite non-zero number, or an array of one element on the device."""
    ZERO_POINT = "zero_point"
    """An s32 integer, or an s32 array of one element on the device."""
    VALUE = "value"
    """A number that the element can represent."""


_SCALARS = (Role.SCALE, Role.ZERO_POINT, Role.VALUE)


class Argument(NamedTuple):
    """One argument of an op, as a concrete problem needs it.

    Attributes
    ----------
    name : str
        Keyword under which it is passed.
    role : Role
        What it is for.
    elements : tuple of ElementKind
        Accepted elements. The first one is used to allocate and to compute.
    shape : tuple of int
        Shape in elements; for scalars ``(1,)``.
    flat : bool
        Whether any shape with as many elements is accepted; outputs then take the input's shape.
    required : bool
        Whether the caller must pass it.
    """

    name: str
    role: Role
    elements: tuple[ElementKind, ...]
    shape: tuple[int, ...] = (1,)
    flat: bool = False
    required: bool = True

    @property
    def is_scalar(self) -> bool:
        """Whether a plain number is accepted."""
        return self.role in _SCALARS


def storage_shape(shape: tuple[int, ...], element: ElementKind) -> tuple[int, ...]:
    """Return the shape of the array that stores `shape` elements. Packing halves the last axis and rounds up."""
    if element.is_packed and shape:
        return (*shape[:-1], -(-shape[-1] // 2))
    return shape


class Descriptor(Value):
    """One concrete problem: sizes, element kinds, modes, and scalars that are frozen metadata of a model.

    A subclass adds ``op: Literal["name"] = "name"`` and its own fields. Its class variables `element_field` and
    `aux_field` are the names of the fields that a kernel's `element` and `aux_element` must equal.

    Raises
    ------
    InvalidProblem
        If a field breaks its rule.
    """

    __slots__ = ("_arguments",)
    refusal = InvalidProblem
    category: ClassVar[OpCategory]
    element_field: ClassVar[str]
    aux_field: ClassVar[str | None] = None
    layout: ClassVar[LayoutSku | None] = None
    in_place: ClassVar[bool] = False
    """Whether an output may be exactly the same array as an input."""
    result: ClassVar[Callable[..., Any] | None] = None
    """Builds the op's result from its outputs; None if the op returns its only output."""

    __hash__ = Value.__hash__  # a class with an `__eq__` does not inherit it

    @property
    def builder(self) -> Callable[..., Any] | None:
        """Builds the result from this problem's outputs, in their order; None if the op returns its only output."""
        return type(self).result

    def __eq__(self, other: object) -> bool:
        return self is other or (self.__class__ is other.__class__ and self.__dict__ == other.__dict__)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Cache the arguments of every problem. Several steps of a selection need them."""
        own = cls.__dict__.get("arguments")
        if own is not None:
            cls.arguments = _keeping(own)  # type: ignore[assignment,method-assign]

    @classmethod
    def op_name(cls) -> str:
        """Name of the op that this class describes."""
        return str(cls.__pydantic_fields__["op"].default)

    def key(self) -> FunctionalKey:
        """Return the exact key under which kernels for this problem are indexed."""
        return FunctionalKey(
            self.category,
            self.op_name(),
            getattr(self, self.element_field),
            getattr(self, self.aux_field) if self.aux_field else None,
            self.layout,
            getattr(self, "epilogue", None),
        )

    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of this problem, inputs before outputs."""
        raise NotImplementedError


_slot: Any = Descriptor.__dict__["_arguments"]


def _keeping(own: Callable[[Any], tuple[Argument, ...]]) -> Callable[[Any], tuple[Argument, ...]]:
    @wraps(own)
    def arguments(self: Any) -> tuple[Argument, ...]:
        try:
            of, found = _slot.__get__(self)
        except AttributeError:
            of = None
        # A class may extend the arguments of the class that it derives from.
        if of is not own:
            found = own(self)
            _slot.__set__(self, (own, found))
        kept: tuple[Argument, ...] = found
        return kept

    return arguments


def key_field(descriptor: type[Descriptor], part: str) -> str:
    """Return the name of the descriptor's field that holds `part` of a functional key."""
    named = {"element": descriptor.element_field, "aux_element": descriptor.aux_field}
    return named.get(part) or part
