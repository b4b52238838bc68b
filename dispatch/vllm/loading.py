"""Weights of vLLM's layers: written in place at any time, quantized on the way if they are floating.

A trainer sends new weights through vLLM's own calls, `load_weights` of the model or `reload_weights` of the engine.
Parameters keep their memory, so captured CUDA graphs read the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.parameter import BasevLLMParameter, ChannelQuantScaleParameter

from skuda.dispatch.host.arrays import PASSIVE
from skuda.registry.errors import InvalidProblem
from skuda.torch.formats import INT8, TO_INT8, Quantizer, WeightFormat

Loader = Callable[..., Any]

_SHARDS = {"q": 0, "k": 1, "v": 2}


def _kinds(kind: Any) -> set[Any]:
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


# A launch does not recognize tensors of unknown types, and each call would be checked in full, which takes 0.4 ms.
_PASSES: Any = BasevLLMParameter.__torch_function__
PASSIVE.update(kind for kind in _kinds(BasevLLMParameter) if kind.__torch_function__.__func__ is _PASSES.__func__)


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
    spread, loader = torch.empty(sum(widths), 1, dtype=torch.float32, device=held.device), of_a_layer(held, layer)
    made = ChannelQuantScaleParameter(data=spread, output_dim=0, weight_loader=held.weight_loader)

    def load(layer: Any, param: Tensor, loaded_weight: Tensor, *shard: Any) -> None:
        whole = not shard or shard[0] is None
        numbers = range(len(widths)) if whole else shard[0] if isinstance(shard[0], tuple) else shard
        if loaded_weight.numel() not in (1, len(numbers)):  # it has a scale for each channel already
            loader(layer, param, loaded_weight, *shard)
            return
        parts = param.data.split(widths)
        values = loaded_weight.reshape(-1).to(param.device).expand(len(numbers))
        for value, number in zip(values, numbers, strict=True):
            parts[_SHARDS.get(number, number)][...] = value

    made.weight_loader = MethodType(load, layer)
    load(layer, made, held.data)
    layer.register_parameter(name, made)


def accept_floats(layer: Any, weight: str, weight_scale: str, quantize: Quantizer = TO_INT8) -> None:
    """Let the loader of a layer's codes quantize floating weights, (N, K) or the rows of one part, on the way.

    Scales are computed from whole rows, also where ranks hold columns of the weight, so every rank gets the same ones;
    groups are those of whole rows, too. The layerwise reload of vLLM, which calls loaders once without memory to count
    what they load, counts the scales.
    """
    form = quantize.format
    parameter, scales = getattr(layer, weight), getattr(layer, weight_scale)
    if getattr(parameter.weight_loader, "quantizes", False):
        return
    loader, scale_loader = of_a_layer(parameter, layer), of_a_layer(scales, layer)

    def load(layer: Any, param: Tensor, loaded_weight: Tensor, *shard: Any, **named: Any) -> Any:
        floating, shape = loaded_weight.is_floating_point(), list(loaded_weight.shape)
        if loaded_weight.dim() != (2 if floating else param.dim()) or (
            form != INT8 and not floating and _fixed(form, loaded_weight) != _fixed(form, param)
        ):
            groups = "" if form.group_size is None else f" of groups of {quantize.group_size or 'a row'}"
            rule = f"be {form.name} codes{groups}, or floating of shape [N, K]"
            raise InvalidProblem("load_weights", weight, f"{loaded_weight.dtype} of shape {shape}", rule)
        if not floating:
            return loader(layer, param, loaded_weight, *shard, **named)
        held = getattr(layer, weight_scale)
        if param.is_meta:
            with _disable_current_modes():  # or the scales would count as codes, too
                held.weight_loader(held, torch.empty(shape[0], 1, device="meta"), *shard, **named)
            of_codes = form.shape(*shape)
            return loader(layer, param, torch.empty(of_codes, dtype=param.dtype, device="meta"), *shard, **named)
        codes, scale = quantize(loaded_weight.to(param.device))
        held.weight_loader(held, scale.view(-1, 1), *shard, **named)
        return loader(layer, param, codes, *shard, **named)

    def load_scales(layer: Any, param: Tensor, loaded_weight: Tensor, *shard: Any, **named: Any) -> Any:
        if loaded_weight.is_meta and not param.is_meta:  # it was counted; the weight brings the scales
            return None
        return scale_loader(layer, param, loaded_weight, *shard, **named)

    load.quantizes = True  # type: ignore[attr-defined]
    parameter.weight_loader, scales.weight_loader = MethodType(load, layer), MethodType(load_scales, layer)


def _fixed(form: WeightFormat, codes: Tensor) -> tuple[torch.dtype, list[int]]:
    """Return what all codes of a format have in common: dtype, and axes other than those of N and K."""
    return codes.dtype, [size for axis, size in enumerate(codes.shape) if axis not in (0, form.k_axis)]


def keep_unloaded(layer: nn.Module, names: Iterable[str]) -> None:
    """Give parameters that vLLM's layerwise reload has not loaded the values that they had before."""
    info = _reload_of(layer)
    loaded = set() if info is None else {name for name, _ in info.loaded_weights}
    for name in set(names) - loaded if info is not None else ():
        parameter, before = getattr(layer, name, None), info.kernel_tensors[0].get(name)
        if parameter is not None and before is not None:
            parameter.data.copy_(before.view(parameter.shape))


def quantize_reloaded(layer: nn.Module, name: str) -> None:
    """Load the floating weights of vLLM's layerwise reload again, through a loader of `accept_floats`.

    vLLM recorded the loaders of a checkpoint before skuda saw the layer, and they have cast the weights to codes.
    """
    info, parameter = _reload_of(layer), getattr(layer, name)
    for loaded, given in () if info is None else info.loaded_weights:
        if loaded == name and given.arguments["loaded_weight"].is_floating_point():
            given.arguments["param"] = parameter
            parameter.weight_loader(*given.args, **given.kwargs)


def _reload_of(layer: nn.Module) -> Any:
    """Return what vLLM's layerwise reload knows of a layer that it is loading again, or None."""
    info = layerwise.LAYERWISE_INFO.get(layer)
    return info if info is not None and info.kernel_tensors is not None else None


def of_a_layer(parameter: Any, layer: nn.Module) -> Loader:
    """Return a parameter's loader as a function of a layer, and then of what loaders take.

    vLLM keeps loaders longer than layers, so they must not hold one, unless they are its methods: those it lets go.
    """
    loader: Any = parameter.weight_loader
    if getattr(loader, "__self__", None) is layer:
        function: Loader = loader.__func__
        return function
    return lambda _, *arguments, **named: loader(*arguments, **named)
