"""Codes of 16 bits: weights in two halves, and activations beside weights of 4, 8 and 16 bits."""

import copy
import json

import decoders
import pytest
import torch
from support import fresh
from tensors import GatedMLP, assert_same, calibrated, copies, normal, same
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import skuda.torch as st
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch.certification.certificate import certify
from skuda.torch.exact.exact import exact_
from skuda.torch.formats import CODES_OF, INT8, Int16, format_of
from skuda.torch.fuse.graph import fused_backend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
OPS, BOUNDS, CODED = torch.ops.skuda, {"q_min": -32639, "q_max": 32639}, {"activation_element": "s16"}
PAIRS = [(weights, "int16") for weights in ("int8", "int4", "int16")]


def mlp(rng, weights=None, activations="int16"):
    model = GatedMLP(96, 64).eval()
    for parameter in model.parameters():
        parameter.data = normal(rng, *parameter.shape)
    if weights:
        st.quantize_(model, st.Dynamic(weights=weights, activations=activations))
    return model


def test_a_weight_is_two_halves_which_are_joined_and_cut_as_views():
    rng, form = fresh(), Int16()
    weight = normal(rng, 40, 70)
    (codes, scale), (eight, coarse) = form.quantize(weight), INT8.quantize(weight)
    assert format_of("layer", codes, 40, 70) == form
    integers = form.integers(codes, 40, 70)
    assert_same(integers, (weight / scale[:, None]).round().short())
    assert (integers * scale[:, None] - weight).norm() < (eight * coarse[:, None] - weight).norm() / 200
    assert form.operand(codes, 40, 70).data_ptr() == codes.data_ptr()
    for axis, size in (("n", 40), ("k", 70)):
        parts = [form.cut(codes, axis, *at) for at in ((0, 30), (30, size))]
        assert all(part.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr() for part in parts)
        assert_same(form.join(parts) if axis == "n" else torch.cat(parts, form.k_axis), codes)


@pytest.mark.parametrize(("weights", "activations"), PAIRS)
def test_layers_multiply_integers_are_fused_compiled_copied_and_pass_gradients_on(weights, activations):
    rng = fresh(weights)
    model, x = mlp(rng, weights, activations), normal(rng, 5, 96)
    up, down, given = model.up_proj, model.down_proj, x.clone().requires_grad_()
    step, held = x.abs().amax(-1, keepdim=True) / 32639, up.format.integers(up.weight_q, 64, 96).long()
    codes = (x / step).round().long()
    low, below = (each - ((each + 128 >> 8) << 8) for each in (codes, held))
    sums = codes @ held.t() - (low @ below.t() if weights == "int16" else 0)
    assert_same(up(x), (step * up.weight_scale.view(-1)) * sums.float() + up.bias)
    weight = up.operand, up.weight_scale, None, up.bias
    assert_same(up(x), OPS.quantized_linear(x, *weight, **BOUNDS, **up.format.fields))
    assert "activations=int16" in repr(up)
    assert_same(up.weight, held.float() * up.weight_scale)
    up(given).sum().backward()
    torch.testing.assert_close(given.grad, up.weight.sum(0).expand(5, -1))
    with torch.no_grad():
        unfused = model(x)
        torch.compiler.reset()
        assert_same(torch.compile(model, backend=fused_backend(), fullgraph=True)(x), unfused)
        assert list(st.fuse_(model).fused) == [""]
        gates, scale = OPS.silu_mul_quantize(None, None, model.gate_up_proj(x), **CODES_OF[16])
        parts = gates, down.operand, scale, None, down.weight_scale, None, down.bias
        want = OPS.scaled_linear(*parts, output_element="f32", **CODED, **down.format.fields)
        assert all(same(each(x), want) for each in (model, model, *copies(model)))
        assert_same(model.gate_proj(x), model.gate_up_proj(x)[:, :64])
    assert_same(model(given), want)
    other = mlp(rng, weights, activations)
    other.load_state_dict(model.state_dict())
    assert_same(other(x), unfused)
    st.dequantize_(other)
    assert (other(x) - unfused).norm() < unfused.norm() / 1000


