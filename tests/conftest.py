"""What tests share: a toy op whose kernels can be declared for any card, the wheel, and environments that have it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent / "programs"))
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
# pytest-xdist has a worker for each CPU; threads of their own would wait for one another. Set before NumPy is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

from paths import ROOT, TESTS
from support import SEED, kernels_tested
from toy import toy_op

from skuda.registry import Registry

EXAMPLES = ("example_backend", "example_kernel")
# The examples are packages of their own, whose tests run where they are installed.
collect_ignore = list(EXAMPLES)
# A shell starts what it puts in the background deaf to Ctrl-C, and so would be all programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.extend(str(TESTS / name / "src") for name in EXAMPLES)


def pytest_report_header():
    return f"to draw the same sample of tests and the same numbers again: SKUDA_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    terminalreporter.line(kernels_tested())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture
def toy_registry():
    return Registry([toy_op()], origin="toy")


@pytest.fixture(scope="session")
def once(request, tmp_path_factory):
    """Return a function that fills a folder once, whichever worker of pytest-xdist asks for it first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own

    def filled(name, fill):
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return filled


@pytest.fixture(scope="session")
def wheel(once):
    """The project's wheel, built from a copy of the tracked files in which an older build has left a module behind."""

    def build(folder):
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listing.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        stale = folder / "build" / "lib" / "skuda" / "tools" / "stale.py"
        stale.parent.mkdir(parents=True)
        stale.touch()
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "dist", folder]
        subprocess.run(command, check=True)

    (made,) = once("wheel", build).glob("dist/*.whl")
    return made


@pytest.fixture(scope="session")
def clean_python(once, wheel):
    """Return a function: Python of a new environment with nothing but the wheel, pip, pytest, setuptools and `more`."""

    def made(name, *more):
        def create(folder):
            venv.create(folder)
            pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
            packages = ["pip", "pytest", "setuptools>=77", wheel, *more]
            subprocess.run([*pip, "install", "--quiet", "--no-compile", *packages], check=True)

        return once(name, create) / "bin" / "python"

    return made
