"""The wheel, installed as a user would: nothing outside skuda/, next to another package called `kernels`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

LARGEST = 1_000_000
LARGEST_RECORD = 2_000_000
"""A verification says of every kernel what was run."""


def tracked(*folders):
    listing = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listing.stdout.split("\0") if name]


def test_no_tracked_file_is_larger_than_a_megabyte_or_two():
    sizes = {name: (ROOT / name).lstat().st_size for name in tracked() if (ROOT / name).exists()}
    assert sizes["pyproject.toml"] > 0
    most = {name: LARGEST_RECORD if name.startswith("docs/evidence/") else LARGEST for name in sizes}
    assert not {name: size for name, size in sizes.items() if size > most[name]}


@pytest.mark.full
def test_the_wheel_holds_every_source_file_and_nothing_outside_skuda(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert all(name.startswith("skuda/") for name in names)
    sources = tracked("registry", "kernels", "dispatch", "tools")
    moved = {"dispatch/skuda-package/": ""} | {f"dispatch/{name}/": f"{name}/" for name in ("torch", "serving", "vllm")}
    for before, after in moved.items():
        sources = [after + name.removeprefix(before) if name.startswith(before) else name for name in sources]
    assert names == {f"skuda/{name}" for name in sources}


@pytest.mark.full
def test_what_an_older_build_left_behind_is_not_in_the_wheel(wheel):
    assert (wheel.parents[1] / "build" / "lib" / "skuda" / "tools" / "stale.py").exists()
    assert "skuda/tools/stale.py" not in zipfile.ZipFile(wheel).namelist()


@pytest.mark.full
def test_an_sdist_has_the_same_bytes_each_time(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    for name in ("one", "other"):
        (wheel.parents[1] / "README.md").touch()
        command = [sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path / name, wheel.parents[1]]
        subprocess.run(command, check=True)
    assert len({path.read_bytes() for path in tmp_path.glob("*/*.tar.gz")}) == 1


@pytest.mark.full
def test_it_works_next_to_the_package_called_kernels(clean_python, tmp_path):
    python = clean_python("beside-kernels", "kernels")
    code = """
import sys, kernels, skuda, skuda.kernels, numpy as np
from skuda.dispatch import Dispatcher
from skuda.kernels.quantize import FakeQuantizeDescriptor
assert "skuda" not in kernels.__file__ and hasattr(kernels, "get_kernel")
desc = FakeQuantizeDescriptor(numel=2, q_min=-128, q_max=127, input_element="f32")
print(Dispatcher().run(desc, input=np.array([0.26, 99], np.float32), scale=0.5, zero_point=0).tolist())
same = skuda.ops.fake_quantize(input=np.array([0.26, 99], np.float32), scale=0.5, zero_point=0, q_min=-128, q_max=127)
assert same.tolist() == [0.5, 63.5]
assert not [name for name in sys.modules if "skuda-package" in name] and skuda.__version__
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
