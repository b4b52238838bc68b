"""Descriptors: one concrete problem, without its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, NamedTuple

from skuda.registry.argument import Argument, ArgumentSpec, Role, check_signature, existing, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.registry.value import Value
from skuda.registry.vocabulary import EpilogueKind, LayoutSku, OpCategory

__all__ = ["Argument", "ArgumentSpec", "Descriptor", "FunctionalKey", "Role", "key_field", "storage_shape"]


class FunctionalKey(NamedTuple):
    """The fields that a kernel must match exactly; they are compared first."""

    category: OpCategory
    op: str
    element: ElementKind
    aux_element: ElementKind | None
    layout: LayoutSku | None
    epilogue: EpilogueKind | None


def _keeping(own: Callable[[Any], tuple[Argument, ...]]) -> Callable[[Any], tuple[Argument, ...]]:
    """Let every problem keep its arguments, because several steps of a call need them."""

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


class Descriptor(Value):
    """One concrete problem: sizes, element kinds, modes, and scalars that are frozen metadata of a model.

    A subclass adds ``op: Literal["name"] = "name"``, its own fields, and its arguments as `signature`. Its class
    variables `element_field` and `aux_field` are the names of the fields that a kernel's `element` and `aux_element`
    must equal.

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
    signature: ClassVar[tuple[ArgumentSpec, ...]] = ()
    """The op's arguments, inputs before outputs. Empty for a class that defines `arguments` itself."""
    _evaluated: ClassVar[tuple[ArgumentSpec, ...]] = ()
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
        """Check the signature of an op.

        Raises
        ------
        InvalidRecord
            For a signature that cannot be read, or that names what the class does not have.
        """
        own, declares = cls.__dict__.get("arguments"), "signature" in cls.__dict__
        if own is not None:
            cls.arguments = _keeping(own)  # type: ignore[method-assign]
        if cls.arguments is Descriptor.arguments:
            cls.signature = cls._evaluated = cls.declared()
        elif declares:
            raise InvalidRecord(cls.__name__, "signature", "both", "be left out by a class that defines `arguments`")
        else:
            cls.signature = ()  # what a base declares need not hold for it, and serves only ``super().arguments()``
        if "op" in cls.__pydantic_fields__:
            if own is None and not cls._evaluated:
                raise InvalidRecord(cls.__name__, "signature", "nothing", "be the arguments of the op")
            check_signature(cls)

    @classmethod
    def declared(cls) -> tuple[ArgumentSpec, ...]:
        """Return the signature of this class. A family of ops may complete what its classes declare."""
        return cls.signature

    @classmethod
    def op_name(cls) -> str:
        """Name of the op that this class describes."""
        return str(cls.__pydantic_fields__["op"].default)

    @classmethod
    def implied(cls, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Any]:  # noqa: ARG003  for ops that override it
        """Return fields that follow from the shapes of a call's arrays otherwise than as the length of an axis.

        A field that is given goes before it, and so does the length of an axis.
        """
        return {}

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

    @_keeping
    def arguments(self) -> tuple[Argument, ...]:
        """Return the arguments of this problem, inputs before outputs.

        They follow from `signature`. A class may define this method instead of a signature; then every field of a call
        must be given, because none follows from an array.
        """
        return tuple([each.of(self) for each in existing(self._evaluated, self.__dict__)])


_slot: Any = Descriptor.__dict__["_arguments"]


def key_field(descriptor: type[Descriptor], part: str) -> str:
    """Return the name of the descriptor's field that holds `part` of a functional key."""
    named = {"element": descriptor.element_field, "aux_element": descriptor.aux_field}
    return named.get(part) or part
