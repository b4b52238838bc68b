"""`update_`: a served int8 model gets the weights of the same model in training, in the memory that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.autograd import row_codes
from skuda.torch.int4 import int4_weight
from skuda.torch.joined import int8_layers
from skuda.torch.quantize import Dynamic
from skuda.torch.replaceable_layers import as_linear, check_model, is_conv1d, is_linear
from skuda.torch.training import FakeQuantLinear, MixedLinear


@torch.no_grad()
def update_(served: nn.Module, trained: nn.Module, config: Dynamic | None = None) -> None:
    """Quantize the weights of a model in training once, and copy them and all other tensors into a served model.

    The served model keeps its memory, so captured graphs and compiled code stay valid. It then gives the bits of the
    trained one, if both are exact and the served weights have 8 bits. Weights of 4 bits are those that `int4_weight`
    makes.

    Parameters
    ----------
    served : Module
        The model with layers of `Dynamic`, fused or not. It must be whole, not split over ranks.
    trained : Module
        The same model with layers of `Mixed`, or of `FakeQuant` without learned scales. Where the served weight has 4
        bits, the layer may also be in floating point.
    config : Dynamic, optional
        The config that made the served weights of 4 bits. By default they get groups of each layer's `group_size`, not
        symmetric. So weights with a scale a row, or symmetric ones, need it to stay so.

    Raises
    ------
    InvalidProblem
        If the models have other tensors, or a weight is not finite, or `config` makes other weights. The served model
        has not changed then.
    """
    check_model("update_", served, None)
    check_model("update_", trained, None)
    if config is not None and getattr(config, "weights", None) != "int4":
        raise InvalidProblem("update_", "config", shown(config), "be a Dynamic with weights='int4'")
    int4 = {
        name: Dynamic(weights="int4", group_size=layer.group_size) if config is None else config
        for name, layer in int8_layers(served)
        if layer.group_size is not None
    }
    given, held = dict(_tensors(trained, int4)), served.state_dict(keep_vars=True)
    for name in given.keys() ^ held.keys():
        had = f"{'no ' if name in held else ''}{name}"
        raise InvalidProblem("update_", "trained", had, "be the same model, with layers of Mixed() or FakeQuant()")
    for name, tensor in given.items():
        if tensor.shape != held[name].shape:
            had = f"shape {list(tensor.shape)}, served {list(held[name].shape)}"
            raise InvalidProblem("update_", name, had, "have the shape of the served one, which must be whole")
    bad = [name for name in given if name.endswith("weight_scale") and not bool(given[name].isfinite().all())]
    if bad:
        _refuse_nan(bad[0].removesuffix("_scale"))
    served.load_state_dict(given)


def _tensors(model: nn.Module, int4: Mapping[str, Dynamic]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the served model has, by name: codes and scales of layers in training."""
    weights = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MixedLinear) or (isinstance(layer, FakeQuantLinear) and not layer.learn_scale):
            weights[f"{name}.weight"] = layer.weight
        elif name in int4 and (is_linear(layer) or is_conv1d(layer)):
            weights[f"{name}.weight"] = as_linear(layer).weight
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in weights:
            yield name, tensor
            continue
        weight, how = weights[name], int4.get(name.removesuffix(".weight"))
        if how is None:
            codes, scale = row_codes(weight)
        else:
            if not bool(weight.isfinite().all()):
                _refuse_nan(name)
            made = int4_weight(weight, how.group_size, symmetric=how.symmetric)
            codes, scale = made.packed(how.group_size), made.channel_scale
        yield name, codes
        yield f"{name}_scale", scale[:, None]


def _refuse_nan(name: str) -> NoReturn:
    raise InvalidProblem("update_", name, "an infinity or NaN", "be finite; nothing was changed")
