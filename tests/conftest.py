"""What tests share: a toy op whose kernels can be declared for any card, and a fresh seed that failures show."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy import toy_op

from skuda.registry import Registry

HERE = Path(__file__).parent
EXAMPLES = ("example_backend", "example_kernel")
# The examples are packages of their own, whose tests run where they are installed.
collect_ignore = list(EXAMPLES)
sys.path.extend(str(HERE / name / "src") for name in EXAMPLES)


@pytest.fixture
def toy_registry():
    return Registry([toy_op()], origin="toy")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The project's wheel."""
    root, out = HERE.parent, tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", out, root], check=True, capture_output=True)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="session")
def clean_python(wheel, tmp_path_factory):
    """Python of an environment with nothing but the wheel, the package called `kernels`, pytest and setuptools."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home / "env", with_pip=True)
    python = home / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "kernels", "pytest", "setuptools>=77", wheel], check=True, capture_output=True)
    return python
