"""SmoothQuant before inference: observe activations, move their outliers into the weights, and quantize.

A linear layer ``y = A W^T + b`` does not change if column k of A is divided by ``s_k`` and column k of W is multiplied
by it. The factors are ``s_k = max|A_k|^alpha / max|W_k|^(1-alpha)``, with both maxima at least 1e-5. The few channels
in which a transformer's activations are a hundred times larger than elsewhere no longer set the step of all others.

The precision of each step is fixed, so that a checkpoint is the same on every machine:

- maxima: exact, f32
- both powers: f64, each rounded once to f32 (NumPy's own f32 power differs by an ulp between SIMD paths)
- ``s_k``: one f32 division of the two powers
- ``A_k / s_k``: one f32 division; ``W_k * s_k``: one f32 product
- scales and int8 values: `DynamicRangeQuantize`, `QuantizePerTensor`, symmetric -127..127, through the dispatcher

An array may be of any library whose arrays NumPy can view in the memory of the CPU without a copy, such as torch;
results are NumPy arrays. Lists are refused, because they have no element kind.

Source: Xiao et al., SmoothQuant, 2023, equation 4; numerics.md, "SmoothQuant's offline half".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from math import isfinite, prod
from numbers import Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher, Plan
from skuda.dispatch.host.arrays import host_view
from skuda.dispatch.host.floating import require_exact_mode
from skuda.kernels.quantize import (
    DynamicRangeQuantizeDescriptor,
    QuantizedLinearDescriptor,
    QuantizePerTensorDescriptor,
    SmoothQuantLinearDescriptor,
)
from skuda.kernels.smoothing import factors
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown

F32 = npt.NDArray[np.float32]
S8 = npt.NDArray[np.int8]

_FLOATS = ("float16", "bfloat16", "float32")
Q_MAX = 127
"""Bound of the symmetric range -127..127; without -128, every code has a negative."""


class ActivationRanges:
    """Streaming calibration: the largest magnitude of every input channel of every layer, one f32 each.

    NaN is skipped, as in the dynamic-range ops. An infinity is kept. The layer refuses it when it is quantized, because
    no scale can represent it.
    """

    def __init__(self) -> None:
        self._maxima: dict[str, F32] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        """Names seen so far, in the order of their first batch."""
        return tuple(self._maxima)

    def observe(self, layer: str, activation: npt.NDArray[Any]) -> None:
        """Widen the ranges of a layer, of any name, by one batch of its input: shape (..., K), f16, bf16 or f32.

        Raise `InvalidProblem` for a name that is no str; for a scalar, another element kind, or another K than before.
        """
        _check_name(layer)
        seen = self._maxima.get(layer)
        channels = "K" if seen is None else seen.size
        subject = f"calibration of layer {shown(layer)}"
        rows = _rows(_checked(subject, "activation", activation, _FLOATS, "...", channels))
        # Two reductions, unlike abs(), need no temporary of the size of the batch.
        high = np.fmax.reduce(rows, axis=0, initial=np.float32(0))
        low = np.fmin.reduce(rows, axis=0, initial=np.float32(0))
        batch = np.abs(np.maximum(high, -low))  # the largest of 0 and -0 may be either
        self._maxima[layer] = batch if seen is None else np.maximum(seen, batch)

    def channel_max(self, layer: str) -> F32:
        """Return max|A_k| of one layer, shape (K,), f32; raise `InvalidProblem` if no batch of it was observed."""
        _check_name(layer)
        if layer not in self._maxima:
            known = shown(list(self._maxima)) if self._maxima else "none"
            raise InvalidProblem("calibration", "layer", shown(layer), f"have been observed (observed: {known})")
        return self._maxima[layer].copy()


def smoothing_factors(activation_max: F32, weight_max: F32, alpha: float) -> F32:
    """Return ``s_k = max|A_k|^alpha / max|W_k|^(1-alpha)``, shape (K,), f32, both maxima floored at 1e-5.

    The maxima have the shape (K,), f32, as `ActivationRanges.channel_max` gives them. An alpha of 0 leaves the whole
    range in the activations, and one of 1 moves it all into the weights. Raise `InvalidProblem` for alpha that is no
    number in 0..1, maxima that are no f32 vectors of one size, or one that is infinite or NaN.
    """
    subject = "smoothing_factors"
    alpha = _strength(subject, alpha)
    weight_max = _vector(subject, "weight_max", weight_max, "K")
    activation_max = _vector(subject, "activation_max", activation_max, weight_max.size)
    return factors(activation_max, weight_max, alpha)


def quantize_weight(dispatcher: Dispatcher, weight: npt.NDArray[Any]) -> tuple[S8, F32]:
    """Quantize a weight of shape (N, K) symmetrically; return s8 codes and a scale per output channel, (N,), f32.

    Raise `InvalidProblem` if the weight is not a finite matrix of f16, bf16 or f32, or the dispatcher is none.
    """
    return _dynamic_range(dispatcher, _matrix("quantize_weight", weight), scope="token")


@dataclass(frozen=True, eq=False, kw_only=True)
class Int8Layer(ABC):
    """A linear layer whose product runs in int8, with weights quantized once.

    `weight_q` has the shape (N, K), s8, `weight_scale` and `bias`, which may be None, (N,), f32. Raise `InvalidProblem`
    if an attribute has another shape or element kind, or is not finite.
    """

    weight_q: S8
    weight_scale: F32
    bias: F32 | None = None

    def __post_init__(self) -> None:
        weight_q = _checked(type(self).__name__, "weight_q", self.weight_q, ("int8",), "N", "K")
        object.__setattr__(self, "weight_q", weight_q)
        self._hold("weight_scale", self.shape[0])
        if self.bias is not None:
            self._hold("bias", self.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input channels, (N, K)."""
        return self.weight_q.shape[0], self.weight_q.shape[1]

    @abstractmethod
    def descriptor(self, m: int) -> QuantizedLinearDescriptor | SmoothQuantLinearDescriptor:
        """Describe the product for `m` rows."""

    @abstractmethod
    def operands(self, dispatcher: Dispatcher, rows: F32) -> dict[str, Any]:
        """Return the product's array arguments for an input of shape (M, K), f32."""

    def run(self, dispatcher: Dispatcher, x: npt.NDArray[Any]) -> F32:
        """Apply the layer to an array of shape (..., K), f16, bf16 or f32; return one of shape (..., N), f32.

        Raise `InvalidProblem` if x has another last axis or element kind, or the dispatcher is none, and `Unsupported`
        if no registered kernel serves the product.
        """
        subject = type(self).__name__
        _check_dispatcher(subject, dispatcher)
        x = _checked(subject, "x", x, _FLOATS, "...", self.shape[1])
        rows = _rows(x)
        y: F32 = dispatcher.run(self.descriptor(len(rows)), **self.operands(dispatcher, rows))
        return y.reshape(*x.shape[:-1], self.shape[0])

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the layer's arrays, by attribute name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}

    @property
    def _epilogue(self) -> Literal["identity", "bias"]:
        return "identity" if self.bias is None else "bias"

    def _hold(self, field: str, size: int) -> None:
        object.__setattr__(self, field, _vector(type(self).__name__, field, getattr(self, field), size))


