"""The epilogue of the exact product in NumPy: scales, bias, activation, requantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.blocks import blocks, scalar_of_one
from skuda.kernels.dtypes import rounded_to, storage_dtype
from skuda.kernels.linear.activation import gelu, silu
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.quantize import affine
from skuda.registry.vocabulary import ActivationKind

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Epilogue:
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
        compute = storage_dtype(self.problem.compute)
        # All have two axes, because NumPy computes faster with arrays of one shape.
        weight_scale = self.weight_scale[None, columns].astype(compute, copy=False)
        bias = None if self.bias is None else self.bias[None, columns].astype(compute, copy=False)
        for rows, part in blocks(output.shape):
            value = np.multiply(scalar_of_one(act_scale[rows, None]), weight_scale[:, part])
            if product is None:
                value[...] = 0
            else:
                value *= product[rows, part]
            if bias is not None:
                value += bias[:, part]
            finished = self._requantized(_activated(value, self.problem.epilogue.activation), compute)
            output[rows, part] = rounded_to(finished, output.dtype)

    def _requantized(self, value: Array, compute: np.dtype[Any]) -> Array:
        limits = self.problem.output.integer_range
        if limits is None:
            return value
        t = affine.rounded_quotient(value, np.asarray(self.output_scale).astype(compute))
        return affine.clamp_codes(t, self.output_zero_point, *limits)


def _activated(value: Array, activation: ActivationKind | None) -> Array:
    match activation:
        case None:
            return value
        case ActivationKind.RELU:
            # NaN fails the comparison and stays NaN; -0 and negative values become +0.
            value[value <= 0] = 0
            return value
        case ActivationKind.GELU:
            return gelu(value)
        case ActivationKind.SILU:
            return silu(value)
