"""Models of transformers: quantized while they load, saved and loaded again, and converted from other formats."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors import compressors
from compressed_tensors import quantization as ct
from safetensors.torch import load_file, save_file
from support import fresh, sampled
from tensors import calibrated
from torch import nn
from transformers.quantizers import auto

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch import (
    Dynamic,
    DynamicLinear,
    FakeQuant,
    SmoothStatic,
    StaticLinear,
    fuse_,
    load_,
    quantize_,
    save,
)
from skuda.torch.formats.grouped import Int4Format
from skuda.torch.hf.transformers import SkudaConfig, _CompressedTensorsConfig, convert_

KINDS = ("dynamic", "static", "shifted")
PARTS = {
    f"{block}.{name}_proj"
    for block, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
}
LAYERS = {f"model.layers.{i}.{part}" for i in range(2) for part in PARTS}


def llama(rng, dtype=torch.bfloat16, **more):
    """Return a Llama with random weights."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        dtype=dtype,
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape) / 8))
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def drawn_ids(rng):
    return torch.from_numpy(rng.integers(3, 97, (2, 7)))


def int8_names(model, kind=DynamicLinear):
    return {name for name, module in model.named_modules() if type(module) is kind}


def from_pretrained(path, *more, kind=transformers.AutoModelForCausalLM, **named):
    return kind.from_pretrained(path, *more, **named)


