"""The layout of 4-bit weights that kernels read, and what its bytes mean.

A weight code of 8 bits is a level of its group, w[n, k] = scale[n, g] level[n, k] + offset[n, g]: levels are 0 to 15,
scale and offset are integers, and every w is in -128..127. Groups are 32, 64 or 128 elements of K, or the whole row.

An array is u8 [units, blocks, bytes]: a unit is 16 rows, a block 128 elements of K. A slice of units is the weight of
those rows, and a slice of blocks that of those elements of K. Nothing reads what fills up the last ones.

A block has 1,024 bytes of levels, as mma.sync's fragments of 16 x 32 bytes hold them. Lane 4 r + c of a warp has rows r
and r + 8 of the unit, and elements 32 c to 32 c + 31 of the block; byte i of word h of product j has, in its low half,
row r + 8 h, element 32 c + 8 j + i, and in its high half the element 4 behind. Bytes are in the order (j / 2, r, c,
j % 2, h, i), so that a lane loads 16 bytes twice, beside those of its neighbours. Behind the levels lie, by group and
r, four bytes: scale and 128 + offset of row r, then those of row r + 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ROWS, BLOCK = 16, 128
"""Rows of a unit, and elements of K of a block."""
GROUP_SIZES = (32, 64, 128)
_LEVELS = ROWS * BLOCK // 2

Array = npt.NDArray[Any]


def shape_of(n: int, k: int, group_size: int) -> tuple[int, int, int]:
    """Return the shape of a packed weight of n rows of k elements."""
    return -(-n // ROWS), -(-k // BLOCK), block_bytes(group_size)


def block_bytes(group_size: int) -> int:
    """Return the bytes of a block; `group_size` 0 stands for whole rows, which are stored as groups of 128."""
    return _LEVELS + 2 * ROWS * BLOCK // (group_size or BLOCK)


def group_of(num_bytes: int) -> int:
    """Return the elements of a group by the bytes of a block."""
    return 2 * ROWS * BLOCK // (num_bytes - _LEVELS)


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
    units, blocks, _ = shape_of(n, k, group_size)
    both = np.zeros((2, units * ROWS, blocks * BLOCK // size), np.uint8)
    held = -(-k // size)
    both[0, :n, :held], both[1, :n, :held] = scale, offset.astype(np.int16) + 128
    filled = np.zeros((units * ROWS, blocks * BLOCK), np.uint8)
    filled[:n, :k] = levels
    halves = filled.reshape(units, 2, 8, blocks, 4, 4, 2, 4)  # h, r, block, c, j, half, i
    pairs = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(units, 2, 8, blocks, 4, 2, 2, 4)
    codes = pairs.transpose(0, 3, 5, 2, 4, 6, 1, 7).reshape(units, blocks, _LEVELS)
    groups = both.reshape(2, units, 2, 8, blocks, BLOCK // size).transpose(1, 4, 5, 3, 2, 0)
    return np.concatenate([codes, groups.reshape(units, blocks, block_bytes(size) - _LEVELS)], axis=2)


def unpacked(weight: Array, n: int, k: int) -> Array:
    """Return the s8 codes (n, k) of a packed weight."""
    units, blocks, num_bytes = weight.shape
    size = group_of(num_bytes)
    pairs = weight[..., :_LEVELS].reshape(units, blocks, 2, 8, 4, 2, 2, 4).transpose(0, 6, 3, 1, 4, 2, 5, 7)
    levels = np.stack([pairs & 15, pairs >> 4], axis=7).reshape(units * ROWS, blocks * BLOCK // size, size)
    groups = weight[..., _LEVELS:].reshape(units, blocks, BLOCK // size, 8, 2, 2).transpose(5, 0, 4, 3, 1, 2)
    scale, base = groups.reshape(2, units * ROWS, blocks * BLOCK // size, 1)
    codes = levels * scale + base ^ 128  # modulo 256, as kernels compute it
    return codes.view(np.int8).reshape(units * ROWS, blocks * BLOCK)[:n, :k]
