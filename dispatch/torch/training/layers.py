"""Linear layers for training with int8 codes in the forward pass.

`FakeQuantLinear` rounds its weight and input like an int8 layer, and multiplies in floating point (quantization-aware
training). `MixedLinear` multiplies in int8, for faster steps. Both are `torch.nn.Linear` with the same parameters under
the same names, so optimizers, `state_dict` and tied weights do not change. The dtypes of input and weight must agree,
as for `torch.nn.Linear`: cast the model, or use autocast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import INT8, Quantizer, WeightFormat, quantizer
from skuda.torch.formats.int8 import Q_MAX, quantized_weight
from skuda.torch.linear.activation import PER_ROW, PerRow, per_row
from skuda.torch.linear.autograd import fake_quantize, mixed_linear, round_rows, row_codes
from skuda.torch.linear.int8_linear import DynamicLinear, StaticLinear, autocast, check_linear
from skuda.torch.models.replaceable_layers import check_model
from skuda.torch.ops.tensor_op import not_scripted

ActivationScope = Literal["token", "tensor"]
TRAINED = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of weights that can be trained."""


class _SharedLinear(nn.Linear):
    """A layer with the parameter objects of another layer, not copies of them.

    Raises
    ------
    InvalidProblem
        If the weight is not f16, bf16 or f32.
    """

    __prepare_scriptable__ = not_scripted

    def __init__(self, linear: nn.Linear) -> None:
        check_linear(type(self).__name__, linear)
        weight, bias = linear.weight, linear.bias
        if weight.dtype not in TRAINED:
            raise InvalidProblem(type(self).__name__, "weight", str(weight.dtype), "be float16, bfloat16 or float32")
        super().__init__(linear.in_features, linear.out_features, bias=bias is not None, device="meta")
        self.weight, self.bias = weight, bias
        self.train(linear.training)

    def _taken(self, input: Tensor) -> Tensor:
        """Return an input as autocast casts it. Of a wrong one, torch would name its own functions."""
        input, name = autocast(input), type(self).__name__
        wanted = self.weight.shape[-1:]
        if not input.is_nested and input.shape[-1:] != wanted:
            raise InvalidProblem(name, "input", f"shape {list(input.shape)}", f"have shape [..., {wanted[0]}]")
        if input.device != self.weight.device:
            rule = f"be on {self.weight.device}, as the weight; move it there first"
            raise InvalidProblem(name, "input", f"on {input.device}", rule)
        return input

    def _check_export(self) -> None:
        """Raise while a program with gradients is exported, which would not have those of this layer."""
        if torch.compiler.is_exporting() and torch.is_grad_enabled():
            rule = (
                "be exported under torch.no_grad(), or as the int8 layer that quantize_(model, Dynamic()) makes of it: "
                "an exported program has no gradients of rounding"
            )
            raise InvalidProblem(type(self).__name__, "layer", "an export that records gradients", rule)