def assert_survives_saving(model, ids, folder):
    """Check that what a model writes is read as the same model, with either reader and either writer."""
    want = logits(model, ids)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="60KB")
    save(model, folder / "ours")
    assert (folder / "many" / "model.safetensors.index.json").exists()
    for name in ("one", "many", "ours"):
        again = from_pretrained(folder / name)
        assert torch.equal(logits(again, ids), want)
        config = again.config
        del config.quantization_config
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
        load_(plain, folder / name)
        assert torch.equal(logits(plain, ids), want)
    assert (
        load_file(folder / "one" / "model.safetensors").keys()
        == load_file(folder / "ours" / "model.safetensors").keys()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_floats_is_quantized_as_it_is_loaded(tied, tmp_path):
    rng = fresh(tied)
    plain = llama(rng, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path)
    ids = drawn_ids(rng)
    model = from_pretrained(tmp_path, quantization_config=SkudaConfig())
    assert int8_names(model) == LAYERS
    assert set(model.hf_quantizer.report.converted) == LAYERS
    assert model.hf_quantizer.is_trainable
    quantize_(plain, Dynamic(), lambda module, _: module is not plain.lm_head)
    assert torch.equal(logits(model, ids), logits(plain, ids))
    assert_survives_saving(model, ids, tmp_path)


@pytest.mark.parametrize("given", [{}, {"weights": "int4", "group_size": 32}, {"exact": True}])
def test_a_calibration_is_run_as_a_checkpoint_of_floats_is_loaded(given, tmp_path):
    rng = fresh(str(given))
    plain = llama(rng, torch.float32)
    plain.save_pretrained(tmp_path)
    batches = [torch.from_numpy(rng.integers(3, 97, (4, 32))) for _ in range(2)]
    config = SkudaConfig(calibration=[batches[0], {"input_ids": batches[1]}], **given)
    model = from_pretrained(tmp_path, quantization_config=config)
    assert len(model.hf_quantizer.report.folded) == (4 if "weights" in given else 6)
    assert model.config.quantization_config.calibration is None
    if "exact" not in given:
        quantize_(
            plain,
            Dynamic(**given, calibration=calibrated(plain, *batches, rows=256)),
            lambda module, _: module is not plain.lm_head,
        )
        ids = drawn_ids(rng)
        assert torch.equal(logits(model, ids), logits(plain, ids))
        assert_survives_saving(model, ids, tmp_path)
    for wrong in (batches[0], [], 3):
        with pytest.raises(InvalidProblem, match="calibration must be a list"):
            SkudaConfig(calibration=wrong)
    with pytest.raises(InvalidProblem, match="be a Budget"):
        SkudaConfig(budget=4)


def test_a_fused_model_is_saved_as_the_model_that_it_was(tmp_path):
    rng = fresh()
    llama(rng).save_pretrained(tmp_path)
    model, other = (from_pretrained(tmp_path, quantization_config=SkudaConfig()) for _ in range(2))
    model.save_pretrained(tmp_path / "plain")
    other.model.layers[0].self_attn.q_proj.weight_q.zero_()
    ids = drawn_ids(rng)
    want = logits(model, ids)
    for each in (model, other):
        assert len(fuse_(each).fused) == 6
    fused = logits(model, ids)
    assert not torch.equal(logits(other, ids), fused)
    assert set(load_(other, tmp_path / "plain")) == LAYERS
    assert torch.equal(logits(other, ids), fused)
    assert set(convert_(model)) == LAYERS
    for name, write in (("one", model.save_pretrained), ("ours", lambda folder: save(model, folder))):
        write(tmp_path / name)
        first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", name))
        assert first.keys() == again.keys()
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert torch.equal(logits(from_pretrained(tmp_path / name), ids), want)


def test_a_fused_model_refuses_layers_that_could_not_have_been_joined(tmp_path):
    rng = fresh()
    llama(rng).save_pretrained(tmp_path)
    models = [from_pretrained(tmp_path, quantization_config=SkudaConfig()) for _ in range(2)]
    fused = models[0]
    fuse_(fused)
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    for layer in models[1].modules():
        if isinstance(layer, DynamicLinear):
            layer.weight_scale = layer.weight_scale.bfloat16()
    save(models[1], tmp_path / "narrow")
    static = from_pretrained(tmp_path)
    calibration = calibrated(static, drawn_ids(rng))
    quantize_(static, SmoothStatic(calibration, alpha=0.5), lambda module, _: module is not static.lm_head)
    save(static, tmp_path / "static")
    for name, words in (
        ("narrow", "weight_scale.*float32.*load before fuse_"),
        ("static", "DynamicLinear.*load before"),
    ):
        with pytest.raises(InvalidRecord, match=words):
            load_(fused, tmp_path / name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fused.state_dict().items())


def test_ignored_layers_stay_as_they_are(tmp_path):
    llama(fresh()).save_pretrained(tmp_path)
    config = SkudaConfig(ignore=[r"re:model\.layers\.0", "lm_head", "model.layers.1.mlp.up_proj"])
    model = from_pretrained(tmp_path, quantization_config=config)
    left = {name for name in LAYERS if "layers.0" in name} | {"model.layers.1.mlp.up_proj"}
    assert int8_names(model) == LAYERS - left
    assert set(model.config.quantization_config.to_dict()["ignore"]) == left | {"lm_head"}
    with pytest.raises(InvalidProblem, match="ignore must be a list of names"):
        SkudaConfig(ignore="lm_head")
    with pytest.raises(InvalidProblem, match="ignore must be names and regular expressions"):
        SkudaConfig(ignore=["re:("])


def test_a_model_quantized_after_loading_learns_how_it_is_saved(tmp_path):
    rng = fresh()
    model, ids = llama(rng), drawn_ids(rng)
    calibration = calibrated(model, ids)
    quantize_(model, SmoothStatic(calibration), lambda module, name: name != "lm_head")
    assert set(convert_(model)) == LAYERS == int8_names(model, StaticLinear)
    assert not model.hf_quantizer.is_trainable
    # Down projections divide by factors that no norm took over, which other readers must not leave out.
    assert model.config.quantization_config.to_dict()["quant_method"] == "skuda"
    assert_survives_saving(model, ids, tmp_path)


def written(rng, folder, kind, strategy="channel", int4=None, **more):
    """Let compressed-tensors quantize a model and write it. Return the weights that it reads, if they have 4 bits.

    Scales of 4-bit weights are multiples of a number a row, and exact in bf16; with the kind "inexact" they are not.
    """
    model = llama(rng, **more)
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    if kind in KINDS[1:]:
        inputs = {"num_bits": 8, "strategy": "tensor", "symmetric": kind == "static"}
    weights = {"num_bits": 8, "strategy": strategy} if int4 is None else int4.fields()
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    config = ct.QuantizationConfig.model_validate({"config_groups": groups, "ignore": ["lm_head"]})
    ct.apply_quantization_config(model, config)
    for name in LAYERS:
        layer = model.get_submodule(name)
        largest = layer.weight.data.abs().amax(1, keepdim=True)
        layer.weight_scale.data.copy_((largest if strategy == "channel" else largest.max()) / 127.5)
        if int4 is not None:
            scale = layer.weight_scale.data
            multiple = rng.uniform(1, 9, scale.shape) if kind == "inexact" else rng.integers(1, 9, scale.shape)
            scale.copy_(torch.from_numpy(rng.integers(4, 8, (len(scale), 1)) / 512 * multiple))
            if not int4.symmetric:
                layer.weight_zero_point.data.copy_(torch.from_numpy(rng.integers(-8, 8, scale.shape)))
        if kind in KINDS[1:]:
            layer.input_scale.data.fill_(float(rng.uniform(0.01, 0.1)))
            layer.input_zero_point.data.fill_(0 if kind == "static" else int(rng.integers(-128, 128)))
    stored_as = "pack-quantized" if int4 and int4.packed else "int-quantized"
    compressor = compressors.ModelCompressor.from_pretrained_model(model, stored_as)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    if int4 is None:
        return None
    package = compressors.BaseCompressor.get_value_from_registry(stored_as)
    layers = {name: model.get_submodule(name) for name in LAYERS}
    return {
        name: package.decompress(dict(layer.state_dict()), layer.quantization_scheme)["weight"]
        for name, layer in layers.items()
    }


def config_in(path):
    """Return a config without the version of the library that wrote it."""
    found = json.loads(path.read_text())
    assert found["quantization_config"].pop("version")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_compressed_tensors_wrote_is_loaded_and_written_byte_for_byte(kind, tmp_path):
    rng = fresh(kind)
    written(rng, tmp_path / "theirs", kind)
    model, ids = from_pretrained(tmp_path / "theirs"), drawn_ids(rng)
    assert int8_names(model, DynamicLinear if kind == "dynamic" else StaticLinear) == LAYERS
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    for name in LAYERS:
        assert torch.equal(model.get_submodule(name).weight_q, stored[f"{name}.weight"])
    assert_survives_saving(model, ids, tmp_path)
    for name in ("one", "ours"):
        for file, read in (("model.safetensors", Path.read_bytes), ("config.json", config_in)):
            ours, theirs = (read(tmp_path / folder / file) for folder in (name, "theirs"))
            assert ours == theirs


FORMATS = [Int4Format(32, symmetric=False), Int4Format(32, packed=True), Int4Format(0), Int4Format(0, False, True)]  # noqa: FBT003


@pytest.mark.parametrize("int4", FORMATS, ids=str)
def test_weights_of_4_bits_of_compressed_tensors_are_loaded_and_written_exactly(int4, tmp_path):
    rng = fresh(int4)
    tied = bool(rng.integers(2))
    want = written(rng, tmp_path / "theirs", "dynamic", int4=int4, tie_word_embeddings=tied)
    model, ids = from_pretrained(tmp_path / "theirs"), drawn_ids(rng)
    assert int8_names(model) == LAYERS
    for name in LAYERS:
        layer = model.get_submodule(name)
        assert layer.group_size == (int4.group_size or 128)
        assert layer.weight_scale.dtype is torch.float32
        assert torch.equal(layer.weight, want[name])
    plain = llama(fresh(), tie_word_embeddings=tied)
    assert set(load_(plain, tmp_path / "theirs")) == LAYERS
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())
    base = from_pretrained(tmp_path / "theirs", kind=transformers.AutoModel)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert_survives_saving(model, ids, tmp_path)
    model = copy.deepcopy(model)
    fuse_(model)
    model.save_pretrained(tmp_path / "fused")
    ours, fused, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "fused", "theirs"))
    assert all(torch.equal(fused[name], tensor) for name, tensor in ours.items())
    fields = [config_in(tmp_path / each / "config.json") for each in ("ours", "fused", "theirs")]
    assert fields[0] == fields[1]
    if not int4.packed:
        assert fields[0] == fields[2]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor.to(ours[name].dtype)) for name, tensor in theirs.items())


