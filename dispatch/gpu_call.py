"""A checked call as data: how to recognize the next one like it, and how its values become a kernel's parameters."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from skuda.dispatch.gpu_facts import Framework, Guard
from skuda.kernels.launch import Columns, Constant, Leading, Number, Parameter, Pointer, Rows, Step, Which
from skuda.registry.elements import ElementKind

_FORMATS = {
    ElementKind.F16: "e",
    ElementKind.BF16: "H",
    ElementKind.F32: "f",
    ElementKind.F64: "d",
    ElementKind.S8: "b",
    ElementKind.S4: "b",
    ElementKind.U8: "B",
    ElementKind.U4: "B",
    ElementKind.S32: "i",
    ElementKind.U32: "I",
    ElementKind.S64: "q",
}


class Clash(NamedTuple):
    """Two arrays that must be apart, one of them written.

    Attributes
    ----------
    written, other : int
        Where their addresses stand among the values.
    low, high : int
        They reach into each other where the one address less the other lies between these.
    equal : bool
        Whether they may be exactly the same array.
    """

    written: int
    other: int
    low: int
    high: int
    equal: bool


class Made(NamedTuple):
    """An output that was left out.

    Attributes
    ----------
    name : str
        The argument.
    make : callable
        Returns a new array, for the stream whose handle is given or the framework's current one (None).
    address : callable
        Returns the address of such an array.
    """

    name: str
    make: Callable[[int | None], Any]
    address: Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was checked in full. It holds no array of the caller's.

    Attributes
    ----------
    count : int
        How many arguments were given.
    guards : tuple of (str, Guard)
        Every argument given; each guard gives one value, or None where the argument is not like the one checked.
    clashes : tuple of Clash
        What must be apart.
    made : tuple of Made
        What must be made; the new addresses follow the guards' values.
    picks : tuple of callable
        For every step: from all values to its parameters.
    constants : tuple
        What follows the values, the new addresses and those of scratch.
    framework : Framework
        Of the first array.
    stream : callable
        Gives the handle of the current stream.
    direct : bool
        Whether a launch is all there is to a run: the framework need not wait.
    """

    count: int
    guards: tuple[tuple[str, Guard], ...]
    clashes: tuple[Clash, ...]
    made: tuple[Made, ...]
    picks: tuple[Callable[[Any], tuple[Any, ...]], ...]
    constants: tuple[Any, ...]
    framework: Framework
    stream: Callable[[], int]
    direct: bool

    def values(self, arrays: Mapping[str, Any]) -> list[Any] | None:
        """Return one value per guard where `arrays` are like those that were checked, else None."""
        if len(arrays) != self.count:
            return None
        values = []
        get = arrays.get
        for name, guard in self.guards:
            value = guard(get(name))
            if value is None:
                return None
            values.append(value)
        for written, other, low, high, equal in self.clashes:
            distance = values[written] - values[other]
            # Arrays that only reach into each other's gaps are for the full check to tell apart.
            if low < distance < high and (distance or not equal):
                return None
        return values

    def checked_values(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return the values of the very arrays that were checked."""
        return [guard(arrays.get(name)) for name, guard in self.guards]


def format_of(parameter: Parameter) -> str:
    """Return a parameter's `struct` format."""
    match parameter:
        case Pointer():
            return "Q"
        case Number() | Constant():
            return _FORMATS[parameter.element]
        case Which():
            return "i"
        case Leading() | Rows() | Columns():
            return "q"


def parameter_layout(step: Step) -> tuple[tuple[int, int], ...]:
    """Return (offset, size) of every parameter of a step."""
    layout, end = [], 0
    for parameter in step.parameters:
        size = struct.calcsize(format_of(parameter))
        offset = -(-end // size) * size
        layout.append((offset, size))
        end = offset + size
    return tuple(layout)


def packer(step: Step) -> struct.Struct:
    """Return what packs a step's parameters as the kernel reads them."""
    return struct.Struct("@" + "".join(format_of(parameter) for parameter in step.parameters))


def picker(indices: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what takes the values at `indices`, always as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


def packable(number: Any, element: ElementKind) -> Any:
    """Return a rounded number as `struct` takes it: bf16 as its bits."""
    if element is ElementKind.BF16:
        return struct.unpack("<I", struct.pack("<f", float(number)))[0] >> 16
    return number if isinstance(number, int) else float(number)
