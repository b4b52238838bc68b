"""The kernels: ``kernel(problem, **tensors)`` writes the outputs. Every line is one operation of the reference.

Divisors are tensors of the data's shape and device: by a number, torch multiplies with the reciprocal on a GPU.
"""

from __future__ import annotations

import math
from typing import Any


def quantized_linear(
    problem: Any,
    *,
    activation: Any,
    weight_q: Any,
    weight_scale: Any,
    output: Any,
    bias: Any = None,
    act_q_scratch: Any = None,
    act_scale_scratch: Any = None,
) -> None:
    """Quantize every row by its largest magnitude, then as `smoothquant_linear`."""
    import torch

    x = activation.float()
    largest = torch.where(x.isnan(), 0, x.abs()).amax(dim=1)
    scale = largest / torch.full_like(largest, problem.q_max)
    scale = torch.where(scale == 0, 1, scale)
    steps = torch.round(x / scale[:, None].expand_as(x))
    codes = torch.where(steps.isnan(), 0, steps).clamp(problem.q_min, problem.q_max).to(torch.int8)
    _write(act_q_scratch, codes)
    _write(act_scale_scratch, scale)
    _layer(problem.epilogue, codes, scale, weight_q, weight_scale, bias, output)


def smoothquant_linear(
    problem: Any,
    *,
    act_q: Any,
    weight_q: Any,
    weight_scale: Any,
    output: Any,
    bias: Any = None,
    act_scale_scratch: Any = None,
) -> None:
    """Multiply codes, then scale, add and activate."""
    import torch

    scale = torch.full((problem.m,), problem.act_scale, dtype=torch.float32, device=act_q.device)
    _write(act_scale_scratch, scale)
    _layer(problem.epilogue, act_q, scale, weight_q, weight_scale, bias, output)


def quantize_per_tensor(problem: Any, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write the codes."""
    steps, zero = _steps(input, scale, zero_point)
    output.copy_(_within(steps, zero, problem) + zero)


def fake_quantize(problem: Any, *, input: Any, scale: Any, zero_point: Any, output: Any) -> None:
    """Write what the codes stand for."""
    import torch

    steps, zero = _steps(input, scale, zero_point)
    wide = _compute(input)
    value = (_within(steps, zero, problem).to(wide) * _scalar(scale, wide, input)).to(output.dtype)
    output.copy_(torch.where(value == 0, 0, value))


def _layer(epilogue: Any, codes: Any, scale: Any, weight: Any, weight_scale: Any, bias: Any, output: Any) -> None:
    import torch

    if not output.numel():
        return
    product = torch._int_mm(_aligned(codes), _aligned(weight).t())
    value = (scale[:, None] * weight_scale.float()[None, :]) * product.float()
    if bias is not None:
        value = value + bias.float()
    output.copy_(_activated(value, epilogue))


def _aligned(codes: Any) -> Any:
    """Return codes as cuBLASLt takes them: contiguous, from a multiple of 16 bytes on. A copy where they are not.

    `is_contiguous` ignores the stride of an axis of one element. torch's product on a CPU uses it, and is wrong.
    """
    import torch

    plain = codes.stride() == (codes.shape[1], 1) and codes.data_ptr() % 16 == 0
    return codes if plain else codes.clone(memory_format=torch.contiguous_format)


def _activated(value: Any, epilogue: Any) -> Any:
    import torch

    if epilogue == "bias_relu":
        return torch.where(value <= 0, 0, value)
    if epilogue in {"bias_gelu", "bias_silu"}:
        # In f64, and with erfc rather than 1 + erf, so that the far negative side keeps its digits.
        v = value.double()
        share = torch.special.erfc(v * -math.sqrt(0.5)) / 2 if epilogue == "bias_gelu" else 1 / (1 + torch.exp(-v))
        return torch.where(v == -math.inf, -0.0, v * share).float()
    return value


def _steps(data: Any, scale: Any, zero_point: Any) -> tuple[Any, Any]:
    """Return the rounded quotient and the zero point, both in f64, which holds them exactly; NaN counts as 0."""
    import torch

    wide = _compute(data)
    steps = torch.round(data.to(wide) / _scalar(scale, wide, data).expand_as(data)).double()
    return torch.where(steps.isnan(), 0, steps), _scalar(zero_point, torch.float64, data)


def _within(steps: Any, zero: Any, problem: Any) -> Any:
    """Return the steps from the zero point to the code: the sum of both would round where a step is huge."""
    return steps.clamp(problem.q_min - zero, problem.q_max - zero)


def _compute(data: Any) -> Any:
    import torch

    return torch.float64 if data.dtype is torch.float64 else torch.float32


def _scalar(value: Any, dtype: Any, like: Any) -> Any:
    """Return a number, or a tensor of one element, as a tensor without axes beside `like`."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.reshape(()).to(dtype)
    return torch.tensor(value, dtype=dtype, device=like.device)


def _write(target: Any, value: Any) -> None:
    if target is not None:
        target.copy_(value)
