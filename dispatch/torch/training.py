"""Linear layers that train with int8 codes in the forward pass.

`FakeQuantLinear` rounds in floating point what an int8 layer rounds (quantization-aware training); `MixedLinear`
computes its product in int8 (faster steps). Both are `torch.nn.Linear` with the same parameters under the same names,
so optimizers, `state_dict` and tied weights stay as they are. `torch.nn.Linear`'s rules for dtypes hold: cast the
model, or use autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.autograd import Q_MAX, fake_quantize, mixed_linear
from skuda.torch.layers import check_model
from skuda.torch.linear import DynamicLinear, StaticLinear, autocast, quantized_weight

Activation = Literal["token", "tensor"]
TRAINED = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of weights that can be trained."""


class _SharedLinear(nn.Linear):
    """A layer with the parameters of another one: the same objects, not copies.

    Raises
    ------
    InvalidProblem
        If the weight is no f16, bf16 or f32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        weight, bias = linear.weight, linear.bias
        if weight.dtype not in TRAINED:
            raise InvalidProblem(type(self).__name__, "weight", str(weight.dtype), "be float16, bfloat16 or float32")
        super().__init__(linear.in_features, linear.out_features, bias=bias is not None, device="meta")
        self.weight, self.bias = weight, bias
        self.train(linear.training)


class FakeQuantLinear(_SharedLinear):
    """Quantization-aware training: a float layer of the weight and the input that an int8 layer would see.

    The weight is rounded symmetrically with a scale per output channel, as `skuda.torch.DynamicLinear` rounds it: what
    it is rounded to is, bit for bit, what the codes of the int8 layer stand for after training. Scales that are found
    from ranges get no gradient. For the gradients and for learned scales, see `skuda.torch.fake_quantize`.

    Parameters
    ----------
    linear : torch.nn.Linear
        The layer whose parameters are trained.
    activation : {"token", "tensor"} or None
        The input's scale: one per row, found each time, as in `DynamicLinear`; one for everything, fixed by `observe`,
        as in `StaticLinear`; or none, and the input is not rounded.
    learn_scale : bool
        Whether scales are parameters, `weight_scale` of shape (N, 1) and, with ``"tensor"``, `input_scale` of shape
        (1,); they begin at the ranges divided by 127. With ``"token"``, the input's scales are not learned. Scales are
        thousands of times smaller than weights: an optimizer such as Adam, whose steps do not shrink with the gradient,
        needs a lower learning rate for them.

    Raises
    ------
    InvalidProblem
        For a weight that is no f16, bf16 or f32; in `forward`, for a missing `input_scale`.
    """

    input_scale: Tensor | None
    weight_scale: Tensor | None

    def __init__(
        self, linear: nn.Linear, *, activation: Activation | None = "token", learn_scale: bool = False
    ) -> None:
        super().__init__(linear)
        self.activation = activation
        self.learn_scale = learn_scale
        self.observing = False
        self._observed = False
        weight_scale = quantized_weight(self.weight)[1].unsqueeze(1) if learn_scale else None
        # NaN: not known yet.
        nan = torch.full((1,), torch.nan, dtype=torch.float32, device=self.weight.device)
        input_scale = nan if activation == "tensor" else None
        for name, scale in (("weight_scale", weight_scale), ("input_scale", input_scale)):
            if learn_scale and scale is not None:
                self.register_parameter(name, nn.Parameter(scale))
            else:
                self.register_buffer(name, scale)

    def fake_quantized_weight(self) -> Tensor:
        """Return the weight that `forward` multiplies with, in the weight's dtype."""
        scale = row_codes(self.weight)[1] if self.weight_scale is None else self.weight_scale.squeeze(1)
        return fake_quantize(self.weight, scale)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K)."""
        input = autocast(input)
        if self.observing:
            self._observe(input)
        elif self.input_scale is not None:
            if not self._observed and not torch.compiler.is_compiling():
                self._check_observed()
            input = fake_quantize(input, self.input_scale)
        elif self.activation == "token":
            input = fake_quantize(input, _row_scale(input))
        return nn.functional.linear(input, self.fake_quantized_weight(), self.bias)

    @torch.no_grad()
    def _observe(self, input: Tensor) -> None:
        if self.input_scale is not None and input.numel():
            largest = input.abs().max().to(self.input_scale)
            # On a GPU, torch multiplies by the reciprocal of a number, which is rounded twice.
            self.input_scale.copy_(torch.fmax(self.input_scale, largest / torch.full_like(largest, Q_MAX)))

    def _check_observed(self) -> None:
        scale = self.input_scale
        if scale is not None and not (bool(scale.isfinite()) and bool(scale)):
            rule = "be set before: run some inputs through the model inside `with skuda.torch.observe(model):`"
            raise InvalidProblem("FakeQuantLinear", "input_scale", str(scale.item()), rule)
        self._observed = True

    def to_int8(self) -> DynamicLinear | StaticLinear:
        """Return the int8 layer that this one was trained for.

        Its weight, dequantized, is bit for bit `fake_quantized_weight()`. Its output differs from the output of this
        layer by rounding alone: with ``x`` and ``w`` the rounded input and weight, u the unit roundoff of their dtype
        and v that of f32, by at most ``((K + 8) * v + 5 * u) * (sum |x * w| + |bias|)``.

        Raises
        ------
        InvalidProblem
            If the weight or a scale is not finite; with ``activation=None``, which has no int8 product.
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
            return DynamicLinear(codes, scale, self.bias)
        self._check_observed()
        return StaticLinear(codes, scale, self.bias, input_scale=self.input_scale)

    def extra_repr(self) -> str:
        """Return the sizes and what is rounded how."""
        return f"{super().extra_repr()}, activation={self.activation!r}, learn_scale={self.learn_scale}"


