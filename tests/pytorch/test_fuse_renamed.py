"""`fuse_` with the decorator of transformers that accepts former names of arguments."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from support import fresh
from transformers.utils import deprecation

from skuda.tools.studies import llama
from skuda.torch import Dynamic, fuse_, quantize_
from skuda.torch.fuse.fused_modules import Fused

SIZES = llama.LlamaSizes(hidden=48, intermediate=72, heads=4, kv_heads=2, layers=1)


class Attention(llama.LlamaAttention):
    @deprecation.deprecate_kwarg("past", "99.0", new_name="cache")
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.o_proj(q + (0 if cache is None else cache)), k + v


class Layer(llama.LlamaLayer):
    @deprecation.deprecate_kwarg("past", "99.0", new_name="cache")
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), angles=angles, cache=cache, positions=positions
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OfTheInput(Attention):
    @deprecation.deprecate_kwarg("states", "99.0", new_name="hidden_states")
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        return self.o_proj(self.q_proj(hidden_states)), self.k_proj(hidden_states) + self.v_proj(hidden_states)


class OfNothing(Attention):
    @deprecation.deprecate_kwarg("past", "99.0")
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        return self.o_proj(self.q_proj(hidden_states)), self.k_proj(hidden_states) + self.v_proj(hidden_states)


def plain(function):
    return function


class Decorated(Attention):
    @plain
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        return self.o_proj(self.q_proj(hidden_states)), self.k_proj(hidden_states) + self.v_proj(hidden_states)


def a_layer(rng, attention=Attention):
    layer = llama.LlamaLayer(SIZES)
    with torch.no_grad():
        for parameter in layer.parameters():
            drawn = torch.from_numpy(rng.normal(0, 0.2, tuple(parameter.shape)))
            parameter.copy_(drawn + 1 if parameter.ndim == 1 else drawn)
    layer = layer.bfloat16().eval()
    layer.__class__, layer.self_attn.__class__ = Layer, attention
    quantize_(layer, Dynamic())
    return layer


def test_layers_with_former_names_are_fused_and_take_them():
    rng = fresh("former names")
    layer = a_layer(rng)
    fused = copy.deepcopy(layer)
    report = fuse_(fused)
    assert set(report.fused) == {"", "self_attn", "mlp"}, str(report)
    assert isinstance(fused, Fused)
    x, cache = (torch.from_numpy(rng.normal(size=(2, 3, 48)).astype(np.float32)).bfloat16() for _ in range(2))
    with torch.no_grad():
        without, want = fused(x), fused(x, cache=cache)
        assert (want - layer(x, cache=cache)).norm() < 0.02 * want.norm()
        assert (want - without).norm() > 0.02 * want.norm(), "the cache counts"
        with pytest.warns(FutureWarning, match="`past` is deprecated"):
            former = fused(x, past=cache)
        with pytest.warns(FutureWarning, match="Both `past` and `cache`"):
            both = fused(x, past=-cache, cache=cache)
        with pytest.warns(FutureWarning, match="`past` is deprecated"):
            attended, _ = fused.self_attn(x, past=cache)
        assert torch.equal(attended, fused.self_attn(x, cache=cache)[0])
    for found in (former, both):  # the original forward, whose norms round in between
        assert (found - want).norm() < 0.02 * want.norm()
        assert (found - without).norm() > 0.02 * want.norm()


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (OfTheInput, "may take states in the place of hidden_states"),
        (OfNothing, "may take past in the place of nothing"),
        (Decorated, "not a plain method of an input"),
    ],
)
def test_another_decorator_is_not_proven(attention, why):
    layer = a_layer(fresh("another decorator"), attention)
    with pytest.warns(UserWarning, match=why):
        report = fuse_(layer)
    assert why in report.left["self_attn"]
    assert type(layer.self_attn) is attention
