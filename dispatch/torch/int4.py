"""Weights of 4 bits, and what they are made from; see `skuda.torch.formats.levels`."""

from __future__ import annotations

from torch import nn

from skuda.torch.formats.feedback import Moments, calibrated_weight
from skuda.torch.formats.int4 import Int4
from skuda.torch.formats.levels import Int4Weight, from_grouped, int4_weight
from skuda.torch.linear.int8_linear import DynamicLinear, check_linear

__all__ = ["Int4Weight", "Moments", "calibrated_weight", "from_grouped", "int4_linear", "int4_weight"]


def int4_linear(linear: nn.Linear, group_size: int = 128, *, symmetric: bool = False) -> DynamicLinear:
    """Return the layer of the 4-bit weight of a layer; arguments and errors as `int4_weight`."""
    check_linear("int4_linear", linear)
    given = *Int4.quantize(linear.weight, group_size, symmetric=symmetric), linear.bias
    return DynamicLinear(*given, dtype=linear.weight.dtype, in_features=linear.in_features)
