"""`exact_`: the logits of a token have the same bits alone, in any batch and split, and in training."""

import copy
import pickle
import warnings

import decoders
import pytest
import torch
import transformers
from decoders import CACHE, FAMILIES, padded
from support import fresh
from torch import nn

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, FakeQuant, Mixed, dequantize_, fuse_, load_, quantize_, save
from skuda.torch.attention.kv_cache import Int8Cache
from skuda.torch.exact.exact import exact_, is_exact
from skuda.torch.hf.transformers import SkudaConfig

CONFIGS = {"Dynamic": Dynamic(), "Mixed": Mixed(), "FakeQuant": FakeQuant()}


def exact(model, config="Dynamic"):
    quantize_(model, CONFIGS[config], lambda *_: True)
    exact_(model)
    return model


def logits(model, ids, **given):
    return model(ids, **{"use_cache": CACHE in given} | given).logits


def same(got, want):
    assert got.dtype is want.dtype is torch.float32
    return torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_token_has_the_same_logits_in_every_way(family, config):
    rng = fresh(family, config)
    plain = decoders.small(family, rng, tie_word_embeddings=bool(rng.integers(2)))
    served, model = exact(copy.deepcopy(plain)), exact(copy.deepcopy(plain), config)
    ids, mask, positions = padded(rng, [40, 23, 1])
    want = logits(served, ids, attention_mask=mask, position_ids=positions)
    assert want.isfinite().all()
    assert same(logits(model, ids, attention_mask=mask, position_ids=positions)[mask == 1], want[mask == 1])
    alone = logits(model, ids[1:2, -23:])
    assert same(alone[0], want[1, -23:])
    right = torch.cat((ids[1:2, -23:], ids[1:2, :17]), 1)
    right_mask = (torch.arange(40) < 23).long()[None]
    assert same(logits(model, right, attention_mask=right_mask)[:, :23], alone)
    ends = sorted({*map(int, rng.integers(1, 37, 2)), 37, 38, 39})
    cache, parts = Int8Cache(model.config), []
    for start, end in zip([0, *ends], [*ends, 40], strict=True):
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], CACHE: cache}
        parts.append(logits(model, ids[:, start:end], **given))
    assert same(torch.cat(parts, 1)[mask == 1], want[mask == 1])
    if config != "Dynamic":
        with torch.enable_grad():
            trained = logits(model, ids, attention_mask=mask, position_ids=positions)
        assert trained.requires_grad
        assert same(trained.detach()[mask == 1], want[mask == 1])


@pytest.mark.parametrize("config", ["Dynamic", "Mixed"])
def test_an_exact_model_has_a_cache_of_its_own(config):
    rng = fresh(config)
    model = exact(decoders.small("Qwen3", rng), config)
    ids, mask, _ = padded(rng, [21, 9])
    with torch.no_grad():
        want = logits(model, ids)
        first = model(ids[:, :13])
        rest = model(ids[:, 13:], **{CACHE: getattr(first, CACHE, None) or first.past_key_values})
        given = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        own = model.generate(ids, **given, num_beams=2, return_dict_in_generate=True)
        assert torch.equal(own.sequences, model.generate(ids, **given, num_beams=2, **{CACHE: Int8Cache(model.config)}))
    assert same(torch.cat((first.logits, rest.logits), 1), want)
    assert type(own.past_key_values) is Int8Cache
    if config == "Mixed":
        found = [model(ids, **more).logits.square().mean() for more in ({}, {"use_cache": False})]
        grads = [torch.autograd.grad(each, [*model.parameters()]) for each in found]
        assert torch.equal(*found)
        assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("config", ["Mixed", "FakeQuant"])
