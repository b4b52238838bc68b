"""The facts about a device array that a launch needs, and the interface of a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from skuda.dispatch.cuda.driver import driver
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import ElementKind

Guard = Callable[[Any], Any]
"""A function of an argument. It returns the value for the kernel if the argument has the checked facts, else None."""

ANYWHERE = -1
"""The device of an array without elements."""

_CUDA_KINDS = frozenset({2, 13})  # DLPack: device memory, managed memory
_STORED = ("f16", "bf16", "f32", "f64", "s8", "u8", "s32", "u32", "s64")


class ArrayFacts(NamedTuple):
    """The facts about an array that a launch needs."""

    address: int  # address of the first element
    element: ElementKind | None
    """The stored element; packed elements are stored as u8. None for a type that no kernel here knows."""
    kind: str  # the element's type as the framework writes it
    shape: tuple[int, ...]  # in stored elements, as the strides
    strides: tuple[int, ...]
    ordinal: int | None  # the CUDA device; `ANYWHERE` for an array without elements, None for memory on no CUDA device
    read_only: bool = False  # whether the owner forbids writing
    stream: int | None = None  # the stream of the last write, as the owner reports it; None if it does not report one


class JointCheck(NamedTuple):
    """A check of several arrays of one library at once."""

    same: Callable[..., bool]
    """Takes as many arrays as were checked; returns whether they have the same facts except for their addresses."""
    strict: Callable[[], bool]
    """Returns whether, as this thread is set, `same` refuses every array of which `unless` is true."""
    unless: str  # an expression of an array ``{0}``; where it is true, the array is not like the one checked
    address: str  # an expression of an array ``{0}`` that gives its address


class Refused(Exception):
    """An array cannot be used: its kind, and the rule. The caller raises `InvalidProblem`."""

    def __init__(self, had: str, must: str) -> None:
        super().__init__(had, must)
        self.had, self.must = had, must


class Framework(ABC):
    """Reads and allocates the arrays of one library. Stateless."""

    name: ClassVar[str]
    waits: ClassVar[bool] = False
    """Whether the library has no interface for streams, so that a run waits before and after its launch."""
    borrows: ClassVar[bool] = False
    """Whether another library allocates its arrays; that library's current stream is not the stream of the work."""

    @abstractmethod
    def facts(self, value: Any) -> ArrayFacts:
        """Return an array's facts, without a copy. Raise `Refused` if it is not plain device memory."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], element: ElementKind, ordinal: int, stream: int | None) -> Any:
        """Return a new array on a device, with a stored shape and element.

        `stream` is the handle of the stream that will use it. None means the framework's current stream.
        """

    def maker(self, shape: tuple[int, ...], element: ElementKind, ordinal: int) -> Callable[[int | None], Any]:
        """Return a function of the stream that works like `empty`, for many equal arrays."""
        return partial(self.empty, shape, element, ordinal)

    def address(self, value: Any) -> int:
        """Return the address of an array that `empty` made."""
        return self.facts(value).address

    def guard(self, value: Any, facts: ArrayFacts) -> Guard:
        """Return a cheap check that another array has the same facts except for its address."""
        kind, layout = type(value), facts[1:]
        size = facts.element.bits // 8 if facts.element is not None else 1

        def same(other: Any) -> int | None:
            if type(other) is not kind:
                return None
            found = self.facts(other)
            # Any address is possible here. Torch and CuPy, whose allocations are aligned, have their own guards.
            return found[0] if found[1:] == layout and found[0] % size == 0 else None

        return same

    def joint_check(self, values: tuple[Any, ...]) -> JointCheck | None:  # noqa: ARG002  most libraries have none
        """Return a check of several arrays at once that is faster than a guard for each, or None."""
        return None

    def current_stream(self, ordinal: int) -> Callable[[], int]:  # noqa: ARG002  one per device in most libraries
        """Return a getter of the handle of a device's current stream; 0 is the default stream."""
        return int

    def deliver(self, array: Any) -> Any:
        """Convert an array made by `empty` to the type that the caller gets."""
        return array


def element_of(dtype: np.dtype[Any]) -> ElementKind | None:
    """Return the element that a NumPy dtype stores, or None."""
    return ELEMENTS.get(dtype)


def in_elements(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return strides given in bytes in elements of `size` bytes.

    Raise `Refused` if one is not a whole number of elements.
    """
    if any(stride % size for stride in strides):
        raise Refused(f"strides of {strides} bytes", f"step by whole elements of {size} bytes")
    return tuple(stride // size for stride in strides)


def ordinal_said(value: Any) -> int | None:
    """Return the ordinal of the CUDA device that an array reports, or None."""
    kind, ordinal = value.__dlpack_device__()
    return int(ordinal) if int(kind) in _CUDA_KINDS else None


def ordinal_asked(address: int, count: int) -> int | None:
    """Return the ordinal of the CUDA device that the driver reports for `count` elements at an address, or None."""
    return driver().ordinal_of(address) if count else ANYWHERE


ELEMENTS: dict[np.dtype[Any], ElementKind] = {storage_dtype(element): element for element in map(ElementKind, _STORED)}
