"""Weights of vLLM's layers: written in place at any time, quantized on the way if they are floating.

A trainer sends new weights through vLLM's own calls, `load_weights` of the model or `reload_weights` of the engine.
Parameters keep their memory, so captured CUDA graphs read the new values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.parameter import ChannelQuantScaleParameter

from skuda.registry.errors import InvalidProblem
from skuda.torch.int8_linear import quantized_weight

Loader = Callable[..., Any]

_SHARDS = {"q": 0, "k": 1, "v": 2}


def replace(layer: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of a parameter, which keeps its loader. Memory of the same form stays where it is."""
    held = getattr(layer, name)
    if (held.shape, held.dtype, held.device) == (value.shape, value.dtype, value.device):
        held.data.copy_(value)
        return
    made = nn.Parameter(value, requires_grad=False)
    made.weight_loader = _copy  # type: ignore[attr-defined]
    layer.register_parameter(name, made)


def _copy(param: Tensor, loaded_weight: Tensor, *_: Any) -> None:
    """Load a value of one element, which all parts of a layer share."""
    param.data.copy_(loaded_weight.reshape(param.shape))


def spread_scales(layer: Any, name: str) -> None:
    """Give a layer whose parts have one weight scale each a scale for every output channel, (N, 1)."""
    held, widths = getattr(layer, name), list(layer.logical_widths)
    if isinstance(held, ChannelQuantScaleParameter):
        return
    spread, loader = torch.empty(sum(widths), 1, dtype=torch.float32, device=held.device), held.weight_loader
    made = ChannelQuantScaleParameter(data=spread, output_dim=0, weight_loader=loader)

    def load(param: Tensor, loaded_weight: Tensor, *shard: Any) -> None:
        numbers = range(len(widths)) if not shard else shard[0] if isinstance(shard[0], tuple) else shard
        if loaded_weight.numel() not in (1, len(numbers)):  # it has a scale for each channel already
            loader(param, loaded_weight, *shard)
            return
        parts = param.data.split(widths)
        values = loaded_weight.reshape(-1).to(param.device).expand(len(numbers))
        for value, number in zip(values, numbers, strict=True):
            parts[_SHARDS.get(number, number)][...] = value

    made.weight_loader = load
    load(made, held.data)
    layer.register_parameter(name, made)


def accept_floats(layer: Any, weight: str, weight_scale: str) -> None:
    """Let the loader of a layer's codes quantize floating weights, (N, K) or the rows of one part, on the way.

    Scales are computed from whole rows, also where ranks hold columns of the weight, so every rank gets the same ones.
    """
    parameter = getattr(layer, weight)
    loader = parameter.weight_loader
    if getattr(loader, "quantizes", False):
        return

    def load(param: Tensor, loaded_weight: Tensor, *shard: Any, **named: Any) -> Any:
        if not loaded_weight.is_floating_point():
            return loader(param, loaded_weight, *shard, **named)
        if loaded_weight.dim() != 2:
            had = f"{loaded_weight.dtype} of shape {list(loaded_weight.shape)}"
            raise InvalidProblem("load_weights", weight, had, "be codes, or floating of shape [N, K]")
        codes, scale = quantized_weight(loaded_weight.to(param.device))
        held = getattr(layer, weight_scale)
        held.weight_loader(held, scale.view(-1, 1), *shard, **named)
        return loader(param, codes, *shard, **named)

    load.quantizes = True  # type: ignore[attr-defined]
    parameter.weight_loader = load
