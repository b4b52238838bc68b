"""From words on a command line to a descriptor, whatever the op: fields, aliases, conversion and assumptions."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.value import Value
from skuda.tools.output import nearest, words

_ALIASES: tuple[tuple[frozenset[str], dict[str, str]], ...] = (
    (frozenset({"c_out"}), {"n": "c_out"}),
    (frozenset({"outer_size", "axis_size"}), {"m": "outer_size", "k": "axis_size"}),
    (frozenset({"n", "d"}), {"m": "n", "k": "d"}),
)
"""What m, n and k of a matrix product are called by ops that have such fields."""

_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def fields_of(record: type[Value]) -> dict[str, FieldInfo]:
    """Return the fields of a descriptor (or another record) that a caller gives, by name."""
    return {name: field for name, field in record.model_fields.items() if name != "op"}


def aliases_of(descriptor: type[Descriptor]) -> dict[str, str]:
    """Return the other names under which an op's sizes may be given: alias to field."""
    fields = fields_of(descriptor).keys()
    return {
        alias: field
        for needed, names in _ALIASES
        if needed <= fields
        for alias, field in names.items()
        if alias not in fields
    }


def type_words(field: FieldInfo) -> str:
    """Say in words what a field takes, for example ``integer >= 0, < 2^31``."""
    bounds = [
        f"{sign} {_number(limit)}"
        for part in field.metadata
        for name, sign in _BOUNDS
        if (limit := getattr(part, name, None)) is not None
    ]
    return f"{_kind_words(field.annotation)} {words(bounds)}".strip()


def default_words(field: FieldInfo) -> str:
    """Say a field's default; ``required`` where it has none."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _number(value: Any) -> str:
    power = abs(value).bit_length() - 1 if isinstance(value, int) and abs(value) > 1024 else 0
    sign = "-" if value < 0 else ""
    return f"{sign}2^{power}" if power and abs(value) == 1 << power else str(value)


def _kind_words(kind: Any) -> str:
    kind = plain(kind)
    if get_origin(kind) is Union:
        return " or ".join("none" if part is type(None) else _kind_words(part) for part in get_args(kind))
    if get_origin(kind) is tuple:
        return f"{_kind_words(get_args(kind)[0])}s, by commas"
    if get_origin(kind) is Literal:
        return " | ".join(str(value) for value in get_args(kind))
    if kind is ElementKind:
        return "element"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(str(member.value) for member in kind)
    known: dict[Any, str] = {int: "integer", float: "number", bool: "true | false", str: "text"}
    return known.get(kind) or str(getattr(kind, "__name__", kind))


def plain(kind: Any) -> Any:
    """Return a type without its annotations, which also refuse strings: those are what a command line has."""
    origin = get_origin(kind)
    if origin is Annotated:
        return plain(get_args(kind)[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(plain(part) for part in get_args(kind))]  # noqa: UP007  built at run time
    if origin is tuple:
        return tuple[tuple(part if part is Ellipsis else plain(part) for part in get_args(kind))]  # type: ignore[misc]
    return kind


def convert(field: FieldInfo, text: str) -> Any:
    """Return what `text` says for `field`, by pydantic; else the text itself, for the record to refuse.

    Parameters
    ----------
    field : FieldInfo
        The field.
    text : str
        As typed: members of a tuple are separated by commas, ``none`` is None where the field allows it.
    """
    kind = plain(field.annotation)
    options = get_args(kind) if get_origin(kind) is Union else (kind,)
    if type(None) in options and text.lower() == "none":
        return None
    parts = any(get_origin(option) is tuple for option in options)
    value: Any = [part.strip() for part in text.strip("()[]").split(",") if part.strip()] if parts else text
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return text


def read_options(op: Op, tokens: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Read ``--field value`` and ``--field=value`` into texts by field name.

    Parameters
    ----------
    op : Op
        Whose fields they are.
    tokens : sequence of str
        What stands behind the op's name.
    others : sequence of str
        The command's own options, to suggest for a misspelt one.

    Raises
    ------
    InvalidProblem
        For a word that is no option, an unknown field, one given twice or one without a value.
    """
    fields, aliases = fields_of(op.descriptor), aliases_of(op.descriptor)
    found: dict[str, str] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise InvalidProblem(op.name, "arguments", repr(token), "be written --field value")
        written, equals, text = token[2:].partition("=")
        name = written.replace("-", "_")
        name = aliases.get(name, name)
        if name not in fields:
            _unknown(op, written, (*fields, *aliases, *others))
        if name in found:
            raise InvalidProblem(op.name, name, f"--{written} again", "be given once")
        if not equals:
            text = _value_of(op, name, rest, flag=plain(fields[name].annotation) is bool)
        found[name] = text
    return found


def _value_of(op: Op, name: str, rest: list[str], *, flag: bool) -> str:
    has_value = bool(rest) and not rest[0].startswith("--")
    if has_value:
        return rest.pop(0)
    if flag:
        return "true"
    raise InvalidProblem(op.name, name, "nothing", f"be given a value: --{name.replace('_', '-')} VALUE")


def _unknown(op: Op, written: str, known: Sequence[str]) -> None:
    near = [f"--{name.replace('_', '-')}" for name in nearest(written.replace("-", "_"), known)]
    fields = words(fields_of(op.descriptor))
    rule = f"be a field of {op.name} ({fields})" + (f", perhaps {' or '.join(near)}" if near else "")
    raise InvalidProblem(op.name, "an option", f"--{written}", rule)


def assumptions(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for required fields that were left out and have an obvious one.

    The elements are f32 and s8 (or the first ones that the op's kernels serve); the bounds are -127 and 127 for a
    matrix product, which is symmetric, else the full range of the codes; scales are 1.

    Parameters
    ----------
    op : Op
        The op.
    given : mapping of str to object
        What was given.
    """
    descriptor = op.descriptor
    wanted = {name: f for name, f in fields_of(descriptor).items() if name not in given and f.is_required()}
    made: dict[str, Any] = {}
    for name, first, served in (
        (descriptor.element_field, ElementKind.F32, [sku.element for sku in op.skus]),
        (descriptor.aux_field, ElementKind.S8, [sku.aux_element for sku in op.skus if sku.aux_element]),
    ):
        if name in wanted:
            made[name] = first if first in served or not served else served[0]
    low, high = _bounds(descriptor, {**given, **made})
    made |= {name: value for name, value in (("q_min", low), ("q_max", high)) if name in wanted}
    made |= {name: 1.0 for name, f in wanted.items() if name.endswith("scale") and plain(f.annotation) is float}
    return {name: made[name] for name in wanted if name in made}


def _bounds(descriptor: type[Descriptor], values: Mapping[str, Any]) -> tuple[int, int]:
    if descriptor.layout is not None:
        return (-127, 127)
    for value in values.values():
        if isinstance(value, ElementKind) and value.integer_range is not None:
            return value.integer_range
    return ElementKind.S8.integer_range or (-128, 127)


def describe(op: Op, tokens: Sequence[str], others: Sequence[str] = ()) -> tuple[Descriptor, dict[str, Any]]:
    """Build an op's descriptor from the words behind its name.

    Returns
    -------
    problem : Descriptor
        The problem.
    assumed : dict
        The fields that were filled in, with their values.

    Raises
    ------
    InvalidProblem
        For a bad option or a bad field.
    """
    fields = fields_of(op.descriptor)
    texts = read_options(op, tokens, others)
    given = {name: convert(fields[name], text) for name, text in texts.items()}
    assumed = assumptions(op, given)
    return op.descriptor(**{**given, **assumed}), assumed
