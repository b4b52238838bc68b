"""`compare`: the numbers of formulas in NumPy, what each layer costs, planted faults, and models left as they were."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import decoders
import numpy as np
import pytest
import torch
from support import fresh
from torch import nn

from skuda.dispatch.shard import on_ranks
from skuda.registry import InvalidProblem
from skuda.torch import (
    ColumnLinear,
    Comparison,
    Dynamic,
    SmoothDynamic,
    SmoothStatic,
    calibrate,
    compare,
    fold_,
    fuse_,
    quantize_,
)
from skuda.torch.evaluation import comparison
from skuda.torch.evaluation.likeliest import likeliest
from skuda.torch.hf.checkpoint import load_, save
from skuda.torch.linear.joined import Part

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def floats(rng, family="Llama"):
    """A small decoder whose next tokens depend on every layer."""
    model = decoders.small(family, rng, "eager").float()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data *= 20 if "embed" in name or "lm_head" in name else 8
    return model


def int8(model, config=None, filter_fn=None):
    made = copy.deepcopy(model)
    quantize_(made, config or Dynamic(), filter_fn)
    return made


def ids_of(rng, *shape):
    return torch.from_numpy(rng.integers(1, 64, shape))


def log_softmax(model, given):
    with torch.no_grad():
        x = model(**given).logits.double().numpy()
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def by_formulas(model, reference, inputs):
    """The fields of a comparison, in NumPy."""
    rows = []
    for given in inputs:
        q, p = log_softmax(model, given), log_softmax(reference, given)
        ids = given["input_ids"].numpy()
        mask = given.get("attention_mask", torch.ones(ids.shape)).numpy()
        for b, t in np.ndindex(len(ids), ids.shape[1] - 1):
            if mask[b, t] and mask[b, t + 1]:
                kl = (np.exp(p[b, t]) * (p[b, t] - q[b, t])).sum()
                following = ids[b, t + 1]
                rows.append((kl, p[b, t].argmax() == q[b, t].argmax(), q[b, t, following], p[b, t, following]))
    kl, same, mine, other = np.array(rows, np.float64).T
    error = lambda x: x.std(ddof=1) / np.sqrt(len(x))  # noqa: E731
    return {
        "tokens": len(rows),
        "divergence": kl.mean(),
        "divergence_error": error(kl),
        "divergence_median": np.median(kl),
        "divergence_p99": np.quantile(kl, 0.99),
        "agreement": same.mean(),
        "perplexity": np.exp(-mine.mean()),
        "reference_perplexity": np.exp(-other.mean()),
        "likelihood": (mine - other).mean(),
        "likelihood_error": error(mine - other),
    }


@pytest.mark.parametrize("chunk", [1 << 22, 200])
def test_the_numbers_are_those_of_formulas_and_padding_does_not_count(monkeypatch, chunk):
    monkeypatch.setattr(comparison, "_CHUNK", chunk)
    rng = fresh("formulas", chunk)
    reference = floats(rng)
    model = int8(reference)
    inputs = [{"input_ids": ids_of(rng, 2, 11)}]
    for right in (False, True):
        ids, mask, positions = decoders.padded(rng, (4, 9, 1), right=right)
        inputs.append({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    found = compare(model, reference, inputs)
    want = by_formulas(model, reference, inputs)
    assert found.model_dump(exclude={"layers"}) == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert 1e-5 < found.divergence < 1
    assert Comparison.model_validate(json.loads(found.model_dump_json())) == found
    assert f"{found.agreement:.4f}" in str(found)
    # A tensor is an input, too, and a generator serves.
    plain = compare(model, reference, (each for each in [inputs[0]["input_ids"]]))
    assert plain == compare(model, reference, inputs[:1])


def test_a_model_is_like_itself():
    rng = fresh("itself")
    model = int8(floats(rng))
    found = compare(model, model, [ids_of(rng, 1, 9)], by_layer=True)
    assert (found.divergence, found.agreement, found.likelihood, set(found.layers.values())) == (0, 1, 0, {0.0})


@pytest.mark.parametrize("fused", [False, True])
def test_the_only_int8_layer_costs_all_and_others_alone_what_they_cost(fused):
    rng = fresh("layers", fused)
    reference, inputs = floats(rng), [ids_of(rng, 2, 12), ids_of(rng, 1, 5)]
    name = "model.layers.1.mlp.up_proj"
    alone = int8(reference, filter_fn=lambda _, each: each == name)
    found = compare(alone, reference, inputs, by_layer=True)
    assert found.layers == {name: pytest.approx(found.divergence, rel=1e-9)}
    model = int8(reference)
    if fused:
        fuse_(model)
        assert any(isinstance(module, Part) for module in model.modules())
    whole = compare(model, reference, inputs, by_layer=True)
    assert len(whole.layers) == 15
    assert whole.layers[name] == found.layers[name]
    assert name in str(found)


def test_the_layer_with_a_planted_fault_costs_most():
    rng = fresh("planted")
    reference = floats(rng)
    model, wrong = int8(reference), f"model.layers.0.mlp.{LAYERS[rng.integers(4, 7)]}"
    codes = model.get_submodule(wrong).weight_q
    codes[1::2] = torch.roll(codes[1::2], 1, 1)
    layers = compare(model, reference, [ids_of(rng, 2, 20)], by_layer=True).layers
    assert max(layers, key=layers.__getitem__) == wrong
    assert layers[wrong] > 5 * sorted(layers.values())[-2]


@pytest.mark.parametrize("config", [SmoothDynamic, SmoothStatic])
@pytest.mark.parametrize("fold", [True, False])
def test_factors_that_a_norm_took_over_divide_the_input(config, fold):
    rng = fresh("folded", config, fold)
    reference = floats(rng)
    ids = ids_of(rng, 2, 30)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        reference.model.layers[0].get_submodule(norm).weight.data *= torch.exp(torch.randn(64))
    model = copy.deepcopy(reference)
    with calibrate(model) as calibration:
        model(ids)
    report = quantize_(model, config(calibration, alpha=0.5, fold=fold))
    assert bool(report.folded) is fold
    found = compare(model, reference, [ids], by_layer=True)
    name = "model.layers.0.self_attn.q_proj"
    # The same by hand.
    beside = copy.deepcopy(reference)
    attention = beside.model.layers[0].self_attn
    layer, norm = model.get_submodule(name), model.model.layers[0].input_layernorm
    factors = beside.model.layers[0].input_layernorm.weight / norm.weight
    attention.q_proj.forward = lambda x: layer(x / factors)
    assert found.layers[name] == pytest.approx(compare(beside, reference, [ids]).divergence, rel=0.05)
    assert 0 < max(found.layers.values()) < found.divergence * 10


def test_recorded_factors_cost_nothing_and_unknown_ones_are_refused(tmp_path):
    """Powers of two: each layer gives the bits that it gives in the folded reference."""
    rng = fresh("recorded")
    reference, ids = floats(rng), [ids_of(rng, 2, 30)]
    folded = copy.deepcopy(reference)
    with calibrate(folded) as calibration:
        folded(ids[0])
    report = fold_(folded, calibration)
    assert any(name.endswith("up_proj") for name in report.folded)
    model = int8(folded)
    save(model, tmp_path)
    fuse_(model)
    model = copy.deepcopy(model)
    found = compare(model, folded, ids, by_layer=True)
    assert compare(model, reference, ids, by_layer=True) == found
    assert max(found.layers.values()) > 0
    again = copy.deepcopy(reference)
    load_(again, tmp_path)
    assert compare(again, folded, ids, by_layer=True).layers.keys() == found.layers.keys()
    for one, other in ((again, reference), (int8(reference), folded)):
        with pytest.raises(InvalidProblem, match="reference must be folded as the model is"):
            compare(one, other, ids, by_layer=True)


def test_models_are_left_as_they_were_also_by_an_error():
    rng = fresh("left")
    reference = floats(rng)
    model = int8(reference).train()
    model.model.norm.eval()
    before = [[module.training for module in each.modules()] for each in (model, reference)]
    compare(model, reference, [ids_of(rng, 1, 5)], by_layer=True)
    with pytest.raises(InvalidProblem, match="inputs"):
        compare(model, reference, [ids_of(rng, 1, 5), "x"], by_layer=True)
    reference.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare(model, reference, [ids_of(rng, 1, 5)], by_layer=True)
    assert before == [[module.training for module in each.modules()] for each in (model, reference)]
    hooks = sum(len(module._forward_hooks) for module in reference.modules())
    assert hooks == 1
    assert all(parameter.grad is None for parameter in reference.parameters())


class Classifier(nn.Module):
    """Logits of a sequence, or of its tokens; `unused` is called by nobody."""

    def __init__(self, classes=5, *, of_tokens=False):
        super().__init__()
        self.embed, self.head, self.unused = nn.Embedding(64, 32), nn.Linear(32, classes), nn.Linear(32, classes)
        self.of_tokens = of_tokens

    def forward(self, input_ids, attention_mask=None):
        del attention_mask
        states = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(states if self.of_tokens else states.mean(1)))


@pytest.mark.parametrize("of_tokens", [False, True])
def test_logits_of_classes_have_no_likelihood(of_tokens):
    rng = fresh("classes", of_tokens)
    reference = Classifier(of_tokens=of_tokens)
    model = int8(reference)
    ids, mask, _ = decoders.padded(rng, (4, 9, 6))
    ids[:, -1] = 63
    found = compare(model, reference, [{"input_ids": ids, "attention_mask": mask}], by_layer=True)
    assert found.tokens == (int(mask.sum()) if of_tokens else 3)
    assert found.perplexity is found.reference_perplexity is found.likelihood is found.likelihood_error is None
    assert found.layers["head"] == pytest.approx(found.divergence)
    assert found.layers["unused"] is None
    assert "perplexity" not in str(found)


IDS = torch.ones(1, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "inputs", "says"),
    [
        ({}, [], "inputs must have two or more, with a next one"),
        ({}, [IDS[:, :2]], "1 tokens to compare, in 1 inputs"),
        ({"by_layer": True}, [{"input_ids": IDS, "attention_mask": IDS * 0}], "0 tokens"),
        ({}, [{"input_ids": IDS, "attention_mask": IDS[:, :3]}], "attention_mask must have the shape of the tokens"),
        ({}, IDS, "inputs must be a list of tensors"),
        ({}, [[1, 2]], "inputs must hold tensors of ids"),
        ({"model": 3}, [IDS], "model must be a torch.nn.Module"),
        ({"by_layer": 1}, [IDS], "by_layer must be True or False"),
        ({"model": nn.Embedding(64, 7)}, [IDS], r"model must return logits of the reference's shape, \[1, 4, 5\]"),
        ({"by_layer": True, "model": Classifier(of_tokens=True)}, [IDS], "model must have some with by_layer=True"),
        ({"reference": nn.Embedding(64, 5), "by_layer": True}, [IDS], "head must be a layer of the reference"),
        ({"reference": nn.Flatten()}, [IDS], "reference must return logits"),
    ],
)
def test_bad_input_is_named(change, inputs, says):
    reference = Classifier(of_tokens=True)
    given = {"model": int8(reference), "reference": reference, "by_layer": False} | change
    with pytest.raises(InvalidProblem, match=says):
        compare(given["model"], given["reference"], inputs, by_layer=given["by_layer"])


@pytest.mark.parametrize("who", ["model", "reference"])
def test_logits_that_are_not_finite_are_named(who):
    both = {"model": Classifier(of_tokens=True), "reference": Classifier(of_tokens=True)}
    both[who].head.bias.data[2] = torch.inf
    with pytest.raises(InvalidProblem, match=f"{who} must return finite ones"):
        compare(**both, inputs=[IDS])


def test_a_rank_s_part_is_refused():
    reference = Classifier(of_tokens=True)
    model = int8(reference)
    on_ranks(1, lambda group: setattr(model, "head", ColumnLinear(model.head, group)))
    with pytest.raises(InvalidProblem, match="head must be whole"):
        compare(model, reference, [IDS], by_layer=True)


@pytest.mark.parametrize("kept", [3, 64])
def test_the_divergence_of_the_likeliest_tokens_is_a_lower_bound(kept):
    rng = fresh("likeliest", kept)
    reference = floats(rng)
    model, ids = int8(reference), ids_of(rng, 1, 30)
    q = log_softmax(model, {"input_ids": ids})[0]
    places = [None]
    for row, following in zip(q, ids[0, 1:].tolist(), strict=False):
        likely = np.argsort(-row)[:kept].tolist()
        places.append({token: float(row[token]) for token in {*likely, following}})
    found = comparison.summary([likeliest(reference, ids[0], places)])
    want = by_formulas(model, reference, [{"input_ids": ids}])
    exact = {name: want[name] for name in ("tokens", "agreement", "perplexity", "reference_perplexity", "likelihood")}
    assert {name: getattr(found, name) for name in exact} == pytest.approx(exact)
    if kept == 64:
        assert found.divergence == pytest.approx(want["divergence"], rel=1e-4)
    assert 0 < found.divergence <= want["divergence"] * (1 + 1e-6)
