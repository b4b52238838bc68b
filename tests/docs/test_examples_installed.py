"""Both example packages, built as wheels and installed beside skuda; their own tests run there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from paths import TESTS

EXAMPLES = ("example_backend", "example_kernel")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(once):
    """Copies of the examples, and their wheels: building leaves its traces beside the sources."""

    def build(folder):
        for name in EXAMPLES:
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            shutil.copytree(TESTS / name, folder / name, ignore=ignored)
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist"]
        for name in EXAMPLES:
            subprocess.run([*command, folder / name], check=True)

    return once("examples", build)


@pytest.fixture(scope="module")
def python(clean_python, folder):
    wheels = sorted((folder / "dist").glob("*.whl"))
    assert [wheel.name.partition("-")[0] for wheel in wheels] == ["skuda_absmax", "skuda_torch"]
    return clean_python("with-examples", *wheels)


def said(python, *command, **changes):
    ran = subprocess.run(
        [python, *command],
        env={**os.environ, **changes},
        cwd=python.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def skuda(python, *command, **changes):
    return said(python, python.with_name("skuda"), *command, **changes)


@pytest.mark.parametrize(
    ("example", "least", "reason"),
    [
        ("example_backend", 66, "backend torch: torch is not installed (pip install torch)"),
        ("example_kernel", 20, "backend pycuda: pycuda is not installed"),
    ],
)
def test_its_own_three_lines_of_tests_pass(python, folder, example, least, reason):
    shown = said(python, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder / example / "tests"))
    passed = int(re.search(r"(\d+) passed", shown)[1])
    assert passed >= least
    assert "failed" not in shown
    assert reason in shown


def test_the_doctor_shows_them_with_where_they_come_from(python):
    shown = skuda(python, "doctor")
    for name, group, origin in (
        ("row_absmax", "kernels", "skuda-absmax 1.0"),
        ("torch_kernels", "kernels", "skuda-torch 1.0"),
        ("torch", "backends", "skuda-torch 1.0"),
        ("torch_cuda", "backends", "skuda-torch 1.0"),
    ):
        # Slow from a second on, as on a busy machine.
        took = r"(0|slow: [1-9]\d*)\.\d{3} s to load"
        assert re.search(rf"ok +{name} +skuda.{group} of {origin}, {took}", shown)
    assert re.search(r"missing +torch +torch is not installed *\n +fix: pip install torch", shown)
