"""Makes int8 layers from stored tensors, after checking each tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.registry.text import shown
from skuda.torch.formats.reading import CODES, ONE, SCALES, Tensors
from skuda.torch.formats.weight import Difference
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
    approximate: str | None = None,
    note: Callable[[Difference], object] | None = None,
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
    approximate : str, optional
        The format of a weight that no layer holds exactly; see `skuda.torch.formats.StoredWeight.read`.
    note : callable, optional
        Takes what differs from the file.
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
    found = found.copies(device)
    weight, scale, difference = group.stored.read(found, (n, k), approximate)
    if note is not None:
        note(difference._replace(weights_only=group.weights_only))
    if module.bias is None and group.stored.method is not None:
        found.take_zeros("bias", SCALES, "the model's layer has none")  # some writers of GPTQ store it
    bias = None if module.bias is None else found.take("bias", biases, (n,))
    smooth = smooth and group.activation.bits == 8 and "smooth" in found
    given = {"smooth": found.take("smooth", torch.float32, (k,)) if smooth else None}
    if group.activation is ActivationScheme.STATIC:
        found.take_zeros("input_zero_point")
    elif group.activation is ActivationScheme.SHIFTED:
        given["input_zero_point"] = found.take("input_zero_point", CODES, *ONE)
    if not group.activation.dynamic:
        given["input_scale"] = found.take("input_scale", SCALES, *ONE)
    made = layer_of(weight, scale, bias, dtype=dtype, in_features=k, bits=group.activation.bits, **given)
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


def check_approximate(source: str, approximate: object) -> None:
    """Raise `InvalidProblem` for a format that `int8_layer` cannot approximate by."""
    if approximate not in (None, "int4", "int8"):
        raise InvalidProblem(source, "approximate", shown(approximate), "be 'int4' or 'int8'")


def warn_approximate(found: Mapping[str, Difference], *, stacklevel: int) -> None:
    """Warn of layers that are not what their checkpoint says: how many, the mean `Difference.mean`, and the largest."""
    texts = []
    floats = sum(each.weights_only for each in found.values())
    if floats:
        texts.append(f"{floats} layers have activations of 8 bits, with a scale a row, where the checkpoint has floats")
    other = {name: each for name, each in found.items() if each.largest}
    if other:
        most = max(other, key=lambda name: other[name].largest)
        text = f"{len(other)} layers have weights that differ from the checkpoint's, over their root mean square by"
        mean = fmean(each.mean for each in other.values())
        texts.append(f"{text} {mean:.2g} in the mean, and by up to {other[most].largest:.2g}, in {most}")
    if texts:
        warnings.warn("; ".join(texts), stacklevel=stacklevel + 1)
