"""``skuda list``: the ops and kernels, and what the evidence says about them."""

from __future__ import annotations

import json
import re

import pytest

from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.registry import KernelSku, Registry
from skuda.registry.device import device_named
from skuda.tools.verify.evidence import METHOD, EvidenceFile, Failure, SkuEvidence
from skuda.tools.verify.fingerprint import reference_hash, source_hash

FILL = next(op for op in built_in_ops() if op.name == "fill")
CUDA = [sku for sku in FILL.skus if sku.backend == "pycuda"]


def test_list_as_json_has_every_op(skuda, host):
    status, out, err = skuda("list", "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)
    assert [row["op"] for row in rows if row["category"] == "quantization"] == sorted(
        op.name for op in host.ops.values() if op.category == "quantization"
    )
    assert {row["op"] for row in rows} == {op.name for op in host.ops.values()}
    linear = next(row for row in rows if row["op"] == "quantized_linear")
    assert (linear["elements"], linear["aux_elements"]) == (["f32", "f64", "f16", "bf16"], ["s8", "u8", "s16", "s4"])
    assert (linear["backends"], linear["skus"], linear["promise"]) == ({"numpy": ["cpu"]}, 80, "bit-exact")
    assert "\x1b" not in skuda("list")[1]


def test_every_op_is_one_line_of_80_columns(terminal, use):
    registry = use(built_in_registry())
    status, text, _ = terminal("list")
    assert status == 0
    lines = text.splitlines()
    rows = [line for line in lines if re.match(r"\w+ .* \d+ +\S", line) and " ops, " not in line]
    assert len(rows) == len(registry.ops)
    for op in registry.ops.values():
        (row,) = (row for row in rows if row.startswith(f"{op.name} "))
        assert f" {len(registry.skus_of(op.name))} " in row
    assert f"{len(registry.ops)} ops, {len(registry)} kernels: " in text
    assert "float = f32 f64 f16 bf16" in text


def test_list_on_a_terminal_shows_the_weakest_promise(terminal, with_cuda):
    _, text, _ = terminal("list", "--op", "quantized_linear")
    assert re.search(r"^quantized_linear +float x code +sm_90a sm_80 +160 +2 ulp, varies", text, re.MULTILINE)
    _, text, _ = terminal("list", "--skus", "--op", "quantized_linear")
    joined = text.replace("\n  ", "")
    assert all(f"{sku.id}\n" in joined for sku in with_cuda.skus_of("quantized_linear"))


FILTERS = [
    (["--element", "bf16"], lambda sku: "bf16" in (sku.element, sku.aux_element)),
    (["--element", "bf16,f64"], lambda sku: sku.element in ("bf16", "f64")),
    (["--element", "bf16", "--element", "f64"], lambda sku: sku.element in ("bf16", "f64")),
    (["--element", "u4"], lambda sku: "u4" in (sku.element, sku.aux_element)),
    (["--op", "fill,dynamic_range"], lambda sku: sku.op in ("fill", "dynamic_range")),
    (["--arch", "sm_90a"], lambda sku: sku.arch == "sm_90a"),
    (["--arch", "sm_90a,cpu", "--backend", "numpy"], lambda sku: sku.backend == "numpy"),
    (["--backend", "cuda_core", "--arch", "sm_80"], lambda sku: sku.backend == "cuda_core" and sku.arch == "sm_80"),
    (["--device", "h200"], lambda sku: sku.arch in ("sm_80", "sm_90a")),
    (["--device", "cpu"], lambda sku: sku.arch == "cpu"),
    (["--device", "l40s,cpu", "--backend", "pycuda"], lambda sku: sku.arch == "sm_80" and sku.backend == "pycuda"),
    (["--element", "fp8_e4m3"], lambda _: False),
    (["--device", "t4"], lambda _: False),
]


@pytest.mark.parametrize(("arguments", "keeps"), FILTERS, ids=[" ".join(arguments) for arguments, _ in FILTERS])
def test_list_filters(skuda, with_cuda, arguments, keeps):
    wanted = {sku.id for sku in with_cuda if keeps(sku)}
    status, out, _ = skuda("list", "--skus", *arguments)
    assert status == 0
    *ids, counted = out.splitlines()
    assert set(ids) == wanted
    assert len(ids) == len(wanted)
    assert counted.startswith(f"{len(wanted)} kernel")
    _, out, _ = skuda("list", *arguments, "--json")
    assert sum(row["skus"] for row in json.loads(out)) == len(wanted)


def test_an_architecture_without_kernels_lists_the_older_ones_that_serve_it(skuda, terminal, with_cuda):
    older = {sku.id for sku in with_cuda if sku.arch == "sm_80"}
    for arguments, name in ((["--arch", "sm_89"], "sm_89"), (["--device", "rtx-4090"], "NVIDIA GeForce RTX 4090")):
        status, out, err = skuda("list", "--skus", *arguments)
        assert (status, set(out.splitlines()[:-1])) == (0, older)
        assert err == f"skuda: {name} has no kernels of its own and runs those of sm_80\n"
    _, out, err = skuda("list", "--skus", "--arch", "sm_90")
    assert (out.splitlines()[:-1], err) == ([sku.id for sku in ranked(with_cuda)], "")
    status, text, err = terminal("list", "--device", "t4")
    assert (status, text) == (0, "no op passes these filters\n")
    assert "it has compute capability 7.5, and kernels need compute capability 8.0 or later" in err


def ranked(registry):
    return [sku for sku in registry.skus_of("quantized_linear") if sku.arch != "cpu"]


def test_list_says_when_nothing_passes(terminal, host):
    assert terminal("list", "--element", "fp8_e4m3")[:2] == (0, "no op passes these filters\n")


def test_list_json(skuda, host):
    _, out, _ = skuda("list", "--json")
    rows = {row["op"]: row for row in json.loads(out)}
    assert rows["fill"]["elements"] == [str(sku.element) for sku in host.skus_of("fill")]
    assert rows["quantized_linear"]["backends"] == {"numpy": ["cpu"]}
    _, out, _ = skuda("list", "--skus", "--json")
    read = [KernelSku.model_validate(row["sku"]) for row in json.loads(out)]
    assert set(read) == set(host)
    assert all(row["id"] == sku.id for row, sku in zip(json.loads(out), read, strict=True))


# ----------------------------------------------------------------------------------------------------------- evidence


def evidence_of(*skus, **changes):
    """Return a run of kernels of `fill` as they are today on an H200."""
    right = {
        "reference_hash": reference_hash(FILL),
        "verdict": "verified",
        "cases": 3,
        "runs": 9,
        "outputs": 1234567,
    }
    found = tuple(SkuEvidence(sku=sku.id, source_hash=source_hash(sku), **right) for sku in skus)
    fields = {"date": "2026-02-03T04:05:06+00:00", "skuda": "0", "seed": 9, "driver": "580.1", "skus": found}
    fields["method"] = METHOD
    return EvidenceFile(**{"device": device_named("h200"), "versions": {"torch": "2.9"}, **fields, **changes})


@pytest.fixture
def fill(use):
    return use(Registry([FILL], origin="a test"))


def test_verified_names_the_card(skuda, terminal, fill, tmp_path):
    evidence_of(*CUDA[:2]).save(tmp_path / "run.json")
    left = len(CUDA) - 2
    _, text, _ = terminal("list", "--backend", "pycuda", "--evidence", tmp_path)
    assert f"{len(CUDA)} kernels: 2 verified on H200, {left} unverified." in text
    _, out, _ = skuda("list", "--evidence", tmp_path, "--json")
    assert json.loads(out)[0]["evidence"]["verified"] == 2
    assert json.loads(out)[0]["verified_on"] == ["NVIDIA H200"]
    _, out, _ = skuda("show", CUDA[0].id, "--evidence", tmp_path)
    assert "verified yes: verified on H200, 2026-02-03" in " ".join(out.split())


def test_a_kernel_that_failed_shows_where(skuda, terminal, fill, tmp_path):
    run = evidence_of(*CUDA[:2])
    bad = run.skus[1].model_copy(update={"verdict": "failed", "failures": (Failure(check="reference"),)})
    run.model_copy(update={"skus": (run.skus[0], bad)}).save(tmp_path / "run.json")
    _, text, _ = terminal("list", "--evidence", tmp_path)
    assert re.search(r"^fill .* failed *$", text, re.MULTILINE)
    assert "1 failed on H200" in text
