"""vLLM's exact model has the bits of `skuda.torch`'s: of the same checkpoint, in every batch, chunk and cache."""

from __future__ import annotations

import copy
import dataclasses
import json
from importlib import import_module

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import fresh
from torch import nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding as vllm_rope
from vllm.model_executor.layers.attention import attention as vllm_attention_layer
from vllm.model_executor.model_loader.reload import layerwise
from vllm_attention import Server, config_of
from vllm_layers import default_dtype, ready, reloading

import skuda.torch as st
from skuda.registry.errors import InvalidProblem
from skuda.torch.exact import exact_
from skuda.vllm import certified
from skuda.vllm.attention import CACHE_DTYPE, ExactAttentionBackend
from skuda.vllm.exact import check as check_exact
from skuda.vllm.exact import complete
from skuda.vllm.exact_model import ExactDecoderLayer, make_exact

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SIZES |= {"vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 512, "dtype": "bfloat16"}
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 128, "rope_theta": 10000.0}
LENGTHS = {"a": 300, "b": 131, "c": 5}
FOUR = {"weights": "int4", "group_size": 64}
WIDE = {"weights": "int16", "activations": "int16"}
MIXED = {"activations": "int16"}


@pytest.fixture
def server(served, tmp_path, monkeypatch):
    """Return a function that makes an exact model of vLLM from a folder, and a way to serve it."""
    monkeypatch.setattr(vllm_attention_layer, "get_attn_backend", lambda *_, **__: ExactAttentionBackend)

    def new(folder, change=None, *, own=False, **described):
        given = {"skip_tokenizer_init": True, "dtype": "bfloat16", "quantization": "skuda", "max_model_len": 512}
        if not own:
            given["hf_overrides"] = {"quantization_config": {"quant_method": "skuda", "exact": True, **described}}
        of_model = ModelConfig(str(folder), **given)
        config, kind = config_of(model_config=of_model), of_model.hf_config.model_type
        config.compilation_config.mode, config.cache_config.sliding_window = 0, of_model.get_sliding_window()
        kind = getattr(import_module(f"vllm.model_executor.models.{kind}"), f"{FAMILIES[kind]}ForCausalLM")
        with set_current_vllm_config(config), default_dtype(torch.bfloat16):
            model = kind(vllm_config=config)
            layerwise.record_metadata_for_reloading(model)
            model.load_weights(load_file(folder / "model.safetensors").items())
            for module in model.modules():
                if getattr(module, "quant_method", None) is not None:
                    ready(module)
            if change is not None:
                change(model, config)
            make_exact(model, config)
        return Server(fresh(), (), config=config, model=model)

    return new


def floating(kind, folder, *, tied=False, **more):
    """A model of transformers with random weights, also in a folder."""
    rng = fresh(kind, tied, more)
    made = getattr(transformers, f"{FAMILIES[kind]}Config")(**SIZES | more, tie_word_embeddings=tied)
    model = getattr(transformers, f"{FAMILIES[kind]}ForCausalLM")(made).bfloat16().eval()
    for name, weight in model.named_parameters():
        drawn = rng.standard_normal(weight.shape) / 8 + (weight.dim() == 1 and "norm" in name)
        weight.data.copy_(torch.from_numpy(drawn))
    model.save_pretrained(folder)
    return getattr(transformers, f"{FAMILIES[kind]}ForCausalLM").from_pretrained(folder)  # .bfloat16() rounds the rope


def exact(model, **weights):
    made = copy.deepcopy(model)
    st.quantize_(made, st.Dynamic(**weights), lambda *_: True)
    exact_(made)
    return made


def drawn(lengths):
    rng = fresh()
    return {name: torch.from_numpy(rng.integers(0, 100, (1, length))) for name, length in lengths.items()}


def check(made, trainer, lengths=LENGTHS):
    """Compare logits of prompts together, in chunks and step by step with those of the trainer."""
    tokens = drawn(lengths)
    made.step(tokens, {"a": 200, "b": 130})
    made.step(tokens, {"b": 1, "c": 4, "a": 99})
    made.step(tokens, {"c": 1, "a": 1})
    with torch.no_grad():
        for name, ids in tokens.items():
            # Without a mask, transformers asks torch for a stream, which torch built for CUDA has not without a driver.
            got, want = made.whole(name), trainer(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            assert got.dtype is want.dtype is torch.float32
            assert torch.equal(got.view(torch.int32), want.view(torch.int32)), name


@pytest.mark.parametrize("weights", [{}, FOUR, WIDE])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"tied": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 100}),
        ("qwen2", {"tied": True}),
        ("qwen3", {}),
    ],
)
def test_a_floating_checkpoint_has_the_bits_of_the_trainer(server, tmp_path, kind, more, weights):
    model = floating(kind, tmp_path, **more)
    check(server(tmp_path, **weights), exact(model, **weights))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [{}, FOUR, FOUR | {"ignore": "lm_head"}, WIDE, FOUR | MIXED, MIXED])
def test_what_an_exact_model_saves_is_served_with_its_bits(server, tmp_path, weights, tied):
    """By transformers and by skuda, with a head of the same or another format."""
    weights = dict(weights)
    model = floating("llama", tmp_path / "floats", tied=tied)
    if weights.pop("ignore", ""):
        st.quantize_(model, st.Dynamic(), lambda _, name: name == "lm_head")
    trainer = exact(model, **weights)
    for number, save in enumerate((trainer.save_pretrained, lambda folder: st.save(trainer, folder))):
        save(tmp_path / str(number))
        check(server(tmp_path / str(number), own=True), trainer)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_compressed_tensors_is_served_with_its_bits_and_its_head_is_quantized(server, tmp_path, tied):
    trainer = floating("qwen3", tmp_path / "floats", tied=tied)
    st.quantize_(trainer, st.Dynamic())
    trainer.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"
    check(server(tmp_path, **described), exact(trainer))


