"""`prepare`: does the work of first calls in advance."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.fused_modules import Fused
from skuda.torch.int8_linear import CodesLinear, Int8Linear
from skuda.torch.replaceable_layers import check_count, check_model


def prepare(
    model: nn.Module, rows: Iterable[int] = (1, 16), dtype: torch.dtype | None = None
) -> dict[str, dict[int, str]]:
    """Run every int8 layer and fused module of a model once for each number of rows.

    This compiles and plans their kernels. A CUDA graph with these numbers of rows can then be captured at once.

    Parameters
    ----------
    model : torch.nn.Module
    rows : iterable of int
        Numbers of rows of the inputs: the product of all leading axes.
    dtype : torch.dtype, optional
        Dtype of the inputs. By default that of the model's first floating-point parameter, or torch's default.

    Returns
    -------
    dict of str to dict of int to str
        Id of the kernel of each layer's product, by the layer's name and the number of rows.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type.
    Unsupported
        If no kernel can serve a layer.
    """
    check_model("prepare", model, None)
    try:
        counts = tuple(rows)
    except TypeError:
        raise InvalidProblem("prepare", "rows", shown(rows), "be numbers of rows, such as (1, 16)") from None
    for count in counts:
        check_count("prepare", "rows", count)
    if dtype is None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    elif not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidProblem("prepare", "dtype", shown(dtype), "be a floating-point dtype")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    planned: dict[str, dict[int, str]] = {name: {} for name in layers}
    with torch.no_grad():
        for name, layer in layers.items():
            for count in counts:
                given = torch.int8 if isinstance(layer, CodesLinear) else dtype
                zeros = torch.zeros(count, layer.in_features, dtype=given, device=layer.weight.device)
                layer(zeros)
                planned[name][count] = str(layer.explain(zeros).chosen)
        for module in model.modules():
            if isinstance(module, Fused):
                device = next(module.buffers()).device
                for count in counts:
                    module.warm(torch.zeros(count, module.width, dtype=dtype, device=device))
    return planned