def test_what_has_no_meaning_is_refused_by_name():
    rng = fresh()
    floats, served, held = mlp(rng), mlp(rng, "int16"), Int16.quantize(normal(rng, 8, 16))
    for match, make in {
        "Dynamic: activations must be 'int16' beside weights='int16'": lambda: st.Dynamic(weights="int16"),
        "Dynamic: activations must be 'int8' or 'int16'": lambda: st.Dynamic(activations="int4"),
        "Dynamic: group_size": lambda: st.Dynamic(weights="int16", activations="int16", group_size=32),
        "Mixed: weights must be 'int8' or 'int16'": lambda: st.Mixed(weights="int4", activations="int16"),
        "DynamicLinear: bits of activations must be 16": lambda: st.DynamicLinear(*held, in_features=16),
        "weights must be of at most 8 bits": lambda: st.SmoothDynamic(calibrated(floats), weights="int16"),
    }.items():
        with pytest.raises(InvalidProblem, match=match):
            make()
    st.quantize_(floats, st.Mixed(activations="int16"))
    with pytest.raises(InvalidProblem, match="have weights='int16', activations='int16', as the served one"):
        st.update_(served, floats)
    report = st.quantize_(floats, st.Dynamic())
    assert "use weights='int8', activations='int16'" in report.left["up_proj"]


@pytest.mark.parametrize("weights", ["int8", "int16"])
def test_an_exact_model_is_served_trained_updated_and_certified(weights):
    rng, how = fresh(weights), {"weights": weights, "activations": "int16"}
    served = decoders.small("Qwen3", rng)
    trained, ids = copy.deepcopy(served), torch.from_numpy(rng.integers(1, 64, (2, 9)))
    for model, config in ((served, st.Dynamic(**how)), (trained, st.Mixed(**how))):
        st.quantize_(model, config, lambda *_: True)
        exact_(model)
    found = certify(served, [ids[0], ids[1, :4]], batch=3, trainer=trained, compiler="" if weights == "int8" else None)
    assert found.ok, found
    trained(ids).logits.logsumexp(-1).sum().backward()
    torch.optim.SGD(trained.parameters(), 0.1).step()
    st.update_(served, trained)
    with torch.no_grad():
        assert_same(served(ids).logits, trained(ids).logits)


@torch.no_grad()
def test_a_checkpoint_has_the_same_bits_and_is_closer_to_the_floats(tmp_path):
    rng, errors = fresh(), {}
    floats = LlamaForCausalLM(decoders.small("Llama", rng, name="sdpa").config).eval()
    ids = torch.from_numpy(rng.integers(1, 64, (2, 9)))
    for weights, activations in (("int8", "int8"), *PAIRS):
        model, folder, other = copy.deepcopy(floats), tmp_path / f"{weights}-{activations}", copy.deepcopy(floats)
        st.quantize_(model, st.Dynamic(weights=weights, activations=activations))
        st.save(model, folder)
        st.load_(other, folder)
        read = AutoModelForCausalLM.from_pretrained(folder)
        read.save_pretrained(tmp_path / "again")
        for each in (read, other, AutoModelForCausalLM.from_pretrained(tmp_path / "again")):
            assert_same(each(ids).logits, model(ids).logits)
        errors[weights, activations] = float((model(ids).logits - floats(ids).logits).norm())
    assert errors["int16", "int16"] < errors["int8", "int8"] / 50
    st.fuse_(other)
    with pytest.raises(InvalidRecord, match="be a DynamicLinear, activations=int16"):
        st.load_(other, tmp_path / "int8-int8")
    path = tmp_path / "int8-int16" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text().replace('"skuda"', '"compressed-tensors"'))))
    with pytest.raises(InvalidRecord, match=r"input_activations.num_bits must be 8"):
        st.load_(floats, path.parent)


def test_adapters_train_and_are_merged_into_weights_of_16_bits():
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("skuda.torch.hf.peft")
    rng = fresh()
    model, x = mlp(rng), normal(rng, 4, 96)
    st.quantize_(model, st.Dynamic(weights="int16", activations="int16"), lambda _, name: name == "up_proj")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False), model)
    want, layer = model(x), model.up_proj
    want.sum().backward()
    assert layer.lora_A["default"].weight.grad.abs().sum() > 0
    codes = layer.base_layer.weight_q.clone()
    layer.merge()
    assert (model(x) - want).norm() < want.norm() / 1000
    layer.unmerge()
    assert_same(layer.base_layer.weight_q, codes)
