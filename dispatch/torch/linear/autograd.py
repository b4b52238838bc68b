"""Gradients through int8 layers, as functions of `torch.autograd`.

Codes are piecewise constant, so the gradients are straight-through estimators (STE): rounding counts as the identity.
Only first derivatives exist. A second derivative (``create_graph=True``), `torch.vmap` and forward-mode derivatives
are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import CODES_OF, WeightFormat, format_of
from skuda.torch.formats.int8 import BOUNDS, Q_MAX
from skuda.torch.ops.dtypes import element_of
from skuda.torch.ops.registered import called
from skuda.torch.ops.tensor_op import check_tensors

Gradients = tuple[Tensor | None, ...]


class _Function(torch.autograd.Function):
    """The base of the functions. Having `setup_context`, they work with `torch.func.grad` and `torch.func.vjp`."""

    @classmethod
    def vmap(cls, *_: Any) -> NoReturn:
        rule = "not be mapped over: call the layer on the whole batch, whose rows are quantized one by one"
        raise InvalidProblem("skuda.torch", "input", "a tensor inside torch.vmap", rule)


class _FirstOrder(_Function):
    """Returns gradients unchanged, with a graph that raises when it is differentiated."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(_: Any, *__: Tensor) -> NoReturn:
        rule = (
            "not be differentiated: int8 layers have first derivatives only. Leave create_graph out, or compute the "
            "penalty that needs it on the float model"
        )
        raise InvalidProblem("skuda.torch", "gradient", "a second backward pass", rule)


def _first_order(backward: Callable[..., Gradients]) -> Callable[[Any, Tensor], Gradients]:
    """Wrap a backward function, so that its gradients cannot be differentiated again."""

    @wraps(backward)
    def wrapped(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, grad, *saved)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        some = [gradient for gradient in found if gradient is not None]
        # The saved tensors give the gradients a graph. Without one, a second derivative would silently be zero.
        rest = iter(_FirstOrder.apply(len(some), *some, grad, *saved))
        return tuple(None if gradient is None else next(rest) for gradient in found)

    return wrapped


