"""Problems of any op as text: options of a command line, or lists in files."""

from __future__ import annotations

import textwrap
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.registry.value import Value
from skuda.tools.files import read_json, read_text
from skuda.tools.output import nearest, words

_ALIASES: tuple[tuple[frozenset[str], dict[str, str]], ...] = (
    (frozenset({"c_out"}), {"n": "c_out"}),
    (frozenset({"outer_size", "axis_size"}), {"m": "outer_size", "k": "axis_size"}),
    (frozenset({"n", "d"}), {"m": "n", "k": "d"}),
)
"""Other names of m, n and k for the ops that have such fields."""

_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def fields_of(record: type[Value]) -> dict[str, FieldInfo]:
    """Return the fields of a descriptor (or another record) that a caller gives, by name."""
    return {name: field for name, field in record.model_fields.items() if name != "op"}


def aliases_of(descriptor: type[Descriptor]) -> dict[str, str]:
    """Return the other names of an op's sizes: alias to field."""
    fields = fields_of(descriptor).keys()
    names = {alias: field for needed, names in _ALIASES if needed <= fields for alias, field in names.items()}
    return {alias: field for alias, field in names.items() if alias not in fields}


def short(value: Any) -> str:
    """Format the value of a field as a user types it."""
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text.lower() if isinstance(value, bool) else text


def pairs(values: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` for each value."""
    return [f"{name}={short(value)}" for name, value in values.items()]


def type_words(field: FieldInfo) -> str:
    """Describe the values that a field takes, for example ``integer >= 0, < 2^31``."""
    bounds = [
        f"{sign} {_number(limit)}"
        for part in field.metadata
        for name, sign in _BOUNDS
        if (limit := getattr(part, name, None)) is not None
    ]
    return f"{_kind_words(_plain(field))} {words(bounds)}".strip()


def default_words(field: FieldInfo) -> str:
    """Return the default of a field as text; ``required`` if it has none."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "none" if default is None else short(default)


def _number(value: Any) -> str:
    power = abs(value).bit_length() - 1 if isinstance(value, int) and abs(value) > 1024 else 0
    sign = "-" if value < 0 else ""
    return f"{sign}2^{power}" if power and abs(value) == 1 << power else str(value)


def _plain(field: FieldInfo) -> Any:
    """Return the type of a field without validators, which refuse text, the only type of a command line."""
    holder = type("Holder", (), {"__annotations__": {"kind": field.annotation}})
    return get_type_hints(holder)["kind"]  # strips every Annotated


def _options(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _choices(kind: Any) -> list[str]:
    """Return the words that a type takes, if it takes only some."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [str(member.value) for member in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []


def _kind_words(kind: Any) -> str:
    if len(_options(kind)) > 1:
        return " or ".join(map(_kind_words, _options(kind)))
    if get_origin(kind) is tuple:
        return f"{_kind_words(get_args(kind)[0])}s, by commas"
    known = {int: "integer", float: "number", bool: "true | false", str: "text", type(None): "none"}
    known[ElementKind] = "element"
    return known.get(kind) or " | ".join(_choices(kind)) or str(getattr(kind, "__name__", kind))


def convert(field: FieldInfo, text: str) -> Any:
    """Return the value of `text` for `field`, by pydantic; if that fails, return `text` for the record to refuse.

    Members of a tuple are separated by commas; ``none`` is None if the field allows it.
    """
    kind = _plain(field)
    if type(None) in _options(kind) and text.lower() == "none":
        return None
    parts = any(get_origin(option) is tuple for option in _options(kind))
    value: Any = [part.strip() for part in text.strip("()[]").split(",") if part.strip()] if parts else text
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return text


def describe(op: Op, tokens: Sequence[str], others: Sequence[str] = ()) -> tuple[Descriptor, dict[str, Any]]:
    """Build the descriptor of an op from options such as ``--field value`` and ``--field=value``.

    Return it with the assumed fields and their values. `others` are the command's own options, suggested for a misspelt
    one. Raise `InvalidProblem` for an option or a value that the op does not take; it names the nearest ones.
    """
    fields = fields_of(op.descriptor)
    typed = _read_options(op, tokens, others)
    given = {name: convert(fields[name], text) for name, text in typed.items()}
    assumed = assumptions(op, given)
    try:
        return op.descriptor(**{**given, **assumed}), assumed
    except InvalidProblem as error:
        kinds = _options(_plain(fields[error.field])) if error.field in typed else ()
        near = nearest(typed.get(error.field, ""), [word for kind in kinds for word in _choices(kind)])
        if not near:
            raise
        raise InvalidProblem(error.subject, error.field, error.had, f"{error.must} (near: {words(near)})") from None


def _read_options(op: Op, tokens: Sequence[str], others: Sequence[str]) -> dict[str, str]:
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
            near = nearest(written.replace("-", "_"), (*fields, *aliases, *others))
            hint = ", perhaps " + " or ".join(map(option_of, near)) if near else ""
            rule = f"be a field of {op.name} ({words(fields)}){hint}"
            raise InvalidProblem(op.name, "an option", f"--{written}", rule)
        if name in found:
            raise InvalidProblem(op.name, name, f"--{written} again", "be given once")
        if not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        elif not equals and _plain(fields[name]) is bool:
            text = "true"
        elif not equals:
            raise InvalidProblem(op.name, name, "nothing", f"be given a value: {option_of(name)} VALUE")
        found[name] = text
    return found


def option_of(field: str) -> str:
    """Return a field as an option."""
    return f"--{field.replace('_', '-')}"


def assumptions(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for required fields that were not given and have an obvious value.

    The elements are f32 and s8, or the first ones that the kernels of the op serve. The bounds are -127 and 127 for a
    matrix product, which is symmetric, else the full range of the codes. Scales are 1.
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
    made["q_min"], made["q_max"] = _bounds(descriptor, {**given, **made})
    made |= {name: 1.0 for name, f in wanted.items() if name.endswith("scale") and _plain(f) is float}
    return {name: made[name] for name in wanted if name in made}


def _bounds(descriptor: type[Descriptor], values: Mapping[str, Any]) -> tuple[int, int]:
    if descriptor.layout is not None:
        return (-127, 127)
    ranges = (value.integer_range for value in values.values() if isinstance(value, ElementKind))
    return next(filter(None, ranges), (-128, 127))


def read_problems(command: str, registry: Registry, path: Path) -> list[Descriptor]:
    """Read a list of problems: a JSON array of objects, or one object per line, each with ``op`` and the op's fields.

    Raise `InvalidProblem` for a file that cannot be read, or an entry that is not a problem; `command` has the option.
    """

    def refused(rule: str) -> InvalidProblem:
        # A quotation may be as long as the file.
        return InvalidProblem(command, "--descriptors", str(path), textwrap.shorten(rule, 400))

    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise refused(f"be a file that can be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        entries = read_json(text) if text.lstrip().startswith("[") else [read_json(line) for line in lines]
    except ValueError as error:
        raise refused(f"be a JSON array, or one JSON object a line: {error}") from error
    found: list[Descriptor] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or entry.get("op") not in tuple(registry.ops):
            raise refused(f'hold objects with "op", a registered one, and its fields; entry {number} is not one')
        try:
            found.append(registry.ops[entry["op"]].descriptor(**entry))
        except SkudaError as error:
            raise refused(f"describe a problem in every entry; entry {number} does not: {error}") from error
    return list(dict.fromkeys(found))
