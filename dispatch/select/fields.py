"""Derives a descriptor from arrays: from the shapes, dtypes and names of the arguments.

Probing finds out which field follows from which argument. A copy of one of the op's own problems gets marked sizes or
another element, and `Descriptor.arguments` shows where the marks appear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import lru_cache, partial
from itertools import product
from operator import ne
from typing import Any, NamedTuple, NoReturn, get_args

from skuda.dispatch.host.arrays import bare
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.text import shown

_STORED = (*FLOATS, ElementKind.S8, ElementKind.U8, ElementKind.S32, ElementKind.U32, ElementKind.S64)
_BY_DTYPE = {str(storage_dtype(element)): element for element in _STORED}
_PROBES = (ElementKind.F16, ElementKind.BF16, ElementKind.S8, ElementKind.U8)
_DISTINCT = frozenset({int, bool, str})
"""Types whose equal values are interchangeable."""
_MOST_REMEMBERED = 256


class _Size(int):
    """A size with the name of its field and a factor, because an axis may be ``2 * d`` long."""

    field: str
    factor = 1

    def __rmul__(self, factor: int) -> _Size:
        made = _Size(factor * int(self))
        made.field, made.factor = self.field, factor * self.factor
        return made


class _Shape(tuple[int, ...]):  # noqa: SLOT001  it has an attribute
    """A shape with the name of its field."""

    field: str


class _ArrayType(NamedTuple):
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: Any


class Fields:
    """Derives the descriptors of one op from the arguments of calls.

    Parameters
    ----------
    op : Op
        The op. Its cases show how the arguments follow from the fields. Without cases, every field must be given.

    Attributes
    ----------
    arguments : tuple of Argument
        Every argument that any case of the op takes.
    """

    def __init__(self, op: Op) -> None:
        self._op, self._descriptor = op.name, op.descriptor
        self._cases = tuple(case.problem for case in op.cases)
        longest = sorted((problem.arguments() for problem in self._cases), key=len, reverse=True)
        self.arguments = tuple({argument.name: argument for each in longest for argument in each}.values())
        self._infos = {name: info for name, info in op.descriptor.model_fields.items() if name != "op"}
        kinds = {name: _enum(info.annotation) for name, info in self._infos.items()}
        self._elements = tuple(name for name, kind in kinds.items() if kind is ElementKind)
        # Fields that determine which arguments exist.
        self._switches: dict[str, tuple[Any, ...]] = {
            name: (False, True) if info.annotation is bool else tuple(kinds[name] or ())
            for name, info in self._infos.items()
            if info.annotation is bool or (kinds[name] is not None and name not in self._elements)
        }
        self._kinds = kinds
        self._problem = lru_cache(_MOST_REMEMBERED)(self._derived)

    def split(self, given: Mapping[str, Any]) -> tuple[Descriptor, dict[str, Any]]:
        """Return the problem of a call, and its arguments without the fields.

        Parameters
        ----------
        given : mapping of str to object
            Arguments and fields by name; None means omitted.

        Raises
        ------
        InvalidProblem
            If a name is neither an argument nor a field, or an omitted field follows from no argument.
        """
        fields = {name: value for name, value in given.items() if name in self._infos and value is not None}
        arrays = {name: value for name, value in given.items() if name not in self._infos and value is not None}
        for name, value in fields.items():
            # A tensor has a hash, but no truth value.
            if value.__hash__ is not None and hasattr(value, "__dlpack_device__"):
                raise InvalidProblem(
                    self._op, name, f"a {type(value).__name__}", "be a plain value: it is a field, not an argument"
                )
        if not self._cases:
            return self._descriptor(**fields), arrays
        known = {argument.name: argument for argument in self.arguments}
        for name in arrays:
            if name not in known:
                rule = f"be one of {', '.join((*known, *self._infos))}"
                raise InvalidProblem(self._op, name, "an unknown argument", rule)
        seen = tuple((name, self._seen(name, arrays[name])) for name in arrays if not known[name].is_scalar)
        plain = tuple((name, *self._plain(name, value)) for name, value in fields.items())
        return self._problem(seen, frozenset(arrays), plain), arrays

    def led(self, field: str, given: Mapping[str, Any]) -> dict[str, int]:
        """Return the arguments, outputs included, whose first axis has the length of a field.

        Parameters
        ----------
        field : str
            A size.
        given : mapping of str to object
            As in `sketch`.

        Returns
        -------
        dict of str to int
            Number of axes after the first one, by name.
        """
        fields = {
            name: self._as_enum(name, value)
            for name, value in given.items()
            if name in self._infos and value is not None and not self.sources(name)
        }
        names = frozenset(name for name, value in given.items() if name not in self._infos and value is not None)
        sample = _varied(self._sample(fields, names), fields)
        arguments = [each for each in _marked(sample) if each.shape]
        return {each.name: len(each.shape) - 1 for each in arguments if getattr(each.shape[0], "field", "") == field}

    def sources(self, field: str) -> tuple[str, ...]:
        """Return the names of the arguments from which a field follows."""
        return self._sources(self._cases[0], field) if self._cases else ()

    def _plain(self, name: str, value: Any) -> tuple[Any, object]:
        """Return a field's value and its key in the cache, which tells 1, 1.0 and True, or 0.0 and -0.0, apart."""
        kind = type(value)
        if kind in _DISTINCT:
            return value, kind
        value = tuple(value) if kind is list else value
        try:
            hash(value)
            return value, (kind, repr(value))
        except Exception:  # noqa: BLE001  unhashable, or a type of somebody else
            rule = "be a plain value: it is a field, not an argument"
            raise InvalidProblem(self._op, name, shown(value), rule) from None

    def _seen(self, name: str, value: Any) -> _ArrayType:
        value = bare(self._op, name, value)
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if not isinstance(shape, (tuple, list)) or getattr(dtype, "__hash__", None) is None:
            had, rule = f"a {type(value).__name__}", "be an array with a shape and a dtype"
            raise InvalidProblem(self._op, name, had, rule)
        return _ArrayType(tuple(shape), dtype)

    def _derived(
        self,
        seen: tuple[tuple[str, _ArrayType], ...],
        names: frozenset[str],
        given: tuple[tuple[str, Any, object], ...],
    ) -> Descriptor:
        return self._descriptor(**self._found(dict(seen), names, {name: value for name, value, _ in given}))

    def sketch(self, given: Mapping[str, Any]) -> Descriptor:
        """Return the problem of a call without validation, to read its arguments only. Sizes may be symbolic.

        Parameters
        ----------
        given : mapping of str to object
            Arguments and fields by name. None means omitted. Only the shape and dtype of arrays are read.

        Raises
        ------
        InvalidProblem
            If an omitted field follows from no argument.
        """
        fields = {name: value for name, value in given.items() if name in self._infos and value is not None}
        arrays = {name: value for name, value in given.items() if name not in self._infos and value is not None}
        scalars = {argument.name for argument in self.arguments if argument.is_scalar}
        seen = {
            name: _ArrayType(tuple(value.shape), value.dtype) for name, value in arrays.items() if name not in scalars
        }
        return self._descriptor.model_construct(None, **self._found(seen, frozenset(arrays), fields))

    def _found(
        self, arrays: Mapping[str, _ArrayType], names: frozenset[str], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a problem's fields: the given ones, and the ones that follow from the arguments."""
        fields = {name: self._as_enum(name, value) for name, value in given.items()}
        sample = self._sample(fields, names)
        for name in self._elements:
            source = next((each for each in _storing(sample, name) if each in arrays), None)
            if name not in fields and source is not None:
                fields[name] = self._element(source, arrays[source].dtype)
        fields |= {name: getattr(sample, name) for name in self._switches if name not in fields}
        sample = _varied(sample, {name: fields[name] for name in self._elements if name in fields})
        packed = self._measure(sample, arrays, fields)
        for name, bound in zip(("q_min", "q_max"), self._bounds(fields.get("output_element")), strict=False):
            if name in self._infos:
                fields.setdefault(name, bound)
        # Elements come first, because bounds may follow from them.
        for name in (*self._elements, *self._infos):
            if self._infos[name].is_required() and name not in fields:
                self._refuse(sample, name, packed)
        return fields

    def _sample(self, fields: Mapping[str, Any], names: frozenset[str]) -> Descriptor:
        """Return one of the op's problems that has the call's elements and switches and takes the given arguments."""
        fixed = {name: fields[name] for name in (*self._elements, *self._switches) if name in fields}
        left_out = {name: info.default for name, info in self._infos.items() if not info.is_required()}
        wanted = {name: left_out[name] for name in (*self._elements, *self._switches) if name in left_out} | fixed
        free = [name for name in self._switches if name not in fixed]
        choices = [sorted(self._switches[name], key=partial(ne, wanted.get(name))) for name in free]
        first = None
        for values in product(*choices):
            update = wanted | dict(zip(free, values, strict=True))
            like = [name for name in self._switches if name in update]
            case = min(self._cases, key=lambda each: sum(getattr(each, name) != update[name] for name in like))
            sample = _varied(case, update)
            if names <= {argument.name for argument in sample.arguments()}:
                return sample
            first = first or sample
        assert first is not None
        return first

    def _measure(self, sample: Descriptor, arrays: Mapping[str, _ArrayType], fields: dict[str, Any]) -> dict[str, str]:
        """Add the sizes of the arrays to `fields`. Return the packed arrays that hide a size, by field."""
        packed: dict[str, str] = {}
        for argument in _marked(sample):
            seen = arrays.get(argument.name)
            if seen is None:
                continue
            had = (math.prod(seen.shape),) if argument.flat else seen.shape
            if isinstance(argument.shape, _Shape):
                sizes: list[tuple[Any, Any]] = [(argument.shape, had)]
            elif len(had) == len(argument.shape):
                sizes = list(zip(argument.shape, had, strict=True))
            else:
                axes = ", ".join(getattr(size, "field", str(size)) for size in argument.shape)
                raise InvalidProblem(self._op, argument.name, f"shape {seen.shape}", f"have the axes ({axes})")
            if argument.elements[0].is_packed and sizes:
                last, _ = sizes.pop()
                packed[getattr(last, "field", "")] = argument.name
            for size, extent in sizes:
                if isinstance(size, _Size):
                    fields.setdefault(size.field, extent // size.factor)
                elif isinstance(size, _Shape):
                    fields.setdefault(size.field, extent)
        return packed

    def _bounds(self, code: Any) -> tuple[int, ...]:
        """Return the default bounds: symmetric s8 for a matrix product, else the range of the output codes."""
        if self._descriptor.layout is not None:
            return (-127, 127)
        return (ElementKind(code).integer_range or ()) if code in CODES else ()

    def _sources(self, sample: Descriptor, field: str) -> tuple[str, ...]:
        if field in self._elements:
            return tuple(_storing(sample, field))
        return tuple(a.name for a in _marked(sample) if field in {getattr(s, "field", "") for s in (a.shape, *a.shape)})

    def _refuse(self, sample: Descriptor, field: str, packed: Mapping[str, str]) -> NoReturn:
        sources = self._sources(sample, field)
        rule = (
            f"be given, unless {' or '.join(sources)} is"
            if sources
            else "be given: it does not follow from the arguments"
        )
        if field in packed:
            rule = f"be given: {packed[field]} holds two elements to a byte, so it does not follow from the shape"
        raise InvalidProblem(self._op, field, "nothing", rule)

    def _element(self, name: str, dtype: Any) -> ElementKind:
        element = _BY_DTYPE.get(str(dtype).removeprefix("torch."))
        if element is None:
            raise InvalidProblem(self._op, name, f"an array of {dtype}", f"be of one of {', '.join(_BY_DTYPE)}")
        return element

    def _as_enum(self, name: str, value: Any) -> Any:
        kind = self._kinds[name]
        if kind is None or (isinstance(value, str) and value in set(kind)):
            return value if kind is None else kind(value)
        raise InvalidProblem(self._op, name, shown(value), f"be one of {', '.join(kind)}")


def _enum(annotation: Any) -> type[StrEnum] | None:
    """Return the enumeration among the types of an annotation, or None."""
    kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, StrEnum)), None)


def _storing(sample: Descriptor, field: str) -> Iterable[str]:
    """Return the names of the arguments whose stored element is that of a field."""
    before = {argument.name: argument.elements[0] for argument in sample.arguments() if not argument.is_scalar}
    found: dict[str, None] = {}
    for probe in _PROBES:
        after = _varied(sample, {field: probe}).arguments()
        found |= {a.name: None for a in after if a.elements[0] is probe is not before.get(a.name, probe)}
    return found


def _marked(sample: Descriptor) -> Iterator[Argument]:
    """Yield the arguments of a problem, with sizes that carry the names of their fields."""
    marks: dict[str, _Size | _Shape] = {}
    for name, value in vars(sample).items():
        if type(value) in {int, tuple}:
            marks[name] = _Size(value) if isinstance(value, int) else _Shape(value)
            marks[name].field = name
    yield from _varied(sample, marks).arguments()


def _varied(problem: Descriptor, update: Mapping[str, Any]) -> Descriptor:
    """Return a copy without validation, for reading its arguments only."""
    return type(problem).model_construct(**(vars(problem) | dict(update)))