def test_other_group_scales_are_rounded_only_if_the_config_says_so(tmp_path):
    rng = fresh()
    written(rng, tmp_path / "theirs", "inexact", int4=Int4Format(32))
    with pytest.raises(
        InvalidRecord, match=r"layer model\.layers\.0\.[a-z_.]+: tensor weight_scale must.*round_scales=True"
    ):
        from_pretrained(tmp_path / "theirs")
    plain, ids = llama(rng), drawn_ids(rng)
    with pytest.warns(UserWarning, match="14 layers have group scales rounded"):
        load_(plain, tmp_path / "theirs", round_scales=True)
    with (
        pytest.warns(UserWarning, match="round_scales"),
        pytest.warns(UserWarning, match="14 layers have group scales"),
    ):
        model = from_pretrained(tmp_path / "theirs", quantization_config=SkudaConfig(round_scales=True))
    assert torch.equal(logits(model, ids), logits(plain, ids))
    assert_survives_saving(model, ids, tmp_path)
    # Their multiples of scales are not exact.
    assert json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]["quant_method"] == "skuda"


@pytest.mark.parametrize("size", [0, 32])
def test_compressed_tensors_reads_symmetric_weights_of_4_bits(size, tmp_path, monkeypatch):
    rng = fresh(size)
    llama(rng, torch.float32).save_pretrained(tmp_path)
    config = SkudaConfig(weights="int4", group_size=size, symmetric=True)
    with nullcontext() if size else pytest.warns(UserWarning, match="one scale a row"):
        model, ids = from_pretrained(tmp_path, quantization_config=config), drawn_ids(rng)
    assert len(model.hf_quantizer.report.per_row) == (0 if size else len(LAYERS))
    assert_survives_saving(model, ids, tmp_path)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", _CompressedTensorsConfig.own)
    theirs = from_pretrained(tmp_path / "one")
    assert torch.nn.functional.cosine_similarity(logits(theirs, ids), logits(model, ids), dim=-1).min() > 0.99
    for name in LAYERS:
        assert type(theirs.get_submodule(name)) is nn.Linear
        assert torch.equal(theirs.get_submodule(name).weight, model.get_submodule(name).weight)


