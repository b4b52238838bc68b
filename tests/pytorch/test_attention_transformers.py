"""`attn_implementation="skuda"`: a token gives the same bits alone, in any batch, and in any split of its sequence.

The states before the head are compared: the head is torch's own product, whose sums may depend on the batch.
"""

import copy
import pickle
import subprocess
import sys

import decoders
import pytest
import torch
import transformers
from decoders import CACHE, FAMILIES, padded, same_states, split, states
from support import fresh

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, dequantize_, fuse_, quantize_
from skuda.torch.attention.interface import NAME
from skuda.torch.attention.kv_cache import Int8Cache
from skuda.torch.attention.rope_attention import FusedRopeAttention

TURNED = "q, k and v are one product, one op does norms, rope and the cache"


def small(family, rng, name=NAME, *, fused=False, **more):
    """Return a small decoder whose linear layers are int8, except for the head; fused, if asked."""
    model = decoders.small(family, rng, name, **more)
    quantize_(model, Dynamic(), lambda _, name: name != "lm_head")
    if fused:
        fuse_(model)
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_prompt_gives_the_same_bits_in_every_way(family, fused):
    rng = fresh("bits", family, fused)
    model = small(family, rng)
    if fused:
        assert list(fuse_(model).fused.values()).count(TURNED) == 2
    length = int(rng.integers(132, 150))
    ids, mask, positions = padded(rng, [length, length - 40, 2])
    whole = states(model, ids, attention_mask=mask, position_ids=positions)
    assert whole.isfinite().all()
    for row, each, of_batch in zip(ids, mask, whole, strict=True):
        alone = states(model, row[each == 1][None])
        assert same_states(alone[0], of_batch[each == 1], torch.ones(len(alone[0])))
    ends = sorted({*map(int, rng.integers(1, length - 3, 2)), length - 3, length - 2, length - 1})
    for most in (None, 200):
        cache = Int8Cache(model.config, most)
        assert same_states(split(model, cache, ids, mask, positions, ends), whole, mask)
        cache.crop(-7)
        given = {"attention_mask": mask, "position_ids": positions[:, -7:], CACHE: cache}
        assert same_states(states(model, ids[:, -7:], **given), whole[:, -7:], mask[:, -7:])
    right, mask, positions = padded(rng, [length, 30], right=True)
    got = states(model, right, attention_mask=mask, position_ids=positions)
    assert same_states(got[1, :30], states(model, right[1:, :30])[0], torch.ones(30))


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_generate_takes_the_cache_greedily_and_with_guesses_and_beams(fused):
    rng = fresh("generate", fused)
    model = small("Llama", rng, fused=fused)
    ids, mask, _ = padded(rng, [9, 6])
    named = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}

    def made(*given, most=None, **more):
        return model.generate(*given, **{CACHE: Int8Cache(model.config, most)}, **{**named, **more})

    greedy = made(ids)
    assert torch.equal(made(ids, most=20), greedy)
    assert torch.equal(made(ids[1:, 3:], attention_mask=mask[1:, 3:])[0], greedy[1, 3:])
    assert torch.equal(made(ids[:1], attention_mask=mask[:1], prompt_lookup_num_tokens=3), greedy[:1])
    beams = made(ids, num_beams=3)
    assert torch.equal(made(ids, num_beams=3, most=20), beams)
    assert torch.equal(made(ids[1:, 3:], attention_mask=mask[1:, 3:], num_beams=3)[0], beams[1, 3:])


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_a_step_with_a_fixed_cache_is_one_graph(family, fused):
    rng = fresh("compiled", family, fused)
    model = small(family, rng, fused=fused)
    ids, mask, positions = padded(rng, [12, 9])
    given = {"attention_mask": mask, "position_ids": positions}
    whole = states(model, ids, **given)
    torch._dynamo.reset()
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    cache = Int8Cache(model.config, 30)
    split(model, cache, ids[:, :8], mask[:, :8], positions[:, :8], [])
    function = type(model).prepare_inputs_for_generation
    for at in range(8, 12):
        inputs = function(  # makes the masks outside of the graph, as `generate` does
            model,
            ids[:, at : at + 1],
            attention_mask=mask[:, : at + 1],
            position_ids=positions[:, at : at + 1],
            **{CACHE: cache},
        )
        with torch._dynamo.config.patch(error_on_recompile=at > 8):
            got = compiled(**{name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids", CACHE)})
        assert same_states(got.last_hidden_state, whole[:, at : at + 1], mask[:, at : at + 1])


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_a_call_without_a_cache_is_one_graph_if_it_has_a_mask(fused):
    rng = fresh("graph", fused)
    model = small("Mistral", rng, fused=fused)
    ids, mask, positions = padded(rng, [12, 9])
    given = {"attention_mask": mask, "position_ids": positions}
    torch._dynamo.reset()
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    got = compiled(ids, **given, use_cache=False).last_hidden_state  # the first call makes the table of cosines
    assert same_states(got, states(model, ids, **given), mask)
    with pytest.raises(InvalidProblem, match="without a cache, pass an attention_mask"):
        torch.compile(model.model, backend="aot_eager")(ids, use_cache=False)


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@torch.no_grad()
def test_an_encoder_sees_all_tokens_and_no_padding(kind):
    rng = fresh("encoder", kind)
    torch.manual_seed(int(rng.integers(1 << 30)))
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, vocab_size=64, attn_implementation=NAME)
    model = transformers.BertModel._from_config(config, add_pooling_layer=False).eval()
    quantize_(model, Dynamic())
    ids, mask, positions = padded(rng, [140, 30], right=kind == "right")
    if kind == "holes":
        mask[1] = torch.from_numpy(rng.permutation(mask[1].numpy()))
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    for row, each, of_batch in zip(ids, mask == 1, got, strict=True):
        alone = model(row[each][None]).last_hidden_state[0]
        assert torch.equal(of_batch[each], alone)
        assert torch.equal(model(row[each][None], attention_mask=torch.ones(1, len(alone))).last_hidden_state[0], alone)
    model.set_attn_implementation("sdpa")
    want = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    assert (got - want)[mask == 1].norm() < 0.05 * want[mask == 1].norm()


REFUSED = {
    "packed": ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "mask must be causal"),
    "own": ({"attention_mask": torch.ones(1, 1, 6, 6).bool()}, r"two axes, \(batch, tokens\).* bool of shape"),
    "additive": ({"attention_mask": torch.zeros(1, 1, 6, 6)}, r"two axes, \(batch, tokens\).* float32 of shape"),
    "holes": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}, "had zeros between the tokens"),
    "short": ({"attention_mask": torch.ones(1, 4)}, "must have 6, those of all tokens so far"),
    "weights": ({"output_attentions": True}, "output_attentions must be left out"),
    "softcap": ({"softcap": 3.0}, "softcap must be left out"),
    "sinks": ({"s_aux": torch.ones(4)}, "s_aux must be left out; .* had a Tensor"),
    "lengths": ({"cu_seq_lens_q": torch.tensor([0, 6])}, "cu_seq_lens_q must be left out"),
    "other cache": ({"use_cache": True, CACHE: None}, "must be an Int8Cache|as many as queries"),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", REFUSED)
