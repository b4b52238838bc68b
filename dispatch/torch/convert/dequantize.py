"""`dequantize_`: the way back from int8 layers to layers in floating point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.fuse.fused_modules import Fused
from skuda.torch.linear.dequantized_weight import weight_of
from skuda.torch.linear.int8_linear import WHOLE, Int8Linear, described_as
from skuda.torch.linear.joined import JoinedLinear, Part
from skuda.torch.models.replaceable_layers import changed, check_model, has_adapters, hooked, table
from skuda.torch.training.layers import FakeQuantLinear, MixedLinear

_TRAINED = (FakeQuantLinear, MixedLinear)


@dataclass(frozen=True)
class Dequantization:
    """The report of `dequantize_`.

    Attributes
    ----------
    converted : mapping of str to str
        Class that a layer had, by its name.
    unfused : mapping of str to str
        Class that a module has again, by its name.
    """

    converted: Mapping[str, str]
    unfused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.converted)} converted, {len(self.unfused)} unfused"]
        return "\n".join([*lines, *table("from", self.converted), *table("again a", self.unfused)])


def dequantize_(model: nn.Module, dtype: torch.dtype | None = None) -> Dequantization:
    """Replace the int8 layers of a model by `torch.nn.Linear`, in place: the way back from `quantize_` and `fuse_`.

    A layer gets the weight that it reads as, `layer.weight`, in the same dtype. Its inputs are no longer rounded. What
    rounding has taken from the weights stays lost, and factors that a norm took over stay in the norm. Modules that
    `fuse_` has fused get back their class and their layers. Layers in training keep their parameters. The parameters of
    other layers require grad, except in a model with adapters, such as LoRA.

    Parameters
    ----------
    model : torch.nn.Module
    dtype : dtype, optional
        Dtype of the whole model afterwards. Weights are computed in it from their codes.

    Returns
    -------
    Dequantization

    Raises
    ------
    InvalidProblem
        If `model` is not a module or is itself such a layer, for a dtype that is not floating, and for a layer that has
        no float form here: a rank's part, one that takes codes, one of an unknown class, and one with hooks. The model
        is then unchanged.
    """
    check_model("dequantize_", model, None)
    _check_dtype(dtype)
    fused = {name: module for name, module in model.named_modules() if isinstance(module, Fused)}
    joined = {id(child) for module in fused.values() for child in module.children() if type(child) is JoinedLinear}
    trains = not has_adapters(model)
    layers = {name: layer for name, layer in _layers(model) if id(layer) not in joined}
    for name, layer in layers.items():
        _check(name, layer)
    made = {id(layer): _float(layer, dtype, trains=trains) for layer in layers.values()}
    for module in list(model.modules()):
        for key, child in list(module._modules.items()):  # noqa: SLF001  named_children() leaves out what is there twice
            if id(child) in made:
                setattr(module, key, made[id(child)])
            elif id(child) in joined:
                delattr(module, key)
    for module in fused.values():
        module.__class__ = type(module).__bases__[1]
        for name in ("fused_form", "fused_held", "fused_told"):
            module.__dict__.pop(name, None)
    if dtype is not None:
        model.to(dtype)
    changed(model, int8=False)
    return Dequantization(
        converted={name: type(layer).__name__ for name, layer in layers.items()},
        unfused={name: type(module).__name__ for name, module in fused.items()},
    )


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidProblem("dequantize_", "dtype", shown(dtype), "be a dtype of floats, or None")


def float_linear(layer: Int8Linear | Part, dtype: torch.dtype | None = None) -> nn.Linear:
    """Return a layer in floating point with the weight that an int8 layer reads as, by default in its dtype."""
    dtype = dtype or layer.weight_dtype
    weight, bias = weight_of(*layer.coded(), dtype=dtype, width=layer.in_features), layer.bias
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().to(dtype, copy=True))
    return made


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to replace, each once, under its first name."""
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear | Part | FakeQuantLinear | MixedLinear):
            yield name, module


def _check(name: str, layer: nn.Module) -> None:
    """Raise for a layer that cannot be replaced."""
    if not name:
        rule = "contain the layer, as nn.Sequential(layer) does"
        raise InvalidProblem("dequantize_", "model", f"a {type(layer).__name__} itself", rule)
    if isinstance(layer, Int8Linear) and layer.split is not None:
        _refuse(name, layer, "be a whole layer: use skuda.torch.save, and load_ the checkpoint into a whole model")
    if described_as(layer) not in (*WHOLE, Part, *_TRAINED):
        _refuse(name, layer, "be a DynamicLinear or a StaticLinear: what this class computes has no known float form")
    if hooked(layer) or "forward" in vars(layer):
        _refuse(name, layer, "have no hooks and its own forward, which would be lost: remove them first")


def _refuse(name: str, layer: nn.Module, rule: str) -> NoReturn:
    raise InvalidProblem("dequantize_", name, f"a {type(layer).__name__}", rule)


def _float(layer: nn.Module, dtype: torch.dtype | None, *, trains: bool) -> nn.Linear:
    """Return the replacement of a layer."""
    if isinstance(layer, Int8Linear | Part):
        made = float_linear(layer, dtype).requires_grad_(trains)
    else:
        assert isinstance(layer, nn.Linear)
        made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)