def test_a_model_of_4_bit_weights_that_transformers_loaded_is_not_converted(tmp_path, monkeypatch):
    written(fresh(), tmp_path, "dynamic", int4=Int4Format(32))
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", _CompressedTensorsConfig.own)
    model = from_pretrained(tmp_path)
    with pytest.raises(InvalidRecord, match=r"import skuda\.torch\.transformers before from_pretrained"):
        convert_(model)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_transformers_loaded_is_converted(kind, called, tmp_path, monkeypatch):
    rng = fresh(kind, called)
    written(rng, tmp_path / "theirs", kind)
    want, ids = from_pretrained(tmp_path / "theirs"), drawn_ids(rng)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", _CompressedTensorsConfig.own)
    model = from_pretrained(tmp_path / "theirs")
    assert not int8_names(model)
    if called:
        logits(model, ids)
        assert {model.get_submodule(name).weight.dtype for name in LAYERS} == {torch.bfloat16}
    assert set(convert_(model)) == LAYERS
    assert torch.equal(logits(model, ids), logits(want, ids))
    monkeypatch.undo()
    assert_survives_saving(model, ids, tmp_path)


@pytest.mark.parametrize("way", ["dynamic", "static", "loaded", "within"])
def test_a_model_that_was_quantized_in_place_saves_what_it_is(way, tmp_path):
    rng = fresh(way)
    model, ids = llama(rng), drawn_ids(rng)
    if way == "static":
        calibration = calibrated(model, ids)
        quantize_(model, SmoothStatic(calibration))
    elif way == "loaded":
        other = llama(rng)
        quantize_(other, Dynamic())
        save(other, tmp_path / "other")
        load_(model, tmp_path / "other")
    else:
        quantize_(nn.ModuleDict({"inside": model}) if way == "within" else model, Dynamic())
    assert_survives_saving(model, ids, tmp_path)
    # A base model has the config of the whole one, and saves what it holds of it.
    model.model.save_pretrained(tmp_path / "base")
    base = from_pretrained(tmp_path / "base", kind=transformers.AutoModel)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert model.half().dtype is torch.float16