class _Int8Product(_Function):
    """A product of codes: of rows that are quantized on the way, or of codes that stand for them.

    The weight is codes of the format `form`, and `bits` are those of the codes of rows.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor | None,  # noqa: ARG004  it gets the gradient
        bias: Tensor | None,
        weight_q: Tensor,
        weight_scale: Tensor,
        smooth: Tensor | None,
        codes: Tensor | None,
        scale: Tensor | None,
        output_element: str | None,
        nonfinite: str | None,
        bits: int,
        form: WeightFormat,
    ) -> Tensor:
        weight_q = form.operand(weight_q, len(weight_scale), input.shape[-1])
        fields = {**CODES_OF[bits], **form.fields}
        if codes is not None:
            given = codes, weight_q, scale, None, weight_scale, None, bias
            elements = {"activation_element": fields["output_element"], **form.fields}
            return called("scaled_linear", given, **elements, output_element=str(element_of(input.dtype)))
        if smooth is not None:
            output_element = output_element or str(element_of(input.dtype))
            input = torch.ops.skuda.smooth.default(input, smooth)
        fields |= {"output_element": output_element, "nonfinite": nonfinite}
        return called("quantized_linear", (input, weight_q, weight_scale, None, bias), **fields)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004  torch's signature
        input, weight, bias, weight_q, weight_scale, smooth, *_, ctx.form = inputs
        ctx.dtypes = input.dtype, *(None if each is None else each.dtype for each in (weight, bias))
        ctx.width, ctx.smoothed = input.shape[-1], smooth is not None
        more = (each for each in (smooth, None if weight is None else input) if each is not None)
        ctx.save_for_backward(weight_q, weight_scale, *more)

    @staticmethod
    @_first_order
    def backward(ctx: Any, grad: Tensor, weight_q: Tensor, weight_scale: Tensor, *more: Tensor) -> Gradients:
        wants_input, wants_weight, wants_bias, *others = ctx.needs_input_grad
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad, rows = grad.to(dtype), None
        if wants_input:
            rows = grad @ dequantized_weight(weight_q, weight_scale, dtype, ctx.width, ctx.form)
            rows = (rows / more[0]).to(dtype) if ctx.smoothed else rows
        weight = (_rows(grad).t() @ _rows(more[-1])).to(weight_dtype) if wants_weight else None
        return rows, weight, _summed(grad, bias_dtype) if wants_bias else None, *(None for _ in others)


def frozen_linear(
    input: Tensor,
    weight_q: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    output_element: str | None = None,
    smooth: Tensor | None = None,
    nonfinite: str | None = None,
    bits: int = 8,
) -> Tensor:
    """Return `skuda.torch.linear_dynamic` with gradients of the input and the bias: the frozen int8 base of LoRA.

    The gradient of the input is ``grad @ W``, where W is the dequantized weight in the gradient's dtype. It passes
    straight through the rounding of the input. No element is clipped, because the scale follows from the input.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64
    weight_q : tensor of shape (N, K), s8; of 16 bits, (N, 2, K), s8; or packed, u8
    weight_scale : tensor of shape (N,), f32 or narrower
    bias : tensor of shape (N,), f32 or narrower, optional
    output_element : str, optional
        Element of the result; by default that of the input.
    smooth : tensor of shape (K,), f32, optional
        Divisors of the input's channels, as `skuda.torch.SmoothedLinear` has them.
    nonfinite : str, optional
        As in `skuda.torch.linear_dynamic`.
    bits : int
        8 or 16: those of the codes of the input.

    Returns
    -------
    tensor of shape (..., N)

    Raises
    ------
    InvalidProblem
        For a bad argument, a scale that requires grad, or a second backward pass.
    Unsupported
        If no kernel can serve the problem.
    """
    _check_element("frozen_linear", output_element)
    check_tensors("frozen_linear", input=input, weight_q=weight_q, weight_scale=weight_scale)
    if smooth is not None:
        check_tensors("frozen_linear", smooth=smooth)
        if smooth.shape != input.shape[-1:]:
            had = f"shape {list(smooth.shape)}"
            raise InvalidProblem("frozen_linear", "smooth", had, f"have shape {list(input.shape[-1:])}")
    if weight_scale.requires_grad:
        rule = "be detached: codes are fixed. FakeQuantLinear(learn_scale=True) learns scales"
        raise InvalidProblem("frozen_linear", "weight_scale", "a tensor that requires grad", rule)
    how = output_element, nonfinite, *_kinds("frozen_linear", input, weight_q, weight_scale, bits)
    found: Tensor = _Int8Product.apply(input, None, bias, weight_q, weight_scale, smooth, None, None, *how)
    return found


def coded_linear(
    rows: Tensor, codes: Tensor, scale: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the output of a linear layer for codes, with the gradient of the rows that the codes stand for.

    A fused norm or gated activation writes codes, and has no gradient. Where gradients are recorded, torch computes the
    same rows once more: their values are not used, but their graph leads back through the original formulas. The
    product has the bits of the codes, and its gradient passes straight through the rounding of the rows.

    Parameters
    ----------
    rows : tensor of shape (..., K), f16, bf16, f32 or f64
        The rows before quantization. Only their dtype and their graph are used.
    codes : tensor of shape (..., K), s8; of 16 bits, (..., 2 K), s8
    scale : tensor of shape (...), f32
        Real units per code of each row.
    weight_q, weight_scale, bias
        As in `frozen_linear`.

    Returns
    -------
    tensor of shape (..., N), in the dtype of `rows`

    Raises
    ------
    As in `frozen_linear`.
    """
    bits = 8 if codes.shape == rows.shape else 16
    how = None, None, *_kinds("coded_linear", rows, weight_q, weight_scale, bits)
    found: Tensor = _Int8Product.apply(rows, None, bias, weight_q, weight_scale, None, codes, scale, *how)
    return found


def mixed_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_q: Tensor,
    weight_scale: Tensor,
    *,
    output_element: str | None = None,
    bits: int = 8,
) -> Tensor:
    """Return `skuda.torch.linear_dynamic` for the codes of a weight, with gradients in the input's dtype.

    A row of the input with a NaN or an infinity makes its whole row of the result NaN, so that a loss shows it.

    ``grad_input = grad @ W``, where W is the dequantized weight, as in `frozen_linear`. ``grad_weight`` is
    ``grad.T @ input`` and ``grad_bias`` is ``grad.sum(rows)``. The gradient of the weight passes straight through its
    rounding. Torch computes all of them in the input's dtype, which is bf16 under autocast.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64
    weight : tensor of shape (N, K)
        The weight that was quantized. Only its gradient is computed.
    bias : tensor of shape (N,), f32 or narrower, optional
    weight_q : tensor of shape (N, K), s8; of 16 bits, (N, 2, K), s8
        Codes of `weight`.
    weight_scale : tensor of shape (N,), f32
        Scales of the codes.
    output_element, bits
        As in `frozen_linear`.

    Returns, Raises
    ---------------
    As in `frozen_linear`.
    """
    _check_element("mixed_linear", output_element)
    check_tensors("mixed_linear", input=input, weight=weight, weight_q=weight_q, weight_scale=weight_scale)
    how = output_element, "propagate", *_kinds("mixed_linear", input, weight_q, weight_scale, bits)
    found: Tensor = _Int8Product.apply(input, weight, bias, weight_q, weight_scale, None, None, None, *how)
    return found


