"""The kernel that vLLM's compressed-tensors layers (W8A8, int8) choose.

The codes keep vLLM's layout, [N, K], in the parameter that vLLM made, so its weight loaders write to them at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, Int8ScaledMMLinearLayerConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from skuda.serving.status import missing
from skuda.torch.formats import INT8, WeightFormat
from skuda.torch.linear.activation import PerRow
from skuda.torch.ops.dtypes import element_of
from skuda.vllm import fusion, loading

logger = init_logger("vllm.skuda")  # vLLM shows what loggers below its own say

CanImplement = tuple[bool, str | None]


def nonfinite() -> str | None:
    """Return what layers do with a NaN by the present config: those of an exact model pass it on."""
    config = get_current_vllm_config_or_none()
    exact = config is not None and getattr(config.quant_config, "exact", False)
    return "propagate" if exact else None


class SkudaInt8ScaledMMLinearKernel(Int8ScaledMMLinearKernel):
    """Quantizes the input per token or with a given scale, and multiplies codes.

    Every scheme of vLLM's int8 layers is served: dynamic or static, symmetric or with zero points, weight scales per
    channel or per tensor, bias; outputs have the dtype of the input. Dynamic codes are those of skuda's
    `dynamic_range`, -127..127 if symmetric, which divides by the scale where vLLM multiplies by its reciprocal. Static
    codes are -128..127, as vLLM's.
    """

    form: WeightFormat
    activation: PerRow
    """How the input becomes codes where its scales are dynamic and symmetric."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> CanImplement:
        """Return whether skuda has a CUDA kernel for this card, or why not."""
        del compute_capability  # the dispatcher asks the card
        if not current_platform.is_cuda():
            return False, "requires CUDA"
        reason = missing()
        if reason:
            logger.warning_once("skuda serves no layer: %s", reason)
        return not reason, reason or None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> CanImplement:
        """Return True: every scheme that the config describes is served."""
        del c
        return True, None

    def __init__(self, c: Int8ScaledMMLinearLayerConfig, layer_param_names: Sequence[str]) -> None:
        super().__init__(c, layer_param_names)
        self.form, self.activation = INT8, PerRow(nonfinite())
        fusion.add_pass()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring scales and zero points into the form that the ops take. The codes stay where they are."""
        weight, weight_scale, input_scale, zero_point, _ = self.layer_param_names
        loading.keep_unloaded(layer, (input_scale, zero_point, "bias"))
        loading.accept_floats(layer, weight, weight_scale)
        if not self.config.is_channelwise:
            loading.spread_scales(layer, weight_scale)
        loading.quantize_reloaded(layer, weight)
        if self.config.is_static_input_scheme:
            loading.replace(layer, input_scale, getattr(layer, input_scale).data.reshape(1))
            if self.config.input_symmetric:
                setattr(layer, zero_point, None)
                if "skuda_zero" not in layer._buffers:  # noqa: SLF001  captured graphs read it
                    zero = torch.zeros(1, dtype=torch.int32, device=getattr(layer, weight).device)
                    layer.register_buffer("skuda_zero", zero, persistent=False)
            else:
                loading.replace(layer, zero_point, getattr(layer, zero_point).data.to(torch.int32).reshape(1))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's output, (..., N), for an input of shape (..., K), in the input's dtype."""
        weight, weight_scale, input_scale, zero_point, _ = self._get_layer_params(layer)
        ops, symmetric = torch.ops.skuda, self.config.input_symmetric
        weight = self.form.operand(weight, weight_scale.shape[0], x.shape[-1])
        if symmetric and not self.config.is_static_input_scheme:
            how = {**self.activation.fields(x.dtype), **self.form.fields}
            found: Tensor = ops.quantized_linear.default(x, weight, weight_scale, None, bias, **how)
            return found
        fields = {"q_min": -128, "q_max": 127, "output_element": "s8"}
        if self.config.is_static_input_scheme:
            zero = layer.skuda_zero if symmetric else zero_point
            codes = ops.quantize_per_tensor.default(x, input_scale, zero, **fields)
            scale, scope = input_scale, "tensor"
        else:
            codes, scale, zero_point = ops.dynamic_range.default(x, **fields, mode="asymmetric", scope="token")
            scope = "token"
        product: Tensor = ops.scaled_linear.default(
            codes, weight, scale, None if symmetric else zero_point, weight_scale, None, bias,
            output_element=str(element_of(x.dtype)), act_scale_scope=scope,
        )  # fmt: skip
        return product

    def product(self, layer: Any, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output, (M, N), for codes and scales of rows, as ops write them in front of a dynamic layer."""
        weight, weight_scale, *_ = self._get_layer_params(layer)
        weight = self.form.operand(weight, weight_scale.shape[0], codes.shape[-1] // self.activation.element.halves)
        bias = None if layer.skip_bias_add else layer.bias
        how = {"output_element": str(element_of(dtype)), **self.activation.given, **self.form.fields}
        found: Tensor = torch.ops.skuda.scaled_linear.default(
            codes, weight, scale, None, weight_scale, None, bias, **how
        )
        return found

    def gated(self, layer: nn.Module, gate_up: Tensor) -> Tensor:
        """Return the output, (M, N), for SiLU of the first half of each row, times the second half."""
        how = {"nonfinite": self.activation.nonfinite, **self.activation.codes}
        codes, scale = torch.ops.skuda.silu_mul_quantize.default(gate_up=gate_up, **how)
        return self.product(layer, codes, scale, gate_up.dtype)


def register() -> None:
    """Put the kernel before vLLM's own, which decline nothing."""
    known: list[Any] = kernels._POSSIBLE_INT8_KERNELS.setdefault(PlatformEnum.CUDA, [])  # noqa: SLF001  registering appends
    if SkudaInt8ScaledMMLinearKernel not in known:
        known.insert(0, SkudaInt8ScaledMMLinearKernel)
