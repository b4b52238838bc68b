"""``skuda show`` and ``skuda explain``: what a kernel is, which one would run, and why the others would not."""

from __future__ import annotations

import json
import re

import pytest

from skuda.dispatch import Dispatcher, Explanation, device_named
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.quantize import QuantizedLinearDescriptor
from skuda.registry import KernelSku
from skuda.tools.output import folded
from skuda.tools.parse.problem import aliases_of

LINEAR = ["explain", "quantized_linear", "--m", "8", "--n", "4096", "--k", "4096"]
STEM = "quantization.quantized_linear.f32-s8.rcr-identity"

# -------------------------------------------------------------------------------------------------------------- show


@pytest.mark.parametrize("op", built_in_ops(), ids=lambda op: op.name)
def test_show_every_op_fits(terminal, host, op):
    status, text, _ = terminal("show", op.name)
    assert status == 0
    for name in op.descriptor.model_fields.keys() - {"op"}:
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
    assert host.skus_of(op.name)[0].id in text.replace("\n    ", "")


def test_show_op_loses_nothing_when_piped(skuda, host):
    _, out, _ = skuda("show", "quantized_linear", "--json")
    shown = json.loads(out)
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["m"] == {"name": "m", "takes": "integer >= 0, < 2^31", "default": "required"}
    assert fields["epilogue"]["takes"] == "identity | bias | bias_relu | bias_gelu | bias_silu"
    assert fields["output_element"]["takes"] == "element or none"
    assert shown["documentation"].startswith("Quantized linear")
    assert shown["skus"] == [sku.id for sku in host.skus_of("quantized_linear")]
    assert shown["origin"] == "skuda"
    _, out, _ = skuda("show", "quantized_linear")
    said = [word for word in host.ops["quantized_linear"].documentation.split() if word.strip("-")]
    assert [word for word in out.split() if word.strip("-")][1 : 1 + len(said)] == said


def test_show_sku(skuda, terminal, with_cuda):
    sku_id = "quantization.quantized_linear.bf16-s8.rcr-bias.sm_80.pycuda.mma_64x64"
    status, text, _ = terminal("show", sku_id)
    assert status == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "requires compute capability 8.0 or later",
        "output_element one of f32, f64, f16, bf16, s8, u8",
        "workspace 4 bytes x m",
        "flags --fmad=false",
        "origin a test",
        "max ulp to reference 2",
        "deterministic no",
    ):
        assert line in lines
    assert "verified no: no record here compares it with the reference" in " ".join(lines)
    _, out, _ = skuda("show", sku_id, "--json")
    shown = json.loads(out)
    assert KernelSku.model_validate(shown["sku"]) == with_cuda.sku(sku_id)
    assert (shown["id"], shown["origin"], shown["verified"]) == (sku_id, "a test", False)


def test_long_ids_break_at_a_dot():
    sku_id = ".".join(["quantization", "o" * 40, "f32", "plain", "sm_90a", "cuda_core", "w" * 20])
    lines = folded(sku_id, 80).split("\n")
    assert max(map(len, lines)) <= 80
    assert "".join(line.strip() for line in lines) == sku_id
    assert len(lines) == 2
    assert [len(line) for line in folded("x" * 100, 40).split("\n")] == [40, 40, 24]
    assert folded("a.b", 3) == "a.b"


# ----------------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize("device", ["cpu", "a100", "h100", "h200", "rtx4090", "b200", "RTX 4090", "NVIDIA L40S", "89"])
def test_explain_agrees_with_the_dispatcher(skuda, terminal, with_cuda, device):
    problem = QuantizedLinearDescriptor(m=8, c_out=4096, k=4096, q_min=-127, q_max=127, activation_element="f32")
    wanted = Dispatcher(with_cuda).explain(problem, device=device_named(device))
    status, out, err = skuda(*LINEAR, "--device", device, "--json")
    read = Explanation.model_validate_json(out)
    assert (status, err) == (0, "")
    assert (read.decisions, read.chosen) == (wanted.decisions, wanted.chosen)
    assert read.device == device_named(device)
    _, text, _ = terminal(*LINEAR, "--device", device)
    assert wanted.chosen in text.replace("\n    ", "")


def chosen_by(skuda, *arguments):
    status, out, _ = skuda(*LINEAR, "--json", *arguments)
    found = Explanation.model_validate_json(out).chosen
    assert status == (0 if found else 1)
    return found and found.removeprefix(f"{STEM}.")


def test_unserved_is_explained_and_exits_with_1(skuda, terminal, host):
    status, out, err = skuda(*LINEAR, "--device", "h200", "--json")
    assert (status, err) == (1, "")
    assert Explanation.model_validate_json(out).chosen is None
    status, text, _ = terminal(*LINEAR, "--device", "h200")
    assert status == 1
    assert "no kernel serves this problem here" in text
    assert "refused cpu numpy reference needs a CPU" in " ".join(text.split())
    status, out, _ = skuda(*LINEAR, "--device", "h200", "--all")
    assert status == 1
    assert out.count("refused ") == 80


