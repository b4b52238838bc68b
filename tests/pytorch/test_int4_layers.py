"""Layers of 4-bit weights: the bits of their codes in 8 bits, their state, `fuse_`, and what is refused."""

from __future__ import annotations

import copy

import decoders
import pytest
import torch
import transformers
from support import fresh
from tensors import GatedMLP, copies, normal, same
from torch import nn

from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.torch import (
    Dynamic,
    DynamicLinear,
    Mixed,
    StaticLinear,
    dequantize_,
    fuse_,
    load_,
    quantize_,
    save,
)
from skuda.torch.exact.exact import exact_
from skuda.torch.hf.transformers import SkudaConfig
from skuda.torch.int4 import int4_linear, int4_weight

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
SIZES = (32, 64, 128, 0)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def drawn(rng, *, n=None, k=None, bias=None, dtype=torch.float32):
    """Draw a float layer."""
    n, k = n or int(rng.integers(1, 70)), k or int(rng.integers(1, 300))
    linear = nn.Linear(k, n, bias=bool(rng.integers(2)) if bias is None else bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(normal(rng, *parameter.shape))
    return linear


def in_int8(layer):
    """Return the layer of the same codes in 8 bits."""
    unpacked = torch.ops.skuda.unpack_weight(
        layer.weight_q, n=layer.out_features, k=layer.in_features, group_size=layer.group_size
    )
    return DynamicLinear(unpacked, layer.weight_scale, layer.bias, dtype=layer.weight_dtype)


def spread(model):
    """Return a copy of a model whose layers have the same codes in 8 bits."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, DynamicLinear) and layer.group_size is not None:
            model.set_submodule(name, in_int8(layer))
    return model


def packed(model, size=128, **more):
    quantize_(model, Dynamic(weights="int4", group_size=size, **more), lambda *_: True)
    return model


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_has_the_bits_gradients_and_weight_of_its_codes(size, dtype):
    rng = fresh(size, dtype)
    linear = drawn(rng, dtype=dtype)
    model = nn.Sequential(copy.deepcopy(linear))
    report = quantize_(model, Dynamic(weights="int4", group_size=size))
    assert report.converted == {"0": "DynamicLinear"}
    (layer,) = model
    assert f"weights=int4, group_size={size or 128}" in repr(layer)
    assert (layer.out_features, layer.in_features) == linear.weight.shape
    want = DynamicLinear(*int4_codes(linear, size), linear.bias, dtype=dtype)
    x, other = (normal(fresh(dtype), 2, 3, linear.in_features, dtype=dtype).requires_grad_() for _ in range(2))
    with torch.no_grad():
        for _ in range(2):  # the second call takes the launch of the first
            assert same(layer(x), want(x))
    found, wanted = layer(x), want(other)
    assert same(found.detach(), wanted.detach())
    grad = normal(rng, *found.shape, dtype=dtype)
    found.backward(grad)
    wanted.backward(grad)
    assert same(x.grad, other.grad)
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device) == (linear.weight.shape, dtype, linear.weight.device)
    assert same(weight.values(), want.weight.values())
    assert same(weight[:1], want.weight[:1])
    assert same(weight.to("cpu").values(), want.weight.values())
    dequantize_(model)
    assert type(model[0]) is nn.Linear
    assert same(model[0].weight.detach(), want.weight.values())


def int4_codes(linear, size):
    made = int4_weight(linear.weight, size)
    return made.codes(), made.channel_scale


def test_compiled_layers_have_the_same_bits():
    rng = fresh()
    model = packed(nn.Sequential(drawn(rng, k=130, n=40), nn.ReLU(), drawn(rng, k=40, n=5)))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.compile(lambda model: model[0].weight * 2, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (1, 3, 5):
            x = normal(rng, rows, 2, 130)
            assert same(compiled(x), model(x))
        assert same(weight(model), model[0].weight * 2)
    grads = []
    for each in (model, compiled):
        x = normal(fresh("x"), 3, 2, 130).requires_grad_()
        each(x).sum().backward()
        grads.append(x.grad)
    assert same(*grads)


def test_copies_casts_and_loaded_states_keep_the_codes():
    rng = fresh()
    model, other = (packed(nn.Sequential(drawn(rng, n=21, k=140, bias=True)), 32) for _ in range(2))
    x = normal(rng, 4, 140)
    with torch.no_grad():
        want = model(x)
        for made in copies(model):
            assert same(made(x), want)
        state = model.state_dict()
        assert {name: (each.dtype, each.dim()) for name, each in state.items()} == {
            "0.weight": (torch.uint8, 3),
            "0.weight_scale": (torch.float32, 2),
            "0.bias": (torch.float32, 1),
        }
        other.load_state_dict(state)
        assert same(other(x), want)
        empty = copy.deepcopy(other).to("meta")
        empty.load_state_dict(state, assign=True)
        assert same(empty(x), want)
        half = copy.deepcopy(model).bfloat16()
        assert (half[0].weight.dtype, half[0].weight_scale.dtype) == (torch.bfloat16, torch.float32)
        assert same(half[0].weight_q, model[0].weight_q)
        moved = copy.deepcopy(model)[0]
        moved._buffers["weight"] = moved.weight  # as packages do that move layers
        assert same(moved(x), want)
        moved.weight = model[0].weight_q.clone()
        assert same(moved(x), want)


@pytest.mark.parametrize("own", ["int4", "int8"])
def test_a_state_of_another_width_is_refused(own):
    rng = fresh(own)
    model, other = nn.Sequential(drawn(rng, n=20, k=40)), nn.Sequential(drawn(rng, n=20, k=40))
    for each in (model, other):
        each[0].bias = None
        quantize_(each, Dynamic(weights="int4" if (each is model) is (own == "int4") else "int8"))
    given, held = ("int8", "uint8") if own == "int4" else ("uint8", "int8")
    with pytest.raises(RuntimeError, match=f"0.weight: the checkpoint has torch.{given}, the module has codes, {held}"):
        model.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"weights": "int2"}, "weights must be 'int8' or 'int4'"),
        ({"weights": "int4", "group_size": 48}, "group_size must be 32, 64, 128, or 0 for one group a row"),
        ({"weights": "int4", "group_size": True}, "group_size must be 32, 64, 128"),
        ({"group_size": 64}, "group_size must be left out, or weights be 'int4'"),
        ({"symmetric": True}, "symmetric must be False, or True with weights='int4'"),
    ],
)
def test_other_configs_are_refused(given, error):
    with pytest.raises(InvalidProblem, match=error):
        Dynamic(**given)


def test_what_cannot_be_packed_stays_or_is_refused():
    rng = fresh()
    trained = nn.Sequential(drawn(rng, n=16, k=32))
    quantize_(trained, Mixed())
    report = quantize_(trained, Dynamic(weights="int4"))
    assert "be no layer in training" in report.left["0"]
    layer = int4_linear(drawn(rng, n=20, k=140))
    given = layer.weight_q, layer.weight_scale
    with pytest.raises(InvalidProblem, match="packed, uint8 of shape"):
        DynamicLinear(*given, in_features=128)
    with pytest.raises(InvalidProblem, match="or packed, uint8, with in_features"):
        DynamicLinear(*given)
    with pytest.raises(InvalidProblem, match="weight must be int8"):
        StaticLinear(*given, input_scale=torch.ones(1))
    with pytest.raises(InvalidProblem, match="not be changed"):
        layer.weight = layer.weight_q[:1]


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_fused_models_have_the_bits_of_the_same_codes_in_8_bits(dtype):
    rng = fresh(dtype)
    model = decoders.small("Qwen2", rng).to(dtype)
    size = int(rng.choice(SIZES))
    quantize_(model, Dynamic(weights="int4", group_size=size), lambda _, name: "lm_head" not in name)
    want = spread(model)
    states = model.state_dict()
    fused, wanted = fuse_(model), fuse_(want)
    assert fused.fused == wanted.fused
    assert "the norms write codes, the second one adds the residual" in fused.fused.values()
    ids = torch.from_numpy(rng.integers(1, 64, (2, 9)))
    with torch.no_grad():
        assert same(model(ids, use_cache=False).logits, want(ids, use_cache=False).logits)
    assert all(same(tensor, states[name]) for name, tensor in model.state_dict().items())
    layer = model.model.layers[0]
    assert same(layer.self_attn.k_proj.weight.values(), want.model.layers[0].self_attn.k_proj.weight.values())
    grads = []
    for each in (model, want):
        x = normal(fresh("x", dtype), 2, 3, layer.mlp.gate_proj.in_features, dtype=dtype).requires_grad_()
        each.model.layers[0].mlp(x).sum().backward()
        grads.append(x.grad)
    assert same(*grads)
    model.load_state_dict(states)
    dequantize_(model)
    assert same(model.model.layers[0].mlp.up_proj.weight.detach(), want.model.layers[0].mlp.up_proj.weight.values())


def test_layers_that_cannot_be_joined_stay_apart():
    rng = fresh()
    mlp = packed(GatedMLP(32, 40))
    x = normal(rng, 3, 32)
    with torch.no_grad():
        want = mlp(x)
        with pytest.warns(UserWarning, match="fuse_ left"):
            report = fuse_(mlp)
        assert report.left == {"": "gate_proj has 40 rows; packed weights are joined in multiples of 16"}
        assert same(mlp(x), want)
    mixed = GatedMLP(32, 48)
    quantize_(mixed, Dynamic(weights="int4"), lambda _, name: name != "up_proj")
    quantize_(mixed, Dynamic())
    with pytest.warns(UserWarning, match="gate_proj and up_proj differ in the bits or groups of their weights"):
        fuse_(mixed)


def same_states(one, other):
    return one.keys() == other.keys() and all(same(tensor, other[name]) for name, tensor in one.items())


def blocks():
    return nn.ModuleDict({name: GatedMLP(40, 48) for name in "abc"}).eval()


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of layers of all widths, and their tensors."""
    model = blocks()
    quantize_(model, Dynamic(weights="int4"), lambda _, name: name.startswith("a"))
    quantize_(model, Dynamic(weights="int4", group_size=32), lambda _, name: name.startswith("b"))
    quantize_(model, Dynamic(), lambda _, name: name == "c.up_proj")
    states = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fuse_(model["a"])
    save(model, tmp_path)
    return tmp_path, states


def test_what_is_saved_is_loaded_bit_for_bit(saved, tmp_path):
    folder, states = saved
    model = blocks()
    assert len(load_(model, folder)) == 7
    assert [model[name].up_proj.group_size for name in "abc"] == [128, 32, None]
    assert same_states(model.state_dict(), states)
    save(model, tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()


def test_a_fused_model_loads_weights_of_its_own_width_and_groups(saved):
    folder, states = saved
    model = blocks()
    fuse_(packed(model["a"]))
    load_(model, folder)
    assert type(model["a"].up_proj).__name__ == "Part"
    assert same_states(model.state_dict(), states)
    for how in (Dynamic(), Dynamic(weights="int4", group_size=64)):
        model = blocks()
        quantize_(model["a"], how)
        fuse_(model["a"])
        with pytest.raises(InvalidRecord, match=r"a\.gate_proj\.weight must be .*load before fuse_"):
            load_(model, folder)


@pytest.mark.parametrize("exact", [False, True])
def test_transformers_quantizes_saves_and_loads_4_bit_layers(exact, tmp_path):
    rng = fresh(exact)
    decoders.small("Qwen2", rng).save_pretrained(tmp_path / "floats")
    load = transformers.AutoModelForCausalLM.from_pretrained
    given = {"attn_implementation": "skuda"}
    config = SkudaConfig(weights="int4", group_size=32, exact=exact)
    model = load(tmp_path / "floats", quantization_config=config, **given)
    layers = [layer for layer in model.modules() if isinstance(layer, DynamicLinear)]
    assert {layer.group_size for layer in layers} == {32}
    ids = torch.from_numpy(rng.integers(1, 64, (2, 9)))
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    states = model.state_dict()
    model.save_pretrained(tmp_path / "one")
    save(model, tmp_path / "two")
    for folder in ("one", "two"):
        again = load(tmp_path / folder, **given)
        assert same_states(again.state_dict(), states)
        if exact:
            exact_(again)
        with torch.no_grad():
            assert same(again(ids, use_cache=False).logits, want)
