"""Tensor maps: the 128 bytes that describe a matrix to Hopper's TMA unit, encoded by the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

from skuda.dispatch.cuda.driver import driver
from skuda.kernels.launch import TensorMap
from skuda.registry.errors import Unaligned

BYTES = 128
ALIGNMENT = 64
UNIT = 16
"""Addresses and strides must be multiples of this many bytes."""

_MOST_REMEMBERED = 256
_MOST_ENCODED = 8192
"""Maps that all launches share: launches of other numbers of rows read the same weights."""
_BOX_BYTES = 128
# CUtensorMapDataType, Interleave, Swizzle, L2promotion, FloatOOBfill
_U8, _NO_INTERLEAVE, _SWIZZLE_128, _ZEROS = 0, 0, 3, 0
_PROMOTIONS = {128: 2, 256: 3}

Encoder = Callable[[int, int], bytes]
"""Takes an address and the bytes between rows."""


def refuse_unaligned(op: str, name: str, address: int, leading: int) -> None:
    """Raise `Unaligned` for a matrix that the copy engine, or loads of 16 bytes, cannot read."""
    if address % UNIT or leading % UNIT:
        had = f"the address {address:#x} and rows {leading} bytes apart"
        raise Unaligned(op, name, had, f"have both as multiples of {UNIT}: this kernel reads it in units of that size")


def encoder(parameter: TensorMap, op: str) -> Encoder:
    """Return an encoder of a matrix's map; it caches the latest maps, because encoding takes about a microsecond."""
    known: dict[tuple[int, int], bytes] = {}
    matrix = (parameter.columns, parameter.rows), parameter.box_rows, parameter.promotion

    def encode(address: int, leading: int) -> bytes:
        found = known.get((address, leading))
        if found is None:
            # A single row has no next one, but the driver checks the stride all the same.
            distance = leading if parameter.rows > 1 else -(-parameter.columns // UNIT) * UNIT
            refuse_unaligned(op, parameter.name, address, distance)
            found = _encoded(*matrix, address, distance)
            if len(known) >= _MOST_REMEMBERED:
                known.clear()
            known[address, leading] = found
        return found

    return encode


@lru_cache(_MOST_ENCODED)
def _encoded(shape: tuple[int, int], box_rows: int, promotion: int, address: int, leading: int) -> bytes:
    room = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    place = -(-ctypes.addressof(room) // ALIGNMENT) * ALIGNMENT
    driver().call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(place),
        _U8,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(*shape),
        (ctypes.c_uint64 * 1)(leading),
        (ctypes.c_uint32 * 2)(_BOX_BYTES, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128,
        _PROMOTIONS[promotion],
        _ZEROS,
    )
    return ctypes.string_at(place, BYTES)
