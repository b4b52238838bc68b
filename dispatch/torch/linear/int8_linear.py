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

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx.proxy import Proxy

from skuda.dispatch.select.explanation import Explanation
from skuda.functional import default_dispatcher
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import shown
from skuda.torch.formats import TO_INT8, Quantizer, format_of
from skuda.torch.linear.activation import (
    ActivationQuant,
    GivenCodes,
    PerRow,
    Static,
    Tensors,
    checked_vector,
)
from skuda.torch.linear.autograd import checked_bits
from skuda.torch.linear.dequantized_weight import CodedLayer, DequantizedWeight, codes_in
from skuda.torch.linear.split import Split
from skuda.torch.ops.tensor_op import OPS, check_tensors, launched, refuse_other, run_module

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call of an op."""


class Int8Linear(CodedLayer):
    """The base class of the int8 linear layers: the format of a weight, and what makes codes of the input.

    Parameters
    ----------
    weight : tensor
        Codes of one of `skuda.torch.formats`: s8 of shape (N, K); of 16 bits, (N, 2, K); or packed, u8.
    weight_scale : tensor of shape (N,) or (N, 1), f32 or narrower
        Real units per code of each output channel.
    bias : tensor of shape (N,), f32 or narrower, optional
    dtype : dtype, optional
        Dtype of the attribute `weight`. By default that of the bias, or of the scales if there is none. Casting the
        module changes it.
    in_features : int, optional
        K, for codes whose shape does not tell it, as packed ones.
    activation : ActivationQuant
        By default that of the class, with these buffers. That of `DynamicLinear` gives each row of the input a scale.
    split : Split, optional
        Of which whole layer the weight is a rank's part.
    sizes : tuple of int
        Output channels of each layer that is joined here. The buffers are then in no ``state_dict``.
    buffers
        What the activation needs, by name.

    Raises
    ------
    InvalidProblem
        For a tensor of another shape or dtype.
    """

    activation: ActivationQuant
    split: Split | None = None
    sizes: tuple[int, ...] = ()
    original: str = "Linear"
    """The class of the layer in floating point: ``Linear``, or ``Conv1D`` of transformers."""
    _kind: ClassVar[type[ActivationQuant]] = PerRow
    """The class of the activation."""

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        in_features: int | None = None,
        activation: ActivationQuant | None = None,
        split: Split | None = None,
        sizes: tuple[int, ...] = (),
        **buffers: Tensor | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        given = {"weight": weight, "weight_scale": weight_scale} | ({} if bias is None else {"bias": bias})
        check_tensors(name, **given)
        self.format = format_of(name, weight, weight_scale.numel(), in_features)
        n, k = self.format.shape_of_weight(weight, weight_scale.numel(), in_features)
        self.out_features, self.in_features = (n, k) if split is None else split.features
        self.register_buffer("weight", weight.detach())
        self.register_buffer("weight_scale", checked_vector(name, "weight_scale", weight_scale, (n, 1)))
        self.register_buffer("bias", checked_vector(name, "bias", bias, (n,)))
        self.weight_dtype = dtype or (weight_scale if bias is None else bias).dtype
        if split is not None:
            self.split = split
        self.act(activation or self._kind.of(buffers))
        self.hold(**buffers)
        if sizes:
            self.sizes = sizes
            self._non_persistent_buffers_set |= set(self._buffers)

    def act(self, activation: ActivationQuant) -> None:
        """Take an activation. `hold` takes its buffers."""
        codes = self._buffers["weight"]
        assert codes is not None
        if self.format.element.is_split:
            checked_bits(type(self).__name__, "bits of activations", activation.element.bits, self.format)
        self.activation = activation
        self.family = (repr(activation), self.out_features, self.in_features, *codes.shape)

    def hold(self, **buffers: Tensor | None) -> None:
        """Take the buffers that the activation needs.

        Raises
        ------
        InvalidProblem
            For a tensor of another shape or dtype, or that it does not need.
        """
        subject, known = type(self).__name__, self.activation.buffers
        for other in buffers.keys() - known:
            raise InvalidProblem(subject, other, "a tensor", f"be one of {', '.join(known) or 'none'}, or left out")
        for name in known:
            shape = (self.in_features if name == "smooth" else 1,)
            self.register_buffer(name, checked_vector(subject, name, buffers.get(name), shape))
        if self.activation.zero:
            self._hold_zero()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a pickle. Those of version 0.1 have no format and no activation."""
        old = {name: state[name] for name in ("nonfinite", "epilogue", "output_element") if name in state}
        gone = (*old, "codes_dtype", "group_size", "whole_sizes")
        super().__setstate__({name: value for name, value in state.items() if name not in gone})
        held = self._buffers
        codes, scale = held.get("weight"), held.get("weight_scale")
        if "format" not in state and codes is not None and scale is not None:
            self.format = format_of(type(self).__name__, codes, scale.numel(), self.width)
        if "activation" not in state:
            self.act(self._kind.of(held, **old))

    @property
    def nonfinite(self) -> str | None:
        """``propagate`` if a row with a NaN or an infinity makes a row of NaN."""
        return self.activation.nonfinite

    @property
    def whole(self) -> tuple[int, int]:
        """N and K of the whole layer."""
        return (self.out_features, self.in_features) if self.split is None else self.split.whole

    @property
    def width(self) -> int:
        """K of the weight."""
        return self.in_features if self.split is None else self.split.width

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

    def _load(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Load the buffers as torch does."""
        super()._load(state_dict, prefix, *rest)
        if "zero" in self._buffers and self._buffers["zero"].device != self.weight_q.device:  # type: ignore[union-attr]
            self._hold_zero()  # the other buffers were assigned, as for a layer that was made without data

    def held(self, name: str) -> Any:
        """Return a buffer. Reading the attribute is slow in torch. A parametrized buffer is a property."""
        return self._buffers[name] if name in self._buffers else getattr(self, name)

    def like(self, whole: Int8Linear) -> Int8Linear:
        """Return another layer that does likewise with what is not finite, and has outputs of the same element."""
        how = self.activation
        element = whole.activation.output_element if how.takes else how.output_element
        whole.act(replace(whole.activation, nonfinite=how.nonfinite, output_element=element))
        return whole

    def propagating(self) -> Self:
        """Make a row with a NaN or an infinity a row of NaN. Return the layer."""
        self.act(replace(self.activation, nonfinite="propagate"))
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
        # Parts of the output of joined layers have no shape in a graph.
        path = input.tracer.path_of_module(self) if isinstance(input, Proxy) and not self.sizes else ""
        if path:
            return input.tracer.create_proxy("call_module", path, (input,), {})
        refuse_other(type(self).__name__, "input", input)
        raise AssertionError  # it is no tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, of shape (..., N), for an input of shape (..., K).

        It has the dtype of the input, unless the activation says another.
        """
        try:
            key = self.family, input.dtype, input.shape
        except (AttributeError, RuntimeError):  # it is no tensor, or a nested one, which has no shape
            return self._other(input)  # type: ignore[no-any-return]
        found = self.activation.known(key, input, self._buffers.get)
        return self._first(input) if found is None else found

    def _first(self, input: Tensor) -> Tensor:
        """Return the output for an input that no known launch serves."""
        if not isinstance(input, Tensor):
            return self._other(input)
        input, how = self._taken(input), self.activation
        if how.takes not in (None, input.dtype):
            raise InvalidProblem(type(self).__name__, "input", str(input.dtype), "be the codes, int8")
        if torch.is_grad_enabled():
            found = how.recorded(self, input)
            if found is not None:
                return found
        key, tensors = (self.family, input.dtype, input.shape), how.tensors(how.rows(input, self.held), self.held)
        return how.finished(self.product(how.op, key, tensors, how.fields(input.dtype)), input)

    def product(self, op: str, key: Hashable, tensors: Tensors, fields: Mapping[str, Any]) -> Tensor:
        """Call an op with tensors of this layer. The key tells the call from others with other fields or shapes."""
        tensors = self.operands(tensors)
        found: Tensor | None = launched(key, *tensors)
        found = run_module(op, key, tensors, {**fields, **self.format.fields}) if found is None else found
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
        how = self.activation
        dtype = how.rows_dtype(input.dtype)
        rows = input if dtype is input.dtype else torch.empty(input.shape, dtype=dtype, device="meta")
        tensors = self.operands(how.tensors(rows, self.held))
        arguments = dict(zip(OPS[how.op].names, tensors, strict=False))
        return how.op, arguments | how.fields(input.dtype) | dict(self.format.fields)

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
        return f"{sizes}{self.format.text()}{self.activation.text()}, kernel={kernel or 'none here'}"


class DynamicLinear(Int8Linear):
    """W8A8 with symmetric codes -127..127 and a scale per row of the input, which is computed at run time.

    The codes may be those of 4-bit weights, packed. The result has the bits of the same codes in 8 bits. With the
    activation ``PerRow(bits=16)``, codes of the input are -32639..32639, and those of the weight may be, too.

    The gradient of the input goes through the dequantized weight, for the frozen base of LoRA; see
    `skuda.torch.linear.autograd.frozen_linear`. The codes get no gradient.
    """

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, quantize: Quantizer = TO_INT8, activation: ActivationQuant | None = None
    ) -> Self:
        """Quantize the weight of a layer, by default to 8 bits: symmetrically, with a scale per output channel.

        Raises
        ------
        InvalidProblem
            If the weight is not finite, or not f16, bf16 or f32.
        """
        check_linear(cls.__name__, linear)
        given = {"dtype": linear.weight.dtype, "in_features": linear.in_features}
        return cls(*quantize(linear.weight), linear.bias, **given, activation=activation)

    def act(self, activation: ActivationQuant) -> None:
        """Take an activation whose op takes the rows as they are, as `forward` does."""
        if not isinstance(activation, PerRow) or activation.smoothed:
            raise InvalidProblem(type(self).__name__, "activation", repr(activation), "be PerRow, and not smoothed")
        super().act(activation)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K). It has the dtype of the input."""
        held = self._buffers.get
        try:
            key = self.family, input.dtype, input.shape
        except (AttributeError, RuntimeError):
            return self._other(input)  # type: ignore[no-any-return]
        # As the activation does it, but with no function in between: this is the most frequent call.
        found: Tensor | None = launched(key, input, held("weight"), held("weight_scale"), None, held("bias"))
        return self._first(input) if found is None else found


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
        super().__init__(weight, weight_scale, bias, dtype=dtype, in_features=in_features, smooth=smooth)

    def take_smooth(self) -> None:
        """Become a `DynamicLinear`, because what makes the input divides it now."""
        del self.smooth
        self.act(PerRow.of(self._buffers, nonfinite=self.nonfinite))
        self.__class__ = DynamicLinear  # type: ignore[assignment]


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

    _kind = Static
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
        held = {"input_scale": input_scale, "input_zero_point": input_zero_point, "smooth": smooth}
        super().__init__(weight, weight_scale, bias, dtype=dtype, in_features=in_features, **held)

    def take_smooth(self) -> None:
        """Divide no more, because what makes the input divides it now."""
        self.smooth = None
        self.act(Static.of(self._buffers, nonfinite=self.nonfinite))

    def codes(self, input: Tensor) -> Tensor:
        """Return the input's codes, s8 of shape (..., K)."""
        return self.activation.rows(input, self.held)


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

    _kind = GivenCodes
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
        made = GivenCodes(
            output_element=output_element if output_scale is None else str(ElementKind.S8), epilogue=epilogue
        )
        held = {"input_scale": input_scale, "output_scale": output_scale}
        super().__init__(weight, weight_scale, bias, dtype=dtype, activation=made, **held)


