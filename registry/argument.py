"""The arguments of an op: how a descriptor class declares them, and how a problem has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import isclass
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_origin

from skuda.registry.cached import cached_property
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidRecord
from skuda.registry.text import shown


class Role(StrEnum):
    """What an argument is for."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    STATE = "state"
    """An array that the op writes in place, in part or as a whole. The caller passes it; it is no result."""
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
    """Return the shape of the array that stores `shape` elements: packing halves the last axis, and rounds up.

    Elements of two halves double it.
    """
    if element.is_packed and shape:
        return (*shape[:-1], -(-shape[-1] // 2))
    if element.is_split and shape:
        return (*shape[:-1], 2 * shape[-1])
    return shape


class DeclaredAxis(NamedTuple):
    """One axis of a declared shape.

    Attributes
    ----------
    name : str
        A field or a property of the descriptor; empty for a number.
    factor : int
        The extent is this many times the value of `name`; without a name it is this number.
    whole : bool
        Whether `name` holds the whole shape.
    """

    name: str
    factor: int = 1
    whole: bool = False


_AXIS = re.compile(r"(?P<number>\d+)|((?P<before>[1-9]\d*) *\* *)?(?P<name>[^\W\d]\w*)( *\* *(?P<after>[1-9]\d*))?")
_WHOLE = re.compile(r"\*([^\W\d]\w*)")


@dataclass(frozen=True)
class ArgumentSpec:
    """One argument of an op, as its descriptor class declares it in `signature`.

    Several declarations may have one name. The first one whose `when` holds for a problem counts.

    Attributes
    ----------
    name : str
        Keyword under which it is passed.
    role : Role
        What it is for.
    element : str, ElementKind or tuple of ElementKind
        What it accepts. As text: a field, which then follows from the array's dtype, or a property that is one kind or
        several. ``"output_element or input_element"`` takes the second where the first is None.
    axes : str
        Its shape in elements, as ``"m, 2 * d"``: fields, their multiples, numbers, and properties, which do not follow
        from the array. ``"*shape"`` is a field that holds the whole shape. A scalar has no axes.
    flat : bool
        Whether any shape with as many elements is accepted; outputs then take the input's shape.
    required : bool
        Whether the caller must pass it.
    when : mapping of str to tuple
        Values of fields for which the argument exists. Empty: it always exists.
    """

    name: str
    role: Role
    element: str | ElementKind | tuple[ElementKind, ...]
    axes: str = ""
    flat: bool = False
    required: bool = True
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def is_scalar(self) -> bool:
        """Whether a plain number is accepted."""
        return self.role in _SCALARS

    @property
    def is_needed(self) -> bool:
        """Whether the caller must pass it where it exists: outputs may be left out, too."""
        return self.required and self.role is not Role.OUTPUT

    @cached_property
    def shape(self) -> tuple[DeclaredAxis, ...]:
        """The axes, read from the text.

        Raises
        ------
        ValueError
            For a text that is no shape, with the axis that is not understood.
        """
        whole = _WHOLE.fullmatch(self.axes.strip())
        if whole:
            return (DeclaredAxis(whole[1], whole=True),)
        return tuple(_axis(part.strip()) for part in self.axes.split(",")) if self.axes else ()

    @cached_property
    def element_names(self) -> tuple[str, ...]:
        """The fields or the property that `element` names; the first one that is not None is the element."""
        return tuple(self.element.split(" or ")) if type(self.element) is str else ()

    @cached_property
    def fixed_elements(self) -> tuple[ElementKind, ...]:
        """The accepted elements where `element` names nothing."""
        if self.element_names:
            return ()
        return self.element if isinstance(self.element, tuple) else (ElementKind(self.element),)

    @cached_property
    def _conditions(self) -> tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]:
        return tuple((tuple(names.split(" or ")), values) for names, values in self.when.items())

    def exists(self, fields: Mapping[str, Any]) -> bool:
        """Return whether `when` holds for some fields."""
        for names, values in self._conditions:
            value = fields.get(names[0])
            if value is None and len(names) > 1:
                value = next((fields[name] for name in names if fields.get(name) is not None), None)
            if value not in values:
                return False
        return True

    @cached_property
    def _sizes(self) -> Callable[[object], tuple[int, ...]]:
        """Reads the shape from a problem. It is made once, because a new problem has to wait for it."""
        axes = self.shape
        if axes and axes[0].whole:
            return attrgetter(axes[0].name)
        if axes and all(name and factor == 1 for name, factor, _ in axes):
            read: Callable[[object], Any] = attrgetter(*(axis.name for axis in axes))
            return read if len(axes) > 1 else lambda problem: (read(problem),)
        return lambda problem: tuple([factor * getattr(problem, name) if name else factor for name, factor, _ in axes])

    def of(self, problem: object) -> Argument:
        """Return the argument as a problem has it."""
        elements = self.fixed_elements
        for name in self.element_names:
            found = getattr(problem, name)
            if found is not None:
                elements = found if type(found) is tuple else (found,)
                break
        shape = (1,) if self.is_scalar else self._sizes(problem)
        return Argument(self.name, self.role, elements, shape, self.flat, self.required)


def _axis(text: str) -> DeclaredAxis:
    found = _AXIS.fullmatch(text)
    if found is None or (found["before"] and found["after"]):
        raise ValueError(text)
    if found["number"]:
        return DeclaredAxis("", int(found["number"]))
    return DeclaredAxis(found["name"], int(found["before"] or found["after"] or 1))


def existing(signature: Iterable[ArgumentSpec], fields: Mapping[str, Any]) -> Iterable[ArgumentSpec]:
    """Return the declarations that count for some fields: of each name, the first one whose `when` holds."""
    found: dict[str, ArgumentSpec] = {}
    for each in signature:
        if not each.when or each.exists(fields):
            found.setdefault(each.name, each)
    return found.values()


def check_signature(owner: Any) -> None:
    """Check that a descriptor class has every field and property that its signature names.

    Raises
    ------
    InvalidRecord
        For a declaration that cannot be read, or that names what the class does not have.
    """
    kinds = {name: info.annotation for name, info in owner.model_fields.items() if name != "op"}
    known = f"a field or property of the class, which has {', '.join(kinds)}"
    if not isinstance(owner.signature, tuple):
        raise InvalidRecord(owner.__name__, "signature", shown(owner.signature), "be a tuple of ArgumentSpec")
    for each in owner.signature:
        if not isinstance(each, ArgumentSpec):
            raise InvalidRecord(owner.__name__, "signature", shown(each), "hold an ArgumentSpec for each argument")
        faults = (*_bad_types(each),) or (*_bad_axes(each, owner, kinds, known), *_bad_names(each, owner, kinds, known))
        for what, had, rule in faults:
            raise InvalidRecord(owner.__name__, f"{what} of {each.name}", shown(had), rule)


Faults = Iterator[tuple[str, object, str]]
"""What of a declaration breaks a rule, what it is, and the rule."""


def _bad_types(each: Any) -> Faults:
    if not isinstance(each.name, str) or not each.name:
        yield "the name", each.name, "be the keyword under which the argument is passed"
    if not isinstance(each.role, Role):
        yield "the role", each.role, f"be one of {', '.join(map(repr, Role))}"
    if not isinstance(each.axes, str):
        yield "the axes", each.axes, "be text such as 'n, 2 * d'"
    several = isinstance(each.element, tuple) and each.element
    if not (all(isinstance(kind, ElementKind) for kind in each.element) if several else isinstance(each.element, str)):
        yield "the element", each.element, "be an ElementKind, a tuple of those, or the name of a field or property"
    if not isinstance(each.when, Mapping) or not all(isinstance(name, str) for name in each.when):
        yield "the condition", each.when, "be a mapping of fields to tuples of their values"


def _bad_axes(each: ArgumentSpec, owner: type, kinds: Mapping[str, Any], known: str) -> Faults:
    try:
        axes = each.shape
    except ValueError as error:
        yield "an axis", str(error), "be a name, a number, or a multiple such as 2 * d, or the only one, such as *shape"
        return
    if each.is_scalar and axes:
        yield "the axes", each.axes, f"be left out: a {each.role} is one number"
    for name, _, whole in axes:
        kind = kinds.get(name, int)
        if name and name not in kinds and not hasattr(owner, name):
            yield "an axis", name, f"be a number, or {known}"
        elif name in kinds and whole is not (get_origin(kind) is tuple):
            yield "an axis", name, "be an integer; only a field that holds the whole shape has a star, as in *shape"
        elif isclass(kind) and kind is not int:
            yield "an axis", name, "be an integer"


def _bad_names(each: ArgumentSpec, owner: type, kinds: Mapping[str, Any], known: str) -> Faults:
    for name in each.element_names:
        if name not in kinds and not hasattr(owner, name):
            yield "the element", name, f"be an ElementKind, or {known}"
        elif isclass(kinds.get(name, ElementKind)) and kinds.get(name, ElementKind) is not ElementKind:
            yield "the element", name, "be an ElementKind, or a field that holds one"
    conditions: Mapping[str, Any] = each.when
    for names, values in conditions.items():
        for name in names.split(" or "):
            if name not in kinds:
                yield "a condition", name, f"be on a field: {', '.join(kinds)}"
                continue
            possible = values_of(kinds[name])
            if not isinstance(values, tuple) or not values or (possible and not {*values} <= {*possible}):
                yield f"the condition on {name}", values, f"be a tuple of {', '.join(map(str, possible)) or 'values'}"


def enumeration(annotation: Any) -> type[StrEnum] | None:
    """Return the enumeration among the types of an annotation, or None."""
    kinds = (kind for kind in (annotation, *get_args(annotation)) if isclass(kind) and issubclass(kind, StrEnum))
    return next(kinds, None)


def values_of(annotation: Any) -> tuple[Any, ...]:
    """Return the values that a field of a type may have: those of a flag or an enumeration, for other types none."""
    return (False, True) if annotation is bool else tuple(enumeration(annotation) or ())