def test_a_version_that_cannot_save_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "skuda.torch.hf.transformers", None)
    model = llama(fresh())
    with pytest.warns(UserWarning, match=r"use skuda\.torch\.save"):
        quantize_(model, Dynamic())
    assert int8_names(model) > LAYERS


def test_a_model_with_nothing_to_quantize_is_refused_with_the_reason(tmp_path):
    llama(fresh()).save_pretrained(tmp_path)
    with pytest.raises(InvalidProblem, match=r"(?s)have a torch\.nn\.Linear.*LlamaForCausalLM, 0 converted"):
        from_pretrained(tmp_path, quantization_config=SkudaConfig(ignore=["re:.*"]))


def gpt2(rng, **more):
    """Return a GPT-2, whose linear layers are `Conv1D`, with random weights."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, **more)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape) / 8))
    return model


CONV1D = {
    f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
}


def linear_of(layer):
    """Return the nn.Linear that computes what a `Conv1D` computes."""
    linear = nn.Linear(layer.nx, layer.nf)
    linear.weight, linear.bias = nn.Parameter(layer.weight.detach().t().contiguous()), layer.bias
    return linear


@pytest.mark.parametrize("way", ["dynamic", "static", "trained"])
def test_the_layers_of_gpt2_become_int8(way, tmp_path):
    rng = fresh(way)
    model, ids = gpt2(rng), drawn_ids(rng)
    with torch.no_grad():
        want = model(ids).logits
    config, folded = Dynamic(), {}
    if way == "static":
        config = SmoothStatic(calibrated(model, ids))
        folded = {f"transformer.h.{i}.{norm}" for i in range(2) for norm in ("ln_1", "ln_2")}
        assert dict.keys(config.calibration.norms) == folded
    else:
        for name in CONV1D:
            model.get_submodule(name).mark = name
    same = [copy.deepcopy(model)]
    for name in CONV1D if way != "static" else ():
        same[0].set_submodule(name, linear_of(same[0].get_submodule(name)))
    for each in (model, *same):
        if way == "trained":
            quantize_(each, FakeQuant(), lambda _, name: name != "lm_head", strict=True)
        if way != "static" or each is model:
            report = quantize_(each, config, lambda _, name: name != "lm_head", strict=True)
            assert set(report.converted) == CONV1D
            assert set(report.left) == {"lm_head", "transformer.wte.weight", "transformer.wpe.weight"}
            assert set(report.folded) == set(folded)
    got = logits(model, ids)
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.99
    if way != "static":
        assert torch.equal(logits(same[0], ids), got)
        assert all(model.get_submodule(name).mark == name for name in CONV1D)
    model.save_pretrained(tmp_path / "one")
    save(model, tmp_path / "ours")
    for folder in (tmp_path / "one", tmp_path / "ours"):
        fields = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert fields["quant_method"] == "skuda"  # other readers expect codes of shape (K, N)
        assert fields["config_groups"]["group_0"]["targets"] == ["Conv1D"]
        assert load_file(folder / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"].shape == (128, 32)
        again = from_pretrained(folder)
        plain = gpt2(fresh())
        assert set(load_(plain, folder)) == CONV1D == set(load_(plain, folder))
        for each in (again, plain):
            assert torch.equal(logits(each, ids), got)
            each.save_pretrained(tmp_path / "again")
            stored = [load_file(path / "model.safetensors") for path in (folder, tmp_path / "again")]
            assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
            assert torch.equal(logits(from_pretrained(tmp_path / "again"), ids), got)


def test_weights_that_were_changed_are_not_converted(tmp_path, monkeypatch):
    rng = fresh()
    written(rng, tmp_path, "dynamic")
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", _CompressedTensorsConfig.own)
    model = from_pretrained(tmp_path)
    logits(model, drawn_ids(rng))
    with torch.no_grad():
        layer = model.model.layers[1].mlp.up_proj
        layer.weight[3, 4] = 1.5 * layer.weight_scale[3, 0]
    with pytest.raises(InvalidProblem, match=r"layers\.1\.mlp\.up_proj\.weight must be codes times weight_scale"):
        convert_(model)
    assert not int8_names(model)


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2), "model"])
def test_only_models_of_transformers_are_converted(model):
    with pytest.raises(InvalidProblem, match="model must be a model of transformers"):
        convert_(model)


def test_a_model_of_floats_is_not_converted():
    with pytest.raises(InvalidProblem, match="hold int8 layers"):
        convert_(llama(fresh()))


@pytest.mark.parametrize("format_", ["float-quantized", "pack-quantized"])
def test_other_formats_are_read_as_before(format_):
    weights = (
        {"num_bits": 4, "strategy": "channel"} if format_ == "pack-quantized" else {"num_bits": 8, "type": "float"}
    )
    fields = {"quant_method": "compressed-tensors", "format": format_}
    fields["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    found = auto.AutoQuantizationConfig.from_dict(fields)
    assert type(found) is transformers.CompressedTensorsConfig


@pytest.fixture
def quantized(tmp_path):
    """Return the folder of an int8 checkpoint."""
    llama(fresh()).save_pretrained(tmp_path / "floats")
    from_pretrained(tmp_path / "floats", quantization_config=SkudaConfig()).save_pretrained(tmp_path / "int8")
    return tmp_path / "int8"


UP = "model.layers.1.mlp.up_proj"


def report_of(folder, **options):
    return from_pretrained(folder, quantization_config={"quant_method": "skuda"} | options).hf_quantizer.report


def test_a_mapping_is_a_config(tmp_path):
    llama(fresh()).save_pretrained(tmp_path)
    assert set(report_of(tmp_path, weights="int4", ignore=["lm_head", f"re:.*{UP[-7:]}"]).converted) == {
        name for name in LAYERS if "up_proj" not in name
    }
    for wrong, words in (({"weight": "int4"}, "weight must be left out"), ({"exact": "yes"}, "exact must be True")):
        with pytest.raises(InvalidProblem, match=f"SkudaConfig: {words}"):
            report_of(tmp_path, **wrong)
    every = {"weights": "int4", "group_size": 64, "symmetric": True, "round_scales": True, "exact": False}
    given = SkudaConfig(["lm_head"], **every)
    assert given.to_dict() == {"quant_method": "skuda", "ignore": ["lm_head"]} | every
    model = from_pretrained(tmp_path, quantization_config=SkudaConfig(weights="int4"))
    for config in (given, SkudaConfig(), model.config.quantization_config):
        assert SkudaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert given != SkudaConfig()


@pytest.mark.parametrize(
    "option",
    [
        {"weights": "int4"},
        {"group_size": 32, "weights": "int4"},
        {"ignore": []},
        {"group_size": 128},
        {"calibration": [torch.ones(1, 1)]},
    ],
)
def test_options_that_a_quantized_checkpoint_cannot_take_are_refused(option, quantized):
    warnings.filterwarnings("ignore", ".*already has a `quantization_config`")
    with pytest.raises(InvalidProblem, match=f"{next(iter(option))}|weights must be left out"):
        from_pretrained(quantized, quantization_config=SkudaConfig(**option))


def test_a_scheme_belongs_to_its_checkpoint(quantized):
    warnings.filterwarnings("ignore", ".*already has a `quantization_config`")
    model = from_pretrained(quantized)
    own = copy.deepcopy(model.config.quantization_config)
    assert from_pretrained(quantized, quantization_config=own).config.quantization_config == own
    with pytest.raises(InvalidProblem, match="scheme must be left out"):
        from_pretrained(quantized.parent / "floats", quantization_config=own)
    quantize_(model, Dynamic(), lambda *_: True)
    model.save_pretrained(quantized.parent / "more")
    with pytest.raises(InvalidProblem, match="scheme must be that of the checkpoint"):
        from_pretrained(quantized.parent / "more", quantization_config=own)


READ = """
import pickle, sys, torch
model, ids, want = pickle.load(open(sys.argv[1], "rb"))
with torch.no_grad():
    assert torch.equal(model(ids).logits, want)
