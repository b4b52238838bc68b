"""Comparison of outputs with the reference: bit for bit, or within the kernel's promised distance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch.plan import Plan
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import ElementKind
from skuda.registry.sku import KernelSku
from skuda.tools.verify.placement import is_float

Array = npt.NDArray[Any]


class Spoiled(Exception):
    """A broken promise; `fields` are the fields of the `Failure` to record."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.fields = fields


def disagreement(
    plan: Plan, got: Mapping[str, Array], want: Mapping[str, Array], first: Mapping[str, Array], how: str = ""
) -> dict[str, Any]:
    """Return the fields of a failure if outputs break the kernel's promise; an empty dict otherwise.

    Parameters
    ----------
    plan : Plan
        The plan that gave the outputs.
    got : mapping of str to array
        The outputs.
    want, first : mapping of str to array
        The reference's outputs and those of an earlier run. A deterministic kernel must repeat the bits of `first`;
        any other must be within its promised distance of `want`.
    how : str
        How the outputs were obtained, for the message.
    """
    stable = plan.precision_guarantee.deterministic
    elements = {argument.name: argument.elements[0] for argument in plan.arguments}
    for name, expected in (first if stable else want).items():
        ulps = 0 if stable else allowed_ulps(plan.sku, plan.problem, elements[name])
        if ulps is not None:
            bad = differing(got[name], expected, ulps)
            if bad.any():
                return difference(name, bad, got[name], expected, how)
    return {}


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
    """Return the fields of a failure: the first coordinate where `bad` is set, both values there, and the count.

    Parameters
    ----------
    name : str
        Name of the output.
    bad : array of bool
        Mask of the elements that differ.
    got, want : array
        The output and the expected output.
    how : str
        How the output was obtained, for the message.
    """
    at = first_of(bad)
    counted = f"{int(bad.sum())} of {bad.size} elements differ"
    message = f"{how}; {counted}" if how else counted
    return {"output": name, "at": at, "got": told(got, at), "want": told(want, at), "message": message}


def bits_of(array: Array) -> Array:
    """Return an array's elements as unsigned integers."""
    return np.asarray(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape))


def differing(got: Array, want: Array, ulps: int = 0) -> Array:
    """Return a mask of the elements that differ by more than a number of representable values; NaN equals NaN.

    Parameters
    ----------
    got, want : array
        Arrays of the same shape and dtype.
    ulps : int
        The largest allowed distance: in representable values for floats, in codes for integers.
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


def told(array: Array, at: tuple[int, ...]) -> str:
    """Return an element's value and its bits in hexadecimal."""
    width = 2 * array.dtype.itemsize
    return f"{array[at]} (0x{int(bits_of(array)[at]):0{width}x})"
