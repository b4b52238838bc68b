"""`dequantize_`: the way back from int8 layers, fused modules and layers in training."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from support import fresh
from tensors import GatedMLP, calibrated, normal, same
from torch import nn

from skuda.dispatch.shard import on_ranks
from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    CodesLinear,
    Dynamic,
    DynamicLinear,
    FakeQuant,
    Mixed,
    SmoothDynamic,
    SmoothStatic,
    dequantize_,
    fuse_,
    parallelize_,
    quantize_,
)
from skuda.torch.hf.transformers import SkudaConfig

WIDTH = 16


def mlp(rng, dtype=torch.float32):
    model = nn.Sequential(nn.RMSNorm(WIDTH), GatedMLP(WIDTH, 24)).eval().to(dtype)
    for parameter in model.parameters():
        parameter.data.copy_(normal(rng, *parameter.shape) / 4)
    return model


def fused(model, x):
    quantize_(model, Dynamic())
    fuse_(model)


KINDS = {
    "dynamic": lambda model, x: quantize_(model, Dynamic()),
    "fused": fused,
    "smooth": lambda model, x: quantize_(model, SmoothStatic(calibrated(model, x), fold=False)),
    "folded": lambda model, x: quantize_(model, SmoothStatic(calibrated(model, x))),
    "smoothed": lambda model, x: quantize_(model, SmoothDynamic(calibrated(model, x), 0.5, fold=False)),
}


def code_step(layer):
    """Return what one code more adds to each value of a layer's weight."""
    smooth = layer._buffers.get("smooth")
    return layer.weight_scale.float() / (1 if smooth is None else smooth.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_float_again_with_the_weights_that_it_read_as(kind, dtype):
    rng = fresh(kind, dtype)
    model, x = mlp(rng, dtype), normal(rng, 5, WIDTH, dtype=dtype)
    x[:, 3] *= 20  # which factors move into the weights
    names = [name for name, _ in model.named_modules()]
    kinds = [type(module) for module in model.modules()]
    float_state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(x)
        KINDS[kind](model, x)
        want = model(x)
        weights = {name: getattr(model[1], name).weight.clone() for name in ("gate_proj", "up_proj", "down_proj")}
        steps = {name: code_step(getattr(model[1], name)) for name in weights}
        report = dequantize_(model)
        assert [name for name, _ in model.named_modules()] == names
        assert [type(module) for module in model.modules()] == kinds
        assert not [name for module in model.modules() for name in vars(module) if name.startswith("fused_")]
        for name, weight in weights.items():
            assert same(getattr(model[1], name).weight.detach(), weight)
            if kind != "folded":  # the norm keeps the factors
                want_weight = float_state[f"1.{name}.weight"].float()
                rounded = torch.finfo(dtype).eps * want_weight.abs()  # of the product before, of the quotient after
                assert ((weight.float() - want_weight).abs() <= 0.501 * steps[name] + rounded).all()
        assert all(parameter.requires_grad and parameter.dtype is dtype for parameter in model.parameters())
        found = model(x)
        for reference in (before, want):
            assert nn.functional.cosine_similarity(found.float(), reference.float(), dim=-1).min() > 0.99
    assert len(report.converted) == 3
    assert dict(report.unfused) == ({"1": "GatedMLP"} if kind == "fused" else {})
    assert model.state_dict().keys() == float_state.keys()
    assert not dequantize_(model).converted
    model.train()(x).sum().backward()
    assert model[1].up_proj.weight.grad is not None
    quantize_(model, Dynamic())
    if kind in ("dynamic", "fused"):  # nothing is lost a second time
        assert nn.functional.cosine_similarity(model(x).float(), want.float(), dim=-1).min() > 0.99999


@pytest.mark.parametrize("config", [FakeQuant(), FakeQuant(learn_scale=True), Mixed()], ids=str)
def test_layers_in_training_keep_their_parameters(config):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    parameters = [*model.parameters()]
    quantize_(model, config)
    assert type(model[0]) is not nn.Linear
    dequantize_(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def _hook(layer):
    layer.register_forward_hook(lambda *_: None)


REFUSED = {
    "codes": (lambda old: CodesLinear(old.weight_q, old.weight_scale, input_scale=torch.ones(1)), "CodesLinear"),
    "a subclass": (lambda old: type("Own", (DynamicLinear,), {})(old.weight_q, old.weight_scale), "Own"),
    "hooks": (lambda old: _hook(old) or old, "hooks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_way_back_is_refused_by_name_and_nothing_changes(case):
    change, words = REFUSED[case]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    quantize_(model, Dynamic())
    model[1] = change(model[1])
    with pytest.raises(InvalidProblem, match=f"^dequantize_: 1 must.*{words}"):
        dequantize_(model)
    assert type(model[0]) is DynamicLinear


def test_a_layer_itself_and_a_ranks_part_are_refused():
    with pytest.raises(InvalidProblem, match=r"contain the layer, as nn\.Sequential"):
        dequantize_(DynamicLinear.from_linear(nn.Linear(4, 4)))
    with pytest.raises(InvalidProblem, match="model must be a torch"):
        dequantize_(3)
    fresh()
    weight = nn.Linear(8, 8)

    def work(group):
        model = nn.Sequential(weight)
        quantize_(model, Dynamic())
        parallelize_(model, group, {"0": "column"})
        with pytest.raises(InvalidProblem, match=r"dequantize_: 0 must be a whole layer: use skuda\.torch\.save"):
            dequantize_(model)

    on_ranks(2, work)


def test_a_model_of_transformers_is_saved_as_floats_again(tmp_path):
    rng = fresh()
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "floats")
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "floats", quantization_config=SkudaConfig(), dtype=torch.bfloat16
    )
    fuse_(model)
    others = [copy.deepcopy(model) for _ in range(2)]
    dequantize_(model)
    ids = torch.from_numpy(rng.integers(0, 61, (2, 5)))
    with torch.no_grad():
        assert same(others[0].dequantize()(ids).logits, model(ids).logits)
    exact = others[1].model.layers[0].mlp.up_proj
    want = exact.weight_q.float() * exact.weight_scale
    wide = others[1].dequantize(torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert same(wide.model.layers[0].mlp.up_proj.weight, want)
    with pytest.raises(InvalidProblem, match="dtype must be a dtype of floats"):
        dequantize_(wide, torch.int8)
    model.save_pretrained(tmp_path / "again")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert {type(module) for module in again.modules()} == {type(module) for module in model.modules()}
    assert not hasattr(again.config, "quantization_config")
    with torch.no_grad():
        assert same(again(ids).logits, model(ids).logits)