def test_explain_on_a_terminal_summarises_and_all_does_not(terminal, with_cuda):
    _, text, _ = terminal(*LINEAR, "--device", "h200")
    assert "160 candidates, 4 accepted" in text
    assert text.count("refused") == 1
    assert "155 kernels for other problems" in text
    assert "activation_element = f32: " in text
    assert "weight_element = s8: u8, s16, s4" in text
    assert re.search(r"^  1\. sm_90a pycuda wgmma_128x128$", text, re.MULTILINE)
    assert "within 2 ulp" in " ".join(text.split()), "an accepted kernel that promises something else says what"
    _, text, _ = terminal(*LINEAR, "--device", "h200", "--all")
    assert len(re.findall(r"^  refused ", text, re.MULTILINE)) == 156


def test_nothing_empty_is_said_on_a_cpu(terminal, monkeypatch, use):
    """Backends that are missing here each say what they lack."""
    from skuda.kernels.catalog import built_in_registry

    use(built_in_registry())
    _, text, _ = terminal(*LINEAR)
    line = " ".join(text.split())
    assert "values" not in line
    for name, status in Dispatcher(built_in_registry()).status.items():
        if not status.available:
            assert f"backend: had {status.detail.split()[0]}" in line, name


def test_kernels_that_nearly_fit_come_first(terminal, with_cuda):
    _, text, _ = terminal("explain", "quantized_linear", "--m", "8", "--n", "8", "--k", "20", "--device", "h200")
    first, second = (" ".join(row.split("kernels for")[0].split()) for row in text.split("\n  refused ")[1:3])
    assert first == "sm_90a pycuda wgmma_128x128 k: had 20 -> set k to a multiple of 16 sm_90a cuda_core wgmma_128x128"
    assert second.startswith("cpu numpy reference needs a CPU")


def test_preferences(skuda, with_cuda):
    h200 = ("--device", "h200")
    assert chosen_by(skuda, *h200, "--backend", "cuda_core") == "sm_90a.cuda_core.wgmma_128x128"
    assert chosen_by(skuda, *h200, "--prefer-backend", "cuda_core") == "sm_90a.cuda_core.wgmma_128x128"
    assert chosen_by(skuda, *h200, "--no-arch-specific") == "sm_80.pycuda.mma_64x64"
    assert chosen_by(skuda, *h200, "--no-arch-specific", "--require", "deterministic") is None
    assert chosen_by(skuda, *h200, "--require", "max-ulp=0,batch_invariant") == "sm_90a.pycuda.wgmma_128x128"
    assert chosen_by(skuda, *h200, "--require", "accumulator=s32") == "sm_80.pycuda.mma_64x64"
    assert chosen_by(skuda, "--device", "a100", "--max-workspace-bytes", "31") is None
    assert chosen_by(skuda, "--device", "a100", "--max-workspace-bytes", "32") == "sm_80.pycuda.mma_64x64"
    wanted = f"{STEM}.sm_80.cuda_core.mma_64x64"
    assert chosen_by(skuda, *h200, "--sku", wanted) == "sm_80.cuda_core.mma_64x64"
    assert chosen_by(skuda, "--device", "cpu", "--sku", wanted) is None


def test_an_insisted_kernel_that_cannot_be_given_is_explained_without_cutting_ids(terminal, with_cuda):
    sku_id = "quantization.quantized_linear.f32-s8.rcr-bias.sm_90a.pycuda.wgmma_128x128"
    status, text, _ = terminal(*LINEAR, "--device", "h200", "--sku", sku_id, "--require", "max_ulp=0")
    assert status == 1
    assert sku_id in re.sub(r"\n +", "", text)
    assert "--sku speaks against it -> drop --sku" in " ".join(text.split())
    assert "max_ulp: asked for at most 0, promises 2" in " ".join(text.split())


