"""The command as a whole: help, examples, completion, and what bad words are answered."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from skuda.tools.commands import COMMANDS, REMOVED, loaded
from skuda.tools.show import list as listing

LINEAR = ["explain", "quantized_linear", "--m", "8", "--n", "4096", "--k", "4096"]
EXAMPLES = {name: f"skuda {command.example}" for name, command in COMMANDS.items()}
EVERY = sorted({name.partition(" ")[0] for name in COMMANDS})


@pytest.mark.parametrize("arguments", [["--version"], ["-V"], ["version"]])
def test_version(skuda, arguments):
    assert skuda(*arguments) == (0, f"skuda {metadata.version('skuda')}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command_and_cuts_nothing_off(skuda, arguments):
    status, out, err = skuda(*arguments)
    assert (status, err) == (0, "")
    for command in EVERY:
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    assert "..." not in out.replace("[ARGS]...", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_the_first_line_of_the_help(name):
    assert loaded(name).help.partition("\n")[0] == COMMANDS[name].summary


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_command_has_help_that_ends_with_its_example(skuda, name):
    status, out, err = skuda(*name.split(), "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: skuda {name}")
    assert f"Example:\n    {EXAMPLES[name]}\n" in out
    assert skuda("help", *name.split()) == (status, out, err)


RUN = [name for name, example in EXAMPLES.items() if "# needs" not in example]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] if n == "demo" else []) for n in RUN])
def test_every_example_runs(skuda, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "diff":
        assert skuda("lock", "--device", "cpu")[0] == 0
        shutil.copy("skuda.lock.json", "old.lock.json")
    status, _, err = skuda(*shlex.split(EXAMPLES[name])[1:])
    assert status == 0, err


def test_what_needs_a_gpu_is_marked_and_parses():
    assert {name for name in EXAMPLES if name not in RUN} <= {"bench", "bench-model", "tune", "certify", "evaluate"}
    for name in set(EXAMPLES) - set(RUN):
        words = shlex.split(EXAMPLES[name], comments=True)[2:]
        assert loaded(name).make_context(name, words)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from skuda.tools.cli import main; main(['--help'])\n"
        "print(sorted({'numpy', 'skuda.dispatch', 'skuda.kernels', 'rich.table'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("absent", ["typer", "rich"])
@pytest.mark.parametrize("command", ["list", "doctor"])
def test_without_the_extra_cli_one_line_says_what_to_install(absent, command):
    code = (
        f"import sys; sys.modules[{absent!r}] = None\nfrom skuda.tools.cli import main; sys.exit(main([{command!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"skuda: the command needs {absent} (")
    assert done.stderr.endswith("; run: pip install 'skuda[cli]'\n")


def test_programs_and_the_conformance_suite_need_neither_typer_nor_rich():
    code = """
