"""Linear layers whose product runs in int8: modules with codes and scales as buffers.

The buffers have the names, dtypes and shapes of the compressed-tensors format, so ``state_dict`` has the tensors of a
checkpoint: `weight` s8 [N, K], `weight_scale` [N, 1], `input_scale` [1]. The codes of other formats have other forms;
see `skuda.torch.formats`. Casting a module, as `model.bfloat16()` does, does not cast scales, because that would change
the meaning of the codes. Inputs may have any number of leading axes. Under autocast they are cast like the inputs of
`torch.nn.functional.linear`.

The attribute `weight` is not the buffer: it reads as the weight that the codes stand for, so that code that was written
for `torch.nn.Linear` gets what it expects. The codes are the attribute `weight_q`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx.proxy import Proxy, TraceError

from skuda.dispatch.select.explanation import Explanation
from skuda.functional import default_dispatcher
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import shown
from skuda.torch.formats import TO_INT8, Quantizer, format_of
from skuda.torch.formats.int8 import Q_MAX
from skuda.torch.linear.autograd import frozen_linear
from skuda.torch.linear.dequantized_weight import CodedLayer, DequantizedWeight, codes_in
from skuda.torch.ops.dtypes import element_of
from skuda.torch.ops.tensor_op import OPS, check_tensors, launched, refuse_other, run_module

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call of an op."""

Tensors = tuple[Tensor, *tuple[Tensor | None, ...]]
"""Tensors of a call in the order of the op's schema, the input first."""

Arguments = tuple[Tensors, dict[str, Any]]
"""Tensors and fields of a call."""


