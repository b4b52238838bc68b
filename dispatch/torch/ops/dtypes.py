"""Converts between elements of the registry and dtypes of torch."""

from __future__ import annotations

import torch

from skuda.kernels.dtypes import storage_dtype
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem


def torch_dtype(element: ElementKind) -> torch.dtype:
    """Return the dtype that stores an element. Packed elements are stored in bytes."""
    found: torch.dtype = getattr(torch, str(storage_dtype(element)))
    return found


def element_of(dtype: torch.dtype) -> ElementKind:
    """Return the element that a dtype of torch stores.

    Raises
    ------
    InvalidProblem
        For a dtype without an element.
    """
    found = _ELEMENTS.get(dtype)
    if found is None:
        raise InvalidProblem("skuda.torch", "dtype", str(dtype), f"be one of {', '.join(map(str, _ELEMENTS))}")
    return found


_ELEMENTS = {torch_dtype(element): element for element in (*FLOATS, ElementKind.S8, ElementKind.U8, ElementKind.S32)}
