"""Element kinds as NumPy dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

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
    ElementKind.S32: np.dtype(np.int32),
    ElementKind.U32: np.dtype(np.uint32),
    ElementKind.S64: np.dtype(np.int64),
}


def storage_dtype(element: ElementKind) -> np.dtype[Any]:
    """Return the dtype of an array that stores `element`; packed elements are stored in bytes.

    Raises
    ------
    KeyError
        For an element that NumPy arrays do not hold.
    """
    return _STORAGE[element]


def compute_dtype(element: ElementKind) -> np.dtype[Any]:
    """Return the dtype that arithmetic on `element` happens in (numerics: C)."""
    return _STORAGE[element.compute]
