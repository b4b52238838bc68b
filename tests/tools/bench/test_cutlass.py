"""CUTLASS as a rival: what it serves, how its objects are built and loaded, and what is refused.

What its objects compute is in test_bench_torch.py, because they are called on tensors.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from measured import REGISTRY
from stub_cutlass import needs_cc

from skuda.registry import InvalidProblem
from skuda.tools.bench.cutlass import rival as bench_cutlass
from skuda.tools.bench.cutlass.rival import Configuration, Cutlass, build_command
from skuda.tools.bench.rivals import absence, rivals_of
from skuda.tools.parse.cases import problem_of, select_cases

OPS = REGISTRY.ops
SOURCES = Path(bench_cutlass.__file__).resolve().parent
STATIC = {"m": 16, "n": 8, "k": 32, "act_scale": 0.5}


def static(**changes):
    return OPS["smoothquant_linear"].descriptor(**{**STATIC, "output_element": "bf16", **changes})


def dynamic(**changes):
    fields = {"m": 16, "c_out": 8, "k": 32, "q_min": -127, "q_max": 127, "activation_element": "bf16", **changes}
    return OPS["quantized_linear"].descriptor(**fields)


def scaled(**changes):
    fields = {"m": 16, "n": 8, "k": 32, "output_element": "bf16", **changes}
    return OPS["scaled_linear"].descriptor(**fields)


def refusal(problem):
    try:
        return str(Cutlass().calls(problem, {}))
    except ValueError as error:
        return str(error)
    except KeyError:  # it looks for the arrays
        return ""


def test_cutlass_serves_what_it_was_built_for():
    assert refusal(static()) == refusal(dynamic()) == refusal(scaled()) == ""
    assert refusal(dynamic(activation_element="f16", output_element="bf16")) == ""
    refusals = {case.label: refusal(case.problem) for case in select_cases(REGISTRY, ["linear"])}
    assert refusals.pop("scaled_linear 4096x4096x4096 s32") == "built for a bf16 output, not s32"
    assert list(refusals.values()) == [""] * 45


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (static(activation_element="u8"), "built for s8 by s8, not u8 by s8"),
        (dynamic(q_min=0, q_max=255), "built for s8 by s8, not u8 by s8"),
        (static(weight_element="u8"), "built for s8 by s8, not s8 by u8"),
        (static(act_zero_point=3), "built without zero points"),
        (dynamic(has_weight_zero_point=True), "built without zero points"),
        (scaled(has_act_zero_point=True), "built without zero points"),
        (static(epilogue="bias_relu"), "built without an epilogue such as bias_relu"),
        (static(output_element="f16"), "built for a bf16 output, not f16"),
        (static(output_element="s8"), "built for a bf16 output, not s8"),
        (dynamic(activation_element="f32"), "built for a bf16 output, not f32"),
        (dynamic(activation_element="f64", output_element="bf16"), "built for scales in f32, not f64"),
        (static(k=24), "K must be a multiple of 16 and N of 8"),
        (dynamic(c_out=12), "K must be a multiple of 16 and N of 8"),
    ],
)
def test_cutlass_refuses_the_rest_with_the_reason(problem, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        rivals_of(problem)[0].make(problem, {})


def test_without_a_folder_cutlass_is_absent_and_the_command_is_reported():
    for problem in (static(), dynamic(), scaled()):
        rival = rivals_of(problem)[0]
        assert (rival.name, rival.away) == ("cutlass", absence(rival))
        assert f"run: {build_command()}, then bench with --cutlass FOLDER" in rival.away
        assert ("activation quantized before" in rival.computes) is (problem.op_name() == "quantized_linear")
    script, folder = shlex.split(build_command())[1:]
    assert (Path(script), folder) == (SOURCES / "build.sh", "FOLDER")
    elsewhere = rivals_of(problem_of(OPS["fake_quantize"].descriptor, (2, 8), "f32"))
    assert "cutlass" not in {rival.name for rival in elsewhere}


def test_the_build_script_is_a_script_and_builds_what_the_source_can(tmp_path):
    script = SOURCES / "build.sh"
    subprocess.run(["bash", "-n", script], check=True)
    bare = subprocess.run(["bash", script], check=False, capture_output=True, text=True)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert "build.sh FOLDER" in bare.stderr
    wrong = subprocess.run(["bash", script, tmp_path, "t1x1"], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2
    names = wrong.stderr.removeprefix("no configuration t1x1; there are: ").split()
    assert len(names) == 12
    count = sum(len(Configuration(name, None).options) for name in names)
    assert count == 2 + 6 * 3 + 4 * 6, "plain kernels have no scheduler to tune"


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(InvalidProblem, match=r"--cutlass must be a folder of what this builds, alone: bash .*"):
        Cutlass.load(tmp_path, None)
    (tmp_path / "x.so").write_text("no object")
    with pytest.raises(InvalidProblem, match=r"--cutlass must be a folder.*with what does not load: .*x\.so"):
        Cutlass.load(tmp_path, None)


@needs_cc
def test_an_object_with_another_interface_is_refused(tmp_path):
    (tmp_path / "y.c").write_text("int other(void) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "y.so", tmp_path / "y.c"], check=True)
    with pytest.raises(InvalidProblem, match=r"with what does not load: .*y\.so.*run"):
        Cutlass.load(tmp_path, None)
