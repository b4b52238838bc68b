"""Fixtures that all tests share: a registry with a toy op, the wheel, and environments where it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import venv
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent / "programs"))
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
# pytest-xdist has a worker for each CPU; threads of their own would wait for one another. Set before NumPy is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

from paths import ROOT, TESTS, uses_torch
from support import SEED
from toy import toy_op

from skuda.registry import Registry

EXAMPLES = ("example_backend", "example_kernel")
# The examples are packages of their own, whose tests run where they are installed.
collect_ignore = list(EXAMPLES)
SAMPLED = pytest.StashKey()
"""Of each test that did not run with all its parameters: with how many it ran, and how many there are."""
FOR_TORCH = ("torch", "transformers", "compressed_tensors", "safetensors")
ABSENT = [name for name in FOR_TORCH if find_spec(name) is None]
collect_ignore_glob = ["pytorch/*"] if ABSENT else []
collect_ignore_glob += [] if find_spec("vllm") else ["serving"]
# A shell starts what it puts in the background deaf to Ctrl-C, and so would be all programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.extend(str(TESTS / name / "src") for name in EXAMPLES)


def pytest_addoption(parser):
    parser.addoption("--torch", action="store_true", help="only files with tests that use torch or PyCUDA")


def pytest_configure(config):
    if find_spec("vllm"):  # whose own warnings are many, and not ours
        config.addinivalue_line("filterwarnings", "ignore")


def pytest_ignore_collect(collection_path, config):
    if config.option.torch and collection_path.name.startswith("test_") and collection_path.is_file():
        return None if uses_torch(collection_path) else True
    return None


def pytest_report_header():
    left_out = f"tests/pytorch is left out: {', '.join(ABSENT)} not installed" if ABSENT else "tests/pytorch is there"
    return [f"to draw the same sample of tests and the same numbers again: SKUDA_TEST_SEED={SEED}", left_out]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    every = Counter(item.nodeid.partition("[")[0] for item in items)
    yield
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    drawn = Counter(item.nodeid.partition("[")[0] for item in items)
    if config.option.markexpr:
        config.stash[SAMPLED] = {name: (drawn[name], count) for name, count in every.items() if drawn[name] < count}


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sampled"] = session.config.stash.get(SAMPLED, {})


def pytest_testnodedown(node):
    node.config.stash[SAMPLED] = getattr(node, "workeroutput", {}).get("sampled", {})


def pytest_terminal_summary(terminalreporter):
    sampled = terminalreporter.config.stash.get(SAMPLED, {})
    if sampled:
        drawn, every = (sum(counts[at] for counts in sampled.values()) for at in (0, 1))
        terminalreporter.section(f"sampled: {drawn:,} of {every:,}; SKUDA_TEST_SEED={SEED} draws the same")
        for name, (some, count) in sorted(sampled.items()):
            terminalreporter.line(f"{some:5} of {count:5} {name}")


@pytest.fixture
def toy_registry():
    return Registry([toy_op()], origin="toy")


@pytest.fixture
def skuda(capsys, monkeypatch, tmp_path):
    """Run the command with plug-ins off and a cache of its own; gives status, standard output and standard error."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS", "SKUDA_BUNDLE", "SKUDA_TUNING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    from skuda.tools.cli import main

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


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
            packages = ["pip", "pytest", "setuptools>=77", f"{wheel}[cli]", *more]
            subprocess.run([*pip, "install", "--quiet", "--no-compile", *packages], check=True)

        return once(name, create) / "bin" / "python"

    return made
