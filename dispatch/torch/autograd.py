"""Gradients through int8 layers, as functions of `torch.autograd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skuda.torch.ops import linear_dynamic


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_q, weight_scale)
        return linear_dynamic(input.detach(), weight_q, weight_scale, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight_q, weight_scale = ctx.saved_tensors
        weight = weight_q.to(grad.dtype) * weight_scale.to(grad.dtype)[:, None]
        return grad @ weight, None, None, None


def frozen_linear(input: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `skuda.torch.linear_dynamic` with a gradient for the input, through the dequantized weight."""
    found: Tensor = _FrozenLinear.apply(input, weight_q, weight_scale, bias)
    return found
