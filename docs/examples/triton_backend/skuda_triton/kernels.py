"""Two Triton kernels over the rows of a matrix.

A program takes ROWS rows and walks along them in steps of COLUMNS. Arrays come as addresses, so they may belong to
torch, CuPy or JAX; Triton passes small integers, such as the address 0 of an empty array, in 32 bits. X is the element
of the matrix `x`, and `x_stride` the number of elements from a row to the next.
"""

import triton
import triton.language as tl


@triton.jit
def amax(x, x_stride, output, n, d, X: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the largest magnitude of every row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = x.to(tl.int64).to(tl.pointer_type(X)) + row[:, None] * x_stride
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, d, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        inside = (row < n)[:, None] & (column < d)
        value = tl.load(begin + column, mask=inside, other=0).to(tl.float32)
        # A NaN differs from itself. It does not count.
        magnitude = tl.where(value == value, tl.abs(value), 0.0)
        largest = tl.maximum(largest, tl.max(magnitude, axis=1))
    tl.store(output.to(tl.int64).to(tl.pointer_type(tl.float32)) + row, largest, mask=row < n)


@triton.jit
def dynamic_range(
    x, x_stride, codes, codes_stride, scale, zero_point, n, d, q_min, q_max,
    X: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the s8 codes of every row, its scale max |x| / q_max (1 if that is 0), and its zero point 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = x.to(tl.int64).to(tl.pointer_type(X)) + row[:, None] * x_stride
    largest = tl.zeros((ROWS,), tl.float32)
    for first in range(0, d, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        value = tl.load(begin + column, mask=(row < n)[:, None] & (column < d), other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=1))

    # `/` may be an approximation on a GPU. div_rn rounds to nearest, as the op's definition says.
    row_scale = tl.div_rn(largest, tl.zeros((ROWS,), tl.float32) + q_max)
    row_scale = tl.where(row_scale == 0.0, 1.0, row_scale)
    tl.store(scale.to(tl.int64).to(tl.pointer_type(tl.float32)) + row, row_scale, mask=row < n)
    tl.store(zero_point.to(tl.int64).to(tl.pointer_type(tl.int32)) + row, tl.zeros((ROWS,), tl.int32), mask=row < n)

    divisor = tl.broadcast_to(row_scale[:, None], (ROWS, COLUMNS))
    target = codes.to(tl.int64).to(tl.pointer_type(tl.int8)) + row[:, None] * codes_stride
    for first in range(0, d, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        inside = (row < n)[:, None] & (column < d)
        value = tl.load(begin + column, mask=inside, other=0).to(tl.float32)
        quotient = tl.div_rn(value, divisor)
        quotient = tl.where(quotient == quotient, quotient, 0.0)
        quotient = tl.minimum(tl.maximum(quotient, q_min), q_max)
        # Numbers near 1.5 * 2^23 have no fraction bits: the sum rounds to a whole number, ties to even.
        tl.store(target + column, ((quotient + 12582912.0) - 12582912.0).to(tl.int8), mask=inside)
