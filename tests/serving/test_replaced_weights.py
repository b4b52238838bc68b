"""A trainer replaces the weights of a whole model of vLLM, by the names that its own checkpoint has."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import fresh
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm_layers import default_dtype, described, memory, ready, reloading

import skuda.torch
from skuda.registry import InvalidProblem
from skuda.torch.certification.weights import digests, first_difference
from skuda.torch.exact.exact import exact_
from skuda.torch.formats.int4 import StoredPacked
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.hf.scheme import ActivationScheme, Scheme, SchemeGroup
from skuda.torch.int4 import int4_weight
from skuda.vllm import certified

GROUP = 64
OWN = Scheme((SchemeGroup(("Linear",), ActivationScheme.DYNAMIC, StoredPacked(GROUP)),), ("lm_head",), own=True)
FOUR = {"quant_method": "skuda", "weights": "int4", "group_size": GROUP}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SIZES,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "dtype": "bfloat16",
}
LINEAR = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
LINEAR = {f"self_attn.{name}": shape for name, shape in LINEAR.items()}
LINEAR |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}


@pytest.fixture
def model(served, tmp_path, monkeypatch):
    """Return a function that makes a Llama of two layers without weights, by default for a checkpoint with codes."""
    monkeypatch.setattr(Attention, "forward", lambda self, query, key, value: query)  # the real one needs a GPU

    def new(quantization=None, form=coded, **overrides):
        codes = form if isinstance(form, dict) else {coded: described(), packed: OWN.fields(), four: FOUR}.get(form)
        more = {} if codes is None else {"quantization_config": codes}
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | more))
        more = {"quantization": quantization, "hf_overrides": overrides, "max_model_len": 64}
        of_model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", **more)
        whole = VllmConfig(model_config=of_model)
        whole.compilation_config.mode = 0
        with set_current_vllm_config(whole), default_dtype(torch.bfloat16):
            return LlamaForCausalLM(vllm_config=whole, prefix="")

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


def coded(weights, quantized=quantized_weight):
    """The same weights as a checkpoint of compressed-tensors."""
    found = {}
    for name, weight in weights.items():
        if "_proj" not in name:
            found[name] = weight
            continue
        found[name], scale = quantized(weight)
        found[f"{name}_scale"] = scale.view(-1, 1)
    return found


def packed(weights):
    """The same weights in 4 bits, as a checkpoint of skuda."""

    def quantized(weight):
        found = int4_weight(weight, GROUP)
        return found.packed(GROUP), found.channel_scale

    return coded(weights, quantized)


def four(weights):
    """The same weights for a model that quantizes them to 4 bits."""
    return weights


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
        *itertools.product((None,), (packed, four), (packed, four), ("load_weights", "reload")),
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
    right = packed if first in (packed, four) else coded
    other = model(form=right)
    other.load_weights(right(new).items())
    got, want = outputs(given), outputs(processed(other))
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert not torch.equal(got, before)


def test_its_weights_have_the_digests_of_the_model_of_torch_or_the_first_that_differs_is_named(model):
    """Also where layers are joined, have biases, or a vocabulary is padded."""
    rng, more = fresh(), {"vocab_size": 100, "attention_bias": True}
    own = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(CONFIG | more))).bfloat16()
    weights = {
        name: torch.from_numpy(rng.standard_normal(w.shape) / 8).bfloat16() for name, w in own.state_dict().items()
    }
    own.load_state_dict(weights)
    skuda.torch.quantize_(own, skuda.torch.Dynamic(), lambda *_: True)
    exact_(own)
    given = model("skuda", dict, **more, quantization_config={"quant_method": "skuda", "head": True})
    given.load_weights(weights.items())
    known, found = digests(own.state_dict().items()), certified.weights_of(processed(given))
    assert first_difference(known, found, "vLLM") == f"; all {len(found)} tensors of weights are the same"
    given.model.layers[1].self_attn.qkv_proj.bias.data[-1] += 1
    found = certified.weights_of(given)
    assert "first in the weights model.layers.1.self_attn.v_proj.bias: vLLM has bfloat16 [32] " in first_difference(
        known, found, "vLLM"
    )
    assert first_difference(known, found | {"x": ""}, "vLLM") != first_difference(known, known | {"x": ""}, "vLLM")


def test_an_engine_knows_what_a_certificate_asks_for(tmp_path):
    given = certified.options(str(tmp_path), "bfloat16", 200)
    EngineArgs(**given, max_num_batched_tokens=64, tensor_parallel_size=2)

    def generate(prompts, asked, *, use_tqdm):
        """Answer requests that read the cache and ask for one token's log-probability, here minus itself."""
        assert {(one.skip_reading_prefix_cache, one.num_logprobs) for one in asked} == {(False, 1)}
        new = [{token: SimpleNamespace(logprob=-token) for token in one.logprob_token_ids} for one in asked]
        return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=[one])], num_cached_tokens=128) for one in new]

    assert certified._warm(SimpleNamespace(generate=generate), [[5, 6, 7], [8, 9]]) == [[-6, -7], [-9]]


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


@pytest.mark.parametrize(
    ("save", "eight"), [("save_pretrained", ""), ("save", ""), ("save", "o|gate|up"), ("save", "q")]
)
def test_a_checkpoint_of_skuda_has_the_bits_that_its_writer_has(model, tmp_path, save, eight):
    """Layers may have weights of two formats, but not those that vLLM joins."""
    rng = fresh(save, eight)
    writer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).bfloat16()
    weights = {name: torch.from_numpy(rng.standard_normal(w.shape) / 8) for name, w in writer.state_dict().items()}
    writer.load_state_dict(weights)
    rule = skuda.torch.Dynamic(weights="int4", group_size=GROUP)
    if eight:
        skuda.torch.quantize_(
            writer, skuda.torch.Dynamic(), lambda _, name: re.search(rf"\.({eight})_", name) is not None
        )
    skuda.torch.quantize_(writer, rule, lambda _, name: name != "lm_head")
    folder = tmp_path / "written"
    if save == "save":
        skuda.torch.save(writer, folder)
    else:
        writer.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    if eight == "q":
        with pytest.raises(InvalidProblem, match="vLLM joins"):
            model(None, described)
        return
    given = model(None, described)
    given.load_weights(load_file(folder / "model.safetensors").items())
    processed(given)
    layers, own = dict(given.named_modules()), dict(writer.named_modules())
    for joined, names in {"qkv": "qkv", "gate_up": ("gate", "up"), "o": "o", "down": ("down",)}.items():
        at = f"model.layers.1.{'self_attn' if joined in ('qkv', 'o') else 'mlp'}"
        x = torch.from_numpy(rng.standard_normal((5, 96 if joined == "down" else 64))).bfloat16()
        want = torch.cat([own[f"{at}.{name}_proj"](x) for name in names], -1)
        assert torch.equal(layers[f"{at}.{joined}_proj"](x)[0], want)
