"""Linear layers of ``quantization="skuda"``. Their bits do not depend on the degree of tensor parallelism.

A rank with rows of the output channels has the whole input, so it computes what one rank computes. Where ranks hold
columns of the weight, they exchange what is exact: the largest magnitude of each row, so that all use the scale of the
whole row, and the sums of codes. Each rounds the whole sums once; vLLM's own reduction after the layer is off. The
result has the bits of `quantized_linear`, or `scaled_linear`, on whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import parallel_state
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.linear import RowParallelLinear, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.parameter import PackedvLLMParameter

from skuda.kernels.linear.problem import longest_k
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.serving.exchange import product_of_columns
from skuda.torch.formats import INT8, TO_INT8, Quantizer, WeightFormat
from skuda.torch.ops.registered import TAGS
from skuda.torch.ops.registering import registering
from skuda.vllm import loading
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel, logger

_OPS = torch.ops.skuda
_LONGEST = longest_k(ElementKind.S8, ElementKind.S8)
_REDUCTIONS = {"max": distributed.ReduceOp.MAX, "sum": distributed.ReduceOp.SUM}


@register_weight_loader_v2_supported_method
class SkudaLinearMethod(CompressedTensorsLinearMethod):
    """Makes, loads and runs the weights of a layer. Floating weights are quantized while they are loaded.

    Parameters
    ----------
    config : CompressedTensorsConfig
    quantize : Quantizer
        What quantizes floating weights. Its format is that of the parameters.
    bits : int
        Those of the codes of dynamic inputs.
    """

    def __init__(self, config: Any, quantize: Quantizer = TO_INT8, bits: int = 8) -> None:
        super().__init__(config)
        self.quantize, self.bits = quantize, bits

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the parameters of a rank's part: as vLLM's layers of compressed-tensors have them, but for the codes.

        Raises
        ------
        InvalidProblem
            If skuda has no kernel for this card, the ranks would not get the bits of one rank, or codes cannot be cut
            where parts and ranks begin.
        """
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        kernel = layer.scheme.kernel
        if not isinstance(kernel, SkudaInt8ScaledMMLinearKernel):
            why = SkudaInt8ScaledMMLinearKernel.is_supported()[1] or "vLLM was told to use another kernel"
            _refuse(layer.prefix, type(kernel).__name__, f"be served by skuda: {why}")
        if not kernel.config.is_channelwise:
            loading.spread_scales(layer, "weight_scale")
        form = kernel.form = self.quantize.format
        kernel.activation = replace(kernel.activation, bits=self.bits)
        if form != INT8:
            _check_cuts(layer, form, output_partition_sizes, output_size, input_size_per_partition, input_size)
            shape = form.shape(sum(output_partition_sizes), input_size_per_partition)
            # vLLM cuts it as any weight of which it packs so many rows together.
            layer.weight = PackedvLLMParameter(
                data=torch.empty(shape, dtype=form.dtype, device=layer.weight.device),
                input_dim=form.k_axis,
                output_dim=0,
                packed_dim=0,
                packed_factor=form.units["n"],
                weight_loader=layer.weight.weight_loader,
            )
        loading.accept_floats(layer, "weight", "weight_scale", self.quantize)
        if input_size_per_partition != input_size:
            _check_split(layer, input_size, self.bits)
            layer.reduce_results = False
            group = parallel_state.get_tp_group().unique_name
            layer.scheme.kernel = _SplitKernel(kernel.config, kernel.layer_param_names, group, input_size)
            layer.scheme.kernel.form, layer.scheme.kernel.activation = form, kernel.activation


