"""The product of a layer of which each rank holds columns, with the bits of one rank.

Ranks exchange what is exact: the largest magnitude of each row, so that all use the scale of the whole row, and sums
of codes. Each rounds the whole sums once. `skuda.torch.RowLinear` does the same in chunks that overlap; an engine
compiles the layer into a graph, where there is one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from skuda.kernels.linear.problem import sums_of
from skuda.torch.linear.activation import PER_ROW, PerRow
from skuda.torch.ops.dtypes import element_of

Reduce = Callable[[Tensor, Literal["max", "sum"]], Tensor]
"""Returns the maximum or the sum of the tensors of all ranks, element by element."""


def product_of_columns(
    rows: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    reduce: Reduce,
    *,
    k: int,
    bias: Tensor | None = None,
    input_scale: Tensor | None = None,
    zero: Tensor | None = None,
    zero_point: Tensor | None = None,
    activation: PerRow = PER_ROW,
    fields: Mapping[str, str] = MappingProxyType({}),
    largest: Tensor | None = None,
) -> Tensor:
    """Return the whole output, (M, N), in the dtype of the input, on every rank for its columns of the input.

    Parameters
    ----------
    rows : tensor of shape (M, K of this rank)
    weight : tensor
        This rank's columns, as the ops take them.
    weight_scale : tensor of shape (N, 1), f32
    reduce : Reduce
    k : int
        K of the whole layer.
    bias : tensor of shape (N,), optional
    input_scale : tensor of one element, optional
        A fixed scale of the input; without it rows have their own.
    zero, zero_point : tensors of one element, s32, optional
        Beside a fixed scale: a zero for a symmetric input, or its code of 0.
    activation : PerRow
        Without a fixed scale: the bits of the codes, and what a NaN does.
    fields : mapping of str to str
        Those of the weight's format; see `skuda.torch.formats.weight.WeightFormat`.
    largest : tensor of shape (M, 1), f32, optional
        What the op `amax` returns for the rows, if it is known.
    """
    ops, of_channels = torch.ops.skuda, None
    if input_scale is None:
        largest = reduce(activation.maxima(rows) if largest is None else largest, "max")
        codes, scale = activation.coded(rows, largest)
    else:
        scale, at = input_scale, zero if zero_point is None else zero_point
        codes = ops.quantize_per_tensor.default(rows, scale, at, q_min=-128, q_max=127, output_element="s8")
    if zero_point is not None:  # a row of ones gives the sums of the weight's rows, with the same exchange
        codes = torch.cat((codes, codes.new_ones(1, codes.shape[1])))
    of_sums = {"output_element": str(sums_of(activation.element)), **activation.given, **fields}
    sums = reduce(ops.scaled_linear.default(codes, weight, n=weight_scale.shape[0], **of_sums), "sum")
    if zero_point is not None:
        sums, of_channels = sums[:-1], sums[-1]
    scope = "token" if input_scale is None else "tensor"
    given = sums, scale, weight_scale, zero_point, of_channels, None, None, bias
    output: Tensor = ops.rescale.default(*given, k=k, output_element=str(element_of(rows.dtype)), act_scale_scope=scope)
    return output
