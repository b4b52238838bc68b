"""The head of ``quantization="skuda"`` if its config says ``head``: int8 weights, and logits in f32.

A row of logits is that of `quantized_linear` on whole tensors, so it depends neither on the batch nor on the number of
ranks, which each have a part of the vocabulary.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from skuda.registry.errors import InvalidProblem
from skuda.serving.preparation import want
from skuda.torch.ops.tensor_op import OPS
from skuda.vllm import loading
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel, nonfinite

_WEIGHT, _SCALE = "weight", "weight_scale"


class SkudaHeadMethod(QuantizeMethodBase):
    """Makes, loads and runs the weights of a head. Floating weights are quantized while they are loaded."""

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
        del input_size, output_size
        supported, why = SkudaInt8ScaledMMLinearKernel.is_supported()
        if not supported:
            _refuse("True", f"be left out: {why}")
        n, config = sum(output_partition_sizes), get_current_vllm_config_or_none()
        self.fields = {"output_element": "f32", "nonfinite": nonfinite()}
        # A row for each sequence that gets a token, but for log-probabilities of prompts a row for each token.
        self.dtype, self.most = params_dtype, 0 if config is None else config.scheduler_config.max_num_batched_tokens
        codes = torch.zeros(n, input_size_per_partition, dtype=torch.int8)
        for name, value in ((_WEIGHT, codes), (_SCALE, torch.zeros(n, 1, dtype=torch.float32))):
            parameter = nn.Parameter(value, requires_grad=False)
            set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader})
            layer.register_parameter(name, parameter)
        loading.accept_floats(layer, _WEIGHT, _SCALE)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantize what vLLM's layerwise reload brought, and let the kernels for every number of rows get ready."""
        loading.accept_floats(layer, _WEIGHT, _SCALE)
        loading.quantize_reloaded(layer, _WEIGHT)
        weight: Any = layer.weight
        if weight.is_cuda:
            row = torch.empty(1, weight.shape[1], dtype=self.dtype, device="meta")
            held: dict[str, Any] = {"weight_q": weight, "weight_scale": layer.weight_scale}
            held = {name: torch.empty_like(tensor, device="meta") for name, tensor in held.items()}
            problem = OPS["quantized_linear"].problem(activation=row, **self.fields, **held)
            want([problem], max(1, self.most))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits, f32 of shape (rows, N), for hidden states of shape (rows, K)."""
        run = torch.ops.skuda.quantized_linear.default
        logits: Tensor = run(x, layer.weight, layer.weight_scale, None, bias, **self.fields)
        return logits


def check_untied() -> None:
    """Refuse a model whose head has the weight of the embedding, which stays floating.

    Raises
    ------
    InvalidProblem
        For a present config of vLLM that says so.
    """
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and getattr(model.hf_text_config, "tie_word_embeddings", False):
        _refuse("True for a model with tie_word_embeddings", "be left out: the embedding stays floating")


def _refuse(had: str, rule: str) -> NoReturn:
    raise InvalidProblem("quantization_config", "head", had, f"{rule}, for quantization='skuda'")
