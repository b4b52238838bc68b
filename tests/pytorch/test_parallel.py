"""A model that is split over processes has one hash for any number of ranks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from parallel_cases import WEIGHTS
from processes import ran_on_ranks, returned
from support import fresh
from tensors import GatedMLP, assert_same, normal
from torch import nn

from skuda.dispatch.shard import GroupMismatch, Shards, on_ranks
from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    ColumnLinear,
    Dynamic,
    DynamicLinear,
    Mixed,
    RowLinear,
    StaticLinear,
    fuse_,
    load_,
    parallelize_,
    quantize_,
    save,
)
from skuda.torch.convert.update import update_
from skuda.torch.distributed.digest import sums
from skuda.torch.hf.scheme import Scheme
from skuda.torch.int4 import int4_linear
from skuda.torch.linear.int8_linear import propagating


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of four processes, by its name and number of ranks."""
    folder, seed = tmp_path_factory.mktemp("ranks"), int(fresh().integers(2**31))
    return returned(ran_on_ranks("parallel_cases", {"every": (folder, seed)}, 4, folder, seconds=600)["every"])


def cases(ranks, name):
    return [found for rank in ranks for case, found in rank.items() if case.startswith(name)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_llama_has_one_hash_on_any_number_of_ranks(ranks, weights):
    every = cases(ranks, f"hashes {weights}")
    assert len(every) == 1 + 2 + 3 + 4
    assert len({found[way] for found in every for way in ("whole", "shared", "cheapest") if way in found}) == 1
    for way in every[0]:
        assert len({found[way] for found in every}) == 1, way


@pytest.mark.parametrize("weights", WEIGHTS)
def test_checkpoints_are_whole_and_read_by_any_number_of_ranks(ranks, weights):
    assert cases(ranks, f"checkpoints {weights}") == [[True] * 14] * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_checkpoints_of_joined_layers_are_those_of_the_layers(ranks, weights):
    assert cases(ranks, f"fused checkpoints {weights}") == [[True] * 8] * (1 + 2 + 3 + 4)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_layers_of_ranks_compile_to_one_graph(ranks, weights):
    assert cases(ranks, f"compiled {weights}") == [[True] * 6] * 2


def test_ranks_that_do_something_else_are_named_on_every_rank(ranks):
    every = cases(ranks, "differing")
    assert every == every[:1] * 4
    order, shape, chunks, given, model, weights, *kinds = every[0]
    assert order[:2] == ("call", [0, 1])
    assert "rank 0 has second" in order[2]
    assert "rank 1 has first" in order[2]
    assert shape[:2] == ("call", [0, 3])
    assert chunks[:2] == ("call", [0, 1])
    assert "chunks=2" in chunks[2]
    assert model[:2] == ("layers", [0, 1])
    assert given[:2] == ("call", [0, 2])
    assert "input" in given[2]
    assert weights[:2] == ("codes, scales and bias of 0", [0, 1])
    assert kinds == ["DynamicLinear"] * 2


def changed(model, tensor, place=0):
    """Change one element of a layer's buffer."""
    with torch.no_grad():
        model.get_submodule("up")._buffers[tensor].view(-1)[place] += 1


class Pair(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(24, 8)
        quantize_(self, config)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.first(x))))


PAIR = {"up": "column", "down": "row"}


@pytest.mark.parametrize("tensor", ["weight", "weight_scale", "bias"])
def test_ranks_with_other_weights_are_refused_and_left(tensor):
    rng = fresh(tensor)
    model = Pair(Dynamic())
    models = [copy.deepcopy(model) for _ in range(3)]
    changed(models[2], tensor, int(rng.integers(getattr(model.up, tensor).numel())))

    def work(group):
        with pytest.raises(GroupMismatch, match="codes, scales and bias of up") as caught:
            parallelize_(models[group.rank], group, PAIR)
        return [rank for rank, _ in caught.value.ranks]

    assert on_ranks(3, work) == [[0, 2]] * 3
    assert all(type(layer) is DynamicLinear for model in models for layer in model.children())


def test_a_layer_that_stays_whole_must_be_the_same_on_every_rank():
    models = [Pair(Dynamic()), Pair(Dynamic())]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[1].first.weight_q[0, 0] += 1

    def work(group):
        with pytest.raises(GroupMismatch, match="bias of first"):
            parallelize_(models[group.rank], group, PAIR)

    on_ranks(2, work)


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_is_split_once(fused):
    model = GatedMLP(24, 40, nn.SiLU())
    quantize_(model, Dynamic())
    if fused:
        fuse_(model)
    models = [model, copy.deepcopy(model)]

    def work(group):
        mine = models[group.rank]
        names = parallelize_(mine, group).converted
        before = list(mine.modules())
        for plan in (None, dict.fromkeys(names, "row")):
            with pytest.raises(InvalidProblem, match=r"be whole, but is split already.*Linear on 2 ranks"):
                parallelize_(mine, group, plan)
        assert list(mine.modules()) == before

    on_ranks(2, work)


