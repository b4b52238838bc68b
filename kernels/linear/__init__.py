"""The linear family: int8 products and packed weights. Modules are imported on first use of a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skuda.kernels.linear.pack_weight import PackedWeight, PackWeightDescriptor
    from skuda.kernels.linear.quantized_linear import QuantizedLinearDescriptor
    from skuda.kernels.linear.rescale import RescaleDescriptor
    from skuda.kernels.linear.scaled_linear import ScaledLinearDescriptor
    from skuda.kernels.linear.smoothquant_linear import SmoothQuantLinearDescriptor
    from skuda.kernels.linear.unpack_weight import UnpackWeightDescriptor

__all__ = [
    "PackWeightDescriptor",
    "PackedWeight",
    "QuantizedLinearDescriptor",
    "RescaleDescriptor",
    "ScaledLinearDescriptor",
    "SmoothQuantLinearDescriptor",
    "UnpackWeightDescriptor",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from skuda.kernels.catalog import exported

        return exported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
