"""Comparison of outputs with the reference: bit for bit, or within the kernel's promised distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.sku import KernelSku
from skuda.tools.verify.placement import is_float

Array = npt.NDArray[Any]


class Broken(Exception):
    """A check failed; `fields` are fields of the `Failure` to record, and `example` is what was run, if anything."""

    def __init__(self, message: str = "", example: Any = None, **fields: Any) -> None:
        super().__init__(message)
        self.fields, self.example = {"message": message, **fields}, example

    @classmethod
    def by(cls, error: Exception) -> Self:
        """Return an error as a failure."""
        return error if isinstance(error, cls) else cls(f"{type(error).__name__}: {error}")


class NotRun(Exception):
    """A check could not be run; the message says why."""


def compare(got: Mapping[str, Array], want: Mapping[str, Array], ulps: Mapping[str, int | None], how: str) -> None:
    """Raise `Broken` if outputs, which were obtained as `how` says, are too far from what they must be.

    `ulps` are allowed distances by name, 0 for those that it lacks, and None for any; see `differing`.
    """
    for name, expected in want.items():
        array, most = got[name], ulps.get(name, 0)
        if (array.shape, array.dtype) != (expected.shape, expected.dtype):
            kinds = [f"{each.dtype} of shape {each.shape}" for each in (array, expected)]
            raise Broken(f"{how}: it is {kinds[0]}, not {kinds[1]}", output=name)
        if most is not None and (bad := differing(array, expected, most)).any():
            raise Broken(**difference(name, bad, array, expected, how))


def allowed_ulps(sku: KernelSku, problem: Descriptor, element: ElementKind) -> int | None:
    """Return the largest allowed distance from the reference, in representable values of the output's element.

    None allows any distance. The kernel promises a distance in its compute type, before the final rounding. Rounding
    to a narrower type, or to a code, leaves near numbers at most one value apart.
    """
    most = sku.precision_guarantee.max_ulp
    if not most:
        return most
    return most if element is getattr(problem, "compute", sku.element.compute) else 1


def difference(name: str, bad: Array, got: Array, want: Array, how: str = "") -> dict[str, Any]:
    """Return the fields of a failure: the first coordinate where the mask `bad` is set, both values, and the count."""
    at = first_of(bad)
    counted = f"{int(bad.sum())} of {bad.size} elements differ"
    message = f"{how}; {counted}" if how else counted
    return {"output": name, "at": at, "got": element_text(got, at), "want": element_text(want, at), "message": message}


def bits_of(array: Array) -> Array:
    """Return an array's elements as unsigned integers."""
    return np.asarray(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape))


def differing(got: Array, want: Array, ulps: int = 0) -> Array:
    """Return a mask of the elements that differ by more than a number of representable values; NaN equals NaN.

    Both arrays have the same shape and dtype. The distance of integers is their difference.
    """
    a, b = bits_of(got), bits_of(want)
    apart = np.asarray(a != b)
    if is_float(got.dtype):
        with np.errstate(invalid="ignore"):  # a signalling NaN warns
            nan_got, nan_want = np.isnan(got), np.isnan(want)
        apart &= ~(nan_got & nan_want)
        if ulps:
            near = _distance(_ordered(a), _ordered(b)) <= ulps
            apart &= ~near | nan_got | nan_want
    elif ulps:
        apart &= _distance(got.astype(np.int64), want.astype(np.int64)) > ulps
    return apart


def _ordered(bits: Array) -> Array:
    """Map the bits of floats to s64 integers in the order of the floats; both zeros map to 0."""
    top = 1 << (8 * bits.dtype.itemsize - 1)
    magnitude = (bits & bits.dtype.type(top - 1)).astype(np.int64)
    return np.asarray(np.where(bits & bits.dtype.type(top), -magnitude, magnitude))


def _distance(a: Array, b: Array) -> Array:
    """Return the elementwise distance of two s64 arrays, or a large number where the distance would overflow."""
    most = 1 << 61
    across = np.minimum(np.abs(a), most) + np.minimum(np.abs(b), most)
    return np.asarray(np.where((a < 0) == (b < 0), np.abs(a - b), across))


def first_of(mask: Array) -> tuple[int, ...]:
    """Return the first coordinate at which a mask is set."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape)) if mask.ndim else ()


def element_text(array: Array, at: tuple[int, ...]) -> str:
    """Return an element's value and its bits in hexadecimal."""
    width = 2 * array.dtype.itemsize
    return f"{array[at]} (0x{int(bits_of(array)[at]):0{width}x})"
