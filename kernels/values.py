"""Numbers of a floating element: rounding, special numbers, random numbers, and broadcasting of scales over data."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


def finfo_of(element: ElementKind) -> Any:
    """Return the `finfo` of an element."""
    finfo: Any = ml_dtypes.finfo  # it has no annotations
    return finfo(storage_dtype(element))


def rounded(values: Array, element: ElementKind) -> Array:
    """Round to the element; finite numbers beyond its range become its largest ones."""
    most = float(finfo_of(element).max)
    with np.errstate(all="ignore"):
        kept = np.asarray(np.where(np.isinf(values), values, np.clip(values, -most, most)))
        return np.asarray(kept.astype(storage_dtype(element)))


def specials(element: ElementKind) -> Array:
    """Return NaN, zeros, ones, infinities, extremes and subnormals of a floating element, of both signs, as f64."""
    info = finfo_of(element)
    tiny, least, most = (float(v) for v in (info.smallest_normal, info.smallest_subnormal, info.max))
    edges = [0.0, math.inf, least, 3 * least, tiny - least, tiny, most, 1.0]
    return np.array([math.nan, *edges, *(-edge for edge in edges)])


def floats(shape: Shape, element: ElementKind, rng: np.random.Generator) -> Array:
    """Draw finite f64 numbers, most of them within a few binades and some over many.

    Parameters
    ----------
    shape : tuple of int
        Shape of the result.
    element : ElementKind
        The element that they will be rounded to; it bounds the exponents.
    rng : Generator
        Source of the random numbers.
    """
    reach = {ElementKind.F16: 8, ElementKind.F64: 60}.get(element, 24)
    exponent = np.where(rng.random(shape) < 0.2, rng.uniform(-reach, reach, shape), rng.uniform(-3, 3, shape))
    return np.asarray(rng.standard_normal(shape) * np.exp2(exponent))


def spread(problem: Any, scale: Array, shape: Shape) -> Array:
    """Return scales in a shape that broadcasts against data of a shape."""
    if getattr(problem, "group_size", None) is not None:
        return np.repeat(scale, problem.group_size, axis=1)
    if getattr(problem, "axis", None) is not None:
        return scale.reshape([-1 if axis == problem.axis else 1 for axis in range(len(shape))])
    return scale.reshape(-1, 1) if hasattr(problem, "d") else scale.reshape(())
