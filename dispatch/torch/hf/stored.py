"""Makes int8 layers from stored tensors, after checking each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skuda.registry.errors import InvalidRecord
from skuda.torch.formats.reading import CODES, ONE, SCALES, Tensors
from skuda.torch.hf.scheme import ActivationScheme, SchemeGroup
from skuda.torch.linear.dequantized_weight import CodedLayer
from skuda.torch.linear.int8_linear import Int8Linear, layer_of
from skuda.torch.models.replaceable_layers import original_of, sizes_of


def int8_layer(
    module: Any,
    group: SchemeGroup,
    found: Tensors,
    *,
    smooth: bool = False,
    rounded: Callable[[float], object] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Int8Linear:
    """Return the int8 replacement of a module. It shares no memory with the stored tensors.

    Parameters
    ----------
    module : Linear, Conv1D, Int8Linear or Part
        The module, for sizes, and the presence and dtype of the bias.
    group : SchemeGroup
        The quantization.
    found : Tensors
        The layer's tensors.
    smooth : bool
        Whether the layer may have smoothing factors.
    rounded : callable, optional
        Allows rounded group scales, and takes their largest difference; see `skuda.torch.formats.StoredWeight.read`.
    device : device, optional
        By default that of the module.
    dtype : dtype, optional
        The dtype of the weight that the codes stand for. The bias may then have any of floats. By default that of the
        module.

    Raises
    ------
    InvalidRecord
        For a tensor that is missing, or has another dtype or shape.
    """
    n, k = module.whole if isinstance(module, CodedLayer) else sizes_of(module)
    biases = SCALES if dtype or module.bias is None else module.bias.dtype
    device, dtype = device or module.weight.device, dtype or module.weight.dtype
    dtype = dtype if dtype.is_floating_point else None  # codes of another library

    def taken(name: str, dtypes: torch.dtype | tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> Tensor:
        return found.take(name, dtypes, *shapes).detach().to(device, copy=True)

    weight, scale, difference = group.stored.read(found, (n, k), device=device, round_scales=rounded is not None)
    if rounded is not None:
        rounded(difference)
    bias = None if module.bias is None else taken("bias", biases, (n,))
    given = {"smooth": taken("smooth", torch.float32, (k,)) if smooth and "smooth" in found else None}
    if group.activation is ActivationScheme.STATIC:
        found.take_zeros("input_zero_point")
    elif group.activation is ActivationScheme.SHIFTED:
        given["input_zero_point"] = taken("input_zero_point", CODES, *ONE)
    if group.activation is not ActivationScheme.DYNAMIC:
        given["input_scale"] = taken("input_scale", SCALES, *ONE)
    made = layer_of(weight, scale, bias, dtype=dtype, in_features=k, **given)
    made.original = original_of(module)
    return made


def check_values(source: str, name: str, layer: Int8Linear) -> None:
    """Raise for a layer with impossible scales or factors.

    Raises
    ------
    InvalidRecord
        For a scale that is negative or not finite, and for an input scale or smoothing factor of 0.
    """
    for part, value in layer.named_buffers():
        if not value.is_floating_point() or part == "bias":
            continue
        least_ok = value >= 0 if part == "weight_scale" else value > 0
        if not bool((least_ok & value.isfinite()).all()):
            rule = "be finite and not negative" if part == "weight_scale" else "be finite and positive"
            raise InvalidRecord(source, f"tensor {name}.{part}", "other values", rule)
