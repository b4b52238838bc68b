"""The quantization family: one module per direction, one descriptor class per op, re-exported here.

Modules are imported on first use of a name: importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skuda.kernels.linear import (
        PackedWeight,
        PackWeightDescriptor,
        QuantizedLinearDescriptor,
        RescaleDescriptor,
        ScaledLinearDescriptor,
        SmoothQuantLinearDescriptor,
        UnpackWeightDescriptor,
    )
    from skuda.kernels.quantize.amax import AmaxDescriptor
    from skuda.kernels.quantize.amax_quantize import AmaxQuantized, AmaxQuantizeDescriptor
    from skuda.kernels.quantize.dequantize import (
        DequantizePerChannelDescriptor,
        DequantizePerGroupDescriptor,
        DequantizePerTensorDescriptor,
        DequantizePerTokenDescriptor,
    )
    from skuda.kernels.quantize.dequantize_backward import (
        DequantizePerChannelBackwardDescriptor,
        DequantizePerGroupBackwardDescriptor,
        DequantizePerTensorBackwardDescriptor,
        DequantizePerTokenBackwardDescriptor,
    )
    from skuda.kernels.quantize.dynamic_range import (
        DynamicRangeQuantized,
        DynamicRangeQuantizeDescriptor,
    )
    from skuda.kernels.quantize.fake_quantize import (
        FakeQuantizeDescriptor,
        FakeQuantizePerChannelDescriptor,
        FakeQuantizePerGroupDescriptor,
        FakeQuantizePerTokenDescriptor,
    )
    from skuda.kernels.quantize.fake_quantize_backward import (
        FakeQuantizeBackwardDescriptor,
        FakeQuantizePerChannelBackwardDescriptor,
        FakeQuantizePerGroupBackwardDescriptor,
        FakeQuantizePerTokenBackwardDescriptor,
    )
    from skuda.kernels.quantize.gated import (
        GatedQuantized,
        GeluMulQuantizeDescriptor,
        SiluMulQuantizeDescriptor,
    )
    from skuda.kernels.quantize.gated_amax import GatedAmax, GeluMulAmaxDescriptor, SiluMulAmaxDescriptor
    from skuda.kernels.quantize.layer_norm_quantize import LayerNormQuantizeDescriptor
    from skuda.kernels.quantize.norm import NormQuantized
    from skuda.kernels.quantize.quantize import (
        QuantizePerChannelDescriptor,
        QuantizePerGroupDescriptor,
        QuantizePerTensorDescriptor,
        QuantizePerTokenDescriptor,
    )
    from skuda.kernels.quantize.quantize_backward import (
        QuantizePerChannelBackwardDescriptor,
        QuantizePerGroupBackwardDescriptor,
        QuantizePerTensorBackwardDescriptor,
        QuantizePerTokenBackwardDescriptor,
    )
    from skuda.kernels.quantize.rms_norm_quantize import RmsNormQuantizeDescriptor

__all__ = [
    "AmaxDescriptor",
    "AmaxQuantizeDescriptor",
    "AmaxQuantized",
    "DequantizePerChannelBackwardDescriptor",
    "DequantizePerChannelDescriptor",
    "DequantizePerGroupBackwardDescriptor",
    "DequantizePerGroupDescriptor",
    "DequantizePerTensorBackwardDescriptor",
    "DequantizePerTensorDescriptor",
    "DequantizePerTokenBackwardDescriptor",
    "DequantizePerTokenDescriptor",
    "DynamicRangeQuantizeDescriptor",
    "DynamicRangeQuantized",
    "FakeQuantizeBackwardDescriptor",
    "FakeQuantizeDescriptor",
    "FakeQuantizePerChannelBackwardDescriptor",
    "FakeQuantizePerChannelDescriptor",
    "FakeQuantizePerGroupBackwardDescriptor",
    "FakeQuantizePerGroupDescriptor",
    "FakeQuantizePerTokenBackwardDescriptor",
    "FakeQuantizePerTokenDescriptor",
    "GatedAmax",
    "GatedQuantized",
    "GeluMulAmaxDescriptor",
    "GeluMulQuantizeDescriptor",
    "LayerNormQuantizeDescriptor",
    "NormQuantized",
    "PackWeightDescriptor",
    "PackedWeight",
    "QuantizePerChannelBackwardDescriptor",
    "QuantizePerChannelDescriptor",
    "QuantizePerGroupBackwardDescriptor",
    "QuantizePerGroupDescriptor",
    "QuantizePerTensorBackwardDescriptor",
    "QuantizePerTensorDescriptor",
    "QuantizePerTokenBackwardDescriptor",
    "QuantizePerTokenDescriptor",
    "QuantizedLinearDescriptor",
    "RescaleDescriptor",
    "RmsNormQuantizeDescriptor",
    "ScaledLinearDescriptor",
    "SiluMulAmaxDescriptor",
    "SiluMulQuantizeDescriptor",
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
