"""What a launch must know about a device array, and what a framework must do to take part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from skuda.dispatch.driver import driver
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import ElementKind

Guard = Callable[[Any], Any]
"""Takes an argument; returns what is passed to the kernel where it has the facts that were checked, else None."""

ANYWHERE = -1
"""The device of an array without elements."""

_CUDA_KINDS = frozenset({2, 13})  # DLPack: device memory, managed memory
_STORED = ("f16", "bf16", "f32", "f64", "s8", "u8", "s32", "u32", "s64")


class Facts(NamedTuple):
    """What a launch needs to know about an array.

    Attributes
    ----------
    address : int
        Of the first element.
    element : ElementKind or None
        As stored (packed elements show as u8); None for a type that no kernel here knows.
    kind : str
        The element's type as the framework writes it.
    shape, strides : tuple of int
        In stored elements.
    ordinal : int or None
        The CUDA device; `ANYWHERE` for no memory at all, None for memory that is not on one.
    read_only : bool
        Whether the owner forbids writing.
    stream : int or None
        Where the owner says that the last write was enqueued; None where it does not say.
    """

    address: int
    element: ElementKind | None
    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ordinal: int | None
    read_only: bool = False
    stream: int | None = None


class Together(NamedTuple):
    """How several arrays of one library are recognized at once.

    Attributes
    ----------
    same : callable
        Takes as many arrays as were checked; says whether they have the same facts but for their addresses.
    unless : str
        An expression of an array ``{0}`` that speaks against it.
    address : str
        An expression of an array ``{0}`` that is its address.
    """

    same: Callable[..., bool]
    unless: str
    address: str


class Refused(Exception):
    """An array that cannot be taken: what it is, and what it must be. Whoever knows its name says `InvalidProblem`."""

    def __init__(self, had: str, must: str) -> None:
        super().__init__(had, must)
        self.had, self.must = had, must


class Framework(ABC):
    """How one library's arrays are seen and made. Stateless.

    Attributes
    ----------
    name : str
        The library.
    waits : bool
        Whether the library cannot be told about streams, so that a run waits before and after its launch.
    borrows : bool
        Whether another library makes its arrays, whose own current stream is not the one that the work is on.
    """

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    borrows: ClassVar[bool] = False

    @abstractmethod
    def facts(self, value: Any) -> Facts:
        """Return an array's facts, without a copy.

        Raises
        ------
        Refused
            Where it cannot be seen as plain device memory.
        """

    @abstractmethod
    def empty(self, shape: tuple[int, ...], element: ElementKind, ordinal: int, stream: int | None) -> Any:
        """Return a new array on a device.

        Parameters
        ----------
        shape : tuple of int
            In stored elements.
        element : ElementKind
            As stored.
        ordinal : int
            The device.
        stream : int or None
            Handle of the stream that it will be used on; None for the framework's current one.
        """

    def address(self, value: Any) -> int:
        """Return the address of an array that `empty` made."""
        return self.facts(value).address

    def guard(self, value: Any, facts: Facts) -> Guard:
        """Return the cheap check that another array has the same facts but for its address."""
        kind, layout = type(value), facts[1:]
        size = facts.element.bits // 8 if facts.element is not None else 1

        def same(other: Any) -> int | None:
            if type(other) is not kind:
                return None
            found = self.facts(other)
            # An owner may say any address; torch and CuPy, which have guards of their own, only give aligned ones.
            return found[0] if found[1:] == layout and found[0] % size == 0 else None

        return same

    def together(self, values: tuple[Any, ...]) -> Together | None:  # noqa: ARG002  most libraries have no such thing
        """Return what recognizes several arrays at once, faster than a guard for each; None where there is none."""
        return None

    def current_stream(self, ordinal: int) -> Callable[[], int]:  # noqa: ARG002  one per device in most libraries
        """Return how to ask for the handle of the current stream of a device; 0 is the default stream."""
        return int

    def deliver(self, array: Any) -> Any:
        """Turn what `empty` made into what the caller gets."""
        return array


def element_of(dtype: np.dtype[Any]) -> ElementKind | None:
    """Return the element that a NumPy dtype stores, or None."""
    return _ELEMENTS.get(dtype)


def in_elements(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return strides given in bytes in elements of `size` bytes.

    Raises
    ------
    Refused
        Where they do not step by whole elements.
    """
    if any(stride % size for stride in strides):
        raise Refused(f"strides of {strides} bytes", f"step by whole elements of {size} bytes")
    return tuple(stride // size for stride in strides)


def ordinal_said(value: Any) -> int | None:
    """Return the CUDA device that an array names itself, or None."""
    kind, ordinal = value.__dlpack_device__()
    return int(ordinal) if int(kind) in _CUDA_KINDS else None


def ordinal_asked(address: int, count: int) -> int | None:
    """Return the CUDA device on which the driver knows the memory of `count` elements to be, or None."""
    return driver().ordinal_of(address) if count else ANYWHERE


_ELEMENTS: dict[np.dtype[Any], ElementKind] = {storage_dtype(element): element for element in map(ElementKind, _STORED)}
