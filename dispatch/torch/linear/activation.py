"""`ActivationQuant`: how the input of an int8 layer becomes codes. All that depends on it is here.

It is a half of a layer; the other is the format of the weight. A new one is a class in this file, and no layer changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from skuda.dispatch.shard.layer import LayerInput
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import CODES_OF, WeightFormat
from skuda.torch.linear.autograd import frozen_linear
from skuda.torch.linear.dequantized_weight import CodedLayer
from skuda.torch.ops.dtypes import element_of, torch_dtype
from skuda.torch.ops.tensor_op import check_tensors, launched, run_module

Tensors = tuple[Tensor, *tuple[Tensor | None, ...]]
"""Tensors of a call in the order of the op's schema, the input first."""

Nonfinite = Literal["ignore", "propagate"]
"""What an int8 layer does with a NaN or an infinity in its input."""

Held = Callable[[str], Any]
"""Returns a buffer of a layer by its name."""


def checked_vector(subject: str, name: str, given: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return a vector of scales or biases in a shape, or a zero point as s32.

    Raises
    ------
    InvalidProblem
        For a tensor of another dtype or number of elements.
    """
    if given is None:
        return None
    check_tensors(subject, **{name: given})
    integer = name == "input_zero_point"
    fits = given.is_floating_point() is not integer and given.dtype is not torch.float64
    if not fits or given.numel() != torch.Size(shape).numel():
        kind = "an integer" if integer else "float32, bfloat16 or float16"
        raise InvalidProblem(
            subject, name, f"{given.dtype} of shape {list(given.shape)}", f"be {kind} of shape {list(shape)}"
        )
    found = given.detach().reshape(shape)
    return found.to(torch.int32) if integer else found


def check_nonfinite(subject: str, given: Any) -> None:
    """Raise for a value that is no `Nonfinite`."""
    if given not in ("ignore", "propagate"):
        raise InvalidProblem(subject, "nonfinite", shown(given), "be 'ignore' or 'propagate'")


@dataclass(frozen=True)
class ActivationQuant(ABC):
    """How a layer makes codes of its input. Activations are values: equal ones compute alike.

    Parameters
    ----------
    nonfinite : str, optional
        ``propagate`` makes a row with a NaN or an infinity a row of NaN. By default a NaN counts as 0.
    output_element : str, optional
        Element of the output. By default that of the input.
    smoothed : bool
        Whether the channels of the input are divided by the buffer `smooth` first.
    """

    nonfinite: str | None = None
    output_element: str | None = None
    smoothed: bool = False

    op: ClassVar[str]
    """The op of the product."""
    element: ClassVar[ElementKind] = ElementKind.S8
    """Element of the codes."""
    dynamic: ClassVar[bool] = False
    """Whether each row gets a scale at run time."""
    takes: ClassVar[torch.dtype | None] = None
    """Dtype of the input, if that is codes already."""
    codes: ClassVar[Mapping[str, Any]] = CODES_OF[8]
    """Fields of the ops that write its symmetric codes."""
    buffers: ClassVar[tuple[str, ...]] = ()
    """Names of what the layer holds for it: `smooth` of shape (K,), and scalars. Some may be None."""
    zero: ClassVar[bool] = False
    """Whether the layer also has the buffer `zero`, s32 of shape (1,), a zero point of 0 that is in no checkpoint."""
    scheme: ClassVar[str | None] = None
    """What checkpoints call it; see `skuda.torch.hf.scheme.ActivationScheme`. None if they cannot express it."""

    @classmethod
    def of(cls, held: Mapping[str, Tensor | None], **fields: Any) -> Self:
        """Return the activation of a layer with these buffers."""
        return cls(**fields, smoothed=held.get("smooth") is not None)

    def known(self, key: Hashable, input: Tensor, held: Held) -> Tensor | None:  # noqa: ARG002  for those of one launch
        """Run known launches for an input as the caller gave it, or do nothing and return None."""
        return None

    def recorded(self, layer: CodedLayer, input: Tensor) -> Tensor | None:
        """Return the output with its graph where gradients are recorded, or None if no tensor requires grad.

        Raises
        ------
        InvalidProblem
            If the input requires grad, for a layer without gradients.
        """
        if input.requires_grad:
            rule = "be detached, or run under torch.no_grad(): only dynamic layers pass gradients on"
            raise InvalidProblem(type(layer).__name__, "input", "a tensor that requires grad", rule)
        return None

    def rows(self, input: Tensor, held: Held) -> Tensor:
        """Return what the op takes for an input, of its shape: the codes, or the rows that it makes codes of."""
        return torch.ops.skuda.smooth(input, held("smooth")) if self.smoothed else input  # type: ignore[no-any-return]

    def rows_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002  for ops that make codes themselves
        """Return the dtype of `rows` for an input of a dtype."""
        return torch_dtype(self.element)

    @abstractmethod
    def tensors(self, rows: Tensor, held: Held) -> Tensors:
        """Return the tensors of a call of the op."""

    @abstractmethod
    def fields(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the fields of a call of the op for an input of a dtype."""

    def finished(self, output: Tensor, input: Tensor) -> Tensor:  # noqa: ARG002  for those whose op ignores NaN
        """Return the output of the layer for that of the op."""
        return output

    @property
    def given(self) -> dict[str, str]:
        """The fields of an op that takes its codes, which these do not show."""
        return {"activation_element": str(self.element)} if self.element.is_split else {}

    def text(self) -> str:
        """Return what the representation of a layer says about its codes, with a comma in front; or nothing."""
        return ", activations=int16" if self.element.is_split else ""

    def output(self, dtype: torch.dtype) -> str:
        """Return the element of the output for an input of a dtype."""
        return self.output_element or str(element_of(dtype))

    def shared(self, rows: Tensor, held: Held) -> LayerInput:  # noqa: ARG002  for those with scales of their own
        """Return an input as ranks that share a layer take it: rows, or codes with a scale."""
        return LayerInput(rows)

    def maxima(self, rows: Tensor) -> Tensor:
        """Return the largest magnitude of each row."""
        found: Tensor = torch.ops.skuda.amax.default(rows, nonfinite=self.nonfinite)
        return found

    def coded(self, rows: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of rows, from their largest magnitudes if these are given."""
        if maxima is None and self.nonfinite is not None:
            maxima = self.maxima(rows)
        ops = torch.ops.skuda
        made = ops.dynamic_range if maxima is None else ops.amax_quantize
        codes, scale, *_ = made.default(*(rows,) if maxima is None else (rows, maxima), **self.codes)
        return codes, scale


@dataclass(frozen=True)
class PerRow(ActivationQuant):
    """Symmetric codes -127..127, or -32639..32639. Each row has a scale, which the op of the product computes.

    Parameters
    ----------
    nonfinite, output_element, smoothed
        As in `ActivationQuant`.
    bits : int
        8 or 16. Codes of 16 bits are two halves, s8 of shape (..., 2 K).
    """

    bits: int = 8

    op = "quantized_linear"
    dynamic = True

    @property
    def element(self) -> ElementKind:  # type: ignore[override]
        """Element of the codes."""
        return ElementKind.S16 if self.bits == 16 else ElementKind.S8

    @property
    def codes(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Fields of the ops that write its codes."""
        return CODES_OF[self.bits]

    @property
    def scheme(self) -> str:  # type: ignore[override]
        """What checkpoints call it."""
        return "dynamic with 16 bits" if self.bits == 16 else "dynamic"

    @property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The divisors, if there are some."""
        return ("smooth",) if self.smoothed else ()

    def rows_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return that of the input or, if it is divided, its compute type."""
        return torch.promote_types(dtype, torch.float32) if self.smoothed else dtype

    def recorded(self, layer: CodedLayer, input: Tensor) -> Tensor | None:
        """Return the output of `frozen_linear`, or None."""
        held = layer._buffers  # noqa: SLF001  the values, also of parametrized layers
        if not any(each is not None and each.requires_grad for each in (input, *held.values())):
            return None
        how: dict[str, Any] = {"nonfinite": self.nonfinite, "output_element": self.output_element, "bits": self.bits}
        given = layer.weight_q, layer.weight_scale.view(-1), layer.bias
        return frozen_linear(input, *given, smooth=held.get("smooth"), **how)

    def tensors(self, rows: Tensor, held: Held) -> Tensors:
        """Return the rows, the weight, no zero points, and the bias."""
        return rows, held("weight"), held("weight_scale"), None, held("bias")

    def fields(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return what is not the op's default. Divided rows do not show the dtype of the input."""
        element = self.output(dtype) if self.smoothed else self.output_element
        bounds = {name: self.codes[name] for name in ("q_min", "q_max")} if self.bits == 16 else {}
        given = {"output_element": element, "nonfinite": self.nonfinite, **bounds}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Static(ActivationQuant):
    """Codes with one scale for the whole input, from calibration.

    Parameters
    ----------
    nonfinite, output_element, smoothed
        As in `ActivationQuant`.
    shifted : bool
        Whether `input_zero_point` is the code of 0. Codes are then -128..127, and else -127..127.
    """

    shifted: bool = False

    op = "scaled_linear"
    zero = True
    buffers = ("input_scale", "smooth", "input_zero_point")

    @classmethod
    def of(cls, held: Mapping[str, Tensor | None], **fields: Any) -> Self:
        """Return the activation for the buffers that are there."""
        return super().of(held, **fields, shifted=held.get("input_zero_point") is not None)

    @property
    def scheme(self) -> str:  # type: ignore[override]
        """What checkpoints call it."""
        return "static with a zero point" if self.shifted else "static"

    def known(self, key: Hashable, input: Tensor, held: Held) -> Tensor | None:
        """Run the launches of both ops for an input that is not smoothed."""
        if self.smoothed or self.nonfinite is not None:
            return None
        codes = launched(self._key(input), input, held("input_scale"), self._zero(held))
        return None if codes is None else launched(key, *self.tensors(codes, held))  # type: ignore[no-any-return]

    def rows(self, input: Tensor, held: Held) -> Tensor:
        """Return the codes, s8."""
        input = super().rows(input, held)
        scale = held("input_scale").to(torch.float64 if input.dtype is torch.float64 else torch.float32)
        key, tensors = self._key(input), (input, scale, self._zero(held))
        found: Tensor | None = launched(key, *tensors)
        if found is None:
            found = run_module(
                "quantize_per_tensor", key, tensors, {**self.codes, "q_min": self.codes["q_min"] - self.shifted}
            )
        assert found is not None
        return found

    def _key(self, input: Tensor) -> Hashable:
        return "quantize_per_tensor", self.shifted, input.shape

    def _zero(self, held: Held) -> Any:
        return held("input_zero_point" if self.shifted else "zero")

    def tensors(self, rows: Tensor, held: Held) -> Tensors:
        """Return the codes and the weight, each with scale and zero point, and the bias."""
        scales = held("input_scale"), held("input_zero_point"), held("weight_scale"), None
        return rows, held("weight"), *scales, held("bias")

    def fields(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the element of the output, and that there is one scale."""
        return {"output_element": self.output(dtype), "act_scale_scope": "tensor"}

    def finished(self, output: Tensor, input: Tensor) -> Tensor:
        """Fill the rows of an input that is not finite, if they are to show it."""
        if self.nonfinite is None:
            return output
        # The difference is NaN for a NaN and an infinity, and otherwise 0.
        return output.masked_fill((input - input).sum(-1, keepdim=True).isnan(), torch.nan)

    def shared(self, rows: Tensor, held: Held) -> LayerInput:
        """Return the codes with their scale and zero point."""
        return LayerInput(self.rows(rows, held), held("input_scale"), held("input_zero_point"))


@dataclass(frozen=True)
class GivenCodes(ActivationQuant):
    """Codes that the layer before has made, with one scale.

    Parameters
    ----------
    nonfinite, output_element, smoothed
        As in `ActivationQuant`. Only the element is used, and must be given.
    epilogue : str, optional
        Activation of the op, with its bias.
    """

    epilogue: str | None = None

    op = "scaled_linear"
    takes = torch.int8
    buffers = ("input_scale", "output_scale")
    zero = True

    def tensors(self, rows: Tensor, held: Held) -> Tensors:
        """Return the codes, the weight, and the scale of the output, if that is codes, too."""
        step = held("output_scale")
        scales = held("input_scale"), None, held("weight_scale"), None
        return rows, held("weight"), *scales, held("bias"), step, None if step is None else held("zero")

    def fields(self, dtype: torch.dtype) -> dict[str, Any]:  # noqa: ARG002  codes have no element for the output
        """Return the epilogue, the element of the output, and that there is one scale."""
        return {"epilogue": self.epilogue, "output_element": self.output_element, "act_scale_scope": "tensor"}


PER_ROW = PerRow()
"""The activation of a layer that is given none."""


def per_row(subject: str, activations: object, form: WeightFormat) -> PerRow:
    """Return the activation of dynamic layers that a config names, beside weights of a format.

    Raises
    ------
    InvalidProblem
        For another name than ``int8`` and ``int16``, and for ``int8`` beside weights of 16 bits.
    """
    if activations not in ("int8", "int16"):
        raise InvalidProblem(subject, "activations", shown(activations), "be 'int8' or 'int16'")
    if form.element.is_split and activations == "int8":
        rule = f"be 'int16' beside weights={form.name!r}: weights of 16 bits multiply activations of 16 bits"
        raise InvalidProblem(subject, "activations", shown(activations), rule)
    return PerRow(bits=16 if activations == "int16" else 8)
