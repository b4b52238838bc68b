"""`Int8Cache`: what a token gives does not depend on pages, on how they are shared, or on what was there before."""

import copy
from inspect import signature

import pytest
import torch
import transformers
from support import fresh

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, quantize_
from skuda.torch.attention.interface import NAME
from skuda.torch.attention.kv_cache import CacheLayer, Int8Cache

CACHE = next(
    each for each in ("cache", "past_key_values") if each in signature(transformers.LlamaModel.forward).parameters
)
HEADS, SIZE, LAYERS = 2, 32, 2
ACTIONS = ("reorder", "crop", "copy", "select", "repeat")


def llama(rng):
    """Return a model whose linear layers are int8."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        num_hidden_layers=LAYERS,
        vocab_size=64,
        attn_implementation=NAME,
    )
    model = transformers.LlamaModel._from_config(config).bfloat16().eval()
    quantize_(model, Dynamic())
    return model


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Let pages that nothing has written hold scales of NaN, which no token may see."""
    reserve = CacheLayer.reserve

    def filled(self, *given):
        before = len(self.tensors[0]) if self.tensors else 0
        reserve(self, *given)
        for tensor in self.tensors:
            tensor[before:].fill_(float("nan") if tensor.is_floating_point() else 77)

    monkeypatch.setattr(CacheLayer, "reserve", filled)


