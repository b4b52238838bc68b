"""Binds host arrays to the arguments of a problem: all checks and allocations, once per run.

The rule for each argument comes from `Descriptor.arguments`. No array is converted or copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from skuda.dispatch.host import rules
from skuda.dispatch.host.arrays import host_view, place_of, same_framework
from skuda.dispatch.host.floating import require_exact_mode
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Argument, Descriptor, Role, storage_shape
from skuda.registry.errors import InvalidProblem, OutOfMemory

Array = npt.NDArray[Any]


class Binding:
    """The arguments of one run, ready for a NumPy kernel.

    Raise `InvalidProblem` for a missing, unknown or unsuitable argument; `FloatModeError` if this thread does not round
    to nearest, or flushes subnormal numbers; `OutOfMemory` if an output that was left out cannot be allocated. `values`
    has a NumPy array, a NumPy scalar or an integer by name; None for an optional argument that was left out.
    """

    def __init__(self, problem: Descriptor, arguments: tuple[Argument, ...], given: Mapping[str, object]) -> None:
        require_exact_mode()  # before numbers are rounded
        self._op = problem.op_name()
        self._problem = problem
        self.values: dict[str, Any] = {}
        self._native: dict[str, object] = {}
        self._wrap = same_framework(given)
        rules.refuse_unknown(self._op, arguments, given)
        known = {argument.name: argument for argument in arguments}
        arrays: dict[str, Array] = {
            name: host_view(self._op, name, value)
            for name, value in given.items()
            if value is not None and not (known[name].is_scalar and place_of(self._op, name, value) is None)
        }
        shapes = rules.shapes(self._op, arguments, {name: array.shape for name, array in arrays.items()})
        new = new_outputs(self._op, arguments, shapes)
        for argument in arguments:
            value, shape = given.get(argument.name), shapes[argument.name]
            if value is None and argument.name in new:
                self.values[argument.name] = new[argument.name]()
            elif value is None:
                self._absent(argument, shape)
            elif argument.name in arrays:
                self.values[argument.name] = self._checked(argument, arrays[argument.name], shape)
                self._native[argument.name] = value
            else:
                self.values[argument.name] = rules.number(self._op, argument, value)
        places = {name: _place(array) for name, array in arrays.items()}
        rules.refuse_overlap(self._op, arguments, places, in_place=problem.in_place)
        self._outputs = tuple(new)

    def result(self) -> object:
        """Return the op's result: its only output, or a named tuple of its outputs."""
        outputs = [
            self._native[name] if name in self._native else self._wrap(self.values[name]) for name in self._outputs
        ]
        build = self._problem.builder
        return outputs[0] if build is None else build(*outputs)

    def _refuse(self, name: str, had: str, must: str) -> NoReturn:
        raise InvalidProblem(self._op, name, had, must)

    def _absent(self, argument: Argument, shape: tuple[int, ...]) -> None:
        if argument.required:
            self._refuse(argument.name, "nothing", f"be given: {rules.wanted(argument, shape)}")
        self.values[argument.name] = None

    def _checked(self, argument: Argument, array: Array, shape: tuple[int, ...]) -> Array:
        name = argument.name
        element = next((e for e in argument.elements if storage_dtype(e) == array.dtype), None)
        if element is None:
            self._refuse(name, f"an array of {array.dtype}", f"be {rules.wanted(argument, shape)}")
        rules.checked_shape(self._op, argument, element, array.shape, shape)
        if argument.is_scalar:
            return array.reshape(())
        if argument.role in rules.WRITTEN:
            if not array.flags.writeable:
                self._refuse(name, "a read-only array", "be writable")
            if rules.repeats(_place(array)):
                self._refuse(name, f"strides {array.strides}", "have one place in memory for every element")
        return array


def new_outputs(
    op: str, arguments: tuple[Argument, ...], shapes: Mapping[str, rules.Shape]
) -> dict[str, Callable[[], Array]]:
    """Return for every output, in the op's order, what makes a new array for it. `shapes` are those of `rules.shapes`.

    It raises `OutOfMemory` if there is no room.
    """
    found: dict[str, Callable[[], Array]] = {}
    for name, element in ((each.name, each.elements[0]) for each in arguments if each.role is Role.OUTPUT):
        found[name] = partial(new_array, op, name, storage_shape(shapes[name], element), storage_dtype(element))
    return found


def new_array(op: str, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array, or raise `OutOfMemory`."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError):  # a ValueError if no address could reach all of it
        raise OutOfMemory(op, name, math.prod(shape) * dtype.itemsize) from None


def _place(array: Array) -> rules.StridedMemory:
    return rules.StridedMemory(array.ctypes.data, array.shape, array.strides, array.itemsize)