class Int8Linear(CodedLayer):
    """The base class of the int8 linear layers.

    Parameters
    ----------
    weight : tensor
        Codes of one of `skuda.torch.formats`: s8 of shape (N, K), or packed, u8.
    weight_scale : tensor of shape (N,) or (N, 1), f32 or narrower
        Real units per code of each output channel.
    bias : tensor of shape (N,), f32 or narrower, optional
    dtype : dtype, optional
        Dtype of the attribute `weight`. By default that of the bias, or of the scales if there is none. Casting the
        module changes it.
    in_features : int, optional
        K, for codes whose shape does not tell it, as packed ones.

    Raises
    ------
    InvalidProblem
        For a tensor of another shape or dtype.
    """

    op: ClassVar[str]
    """The op of the product."""
    sharded: ClassVar[bool] = False
    """Whether the layer is a rank's part of a whole layer."""
    whole_kind: type[Int8Linear] | None = None
    """The class of the whole layer, for a rank's part. None for a class that is unknown here."""
    original: str = "Linear"
    """The class of the layer in floating point: ``Linear``, or ``Conv1D`` of transformers."""
    nonfinite: str | None = None
    """``propagate`` makes a row with a NaN or an infinity a row of NaN; `propagating` sets it."""
    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        given = {"weight": weight, "weight_scale": weight_scale} | ({} if bias is None else {"bias": bias})
        check_tensors(type(self).__name__, **given)
        self.format = format_of(type(self).__name__, weight, weight_scale.numel(), in_features)
        sizes = self.format.shape_of_weight(weight, weight_scale.numel(), in_features)
        self.out_features, self.in_features = sizes
        self.family = (self.op, *sizes, *weight.shape)
        self.register_buffer("weight", weight.detach())
        self._hold("weight_scale", weight_scale, self.out_features, (self.out_features, 1))
        self._hold("bias", bias, self.out_features, (self.out_features,))
        self.weight_dtype = dtype or (weight_scale if bias is None else bias).dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle. Those of version 0.1 have no format."""
        super().__setstate__(
            {name: value for name, value in state.items() if name not in ("codes_dtype", "group_size")}
        )
        if "format" not in state:
            held = self._buffers
            codes, scale = held.get("weight"), held.get("weight_scale")
            if codes is not None and scale is not None:
                self.format = format_of(type(self).__name__, codes, scale.numel(), self.width)

    @property
    def group_size(self) -> int | None:
        """Elements of a group of 4-bit weights, with one scale and offset; 128 for whole rows. None for 8-bit ones."""
        return self.format.group_size

    @property
    def weight_q(self) -> Tensor:
        """Codes, in the form of `format`."""
        codes = self._buffers.get("weight")
        if codes is None:
            raise AttributeError(f"{type(self).__name__} has no weight")
        if codes.dtype is not self.format.dtype:
            codes = self._buffers["weight"] = codes_in(type(self).__name__, codes, self.format.dtype)
        return codes

    def _set_codes(self, name: str, value: Any) -> None:
        """Take codes, which loaders set under the name of the buffer. Refuse anything else."""
        codes = self._buffers["weight"]
        if isinstance(value, DequantizedWeight) and value.codes() is codes:
            return  # `layer.weight = layer.weight`
        fits = isinstance(value, Tensor) and value.dtype is self.format.dtype and codes is not None
        if not fits or value.shape != codes.shape:
            super()._set_codes(name, value)
        self._buffers["weight"] = value.detach()

    def _hold(self, name: str, vector: Tensor | None, size: int, shape: tuple[int, ...]) -> None:
        """Register a vector of scales or biases as a buffer of this shape."""
        if vector is not None:
            check_tensors(type(self).__name__, **{name: vector})
            if not vector.is_floating_point() or vector.dtype is torch.float64 or vector.numel() != size:
                self._refuse(name, vector, f"be float32, bfloat16 or float16 of shape {list(shape)}")
            vector = vector.detach().reshape(shape)
        self.register_buffer(name, vector)

    def _refuse(self, name: str, tensor: Tensor, rule: str) -> None:
        raise InvalidProblem(type(self).__name__, name, f"{tensor.dtype} of shape {list(tensor.shape)}", rule)

    def _hold_zero(self) -> None:
        """Register a zero point of 0 that is not saved in checkpoints."""
        self.register_buffer("zero", torch.zeros(1, dtype=torch.int32, device=self.weight_q.device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  torch's signature
        """Move the buffers without casting scales."""
        codes = self.weight_q  # which also mends the buffer
        held = dict(self._buffers)
        super()._apply(fn, recurse)
        cast = fn(torch.empty(0, dtype=self.weight_dtype, device=codes.device))
        if isinstance(cast, Tensor) and cast.is_floating_point():
            self.weight_dtype = cast.dtype
        for name, before in held.items():
            after = self._buffers[name]
            if before is None or after is None or after is before:
                continue
            if _is_scale(name) and after.dtype is not before.dtype:
                self._buffers[name] = before.to(after.device)
            elif name == "zero":
                self._hold_zero()  # `to_empty` leaves it uninitialized
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  torch's signature
        _ = self.weight_q
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,  # noqa: FBT001  torch's signature
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load the buffers. A weight that does not hold codes is an error, because rounding would lose it."""
        error = not_codes(prefix, state_dict, self.format.dtype)
        if error is not None:
            error_msgs.append(error)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if "zero" in self._buffers and self._buffers["zero"].device != self.weight_q.device:  # type: ignore[union-attr]
            self._hold_zero()  # the other buffers were assigned, as for a layer that was made without data

    def _held(self, name: str) -> Any:
        """Return a buffer. Reading the attribute is slow in torch. A parametrized buffer is a property."""
        return self._buffers[name] if name in self._buffers else getattr(self, name)

    def like(self, whole: Int8Linear) -> Int8Linear:
        """Return another layer that does likewise with what is not finite."""
        return whole if self.nonfinite is None else whole.propagating()

    def propagating(self) -> Self:
        """Make a row with a NaN or an infinity a row of NaN. Return the layer."""
        if self.nonfinite is None:
            self.nonfinite, self.family = "propagate", (*self.family, "propagate")  # launches of its own
        return self

    def _taken(self, input: Tensor) -> Tensor:
        """Return an input as the op takes it. Check its width, because the op would blame the weight."""
        if input.is_nested or input.shape[-1:] != (self.in_features,):
            refuse_other(type(self).__name__, "input", input)
            had = f"shape {list(input.shape)}"
            raise InvalidProblem(type(self).__name__, "input", had, f"have shape [..., {self.in_features}]")
        return autocast(input)

    def _other(self, input: Any) -> Any:
        """Return the output for an input that is no tensor.

        That of a proxy of `torch.fx` is a call of the layer: for tracers it is a leaf, as the layers of torch are.

        Raises
        ------
        InvalidProblem
            For anything else.
        """
        path = input.tracer.path_of_module(self) if isinstance(input, Proxy) else ""
        if path:
            return input.tracer.create_proxy("call_module", path, (input,), {})
        refuse_other(type(self).__name__, "input", input)
        raise AssertionError  # it is no tensor

    @abstractmethod
    def _arguments(self, input: Tensor) -> Arguments:
        """Return the arguments of the op for an input."""

    def _product_of(self, arguments: Arguments, *told: Hashable) -> Tensor:
        """Call the op. `told` is what tells the fields from those of other calls of this layer's family."""
        tensors, fields = arguments
        key = self.family, *told, tensors[0].shape
        found: Tensor | None = launched(key, *tensors)
        found = run_module(self.op, key, self.operands(tensors), fields) if found is None else found
        assert found is not None
        return found

    def operands(self, tensors: Tensors) -> Tensors:
        """Return the tensors of a call with the weight as the op takes it, in place of the buffer."""
        held, operand = self._buffers.get("weight"), self.operand
        if operand is held:
            return tensors
        return tensors[0], *(operand if each is held else each for each in tensors[1:])

    def call(self, input: Tensor) -> Call:
        """Return the call of the op for an input. Only the shape, dtype and device of the input are read."""
        tensors, fields = self._arguments(input)
        return self.op, dict(zip(OPS[self.op].names, self.operands(tensors), strict=False)) | fields

    def explain(self, input: Tensor | int = 1) -> Explanation:
        """Explain the choice of the kernel for an input.

        Parameters
        ----------
        input : tensor or int
            An input of the module, or a number of rows in torch's default dtype.

        Raises
        ------
        InvalidProblem
            For an input that the module does not accept.
        """
        if not isinstance(input, Tensor):
            if isinstance(input, bool) or not isinstance(input, int) or input < 0:
                raise InvalidProblem(type(self).__name__, "input", shown(input), "be a tensor or a number of rows")
            input = torch.empty(input, self.in_features, device="meta")
        name, arguments = self.call(self._taken(input))
        return default_dispatcher().explain(OPS[name].problem(**arguments), device=device_name(self.weight_q.device))

    def extra_repr(self) -> str:
        """Return the sizes, and the kernel for a single row."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        try:
            kernel = self.explain().chosen
        except SkudaError:
            kernel = None
        return f"{sizes}{self.format.text()}, kernel={kernel or 'none here'}"


class DynamicLinear(Int8Linear):
    """W8A8 with symmetric codes -127..127 and a scale per row of the input, which is computed at run time.

    The codes may be those of 4-bit weights, packed. The result has the bits of the same codes in 8 bits.

    The gradient of the input goes through the dequantized weight, for the frozen base of LoRA; see
    `skuda.torch.linear.autograd.frozen_linear`. The codes get no gradient.
    """

    op = "quantized_linear"
    output_dtype: torch.dtype | None = None
    """Dtype of the output if it is not that of the input."""

    @classmethod
    def from_linear(cls, linear: nn.Linear, quantize: Quantizer = TO_INT8) -> Self:
        """Quantize the weight of a layer, by default to 8 bits: symmetrically, with a scale per output channel.

        Raises
        ------
        InvalidProblem
            If the weight is not finite, or not f16, bf16 or f32.
        """
        check_linear(cls.__name__, linear)
        given = {"dtype": linear.weight.dtype, "in_features": linear.in_features}
        return cls(*quantize(linear.weight), linear.bias, **given)

    def _arguments(self, input: Tensor) -> Arguments:
        held = self._held
        tensors = input, held("weight"), held("weight_scale"), None, held("bias")
        return tensors, {} if self.nonfinite is None else {"nonfinite": self.nonfinite}

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K). It has the dtype of the input."""
        held = self._buffers.get
        try:
            key = self.family, input.shape
        except (AttributeError, RuntimeError):  # a nested tensor has no shape
            return self._other(input)  # type: ignore[no-any-return]
        found: Tensor | None = launched(key, input, held("weight"), held("weight_scale"), None, held("bias"))
        return self._first(key, input) if found is None else found

    def _first(self, key: Hashable, input: Tensor) -> Tensor:
        if not isinstance(input, Tensor):
            return self._other(input)
        given, input = input, self._taken(input)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (input, *self._buffers.values()) if t is not None):
            held = self.operand, self.weight_scale.view(-1), self.bias
            return frozen_linear(input, *held, nonfinite=self.nonfinite)
        # A cast input has a key of its own: the launch compares the tensors that the next call gives.
        key = key if input is given else (key, input.dtype)
        tensors, fields = self._arguments(input)
        found: Tensor = run_module(self.op, key, self.operands(tensors), fields)
        return found