@dataclass(frozen=True, eq=False, kw_only=True)
class DynamicLayer(Int8Layer):
    """Dynamic W8A8: each row of the activation gets its own scale at run time. Attributes as `Int8Layer`."""

    @classmethod
    def quantize(cls, dispatcher: Dispatcher, weight: npt.NDArray[Any], bias: F32 | None = None) -> DynamicLayer:
        """Quantize a weight of shape (N, K) per output channel; errors as `quantize_weight`."""
        weight_q, weight_scale = quantize_weight(dispatcher, weight)
        return cls(weight_q=weight_q, weight_scale=weight_scale, bias=bias)

    def descriptor(self, m: int) -> QuantizedLinearDescriptor:
        """Describe the product for `m` rows."""
        n, k = self.shape
        kinds = {"activation_element": "f32", "weight_element": "s8", "epilogue": self._epilogue}
        return QuantizedLinearDescriptor(m=m, c_out=n, k=k, q_min=-Q_MAX, q_max=Q_MAX, **kinds)

    def operands(self, dispatcher: Dispatcher, rows: F32) -> dict[str, Any]:  # noqa: ARG002  the op itself quantizes the activation
        """Return the product's array arguments for an input of shape (M, K), f32."""
        return {"activation": rows, **self.tensors()}


@dataclass(frozen=True, eq=False, kw_only=True)
class SmoothQuantLayer(Int8Layer):
    """Static W8A8: smoothed int8 weights and one activation scale, fixed by calibration.

    Beside the attributes of `Int8Layer`, `smooth` of shape (K,), f32, has the divisors of the activation's channels,
    which are positive, and all ones without smoothing. `act_scale` is the step of the smoothed activation, positive and
    exactly an f32 value. `alpha` is the smoothing strength that `smooth` was made with; None without smoothing.
    """

    smooth: F32
    act_scale: float
    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        subject = type(self).__name__
        self._hold("smooth", self.shape[1])
        if not (self.smooth > 0).all():
            raise InvalidProblem(subject, "smooth", f"{self.smooth.min()}", "be positive")
        scale = _number(self.act_scale)
        with np.errstate(over="ignore"):
            # NumPy would round the number to f32 if it were compared with one.
            held = float(np.float32(0 if scale is None else scale))
        if not (isfinite(held) and held > 0 and held == scale):
            rule = "be a positive number that f32 holds exactly"
            raise InvalidProblem(subject, "act_scale", shown(self.act_scale), rule)
        object.__setattr__(self, "act_scale", held)
        if self.alpha is not None:
            object.__setattr__(self, "alpha", _strength(subject, self.alpha))

    @classmethod
    def quantize(
        cls,
        dispatcher: Dispatcher,
        activation_max: F32,
        weight: npt.NDArray[Any],
        bias: F32 | None = None,
        *,
        alpha: float | None,
    ) -> SmoothQuantLayer:
        """Smooth and quantize one layer.

        `activation_max` of shape (K,), f32, is that of `ActivationRanges.channel_max`. The weight has the shape (N, K),
        f16, bf16 or f32, and the bias (N,), f32. `alpha` is the smoothing strength in 0..1; None leaves activation and
        weight as they are. Raise `InvalidProblem` for shapes that do not fit each other, values that are not finite,
        another alpha, or a dispatcher that is none.
        """
        matrix = _matrix(cls.__name__, weight)
        activation_max = _vector(cls.__name__, "activation_max", activation_max, matrix.shape[1])
        if alpha is None:
            smooth = np.ones_like(activation_max)
        else:
            smooth = smoothing_factors(activation_max, np.abs(matrix).max(axis=0, initial=0), alpha)
        # Division by a positive number is monotone, so the quotient of the maxima is the largest one of the activation.
        with np.errstate(over="ignore"):  # what overflows is infinite, and refused as such
            smoothed_max, smoothed_weight = activation_max / smooth, matrix * smooth
        _, act_scale = _dynamic_range(dispatcher, smoothed_max[None], scope="tensor")
        weight_q, weight_scale = quantize_weight(dispatcher, smoothed_weight)
        step = float(act_scale.item())
        return cls(weight_q=weight_q, weight_scale=weight_scale, bias=bias, smooth=smooth, act_scale=step, alpha=alpha)

    def descriptor(self, m: int) -> SmoothQuantLinearDescriptor:
        """Describe the product for `m` rows."""
        n, k = self.shape
        kinds = {"activation_element": "s8", "weight_element": "s8", "output_element": "f32"}
        return SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=self.act_scale, epilogue=self._epilogue, **kinds)

    def operands(self, dispatcher: Dispatcher, rows: F32) -> dict[str, Any]:
        """Return the product's array arguments for an input of shape (M, K), f32, smoothed and quantized here."""
        description = QuantizePerTensorDescriptor(
            numel=rows.size, q_min=-Q_MAX, q_max=Q_MAX, input_element="f32", output_element="s8"
        )
        with np.errstate(over="ignore"):  # what overflows is infinite, and saturates
            smoothed = rows / self.smooth
        act_q = dispatcher.run(description, input=smoothed, scale=self.act_scale, zero_point=0)
        tensors = self.tensors()
        del tensors["smooth"]
        return {"act_q": act_q, **tensors}