@contextmanager
def observe(model: nn.Module) -> Iterator[None]:
    """Set the input scales of the `FakeQuantLinear` layers in a model, from the inputs that they get meanwhile.

    A scale becomes the largest magnitude so far, divided by 127. Inside, inputs are not rounded, so that the ranges are
    those of the float model. Do this before the model is distributed, which copies the scales of the first process.

    Parameters
    ----------
    model : torch.nn.Module
        Layers with ``activation="tensor"`` are observed; others behave as usual.

    Raises
    ------
    InvalidProblem
        If `model` is none.
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


class _Codes(NamedTuple):
    """Codes of a weight, and what the weight was when they were made."""

    weight: Tensor
    state: tuple[object, ...]
    codes: Tensor
    scale: Tensor


class MixedLinear(_SharedLinear):
    """Training with an int8 product: the result of `skuda.torch.DynamicLinear`, bit for bit, and gradients in bf16.

    The weight, the master copy that an optimizer updates, is quantized again whenever it has changed: after a step of
    an optimizer of torch, or a change in place that torch counts. Without one, as while gradients are accumulated, its
    codes are kept. A write through ``weight.data`` outside of an optimizer, or by another process, is not noticed. For
    the gradients, see `skuda.torch.mixed_linear`.

    Parameters
    ----------
    linear : torch.nn.Linear
        The layer whose parameters are trained.

    Raises
    ------
    InvalidProblem
        For a weight that is no f16, bf16 or f32.
    """

    _codes: _Codes | None

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K), in the input's dtype."""
        return mixed_linear(autocast(input), self.weight, self.bias, *self._weight_codes())

    def to_int8(self) -> DynamicLinear:
        """Return the int8 layer, whose results are those of this one.

        Raises
        ------
        InvalidProblem
            If the weight is not finite.
        """
        return DynamicLinear.from_linear(self)

    def _weight_codes(self) -> tuple[Tensor, Tensor]:
        weight = self.weight
        # A graph must hold the quantization. What is no parameter, as in a functional call, is another one each time.
        passing = torch.compiler.is_compiling() or type(weight) is not nn.Parameter
        # What is made in inference mode cannot be saved for a backward pass.
        passing = passing or weight.is_inference() or torch.is_inference_mode_enabled()
        if passing or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return row_codes(weight)
        # Work on another stream may come before these codes are made, or after they are freed.
        stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
        state = weight._version, weight.data_ptr(), weight.dtype, _steps.count, stream  # noqa: SLF001  torch has no public name
        kept = self._codes
        if kept is None or kept.weight is not weight or kept.state != state:
            kept = self._codes = _Codes(weight, state, *row_codes(weight))
        return kept.codes, kept.scale

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget the codes of a weight that is set, also to what it was.

        After each gathering, ``fully_shard`` sets the same parameter, whose memory it has filled without counting that.
        """
        if name == "weight":
            self.__dict__["_codes"] = None
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the codes out of copies and pickles, whose weights begin to count their changes again."""
        return {**self.__dict__, "_codes": None}


