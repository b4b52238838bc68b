"""The formats of weights; see `skuda.torch.formats.weight` and `docs/format.md`."""

from __future__ import annotations

from skuda.torch.formats.int4 import Int4
from skuda.torch.formats.int8 import INT8, TO_INT8, Int8
from skuda.torch.formats.int16 import CODES_OF, Int16
from skuda.torch.formats.reading import ConfigFields, Tensors
from skuda.torch.formats.weight import (
    FORMATS,
    CodedWeight,
    Quantizer,
    StoredWeight,
    WeightFormat,
    format_of,
    quantizer,
    register_format,
)

__all__ = [
    "CODES_OF",
    "FORMATS",
    "INT8",
    "TO_INT8",
    "CodedWeight",
    "ConfigFields",
    "Int4",
    "Int8",
    "Int16",
    "Quantizer",
    "StoredWeight",
    "Tensors",
    "WeightFormat",
    "format_of",
    "quantizer",
    "register_format",
]
