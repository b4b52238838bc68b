"""Int8 quantization inside PyTorch: ops for torch, modules, one call that quantizes a model.

Importing this package imports torch and registers ``torch.ops.skuda``; importing anything else of skuda does not.
"""

from __future__ import annotations

if __name__ != "skuda.torch":
    # In a checkout the folder lies below that of `skuda.dispatch`; imported twice, it would register its ops twice.
    raise ImportError("this package is imported as skuda.torch", name=__name__)

from skuda.torch.fuse import Fusion, fuse_
from skuda.torch.linear import CodesLinear, DynamicLinear, Int8Linear, StaticLinear
from skuda.torch.ops import linear_codes, linear_dynamic, linear_scaled, linear_static

__all__ = [
    "CodesLinear",
    "DynamicLinear",
    "Fusion",
    "Int8Linear",
    "StaticLinear",
    "fuse_",
    "linear_codes",
    "linear_dynamic",
    "linear_scaled",
    "linear_static",
]