WHOLE = (DynamicLinear, SmoothedLinear, StaticLinear)
"""The classes of layers that checkpoints hold."""


def layer_of(
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None,
    in_features: int,
    bits: int = 8,
    **buffers: Tensor | None,
) -> Int8Linear:
    """Return the layer for the buffers that are given beside weight, scale and bias.

    With `input_scale` it is a `StaticLinear`, with `smooth` alone a `SmoothedLinear`, and else a `DynamicLinear`. Only
    the last has activations of 16 `bits`.
    """
    given: Any = {name: each for name, each in buffers.items() if each is not None}
    kind: Any = StaticLinear if "input_scale" in given else SmoothedLinear if given else DynamicLinear
    given |= {} if bits == 8 else {"activation": PerRow(bits=bits)}
    made: Int8Linear = kind(weight, weight_scale, bias, **given, dtype=dtype, in_features=in_features)
    return made


def described_as(layer: nn.Module) -> type[nn.Module]:
    """Return the class that checkpoints describe: that of a layer without what splits it or makes it exact."""
    found: type[nn.Module] = getattr(layer, "stored_as", type(layer))
    return found


def splits(layer: object) -> bool:
    """Whether ranks can share a layer: it is whole, and makes codes of rows as they are, or with one scale."""
    if not isinstance(layer, Int8Linear) or layer.split is not None or layer.activation.takes is not None:
        return False
    return not (layer.activation.dynamic and layer.activation.smoothed)


