"""The head of vLLM as int8, with logits in f32: a row has the bits of skuda's op on whole tensors, in any batch."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import vllm_layers
from support import fresh
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm_layers import default_dtype, described, memory, ready, reloading

from skuda.registry.errors import InvalidProblem
from skuda.torch.formats import quantizer
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.ops.tensor_op import OPS
from skuda.vllm import head, linear_kernel
from skuda.vllm.config import SkudaVllmConfig
from skuda.vllm.head import SkudaHeadMethod

VOCABULARY, K = 100, 64
"""vLLM pads the vocabulary to 128 rows."""


def config(**more):
    return SkudaVllmConfig.from_config({"quant_method": "skuda", "head": True} | more)


def made(dtype=torch.bfloat16, quantization=None):
    with default_dtype(dtype):
        found = ParallelLMHead(VOCABULARY, K, quant_config=quantization or config(), prefix="lm_head")
    assert type(found.quant_method) is SkudaHeadMethod
    return found


def load(layer, **tensors):
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor)


def drawn(rng, rows=VOCABULARY, dtype=torch.bfloat16):
    return torch.from_numpy(rng.standard_normal((rows, K))).to(dtype)


def logits(layer, x):
    return LogitsProcessor(VOCABULARY)(layer, x)


def expected(x, weight, weights="int8"):
    codes, scale = quantizer("head", weights)(weight)
    return torch.ops.skuda.quantized_linear(x, codes, scale, output_element="f32")


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_with_a_nan_is_nan_in_an_exact_model(served, monkeypatch, exact):
    given = SimpleNamespace(quant_config=config(exact=exact))
    monkeypatch.setattr(linear_kernel, "get_current_vllm_config_or_none", lambda: given)
    rng, scheme = fresh(exact), {"dynamic": True, "symmetric": True, "per_channel": True}
    head, layer = made(), vllm_layers.made("qkv", torch.bfloat16, vllm_layers.quantization(**scheme))
    load(head, weight=drawn(rng))
    vllm_layers.load(layer, vllm_layers.checkpoint("qkv", rng, **scheme))
    ready(head)
    ready(layer)
    x = torch.from_numpy(rng.standard_normal((3, vllm_layers.K))).to(torch.bfloat16)
    x[1, 7] = torch.nan
    for found in (logits(head, x[:, :K]), layer(x)[0]):
        assert found.isnan().any(1).tolist() == found.isnan().all(1).tolist() == [False, exact, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("described", [{}, {"weights": "int4"}, described()])
def test_logits_are_those_of_the_op_in_any_batch(served, dtype, described):
    rng = fresh(dtype, *described)
    layer, weight = made(dtype, config(**described)), drawn(rng, dtype=dtype)
    load(layer, weight=weight)
    ready(layer)
    x = drawn(rng, 9, dtype)
    found = logits(layer, x)
    assert found.dtype is torch.float32
    assert torch.equal(found.view(torch.int32), expected(x, weight, described.get("weights", "int8")).view(torch.int32))
    for row in range(9):
        assert torch.equal(logits(layer, x[row : row + 1]).view(torch.int32), found[row : row + 1].view(torch.int32))


@pytest.mark.parametrize("form", ["codes", "floats"])
@pytest.mark.parametrize("reload", [True, False])
def test_new_weights_land_in_the_same_memory(served, form, reload):
    rng = fresh(form, reload)
    layer = made()
    layerwise.record_metadata_for_reloading(layer)
    load(layer, weight=drawn(rng))
    ready(layer)
    places, weight, x = memory(layer), drawn(rng), drawn(rng, 3)
    codes, scale = quantized_weight(weight)
    new = {"weight": weight} if form == "floats" else {"weight": codes, "weight_scale": scale.view(-1, 1)}
    with reloading(layer) if reload else nullcontext():
        load(layer, **new)
    assert memory(layer) == places
    assert torch.equal(logits(layer, x), expected(x, weight))


def test_the_embedding_stays_floating(served):
    found = VocabParallelEmbedding(VOCABULARY, K, quant_config=config(), prefix="embed")
    assert type(found.quant_method) is UnquantizedEmbeddingMethod


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("reload", [True, False])
def test_an_embedding_that_is_the_head_stays_floating_and_has_codes_beside_it(served, monkeypatch, weights, reload):
    rng, text = fresh(weights, reload), SimpleNamespace(tie_word_embeddings=True)
    monkeypatch.setattr(get_current_vllm_config(), "model_config", SimpleNamespace(hf_text_config=text))
    with default_dtype(torch.bfloat16):
        embedding, head = (
            kind(VOCABULARY, K, quant_config=config(weights=weights), prefix="it")
            for kind in (VocabParallelEmbedding, ParallelLMHead)
        )
    assert head.tie_weights(embedding) is embedding
    assert head.weight.numel() == 0
    layerwise.record_metadata_for_reloading(embedding)
    load(embedding, weight=drawn(rng))
    ready(embedding)
    places, weight, x = memory(embedding), drawn(rng), drawn(rng, 3)
    monkeypatch.setattr(get_current_vllm_config(), "model_config", None)
    for new in (weight, drawn(rng)):
        with reloading(embedding) if reload else nullcontext():
            load(embedding, weight=new)
        assert memory(embedding) == places
        assert torch.equal(embedding(torch.arange(VOCABULARY)), new)
        assert torch.equal(logits(embedding, x).view(torch.int32), expected(x, new, weights).view(torch.int32))


def test_a_card_without_kernels_and_other_values_are_refused(served, monkeypatch):
    with pytest.raises(InvalidProblem, match="head"):
        config(head="yes")
    kernel = linear_kernel.SkudaInt8ScaledMMLinearKernel
    monkeypatch.setattr(kernel, "is_supported", classmethod(lambda cls, compute_capability=None: (False, "no card")))
    with pytest.raises(InvalidProblem, match="no card"):
        made()


def test_kernels_get_ready_for_every_number_of_rows(served, monkeypatch):
    monkeypatch.setattr(get_current_vllm_config().scheduler_config, "max_num_batched_tokens", 30)
    layer, seen = made(), []
    load(layer, weight=drawn(fresh()))
    of = {"weight_q": torch.empty(128, K, dtype=torch.int8), "weight_scale": torch.empty(128, 1)}
    want = OPS["quantized_linear"].problem(activation=drawn(fresh(), 1), output_element="f32", **of)
    monkeypatch.setattr(head, "want", lambda problems, most: seen.append((problems, most)))
    ready(layer)
    assert not seen
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True, raising=False)
    ready(layer)
    assert seen == [([want], 30)]