class _Steps:
    """Counts the steps of all optimizers: some write through ``weight.data``, which counts no change."""

    count = 0

    def add(self, *_: object) -> None:
        """Count one; torch calls this after each step."""
        self.count += 1


_steps = _Steps()
register_optimizer_step_post_hook(_steps.add)


def row_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantized_weight` unchecked: s8 codes (N, K) and scales (N,). A row with NaN has the scale NaN.

    The scale of a row with an infinity is infinite. So both show in a result, as they do in a float layer, and nothing
    waits for the device to find out.
    """
    matrix = weight.detach()
    codes, scale, _ = torch.ops.skuda.dynamic_range.default(matrix, q_min=-Q_MAX, q_max=Q_MAX, output_element="s8")
    if matrix.shape[1]:
        scale = torch.where(matrix.amax(1).isnan(), torch.nan, scale)
    return codes, scale


def _row_scale(input: Tensor) -> Tensor:
    """Return the scale of each row of an input, as `DynamicLinear` finds it."""
    found: Tensor = torch.ops.skuda.dynamic_range.default(
        input.detach(), q_min=-Q_MAX, q_max=Q_MAX, output_element="s8"
    )[1]
    return found


@dataclass(frozen=True)
class FakeQuant:
    """Quantization-aware training, for `skuda.torch.quantize_`: layers become `FakeQuantLinear`.

    Parameters
    ----------
    activation, learn_scale
        As in `FakeQuantLinear`.

    Raises
    ------
    InvalidProblem
        For another value.
    """

    activation: Activation | None = "token"
    learn_scale: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ("token", "tensor", None):
            raise InvalidProblem("FakeQuant", "activation", shown(self.activation), "be 'token', 'tensor' or None")
        if not isinstance(self.learn_scale, bool):
            raise InvalidProblem("FakeQuant", "learn_scale", shown(self.learn_scale), "be True or False")

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return what takes the place of a layer in training.

        Raises
        ------
        InvalidProblem
            For a layer that cannot be served.
        """
        _check_layer("FakeQuant", name, linear)
        if self.learn_scale and linear.weight.is_meta:
            raise InvalidProblem(
                "FakeQuant", name, "a weight without data", "have data, whose ranges are the first scales"
            )
        return FakeQuantLinear(linear, activation=self.activation, learn_scale=self.learn_scale)


@dataclass(frozen=True)
class Mixed:
    """Training with int8 products, for `skuda.torch.quantize_`: layers become `MixedLinear`."""

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return what takes the place of a layer in training.

        Raises
        ------
        InvalidProblem
            For a layer that cannot be served.
        """
        _check_layer("Mixed", name, linear)
        return MixedLinear(linear)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_layer(subject: str, name: str, linear: nn.Linear) -> None:
    """Refuse a layer whose behaviour its replacement would not have."""
    if type(linear) is not nn.Linear:
        rule = "be a torch.nn.Linear itself: a subclass, or a parametrized layer, may compute something else"
        raise InvalidProblem(subject, name, f"a {type(linear).__name__}", rule)
    if any(getattr(linear, hooks) for hooks in _HOOKS):
        raise InvalidProblem(
            subject, name, "a layer with hooks", "have none: remove them, and register them again after"
        )
    if linear.weight.dtype not in TRAINED:
        raise InvalidProblem(subject, name, str(linear.weight.dtype), "have a weight of float16, bfloat16 or float32")
