"""The wheel, installed as a user would: nothing outside skuda/, next to another package called `kernels`."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.install


def test_the_wheel_holds_every_source_file_and_nothing_outside_skuda(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert all(name.startswith("skuda/") for name in names)
    tracked = subprocess.run(
        ["git", "ls-files", "registry", "kernels", "dispatch", "tools"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert names == {f"skuda/{name}" for name in tracked.stdout.split()}


def test_it_works_next_to_the_package_called_kernels(clean_python, tmp_path):
    python = clean_python
    code = """
import kernels, skuda.kernels, numpy as np
from skuda.dispatch import Dispatcher
from skuda.kernels.quantize import FakeQuantizeDescriptor
assert "skuda" not in kernels.__file__ and hasattr(kernels, "get_kernel")
desc = FakeQuantizeDescriptor(numel=2, q_min=-128, q_max=127, input_element="f32")
print(Dispatcher().run(desc, input=np.array([0.26, 99], np.float32), scale=0.5, zero_point=0).tolist())
"""
    ran = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.strip() == "[0.5, 63.5]"
    listed = subprocess.run(
        [python.with_name("skuda"), "list", "--json"], check=True, capture_output=True, cwd=tmp_path
    )
    assert b"fake_quantize" in listed.stdout
    files = "import importlib.metadata as m; print(*m.files('skuda'), sep='\\n')"
    ran = subprocess.run([python, "-c", files], check=True, capture_output=True, text=True, cwd=tmp_path)
    installed = [Path(line) for line in ran.stdout.split()]
    assert {path.parts[0] for path in installed if ".dist-info" not in path.parts[0]} <= {"skuda", ".."}
    assert [path for path in installed if path.parts[0] == ".." and path.name != "skuda"] == []