def test_attention_and_cache_follow_from_exact_where_the_user_chose_none(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    floating("qwen3", tmp_path)

    def made(**more):
        given = {"model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 256, **more}
        return EngineArgs(**given).create_engine_config()

    exact = {"hf_overrides": {"quantization_config": {"quant_method": "skuda", "exact": True}}}
    explicit = {"quantization": "skuda", "attention_backend": "CUSTOM", "kv_cache_dtype": CACHE_DTYPE}
    found = made(**exact)
    assert found.compute_hash() == made(**exact, **explicit).compute_hash() != made().compute_hash()
    for config in (found, made(**certified.options(str(tmp_path), "bfloat16", 200))):
        check_exact(config)
        assert config.cache_config.cache_dtype == CACHE_DTYPE
    for own in ({"attention_backend": "TRITON_ATTN"}, {"kv_cache_dtype": "fp8"}):
        with pytest.raises(InvalidProblem, match=next(iter(own))):
            check_exact(made(**exact, **own))
    assert made(quantization="skuda").cache_config.cache_dtype == "auto"
    # vLLM captures nothing on a CPU, so this is what it would start from.
    config = made(**exact, max_num_seqs=16)
    for own, sizes in ((None, [1, 2, 4, 8, 16, 24, 32, *range(640, 2049, 128)]), ([1, 8], [1, 8])):
        config.compilation_config.cudagraph_capture_sizes = own
        config.compilation_config.max_cudagraph_capture_size = None
        complete(config)
        assert config.compilation_config.cudagraph_capture_sizes == sizes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weights", [{}, FOUR, WIDE])
def test_weights_that_vllm_transfers_have_the_bits_of_their_trainer(server, tmp_path, weights, tied):
    floating("qwen3", tmp_path, tied=tied)
    made, folder = server(tmp_path, **weights), tmp_path / "new"
    trained = floating("qwen3", folder, tied=tied, initializer_range=0.5)
    with reloading(made.model):  # as vLLM's engines of weight transfer do
        made.model.load_weights(load_file(folder / "model.safetensors").items())
    check(made, exact(trained, **weights))


def other_rope(model, config):
    model.model.layers[1].self_attn.rotary_emb.cos_sin_cache.mul_(1.1)


def interleaved(model, config):
    model.model.layers[1].self_attn.rotary_emb.is_neox_style = False


def scaled_queries(model, config):
    own = model.model.layers[1].self_attn
    own.do_llama_4_scaling, own.llama_4_scaling_beta, own.llama_4_scaling_original_max_position_embeddings = True, 1, 1


def other_layer(model, config):
    layer = model.model.layers[1]
    forward = type(layer).forward
    kind = type("Other", (type(layer),), {"forward": lambda self, at, x, r, **k: forward(self, at, x * 2, r, **k)})
    layer.__class__ = kind


def sizes_with_which_nothing_runs(model, config):
    model.model.layers[1].self_attn.kv_size = -1


def other_activation(model, config):
    model.model.layers[1].mlp.act_fn = nn.Sigmoid()


def other_norm(model, config):
    model.model.layers[1].input_layernorm.variance_size_override = 64


def norms_that_differ(model, config):
    model.model.layers[1].self_attn.q_norm.variance_epsilon = 1e-3


def scaled_logits(model, config):
    model.logits_processor.scale = 2.0


def other_window(model, config):
    model.model.layers[1].self_attn.attn.impl.window = 7


def other_family(model, config):
    config.model_config.hf_config.model_type = "gemma"


def static(model, config):
    old = model.model.layers[1].mlp.down_proj.scheme.kernel.config
    model.model.layers[1].mlp.down_proj.scheme.kernel.config = dataclasses.replace(old, is_static_input_scheme=True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (other_rope, "model.layers.1.self_attn.rotary_emb"),
        (interleaved, "model.layers.1.self_attn.rotary_emb"),
        (scaled_queries, "model.layers.1"),
        (other_layer, "model.layers.1"),
        (sizes_with_which_nothing_runs, "model.layers.1"),
        (other_activation, "model.layers.1.mlp.act_fn"),
        (other_norm, "model.layers.1.input_layernorm"),
        (norms_that_differ, "model.layers.1.self_attn"),
        (other_window, "model.layers.1.self_attn.attn"),
        (static, "model.layers.1.mlp.down_proj"),
        (scaled_logits, "logits_processor"),
        (other_family, "model"),
    ],
)
def test_what_the_definition_does_not_have_is_refused_by_name(server, tmp_path, monkeypatch, change, field):
    floating("qwen3" if change is norms_that_differ else "mistral", tmp_path)
    monkeypatch.setattr(vllm_rope, "_ROPE_DICT", {})  # vLLM keeps ropes for later models
    seen = []

    def changed(model, config):
        change(model, config)
        seen.append(model)

    with pytest.raises(InvalidProblem) as found:
        server(tmp_path, changed)
    assert found.value.field == field
    assert not any(isinstance(module, ExactDecoderLayer) for module in seen[0].modules())