def test_assumed_values_are_shown(skuda, terminal, host):
    _, text, _ = terminal(*LINEAR, "--device", "cpu")
    assert "assumed q_min=-127 q_max=127 activation_element=f32" in text
    _, out, _ = skuda(*LINEAR, "--device", "cpu", "--json")
    assert json.loads(out)["notes"][:3] == ["assumed q_min=-127", "assumed q_max=127", "assumed activation_element=f32"]
    _, text, _ = terminal(*LINEAR, "--q-min", "0", "--q-max", "255", "--activation-element", "f16", "--device", "cpu")
    assert "assumed" not in text


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["quantize_per_tensor", "--numel", "9"], {"q_min": -128, "q_max": 127, "output_element": "s8"}),
        (["quantize_per_tensor", "--numel", "9", "--output-element", "u4"], {"q_min": 0, "q_max": 15}),
        (["dequantize_per_tensor", "--numel", "9"], {"input_element": "s8", "output_element": "f32"}),
        (["fake_quantize", "--numel=9", "--q_max=5"], {"q_min": -128, "q_max": 5, "input_element": "f32"}),
        (["quantize_per_channel", "--shape", "2,3,4", "--axis", "-1"], {"shape": [2, 3, 4], "axis": 2}),
        (["quantize_per_channel", "--shape", "7", "--axis", "0", "--q-min", "-8"], {"shape": [7], "q_min": -8}),
        (["quantize_per_token", "--m", "4", "--k", "5"], {"n": 4, "d": 5}),
        (["quantize_per_group", "--m", "4", "--k", "6", "--group-size", "3"], {"outer_size": 4, "axis_size": 6}),
        (["dynamic_range", "--n", "4", "--d", "6", "--scope", "group", "--group-size", "3"], {"group_size": 3}),
        (["dynamic_range", "--n", "4", "--d", "6", "--axis", "none"], {"axis": None}),
        (["smoothquant_linear", "--m", "1", "--n", "2", "--k", "3"], {"act_scale": 1.0, "n": 2}),
        (["smoothquant_linear", "--m", "1", "--n", "2", "--k", "3", "--act-scale", "-1e-3"], {"act_scale": -0.001}),
        ([*LINEAR[1:], "--has-weight-zero-point"], {"has_weight_zero_point": True, "c_out": 4096}),
        ([*LINEAR[1:], "--has-weight-zero-point", "false"], {"has_weight_zero_point": False}),
        ([*LINEAR[1:], "--has-weight-zero-point", "--epilogue", "bias"], {"has_weight_zero_point": True}),
        (["--device", "cpu", "--numel", "3", "fake_quantize"], {"numel": 3}),
    ],
)
def test_fields_are_read(skuda, host, arguments, fields):
    status, out, err = skuda("explain", *arguments, "--json", "--device", "cpu")
    assert (status, err) == (0, "")
    problem = json.loads(out)["problem"]
    assert {name: problem[name] for name in fields} == fields


def test_the_ops_of_a_plug_in_are_explained_at_once(skuda, terminal, with_odd):
    given = ("--window", "3,4", "--keep", "--mode", "valid", "--label", "none")
    status, out, err = skuda("explain", "odd", *given, "--json", "--device", "cpu")
    assert (status, err) == (0, "")
    explanation = json.loads(out)
    assert explanation["problem"] == {
        "op": "odd",
        "kind": "bf16",  # the first element that its kernels serve, since f32 is none of them
        "out_scale": 1.0,
        "window": [3, 4],
        "mode": "valid",
        "keep": True,
        "label": None,
    }
    assert explanation["notes"] == ["assumed kind=bf16", "assumed out_scale=1.0"]
    status, text, _ = terminal("explain", "odd", "--window", "3,4", "--kind", "f32", "--device", "cpu")
    assert status == 1
    assert "kind = f32: bf16" in text
    assert skuda("explain", "odd", "--window", "3")[0] == 2
    status, text, _ = terminal("show", "odd")
    assert status == 0
    assert "odd-package 1.0" in text
    assert re.search(r"^odd +bf16 +cpu +1 +no bound", terminal("list", "--op", "odd")[1], re.MULTILINE)


STEPS = ["amax", "amax", "quantize", "quantize", "sums", "sums", "rescale"]
"""Of ranks with unequal parts of 4,096."""


def test_a_layer_over_ranks_is_explained(skuda, terminal, host):
    split = [*LINEAR[1:], "--device", "cpu", "--shards", "axis=k,count=3"]
    status, out, err = skuda("explain", *split)
    assert (status, err) == (0, "")
    assert "  assumed q_max=127" in out.splitlines()
    status, out, err = skuda("explain", *split, "--json")
    steps = json.loads(out)["steps"]
    assert [step["name"] for step in steps] == STEPS
    assert [step["ranks"] for step in steps if step["name"] == "sums"] == [[0], [1, 2]]
    assert json.loads(out)["shards"] | {"count": 3, "output": "whole"} == json.loads(out)["shards"]
    status, text, _ = terminal("explain", *split[:-1], "axis=k,count=3,chunks=2")
    assert status == 0
    assert "exchange: reduce-scatter of s32 sums in 2 chunks" in text
    assert skuda("explain", *split, "--backend", "pycuda")[0] == 1
    for wrong, words in [("axis=q,count=2", "axis must be"), ("axis=k", "count must be given"), ("size=2", "--shards")]:
        status, _, err = skuda("explain", *split[:-1], wrong)
        assert status == 2
        assert words in err


def test_help_behind_an_op_lists_its_fields(skuda, host):
    status, out, _ = skuda("explain", "quantized_linear", "--help")
    assert status == 0
    assert re.search(r"--c-out, --n +integer >= 0, < 2\^31 +required", out)
    assert re.search(r"--q-min +integer .* -127 \(assumed\)", out)


def test_an_alias_never_shadows_a_field():
    for op in built_in_ops():
        aliases = aliases_of(op.descriptor)
        assert not aliases.keys() & op.descriptor.model_fields.keys()
        assert set(aliases.values()) <= op.descriptor.model_fields.keys()
