"""`fuse_` with models of transformers. `.ci/run` runs this file with the lowest and the newest version of it.

Each version must give the reports that are written here.
"""

import copy
import functools
import inspect
import re
import types
import warnings

import pytest
import torch
import transformers
from paths import ROOT
from safetensors.torch import load_file
from support import fresh, sampled
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from skuda.torch import Dynamic, fuse_, quantize_

FUSED = {
    "self_attn": "q, k and v are one product",
    "mlp": "gate and up are one product, the gated activation writes codes",
    "": "the norms write codes, the second one adds the residual",
}
UNKNOWN = "is not a known form of a"
LEFT = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {"": f"input_layernorm, a GemmaRMSNorm, {UNKNOWN} norm"},  # it scales by 1 + weight
    "Phi3": {  # its layers have dropouts, and one layer for q, k and v
        "": f"its forward {UNKNOWN} decoder layer",
        "self_attn": "o_proj, qkv_proj are not part of a known structure",
    },
}
"""What a layer of each family keeps, and why. The rest is fused."""


def small(family, rng):
    """Return a model of two int8 layers with random weights, also in its norms."""
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": None}
    sizes["eos_token_id"] = None  # Drawn weights may say it, and `generate` would end early.
    sizes |= {} if family == "Phi3" else {"head_dim": 12}
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.from_numpy(rng.uniform(0.3, 1.7, parameter.shape)))
    quantize_(model, Dynamic(), lambda _, name: name != "lm_head")
    return model


def fused_with_warnings(model):
    """Fuse a model; return the report, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = fuse_(model)
    assert {each.category for each in told} <= {UserWarning}
    return report, [str(each.message) for each in told]


def of_both_layers(parts):
    """Return texts by the names of modules, from those by their names in a layer."""
    return {f"model.layers.{i}.{part}".rstrip("."): text for i in range(2) for part, text in parts.items()}


def test_the_page_names_the_lowest_version_of_the_extra():
    (lowest,) = re.findall(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert f"transformers {lowest}, the lowest version" in (ROOT / "docs" / "torch.md").read_text()


@pytest.mark.parametrize("family", LEFT)
def test_the_report_of_a_family(family):
    report, told = fused_with_warnings(small(family, fresh("report", family)))
    left = LEFT[family]
    assert report.fused == of_both_layers({part: text for part, text in FUSED.items() if part not in left})
    assert report.left == of_both_layers(left)
    layers = f"  because {left.get('')}: model.layers.0, model.layers.1"
    assert told == ([f"fuse_ left some modules as they were:\n{layers}"] if left else [])


@pytest.mark.parametrize("family", sampled(LEFT, 3))
def test_a_fused_model_computes_generates_and_saves_what_it_did(family, tmp_path):
    rng = fresh("family", family)
    model = small(family, rng)
    fused = copy.deepcopy(model)
    fused_with_warnings(fused)
    assert set(fused.state_dict()) == set(model.state_dict())
    ids = torch.from_numpy(rng.integers(1, 64, (2, 7)))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad():
        want, got = (m(ids, attention_mask=mask, output_hidden_states=True) for m in (model, fused))
        assert len(got.hidden_states) == len(want.hidden_states) == 3
        assert (got.logits - want.logits).norm() < 0.02 * want.logits.norm()
        with_cache = [fused(ids[:, :6], attention_mask=mask[:, :6], use_cache=True)]
        name = "cache" if "cache" in inspect.signature(fused.forward).parameters else "past_key_values"  # since 5.24
        with_cache.append(fused(ids[:, 6:], attention_mask=mask, **{name: with_cache[0][name]}))
        torch.testing.assert_close(with_cache[1].logits[:, 0], got.logits[:, 6], rtol=0, atol=0.05)
        made = fused.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 11)
    fused.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items() if name in saved)
    assert set(model.state_dict()) - set(saved) <= {"lm_head.weight"}, "Gemma's is its embedding"


def test_checkpointing_in_training_gives_the_gradients_of_the_unfused_model():
    rng = fresh("checkpointing")
    model = small("Llama", rng).float().train()
    fused = copy.deepcopy(model)
    fuse_(fused)
    ran = []
    for layer in fused.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda *given: ran.append(1) or checkpoint(*given, use_reentrant=False)
    x = torch.from_numpy(rng.standard_normal((2, 5, 48))).float()
    found = []
    for each in (model, fused):
        given = x.clone().requires_grad_()
        each(inputs_embeds=given, use_cache=False).logits.square().sum().backward()
        found.append(given.grad)
    assert len(ran) == 2
    assert found[0].norm() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3 * float(found[0].abs().max()))


def doubled(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapped


def plain(self, *args, **kwargs):
    return torch.nn.Module.__call__(self, *args, **kwargs)


def of_each_norm(_, model):
    """Replace a norm's forward as `kernelize` of the package kernels does, which `use_kernels=True` calls."""
    for layer in model.model.layers:
        layer.input_layernorm.forward = types.MethodType(lambda self, x: x * self.weight, layer.input_layernorm)


def of_the_class_of_norms(patch, _):
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
    patch.setattr(norm, "forward", lambda self, x: x * self.weight)


def of_layers(call):
    """Return a function that replaces the ``__call__`` of all layers."""
    return lambda patch, _: patch.setattr(GradientCheckpointingLayer, "__call__", call, raising=False)


CHANGED = {
    "each norm": (of_each_norm, "input_layernorm: its forward was replaced"),
    "the class of norms": (of_the_class_of_norms, "input_layernorm: its forward is not a plain method of an input"),
    "a call": (of_layers(plain), "its forward was replaced"),
    "a wrapped call": (of_layers(doubled(GradientCheckpointingLayer.__call__)), "its forward is wrapped"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_norms_stay_where_code_was_replaced(case, monkeypatch):
    change, why = CHANGED[case]
    model = small("Llama", fresh("changed", case))
    change(monkeypatch, model)
    report, told = fused_with_warnings(model)
    assert report.left == of_both_layers({"": report.left["model.layers.0"]})
    assert why in report.left["model.layers.0"]
    assert len(told) == 1
    assert why in told[0]
