"""Binding host arrays to a problem's arguments: every check, every allocation, once per run.

The rule for each argument comes from `Descriptor.arguments`; nothing is converted or copied on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from skuda.dispatch.arrays import HOST_PLACE, host_view, place_of, same_framework
from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem

Array = npt.NDArray[Any]


class Binding:
    """Arguments of one run, ready for a NumPy kernel.

    Attributes
    ----------
    values : dict
        Argument name to NumPy array, NumPy scalar, integer, or None for an optional argument left out.
    """

    def __init__(self, problem: Descriptor, arguments: tuple[Argument, ...], given: Mapping[str, object]) -> None:
        self._op = problem.op_name()
        self._problem = problem
        self.values: dict[str, Any] = {}
        self._native: dict[str, object] = {}
        self._wrap = same_framework(given)
        known = {argument.name: argument for argument in arguments}
        for name in given:
            if name not in known:
                self._refuse(name, "an unknown argument", f"be one of {', '.join(known)}")
        arrays: dict[str, Array] = {
            name: self._view(name, value)
            for name, value in given.items()
            if value is not None and not (known[name].is_scalar and place_of(self._op, name, value) is None)
        }
        flat = self._flat_shape(arguments, arrays)
        for argument in arguments:
            value = given.get(argument.name)
            shape = flat if argument.flat and flat is not None else argument.shape
            if value is None:
                self._absent(argument, shape)
            elif argument.name in arrays:
                self.values[argument.name] = self._checked(argument, arrays[argument.name], shape)
                self._native[argument.name] = value
            else:
                self.values[argument.name] = self._number(argument, value)
        self._refuse_overlap(arguments, arrays)
        self._outputs = [argument.name for argument in arguments if argument.role is Role.OUTPUT]

    def result(self) -> object:
        """Return the outputs as the op returns them: alone, or as its named tuple."""
        outputs = [
            self._native[name] if name in self._native else self._wrap(self.values[name]) for name in self._outputs
        ]
        build = type(self._problem).result
        return outputs[0] if build is None else build(*outputs)

    def _refuse(self, name: str, had: str, must: str) -> NoReturn:
        raise InvalidProblem(self._op, name, had, must)

    def _view(self, name: str, value: Any) -> Array:
        place = place_of(self._op, name, value)
        if place is None:
            self._refuse(name, repr(value), "be an array")
        if place != HOST_PLACE:
            self._refuse(name, f"an array on {place[0]}:{place[1]}", "be on the CPU, where this plan runs")
        return host_view(self._op, name, value)

    def _flat_shape(self, arguments: tuple[Argument, ...], arrays: dict[str, Array]) -> tuple[int, ...] | None:
        """Shape, in elements, that all flat arguments share: that of the first whose elements are not packed."""
        flat = [argument for argument in arguments if argument.flat and argument.name in arrays]
        packed = any(argument.flat and argument.elements[0].is_packed for argument in arguments)
        for argument in flat:
            if not argument.elements[0].is_packed:
                shape = arrays[argument.name].shape
                if packed and not shape:
                    self._refuse(argument.name, "an array of rank 0", "have an axis to pack along")
                return shape
        for argument in flat:
            shape, count = arrays[argument.name].shape, argument.shape[0]
            if len(shape) == 1 and shape[0] == -(-count // 2):
                return (count,)
            if shape and 2 * math.prod(shape) == count:
                return (*shape[:-1], 2 * shape[-1])
        return None

    def _absent(self, argument: Argument, shape: tuple[int, ...]) -> None:
        name, element = argument.name, argument.elements[0]
        if argument.role is Role.OUTPUT:
            self.values[name] = np.empty(storage_shape(shape, element), storage_dtype(element))
        elif argument.required:
            self._refuse(name, "nothing", f"be given: {_wanted(argument, shape)}")
        else:
            self.values[name] = None

    def _checked(self, argument: Argument, array: Array, shape: tuple[int, ...]) -> Array:
        name = argument.name
        element = next((e for e in argument.elements if storage_dtype(e) == array.dtype), None)
        if element is None:
            self._refuse(name, f"an array of {array.dtype}", f"be {_wanted(argument, shape)}")
        if argument.is_scalar:
            if element.is_packed:
                self._refuse(name, "an array", f"be a number: {element} has no array of one element")
            if array.size != 1:
                self._refuse(name, f"shape {array.shape}", "be a number or an array of one element")
            return array.reshape(())
        wanted = storage_shape(shape, element)
        count = math.prod(argument.shape)
        if array.shape != wanted or (argument.flat and math.prod(shape) != count):
            self._refuse(name, f"shape {array.shape}", f"be {_wanted(argument, shape)}")
        if argument.role in (Role.OUTPUT, Role.SCRATCH):
            if not array.flags.writeable:
                self._refuse(name, "a read-only array", "be writable")
            if _repeats(array):
                self._refuse(name, f"strides {array.strides}", "have one place in memory for every element")
        return array

    def _number(self, argument: Argument, value: Any) -> Any:
        name, element = argument.name, argument.elements[0]
        if isinstance(value, np.generic):
            is_number = value.dtype.kind in "iuf" or value.dtype == storage_dtype(ElementKind.BF16)
        else:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number:
            self._refuse(name, repr(value), "be a number")
        if element.integer_range is not None:
            low, high = element.integer_range
            is_whole = isinstance(value, (int, np.integer)) or float(value).is_integer()
            if not is_whole or not low <= int(value) <= high:
                self._refuse(name, repr(value), f"be an integer in [{low}, {high}], the range of {element}")
            return int(value)
        try:
            value = float(value)
        except OverflowError:
            self._refuse(name, repr(value), f"be representable in {element}")
        with np.errstate(over="ignore", under="ignore"):
            number = rounded_to(np.asarray(value, np.float64), storage_dtype(element))[()]
        if argument.role is Role.SCALE and (not np.isfinite(number) or number == 0):
            self._refuse(name, repr(value), f"be finite and not zero in {element}")
        if np.isinf(number) and not math.isinf(value):
            self._refuse(name, repr(value), f"be representable in {element}")
        return number

    def _refuse_overlap(self, arguments: tuple[Argument, ...], arrays: dict[str, Array]) -> None:
        written = [a.name for a in arguments if a.role in (Role.OUTPUT, Role.SCRATCH) and a.name in arrays]
        for target in written:
            for name, other in arrays.items():
                if name == target or (name in written and name < target):
                    continue
                out = arrays[target]
                allowed = self._problem.in_place and name not in written and _same_elements(out, other)
                if not allowed and np.may_share_memory(out, other) and _shares(out, other):
                    rule = f"be apart from {name}" + (", or exactly the same array" if self._problem.in_place else "")
                    self._refuse(target, f"memory that overlaps {name}", rule)


def _wanted(argument: Argument, shape: tuple[int, ...]) -> str:
    kinds = " or ".join(argument.elements)
    if argument.is_scalar:
        return f"a number or an array of one {kinds}"
    if any(element.is_packed for element in argument.elements):
        kinds += ", two to a byte (uint8)"
    if argument.flat and math.prod(shape) != argument.shape[0]:
        return f"an array of {argument.shape[0]} elements of {kinds}"
    return f"an array of shape {storage_shape(shape, argument.elements[0])} of {kinds}"


def _same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays are the same elements in the same places."""
    return (a.ctypes.data, a.shape, a.strides, a.itemsize) == (b.ctypes.data, b.shape, b.strides, b.itemsize)


def _shares(a: Array, b: Array) -> bool:
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # the stub knows two of the allowed values
    except np.exceptions.TooHardError:
        return True


def _repeats(array: Array) -> bool:
    """Whether two indices of `array` can name the same byte (a broadcast or otherwise self-overlapping view)."""
    span = 0
    axes = [(abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
    for stride, extent in sorted(axes):
        if stride < max(span + array.itemsize, array.itemsize):
            return array.size > 0
        span += stride * (extent - 1)
    return False
