"""NumPy dtypes of element kinds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from skuda.registry.elements import ElementKind

_STORAGE: dict[ElementKind, np.dtype[Any]] = {
    ElementKind.F16: np.dtype(np.float16),
    ElementKind.BF16: np.dtype(ml_dtypes.bfloat16),
    ElementKind.F32: np.dtype(np.float32),
    ElementKind.F64: np.dtype(np.float64),
    ElementKind.S4: np.dtype(np.uint8),
    ElementKind.U4: np.dtype(np.uint8),
    ElementKind.S8: np.dtype(np.int8),
    ElementKind.U8: np.dtype(np.uint8),
    ElementKind.S16: np.dtype(np.int8),
    ElementKind.S32: np.dtype(np.int32),
    ElementKind.U32: np.dtype(np.uint32),
    ElementKind.S64: np.dtype(np.int64),
}


def storage_dtype(element: ElementKind) -> np.dtype[Any]:
    """Return the dtype of an array that stores `element`; packed and split elements are stored in bytes.

    Raises
    ------
    KeyError
        If no NumPy dtype stores the element.
    """
    return _STORAGE[element]


def compute_dtype(element: ElementKind) -> np.dtype[Any]:
    """Return the dtype of the arithmetic on `element`: the compute type C."""
    return _STORAGE[element.compute]


def rounded_to(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Round once to `dtype`, to nearest, ties to even.

    ml_dtypes converts f64 to bf16 through f32, which rounds twice. Here the conversion to f32 rounds to odd, which
    keeps the information that the second rounding needs.
    """
    if values.dtype != np.float64 or dtype != _STORAGE[ElementKind.BF16]:
        return np.asarray(values, dtype)
    with np.errstate(all="ignore"):
        near = np.asarray(values.astype(np.float32))
        inexact = near.astype(np.float64) != values
        outward = np.abs(near.astype(np.float64)) > np.abs(values)
        toward_zero = np.where(outward, np.nextafter(near, np.float32(0)), near)
        odd = toward_zero.view(np.uint32) | (inexact & ~np.isnan(values)).astype(np.uint32)
        return np.asarray(odd.view(np.float32).astype(dtype))
