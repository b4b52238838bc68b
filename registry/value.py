"""The base of every record: a frozen pydantic model whose errors name the field, the rule and the given value."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from numbers import Integral
from numbers import Real as AnyReal
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn, Self, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from skuda.registry.cached import cached_property
from skuda.registry.errors import FrozenRecord, InvalidProblem, InvalidRecord
from skuda.registry.text import shown

_set = object.__setattr__


def _index(value: object) -> object:
    """Accept Python's and NumPy's integers, but neither arrays, floats, strings nor booleans."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError("be an integer")  # noqa: TRY004  pydantic lets a TypeError through
    return operator.index(value)


Integer = Annotated[int, BeforeValidator(_index)]
"""Any integer. An array, a float, a string or a boolean is refused, not converted."""


def _real(value: object) -> object:
    """Accept Python's and NumPy's real numbers, but neither arrays, strings nor booleans."""
    # No array library is imported here, and ml_dtypes does not register its numbers.
    if isinstance(value, bool) or not (isinstance(value, AnyReal) or type(value).__name__ == "bfloat16"):
        raise ValueError("be a number")
    try:
        return float(cast("Any", value))
    except OverflowError as error:
        raise ValueError("be finite") from error


Real = Annotated[float, BeforeValidator(_real), Field(allow_inf_nan=False)]
"""A finite number. An array, a string or a boolean is refused, not converted."""

Size = Annotated[Integer, Field(ge=0, lt=2**63)]
"""A count of elements, 0 up to 2^63-1."""

Extent = Annotated[Integer, Field(ge=0, lt=2**31)]
"""The size of one axis, 0 up to 2^31-1."""

Int32 = Annotated[Integer, Field(ge=-(2**31), lt=2**31)]
"""An integer that fits the s32 in which zero points and bounds are stored."""


def expect(call: str, argument: str, given: object, kind: Any, must: str) -> None:
    """Raise `InvalidProblem` if an argument of a function is not of a type."""
    if not isinstance(given, kind):
        raise InvalidProblem(call, argument, shown(given), must)


def expect_integer(call: str, argument: str, given: object, least: int, most: int) -> int:
    """Return an argument of a function as an integer. Raise `InvalidProblem` if it is none, or not in [least, most]."""
    try:
        found: Any = _index(given)
    except ValueError:
        found = least - 1
    if not least <= found <= most:
        raise InvalidProblem(call, argument, shown(given), f"be an integer in [{least}, {most}]")
    return int(found)


def expect_real(call: str, argument: str, given: object, least: float, most: float) -> float:
    """Return an argument of a function as a number. Raise `InvalidProblem` if it is none, or not in [least, most]."""
    try:
        found: Any = _real(given)
    except ValueError:
        found = math.nan
    if not least <= found <= most:
        raise InvalidProblem(call, argument, shown(given), f"be a number in [{least:g}, {most:g}]")
    return float(found)


_RULES: dict[str, Callable[[dict[str, Any]], str]] = {
    "missing": lambda _: "be given",
    "greater_than_equal": lambda c: f"be at least {c['ge']}",
    "greater_than": lambda c: f"be greater than {c['gt']}",
    "less_than": lambda c: f"be less than {c['lt']}",
    "less_than_equal": lambda c: f"be at most {c['le']}",
    "enum": lambda c: f"be one of {c['expected']}",
    "literal_error": lambda c: f"be {c['expected']}",
    "finite_number": lambda _: "be finite",
    "float_type": lambda _: "be a number",
    "float_parsing": lambda _: "be a number",
    "bool_type": lambda _: "be true or false",
    "bool_parsing": lambda _: "be true or false",
    "string_type": lambda _: "be a string",
    "tuple_type": lambda _: "be a tuple",
    "string_pattern_mismatch": lambda c: f"match {c['pattern']}",
}


class _Guard(NamedTuple):
    """The types that a field accepts, and the rule in words."""

    field: str
    kinds: tuple[type, ...]
    rule: str


def _guard(field: str, annotation: Any) -> _Guard | None:
    """Return a check of types for a field where pydantic would convert a value of another type, or None.

    Pydantic reads bytes as text, an array of one string as an element, a set as a shape, and 1.0 as true.
    """
    if get_origin(annotation) in {Union, UnionType}:
        parts = [part for part in get_args(annotation) if part is not NoneType]
        return _guard(field, parts[0]) if len(parts) == 1 else None
    # Pydantic checks None.
    if annotation is bool:
        return _Guard(field, (bool, NoneType), "be true or false")
    if annotation is str:
        return _Guard(field, (str, NoneType), "be a string")
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _Guard(field, (str, NoneType), f"be one of {', '.join(annotation)}")
    if get_origin(annotation) is tuple:
        return _Guard(field, (tuple, list, NoneType), "be a tuple")
    return None


