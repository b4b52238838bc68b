"""Derives a descriptor from arrays: from the shapes, dtypes and names of the arguments, by the op's signature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from skuda.dispatch.host.arrays import bare
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.argument import ArgumentSpec, DeclaredAxis, enumeration, existing, values_of
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.text import shown

_STORED = (*FLOATS, ElementKind.S8, ElementKind.U8, ElementKind.S32, ElementKind.U32, ElementKind.S64)
_BY_DTYPE = {str(storage_dtype(element)): element for element in _STORED}
_DISTINCT = frozenset({int, bool, str})
"""Types whose equal values are interchangeable."""
_MOST_REMEMBERED = 256


class _ArrayType(NamedTuple):
    """The shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: Any


class Fields:
    """Derives the descriptors of one op from the arguments of calls.

    If the descriptor declares no signature, every field must be given. `arguments` has every argument that a problem of
    the op may have; of several declarations of a name, the first. `always` has those that every problem of the op has.
    """

    def __init__(self, op: Op) -> None:
        self._op, self._descriptor = op.name, op.descriptor
        self._signature = op.descriptor.signature
        self._declared: dict[str, list[ArgumentSpec]] = {}
        for each in self._signature:
            self._declared.setdefault(each.name, []).append(each)
        self.arguments = {name: first for name, (first, *_) in self._declared.items()}
        self.always = frozenset(each.name for each in self._signature if not each.when)
        self._infos = {name: info for name, info in op.descriptor.model_fields.items() if name != "op"}
        self._defaults = {
            name: info.get_default(call_default_factory=True, validated_data={})
            for name, info in self._infos.items()
            if not info.is_required()
        }
        self._kinds = {name: enumeration(info.annotation) for name, info in self._infos.items()}
        self._elements = tuple(name for name, kind in self._kinds.items() if kind is ElementKind)
        conditions = {name for each in self._signature for name in each.when}.difference(self._elements)
        # The fields on which it depends what arguments there are, each with its values, the default first.
        self._switches: dict[str, tuple[Any, ...]] = {}
        for name, info in self._infos.items():
            values = values_of(info.annotation) if name in conditions else ()
            if values:
                default = (self._defaults[name],) if name in self._defaults else ()
                self._switches[name] = tuple(dict.fromkeys((*default, *values)))
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
        if not self.arguments:
            return self._descriptor(**fields), arrays
        for name in arrays:
            if name not in self.arguments:
                rule = f"be one of {', '.join((*self.arguments, *self._infos))}"
                raise InvalidProblem(self._op, name, "an unknown argument", rule)
        seen = tuple((name, self._seen(name, arrays[name])) for name in arrays if not self.arguments[name].is_scalar)
        plain = tuple((name, *self._plain(name, value)) for name, value in fields.items())
        return self._problem(seen, frozenset(arrays), plain), arrays

    def led(self, field: str, given: Mapping[str, Any]) -> dict[str, int]:
        """Return the arguments, outputs included, whose first axis has the length of a field, with their further axes.

        `given` is as in `sketch`.
        """
        _, taken = self._settled(*self._parts(given))
        return {each.name: len(each.shape) - 1 for each in taken if each.shape[:1] == (DeclaredAxis(field),)}

    def sources(self, field: str) -> tuple[str, ...]:
        """Return the names of the arguments from which a field follows."""
        tied = ((each.name, {self._tied(each), *(axis.name for axis in each.shape)}) for each in self._signature)
        return tuple(dict.fromkeys(name for name, fields in tied if field in fields))

    def follows(self, field: str) -> bool:
        """Return whether a field may be left out of a call that has the right arguments."""
        bounds = ("q_min", "q_max") if "output_element" in self._infos else ()
        return field in (*bounds, *self._switches) or bool(self.sources(field))

    def _tied(self, each: ArgumentSpec) -> str:
        """Return the field that is the element of an array, or nothing: a number has no dtype."""
        name = each.element_names[0] if each.element_names and not each.is_scalar else ""
        return name if name in self._elements else ""

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

        Raise `InvalidProblem` if an omitted field follows from no argument. `given` has arguments and fields by name;
        None means omitted. Only the shape and dtype of arrays are read.
        """
        return self._descriptor.model_construct(None, **self._found(*self._parts(given)))

    def _parts(self, given: Mapping[str, Any]) -> tuple[dict[str, _ArrayType], frozenset[str], dict[str, Any]]:
        """Return the types of the arrays among some arguments, the names of all arguments, and the fields."""
        fields = {name: value for name, value in given.items() if name in self._infos and value is not None}
        names = frozenset(name for name, value in given.items() if name in self.arguments and value is not None)
        arrays = {name: given[name] for name in given if name in names and not self.arguments[name].is_scalar}
        return {name: _ArrayType(tuple(value.shape), value.dtype) for name, value in arrays.items()}, names, fields

    def _found(
        self, arrays: Mapping[str, _ArrayType], names: frozenset[str], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a problem's fields: the given ones, and the ones that follow from the arguments."""
        fields, taken = self._settled(arrays, names, given)
        packed = self._measure(taken, arrays, fields)
        fields = {**self._implied(arrays), **fields}
        for name, bound in zip(("q_min", "q_max"), self._bounds(fields.get("output_element")), strict=False):
            if name in self._infos:
                fields.setdefault(name, bound)
        # Elements come first, because bounds may follow from them.
        for name in (*self._elements, *self._infos):
            if name not in self._defaults and name not in fields:
                self._refuse(name, packed)
        return fields

    def _settled(
        self, arrays: Mapping[str, _ArrayType], names: frozenset[str], given: Mapping[str, Any]
    ) -> tuple[dict[str, Any], tuple[ArgumentSpec, ...]]:
        """Return the fields without the sizes, and the arguments that such a problem has."""
        fields = {name: self._as_enum(name, value) for name, value in given.items()}
        for name in self._switches:
            if name not in fields:
                fields[name] = self._switched(name, names)
        # Elements say what arguments there are; other implied fields wait for the lengths of axes.
        implied = self._implied(arrays)
        fields = {name: implied[name] for name in self._elements if name in implied} | fields
        for each in self._signature:
            name = self._tied(each)
            if name and name not in fields and each.name in arrays:
                fields[name] = self._element(each.name, arrays[each.name].dtype)
        return fields, tuple(existing(self._signature, self._defaults | fields))

    def _implied(self, arrays: Mapping[str, _ArrayType]) -> Mapping[str, Any]:
        return self._descriptor.implied({name: each.shape for name, each in arrays.items()})

    def _switched(self, field: str, names: frozenset[str]) -> Any:
        """Return the first value of a switch for which all given arguments exist; if there is none, its default."""
        values = self._switches[field]

        def fits(value: Any) -> bool:
            return all(any(value in each.when.get(field, values) for each in self._declared[name]) for name in names)

        return next(filter(fits, values), values[0])

    def _measure(
        self, taken: tuple[ArgumentSpec, ...], arrays: Mapping[str, _ArrayType], fields: dict[str, Any]
    ) -> dict[str, str]:
        """Add the sizes of the arrays to `fields`. Return the packed arrays that hide a size, by field."""
        packed: dict[str, str] = {}
        for each in taken:
            seen = arrays.get(each.name)
            if seen is None:
                continue
            had = (math.prod(seen.shape),) if each.flat else seen.shape
            axes = list(each.shape)
            whole = bool(axes) and axes[0].whole
            if len(axes) != len(had) and not whole:
                raise InvalidProblem(self._op, each.name, f"shape {seen.shape}", f"have the axes ({each.axes})")
            element = self._kind(each, fields)
            if axes and element is not None and element.is_packed:
                packed[axes.pop().name] = each.name
            elif whole and axes[0].name in self._infos:
                fields.setdefault(axes.pop().name, had)
            if axes and element is not None and element.is_split:
                had = (*had[:-1], had[-1] // 2)
            for axis, extent in zip(axes, had, strict=False):
                if axis.name in self._infos:
                    fields.setdefault(axis.name, extent // axis.factor)
        return packed

    def _kind(self, each: ArgumentSpec, fields: Mapping[str, Any]) -> ElementKind | None:
        named = (fields.get(name) or self._defaults.get(name) for name in each.element_names)
        element = next((kind for kind in (*named, *each.fixed_elements) if kind is not None), None)
        return None if element is None else ElementKind(element)

    def _bounds(self, code: Any) -> tuple[int, ...]:
        """Return the default bounds: symmetric s8 for a matrix product, else the range of the output codes."""
        if self._descriptor.layout is not None:
            return (-127, 127)
        return (ElementKind(code).integer_range or ()) if code in (*CODES, ElementKind.S16) else ()

    def _refuse(self, field: str, packed: Mapping[str, str]) -> NoReturn:
        sources = self.sources(field)
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
