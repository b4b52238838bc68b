"""Joins int8 layers that share an input into one product, and multiplies rows that are quantized already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.torch.linear.autograd import coded_linear, frozen_linear
from skuda.torch.linear.dequantized_weight import CodedLayer
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear, autocast
from skuda.torch.ops.dtypes import element_of
from skuda.torch.ops.tensor_op import launched


class Quantized(NamedTuple):
    """Rows that are quantized already.

    Attributes
    ----------
    codes : tensor of shape (..., K), s8; of 16 bits, (..., 2 K)
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
        return coded_linear(original, codes, scale, linear.weight_q, linear.weight_scale.view(-1), linear.bias)
    key, held = (linear.family, dtype, codes.shape, "rows"), linear._buffers.get  # noqa: SLF001  attributes are slow in torch
    found: Tensor | None = launched(key, codes, held("weight"), scale, None, held("weight_scale"), None, held("bias"))
    if found is not None:
        return found
    tensors = codes, linear.held("weight"), scale, None, linear.held("weight_scale"), None, linear.held("bias")
    fields = {"output_element": str(element_of(dtype)), "act_scale_scope": "token", **linear.activation.given}
    return linear.product("scaled_linear", key, tensors, fields)


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

    @classmethod
    def of(cls, layers: tuple[DynamicLinear, ...]) -> JoinedLinear:
        """Join layers with one activation, whose buffers have equal dtypes and devices.

        A weight before another has whole units of its format.
        """
        weight = layers[0].format.join([one.weight_q for one in layers])
        scale, biases = torch.cat([one.weight_scale for one in layers]), [one.bias for one in layers]
        sizes, activation = tuple(one.out_features for one in layers), layers[0].activation
        same = {"dtype": layers[0].weight_dtype, "in_features": layers[0].in_features, "activation": activation}
        bias = None if layers[0].bias is None else torch.cat([each for each in biases if each is not None])
        joined = cls(weight, scale, bias, sizes=sizes, **same)
        joined.train(layers[0].training)
        return joined


def _of_joined(name: str) -> Any:
    return property(lambda part: getattr(part.joined, name), doc=f"`{name}` of the joined layer.")


class JoinedOutput(NamedTuple):
    """The output of a joined layer, for its parts in the place of their input: rows of shape (..., N), and that."""

    rows: Tensor
    shape: torch.Size


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

    format, activation = _of_joined("format"), _of_joined("activation")
    in_features, weight_dtype = _of_joined("in_features"), _of_joined("weight_dtype")

    def __init__(self, joined: Int8Linear, number: int) -> None:
        super().__init__()
        self._joined = (joined,)  # not a child
        self.number = number
        self.start, self.stop = [0, *accumulate(joined.sizes)][number : number + 2]
        self.training = joined.training

    def of_rank(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of a buffer of the whole layer that is held here."""
        split = self.joined.split
        return whole if split is None else split.cut(name, self.format, whole, (split.parts[self.number],))

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
    def weight_scale(self) -> Tensor:
        """Real units per code of each output channel, of shape (N, 1)."""
        return self.joined.weight_scale[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias of shape (N,), or None."""
        bias = self.joined.bias
        return None if bias is None else bias[self.start : self.stop]

    def forward(self, input: Tensor | JoinedOutput) -> Tensor:
        """Return this layer's output: a view of the joined output if that is given, or else a product of its own.

        Raises
        ------
        InvalidProblem
            For an input of another width, or of a layer of which every rank has a part.
        """
        if isinstance(input, JoinedOutput):
            return input.rows[..., self.start : self.stop]
        joined = self._joined[0]
        if joined.split is not None or input.shape[-1] != joined.in_features:
            whole = f"of shape [..., {joined.in_features}]" if joined.split is None else "of a whole layer"
            rule = f"be the output of the joined layer, or an input {whole}"
            raise InvalidProblem("Part", "input", f"of shape {list(input.shape)}", rule)
        held = self.weight_q, self.weight_scale.view(-1), self.bias
        bits = joined.activation.element.bits
        return frozen_linear(autocast(input), *held, nonfinite=joined.nonfinite, bits=bits)

    def extra_repr(self) -> str:
        """Return the place in the joined layer."""
        return f"output channels {self.start} to {self.stop} of a joined layer"

    def views(self) -> dict[str, Tensor]:
        """Return the buffers by name."""
        named = {"weight": self.weight_q, "weight_scale": self.weight_scale, "bias": self.bias}
        return {name: view for name, view in named.items() if view is not None}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002, FBT001
        destination.update({prefix + name: view for name, view in self.views().items()})

    def _load(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        """Copy into the joined buffers, even if torch is asked to assign."""
        views, (_, strict, missing_keys, unexpected_keys, error_msgs) = self.views(), rest
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