@torch.no_grad()
def test_what_it_cannot_do_is_refused_by_name(kind, fused):
    rng = fresh("refused", kind, fused)
    model = small("Llama", rng, fused=fused)
    given, match = REFUSED[kind]
    ids = torch.from_numpy(rng.integers(1, 64, (1, 6)))
    if CACHE in given:
        given = given | {CACHE: transformers.DynamicCache(config=model.config)}
        model.set_attn_implementation("sdpa")
        states(model, ids, **given)
        model.set_attn_implementation(NAME)
    with pytest.raises(InvalidProblem, match=match):
        states(model, ids, **given)


@pytest.mark.parametrize("fused", [False, True])
def test_models_and_modes_that_it_does_not_serve_are_refused_by_name(fused):
    rng = fresh("modes", fused)
    model = small("Llama", rng, attention_dropout=0.5, fused=fused)
    ids = torch.from_numpy(rng.integers(1, 64, (1, 6)))
    with pytest.raises(InvalidProblem, match=r"under torch.no_grad\(\)"):
        states(model, ids)
    with torch.no_grad():
        with pytest.raises(InvalidProblem, match="dropout must be 0"):
            states(model.train(), ids)
        states(model.eval(), ids)
        model.config.sliding_window = 5
        with pytest.raises(InvalidProblem, match="sliding_window must be 5, as in the model's config"):
            states(model, ids)
        wide = small("Llama", rng, head_dim=48, fused=fused)
        with pytest.raises(InvalidProblem, match=r"in a \w*Attention: head_size must be one of 32, 64, 128"):
            states(wide, ids)
        encoder = transformers.BartConfig(d_model=64, encoder_layers=1, decoder_layers=1, attn_implementation=NAME)
        with pytest.raises(InvalidProblem, match="be no encoder-decoder"):
            transformers.BartModel._from_config(encoder).eval()(ids)
    with pytest.raises(ValueError, match=r"skuda.* is not supported"):
        model.generate_batch(inputs=[[1, 2, 3]], max_new_tokens=2)