class SmoothedLinear(Int8Linear):
    """A `DynamicLinear` that divides the channels of its input first, which takes one more pass over the input.

    Parameters
    ----------
    weight, weight_scale, bias, dtype, in_features
        As in `Int8Linear`.
    smooth : tensor of shape (K,), f32
        Divisors of the input's channels, which the codes have taken over.

    Raises
    ------
    InvalidProblem
        For a tensor of another shape or dtype.
    """

    op = "quantized_linear"
    smooth: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        smooth: Tensor,
        dtype: torch.dtype | None = None,
        in_features: int | None = None,
    ) -> None:
        super().__init__(weight, weight_scale, bias, dtype=dtype, in_features=in_features)
        self._hold("smooth", smooth, self.in_features, (self.in_features,))

    def take_smooth(self) -> None:
        """Become a `DynamicLinear`, because what makes the input divides it now."""
        del self.smooth
        self.__class__ = DynamicLinear  # type: ignore[assignment]

    def _arguments(self, input: Tensor) -> Arguments:
        dtype = torch.promote_types(input.dtype, torch.float32)
        return self._product(torch.empty(input.shape, dtype=dtype, device="meta"), input.dtype)

    def _product(self, rows: Tensor, dtype: torch.dtype) -> Arguments:
        held = self._held
        tensors = rows, held("weight"), held("weight_scale"), None, held("bias")
        fields = {"output_element": str(element_of(dtype))}
        return tensors, fields if self.nonfinite is None else fields | {"nonfinite": self.nonfinite}

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K). It has the dtype of the input."""
        try:
            input = self._taken(input)
        except (AttributeError, TraceError):
            return self._other(input)  # type: ignore[no-any-return]
        smooth = self._held("smooth")
        if torch.is_grad_enabled() and any(t.requires_grad for t in (input, *self._buffers.values()) if t is not None):
            tensors = self.operand, self.weight_scale.view(-1), self.bias
            return frozen_linear(input, *tensors, smooth=smooth, nonfinite=self.nonfinite)
        rows = torch.ops.skuda.smooth(input, smooth)
        # Products of codes have the same family, and are told by a dtype alone.
        return self._product_of(self._product(rows, input.dtype), "smoothed", input.dtype)


class StaticLinear(Int8Linear):
    """W8A8 with one scale for the whole input, from calibration. The codes may be packed, as for `DynamicLinear`.

    Parameters
    ----------
    weight, weight_scale, bias, dtype, in_features
        As in `Int8Linear`.
    input_scale : tensor of one element, f32 or narrower
        Real units per code of the (smoothed) input.
    input_zero_point : tensor of one element, s32, optional
        Code of 0, if it is not 0. The codes are then -128..127.
    smooth : tensor of shape (K,), f32, optional
        Divisors of the input's channels.

    Raises
    ------
    InvalidProblem
        For a tensor of another shape or dtype.
    """

    op = "scaled_linear"
    input_scale: Tensor
    input_zero_point: Tensor | None
    smooth: Tensor | None
    zero: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        input_scale: Tensor,
        input_zero_point: Tensor | None = None,
        smooth: Tensor | None = None,
        dtype: torch.dtype | None = None,
        in_features: int | None = None,
    ) -> None:
        super().__init__(weight, weight_scale, bias, dtype=dtype, in_features=in_features)
        self._hold("input_scale", input_scale, 1, (1,))
        self._hold("smooth", smooth, self.in_features, (self.in_features,))
        if input_zero_point is not None:
            if input_zero_point.is_floating_point() or input_zero_point.numel() != 1:
                self._refuse("input_zero_point", input_zero_point, "be an integer of shape [1]")
            input_zero_point = input_zero_point.detach().to(torch.int32).reshape(1)
        self.register_buffer("input_zero_point", input_zero_point)
        self._hold_zero()

    def take_smooth(self) -> None:
        """Divide no more, because what makes the input divides it now."""
        self.smooth = None

    def codes(self, input: Tensor) -> Tensor:
        """Return the input's codes, s8 of shape (..., K)."""
        held = self._held
        smooth, zero_point = held("smooth"), held("input_zero_point")
        if smooth is not None:
            input = torch.ops.skuda.smooth(input, smooth)
        shifted = zero_point is not None
        scale = held("input_scale").to(torch.float64 if input.dtype is torch.float64 else torch.float32)
        tensors = input, scale, zero_point if shifted else held("zero")
        key = "quantize_per_tensor", shifted, input.shape
        found: Tensor | None = launched(key, *tensors)
        if found is None:
            fields = {"q_min": -Q_MAX - shifted, "q_max": Q_MAX, "output_element": "s8"}
            found = run_module("quantize_per_tensor", key, tensors, fields)
        assert found is not None
        return found

    def _arguments(self, input: Tensor) -> Arguments:
        return self._product(torch.empty(input.shape, dtype=torch.int8, device="meta"), input.dtype)

    def _product(self, codes: Tensor, dtype: torch.dtype) -> Arguments:
        held = self._held
        scale, zero_point = held("input_scale"), held("input_zero_point")
        tensors = codes, held("weight"), scale, zero_point, held("weight_scale"), None, held("bias")
        return tensors, {"output_element": str(element_of(dtype)), "act_scale_scope": "tensor"}

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K). It has the dtype of the input."""
        try:
            found = self._launched(input)
            if found is not None:
                return found
            input = self._taken(input)
        except (AttributeError, TraceError):
            return self._other(input)  # type: ignore[no-any-return]
        if torch.is_grad_enabled() and input.requires_grad:
            rule = "be detached, or run under torch.no_grad(): only dynamic layers pass gradients on"
            raise InvalidProblem(type(self).__name__, "input", "a tensor that requires grad", rule)
        found = self._product_of(self._product(self.codes(input), input.dtype), input.dtype)
        if self.nonfinite is None:
            return found
        # The difference is NaN for a NaN and an infinity, and otherwise 0.
        return found.masked_fill((input - input).sum(-1, keepdim=True).isnan(), torch.nan)

    def _launched(self, input: Tensor) -> Tensor | None:
        """Run known launches for an input that is not smoothed, or do nothing and return None."""
        held = self._buffers.get
        if held("smooth") is not None or self.nonfinite is not None:
            return None
        scale, zero_point = held("input_scale"), held("input_zero_point")
        try:
            shifted, shape = zero_point is not None, input.shape
        except RuntimeError:  # a nested tensor has no shape
            return None
        quantizing = "quantize_per_tensor", shifted, shape
        codes = launched(quantizing, input, scale, zero_point if shifted else held("zero"))
        if codes is None:
            return None
        key = self.family, input.dtype, shape
        tensors = codes, held("weight"), scale, zero_point, held("weight_scale"), None, held("bias")
        found: Tensor | None = launched(key, *tensors)
        return found


class CodesLinear(Int8Linear):
    """A layer in a chain: it takes codes, and returns the codes for the next layer.

    Parameters
    ----------
    weight, weight_scale, bias, dtype
        As in `Int8Linear`.
    input_scale : tensor of one element, f32 or narrower
        Real units per code of the input.
    output_scale : tensor of one element, f32, optional
        Real units per code of the output, which is then s8. Without it the output is floating.
    epilogue : str, optional
        ``bias_relu``, ``bias_gelu`` or ``bias_silu``, which need a bias.
    output_element : str
        Element of a floating output.

    Raises
    ------
    InvalidProblem
        For a tensor of another shape or dtype.
    """

    op = "scaled_linear"
    input_scale: Tensor
    output_scale: Tensor | None
    zero: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        input_scale: Tensor,
        output_scale: Tensor | None = None,
        epilogue: str | None = None,
        output_element: str = "bf16",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(weight, weight_scale, bias, dtype=dtype)
        self._hold("input_scale", input_scale, 1, (1,))
        self._hold("output_scale", output_scale, 1, (1,))
        self._hold_zero()
        self.epilogue = epilogue
        self.output_element = output_element if output_scale is None else str(ElementKind.S8)

    def _arguments(self, input: Tensor) -> Arguments:
        held = self._held
        scale, output_scale = held("input_scale"), held("output_scale")
        zero = None if output_scale is None else held("zero")
        weight, weight_scale, bias = held("weight"), held("weight_scale"), held("bias")
        tensors = input.to(torch.int8), weight, scale, None, weight_scale, None, bias, output_scale, zero
        return tensors, {
            "epilogue": self.epilogue,
            "output_element": self.output_element,
            "act_scale_scope": "tensor",
        }

    def forward(self, input: Tensor) -> Tensor:
        """Return codes of shape (..., N), or floats without `output_scale`, for codes of shape (..., K)."""
        if getattr(input, "dtype", None) is not torch.int8:
            if not isinstance(input, Tensor):
                return self._other(input)
            raise InvalidProblem(type(self).__name__, "input", str(input.dtype), "be the codes, int8")
        return self._product_of(self._arguments(self._taken(input)), self.output_element, self.epilogue)


def check_linear(subject: str, linear: object) -> None:
    """Raise `InvalidProblem` for what is no linear layer."""
    if not isinstance(linear, nn.Module) or not isinstance(getattr(linear, "weight", None), Tensor):
        raise InvalidProblem(subject, "linear", shown(linear), "be a torch.nn.Linear, with a weight")


def autocast(input: Tensor) -> Tensor:
    """Cast an input as autocast casts the inputs of `torch.nn.functional.linear`."""
    if not isinstance(input, Tensor):
        refuse_other("a layer in training", "input", input)
    kind = input.device.type
    # torch has no autocast for tensors without data, and raises if asked about it.
    enabled = kind != "meta" and torch.is_autocast_enabled(kind)
    if enabled and input.is_floating_point() and input.dtype is not torch.float64:
        return input.to(torch.get_autocast_dtype(kind))
    return input


def device_name(device: torch.device) -> str:
    """Return the dispatcher's name of a device. It is ``cpu`` for the meta device."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def not_codes(prefix: str, state_dict: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    """Return why the weight of an int8 layer cannot be loaded, or None."""
    given = state_dict.get(f"{prefix}weight")
    if not isinstance(given, Tensor) or given.dtype is dtype:
        return None
    own = str(dtype).removeprefix("torch.")
    return f"{prefix}weight: the checkpoint has {given.dtype}, the module has codes, {own}: load before quantizing."


def _is_scale(name: str) -> bool:
    return name.endswith("scale") or name == "smooth"
