"""Layers on the processes of a group have the bits of the layer on one device, and a model one hash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import fresh

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  torch may be absent

from skuda.dispatch.shard import Shards, on_ranks  # noqa: E402
from skuda.registry.errors import InvalidProblem  # noqa: E402
from skuda.torch import ColumnLinear, Dynamic, DynamicLinear, RowLinear, parallelize_, quantize_  # noqa: E402

HERE = Path(__file__).parent


def on_processes(name, count, folder, seed):
    """What a function of `parallel_cases` returned on each rank ."""
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "parallel_worker.py", name]
    started = [
        subprocess.Popen([*command, str(rank), str(count), folder, str(seed)], env=environment) for rank in range(count)
    ]
    try:
        codes = [process.wait(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * count
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def seed_of(*key):
    return int(fresh(*key).integers(2**31))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_layers_have_the_bits_of_one_device(count, tmp_path):
    for found in on_processes("layers", count, tmp_path / "ranks", seed_of(count)):
        assert found["wrong"] == []
        assert found["done"] > 0


def test_a_llama_has_one_hash_on_any_number_of_ranks(tmp_path):
    pytest.importorskip("transformers")
    seed = seed_of("llama")
    every = [found for n in (1, 2, 3, 4) for found in on_processes("hashes", n, tmp_path / str(n), seed)]
    whole = every[0]["whole"]
    assert all(found[way] == whole for found in every for way in ("whole", "shared", "cheapest"))
    assert len({found["fused"] for found in every}) == 1


def test_layers_of_ranks_compile_to_one_graph(tmp_path):
    for found in on_processes("compiled", 2, tmp_path / "ranks", seed_of()):
        assert found["same"] == [True, True]


def test_ranks_that_do_something_else_are_named_on_every_rank(tmp_path):
    every = on_processes("differing", 3, tmp_path / "ranks", seed_of())
    assert every[0] == every[1] == every[2]
    order, shape, model, kind = every[0]["told"]
    assert order[:2] == ["call", [0, 1]]
    assert "rank 0 has second" in order[2]
    assert "rank 1 has first" in order[2]
    assert shape[:2] == ["call", [0, 2]]
    assert model[:2] == ["layers", [0, 1]]
    assert kind == "DynamicLinear"


def test_what_cannot_be_shared_is_refused_and_left():
    def work(group):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        quantize_(model, Dynamic())
        for plan, words in (({"2": "row"}, "no layer of this name"), ({"0": "rows"}, "be column or row")):
            with pytest.raises(InvalidProblem, match=words):
                parallelize_(model, group, {"1": "column", **plan})
        with pytest.raises(InvalidProblem, match="no int8 layer of this name"):
            parallelize_(model, group, lm_head=True)
        assert all(type(layer) is DynamicLinear for layer in model)
        with pytest.raises(InvalidProblem, match="have axis k and 2 ranks"):
            RowLinear(model[0], group, Shards(axis="n", count=2))
        column = ColumnLinear(model[0], group)
        with pytest.raises(InvalidProblem, match="have no gradient"):
            column(torch.ones(1, 8, requires_grad=True))

    on_ranks(2, work)