def check_split(subject: str, field: str, had: str, activation: ActivationQuant) -> None:
    """Raise `InvalidProblem` for an activation whose ranks could not tell each other what is not finite."""
    if activation.nonfinite is not None and not activation.dynamic:
        rule = "be made without nonfinite='propagate': ranks pass on what is not finite in dynamic layers alone"
        raise InvalidProblem(subject, field, had, rule)


def propagates(layer: object) -> bool:
    """Whether a layer's output shows what is not finite in its input."""
    return isinstance(layer, Int8Linear) and layer.nonfinite == "propagate"


def propagating(layer: nn.Module) -> nn.Module:
    """Make an int8 layer show in its output what is not finite in its input. Return the layer.

    A row with a NaN or an infinity then gives a row of NaN. Dynamic layers have an infinite scale for it; static ones
    take one more pass over the input, and one over the output.

    Raises
    ------
    InvalidProblem
        For a layer that is no `DynamicLinear`, `SmoothedLinear` or `StaticLinear`.
    """
    if not isinstance(layer, DynamicLinear | SmoothedLinear | StaticLinear):
        rule = "be a DynamicLinear or a StaticLinear"
        raise InvalidProblem("nonfinite='propagate'", "layer", f"a {type(layer).__name__}", rule)
    return layer.propagating()


def kind_of(layer: nn.Module) -> str:
    """Return the class of a layer, bits if they are 16, and whether it propagates, in words."""
    how = layer.activation.text() if isinstance(layer, Int8Linear) else ""
    bits = layer.format.text() + how if how and isinstance(layer, Int8Linear) else ""
    return type(layer).__name__ + bits + (", nonfinite='propagate'" if propagates(layer) else "")


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


def _is_scale(name: str) -> bool:
    return name.endswith("scale") or name == "smooth"