"""


@pytest.mark.parametrize("way", sampled(["floats", "int8", "int4", "fused"]))
def test_a_loaded_model_is_copied_saved_and_sent(way, quantized, tmp_path):
    ids = drawn_ids(fresh(way))
    given = {} if way == "int8" else {"quantization_config": SkudaConfig(weights="int4" if way == "int4" else "int8")}
    model = from_pretrained(quantized if way == "int8" else tmp_path / "floats", **given)
    if way == "fused":
        fuse_(model)
    copies = [copy.deepcopy(model)]
    want = logits(model, ids)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)]  # noqa: S301  our own
    for each in copies:
        assert torch.equal(logits(each, ids), want)
        assert str(each.hf_quantizer.report) == str(model.hf_quantizer.report)
    (tmp_path / "sent").write_bytes(pickle.dumps((model, ids, want)))
    subprocess.run([sys.executable, "-c", READ, str(tmp_path / "sent")], check=True)


PLACES = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")


@pytest.mark.parametrize("weights", [{}, {"weights": "int4"}, {"weights": "int4", "symmetric": True}], ids=str)
def test_a_device_map_to_the_disk(weights, tmp_path):
    """Codes are buffers, which accelerate leaves in memory."""
    rng = fresh(*weights)
    llama(rng).save_pretrained(tmp_path / "floats")
    places, ids = (
        {"device_map": PLACES | {"model.layers.1": "disk"}, "offload_folder": tmp_path / "off"},
        drawn_ids(rng),
    )
    whole = from_pretrained(tmp_path / "floats", quantization_config=SkudaConfig(**weights))
    whole.save_pretrained(tmp_path / "codes")
    model = from_pretrained(tmp_path / "codes", **places)
    assert hasattr(model.get_submodule(UP), "_hf_hook")
    for _ in range(2):
        assert torch.equal(logits(model, ids), logits(whole, ids))
    with pytest.raises(InvalidProblem, match="offload_buffers must be False"):
        from_pretrained(tmp_path / "codes", **places, offload_buffers=True)
    with pytest.raises(InvalidProblem, match="device_map must be one device"):
        from_pretrained(tmp_path / "floats", **places, quantization_config=SkudaConfig(**weights))


@pytest.mark.parametrize("weights", [{}, {"weights": "int4", "symmetric": True}], ids=str)
def test_layers_that_a_checkpoint_lacks_are_new(weights, tmp_path):
    rng = fresh(*weights)
    llama(rng).save_pretrained(tmp_path / "floats")
    model, ids = from_pretrained(tmp_path / "floats", quantization_config=SkudaConfig(**weights)), drawn_ids(rng)
    model.save_pretrained(tmp_path / "codes")
    kind = transformers.AutoModelForTokenClassification
    found, info = from_pretrained(tmp_path / "codes", kind=kind, num_labels=3, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight", "score.bias"}
    assert type(found.score) is nn.Linear
    assert found.score.weight.isfinite().all()
    with torch.no_grad():
        assert torch.equal(found.model(ids).last_hidden_state, model.model(ids).last_hidden_state)
    tensors = load_file(tmp_path / "codes" / "model.safetensors")
    for lost in (f"{UP}.weight_scale", f"{UP}.", "model.layers.1."):
        some = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
        save_file(some, tmp_path / "codes" / "model.safetensors", {"format": "pt"})
        for each in (kind, transformers.AutoModelForCausalLM):
            with pytest.raises(InvalidRecord, match=r"model\.layers\.1.* had nothing"):
                from_pretrained(tmp_path / "codes", kind=each)


def test_without_the_package_the_error_names_the_command():
    code = "import sys; sys.modules['transformers'] = None; import skuda.torch.transformers"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingDependency: transformers is not installed" in found.stderr
    assert "pip install 'skuda[transformers]'" in found.stderr
