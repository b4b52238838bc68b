"""The epilogue of the exact product in NumPy: scales, bias, activation, requantization."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import blocks, scalar_of_one
from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.kernels.linear.problem import SUMS, LinearProblem, half_of, longest_k
from skuda.kernels.quantize import affine, curves
from skuda.registry.vocabulary import ActivationKind

Array = npt.NDArray[Any]


class Arithmetic(NamedTuple):
    """What follows from a problem alone and every step of its reference asks for.

    Attributes
    ----------
    codes, compute : dtype
        The dtypes of the activation's codes and of the compute type C.
    product : dtype
        The dtype of the exact product: C, or that of the output if the product is the result.
    run : int
        The longest K whose sum of products of two planes of codes is exact in f32.
    pairs : tuple of (int, int, int)
        The planes of the activation and of the weight that are multiplied, and the power of two of their products.
    activation : ActivationKind or None
        What the epilogue applies after the bias.
    limits : (int, int) or None
        The range of an output of codes.
    """

    codes: np.dtype[Any]
    compute: np.dtype[Any]
    product: np.dtype[Any]
    run: int
    pairs: tuple[tuple[int, int, int], ...]
    activation: ActivationKind | None
    limits: tuple[int, int] | None


@lru_cache(maxsize=1024)
def arithmetic(problem: LinearProblem) -> Arithmetic:
    """Return the arithmetic of a problem, worked out once."""
    is_sum = problem.output in SUMS
    of_activation, of_weight = problem.code_element.halves, problem.weight_code.halves
    orders = product(range(of_activation), range(of_weight))  # the highest first; the lowest of four is left out
    return Arithmetic(
        codes=storage_dtype(problem.code_element),
        compute=storage_dtype(problem.compute),
        product=storage_dtype(problem.output if is_sum else problem.compute),
        run=longest_k(half_of(problem.code_element), half_of(problem.weight_code), 1 << 24),
        pairs=tuple((a, w, 8 * (of_activation + of_weight - 2 - a - w)) for a, w in orders if a + w < 2),
        activation=problem.epilogue.activation,
        limits=problem.output.integer_range,
    )


class Epilogue(NamedTuple):
    """All steps from the exact product to the stored output."""

    problem: LinearProblem
    weight_scale: Array | None
    bias: Array | None
    output_scale: Any
    output_zero_point: Any

    def apply(self, act_scale: Array, product: Array | None, columns: slice, output: Array) -> None:
        """Write the finished block of outputs.

        Parameters
        ----------
        act_scale : array of shape (rows,), C
            Scale of every row.
        product : array of shape (rows, columns), or None
            The integer product, rounded to C. None stands for K == 0: the sum is +0 whatever the scales are. Without
            scales of the weight, the product is the result.
        columns : slice
            The output columns of the block.
        output : array of shape (rows, columns)
            The block to write.
        """
        if self.weight_scale is None:
            output[...] = 0 if product is None else product
            return
        for rows, part in blocks(output.shape):
            inner = slice(columns.start + part.start, columns.start + part.stop)
            some = None if product is None else product[rows, part]
            self._apply_to_box(act_scale[rows], some, inner, output[rows, part])

    def _apply_to_box(self, act_scale: Array, product: Array | None, columns: slice, output: Array) -> None:
        how = arithmetic(self.problem)
        assert self.weight_scale is not None
        # All have two axes, because NumPy computes faster with arrays of one shape.
        weight_scale = self.weight_scale[None, columns].astype(how.compute, copy=False)
        value = np.multiply(scalar_of_one(act_scale[:, None]), weight_scale)
        if product is None:
            value[...] = 0
        else:
            value *= product
        if self.bias is not None:
            value += self.bias[None, columns].astype(how.compute, copy=False)
        if how.activation is not None:
            value = _activated(value, how.activation)
        if how.limits is not None:
            value = value.astype(how.compute, copy=False)
            t = affine.rounded_quotient(value, np.asarray(self.output_scale, how.compute))
            value = affine.clamp_codes(t, self.output_zero_point, *how.limits)
        output[...] = rounded_to(value, output.dtype)


def _activated(value: Array, activation: ActivationKind) -> Array:
    """Return relu in C, or gelu or silu in f64: the output's element, or C for codes, rounds them once."""
    match activation:
        case ActivationKind.RELU:
            # NaN fails the comparison and stays NaN; -0 and negative values become +0.
            value[value <= 0] = 0
            return value
        case ActivationKind.GELU:
            return curves.gelu(value.astype(np.float64))
        case ActivationKind.SILU:
            return curves.silu(value.astype(np.float64))
