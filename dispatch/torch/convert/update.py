"""`update_`: a served int8 model gets the weights of the same model in training, in the memory that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.convert.quantize import Dynamic
from skuda.torch.formats import INT8, TO_INT8, Quantizer, WeightFormat
from skuda.torch.linear.joined import int8_layers
from skuda.torch.models.replaceable_layers import as_linear, check_model, is_conv1d, is_linear
from skuda.torch.training.layers import FakeQuantLinear, MixedLinear


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
    made = getattr(config, "quantizer", None)
    if config is not None and (not isinstance(made, Quantizer) or made.format == INT8):
        raise InvalidProblem("update_", "config", shown(config), "be a Dynamic with weights='int4'")
    quantizers = {name: _quantizer(layer.format, made) for name, layer in int8_layers(served)}
    given, held = dict(_tensors(trained, quantizers)), served.state_dict(keep_vars=True)
    for name in given.keys() ^ held.keys():
        had = f"{'no ' if name in held else ''}{name}"
        raise InvalidProblem("update_", "trained", had, "be the same model, with layers of Mixed() or FakeQuant()")
    for name, tensor in given.items():
        if tensor.shape != held[name].shape:
            had = f"shape {list(tensor.shape)}, served {list(held[name].shape)}"
            raise InvalidProblem("update_", name, had, "have the shape of the served one, which must be whole")
    served.load_state_dict(given)


def _quantizer(held: WeightFormat, asked: Quantizer | None) -> Quantizer:
    """Return what quantizes the weight of a served layer."""
    if asked is not None and type(asked.format) is type(held):
        return asked
    return Quantizer(held, held.group_size or 128)


def _tensors(model: nn.Module, quantizers: Mapping[str, Quantizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the served model has, by name: codes and scales of layers in training."""
    weights = {}
    for name, layer in model.named_modules():
        quantize = quantizers.get(name)
        if isinstance(layer, MixedLinear) or (isinstance(layer, FakeQuantLinear) and not layer.learn_scale):
            weights[f"{name}.weight"] = layer.weight, quantize or TO_INT8
        elif quantize and quantize.format != INT8 and (is_linear(layer) or is_conv1d(layer)):
            weights[f"{name}.weight"] = as_linear(layer).weight, quantize
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in weights:
            yield name, tensor
            continue
        weight, quantize = weights[name]
        if not bool(weight.isfinite().all()):
            raise InvalidProblem("update_", name, "an infinity or NaN", "be finite; nothing was changed")
        codes, scale = quantize(weight)
        yield name, codes
        yield f"{name}_scale", scale[:, None]