def stepped(model, cache, ids, mask):
    """Return the states of new columns; `mask` has all columns so far."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}, use_cache=True).last_hidden_state


def started(model, rng, cache, sequences=2, columns=9, padding=0):
    """Return ids and mask of a first call."""
    ids, mask = torch.from_numpy(rng.integers(0, 64, (sequences, columns))), torch.ones(sequences, columns).long()
    mask[1:, :padding] = 0
    stepped(model, cache, ids, mask)
    return ids, mask


class Story:
    """A batch to which things happen: what each sequence holds, and its mask."""

    def __init__(self, model, rng, cache, columns, padding):
        self.model, self.rng, self.cache = model, rng, cache
        self.ids, self.mask = torch.zeros(len(padding), 0).long(), torch.zeros(len(padding), 0).long()
        self.add(columns, padding)

    def add(self, columns, padding=None):
        """Add random tokens, and compare what those of two sequences give with what they give alone."""
        ids = torch.from_numpy(self.rng.integers(0, 64, (len(self.ids), columns)))
        mask = torch.ones_like(ids)
        for row, count in zip(mask, padding or [], strict=False):
            row[:count] = 0
        self.ids, self.mask = torch.cat((self.ids, ids), 1), torch.cat((self.mask, mask), 1)
        got = stepped(self.model, self.cache, ids, self.mask)
        for at in self.rng.permutation(len(ids))[:2]:  # it takes a while
            tokens = self.mask[at] == 1
            alone = self.model(self.ids[at, tokens][None], use_cache=False).last_hidden_state[0]
            new = int(tokens[-columns:].sum())
            assert torch.equal(got[at, columns - new :], alone[len(alone) - new :])

    def select(self, index):
        self.ids, self.mask = self.ids[index], self.mask[index]

    def crop(self, columns):
        self.ids, self.mask = self.ids[:, :-columns], self.mask[:, :-columns]
        self.cache.crop(-columns)


@pytest.mark.parametrize("most", [None, 400])
@torch.no_grad()
def test_sequences_that_are_reordered_cropped_and_copied_give_what_they_give_alone(most):
    rng = fresh("story", most)
    model = llama(rng)
    story = Story(model, rng, Int8Cache(model.config, most), int(rng.integers(120, 270)), [0, 5, 119])
    for number in range(7):
        action = ACTIONS[number if number < 3 else rng.integers(3 if most else len(ACTIONS))]
        batch = len(story.ids)
        if action == "reorder":
            index = torch.from_numpy(rng.integers(0, batch, batch))
            story.cache.reorder_cache(index)
            story.select(index)
        elif action == "crop":
            story.crop(int(rng.integers(1, min(story.ids.shape[1], 140))))
        elif action == "copy":
            other = copy.deepcopy(story)
            other.add(2)
            assert other.cache.get_seq_length() == story.cache.get_seq_length() + 2
        elif action == "select" and batch > 2:
            index = torch.from_numpy(rng.permutation(batch)[: batch - 1])
            story.cache.batch_select_indices(index)
            story.select(index)
        elif action == "repeat" and batch < 4:
            story.cache.batch_repeat_interleave(2)
            story.select(torch.arange(batch).repeat_interleave(2))
        story.add(int(rng.choice([1, 3, 10])))
    assert story.cache.get_seq_length() == story.ids.shape[1]
    assert story.cache.batch_size == len(story.ids)


@torch.no_grad()
def test_full_pages_are_shared_and_the_last_one_is_not():
    rng = fresh("shared")
    model = llama(rng)
    cache = Int8Cache(model.config)
    started(model, rng, cache, 2, 300)
    cache.reorder_cache(torch.tensor([0, 0]))
    one, other = cache.sequences.block_table.tolist()
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    pages = cache.nbytes
    cache.crop(-100)  # into the pages that they share
    one, other = cache.sequences.block_table.tolist()
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
    assert cache.nbytes == pages


@torch.no_grad()
def test_tokens_after_padding_to_the_right_overwrite_it():
    rng = fresh("right")
    model, cut = llama(rng), int(rng.integers(1, 9))
    cache = Int8Cache(model.config)
    ids = torch.from_numpy(rng.integers(0, 64, (2, 12)))
    mask = torch.ones_like(ids)
    mask[1, cut:9] = 0
    stepped(model, cache, ids[:, :9], mask[:, :9])
    got = stepped(model, cache, ids[:, 9:], mask)
    assert torch.equal(got[1:], model(ids[1:, mask[1] == 1], use_cache=False).last_hidden_state[:, cut:])
    assert cache.sequences.lengths.tolist() == [12, cut + 3]
    cache.crop(torch.tensor(-2))  # as assisted decoding of transformers 5.17 has it
    assert cache.sequences.lengths.tolist() == [10, cut + 1]
    assert torch.equal(stepped(model, cache, ids[:, 10:], mask), got[:, 1:])
    with pytest.raises(InvalidProblem, match="padding between tokens or to the right"):
        cache.crop(-4)


@torch.no_grad()
def test_pages_take_the_bytes_of_codes_and_scales_and_are_kept():
    rng = fresh("bytes")
    model = llama(rng)
    cache = Int8Cache(model.config)
    assert (cache.nbytes, cache.batch_size, cache.get_seq_length(), cache.get_max_length()) == (0, -1, 0, -1)
    started(model, rng, cache, 3, 128)
    of_bf16 = LAYERS * HEADS * 4 * SIZE
    assert cache.nbytes == 3 * 128 * LAYERS * HEADS * (2 * SIZE + 8)
    assert cache.nbytes < 0.6 * 3 * 128 * of_bf16
    held = [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors]
    cache.reset()
    assert cache.get_seq_length() == 0
    started(model, rng, cache, 3, 100)
    assert held == [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors]
    assert cache.get_mask_sizes(5, 0) == (105, 0)


@torch.no_grad()
def test_a_cache_of_fixed_length_keeps_its_memory_and_refuses_more():
    rng = fresh("fixed")
    model = llama(rng)
    cache = Int8Cache(model.config, 11)
    assert cache.is_compileable
    assert not Int8Cache(model.config).is_compileable
    cache.early_initialization(2, HEADS, SIZE, torch.bfloat16, torch.device("cpu"))
    held = [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors]
    ids, mask = started(model, rng, cache)
    stepped(model, cache, ids[:, :2], torch.nn.functional.pad(mask, (0, 2), value=1))
    assert cache.get_seq_length() == 11
    assert held == [tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors]
    with pytest.raises(InvalidProblem, match="at most max_cache_len = 11"):
        model(ids[:, :1], **{CACHE: cache})
    with pytest.raises(InvalidProblem, match="sequences must be at most 2"):
        cache.batch_repeat_interleave(2)


@torch.no_grad()
def test_layers_go_to_the_cpu_and_come_back_before_their_turn(monkeypatch):
    rng = fresh("offload")
    model, moves = llama(rng), []
    cache, plain = Int8Cache(model.config, offloading=True), Int8Cache(model.config)
    for name in ("offload", "prefetch"):
        monkeypatch.setattr(CacheLayer, name, lambda self, name=name: moves.append((name, cache.layers.index(self))))
    again = copy.deepcopy(rng)
    ids, mask = started(model, rng, cache)
    started(model, again, plain)
    assert moves == [("prefetch", 0), ("prefetch", 1), ("offload", 0), ("prefetch", 1), ("prefetch", 0), ("offload", 1)]
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    assert torch.equal(*(stepped(model, each, ids[:, :1], mask) for each in (cache, plain)))
    assert not cache.is_compileable
    monkeypatch.undo()
    layer = cache.layers[0]
    layer.sequences.lengths = layer.sequences.lengths.to("meta")
    layer.prefetch()
    assert {tensor.device.type for tensor in layer.tensors} == {"meta"}
    layer.offload = lambda: CacheLayer._move(layer, torch.device("meta"))
    layer.offload()


@pytest.mark.parametrize("most", [None, 30])
def test_a_cache_of_inference_mode_is_used_outside_of_it(most):
    rng = fresh("inference", most)
    model = llama(rng)
    cache = Int8Cache(model.config, most)
    with torch.inference_mode():
        ids, mask = started(model, rng, cache)
    with torch.no_grad():
        cache.reorder_cache(torch.tensor([0, 0]))
        cache.batch_select_indices(torch.tensor([1]))
        got = stepped(model, cache, ids[:1, :1], torch.nn.functional.pad(mask[:1], (0, 1), value=1))
        alone = model(torch.cat((ids[:1], ids[:1, :1]), 1), use_cache=False).last_hidden_state[:, -1:]
    assert torch.equal(got, alone)


@torch.no_grad()
def test_what_is_wrong_is_refused_by_name():
    rng = fresh("wrong")
    model = llama(rng)
    cache = Int8Cache(model.config)
    ids, mask = started(model, rng, cache, padding=4)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)

    def refuses(match, function, *given, **named):
        with pytest.raises(InvalidProblem, match=match):
            function(*given, **named)

    refuses("sequences must be 2, as in the calls before", stepped, model, cache, ids[:1, :1], longer[:1])
    hidden = longer.clone()
    hidden[0, 1] = 0
    refuses("another number of earlier tokens", stepped, model, cache, ids[:, :1], hidden)
    refuses("must have 10, those of all tokens", stepped, model, cache, ids[:, :1], mask)
    zeros = torch.nn.functional.pad(longer, (0, 1), value=0)
    refuses(
        "zeros between the tokens", stepped, model, cache, ids[:, :3], torch.nn.functional.pad(zeros, (0, 1), value=1)
    )
    refuses("tokens_to_remove must be an integer, negative or 0", cache.crop, 3)
    refuses("update must be called on the cache", cache.layers[0].update, None, None)
    refuses("max_cache_len must be in", Int8Cache, model.config, 0)
    refuses("had chunked_attention", Int8Cache, transformers.Llama4TextConfig(num_hidden_layers=4))
    refuses("attn_implementation must be", lambda: cache.update(ids, ids, 0)[0].shape)
    refuses("attn_implementation must be", lambda: torch.cat((cache.update(ids, ids, 0)[0], ids)))
    calls = []
    handle = model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stepped(model, cache, ids[:, :1], longer)
    handle.remove()
    refuses("layer 1 must have seen all tokens", model, ids[:, :1], **{CACHE: cache})
    cache.reset()
    started(model, rng, cache)