@torch.no_grad()
def test_a_loss_is_nan_where_any_parameter_is_not_finite(config, value):
    rng = fresh(config, value)
    model = exact(decoders.small("Qwen3", rng, tie_word_embeddings=bool(rng.integers(2))), config)
    ids = torch.arange(64).reshape(2, 32)
    assert logits(model, ids).isfinite().all()
    for name, parameter in model.named_parameters():
        at = parameter.view(-1)[int(rng.integers(parameter.numel()))]
        before = at.clone()
        at.fill_(value)
        assert logits(model, ids).log_softmax(-1).mean().isnan(), name
        at.copy_(before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_server_shows_what_is_not_finite_where_its_trainer_does(family, value):
    rng = fresh(family, value)
    plain = decoders.small(family, rng)
    served, trained = exact(copy.deepcopy(plain)), exact(copy.deepcopy(plain), "Mixed")
    ids = torch.from_numpy(rng.integers(1, 64, (2, 23)))
    ids[0, 9] = 5
    for name, parameter in served.named_parameters():
        others = [parameter, trained.get_parameter(name)]
        before, at = parameter.clone(), int(rng.integers(parameter.shape[-1]))
        for each in others:
            (each[5] if each.dim() > 1 else each)[at] = value
        cache, want = Int8Cache(served.config), logits(trained, ids)
        steps = [logits(served, ids[:, i : i + 1], **{CACHE: cache}) for i in range(12)]
        assert want[0, 9:].isnan().all(), name
        for got in (logits(served, ids), torch.cat(steps, 1)):
            assert torch.equal(got.isnan(), want[:, : got.shape[1]].isnan()), name
            assert same(got.nan_to_num(), want[:, : got.shape[1]].nan_to_num()), name
        for each in others:
            each.copy_(before)


@torch.no_grad()
def test_a_compiled_step_has_the_same_bits():
    rng = fresh("compiled")
    model = exact(decoders.small("Qwen3", rng))
    ids = torch.from_numpy(rng.integers(1, 64, (2, 9)))
    want = logits(model, ids)
    torch._dynamo.reset()
    cache = Int8Cache(model.config, 20)
    logits(model, ids[:, :8], **{CACHE: cache})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = {"position_ids": torch.full((2, 1), 8), "attention_mask": torch.ones(2, 9).long(), CACHE: cache}
    assert same(logits(compiled, ids[:, 8:], **given), want[:, 8:])


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_a_copy_and_a_pickle_are_exact(config):
    rng = fresh(config)
    model = exact(decoders.small("Qwen3", rng), config)
    ids = torch.from_numpy(rng.integers(1, 64, (1, 7)))
    want = logits(model, ids)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  our own
        assert same(logits(each, ids), want)
    assert exact_(model).left == {}  # once more
    assert same(logits(model, ids), want)


@torch.no_grad()
def test_a_rope_that_another_device_computed_is_that_of_a_cpu():
    rng = fresh()
    first, second, other = (copy.deepcopy(decoders.small("Qwen3", rng)) for _ in range(3))
    for each, change in ((second, 1 + 2**-23), (other, 1.01)):
        each.load_state_dict(first.state_dict())
        each.model.rotary_emb.inv_freq.mul_(change)  # as a GPU rounds it; another rope
    ids = torch.from_numpy(rng.integers(1, 64, (1, 40)))
    want = logits(exact(first), ids)
    assert same(logits(exact(second), ids), want)
    assert not same(logits(exact(other), ids), want)


def made(config):
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_from_pretrained_makes_a_checkpoint_exact_and_saves_it(tied, tmp_path):
    rng = fresh(tied)
    plain = decoders.small("Llama", rng, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path / "floats")
    ids = torch.from_numpy(rng.integers(1, 64, (2, 7)))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "floats", quantization_config=SkudaConfig(exact=True))
    want = logits(model, ids)
    plain.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # `bfloat16` has rounded its frequencies
    assert same(logits(exact(plain), ids), want)
    model.save_pretrained(tmp_path / "codes")
    save(model, tmp_path / "ours")
    warnings.filterwarnings("ignore", ".*already has a `quantization_config`")
    layers = load(tmp_path / "codes", quantization_config=SkudaConfig(exact=False))
    assert not is_exact(layers)
    layers.save_pretrained(tmp_path / "layers")
    for found in (
        load(tmp_path / "codes"),
        load(tmp_path / "ours", quantization_config=SkudaConfig(exact=True)),
        load(tmp_path / "layers", quantization_config=SkudaConfig(exact=True)),
        *(loaded := [copy.deepcopy(model), made(model.config)]),
    ):
        if any(found is each for each in loaded):
            load_(found, tmp_path / "ours")
        assert same(logits(found, ids), want)
    assert load(tmp_path / "codes").config.quantization_config.to_dict()["exact"] is True
    load_(model, tmp_path / "layers")  # it stays exact
    assert same(logits(model, ids), want)
    with pytest.raises(InvalidProblem, match=r"score must .*SkudaConfig\(exact=False\)"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "codes")
    other = made(model.config)
    other.model.layers[1].mlp.act_fn = nn.ReLU()
    kinds, before = [type(each) for each in other.modules()], copy.deepcopy(other.state_dict())
    with pytest.raises(InvalidProblem, match="mlp must"):
        load_(other, tmp_path / "ours")
    assert [type(each) for each in other.modules()] == kinds
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert {"lm_head": "ExactHead"}.items() <= dequantize_(model).converted.items()
    with pytest.raises(InvalidProblem, match="ignore must be left out with exact=True"):
        SkudaConfig(["lm_head"], exact=True)


