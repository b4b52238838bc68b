"""What is saved of a model of transformers, whatever its architecture, is read again with equal bits."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from architectures import ALL, inputs_of, tiny
from safetensors.torch import load_file
from support import fresh, sampled
from tensors import same
from transformers.quantizers import auto

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch import Dynamic, load_, quantize_, save, scheme
from skuda.torch.hf.transformers import _CompressedTensorsConfig, convert_
from skuda.torch.linear.joined import int8_layers

CONFIGS = {"int8": Dynamic(), "int4": Dynamic(weights="int4", group_size=32, symmetric=True)}


def outputs(model, inputs):
    if inputs is None:  # torch multiplies no tensors of several dtypes
        return []
    with torch.no_grad():
        found = model(**inputs)
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


def weights(model):
    """Return the tensors of a model, by name. Packed ones are unpacked: several forms have the same codes."""
    packed = {f"{name}.weight": layer.weight for name, layer in int8_layers(model) if layer.group_size}
    dtypes = {f"{name}: dtype": layer.weight[:0] for name, layer in int8_layers(model)}
    return model.state_dict() | packed | dtypes


def assert_same(model, other, inputs):
    """Check that two models have the same tensors and results."""
    found, want = weights(other), weights(model)
    assert found.keys() == want.keys()
    assert not [name for name, tensor in want.items() if not same(found[name], tensor)]
    assert all(map(same, outputs(other, inputs), outputs(model, inputs)))


def assert_described(folder, layers):
    """Check that `ignore` matches the matrices of floats in a file, and no int8 layer."""
    tensors = load_file(folder / "model.safetensors")
    ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    coded = {name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")}
    assert len(coded) == layers
    for name, tensor in tensors.items():
        owner = name.rpartition(".")[0]
        ignored = owner in ignore or any(re.match(each[3:], owner) for each in ignore if each.startswith("re:"))
        table = re.search(r"embed|wte|wpe|shared|norm|position|relative|conv|LayerNorm", name)
        if name in coded:
            assert not ignored, name
        elif owner + ".weight" not in coded and tensor.dim() > 1 and tensor.shape[0] > 1 and not table:
            assert ignored, name


def loaded(model, folder, **named):
    """Return a model as `from_pretrained` makes it."""
    model.save_pretrained(folder / "floats")
    return type(model).from_pretrained(folder / "floats", **named)


def assert_survives(model, folder, inputs, write):
    """Check that what one of the writers writes is read as the same model. Return the model that was read."""
    if write == "save":
        save(model, folder / write)
    else:
        model.save_pretrained(folder / write)
    again, info = type(model).from_pretrained(folder / write, output_loading_info=True)
    assert not any(info.values()), info
    assert_same(model, again, inputs)
    assert len(list(again.parameters())) == len(list(model.parameters())), "other ties"
    again.save_pretrained(folder / "again")
    first, second = (load_file(folder / path / "model.safetensors") for path in (write, "again"))
    assert first.keys() == second.keys()
    assert all(same(first[key], second[key]) for key in first)
    return again


CASES = [
    pytest.param(*case)
    for case in itertools.product(ALL, CONFIGS, (torch.float32, torch.bfloat16, torch.float16), ("save", "pretrained"))
]


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # DeBERTa of transformers 5.17
@pytest.mark.parametrize(("name", "bits", "dtype", "write"), sampled(CASES, each=lambda name, *_: name))
def test_what_is_saved_is_read_with_equal_bits(name, bits, dtype, write, tmp_path):
    rng = fresh(name, bits, dtype)
    model = loaded(tiny(name, rng, dtype), tmp_path)
    report = quantize_(model, CONFIGS[bits], lambda *_: True)
    inputs = inputs_of(model, rng)
    assert_survives(model, tmp_path, inputs, write)
    assert_described(tmp_path / write, len(report.converted))
    plain = type(model).from_pretrained(tmp_path / "floats")
    load_(plain, tmp_path / write)
    assert_same(model, plain, inputs)


def test_a_head_that_is_int8_ends_no_other_tie(tmp_path):
    models = {name: tiny(name, fresh(name)) for name in ("BartForConditionalGeneration", "LlamaForCausalLM")}
    for name, model in models.items():
        quantize_(model, Dynamic(), lambda *_: True)
        model.tie_weights()  # as resizing does
        again = assert_survives(model, tmp_path / name, inputs_of(model, fresh()), "pretrained")
        assert again.config.tie_word_embeddings is (name[0] == "B"), "vLLM would read no head"
    assert again.get_input_embeddings().weight is not again.lm_head.weight
    encoder = models["BartForConditionalGeneration"].get_encoder()
    assert encoder.embed_tokens.weight is models["BartForConditionalGeneration"].get_input_embeddings().weight


DTYPES = {
    "planned": ("T5ForConditionalGeneration", lambda model: None),
    "not as planned": ("T5ForConditionalGeneration", lambda model: model.half()),
    "a float head": ("GPTNeoXForCausalLM", lambda model: model.get_output_embeddings().float()),
    "a norm": ("GPTNeoXForCausalLM", lambda model: model.gpt_neox.final_layer_norm.float()),
    "an int8 layer": ("GPTNeoXForCausalLM", lambda model: model.gpt_neox.layers[0].mlp.dense_4h_to_h.float()),
    "a layer without bias": ("Qwen2MoeForCausalLM", lambda model: model.model.layers[0].self_attn.o_proj.bfloat16()),
    "the first tensor": ("Qwen2MoeForCausalLM", lambda model: model.model.embed_tokens.float()),
    "experts": ("Qwen2MoeForCausalLM", lambda model: model.model.layers[0].mlp.experts.float()),
}


@pytest.mark.parametrize("write", ["save", "pretrained"])
@pytest.mark.parametrize("case", DTYPES)
def test_a_layer_keeps_a_dtype_of_its_own(case, write, tmp_path):
    name, change = DTYPES[case]
    rng = fresh(case, write)
    model = loaded(tiny(name, rng, torch.float16), tmp_path, dtype=torch.float16)
    quantize_(model, Dynamic(), lambda layer, _: layer is not model.get_output_embeddings() or name[0] != "G")
    change(model)
    inputs = inputs_of(model, rng) if case in ("planned", "not as planned") else None
    assert_survives(model, tmp_path, inputs, write)
    fields = json.loads((tmp_path / write / "config.json").read_text())["quantization_config"]
    assert ("dtypes" in fields) == (case != "planned"), "transformers knows that itself"
    other = type(model).from_pretrained(tmp_path / write, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in other.parameters()} == {torch.bfloat16}
    if name.startswith("GPT"):
        plain = type(model).from_pretrained(tmp_path / "floats", dtype=torch.float16)
        with pytest.raises(InvalidRecord, match=r"gpt_neox|lm_head"):
            load_(plain, tmp_path / write)
        change(plain)
        load_(plain, tmp_path / write)
        assert_same(model, plain, inputs)


def edited(folder, change):
    """Change the quantization_config of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


