"""The product of rows that an op has quantized already, with a gradient.

A fused norm or gated activation writes codes, and has no gradient. Where gradients are recorded, torch computes the
same rows once more: their values are not used, but their graph leads back through the original formulas. The product
has the bits of the codes in every gradient mode, and its gradient passes straight through the rounding of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skuda.torch.linear.autograd import dequantized_weight
from skuda.torch.ops.dtypes import element_of


class _CodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        rows: Tensor,
        codes: Tensor,
        scale: Tensor,
        weight_q: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        given = codes, weight_q, scale, None, weight_scale, None, bias
        fields = {"output_element": str(element_of(rows.dtype)), "act_scale_scope": "token"}
        found: Tensor = torch.ops.skuda.scaled_linear.default(*given, **fields)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004  torch's signature
        *_, weight_q, weight_scale, bias = inputs
        ctx.bias_dtype, ctx.width = None if bias is None else bias.dtype, inputs[0].shape[-1]
        ctx.save_for_backward(weight_q, weight_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight_q, weight_scale = ctx.saved_tensors
        wants_rows, *_, wants_bias = ctx.needs_input_grad
        rows = grad @ dequantized_weight(weight_q, weight_scale, grad.dtype, ctx.width) if wants_rows else None
        bias = grad.sum_to_size(grad.shape[-1:]).to(ctx.bias_dtype) if wants_bias else None
        return rows, None, None, None, None, bias


def coded_linear(
    rows: Tensor, codes: Tensor, scale: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the output of a linear layer for codes, with the gradient of the rows that the codes stand for.

    Parameters
    ----------
    rows : tensor of shape (..., K), f16, bf16, f32 or f64
        The rows before quantization. Only their dtype and their graph are used.
    codes : tensor of shape (..., K), s8
    scale : tensor of shape (...), f32
        Real units per code of each row.
    weight_q : tensor of shape (N, K), s8, or packed, u8
    weight_scale : tensor of shape (N,), f32 or narrower
    bias : tensor of shape (N,), f32 or narrower, optional

    Returns
    -------
    tensor of shape (..., N), in the dtype of `rows`
        It has first derivatives only: torch refuses a second backward pass.

    Raises
    ------
    InvalidProblem
        For a bad argument.
    Unsupported
        If no kernel can serve the problem.
    """
    found: Tensor = _CodedLinear.apply(rows, codes, scale, weight_q, weight_scale, bias)
    return found
