"""Rules for arguments on a CPU and on a GPU.

Nothing here reads memory. An array is described by its address, shape, strides and element size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.registry.descriptor import Argument, Role, storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown

Shape = tuple[int, ...]
WRITTEN = (Role.OUTPUT, Role.SCRATCH, Role.STATE)


class StridedMemory(NamedTuple):
    """The memory of an array's elements.

    Attributes
    ----------
    address : int
        Address of the first element.
    shape, strides : tuple of int
        Extents, and strides in bytes.
    itemsize : int
        Bytes per element.
    """

    address: int
    shape: Shape
    strides: Shape
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end, relative to the address. They are equal if there are no elements."""
        if 0 in self.shape:
            return 0, 0
        low = high = 0
        for extent, stride in zip(self.shape, self.strides, strict=True):
            if stride < 0:
                low += (extent - 1) * stride
            else:
                high += (extent - 1) * stride
        return low, high + self.itemsize


def refuse_unknown(op: str, arguments: Iterable[Argument], given: Iterable[str]) -> None:
    """Raise `InvalidProblem` for an unknown argument."""
    known = [argument.name for argument in arguments]
    for name in given:
        if name not in known:
            raise InvalidProblem(op, name, "an unknown argument", f"be one of {', '.join(known)}")


def wanted(argument: Argument, shape: Shape) -> str:
    """Return the requirement on an argument in words. `shape` is its shape in elements."""
    kinds = " or ".join(argument.elements)
    if argument.is_scalar:
        return f"a number or an array of one {kinds}"
    if any(element.is_packed for element in argument.elements):
        kinds += ", two to a byte (uint8)"
    if any(element.is_split for element in argument.elements):
        kinds += ", in two halves (int8)"
    if argument.flat and math.prod(shape) != argument.shape[0]:
        return f"an array of {argument.shape[0]} elements of {kinds}"
    return f"an array of shape {storage_shape(shape, argument.elements[0])} of {kinds}"


