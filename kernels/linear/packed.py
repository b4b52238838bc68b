"""The layout of 4-bit weights that kernels read, and what its bytes mean.

A weight code of 8 bits is a level of its group, w[n, k] = scale[n, g] level[n, k] + offset[n, g]: levels are 0 to 15,
scale and offset are integers, and every w is in -128..127. Groups are 32, 64 or 128 elements of K, or the whole row.

An array is u8 [units, blocks, bytes]: a unit is 16 rows, a block 128 elements of K. A slice of units is the weight of
those rows, and a slice of blocks that of those elements of K. Nothing reads what fills up the last ones.

A block has 1,024 bytes of levels, as the fragments of 16 x 32 bytes of tensor cores hold them. Lane 4 r + c of a warp
has rows r and r + 8 of the unit; byte i of word h of product j has, in its low half, row r + 8 h, element
32 j + 4 c + i of the block, and in its high half the element 16 behind. Bytes are in the order (j / 2, r, c, j % 2, h,
i), so that a lane loads 16 bytes twice, beside those of its neighbours. Behind the levels lie, by r and group, four
bytes: scale and 128 + offset of row r, then those of row r + 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import BLOCK as MOST
from skuda.kernels.blocks import Index
from skuda.kernels.blocks import blocks as boxes
from skuda.registry.errors import InvalidProblem

ROWS, BLOCK = 16, 128
"""Rows of a unit, and elements of K of a block."""
UNITS = {"n": ROWS, "k": BLOCK}
"""What is cut only as a whole, by axis."""
GROUP_SIZES = (32, 64, 128)
LEVELS = ROWS * BLOCK // 2
"""Bytes of the levels of a block."""

Array = npt.NDArray[Any]


def shape_of(n: int, k: int, group_size: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight of n rows of k elements."""
    return -(-n // ROWS), -(-k // BLOCK), block_bytes(group_size)


def block_bytes(group_size: int) -> int:
    """Return the bytes of a block; `group_size` 0 stands for whole rows, which are stored as groups of 128."""
    return LEVELS + 2 * ROWS * BLOCK // (group_size or BLOCK)


def group_of(num_bytes: int) -> int:
    """Return the elements of a group by the bytes of a block."""
    return 2 * ROWS * BLOCK // (num_bytes - LEVELS)


def parts_of(n: int, k: int) -> Iterator[tuple[Index, Index]]:
    """Yield units and blocks of a weight (n, k), few enough to be computed at once, with their rows and columns."""
    for units, of_k in boxes(shape_of(n, k, 0)[:2], MOST // (ROWS * BLOCK)):
        rows = slice(ROWS * units.start, min(ROWS * units.stop, n))
        yield (units, of_k), (rows, slice(BLOCK * of_k.start, min(BLOCK * of_k.stop, k)))


def packed(levels: Array, scale: Array, offset: Array, group_size: int) -> Array:
    """Return the packed weight.

    Parameters
    ----------
    levels : array of shape (N, K), integers 0 to 15
    scale, offset : arrays of shape (N, groups), integers
        At least 0, and 128 + offset is 0 to 255. Neither is checked.
    group_size : int
        32, 64 or 128; or 0, for one group a row.

    Returns
    -------
    array of shape `shape_of`, u8
    """
    (n, k), size = levels.shape, group_size or BLOCK
    units, blocks, num_bytes = shape_of(n, k, group_size)
    both = np.zeros((2, units * ROWS, blocks * BLOCK // size), np.uint8)
    held = -(-k // size)
    both[0, :n, :held], both[1, :n, :held] = scale, offset.astype(np.int16) + 128
    filled = np.zeros((units * ROWS, blocks * BLOCK), np.uint8)
    filled[:n, :k] = levels
    halves = filled.reshape(units, 2, 8, blocks, 2, 2, 2, 4, 4)  # h, r, block, j / 2, j % 2, half, c, i
    pairs = halves[:, :, :, :, :, :, 0] | halves[:, :, :, :, :, :, 1] << 4
    codes = pairs.transpose(0, 3, 4, 2, 6, 5, 1, 7).reshape(units, blocks, LEVELS)
    groups = both.reshape(2, units, 2, 8, blocks, BLOCK // size).transpose(1, 4, 3, 5, 2, 0)
    return np.concatenate([codes, groups.reshape(units, blocks, num_bytes - LEVELS)], axis=2)


def fits(axis: str, sizes: Sequence[int], units: Mapping[str, int] = UNITS) -> bool:
    """Return whether `cut` gives consecutive parts of these lengths, which add up to the whole axis."""
    begins = accumulate((0, *sizes))
    return all(begin % units[axis] == 0 for begin, size in zip(begins, sizes, strict=False) if size)


def cut(weight: Any, axis: Literal["n", "k"], start: int, stop: int, units: Mapping[str, int] = UNITS) -> Any:
    """Return rows, or elements of K, of a packed weight: a view of an array or tensor.

    Parameters
    ----------
    weight : array or tensor of shape `shape_of`
    axis : {"n", "k"}
    start, stop : int
        In rows or elements. Those of a part that is not empty are multiples of 16 rows or 128 elements; `stop` may also
        be the end of the weight, which its bytes do not tell, behind the last such multiple.
    units : mapping of str to int
        What is cut only as a whole, by axis, for weights in other units than packed ones.

    Raises
    ------
    InvalidProblem
        For other ends.
    """
    unit, count = units[axis], weight.shape["nk".index(axis)]
    last = unit * (count - 1)
    if not 0 <= start <= stop <= unit * count or (start < stop and (start % unit or (stop % unit and stop < last))):
        rule = f"be within the weight and begin and end at multiples of {unit}, or at its end"
        raise InvalidProblem("cut", axis, f"{start} to {stop}", rule)
    at = slice(start // unit, -(-stop // unit) if start < stop else start // unit)
    return weight[at] if axis == "n" else weight[:, at]


def grouped(weight: Array, n: int, k: int) -> tuple[Array, Array, Array]:
    """Return levels (n, k), and scale and offset (n, groups), of a packed weight. This is the inverse of `packed`."""
    levels, scale, base = _grouped(weight)
    held = -(-k // levels.shape[2])
    offset = (base[:n, :held].astype(np.int16) - 128).astype(np.int8)
    return levels.reshape(len(levels), levels.shape[1] * levels.shape[2])[:n, :k], scale[:n, :held], offset


def unpacked(weight: Array, n: int, k: int) -> Array:
    """Return the s8 codes (n, k) of a packed weight.

    In bytes that `packed` did not make, a code plus 128 may be above 255. What is above carries into the code behind
    it, within four that begin at a multiple of four.
    """
    levels, scale, base = _grouped(weight)
    scale, base = scale[..., None].astype("<u4"), base[..., None] * np.uint32(0x01010101)
    # Four codes at a time, as kernels compute them: what is above 255 carries into the next one.
    words: Array = levels.view("<u4") * scale + base ^ np.uint32(0x80808080)
    return words.view(np.int8).reshape(len(levels), levels.shape[1] * levels.shape[2])[:n, :k]


def _grouped(weight: Array) -> tuple[Array, Array, Array]:
    """Return u8 levels (rows, groups, elements), scale and 128 + offset (rows, groups), with those that fill up."""
    units, blocks, num_bytes = weight.shape
    size = group_of(num_bytes)
    pairs = weight[..., :LEVELS].reshape(units, blocks, 2, 8, 4, 2, 2, 4).transpose(0, 6, 3, 1, 2, 5, 4, 7)
    held = blocks * BLOCK // size
    levels = np.stack([pairs & 15, pairs >> 4], axis=6).reshape(units * ROWS, held, size)
    groups = weight[..., LEVELS:].reshape(units, blocks, 8, BLOCK // size, 2, 2).transpose(5, 0, 4, 2, 1, 3)
    scale, base = groups.reshape(2, units * ROWS, held)
    return levels, scale, base