class FakeQuantLinear(_SharedLinear):
    """Quantization-aware training: a layer in floating point that rounds its weight and input like an int8 layer.

    The weight is rounded symmetrically with a scale per output channel, like the weight of `skuda.torch.DynamicLinear`.
    The rounded weight equals, bit for bit, the dequantized weight of the int8 layer after training. Scales that follow
    from ranges get no gradient. `skuda.torch.fake_quantize` describes gradients and learned scales. A NaN or an
    infinity in a row of the input makes the whole row of the output NaN, and one in a row of the weight its channel.
    Without rounding of inputs, an infinity in them acts as in a float layer.

    Parameters
    ----------
    linear : torch.nn.Linear
        The layer whose parameters are trained.
    activation : {"token", "tensor"} or None
        The scale of the input: one per row, computed at run time, as in `DynamicLinear`; one for the tensor, set by
        `observe`, as in `StaticLinear`; or None, and the input is not rounded.
    learn_scale : bool
        Whether scales are parameters: `weight_scale` of shape (N, 1) and, with ``"tensor"``, `input_scale` of shape
        (1,). They start at the ranges divided by 127. With ``"token"``, input scales are not learned. Scales are
        thousands of times smaller than weights, so an optimizer such as Adam, whose steps do not shrink with the
        gradient, needs a lower learning rate for them.

    Raises
    ------
    InvalidProblem
        For a weight that is not f16, bf16 or f32 and, in `forward`, for a missing `input_scale`, and for an input on
        another device than the weight or of another width.
    """

    input_scale: Tensor | None
    weight_scale: Tensor | None

    def __init__(
        self, linear: nn.Linear, *, activation: ActivationScope | None = "token", learn_scale: bool = False
    ) -> None:
        super().__init__(linear)
        self.activation = activation
        self.learn_scale = learn_scale
        self.observing = False
        self._observed = False
        weight_scale = quantized_weight(self.weight)[1].unsqueeze(1) if learn_scale else None
        # NaN means unknown.
        nan = torch.full((1,), torch.nan, dtype=torch.float32, device=self.weight.device)
        input_scale = nan if activation == "tensor" else None
        for name, scale in (("weight_scale", weight_scale), ("input_scale", input_scale)):
            if learn_scale and scale is not None:
                self.register_parameter(name, nn.Parameter(scale))
            else:
                self.register_buffer(name, scale)

    def fake_quantized_weight(self) -> Tensor:
        """Return the rounded weight of `forward`, in the weight's dtype."""
        if self.weight_scale is None:
            return round_rows(self.weight)
        return fake_quantize(self.weight, self.weight_scale.squeeze(1))

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K)."""
        self._check_export()
        input = self._taken(input)
        if self.observing:
            self._observe(input)
        elif self.input_scale is not None:
            if not self._observed and not torch.compiler.is_compiling():
                self._check_observed()
            input = fake_quantize(input, self.input_scale)
        elif self.activation == "token":
            input = round_rows(input)
        return nn.functional.linear(input, self.fake_quantized_weight(), self.bias)

    @torch.no_grad()
    def _observe(self, input: Tensor) -> None:
        if self.input_scale is not None and input.numel():
            largest = input.abs().max().to(self.input_scale)
            # On a GPU, torch divides by a number by multiplying with its reciprocal, which rounds twice.
            self.input_scale.copy_(torch.fmax(self.input_scale, largest / torch.full_like(largest, Q_MAX)))

    def _check_observed(self) -> None:
        scale = self.input_scale
        if scale is not None and not (bool(scale.isfinite()) and bool(scale)):
            rule = "be set before: run some inputs through the model inside `with skuda.torch.observe(model):`"
            raise InvalidProblem("FakeQuantLinear", "input_scale", str(scale.item()), rule)
        self._observed = True

    def to_int8(self) -> DynamicLinear | StaticLinear:
        """Return the int8 layer of this layer.

        Its dequantized weight equals `fake_quantized_weight()` bit for bit. Its output differs from the output of this
        layer by rounding errors only, at most ``((K + 8) * v + 5 * u) * (sum |x * w| + |bias|)``. ``x`` and ``w`` are
        the rounded input and weight, u is the unit roundoff of their dtype, and v that of f32.

        Raises
        ------
        InvalidProblem
            If the weight or a scale is not finite, or ``activation`` is None, which has no int8 product.
        """
        if self.activation is None:
            rule = "be 'token' or 'tensor': without codes of the input there is no int8 product"
            raise InvalidProblem("FakeQuantLinear", "activation", "None", rule)
        codes, scale = quantized_weight(self.weight)
        if self.weight_scale is not None:
            scale = self.weight_scale.detach().float().squeeze(1)
            if not bool(scale.isfinite().all()):
                raise InvalidProblem("FakeQuantLinear", "weight_scale", "an infinity or NaN", "be finite")
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            codes = torch.ops.skuda.quantize_per_token.default(
                self.weight.detach(), scale, zeros, q_min=-Q_MAX, q_max=Q_MAX, output_element="s8"
            )
        if self.input_scale is None:
            return DynamicLinear(codes, scale, self.bias, dtype=self.weight.dtype)
        self._check_observed()
        return StaticLinear(codes, scale, self.bias, input_scale=self.input_scale, dtype=self.weight.dtype)

    def extra_repr(self) -> str:
        """Return the sizes and the rounding."""
        return f"{super().extra_repr()}, activation={self.activation!r}, learn_scale={self.learn_scale}"


@contextmanager
def observe(model: nn.Module) -> Iterator[None]:
    """Set the input scales of a model's `FakeQuantLinear` layers from their inputs in the block.

    A scale becomes the largest magnitude so far, divided by 127. In the block, inputs are not rounded, so the ranges
    are those of the float model. Do this before you distribute the model, which copies the scales of the first process.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Layers with ``activation="tensor"`` are observed. Other layers behave as usual.

    Raises
    ------
    InvalidProblem
        If `model` is not a module.
    """
    check_model("observe", model, None)
    layers = [
        layer for layer in model.modules() if isinstance(layer, FakeQuantLinear) and layer.input_scale is not None
    ]
    for layer in layers:
        layer.observing = True
    try:
        yield
    finally:
        for layer in layers:
            layer.observing = False


class MixedLinear(_SharedLinear):
    """Training with an int8 product: the bits of `skuda.torch.DynamicLinear`, and gradients in floating point.

    The weight is the master copy that an optimizer updates. Every forward pass quantizes it, because torch does not
    count every change of a tensor: not those through ``weight.data``, and not those by other processes.
    `skuda.torch.mixed_linear` describes the gradients.

    A row of the input with a NaN or an infinity makes its whole row of the output NaN, and a row of the weight its
    channel. Other rows have the bits of `DynamicLinear`.

    Parameters
    ----------
    linear : torch.nn.Linear
        The layer whose parameters are trained.
    form : WeightFormat
        The format of the weight's codes, of 8 or 16 bits.
    activation : PerRow
        The codes of inputs.

    Raises
    ------
    InvalidProblem
        For a weight that is not f16, bf16 or f32 and, in `forward`, for an input on another device than the weight or
        of another width.
    """

    form: WeightFormat = INT8
    activation: PerRow = PER_ROW
    output_element: str | None = None
    """Element of the output, if it is not that of the input."""

    def __init__(self, linear: nn.Linear, form: WeightFormat = INT8, activation: PerRow = PER_ROW) -> None:
        super().__init__(linear)
        self.form, self.activation = form, activation

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K)."""
        self._check_export()
        codes, scale = row_codes(self.weight, self.form.element.bits)
        given = self._taken(input), self.weight, self.bias, codes.view(self.form.shape(*self.weight.shape)), scale
        return mixed_linear(*given, output_element=self.output_element, bits=self.activation.bits)

    def to_int8(self) -> DynamicLinear:
        """Return the int8 layer. It gives the bits of this layer.

        Raises
        ------
        InvalidProblem
            If the weight is not finite.
        """
        return DynamicLinear.from_linear(self, Quantizer(self.form), self.activation)

    def extra_repr(self) -> str:
        """Return the sizes, and what has 16 bits."""
        return f"{super().extra_repr()}{self.form.text()}{self.activation.text()}"


