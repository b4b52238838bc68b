"""A model that is split over processes has one hash for any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from support import fresh
from tensors import GatedMLP
from torch import nn

from skuda.dispatch.shard import Shards, on_ranks
from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    ColumnLinear,
    Dynamic,
    DynamicLinear,
    RowLinear,
    fuse_,
    load_,
    parallelize_,
    quantize_,
    save,
)
from skuda.torch.scheme import Scheme

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case returned on each of four processes, by its name and number of ranks."""
    folder, seed = tmp_path_factory.mktemp("ranks"), str(int(fresh().integers(2**31)))
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}/helpers", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "parallel_worker.py"]
    started = [subprocess.Popen([*command, str(rank), "4", folder, seed], env=environment) for rank in range(4)]
    try:
        until = time.monotonic() + 600
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * 4, f"seed {seed}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def cases(ranks, name):
    return [found for rank in ranks for case, found in rank.items() if case.startswith(name)]


def test_a_llama_has_one_hash_on_any_number_of_ranks(ranks):
    every = cases(ranks, "hashes")
    assert len(every) == 1 + 2 + 3 + 4
    assert len({found[way] for found in every for way in ("whole", "shared", "cheapest")}) == 1
    assert len({found["fused"] for found in every}) == 1


def test_checkpoints_are_whole_and_read_by_any_number_of_ranks(ranks):
    assert cases(ranks, "checkpoints") == [{"right": [True] * 14}] * (1 + 2 + 3 + 4)


def test_checkpoints_of_joined_layers_are_those_of_the_layers(ranks):
    assert cases(ranks, "fused checkpoints") == [{"right": [True] * 8}] * (1 + 2 + 3 + 4)


def test_layers_of_ranks_compile_to_one_graph(ranks):
    assert cases(ranks, "compiled") == [{"same": [True] * 6}] * 2


def test_ranks_that_do_something_else_are_named_on_every_rank(ranks):
    every = cases(ranks, "differing")
    assert every == every[:1] * 4
    order, shape, chunks, model, kind = every[0]["differences"]
    assert order[:2] == ["call", [0, 1]]
    assert "rank 0 has second" in order[2]
    assert "rank 1 has first" in order[2]
    assert shape[:2] == ["call", [0, 3]]
    assert chunks[:2] == ["call", [0, 1]]
    assert "chunks=2" in chunks[2]
    assert model[:2] == ["layers", [0, 1]]
    assert kind == "DynamicLinear"


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
    models = [getattr(transformers, f"{name}ForCausalLM")(config) for _ in range(2)]
    for model in models:
        quantize_(model, Dynamic())
    for report in on_ranks(2, lambda group: parallelize_(models[group.rank], group, lm_head=True)):
        assert len(report.converted) == 2 * 7 + 1
        assert report.left == ()


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_may_be_the_mlp_itself(fused):
    def work(group):
        mlp = GatedMLP(24, 40, nn.SiLU())
        quantize_(mlp, Dynamic())
        if fused:
            fuse_(mlp)
        return set(parallelize_(mlp, group).converted)

    first = {"gate_up_proj"} if fused else {"gate_proj", "up_proj"}
    assert on_ranks(2, work) == [first | {"down_proj"}] * 2


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
