"""LoRA of peft beside int8 layers: before and after quantization, trained, merged, saved and loaded."""

from __future__ import annotations

import copy
import itertools
import re
from functools import partial

import pytest
import torch
import transformers
from support import fresh, sampled
from tensors import calibrated, same
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, DynamicLinear, SmoothStatic, dequantize_, fold_, fuse_, quantize_
from skuda.torch.certification.certificate import certify
from skuda.torch.exact.exact import exact_
from skuda.torch.models.folded import FOLDED

peft = pytest.importorskip("peft")
pytest.importorskip("skuda.torch.hf.peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
"""peft reads it from transformers."""

TARGETS = ["q_proj", "down_proj"]
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(rng):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape) / 6))
    return model


def quantized(model):
    quantize_(model, Dynamic(), lambda _, name: "lm_head" not in name)
    return model


def with_lora(model, **more):
    return peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": TARGETS, "r": 4} | more))


def randomize(model, rng):
    """Draw the adapters, which start as zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape) / 8))
    return model


def drawn_ids(rng):
    return torch.from_numpy(rng.integers(0, SIZES["vocab_size"], (2, 6)))


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def close(found, want, least=0.999):
    return nn.functional.cosine_similarity(found, want, dim=-1).min() > least


@pytest.mark.parametrize("first", ["quantized", "adapters"])
def test_adapters_train_beside_a_frozen_int8_base(first):
    rng = fresh(first)
    model, ids = llama(rng), drawn_ids(rng)
    if first == "quantized":
        model = with_lora(quantized(model))
    else:
        model = with_lora(model)
        report = quantize_(model, Dynamic())
        adapters = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        left = {name: why for name, why in report.left.items() if "embed_tokens" not in name}
        assert set(left) == adapters
        assert all(".lora_" in name for name in adapters)
        assert set(left.values()) == {"it is an adapter beside a layer, and stays as it was trained"}
    wrapped = [layer for layer in model.modules() if hasattr(layer, "base_layer")]
    assert {type(layer.base_layer) for layer in wrapped} == {DynamicLinear}
    assert {type(layer).__name__ for layer in wrapped} == {"LoraInt8Linear"}
    frozen = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" not in name}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(wrapped)
    optimizer = torch.optim.AdamW([parameter for _, parameter in trained], 5e-2)
    losses = []
    for _ in range(16):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all("lora_" in name and parameter.grad is not None for name, parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert all(same(model.state_dict()[name], tensor) for name, tensor in frozen.items())


def test_all_linear_means_the_int8_layers():
    rng = fresh()
    model, names = quantized(llama(rng)), set()
    names = {name for name, layer in model.named_modules() if isinstance(layer, DynamicLinear)}
    found = with_lora(model, target_modules="all-linear").peft_config["default"].target_modules
    assert {name for name in names if any(name.endswith(suffix) for suffix in found)} == names
    assert not any(name.endswith("lm_head") for name in found)


@pytest.mark.parametrize("more", [{}, {"use_dora": True}, {"fan_in_fan_out": True}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("safe", sampled([False, True]))
def test_merged_adapters_become_codes_and_unmerging_is_exact(more, safe):
    rng = fresh(more, safe)
    ids, model = drawn_ids(rng), randomize(with_lora(quantized(llama(rng)), **more), rng)
    want, before = logits(model, ids), copy.deepcopy(model.state_dict())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight + layer.get_delta_weight("default")
    model.merge_adapter(safe_merge=safe)
    merged = logits(model, ids)
    assert type(layer.base_layer) is DynamicLinear
    if "use_dora" not in more:
        error = (layer.base_layer.weight - exact).abs().amax(1)
        assert (error <= exact.abs().amax(1) / 253).all()  # half a step
    assert close(merged, want)
    model.unmerge_adapter()
    assert all(same(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert same(logits(model, ids), want)
    plain = model.merge_and_unload(safe_merge=safe)
    assert not any("lora" in name for name, _ in plain.named_modules())
    assert type(plain.model.layers[0].self_attn.q_proj) is DynamicLinear
    assert same(logits(plain, ids), merged)


def test_a_merge_that_is_not_finite_changes_nothing():
    rng = fresh()
    model = with_lora(quantized(llama(rng)))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    before = copy.deepcopy(layer.base_layer.state_dict())
    with torch.no_grad():
        layer.lora_B["default"].weight[1, 1] = torch.inf
    with pytest.raises(InvalidProblem, match="weight must be finite"):
        layer.merge()
    assert not layer.merged
    assert all(same(layer.base_layer.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("way", ["peft", "transformers"])
def test_an_adapter_fits_models_that_are_folded_as_its_base(way, tmp_path):
    """Its file says how the base was folded or, if skuda did not write it, names a base whose file says so."""
    rng = fresh(way)
    ids, folder = drawn_ids(rng), {name: tmp_path / name for name in ("floats", "int8", "plain", "here", "loaded")}
    llama(rng).save_pretrained(folder["floats"])
    original = transformers.LlamaForCausalLM.from_pretrained(folder["floats"])
    model = copy.deepcopy(original)
    quantize_(model, Dynamic(calibration=calibrated(model, ids)), lambda _, name: "lm_head" not in name)
    model.save_pretrained(folder["int8"])
    bases = {"plain": original, "here": model, "loaded": type(model).from_pretrained(folder["int8"])}
    want = {}
    for name, base in bases.items():
        trained = randomize(with_lora(copy.deepcopy(base)), rng)
        trained.save_pretrained(folder[name])
        want[name] = logits(trained, ids)
    file = folder["loaded"] / "adapter_config.json"
    file.write_text(re.sub(f'"{FOLDED}": ".{{16}}",', "", file.read_text()))
    for (of, base), name in itertools.product(bases.items(), bases):
        made = copy.deepcopy(base)
        load = made.load_adapter if way == "transformers" else partial(peft.PeftModel.from_pretrained, made)
        if (name == "plain") is (of == "plain"):
            load(str(folder[name]))
            assert same(logits(made, ids), want[name])
        else:
            with pytest.raises(InvalidProblem, match=f"adapter must be trained on .* had {folder[name]}, trained on"):
                load(str(folder[name]))


def test_layers_with_adapters_are_not_folded():
    rng = fresh()
    model, ids = randomize(with_lora(llama(rng), target_modules=["q_proj"]), rng), drawn_ids(rng)
    want = logits(model, ids)
    folding = fold_(model, calibrated(model, ids))
    assert len(folding.folded) == 4  # gate and up, and down, of two layers
    assert "it is an adapter" in folding.not_folded["base_model.model.model.layers.0.input_layernorm"]
    assert same(logits(model, ids), want)


def test_a_model_with_adapters_is_not_exact_and_has_no_certificate():
    """Its server would not have them."""
    adapted = with_lora(llama(fresh()))
    for check in (
        partial(exact_, adapted),
        partial(certify, adapted),
        partial(certify, llama(fresh()), trainer=adapted),
    ):
        with pytest.raises(InvalidProblem, match=r"(model|trainer) must have none: merge them .* had adapters of peft"):
            check()


def test_dequantized_layers_keep_their_adapters_and_stay_frozen():
    rng = fresh()
    model, ids = randomize(with_lora(quantized(llama(rng))), rng), drawn_ids(rng)
    want = logits(model, ids)
    dequantize_(model)
    assert not any(isinstance(layer, DynamicLinear) for layer in model.modules())
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert close(logits(model, ids), want)
    before = logits(model, ids)
    plain = model.merge_and_unload()
    assert torch.allclose(logits(plain, ids), before, atol=1e-3)


def test_layers_that_pass_no_gradients_on_are_refused():
    rng = fresh()
    fused, static = quantized(llama(rng)), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    fuse_(fused)
    for targets, kind in ((["q_proj"], "Part"), (["qkv_proj"], "JoinedLinear")):
        with pytest.raises(InvalidProblem, match=f"target_modules must be a DynamicLinear.*before fuse_; had a {kind}"):
            with_lora(copy.deepcopy(fused), target_modules=targets)
    quantize_(static, SmoothStatic(calibrated(static, torch.ones(2, 8))))
    with pytest.raises(InvalidProblem, match="had a StaticLinear"):
        with_lora(static, target_modules=["0"])


def test_an_int8_layer_is_no_module_to_save():
    model = llama(fresh())
    quantize_(model, Dynamic(), lambda *_: True)
    with pytest.raises(InvalidProblem, match=r"modules_to_save must be in floating point.*had lm_head"):
        with_lora(model, modules_to_save=["lm_head"])


def test_an_initialization_that_changes_the_base_is_refused():
    with pytest.raises(InvalidProblem, match="DynamicLinear: weight must not be changed"):
        with_lora(quantized(llama(fresh())), init_lora_weights="pissa")


def test_adapters_train_beside_4_bit_weights_but_are_not_merged_into_them():
    rng = fresh()
    model, ids = llama(rng), drawn_ids(rng)
    quantize_(model, Dynamic(weights="int4"), lambda _, name: "lm_head" not in name)
    model = randomize(with_lora(model), rng)
    model(input_ids=ids).logits.sum().backward()
    assert all(tensor.grad is not None for name, tensor in model.named_parameters() if "lora_" in name)
    before = logits(model, ids)
    with pytest.raises(InvalidProblem, match="base_layer must have 8-bit weights"):
        model.merge_and_unload()
    assert same(logits(model, ids), before)
