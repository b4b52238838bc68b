"""The head of ``quantization="skuda"`` if its config says ``head``: codes as in linear layers, logits in f32.

A head that has the weight of the embedding has codes of its own beside it, made whenever the embedding is loaded. A row
of logits is that of `quantized_linear` on whole tensors, so it depends neither on the batch nor on the number of ranks,
which each have a part of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.utils import set_weight_attrs

from skuda.registry.errors import InvalidProblem
from skuda.serving.preparation import want
from skuda.torch.formats import TO_INT8, Quantizer, WeightFormat
from skuda.torch.linear.activation import PerRow
from skuda.torch.ops.tensor_op import OPS
from skuda.vllm import loading
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel, nonfinite

_WEIGHT, _SCALE, _CODES, _CODES_SCALE = "weight", "weight_scale", "head_codes", "head_scale"


class SkudaHeadMethod(QuantizeMethodBase):
    """Makes, loads and runs the weights of a head. Floating weights are quantized while they are loaded.

    Parameters
    ----------
    quantize : Quantizer
        What quantizes floating weights. Its format is that of the codes.
    bits : int
        Those of the codes of hidden states.
    """

    def __init__(self, quantize: Quantizer = TO_INT8, bits: int = 8) -> None:
        self.quantize, self.bits = quantize, bits

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Any,
    ) -> None:
        """Make the codes and scales of a rank's part of the vocabulary.

        Raises
        ------
        InvalidProblem
            If skuda has no kernel for this card.
        """
        del input_size, output_size, weight_loader  # vLLM's asserts that whole units of rows are there
        self.product = _Product(params_dtype, self.quantize.format, self.bits)
        codes, scale = self.product.empty(sum(output_partition_sizes), input_size_per_partition)
        for name, value, unit in ((_WEIGHT, codes, self.quantize.format.units["n"]), (_SCALE, scale, 1)):
            parameter = nn.Parameter(value, requires_grad=False)
            loader = MethodType(partial(_load_rows, unit), layer)
            set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": loader})
            layer.register_parameter(name, parameter)
        loading.accept_floats(layer, _WEIGHT, _SCALE, self.quantize)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize what vLLM's layerwise reload brought, and let the kernels for every number of rows get ready."""
        loading.accept_floats(layer, _WEIGHT, _SCALE, self.quantize)
        loading.quantize_reloaded(layer, _WEIGHT)
        self.product.want(layer.weight, layer.weight_scale)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits, f32 of shape (rows, N), for hidden states of shape (rows, K)."""
        return self.product(x, layer.weight, layer.weight_scale, bias)


class SkudaTiedMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Makes and runs an embedding that is the head, too: its weight stays floating, and the head has codes of it.

    Parameters
    ----------
    quantize, bits
        As in `SkudaHeadMethod`.
    """

    def __init__(self, quantize: Quantizer = TO_INT8, bits: int = 8) -> None:
        self.quantize, self.bits = quantize, bits

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make the weight, the codes and scales; of a head nothing, since the embedding takes its place."""
        if isinstance(layer, ParallelLMHead):
            output_partition_sizes = [0]
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        self.product = _Product(params_dtype, self.quantize.format, self.bits)
        held = self.product.empty(sum(output_partition_sizes), input_size_per_partition)
        for name, value in zip((_CODES, _CODES_SCALE), held, strict=True):
            layer.register_buffer(name, value)  # persistent: a reload of vLLM copies no others
        loader = loading.of_a_layer(layer.weight, layer)

        def load(layer: Any, param: Tensor, loaded_weight: Tensor, *shard: Any, **named: Any) -> None:
            loader(layer, param, loaded_weight, *shard, **named)
            if not param.is_meta:
                self._code(layer, param)

        layer.weight.weight_loader = MethodType(load, layer)

    def _code(self, layer: Any, weight: Tensor) -> None:
        codes, scale = self.quantize(weight.data)
        layer.head_codes.copy_(codes)
        layer.head_scale.copy_(scale.view(-1, 1))

    def tie_weights(self, layer: nn.Module, embed_tokens: Any) -> Any:
        """Return the embedding, which is the head."""
        del layer
        return embed_tokens

    def process_weights_after_loading(self, layer: Any) -> None:
        """Code what was loaded, and let the kernels for every number of rows get ready."""
        self._code(layer, layer.weight)
        self.product.want(layer.head_codes, layer.head_scale)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits, f32 of shape (rows, N), for hidden states of shape (rows, K)."""
        return self.product(x, layer.head_codes, layer.head_scale, bias)


class _Product:
    """Returns logits, and names its kernels in advance.

    Parameters
    ----------
    dtype : torch.dtype
        That of hidden states.
    form : WeightFormat
    bits : int
        Those of the codes of hidden states.

    Raises
    ------
    InvalidProblem
        If skuda has no kernel for this card.
    """

    def __init__(self, dtype: torch.dtype, form: WeightFormat, bits: int) -> None:
        supported, why = SkudaInt8ScaledMMLinearKernel.is_supported()
        if not supported:
            raise InvalidProblem("quantization_config", "head", "True", f"be left out: {why}, for quantization='skuda'")
        how = PerRow(nonfinite(), "f32", bits=bits)
        self.dtype, self.form, self.fields = dtype, form, {**how.fields(dtype), **form.fields}
        config = get_current_vllm_config_or_none()
        # A row for each sequence that gets a token, but for log-probabilities of prompts a row for each token.
        self.most = 1 if config is None else max(1, config.scheduler_config.max_num_batched_tokens)

    def empty(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales of zeros."""
        codes = torch.zeros(self.form.shape(n, k) if n else (0,), dtype=self.form.dtype)
        return codes, torch.zeros(n, 1, dtype=torch.float32)

    def __call__(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.form.operand(codes, len(scale), x.shape[-1])
        found: Tensor = torch.ops.skuda.quantized_linear.default(x, weight, scale, None, bias, **self.fields)
        return found

    def want(self, codes: Tensor, scale: Tensor) -> None:
        """Let the kernels for every number of rows get ready."""
        if codes.is_cuda:
            k = self.form.shape_of_weight(codes, len(scale), codes.shape[-1])[1]
            given = {"weight_q": self.form.operand(codes, len(scale), k), "weight_scale": scale}
            given = {name: torch.empty_like(tensor, device="meta") for name, tensor in given.items()}
            given["activation"] = torch.empty(1, k, dtype=self.dtype, device="meta")
            want([OPS["quantized_linear"].problem(**self.fields, **given)], self.most)


def _load_rows(unit: int, layer: Any, param: Tensor, loaded_weight: Tensor) -> None:
    """Write a rank's part of codes, or scales, of which `unit` rows lie together. Rows beyond the vocabulary are 0."""
    indices, rows = layer.shard_indices, -(-layer.org_vocab_size // unit)
    start, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
    if len(loaded_weight) != rows or start % unit:
        had = f"{len(loaded_weight)} rows, of which this rank begins at {start / unit:g}"
        raise InvalidProblem("load_weights", "lm_head", had, f"have {rows} rows, and ranks that begin at one of them")
    part = loaded_weight[start // unit : -(-stop // unit)]
    param[: len(part)].data.copy_(part)
    param[len(part) :].data.fill_(0)


def is_tied() -> bool:
    """Whether the present config of vLLM says that the head has the weight of the embedding."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    return model is not None and bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