class Other(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x):
        return self.inner(x) * 2


class Halved(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding):
    def forward(self, *given):
        return tuple(part / 2 for part in super().forward(*given))


REFUSED = {
    "head in floats": (lambda model: setattr(model, "lm_head", nn.Linear(64, 64)), "lm_head must .* had a Linear"),
    "norm": (lambda model: setattr(model.model, "norm", Other(model.model.norm)), "model.norm must"),
    "rope": (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "its rope, dynamic, may change"),
    "cosines": (lambda model: setattr(model.model, "rotary_emb", Halved(model.config)), "its rope is not that of"),
    "scale": (lambda model: setattr(model.model.layers[1].mlp.up_proj, "activation", None), "activation=None"),
    "dropout": (lambda model: model.model.layers[0].add_module("more", nn.Dropout(0.1)), "more must .* dropout of 0.1"),
    "hooks": (lambda model: model.model.layers[0].mlp.register_forward_hook(print), "mlp must .* forward hooks"),
    "embedding": (lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0), "with max_norm"),
    "class": (lambda model: setattr(model, "__class__", type("Mine", (type(model),), {})), "had a Mine"),
    "family": (lambda model: setattr(model.config, "model_type", "gemma"), "of the families llama, mistral"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_by_name_and_nothing_changes(case):
    model = decoders.small("Llama", fresh(case), "sdpa")
    quantize_(model, FakeQuant() if case == "scale" else Dynamic(), lambda *_: True)
    change, message = REFUSED[case]
    with torch.no_grad():
        change(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(InvalidProblem, match=message):
        exact_(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == "sdpa"


LATER = {
    "autocast": (lambda model: None, "without autocast"),
    "hook": (lambda model: model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None), "has hooks"),
    "dtype": (lambda model: model.model.norm.float(), "have their dtype"),
    "attention": (lambda model: model.set_attn_implementation("sdpa"), "the op does not compute"),
}


@pytest.mark.parametrize("case", LATER)
@torch.no_grad()
def test_what_would_change_the_bits_later_is_refused(case):
    model = exact(decoders.small("Llama", fresh(case)))
    change, message = LATER[case]
    change(model)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"),
        pytest.raises(InvalidProblem, match=message),
    ):
        logits(model, torch.ones(1, 3).long())


def test_an_attention_that_was_fused_without_rope_is_refused():
    model = decoders.small("Llama", fresh("fused"), "sdpa")
    quantize_(model, Dynamic(), lambda *_: True)
    fuse_(model)
    with pytest.raises(InvalidProblem, match="call exact_ before fuse_"):
        exact_(model)