VISION = ("LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "PaliGemmaForConditionalGeneration")


@pytest.mark.parametrize("form", ["names of the file", "names of the model", "a pattern", "targets"])
@pytest.mark.parametrize("name", VISION)
def test_names_in_a_scheme_are_those_of_the_file(name, form, tmp_path, monkeypatch):
    rng = fresh(name, form)
    model = loaded(tiny(name, rng), tmp_path)
    floats = {each for each, _ in model.named_modules() if "vis" in each or each == "lm_head"}
    quantize_(model, Dynamic(), lambda _, each: each not in floats)
    inputs = inputs_of(model, rng)
    model.save_pretrained(tmp_path / "int8")
    names = {key.rpartition(".")[0] for key in load_file(tmp_path / "int8" / "model.safetensors")}
    coded = sorted(
        key[: -len(".weight_scale")]
        for key in load_file(tmp_path / "int8" / "model.safetensors")
        if key.endswith(".weight_scale")
    )
    assert not set(coded) <= {each for each, _ in model.named_modules()}, "the file has other names"
    start = min(each for each in names if "vis" in each).partition("vis")[0]
    changes = {
        "names of the file": lambda fields: None,
        "names of the model": lambda fields: fields.update(ignore=sorted(floats)),
        "a pattern": lambda fields: fields.update(ignore=[f"re:{re.escape(start)}vis.*", "re:.*lm_head"]),
        "targets": lambda fields: fields["config_groups"]["group_0"].update(targets=coded) or fields.update(ignore=[]),
    }
    edited(tmp_path / "int8", changes[form])
    assert_same(model, type(model).from_pretrained(tmp_path / "int8"), inputs)
    plain = type(model).from_pretrained(tmp_path / "floats")
    load_(plain, tmp_path / "int8")
    assert_same(model, plain, inputs)
    if form == "names of the model":  # transformers itself knows no others
        monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", _CompressedTensorsConfig.own)
        other = type(model).from_pretrained(tmp_path / "int8")
        assert len(convert_(other)) == len(coded)
        assert_same(model, other, inputs)
        monkeypatch.undo()
    if form == "names of the file":
        edited(tmp_path / "int8", lambda fields: fields.update(ignore=["model.nothing"]))
        with pytest.raises((InvalidRecord, InvalidProblem), match=r"tensor .*weight must be|out_proj must be"):
            type(model).from_pretrained(tmp_path / "int8")


def test_many_names_that_differ_in_numbers_become_patterns(tmp_path, monkeypatch):
    monkeypatch.setattr(scheme, "_MOST_NAMES", 2)
    rng = fresh()
    model = loaded(tiny("Qwen2MoeForCausalLM", rng, num_hidden_layers=3), tmp_path)
    report = quantize_(model, Dynamic(), lambda _, name: not name.endswith("1.self_attn.q_proj"))
    assert_survives(model, tmp_path, inputs_of(model, rng), "pretrained")
    assert_described(tmp_path / "pretrained", len(report.converted))
    ignore = json.loads((tmp_path / "pretrained" / "config.json").read_text())["quantization_config"]["ignore"]
    ends = ("gate", *(rf"experts\.\d+\.{name}_proj" for name in ("down", "gate", "up")))
    want = [rf"re:(.*\.)?layers\.\d+\.mlp\.{end}$" for end in ends]
    assert sorted(ignore) == sorted([*want, "model.layers.1.self_attn.q_proj"])
