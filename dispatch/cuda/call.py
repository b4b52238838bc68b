"""A checked call as data: the recognizer of the next call like it, and how its values become kernel parameters."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from skuda.dispatch.cuda.facts import Framework
from skuda.dispatch.cuda.recognizer import Given, Recognizer
from skuda.dispatch.cuda.tensor_maps import ALIGNMENT, BYTES, Encoder, encoder
from skuda.kernels.launch import (
    Columns,
    Constant,
    Leading,
    Number,
    Parameter,
    Pointer,
    Rows,
    Step,
    TensorMap,
    Which,
)
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
    """A call that was checked in full. It holds none of the caller's arrays.

    Attributes
    ----------
    given : tuple of Given
        Every argument given.
    values : Recognizer
        Gives a new list of one value for each of them where a call is like the one that was checked, else None.
    parameters : Recognizer or None
        Gives the parameters of the only step directly; None for several steps, or where an output must be allocated.
    made : tuple of Made
        The outputs to allocate; their addresses follow the values.
    picks : tuple of callable
        For every step: from all values to its parameters.
    constants : tuple
        Constants that follow the values, the new addresses and the scratch addresses.
    framework : Framework
        Of the first array.
    stream : callable
        Gives the handle of the current stream.
    direct : bool
        Whether a run is only a launch, because the framework need not wait.
    """

    given: tuple[Given, ...]
    values: Recognizer
    parameters: Recognizer | None
    made: tuple[Made, ...]
    picks: tuple[Callable[[Any], tuple[Any, ...]], ...]
    constants: tuple[Any, ...]
    framework: Framework
    stream: Callable[[], int]
    direct: bool

    def checked_values(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Return the values of the arrays that were checked."""
        return [one.guard(arrays.get(one.name)) for one in self.given]


def format_of(parameter: Parameter) -> str:
    """Return a parameter's `struct` format."""
    match parameter:
        case TensorMap():
            return f"{BYTES}s"
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
    layout, end = [], step.lead
    for parameter in step.parameters:
        size = struct.calcsize(format_of(parameter))
        alignment = min(size, ALIGNMENT)
        offset = step.lead + -(-(end - step.lead) // alignment) * alignment
        layout.append((offset, size))
        end = offset + size
    return tuple(layout)


class Packer(NamedTuple):
    """Packs a step's parameters as the kernel reads them.

    `size` is in bytes. `pack` takes the parameters, a tensor map as two: an address and the bytes between rows.
    """

    size: int
    pack: Callable[..., bytes]


def packer(step: Step, op: str) -> Packer:
    """Return the packer of a step, whose tensor maps come first so that alignment needs no gap; errors name `op`."""
    whole = struct.Struct(f"@{step.lead}x" + "".join(format_of(parameter) for parameter in step.parameters))
    maps: list[Encoder] = [encoder(each, op) for each in step.parameters if isinstance(each, TensorMap)]
    if not maps:
        return Packer(whole.size, whole.pack)
    count = len(maps)

    def pack(*given: Any) -> bytes:
        made = [encode(given[2 * at], given[2 * at + 1]) for at, encode in enumerate(maps)]
        return whole.pack(*made, *given[2 * count :])

    return Packer(whole.size, pack)


def picker(indices: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that takes the values at `indices`, always as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


def packable(number: Any, element: ElementKind) -> Any:
    """Return a number in the form that `struct` packs exactly: f32 rounded, and bf16, which is, as its bits."""
    if element is ElementKind.BF16:
        return struct.unpack("<I", struct.pack("<f", float(number)))[0] >> 16
    if element is ElementKind.F32:
        return struct.unpack("<f", struct.pack("<f", float(number)))[0]
    return number if isinstance(number, int) else float(number)
