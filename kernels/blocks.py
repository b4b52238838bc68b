"""Iteration over large arrays in blocks: temporaries stay in cache and memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.registry.elements import ElementKind

Array = npt.NDArray[Any]
Index = tuple[slice, ...]

BLOCK = 1 << 16
"""Elements per block: half a megabyte per f64 temporary."""


def blocks(shape: tuple[int, ...], limit: int = BLOCK) -> Iterable[Index]:
    """Return the indices of boxes of at most about `limit` elements that cover an index space, in row-major order.

    Boxes begin at even positions of the last axis, because a byte holds two packed elements.

    Parameters
    ----------
    shape : tuple of int
        Extents of the index space; an empty space has no box, rank 0 has one empty index.
    limit : int
        Elements per box, at least 2.
    """
    count = math.prod(shape)
    if count == 0:
        return ()
    return (tuple([slice(0, extent) for extent in shape]),) if count <= limit else _boxes(shape, limit)


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[Index]:
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= limit:
        inner *= shape[axis]
        axis -= 1
    step = max(2, limit // inner // 2 * 2)
    rest = tuple(slice(0, extent) for extent in shape[axis + 1 :])
    for lead in np.ndindex(*shape[:axis]):
        head = tuple(slice(i, i + 1) for i in lead)
        for start in range(0, shape[axis], step):
            yield (*head, slice(start, min(start + step, shape[axis])), *rest)


def _bytes_index(index: Index) -> Index:
    last = index[-1]
    return (*index[:-1], slice(last.start // 2, -(-last.stop // 2)))


def read(array: Array, element: ElementKind, index: Index) -> Array:
    """Return the elements of one box; packed elements are unpacked to int8 or uint8, halves are joined to int32."""
    if element.is_split:
        high, low = halves(array)
        return np.asarray((high[index].astype(np.int32) << 8) + low[index])
    if not element.is_packed:
        return np.asarray(array[index])
    pairs = array[_bytes_index(index)]
    both = np.empty((*pairs.shape[:-1], 2 * pairs.shape[-1]), np.uint8)  # not a stack, which needs one more axis
    both[..., 0::2], both[..., 1::2] = pairs & 15, pairs >> 4
    nibbles = both[..., : index[-1].stop - index[-1].start]
    if element is ElementKind.S4:
        return ((nibbles ^ 8).astype(np.int8) - 8).astype(np.int8)
    return nibbles


def write(array: Array, element: ElementKind, index: Index, values: Array) -> None:
    """Store the elements of one box: packed ones two per byte, low nibble first, an unused high nibble as zero.

    The values are whole numbers that the element holds, of any dtype.
    """
    if element.is_split:
        high, low = halves(array)
        both = values.astype(np.int32)
        high[index] = above = (both + 128) >> 8
        low[index] = both - (above << 8)
        return
    if not element.is_packed:
        array[index] = values
        return
    nibbles = values.astype(np.int16).astype(np.uint8) & 15
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate((nibbles, np.zeros((*nibbles.shape[:-1], 1), np.uint8)), axis=-1)
    array[_bytes_index(index)] = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def halves(array: Any) -> tuple[Any, Any]:
    """Return the high and the low halves of split elements, as views of their array or tensor."""
    count = array.shape[-1] // 2
    return array[..., :count], array[..., count:]


def planes(array: Any, element: ElementKind) -> tuple[Any, ...]:
    """Return the `halves` of an array of split elements; of others the array itself."""
    return halves(array) if element.is_split else (array,)


def scalar_of_one(values: Array) -> Array:
    """Return an array of one element with rank 0, which NumPy broadcasts in half the time. Return others unchanged."""
    return values.reshape(()) if values.size == 1 else values
