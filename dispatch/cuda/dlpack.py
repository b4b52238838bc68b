"""Reading a DLPack capsule, the only array standard that names bf16 and the device.

The capsule is only read and keeps its name, so dropping it returns the array to its owner.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from skuda.registry.elements import ElementKind

# (type code, bits) of the DLPack standard.
_ELEMENTS = {
    (0, 8): ElementKind.S8,
    (0, 32): ElementKind.S32,
    (0, 64): ElementKind.S64,
    (1, 8): ElementKind.U8,
    (1, 32): ElementKind.U32,
    (2, 16): ElementKind.F16,
    (2, 32): ElementKind.F32,
    (2, 64): ElementKind.F64,
    (4, 16): ElementKind.BF16,
    (6, 8): ElementKind.BOOL,
}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Tensor(NamedTuple):
    """The array that a capsule describes."""

    address: int  # of the first element
    element: ElementKind | None  # None for a type that no kernel here knows
    kind: str  # the type as DLPack writes it, for messages
    shape: tuple[int, ...]  # in elements
    strides: tuple[int, ...]
    device: tuple[int, int]  # DLPack device type and ordinal


def read(capsule: Any) -> Tensor:
    """Read a capsule named ``dltensor``.

    Raise `ValueError` if it has another name: it was consumed, or has a later version than requested.
    """
    api = ctypes.pythonapi
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    tensor = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else dense_strides(shape)
    element = _ELEMENTS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    return Tensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        element=element,
        kind=f"DLPack type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes",
        shape=shape,
        strides=strides,
        device=(tensor.device_type, tensor.device_id),
    )


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array without gaps in row-major order."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(1, extent)
    return tuple(reversed(strides))