def _check_element(subject: str, element: object) -> None:
    if element is not None and not isinstance(element, str):
        raise InvalidProblem(subject, "output_element", shown(element), "be the name of an element, such as 'f32'")


def _kinds(
    subject: str, input: Tensor, weight_q: Tensor, weight_scale: Tensor, bits: object
) -> tuple[int, WeightFormat]:
    """Return the bits of the codes of rows, and the format of a weight."""
    form = format_of(subject, weight_q, len(weight_scale), input.shape[-1])
    return checked_bits(subject, "bits", bits, form), form


def checked_bits(subject: str, field: str, bits: object, form: WeightFormat) -> int:
    """Return the bits of an activation's codes; raise `InvalidProblem` if they do not go with a format of weights."""
    if type(bits) is not int or bits not in CODES_OF:
        raise InvalidProblem(subject, field, shown(bits), f"be {' or '.join(map(str, CODES_OF))}")
    if form.element.is_split and bits != 16:
        rule = "be 16 beside weights of 16 bits, which multiply activations of 16 bits"
        raise InvalidProblem(subject, field, str(bits), rule)
    return bits


def row_codes(rows: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Return symmetric codes of rows (..., K), s8, and their scales (...). Those of 16 bits are (..., 2 K).

    A row with a NaN has the scale NaN, and one with an infinity an infinite scale. Both show in the result, as in a
    float layer, and the host need not wait for the device.
    """
    if not torch.compiler.is_exporting():  # an exported program must refuse gradients, and not leave them out
        rows = rows.detach()
    codes, scale, _ = torch.ops.skuda.dynamic_range.default(rows, **CODES_OF[bits])
    if rows.shape[-1]:
        scale = torch.where(rows.amax(-1).isnan(), torch.nan, scale)
    return codes, scale


class _RoundRows(_Function):
    @staticmethod
    def forward(input: Tensor) -> Tensor:
        return dequantized(*row_codes(input), input.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    @_first_order
    def backward(_: Any, grad: Tensor) -> Gradients:
        return (grad,)


def round_rows(input: Tensor) -> Tensor:
    """Return what the int8 codes -127..127 of each row stand for. The gradient passes straight through.

    The scale of a row follows from it, as in `skuda.torch.DynamicLinear`, so no element is clipped. A row with a NaN
    or an infinity becomes NaN.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64

    Returns
    -------
    tensor of the input's shape and dtype

    Raises
    ------
    InvalidProblem
        For another dtype, or a second backward pass.
    """
    found: Tensor = _RoundRows.apply(input)
    return found


class _FakeQuantize(_Function):
    @staticmethod
    def forward(input: Tensor, scale: Tensor) -> Tensor:
        ops = torch.ops.skuda
        op = ops.fake_quantize_per_token if _is_per_row(scale, input) else ops.fake_quantize
        # The difference is NaN for a NaN and an infinity, and otherwise 0.
        found: Tensor = op.default(input, scale, _zeros(scale), **BOUNDS) + (input - input)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:  # noqa: ARG004  torch's signature
        ctx.save_for_backward(*inputs)

    @staticmethod
    @_first_order
    def backward(ctx: Any, grad: Tensor, input: Tensor, scale: Tensor) -> Gradients:
        wants_input, wants_scale = ctx.needs_input_grad
        ops = torch.ops.skuda
        op = ops.fake_quantize_per_token_backward if _is_per_row(scale, input) else ops.fake_quantize_backward
        return (
            op.default(grad, input, scale, _zeros(scale), **BOUNDS) if wants_input else None,
            _scale_gradient(grad, input, scale) if wants_scale else None,
        )


class _Valued(_Function):
    @staticmethod
    def forward(value: Tensor, graph: Tensor) -> Tensor:  # noqa: ARG004  it gets the gradient
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004  torch's signature
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return None, grad.to(ctx.dtype)


def valued(value: Tensor, graph: Tensor) -> Tensor:
    """Return the values of one tensor with the gradient of another of its shape, whose values are not used."""
    found: Tensor = _Valued.apply(value, graph)
    return found


class _Recomputed(_Function):
    @staticmethod
    def forward(value: Tensor, formula: Callable[..., Tensor], *inputs: Tensor) -> Tensor:  # noqa: ARG004  for backward
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004  torch's signature
        _, ctx.formula, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @_first_order
    def backward(ctx: Any, grad: Tensor, *inputs: Tensor) -> Gradients:
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            given = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needed, strict=True)]
            found = ctx.formula(*given)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        found = iter(torch.autograd.grad(found, wanted, grad.to(found.dtype), allow_unused=True))
        return None, None, *(next(found) if need else None for need in needed)


def recomputed(value: Tensor, formula: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return a value with the gradient of ``formula(*inputs)``, which is computed in the backward pass only.

    Torch's compilers and `torch.func` see the formula at once, as `valued` has it.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():  # noqa: SLF001  no public name
        return valued(value, formula(*inputs))
    found: Tensor = _Recomputed.apply(value, formula, *inputs)
    return found


def fake_quantize(input: Tensor, scale: Tensor) -> Tensor:
    """Quantize a tensor to int8 codes -127..127 and dequantize it, with straight-through gradients.

    The result is ``clamp(t, -127, 127) * scale`` with ``t = rne(input / scale)``. The gradient of the input is the
    gradient of the result where ``-127 <= t <= 127``, and 0 elsewhere. A NaN or infinite element becomes NaN, so that a
    loss shows it. Its gradient is 0.

    A scale that requires grad gets the gradient of learned step sizes (LSQ, Esser et al., 2020)::

        factor * sum(grad * (t - input / scale   where -127 <= t <= 127,
                             127                 where t > 127,
                             -127                where t < -127))

    The sum is over the elements that share the scale, in the compute type. ``factor = 1 / sqrt(127 * K)`` for a last
    axis of length K. K counts the elements of one row only, so the gradient does not depend on how a batch is divided.
    NaN contributes 0, as for the input. A scale of either sign gives the same result.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64
    scale : tensor of the shape of `input` without the last axis, or of one element
        Real units per code, for each row or for all of `input`.

    Returns
    -------
    tensor of the input's shape and dtype

    Raises
    ------
    InvalidProblem
        For a scale of another shape, or a second backward pass.
    """
    check_tensors("fake_quantize", input=input, scale=scale)
    if not _is_per_row(scale, input):
        if scale.numel() != 1:
            rule = f"have shape {list(input.shape[:-1])}, or one element"
            raise InvalidProblem("fake_quantize", "scale", f"shape {list(scale.shape)}", rule)
        scale = scale.reshape(1)
    found: Tensor = _FakeQuantize.apply(input, scale.to(_compute(input.dtype)))
    return found


def dequantized_weight(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, width: int, form: WeightFormat | None = None
) -> Tensor:
    """Return what codes of a format stand for, (N, K), times scales (N,), in a dtype; errors as `format_of`."""
    form = form or format_of("weight", codes, len(scale), width)
    return dequantized(form.integers(codes, len(scale), width), scale, dtype)


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes of shape (..., K), s8 or s16, times scales of shape (...), in a dtype.

    Raises
    ------
    InvalidProblem
        For a bad argument.
    """
    step = scale.to(_compute(dtype))
    if codes.dtype is torch.int16:
        return (codes.to(step.dtype) * step.unsqueeze(-1)).to(dtype)
    found: Tensor = torch.ops.skuda.dequantize_per_token.default(
        codes, step, _zeros(scale), output_element=str(element_of(dtype))
    )
    return found


def _compute(dtype: torch.dtype) -> torch.dtype:
    """Return the compute type of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def _zeros(scale: Tensor) -> Tensor:
    return torch.zeros_like(scale, dtype=torch.int32)


def _is_per_row(scale: Tensor, input: Tensor) -> bool:
    same: bool = scale.shape == input.shape[:-1]
    return same


def _scale_gradient(grad: Tensor, input: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of a scale; see `fake_quantize`."""
    per_row = _is_per_row(scale, input)
    steps = input.to(scale.dtype) / (scale.unsqueeze(-1) if per_row else scale)
    codes = steps.round()
    slope = torch.where(codes.abs() <= Q_MAX, codes - steps, codes.clamp(-Q_MAX, Q_MAX))
    terms = grad.to(scale.dtype) * torch.where(steps.isnan(), 0.0, slope)
    found = terms.sum(-1) if per_row else terms.sum().reshape(1)
    return found / math.sqrt(Q_MAX * max(input.shape[-1], 1))


def _summed(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias."""
    return _rows(grad).sum(0).to(dtype)


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix. A -1 for the rows would fail without columns."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