def _dynamic_range(dispatcher: Dispatcher, matrix: F32, scope: Literal["token", "tensor"]) -> tuple[S8, F32]:
    """Quantize a matrix symmetrically, with one scale per row or one for all; return codes and scales."""
    _check_dispatcher("quantization", dispatcher)
    (n, d), kinds = matrix.shape, {"input_element": "f32", "output_element": "s8"}
    description = DynamicRangeQuantizeDescriptor(
        n=n, d=d, q_min=-Q_MAX, q_max=Q_MAX, mode="symmetric", scope=scope, **kinds
    )
    ranges = dispatcher.run(description, input=matrix)
    return ranges.output, ranges.scale_out


def _check_dispatcher(subject: str, dispatcher: object) -> None:
    if isinstance(dispatcher, (type, Plan)) or not callable(getattr(dispatcher, "run", None)):
        raise InvalidProblem(subject, "dispatcher", shown(dispatcher), "be a skuda.dispatch.Dispatcher")


def _check_name(layer: object) -> None:
    if not isinstance(layer, str):
        raise InvalidProblem("calibration", "layer", shown(layer), "be a name, a str")


def _number(value: object) -> float | int | None:
    """Return a finite number of Python or NumPy, or None for anything else; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value) if isfinite(value) else None
    except OverflowError:
        return None


def _strength(subject: str, alpha: object) -> float:
    number = _number(alpha)
    if number is None or not 0 <= number <= 1:
        raise InvalidProblem(subject, "alpha", shown(alpha), "be a number in 0..1")
    return number


def _checked(subject: str, field: str, value: object, elements: tuple[str, ...], *shape: int | str) -> npt.NDArray[Any]:
    """Return an array of the CPU as NumPy sees it, without a copy, in a thread whose arithmetic gives our bits.

    A text in `shape` stands for any size, and ``...`` in front for any leading axes.
    """
    require_exact_mode()
    array = host_view(subject, field, value)
    leading = shape[0] == "..."
    sizes = shape[1:] if leading else shape
    known = all(isinstance(size, str) or size == had for size, had in zip(sizes[::-1], array.shape[::-1], strict=False))
    axes = array.ndim == len(sizes) or (leading and array.ndim > len(sizes))
    if array.dtype.name not in elements or not axes or not known:
        rule = f"be {' or '.join(elements)} of shape [{', '.join(map(str, shape))}]"
        raise InvalidProblem(subject, field, f"{array.dtype.name} of shape {list(array.shape)}", rule)
    return array


def _rows(array: npt.NDArray[Any]) -> F32:
    """Return (..., K) as f32 rows of shape (M, K); f16 and bf16 are widened exactly."""
    return array.reshape(prod(array.shape[:-1]), array.shape[-1]).astype(np.float32, copy=False)


def _vector(subject: str, field: str, vector: object, size: int | str) -> F32:
    return _finite(subject, field, _checked(subject, field, vector, ("float32",), size))


def _matrix(subject: str, value: object) -> F32:
    """Return a weight as f32; raise `InvalidProblem` if it is not a finite matrix."""
    return _finite(subject, "weight", _rows(_checked(subject, "weight", value, _FLOATS, "N", "K")))


def _finite(subject: str, field: str, array: F32) -> F32:
    finite = np.isfinite(array)
    if not finite.all():
        place = np.unravel_index(int(np.argmin(finite)), array.shape)
        raise InvalidProblem(subject, field, f"{array[place]} at [{', '.join(map(str, place))}]", "be finite")
    return array
