"""Joins int8 layers that share an input into one product, and multiplies rows that are quantized already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.torch.formats import WeightFormat
from skuda.torch.linear.activation import ActivationQuant
from skuda.torch.linear.autograd import coded_linear, frozen_linear
from skuda.torch.linear.dequantized_weight import CodedLayer
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear, autocast, not_codes
from skuda.torch.ops.dtypes import element_of


class Quantized(NamedTuple):
    """Rows that are quantized already.

    Attributes
    ----------
    codes : tensor of shape (..., K), s8
    scale : tensor of shape (...)
        Real units per code of each row.
    dtype : dtype
        The dtype of the original rows, and of the products.
    rows : tensor of shape (..., K), optional
        The original rows as torch computes them, where gradients are recorded. Only their graph is used.
    """

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype
    rows: Tensor | None = None


def product(linear: Int8Linear, rows: Quantized) -> Tensor:
    """Return the output of a layer, of shape (..., N), for rows that are quantized already."""
    codes, scale, dtype, original = rows
    if original is not None:
        return coded_linear(original, codes, scale, linear.operand, linear.weight_scale.view(-1), linear.bias)
    held = linear._held  # noqa: SLF001  reading the attributes is slow in torch
    tensors = codes, held("weight"), scale, None, held("weight_scale"), None, held("bias")
    return linear.product("scaled_linear", tensors, dtype, _fields, "rows with scales")


def _fields(dtype: torch.dtype) -> dict[str, str]:
    return {"output_element": str(element_of(dtype)), "act_scale_scope": "token"}


def projected(linear: Int8Linear, input: Tensor | Quantized) -> Tensor:
    """Return the output of a layer for rows of either kind."""
    if isinstance(input, Quantized):
        if linear.split is None:
            return product(linear, input)
        if input.rows is not None:
            input = input.rows  # the layer says that it has no gradient
    found: Tensor = linear(input)
    return found


class JoinedLinear(DynamicLinear):
    """One layer made of layers with the same input. Their outputs follow one another.

    Its buffers are in no ``state_dict``. Each `Part` reads and writes its own slices of them.

    Parameters
    ----------
    weight, weight_scale, bias, dtype, in_features
        As in `Int8Linear`, concatenated over the layers.
    sizes : tuple of int
        Output channels of each layer.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        sizes: tuple[int, ...],
        dtype: torch.dtype | None = None,
        in_features: int | None = None,
    ) -> None:
        given: Any = {"dtype": dtype, "in_features": in_features, "sizes": sizes}
        Int8Linear.__init__(self, weight, weight_scale, bias, **given)

    @classmethod
    def of(cls, layers: tuple[DynamicLinear, ...]) -> JoinedLinear:
        """Join layers with one activation, whose buffers have equal dtypes and devices.

        A weight before another has whole units of its format.
        """
        weight = layers[0].format.join([one.weight_q for one in layers])
        scale, biases = torch.cat([one.weight_scale for one in layers]), [one.bias for one in layers]
        sizes = tuple(one.out_features for one in layers)
        same = {"dtype": layers[0].weight_dtype, "in_features": layers[0].in_features}
        bias = None if layers[0].bias is None else torch.cat([each for each in biases if each is not None])
        joined = cls(weight, scale, bias, sizes=sizes, **same)
        joined.train(layers[0].training)
        joined.act(layers[0].activation)
        return joined


