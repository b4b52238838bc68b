"""The quantization family: one module per op, one descriptor class per op, re-exported here.

Modules are imported on first use of a name, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skuda.kernels.quantize.dequantize_per_channel import DequantizePerChannelDescriptor
    from skuda.kernels.quantize.dequantize_per_channel_backward import DequantizePerChannelBackwardDescriptor
    from skuda.kernels.quantize.dequantize_per_group import DequantizePerGroupDescriptor
    from skuda.kernels.quantize.dequantize_per_group_backward import DequantizePerGroupBackwardDescriptor
    from skuda.kernels.quantize.dequantize_per_tensor import DequantizePerTensorDescriptor
    from skuda.kernels.quantize.dequantize_per_tensor_backward import DequantizePerTensorBackwardDescriptor
    from skuda.kernels.quantize.dequantize_per_token import DequantizePerTokenDescriptor
    from skuda.kernels.quantize.dequantize_per_token_backward import DequantizePerTokenBackwardDescriptor
    from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantized, DynamicRangeQuantizeDescriptor
    from skuda.kernels.quantize.fake_quantize import FakeQuantizeDescriptor
    from skuda.kernels.quantize.fake_quantize_backward import FakeQuantizeBackwardDescriptor
    from skuda.kernels.quantize.fake_quantize_per_channel import FakeQuantizePerChannelDescriptor
    from skuda.kernels.quantize.fake_quantize_per_channel_backward import FakeQuantizePerChannelBackwardDescriptor
    from skuda.kernels.quantize.fake_quantize_per_group import FakeQuantizePerGroupDescriptor
    from skuda.kernels.quantize.fake_quantize_per_group_backward import FakeQuantizePerGroupBackwardDescriptor
    from skuda.kernels.quantize.fake_quantize_per_token import FakeQuantizePerTokenDescriptor
    from skuda.kernels.quantize.fake_quantize_per_token_backward import FakeQuantizePerTokenBackwardDescriptor
    from skuda.kernels.quantize.quantize_per_channel import QuantizePerChannelDescriptor
    from skuda.kernels.quantize.quantize_per_channel_backward import QuantizePerChannelBackwardDescriptor
    from skuda.kernels.quantize.quantize_per_group import QuantizePerGroupDescriptor
    from skuda.kernels.quantize.quantize_per_group_backward import QuantizePerGroupBackwardDescriptor
    from skuda.kernels.quantize.quantize_per_tensor import QuantizePerTensorDescriptor
    from skuda.kernels.quantize.quantize_per_tensor_backward import QuantizePerTensorBackwardDescriptor
    from skuda.kernels.quantize.quantize_per_token import QuantizePerTokenDescriptor
    from skuda.kernels.quantize.quantize_per_token_backward import QuantizePerTokenBackwardDescriptor
    from skuda.kernels.quantize.quantized_linear import QuantizedLinearDescriptor
    from skuda.kernels.quantize.smoothquant_linear import SmoothQuantLinearDescriptor

__all__ = [
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
    "QuantizePerChannelBackwardDescriptor",
    "QuantizePerChannelDescriptor",
    "QuantizePerGroupBackwardDescriptor",
    "QuantizePerGroupDescriptor",
    "QuantizePerTensorBackwardDescriptor",
    "QuantizePerTensorDescriptor",
    "QuantizePerTokenBackwardDescriptor",
    "QuantizePerTokenDescriptor",
    "QuantizedLinearDescriptor",
    "SmoothQuantLinearDescriptor",
]


def __getattr__(name: str) -> Any:
    # Also finds the descriptor of an op module that is not listed above: the list is for type checkers.
    if not name.startswith("_"):
        from skuda.kernels.catalog import exported

        found = exported(__name__, name)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
