"""A trainer replaces the weights of a whole model of vLLM, by the names that its own checkpoint has."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext

import pytest
import torch
from support import fresh
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm_layers import default_dtype, described, memory, ready, reloading

import skuda.torch

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
LINEAR = {f"self_attn.{name}": shape for name, shape in LINEAR.items()}
LINEAR |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


@pytest.fixture
def model(served, tmp_path, monkeypatch):
    """Return a function that makes a Llama of two layers without weights, by default for a checkpoint with codes."""
    monkeypatch.setattr(Attention, "forward", lambda self, query, key, value: query)  # the real one needs a GPU
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SIZES,
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "head_dim": 16,
        "dtype": "bfloat16",
    }
    number = iter(range(9))

    def new(quantization=None, form=coded, **overrides):
        codes = {"quantization_config": described()} if form is coded else {}
        (tmp_path / "config.json").write_text(json.dumps(config | codes))
        more = {"quantization": quantization, "hf_overrides": overrides, "max_model_len": 64}
        of_model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", **more)
        whole = VllmConfig(model_config=of_model)
        whole.compilation_config.mode = 0
        with set_current_vllm_config(whole), default_dtype(torch.bfloat16):
            return LlamaForCausalLM(vllm_config=whole, prefix=f"model{next(number)}")

    return new


def floats(rng):
    """The weights of a checkpoint in bf16."""

    def tensor(*shape):
        return torch.from_numpy(rng.standard_normal(shape) / 8).to(torch.bfloat16)

    found = {name: tensor(128, 64) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    found["model.norm.weight"] = tensor(64)
    for layer in ("model.layers.0", "model.layers.1"):
        found |= {f"{layer}.{name}.weight": tensor(*shape) for name, shape in LINEAR.items()}
        found |= {f"{layer}.{name}.weight": tensor(64) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def coded(weights):
    """The same weights as a checkpoint of compressed-tensors."""
    found = {}
    for name, weight in weights.items():
        if "_proj" not in name:
            found[name] = weight
            continue
        found[name], scale = skuda.torch.int8_linear.quantized_weight(weight)
        found[f"{name}_scale"] = scale.view(-1, 1)
    return found


def processed(model):
    for module in model.modules():
        if hasattr(module, "scheme"):
            ready(module)
    return model


def outputs(model):
    tokens = torch.arange(7)
    return model(tokens, tokens)


@pytest.mark.parametrize(
    ("quantization", "first", "form", "way"),
    [
        *itertools.product((None,), (coded,), (coded, dict), ("load_weights", "reload")),
        *itertools.product(("skuda",), (coded, dict), (coded, dict), ("load_weights", "reload")),
    ],
)
def test_new_weights_land_in_the_same_memory(model, quantization, first, form, way):
    rng = fresh(quantization, first.__name__, form.__name__, way)
    given = model(quantization, first)
    layerwise.record_metadata_for_reloading(given)
    given.load_weights(first(floats(rng)).items())
    processed(given)
    places, before, new = memory(given), outputs(given), floats(rng)
    with reloading(given) if way == "reload" else nullcontext():
        given.load_weights(form(new).items())
    assert memory(given) == places
    other = model()
    other.load_weights(coded(new).items())
    got, want = outputs(given), outputs(processed(other))
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert not torch.equal(got, before)


def test_a_floating_checkpoint_is_quantized_while_it_is_loaded(model):
    weights = floats(fresh())
    ignoring = {"quantization_config": {"quant_method": "skuda", "ignore": ["re:.*down_proj"]}}
    for overrides, kept in (({}, ()), (ignoring, ("down_proj",))):
        given = model("skuda", dict, **overrides)
        held = dict(given.named_parameters())
        kinds = {name.split(".")[-2] for name, tensor in held.items() if tensor.dtype is torch.int8}
        assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} - set(kept)  # before it is loaded
        assert {name for name in held if not name.endswith("_scale")} == given.load_weights(weights.items())
        assert torch.equal(held["lm_head.weight"][:128], weights["lm_head.weight"])
