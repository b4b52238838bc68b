"""The base of every record: a frozen pydantic model whose errors name the field, the rule and what was given."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NoReturn, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from skuda.registry.errors import InvalidProblem, InvalidRecord


def _index(value: object) -> object:
    """Accept what Python accepts as an index (so NumPy integers too), but neither floats, strings nor booleans."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError("be an integer")
    return operator.index(cast("Any", value))


Integer = Annotated[int, BeforeValidator(_index)]
"""Any integer; a float, a string or a boolean is refused rather than converted."""


def _real(value: object) -> object:
    """Accept Python's and NumPy's numbers, but neither strings nor booleans."""
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ValueError("be a number")
    try:
        return float(cast("Any", value))
    except OverflowError as error:
        raise ValueError("be finite") from error


Real = Annotated[float, BeforeValidator(_real), Field(allow_inf_nan=False)]
"""A finite number; a string or a boolean is refused rather than converted."""

Size = Annotated[Integer, Field(ge=0, lt=2**63)]
"""A count of elements, 0 up to 2^63-1."""

Extent = Annotated[Integer, Field(ge=0, lt=2**31)]
"""The size of one axis, 0 up to 2^31-1."""

Int32 = Annotated[Integer, Field(ge=-(2**31), lt=2**31)]
"""An integer that fits the s32 in which zero points and bounds are stored."""

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
    "tuple_type": lambda _: "be a tuple",
    "string_pattern_mismatch": lambda c: f"match {c['pattern']}",
}


class Value(BaseModel):
    """A frozen record: hashable, comparable, convertible to and from JSON, without unknown fields.

    Raises
    ------
    InvalidRecord
        If a field breaks its rule (`InvalidProblem` for descriptors).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", validate_default=False)
    refusal: ClassVar[type[InvalidProblem | InvalidRecord]] = InvalidRecord

    def __init__(self, /, **fields: Any) -> None:
        # pydantic calls this for nested records and JSON too, so that all of them raise the same errors.
        try:
            super().__init__(**fields)
        except ValidationError as error:
            found = error
        else:
            return
        self._refuse_in_our_words(found)

    @classmethod
    def _refuse_in_our_words(cls, error: ValidationError) -> NoReturn:
        # A misspelt field shows as one unknown and one missing; the unknown one is the cause.
        first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
        field = ".".join(str(part) for part in first["loc"]) or "the record"
        context = first.get("ctx", {})
        if first["type"] == "extra_forbidden":
            cls.refuse(field, repr(first["input"]), f"be one of {', '.join(cls.model_fields)}")
        if first["type"] == "value_error":
            rule = str(context["error"])
        else:
            phrase = _RULES.get(first["type"])
            rule = phrase(context) if phrase else f"satisfy: {first['msg']}"
        cls.refuse(field, "nothing" if first["type"] == "missing" else repr(first["input"]), rule)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # noqa: ARG002  frozen
        """Return a copy with some fields changed, validated like any other record.

        Raises
        ------
        InvalidRecord
            If a changed field breaks its rule, which pydantic's own `model_copy` would let through.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **(update or {})})

    @classmethod
    def refuse(cls, field: str, had: object, must: str) -> NoReturn:
        """Raise this record's error for `field`."""
        raise cls.refusal(cls.__name__, field, str(had), must)
