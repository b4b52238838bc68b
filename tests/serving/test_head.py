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


def expected(x, weight):
    codes, scale = quantized_weight(weight)
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
def test_logits_are_f32_and_those_of_the_op_alone_and_in_a_batch(served, dtype, described):
    rng = fresh(dtype, *described)
    layer, weight = made(dtype, config(**described)), drawn(rng, dtype=dtype)
    load(layer, weight=weight)
    ready(layer)
    x = drawn(rng, 9, dtype)
    found = logits(layer, x)
    assert found.dtype is torch.float32
    assert torch.equal(found.view(torch.int32), expected(x, weight).view(torch.int32))
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


def test_a_tied_head_is_refused_wherever_the_model_ties_it(served, monkeypatch):
    text = SimpleNamespace(tie_word_embeddings=True)
    monkeypatch.setattr(get_current_vllm_config(), "model_config", SimpleNamespace(hf_text_config=text))
    for kind in (ParallelLMHead, VocabParallelEmbedding):
        with pytest.raises(InvalidProblem, match="tie_word_embeddings"):
            kind(VOCABULARY, K, quant_config=config(), prefix="it")
        kind(VOCABULARY, K, quant_config=SkudaVllmConfig(), prefix="it")
    text.tie_word_embeddings = False
    config().get_quant_method(VocabParallelEmbedding(VOCABULARY, K), "it")


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