def flat_shape(op: str, arguments: tuple[Argument, ...], shapes: Mapping[str, Shape]) -> Shape | None:
    """Return the shape, in elements, of all flat arguments: the shape of the first one that is not packed.

    `shapes` has the stored shapes of the given arrays. Errors name `op`.
    """
    flat = [argument for argument in arguments if argument.flat and argument.name in shapes]
    packed = any(argument.flat and argument.elements[0].is_packed for argument in arguments)
    for argument in flat:
        if not argument.elements[0].is_packed:
            shape = shapes[argument.name]
            if packed and not shape:
                raise InvalidProblem(op, argument.name, "an array of rank 0", "have an axis to pack along")
            return shape
    for argument in flat:
        shape, count = shapes[argument.name], argument.shape[0]
        if len(shape) == 1 and shape[0] == -(-count // 2):
            return (count,)
        if shape and 2 * math.prod(shape) == count:
            return (*shape[:-1], 2 * shape[-1])
    return None


def shapes(op: str, arguments: tuple[Argument, ...], given: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape, in elements, of every argument. `given` has the stored shapes of the given arrays."""
    flat = flat_shape(op, arguments, given)
    return {each.name: flat if each.flat and flat is not None else each.shape for each in arguments}


def checked_shape(op: str, argument: Argument, element: ElementKind, had: Shape, shape: Shape) -> None:
    """Raise `InvalidProblem` if an array of shape `had` does not hold `shape` elements."""
    if argument.is_scalar:
        if element.is_packed:
            raise InvalidProblem(op, argument.name, "an array", f"be a number: {element} has no array of one element")
        if math.prod(had) != 1:
            raise InvalidProblem(op, argument.name, f"shape {had}", "be a number or an array of one element")
    elif had != storage_shape(shape, element) or (argument.flat and math.prod(shape) != math.prod(argument.shape)):
        raise InvalidProblem(op, argument.name, f"shape {had}", f"be {wanted(argument, shape)}")


def number(op: str, argument: Argument, value: Any) -> Any:
    """Return a number as the argument's first element: an int, or a NumPy scalar rounded once.

    Raises
    ------
    InvalidProblem
        If it is not a number, or the element cannot represent it. A scale must also be finite and not 0.
    """
    name, element = argument.name, argument.elements[0]
    if isinstance(value, np.generic):
        is_number = value.dtype.kind in "iuf" or value.dtype == storage_dtype(ElementKind.BF16)
    else:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number:
        raise InvalidProblem(op, name, shown(value), "be a number")
    if element.integer_range is not None:
        low, high = element.integer_range
        is_whole = isinstance(value, (int, np.integer)) or float(value).is_integer()
        if not is_whole or not low <= int(value) <= high:
            rule = f"be an integer in [{low}, {high}], the range of {element}"
            raise InvalidProblem(op, name, shown(value), rule)
        return int(value)
    try:
        value = _wide(value, element)
    except OverflowError:
        raise InvalidProblem(op, name, shown(value), f"be representable in {element}") from None
    with np.errstate(over="ignore", under="ignore"):
        rounded = rounded_to(np.asarray(value, np.float64), storage_dtype(element))[()]
    if argument.role is Role.SCALE and (not np.isfinite(rounded) or rounded == 0):
        raise InvalidProblem(op, name, shown(value), f"be finite and not zero in {element}")
    if np.isinf(rounded) and not math.isinf(value):
        raise InvalidProblem(op, name, shown(value), f"be representable in {element}")
    return rounded


def _wide(value: Any, element: ElementKind) -> float:
    """Return a number as an f64 that rounds to `element` like the number itself.

    An integer of more than 53 bits, or a long double, is rounded to odd, so that rounding twice is right.
    """
    value = int(value) if isinstance(value, np.integer) else value  # Python compares it with a float exactly
    near = float(value)
    if type(value) is float or element is ElementKind.F64 or near == value or math.isnan(near):
        return near
    is_even = not struct.unpack("<q", struct.pack("<d", near))[0] & 1
    return math.nextafter(near, math.inf if value > near else -math.inf) if is_even else near


def refuse_overlap(
    op: str, arguments: tuple[Argument, ...], places: Mapping[str, StridedMemory], *, in_place: bool
) -> None:
    """Raise `InvalidProblem` if an output shares memory with another argument.

    With `in_place` an output may be exactly the same array as an input.
    """
    written = [a.name for a in arguments if a.role in WRITTEN and a.name in places]
    for target in written:
        for name, other in places.items():
            if name == target or (name in written and name < target):
                continue
            out = places[target]
            if not (in_place and name not in written and out == other) and shares(out, other):
                rule = f"be apart from {name}" + (", or exactly the same array" if in_place else "")
                raise InvalidProblem(op, target, f"memory that overlaps {name}", rule)


def shares(a: StridedMemory, b: StridedMemory) -> bool:
    """Whether two arrays have a byte in common. True if that is too expensive to decide."""
    (a_low, a_high), (b_low, b_high) = a.span, b.span
    if not (a.address + a_low < b.address + b_high and b.address + b_low < a.address + a_high):
        return False
    if a_low == a_high or b_low == b_high:
        return False
    try:
        return np.shares_memory(_shadow(a), _shadow(b), max_work=10_000)  # type: ignore[arg-type]  # the stub knows two of the allowed values
    except np.exceptions.TooHardError:
        return True


class _Shadow:
    """An address that NumPy may compute with but must not read."""

    def __init__(self, place: StridedMemory) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (place.address, False),
            "shape": place.shape,
            "strides": place.strides,
            "typestr": f"|V{place.itemsize}",
        }


def _shadow(place: StridedMemory) -> np.ndarray[Any, Any]:
    return np.asarray(_Shadow(place))


def repeats(place: StridedMemory) -> bool:
    """Whether two indices can name the same byte (a broadcast or otherwise self-overlapping view)."""
    span = 0
    axes = [(abs(s), n) for s, n in zip(place.strides, place.shape, strict=True) if n > 1]
    for stride, extent in sorted(axes):
        if stride < max(span + place.itemsize, place.itemsize):
            return 0 not in place.shape
        span += stride * (extent - 1)
    return False
