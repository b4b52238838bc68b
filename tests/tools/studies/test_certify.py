"""`skuda certify`: one hash in all ways, the record, and faults of ranks that it finds."""

import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from paths import ROOT

from skuda.registry import InvalidProblem, SkudaError
from skuda.tools.studies import certify


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Return a function that certifies a tiny model on the CPU with a fault, and returns status, record and errors."""
    pytest.importorskip("transformers")
    import rank_faults

    from skuda.tools.studies import certify_rank, processes
    from skuda.torch.certification import certificate as certification
    from skuda.torch.certification import ways

    def kept(*given):
        few = (ways.ALONE, ways.LEFT, ways.FIXED)
        return {name: each for name, each in ways.batches(*given).items() if name in few}

    monkeypatch.setattr(certification, "LENGTHS", (3, 40))
    monkeypatch.setattr(processes, "_GRACE", 60.0)

    def run(model="llama", fault="certified", *, whole=False, **options):
        if not whole:
            monkeypatch.setattr(certification, "batches", kept)
            monkeypatch.setattr(
                certification, "_compiled", lambda model, given, several, _: ways.run(model, given, several)
            )
        monkeypatch.setattr(certify_rank, "work", getattr(rank_faults, fault))
        output = tmp_path / "record.json"
        status = certify.run(model=model, device="host", batch=2, output=output, **options)
        return status, json.loads(output.read_text()), *capsys.readouterr()

    return run


def test_all_ways_have_one_hash_and_the_plain_model_has_several(run):
    status, record, out, err = run(plain=True, whole=True)
    found = record["exact"]["ways"]
    assert status == 0
    assert "partial" not in record
    assert "PASS: 11 ways have the same bits" in err
    assert len(found) == 11
    assert found[-1]["name"] == "on 2 ranks"
    assert len({way["digest"] for way in found}) == 1
    assert found[0]["digest"] in out
    assert len({way["digest"] for way in record["plain"]["ways"]}) > 1
    assert "for comparison, plain transformers" in out


def test_codes_of_16_bits_are_certified_too(run):
    status, record, _, err = run(codes="int16")
    assert status == 0
    assert (record["schema_version"], record["codes"]) == (1, "int16")
    assert "on 2 ranks" in [way["name"] for way in record["exact"]["ways"]]
    assert "PASS" in err


@pytest.mark.parametrize(("name", "small"), [("h200x2-certify", True), ("h200-certify-8b", False)])
def test_the_certificates_of_the_docs_say_what_their_page_says(name, small):
    record = json.loads((ROOT / "docs" / "evidence" / f"{name}.json").read_text())
    assert (record["kind"], record["device"]) == ("skuda certify", "NVIDIA H200")
    found = {way["name"]: way["digest"] for way in record["exact"]["ways"] if way["same"]}
    assert len(found) == len(record["exact"]["ways"])
    # Fewer layers have other bits than all.
    assert len({digest for way, digest in found.items() if "layers" not in way}) == 1
    assert found.keys() >= {"captured steps", "in training", "on the CPU" if small else "on the CPU, 1 layers"}
    assert ("on 2 ranks" in found) is small
    assert not all(way["same"] for way in record["plain"]["ways"])
    assert f"`docs/evidence/{name}.json`" in (ROOT / "docs" / "exact.md").read_text()


@pytest.mark.parametrize("fault", ["rounds_sums", "local_maxima"])
def test_a_fault_among_ranks_is_found(run, fault):
    status, record, _, err = run(fault=fault)
    assert status == 1
    assert [way["name"] for way in record["exact"]["ways"] if not way["same"]] == ["on 2 ranks"]
    assert "FAIL: other bits on 2 ranks" in err


def test_a_rank_that_dies_ends_it_and_leaves_the_record_so_far(run, tmp_path, capsys):
    with pytest.raises(SkudaError, match="rank 1 failed: killed by SIGKILL"):
        run(fault="is_killed", layers=1, prompts=1)
    record, lines = json.loads((tmp_path / "record.json").read_text()), capsys.readouterr().err
    assert (record["partial"], record["layers"], record["prompts"]) == (True, 1, 1)
    assert record["exact"]["ways"][-1]["name"] == "in training"
    for way in record["exact"]["ways"]:
        assert f"exact, {way['name']}: same, " in lines
    assert lines.count(" s left") == len(record["exact"]["ways"])


@pytest.fixture
def run_with_vllm(run, monkeypatch):
    """Return a function like `run`, with an engine in vLLM's place, and a prompt longer than a page of its cache."""
    import rank_faults

    from skuda.torch.certification import certificate as certification
    from skuda.vllm import certified

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__spec__="here"))
    monkeypatch.setattr(certification, "LENGTHS", (3, 131))
    monkeypatch.setattr(certify, "place_of_ranks", lambda *_, **__: (None, "gloo"))

    def run_with_vllm(engine, **options):
        monkeypatch.setattr(certified, "serve", partial(rank_faults.served, engine=getattr(rank_faults, engine)))
        return run("qwen2", engine="vllm", **options)

    return run_with_vllm


@pytest.mark.parametrize(
    ("engine", "options", "differ", "note"),
    [
        ("FakeEngine", {}, [], ""),
        (
            "EngineWithAWrongBit",
            {"ranks": 1, "layers": 1},
            ["vLLM in chunks"],
            "; all 23 tensors of weights are the same",
        ),
        (
            "EngineThatRounds",
            {"ranks": 1},
            ["vLLM alone", "vLLM in a batch", "vLLM after a warm prefix", "vLLM in chunks"],
            "first in the weights model.layers.1.mlp.up_proj.weight: vLLM has int8 [192, 128]",
        ),
    ],
)
def test_vllm_is_the_same_model_or_what_differs_is_named(run_with_vllm, engine, options, differ, note):
    status, record, _, err = run_with_vllm(engine, **options)
    found = {way["name"]: way for way in record["exact"]["ways"]}
    assert [name for name, way in found.items() if not way["same"]] == differ
    assert len([name for name in found if "vLLM" in name]) == (4 if "ranks" in options else 5)
    assert status == bool(differ)
    if differ:
        assert note in found[differ[0]]["note"]
        assert f"FAIL: other bits {', '.join(differ)}" in err


def test_a_prefix_that_was_computed_again_is_no_way_of_vllm(run_with_vllm):
    with pytest.raises(InvalidProblem, match="prompts must have one of more than 129 tokens for vLLM; had 1"):
        run_with_vllm("FakeEngine", ranks=1, prompts=1)
    with pytest.raises(SkudaError, match="computed a prefix of 129 tokens again: 0 of them came from its cache"):
        run_with_vllm("EngineWithoutACache", ranks=1)


def test_a_folder_with_a_config_is_a_random_model(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**certify._SIZES, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    status, record, *_ = run(str(tmp_path), ranks=1)
    assert status == 0
    assert record["model"] == str(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranks": 9}, "--ranks must be at least 1 and at most 8"),
        ({"layers": 3}, "--layers must be at least 1 and at most 2"),
        ({"device": "moon"}, "--device must be one of auto, gpu, host"),
        ({"engine": "other"}, "--engine must be one of transformers, vllm"),
        ({"model": "/nowhere"}, "MODEL must be one of llama, mistral"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    pytest.importorskip("transformers")
    with pytest.raises(InvalidProblem, match=message):
        certify.run(**{"model": "llama", "device": "host", **given})
