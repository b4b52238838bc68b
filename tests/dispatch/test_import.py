"""What an import loads, and the public names."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from skuda.kernels.catalog import built_in_ops

HEAVY = ("torch", "cupy", "jax", "pycuda", "cuda", "triton", "typer", "rich", "matplotlib", "safetensors", "tokenizers")


def modules_after(code):
    listing = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(json.loads(listing.stdout))


@pytest.mark.parametrize("package", ["skuda.registry", "skuda.kernels", "skuda.kernels.quantize", "skuda.dispatch"])
def test_importing_loads_no_gpu_library_no_tool_and_no_op(package):
    loaded = modules_after(f"import {package}")
    assert loaded.isdisjoint(HEAVY)
    assert not [name for name in loaded if re.match(r"skuda\.kernels\.quantize\.\w", name)]


def test_importing_the_dispatcher_loads_no_backend_that_it_does_not_make():
    loaded = modules_after("import skuda.dispatch")
    assert not [name for name in loaded if re.match(r"skuda\.dispatch\.(cuda\.(?!driver)|backends\.(?!base))\w+", name)]
    seldom = {"select.measured", "select.tuning", "select.explanation", "plugins.loading", "compile.compilers"}
    assert loaded.isdisjoint(f"skuda.dispatch.{name}" for name in (*seldom, "shard"))


@pytest.mark.parametrize("module", ["skuda.registry", "skuda.tools.commands"])
def test_the_registry_and_the_command_need_no_array_library(module):
    assert "numpy" not in modules_after(f"import {module}")


def test_every_op_has_its_descriptor_exported_by_its_category():
    for op in built_in_ops():
        package = importlib.import_module(op.reference.__module__.rpartition(".")[0])
        assert op.descriptor.__name__ in package.__all__, f"add {op.descriptor.__name__} to {package.__file__}"
        assert getattr(package, op.descriptor.__name__) is op.descriptor


def test_one_module_reads_the_environment():
    readers = [
        path.relative_to(ROOT)
        for folder in ("registry", "kernels", "dispatch", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"(?<!\")os\.environ|getenv", path.read_text())
    ]
    assert readers == [Path("dispatch/settings.py")]


def test_every_package_is_listed_for_the_wheel():
    listed = set(re.findall(r'^    "(skuda[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("registry", "kernels", "dispatch", "tools")
        for path in (ROOT / folder).rglob("*.py")
    }
    lifted = {re.sub("^dispatch/(skuda-package|(?=(torch|serving|vllm)\\b))", "", each) for each in folders}
    assert listed == {".".join(filter(None, ("skuda", *each.split("/")))) for each in lifted}
