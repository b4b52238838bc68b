"""`attn_implementation="skuda"` on every model of transformers: the result of eager attention, or a refusal."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support import fresh, sampled
from tiny_models import KINDS, answers, calls, result, small_config, small_model
from torch.nn import functional
from transformers.masking_utils import create_causal_mask

from skuda.registry.errors import InvalidProblem
from skuda.torch.attention.interface import NAME, Mask, attention

GROUPS = 32
NOT_SERVED = (
    *("big_bird", "bloom", "convbert", "falcon", "gpt_neo", "gpt_neox_japanese", "luke", "megatron-bert", "mpnet"),
    *("rembert", "roformer", "squeezebert", "trocr", "xglm"),
)
"""Models that make masks by the interface of transformers, and compute attention themselves."""


def switched(model, way, folder):
    """Return a model with int8 attention."""
    if way == "set":
        model.set_attn_implementation(NAME)
        return model
    if way == "load":
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, attn_implementation=NAME).eval()
    made = type(model)(small_config(type(model.config), attn_implementation=NAME)).float().eval()
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.parametrize("group", sampled(range(GROUPS)))
@torch.no_grad()
def test_a_model_gives_the_result_of_eager_attention_or_is_refused(group, tmp_path):
    rng, tried, refused = fresh("models", group), 0, {}
    for name in KINDS[group::GROUPS]:
        model, eager = answers(name, int(rng.integers(1 << 30))) or (None, [])
        way, tried = rng.choice(["config", "set"]), tried + len(eager)
        try:
            model = model and switched(model, way, tmp_path)
        except InvalidProblem as error:
            refused[f"{name}, {way}: {error}"] = r"attention must .*; had (\w+, of|one of) a \w+"
            continue
        for given, want in eager:
            try:
                got = result(model, given)
            except InvalidProblem as error:
                refused[f"{name}, {way}, {list(given)}: {error}"] = NAME
                continue
            assert (got - want).norm() < 0.1 * want.norm(), f"{name}, {way}, {list(given)}"
    assert tried, "no model of the group is small"
    assert not [each for each, rule in refused.items() if not re.search(rule, each)]


@pytest.mark.parametrize("way", sampled(["config", "load", "set"]))
@pytest.mark.parametrize("name", sampled(NOT_SERVED, 6))
def test_a_model_that_computes_attention_itself_is_refused_by_name(name, way, tmp_path):
    model = small_model(name, 0)
    with pytest.raises(InvalidProblem, match=rf"attention must .*; had \w+, of a {type(model).__name__[:5]}|one of a"):
        switched(model, way, tmp_path)
    assert model.config._attn_implementation == "eager"
    model(**calls(model)[0])


class Mixer(transformers.PreTrainedModel):
    """A model whose own attention has another name."""

    config_class = transformers.LlamaConfig

    def __init__(self, config, use):
        super().__init__(config)
        self.use = use

    def forward(self, rows, attention_mask=None):
        mask = create_causal_mask(self.config, rows, attention_mask, None)
        return self.use(torch.zeros(2, 1, 6, 6), mask)


USES = {
    "added": lambda scores, mask: scores if mask is None else scores + mask,
    "array": lambda scores, mask: scores + torch.tensor(np.asarray(mask)),
    "chosen": lambda scores, mask: torch.where(mask, scores, 0.0),
    "compared": lambda scores, mask: scores.masked_fill(mask == 0, -1.0),
    "converted": lambda scores, mask: scores + mask.to(scores.dtype),
    "given": lambda scores, mask: functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
    "index": lambda scores, mask: scores[mask],
    "joined": lambda scores, mask: torch.cat([scores, mask]),
    "left": lambda scores, mask: (1.0 - mask) * -1e9 + scores,
    "shape": lambda scores, mask: scores.expand(mask.shape),
    "sliced": lambda scores, mask: scores + mask[:, :, :, :6],
    "truth": lambda scores, mask: scores if mask else scores + 1,
}


@pytest.mark.parametrize("compiled", sampled([False, True]))
@pytest.mark.parametrize("use", USES)
@torch.no_grad()
def test_a_mask_can_be_used_by_no_other_attention(use, compiled):
    model = Mixer(small_config(transformers.LlamaConfig, attn_implementation=NAME), USES[use])
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for mask in (None, torch.ones(2, 6).long()):
        with pytest.raises(InvalidProblem, match=r"in a model of LlamaConfig: attention must be that of transformers'"):
            run(torch.zeros(2, 6, 64), mask)


@torch.no_grad()
def test_the_mask_says_what_tokens_see():
    rng = fresh("mask")
    module = torch.nn.Module()
    module.config, module.is_causal = SimpleNamespace(), True
    heads = torch.from_numpy(rng.standard_normal((3, 1, 2, 9, 32))).float()
    every, _ = attention(module, *heads, Mask(None, "", causal=False))
    assert torch.equal(every, attention(module, *heads, None, is_causal=False)[0])
    assert not torch.equal(every, attention(module, *heads, None)[0])
    with pytest.raises(InvalidProblem, match=r"in a Module: sliding_window must be 4, as in the model's mask.* had"):
        attention(module, *heads, Mask(None, "", 4, causal=True))
    moved = Mask(torch.ones(2, 2), "", 4, causal=True).to("meta", non_blocking=True)
    assert (moved.rows.device.type, moved.window, moved.causal) == ("meta", 4, True)
    assert hash(copy.copy(moved)) != hash(moved)