def doubled(model):
    """Let the queries turn in another way."""
    layer = model.model.layers[0].self_attn

    class Other(type(layer)):
        def forward(self, hidden_states, **kwargs):
            return self.o_proj(
                self.q_proj(hidden_states) * 2 + self.k_proj(hidden_states).mean() + self.v_proj(hidden_states).mean()
            ), None

    layer.__class__ = Other


LEFT = {
    "rope": (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "its rope, dynamic, may change"),
    "forward": (doubled, "its forward is not a known form of an attention with rope"),
    "alone": (lambda model: delattr(model.model, "rotary_emb"), "no module around it has a rotary_emb"),
}


@pytest.mark.parametrize("kind", LEFT)
def test_an_attention_that_is_not_understood_keeps_its_forward(kind):
    model = small("Llama", fresh("left", kind))
    change, reason = LEFT[kind]
    change(model)
    report = fuse_(model)
    name = "model.layers.0.self_attn"
    assert report.fused[name] == "q, k and v are one product"
    assert report.left[name].startswith(f"rope and cache stay separate: {reason}")
    assert not isinstance(model.get_submodule(name), FusedRopeAttention)


@torch.no_grad()
def test_a_fused_attention_can_be_copied_hooked_switched_and_taken_back():
    rng = fresh("fused")
    model = small("Qwen3", rng)
    unfused, layers = copy.deepcopy(model), model.model.layers
    fuse_(model)
    ids, mask, positions = padded(rng, [9, 6])
    want = states(model, ids, attention_mask=mask, position_ids=positions)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  our own
        assert torch.equal(states(other, ids, attention_mask=mask, position_ids=positions), want)
    with pytest.raises(InvalidProblem, match="position_ids must count the tokens of each sequence from 0"):
        states(model, ids, attention_mask=mask)
    handle = layers[0].self_attn.q_norm.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="q_norm has hooks"):
        states(model, ids)
    handle.remove()
    for each in (model, unfused):
        each.set_attn_implementation("sdpa")
    torch.testing.assert_close(states(model, ids), states(unfused, ids), rtol=0.1, atol=0.1)
    model.set_attn_implementation(NAME)
    dequantize_(model)
    assert type(layers[0].self_attn) is type(unfused.model.layers[0].self_attn)


def test_importing_the_bridge_registers_it():
    code = "import skuda.torch.transformers, transformers; print('skuda' in transformers.AttentionInterface())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"