class Part(CodedLayer):
    """One of the layers of a joined layer, under its old name. Its buffers are views.

    The fused module gives it the joined output. It also takes the input of the original layer, as that layer did.

    Parameters
    ----------
    joined : Int8Linear
        The joined layer, a `JoinedLinear` or a rank's part of one. It belongs to another module.
    number : int
        The index of the layer in it.
    """

    def __init__(self, joined: Int8Linear, number: int) -> None:
        super().__init__()
        self._joined = (joined,)  # not a child
        self.number = number
        self.start, self.stop = [0, *accumulate(joined.sizes)][number : number + 2]
        self.joined_width = joined.out_features
        self.training = joined.training

    def of_rank(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of a buffer of the whole layer that is held here."""
        split = self.joined.split
        return whole if split is None else split.cut(name, self.format, whole, (split.parts[self.number],))

    @property
    def activation(self) -> ActivationQuant:
        """What makes codes of the input."""
        return self.joined.activation

    @property
    def joined(self) -> Int8Linear:
        """The joined layer."""
        return self._joined[0]

    @property
    def whole(self) -> tuple[int, int]:
        """N and K of the whole layer. `joined` may hold less."""
        joined = self.joined
        sizes = joined.sizes if joined.split is None else joined.split.whole_sizes
        return sizes[self.number], joined.whole[1]

    @property
    def weight_q(self) -> Tensor:
        """Codes, in the form of `format`."""
        return self.format.cut(self.joined.weight_q, "n", self.start, self.stop)

    @property
    def format(self) -> WeightFormat:  # type: ignore[override]
        """The form of the codes."""
        return self.joined.format

    @property
    def in_features(self) -> int:  # type: ignore[override]
        """Columns of `weight`."""
        return self.joined.in_features

    @property
    def weight_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of `weight`."""
        return self.joined.weight_dtype

    @property
    def weight_scale(self) -> Tensor:
        """Real units per code of each output channel, of shape (N, 1)."""
        return self.joined.weight_scale[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias of shape (N,), or None."""
        bias = self.joined.bias
        return None if bias is None else bias[self.start : self.stop]

    def forward(self, input: Tensor) -> Tensor:
        """Return this layer's output: a view of the joined output if that is given, or else a product of its own.

        Raises
        ------
        InvalidProblem
            For a tensor of another width, and for an input of a layer of which every rank has a part.
        """
        if input.shape[-1] == self.joined_width:
            return input[..., self.start : self.stop]
        joined = self._joined[0]
        if joined.split is not None or input.shape[-1] != joined.in_features:
            of_layer = f", or an input of shape [..., {joined.in_features}]" if joined.split is None else ""
            rule = f"be the output of the joined layer, of shape [..., {joined.out_features}]{of_layer}"
            raise InvalidProblem("Part", "input", f"of shape {list(input.shape)}", rule)
        held = self.operand, self.weight_scale.view(-1), self.bias
        return frozen_linear(autocast(input), *held, nonfinite=joined.nonfinite)

    def extra_repr(self) -> str:
        """Return the place in the joined layer."""
        return f"output channels {self.start} to {self.stop} of a joined layer"

    def views(self) -> dict[str, Tensor]:
        """Return the buffers by name."""
        named = {"weight": self.weight_q, "weight_scale": self.weight_scale, "bias": self.bias}
        return {name: view for name, view in named.items() if view is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002, FBT001
        destination.update({prefix + name: view for name, view in self.views().items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: Any,  # noqa: ARG002  torch's signature
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Copy into the joined buffers, even if torch is asked to assign."""
        views = self.views()
        error = not_codes(prefix, state_dict, self.format.dtype)
        if error is not None:
            error_msgs.append(error)
            return
        for name, view in views.items():
            given = state_dict.get(prefix + name)
            if given is None:
                if strict:
                    missing_keys.append(prefix + name)
            elif given.shape != view.shape or view.is_meta:
                had = f"{list(given.shape)}, the module has {list(view.shape)} on {view.device}"
                error_msgs.append(f"{prefix}{name}: the checkpoint has shape {had}")
            else:
                with torch.no_grad():
                    view.copy_(given)
        if strict:
            own = (key.removeprefix(prefix) for key in state_dict if key.startswith(prefix))
            unexpected_keys += [prefix + name for name in own if name not in views]


def is_joined(layer: nn.Module) -> bool:
    """Whether this is a joined layer, or a rank's part of one."""
    return isinstance(layer, Int8Linear) and bool(layer.sizes)


def int8_layers(model: nn.Module) -> Iterator[tuple[str, Int8Linear | Part]]:
    """Yield the int8 layers of a model by name. Joined layers appear one by one, under their old names."""
    for name, module in model.named_modules():
        if isinstance(module, Part) or (isinstance(module, Int8Linear) and not module.sizes):
            yield name, module