class _SplitKernel(SkudaInt8ScaledMMLinearKernel):
    """The kernel of a layer of which each rank holds columns, (N, K / ranks)."""

    def __init__(self, c: Int8ScaledMMLinearLayerConfig, layer_param_names: Sequence[str], group: str, k: int) -> None:
        super().__init__(c, layer_param_names)
        self.group, self.k = group, k

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the whole output, (..., N), on every rank for its columns of the input, (..., K / ranks)."""
        del bias  # vLLM gives it to the first rank only
        output = self._whole(layer, x.reshape(-1, x.shape[-1]))
        return output.reshape(*x.shape[:-1], output.shape[-1])

    def gated(self, layer: nn.Module, gate_up: Tensor) -> Tensor:
        """Return the whole output, (M, N), for SiLU of the first half of each row, times the second half."""
        rows, largest = _OPS.silu_mul_amax.default(gate_up=gate_up, nonfinite=self.activation.nonfinite)
        return self._whole(layer, rows, largest)

    def _whole(self, layer: Any, x: Tensor, largest: Tensor | None = None) -> Tensor:
        weight, weight_scale, scale, zero_point, _ = self._get_layer_params(layer)
        return product_of_columns(
            x,
            self.form.operand(weight, weight_scale.shape[0], x.shape[-1]),
            weight_scale,
            lambda part, how: _OPS.all_reduce.default(part, how, self.group),
            k=self.k,
            bias=None if layer.skip_bias_add else layer.bias,
            input_scale=scale if self.config.is_static_input_scheme else None,
            zero=layer.skuda_zero if self.config.is_static_input_scheme and zero_point is None else None,
            zero_point=zero_point,
            activation=self.activation,
            fields=self.form.fields,
            largest=largest,
        )


def _check_cuts(layer: nn.Module, form: WeightFormat, parts: Sequence[int], n: int, k_of_rank: int, k: int) -> None:
    """Refuse a layer whose parts, or ranks, do not begin where codes can be cut."""
    name = layer.prefix or type(layer).__name__
    unit, of_k = form.units["n"], form.units["k"]
    if sum(parts) != n or len(parts) > 1:
        for rows in parts:
            if rows % unit:
                rule = f"have multiples of {unit} with {form.name} weights, or be ignored"
                _refuse(name, f"a part of {rows} rows on a rank", rule)
    if k_of_rank != k and k_of_rank % of_k:
        rule = f"have a multiple of {of_k} with {form.name} weights, or be ignored"
        _refuse(name, f"a K of {k_of_rank} on a rank", rule)


def _check_split(layer: nn.Module, k: int, bits: int) -> None:
    """Refuse a layer whose ranks hold columns, if they cannot exchange its sums or others expect parts of its output.

    Reductions of vLLM that are fused with a norm are turned off. They find none after these layers, and after others
    their norm has other bits than that of one rank.
    """
    name, whole = layer.prefix or type(layer).__name__, "skuda makes the whole output on every rank"
    if not isinstance(layer, RowParallelLinear):
        _refuse(name, f"a {type(layer).__name__} split along K", "be a RowParallelLinear, or be ignored")
    if k > _LONGEST and bits == 8:
        _refuse(name, f"a K of {k}", f"have a K of at most {_LONGEST}, whose sums fit in s32, or be ignored")
    if not layer.reduce_results:
        _refuse(name, "reduce_results=False", f"be ignored: the model adds up parts later, and {whole}")
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    if config.lora_config is not None:
        _refuse("enable_lora", "True", f"be left out with several ranks: adapters are added to parts, and {whole}")
    passes = config.compilation_config.pass_config
    for field in ("enable_sp", "fuse_gemm_comms"):
        if getattr(passes, field, False):
            _refuse(f"pass_config.{field}", "True", f"be off: it replaces reductions of vLLM, and {whole}")
    if passes.fuse_allreduce_rms:
        passes.fuse_allreduce_rms = False
        logger.info_once("fuse_allreduce_rms is off: its norm has other bits than that of one rank")


def _refuse(field: str, had: str, rule: str) -> NoReturn:
    raise InvalidProblem("quantization='skuda'", field, had, rule)


def _all_reduce(input: Tensor, how: str, group: str) -> Tensor:
    """Return the maximum or the sum of the tensors of all ranks, element by element.

    vLLM's own op only sums, and gives small tensors to a kernel that takes no s32.
    """
    ranks = parallel_state._groups[group]()  # noqa: SLF001  where vLLM's own ops look it up
    given, op = input.contiguous(), _REDUCTIONS[how]
    nccl = getattr(ranks.device_communicator, "pynccl_comm", None)
    found: Tensor | None = None if nccl is None else nccl.all_reduce(given, op=op)  # None if it is disabled
    if found is None:
        found = given.clone()
        distributed.all_reduce(found, op, group=ranks.device_group)
    return found


def _fake(input: Tensor, how: str, group: str) -> Tensor:
    del how, group
    return torch.empty_like(input, memory_format=torch.contiguous_format)


with registering("all_reduce") as _library:
    _library.define("all_reduce(Tensor input, str how, str group) -> Tensor", tags=TAGS)
    for _key in ("CPU", "CUDA"):
        _library.impl("all_reduce", _all_reduce, _key)
    torch.library.register_fake("skuda::all_reduce", _fake, lib=_library)