@torch.no_grad()
def test_layers_that_propagate_do_so_on_ranks_unless_they_are_static():
    models = list(map(copy.deepcopy, [Pair(Dynamic(nonfinite="propagate"))] * 2))
    x = normal(fresh(), 3, models[0].up.in_features)
    x[1, 5] = torch.nan
    wanted = models[0](x)
    assert wanted.isnan().any(1).tolist() == [False, True, False]

    def work(group):
        model = models[group.rank]
        static = StaticLinear(torch.ones(4, 4).char(), torch.ones(4), input_scale=torch.ones(1))
        with pytest.raises(InvalidProblem, match="whole must be made without nonfinite"):
            ColumnLinear(propagating(static), group)
        for name in ("max", "sum"):  # of ranks that are threads, which exchange arrays
            take = getattr(group, name)
            object.__setattr__(group, name, lambda data, take=take: torch.as_tensor(take(data)))
        parallelize_(model, group, PAIR)
        assert_same(model(x), wanted)

    on_ranks(2, work)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 100])
def test_sums_tell_bytes_apart(monkeypatch, size):
    monkeypatch.setattr("skuda.torch.distributed.digest._BLOCK", 3)
    rng = fresh(size)
    data = torch.from_numpy(rng.integers(0, 256, size + 1, np.uint8))[1:]
    assert sums(data) == sums(data.clone())
    for place in range(size):
        other = data.clone()
        other[place] ^= int(rng.integers(1, 256))
        assert sums(other) != sums(data)
    for shift in (1, 8):  # the second keeps words, and moves them
        turned = data.roll(shift)
        assert (sums(turned) == sums(data)) == torch.equal(turned, data)


def test_what_cannot_be_shared_is_refused_and_left(tmp_path):
    def work(group):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        quantize_(model, Dynamic())
        for plan, words in (({"2": "row"}, "no layer of this name"), ({"0": "rows"}, "be column or row")):
            with pytest.raises(InvalidProblem, match=words):
                parallelize_(model, group, {"1": "column", **plan})
        with pytest.raises(InvalidProblem, match="no int8 layer of this name"):
            parallelize_(model, group, lm_head=True)
        for chunks in (0, True, 2.0, "2"):
            with pytest.raises(InvalidProblem, match="chunks must be an integer, at least 1"):
                parallelize_(model, group, {"1": "row"}, chunks=chunks)
        assert all(type(layer) is DynamicLinear for layer in model)
        with pytest.raises(InvalidProblem, match="have axis k and 2 ranks"):
            RowLinear(model[0], group, Shards(axis="n", count=2))
        column = ColumnLinear(model[0], group)
        shared = nn.Sequential(column)
        with pytest.raises(InvalidProblem, match=r"be a whole layer: use skuda\.torch\.save"):
            Scheme.of(shared)
        save(shared, tmp_path / "checkpoint")
        own_kind = type("Own", (DynamicLinear,), {})
        with pytest.raises(InvalidProblem, match="not from a subclass"):
            ColumnLinear(own_kind.from_linear(nn.Linear(8, 8)), group).gathered()
        again = nn.Sequential(nn.Linear(8, 8))
        load_(again, tmp_path / "checkpoint")
        assert torch.equal(again[0].weight_q[4 * group.rank :][:4], column.weight_q)
        with pytest.raises(InvalidProblem, match="have no gradient"):
            column(torch.ones(1, 8, requires_grad=True))

    on_ranks(2, work)


@pytest.mark.parametrize(
    ("axis", "sizes", "words"),
    [
        ("n", (24, 16), "begin at multiples of 16 output channels"),
        ("k", (64, 236), "begin at multiples of 128 inputs"),
    ],
)
def test_parts_of_4_bit_weights_are_whole_units(axis, sizes, words):
    whole = int4_linear(nn.Linear(300, 40))

    def work(group):
        kind = ColumnLinear if axis == "n" else RowLinear
        with pytest.raises(InvalidProblem, match=words) as caught:
            kind(whole, group, Shards(axis=axis, count=2, sizes=sizes))
        assert str(sizes) in str(caught.value)

    on_ranks(2, work)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_split_model_is_not_updated(weights):
    model, trained = (GatedMLP(24, 272, nn.SiLU()) for _ in range(2))
    quantize_(model, Dynamic(weights=weights))
    quantize_(trained, Mixed())
    models = [model, copy.deepcopy(model)]

    def work(group):
        mine = models[group.rank]
        parallelize_(mine, group)
        with pytest.raises(InvalidProblem, match="which must be whole"):
            update_(mine, trained)

    on_ranks(2, work)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 8}
MODELS = {
    "Llama": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 4},
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_understood(name):
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, **SIZES | MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    quantize_(model, Dynamic())
    models = [model, copy.deepcopy(model)]
    for report in on_ranks(2, lambda group: parallelize_(models[group.rank], group, lm_head=True)):
        assert len(report.converted) == 2 * 7 + 1
        assert report.left == ()


def test_an_attention_that_is_not_understood_leaves_the_model_as_it_was():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, **SIZES))
    quantize_(model, Dynamic())
    before = [type(module) for module in model.modules()]

    def refused(group):
        with pytest.raises(InvalidProblem, match="4 heads of keys and values for 5 ranks; use at most 4 ranks"):
            parallelize_(model, group)

    on_ranks(5, refused)
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *_, **__: None

    def replaced(group):
        with pytest.raises(
            InvalidProblem, match="must be understood; nothing was changed; had its forward was replaced"
        ):
            parallelize_(model, group)

    on_ranks(2, replaced)
    assert [type(module) for module in model.modules()] == before