@cache
def _guards(record: type[Value]) -> tuple[_Guard, ...]:
    found = (_guard(name, info.annotation) for name, info in record.model_fields.items())
    return tuple(guard for guard in found if guard is not None)


@cache
def _values_of(record: type[Value]) -> Callable[[dict[str, Any]], Any]:
    """Return a function that reads the values of a record's fields from its dictionary, in order."""
    fields = record.__pydantic_fields__
    return operator.itemgetter(*fields) if fields else lambda _: ()


def _is_numpy_flag(value: object) -> bool:
    # No array library is imported here.
    return type(value).__module__ == "numpy" and type(value).__name__ in {"bool", "bool_"}


class Value(BaseModel):
    """A frozen record: hashable, comparable, convertible to and from JSON, without unknown fields.

    Raises
    ------
    InvalidRecord
        If a field breaks its rule (`InvalidProblem` for descriptors).
    FrozenRecord
        If a field is assigned to or deleted.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",
        validate_default=False,
        defer_build=True,  # building a model takes a millisecond, so only those in use are built
        ignored_types=(cached_property,),
    )
    # Not a field, so it is neither compared, copied nor pickled.
    __slots__ = ("_hash",)
    refusal: ClassVar[type[InvalidProblem | InvalidRecord]] = InvalidRecord

    def __hash__(self) -> int:
        try:
            return _kept_hash(self)
        except AttributeError:
            kind = self.__class__
            found = hash((kind, _values_of(kind)(self.__dict__)))
            _keep_hash(self, found)
            return found

    def __init__(self, /, **fields: Any) -> None:
        # Pydantic calls this for nested records and JSON, too, so all of them raise the same errors.
        for name, kinds, rule in _guards(type(self)):
            value = fields.get(name)
            if not isinstance(value, kinds) and not (bool in kinds and _is_numpy_flag(value)):
                self.refuse(name, shown(value), rule)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            found = error
        else:
            return
        self._refuse_in_our_words(found)

    @classmethod
    def _refuse_in_our_words(cls, error: ValidationError) -> NoReturn:
        # Pydantic reports a misspelt field as one unknown and one missing field. The unknown one is the cause.
        first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
        field = ".".join(str(part) for part in first["loc"]) or "the record"
        context = first.get("ctx", {})
        if first["type"] == "extra_forbidden":
            cls.refuse(field, shown(first["input"]), f"be one of {', '.join(cls.model_fields)}")
        if first["type"] == "value_error":
            rule = str(context["error"])
        else:
            phrase = _RULES.get(first["type"])
            rule = phrase(context) if phrase else f"satisfy: {first['msg']}"
        cls.refuse(field, "nothing" if first["type"] == "missing" else shown(first["input"]), rule)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # A pickle of an earlier version lacks fields that are new.
        held, fields = state["__dict__"], type(self).model_fields.items()
        new = {name: of.get_default(call_default_factory=True) for name, of in fields if not of.is_required()}
        super().__setstate__({**state, "__dict__": {**new, **held}})

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise FrozenRecord(type(self).__name__, name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenRecord(type(self).__name__, name)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # noqa: ARG002  frozen
        """Return a copy with some fields changed, validated like any other record.

        Raises
        ------
        InvalidRecord
            If a changed field breaks its rule. Pydantic's own `model_copy` does not check that.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **(update or {})})

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Return a record of all its fields, which are valid. It takes a fifth of the time of `model_construct`."""
        made = cls.__new__(cls)
        _set(made, "__dict__", fields)
        _set(made, "__pydantic_fields_set__", set(fields))
        _set(made, "__pydantic_extra__", None)
        _set(made, "__pydantic_private__", None)
        return made

    @classmethod
    def refuse(cls, field: str, had: object, must: str) -> NoReturn:
        """Raise this record's error for `field`."""
        raise cls.refusal(cls.__name__, field, had if isinstance(had, str) else shown(had), must)


_slot: Any = Value.__dict__["_hash"]
_kept_hash: Callable[[Value], int] = _slot.__get__
_keep_hash: Callable[[Value, int], None] = _slot.__set__