import sys
sys.modules.update(typer=None, rich=None)
import numpy as np
import skuda.tools.smoothquant, skuda.tools.checkpoint, skuda.tools.verify.checks
from skuda.dispatch import Dispatcher
from skuda.kernels.elementwise import FillDescriptor
from skuda.tools.testing import Conformance
print(Dispatcher().run(FillDescriptor(numel=2, output_element="f32"), value=1.5, output=np.zeros(2, np.float32)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[1.5 1.5]\n", "")


# --------------------------------------------------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("skuda li", {"list"}),
        ("skuda cache g", {"gc"}),
        ("skuda list --ar", {"--arch"}),
    ],
)
def test_bash_completes_commands_and_options(line, words):
    asked = {"_SKUDA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-m", "skuda"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = set(done.stdout.split())
    assert found >= words
    assert all(word.startswith(line.split()[-1]) for word in found)


# ---------------------------------------------------------------------------------------------------------- bad words

BAD = {
    "unknown command": (["lst"], "Did you mean 'list'?"),
    **{
        f"retired {name}": ([name, "--steps", "2"], f"`skuda {name}` is gone; instead use `{instead}`")
        for name, instead in REMOVED.items()
    },
    "unknown option": (["list", "--elment", "f32"], "--element"),
    "unknown verb": (["cache", "lss"], "Did you mean 'ls'?"),
    "missing argument": (["show"], "ID"),
    "extra argument": (["doctor", "x"], "x"),
    "unknown op in list": (["list", "--op", "quantised_linear"], "near: quantized_linear"),
    "unknown op in verify": (["verify", "--device", "cpu", "--op", "quantised_linear"], "near: quantized_linear"),
    "unknown element": (["list", "--element", "f32,f99"], "f16, bf16, f32"),
    "another library's element": (["list", "--element", "int8"], "near: s8"),
    "another library's float": (["list", "--element", "bfloat16"], "near: bf16"),
    "another library's half": (["list", "--element", "half"], "near: f16"),
    "unknown arch": (["list", "--arch", "sm_1"], "sm_80, sm_86"),
    "unknown card": (["list", "--device", "h300"], "near: h200, h100"),
    "unknown backend": (["list", "--backend", "pycudo"], "near: pycuda"),
    "unknown op in show": (["show", "quantized_liner"], "quantized_linear"),
    "unknown id": (
        ["show", "quantization.fake_quantize.f23.plain.cpu.numpy.reference"],
        "quantization.fake_quantize.f32.plain.cpu.numpy.reference",
    ),
    "nothing like it": (["show", "zzzzzz"], "skuda list"),
    "no op": (["explain"], "OP must be named first"),
    "no op but options": (["explain", "--m", "8"], "OP must be named first"),
    "unknown op in explain": (["explain", "quantised_linear"], "quantized_linear"),
    "missing field": (["explain", "fake_quantize"], "numel must be given"),
    "bad field": (["explain", "fake_quantize", "--numel", "-1"], "numel must be at least 0; had -1"),
    "no integer": (["explain", "fake_quantize", "--numel", "abc"], "numel must be an integer; had 'abc'"),
    "no value": (["explain", "fake_quantize", "--numel"], "--numel VALUE"),
    "no value before an option": (["explain", "fake_quantize", "--numel", "--q-min", "1"], "--numel VALUE"),
    "misspelt field": (["explain", "fake_quantize", "--numle", "3"], "perhaps --numel"),
    "misspelt option": (["explain", "fake_quantize", "--numel", "3", "--devcie", "h200"], "perhaps --device"),
    "stray word": (["explain", "fake_quantize", "3"], "--field value"),
    "given twice": (["explain", "fake_quantize", "--numel", "3", "--numel", "4"], "once"),
    "alias given twice": ([*LINEAR, "--c-out", "3"], "c_out must be given once"),
    "rule between fields": ([*LINEAR, "--q-max", "0"], "q_max must be greater than 0"),
    "element nobody knows": ([*LINEAR, "--activation-element", "f99"], "activation_element must be one of 'f16'"),
    "field of another library's element": ([*LINEAR, "--weight-element", "int8"], "near: s8"),
    "misspelt epilogue": ([*LINEAR, "--epilogue", "bias-relu"], "near: bias_relu"),
    "unknown device": ([*LINEAR, "--device", "h300"], "one of here, cpu, a100, h100"),
    "unknown preferred backend": ([*LINEAR, "--backend", "opencl"], "pycuda, cuda_core, numpy"),
    "unknown sku": (
        [*LINEAR, "--sku", "quantization.quantized_linear.f32-s8.rcr-bia.cpu.numpy.reference"],
        "rcr-bias.cpu.numpy.reference",
    ),
    "sku of another op": (
        [*LINEAR, "--sku", "quantization.fake_quantize.f32.plain.cpu.numpy.reference"],
        "a kernel of quantized_linear",
    ),
    "unknown promise": ([*LINEAR, "--require", "determinstic"], "near: deterministic"),
    "bad promise": ([*LINEAR, "--require", "max_ulp=x"], "max_ulp must be an integer"),
    "promise without value": ([*LINEAR, "--require", "accumulator"], "accumulator must be one of"),
    "negative workspace": ([*LINEAR, "--max-workspace-bytes", "-4"], "at least 0"),
    "workspace of letters": ([*LINEAR, "--max-workspace-bytes", "x"], "--max-workspace-bytes"),
    "help for an unknown op": (["explain", "fake_quantise", "--help"], "fake_quantize"),
    "no amount": (["cache", "gc"], "be given"),
    "no size": (["cache", "gc", "--max-size", "1 gallon"], "such as 1GiB"),
    "no age": (["cache", "gc", "--older-than", "1y"], "such as 30d"),
    "no place": (["verify", "--device", "cpus"], "near: cpu"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_answered_in_one_line(skuda, arguments, says):
    status, out, err = skuda(*arguments)
    assert status == 2
    assert out == "" or "--help" in arguments
    assert err.startswith("skuda: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert says in err


def test_a_defect_is_not_dressed_up_as_bad_input(skuda, monkeypatch):
    def fails():
        raise ZeroDivisionError

    monkeypatch.setattr(listing, "Dispatcher", fails)
    status, out, err = skuda("list")
    assert (status, out) == (70, "")
    assert err.startswith("skuda: a defect of skuda: ZeroDivisionError: ")
    assert err.count("\n") == 1
    monkeypatch.setattr(sys, "flags", type("Flags", (), {"dev_mode": True}))
    with pytest.raises(ZeroDivisionError):
        skuda("list")
