"""`update_`: a served int8 model gets the weights of the same model in training, in the memory that it has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.torch.autograd import row_codes
from skuda.torch.joined import int8_layers
from skuda.torch.replaceable_layers import check_model
from skuda.torch.training import FakeQuantLinear, MixedLinear


@torch.no_grad()
def update_(served: nn.Module, trained: nn.Module) -> None:
    """Quantize the weights of a model in training once, and copy them and all other tensors into a served model.

    The served model keeps its memory, so captured graphs and compiled code stay valid. It then gives the bits of the
    trained one, if both are exact.

    Parameters
    ----------
    served : Module
        The model with layers of `Dynamic`, fused or not. It must be whole, not split over ranks.
    trained : Module
        The same model with layers of `Mixed`, or of `FakeQuant` without learned scales.

    Raises
    ------
    InvalidProblem
        If the models have other tensors, a weight is not finite, or a served one has 4 bits. The served model has not
        changed then.
    """
    check_model("update_", served, None)
    check_model("update_", trained, None)
    for name, layer in int8_layers(served):
        if layer.group_size is not None:
            rule = "have 8-bit weights, those of layers in training: quantize_ the trained model instead"
            raise InvalidProblem("update_", name, "a layer of 4-bit weights", rule)
    given, held = dict(_tensors(trained)), served.state_dict(keep_vars=True)
    for name in given.keys() ^ held.keys():
        had = f"{'no ' if name in held else ''}{name}"
        raise InvalidProblem("update_", "trained", had, "be the same model, with layers of Mixed() or FakeQuant()")
    for name, tensor in given.items():
        if tensor.shape != held[name].shape:
            had = f"shape {list(tensor.shape)}, served {list(held[name].shape)}"
            raise InvalidProblem("update_", name, had, "have the shape of the served one, which must be whole")
    bad = [name for name in given if name.endswith("weight_scale") and not bool(given[name].isfinite().all())]
    if bad:
        name = bad[0].removesuffix("_scale")
        raise InvalidProblem("update_", name, "an infinity or NaN", "be finite; nothing was changed")
    served.load_state_dict(given)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the served model has, by name: codes and scales of layers in training."""
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, MixedLinear) or (isinstance(layer, FakeQuantLinear) and not layer.learn_scale)
    }
    weights = {f"{name}.weight": layer for name, layer in layers.items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in weights:
            codes, scale = row_codes(weights[name].weight)
            yield name, codes
            yield f"{name}_scale", scale[:, None]
        else:
            yield name, tensor