class _Training(ABC):
    """A config of `quantize_` for training."""

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the replacement of a layer in training.

        Raises
        ------
        InvalidProblem
            For a layer that cannot be replaced.
        """
        _check_layer(type(self).__name__, name, linear)
        return self._made(name, linear)

    @abstractmethod
    def _made(self, name: str, linear: nn.Linear) -> nn.Module: ...


@dataclass(frozen=True)
class FakeQuant(_Training):
    """Config of `quantize_` for quantization-aware training: layers become `FakeQuantLinear`.

    Parameters
    ----------
    activation, learn_scale
        As in `FakeQuantLinear`.

    Raises
    ------
    InvalidProblem
        For an invalid value.
    """

    activation: ActivationScope | None = "token"
    learn_scale: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ("token", "tensor", None):
            raise InvalidProblem("FakeQuant", "activation", shown(self.activation), "be 'token', 'tensor' or None")
        if not isinstance(self.learn_scale, bool):
            raise InvalidProblem("FakeQuant", "learn_scale", shown(self.learn_scale), "be True or False")

    def _made(self, name: str, linear: nn.Linear) -> nn.Module:
        if self.learn_scale and linear.weight.is_meta:
            rule = "have data, whose ranges are the first scales"
            raise InvalidProblem("FakeQuant", name, "a weight without data", rule)
        return FakeQuantLinear(linear, activation=self.activation, learn_scale=self.learn_scale)


@dataclass(frozen=True)
class Mixed(_Training):
    """Config of `quantize_` for training with int8 products: layers become `MixedLinear`.

    Parameters
    ----------
    weights : {"int8", "int16"}
        The codes of weights, as in `skuda.torch.Dynamic`.
    activations : {"int8", "int16"}
        The codes of inputs, as there.

    Raises
    ------
    InvalidProblem
        For an invalid value, and for weights of 16 bits beside activations of 8.
    """

    weights: str = "int8"
    activations: str = "int8"

    def __post_init__(self) -> None:
        if self.weights not in ("int8", "int16"):
            raise InvalidProblem("Mixed", "weights", shown(self.weights), "be 'int8' or 'int16'")
        _ = self._how

    @property
    def _how(self) -> tuple[WeightFormat, PerRow]:
        form = quantizer("Mixed", self.weights).format
        return form, per_row("Mixed", self.activations, form)

    def _made(self, name: str, linear: nn.Linear) -> nn.Module:  # noqa: ARG002  for errors
        return MixedLinear(linear, *self._how)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_layer(subject: str, name: str, linear: nn.Linear) -> None:
    """Raise for a layer whose replacement would behave differently."""
    if type(linear) is not nn.Linear:
        rule = "be a torch.nn.Linear itself: a subclass, or a parametrized layer, may compute something else"
        raise InvalidProblem(subject, name, f"a {type(linear).__name__}", rule)
    if any(getattr(linear, hooks) for hooks in _HOOKS):
        raise InvalidProblem(
            subject, name, "a layer with hooks", "have none: remove them, and register them again after"
        )
    if linear.weight.dtype not in TRAINED:
        raise InvalidProblem(subject, name, str(linear.weight.dtype), "have a weight of float16, bfloat16 or float32")
