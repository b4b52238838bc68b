"""The recipes of CONTRIBUTING work as they are written, in a copy of the tree and in a package of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

pytestmark = pytest.mark.full
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PARTS = ("registry", "kernels", "dispatch", "tools", "tests", ".typing", "pyproject.toml")


def section(title):
    """Return the text before each code block of a section, with the block's language and content."""
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE)
    return re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)


def files(title):
    """Return the files of a section by name. The sentence before a block ends with the name of its file."""
    found = {}
    for before, _, code in section(title):
        if name := re.search(r"`([\w./]+\.\w+)`[^`]*\Z", before):
            found[name[1]] = code
    return found


def commands(title):
    return [line[2:] for _, kind, code in section(title) if kind == "console" for line in code.splitlines()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the tree, which the commands import in place of this one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


def typed(command, folder, **changes):
    bin_ = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", **changes}
    ran = subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def in_tree(command, tree):
    return typed(
        command, tree, PYTHONPATH=str(tree / ".typing"), SKUDA_PLUGINS="0", SKUDA_CACHE_DIR=str(tree / "cache")
    )


@pytest.fixture(scope="module")
def with_op(tree):
    ((name, code),) = files("A new op").items()
    assert name == "kernels/elementwise/negate.py"
    (tree / name).write_text(code)
    return tree


def test_a_new_op_is_one_file(with_op):
    for command in commands("A new op"):
        status, shown = in_tree(command, with_op)
        assert status == 0, f"{command}\n{shown}"
        assert "negate" in shown
    status, shown = in_tree(
        "pytest -q -p no:cacheprovider tests/kernels/test_ops.py tests/dispatch/test_import.py -k negate", with_op
    )
    assert status != 0
    assert "add an exact definition of negate to tests/oracle.py" in shown
    status, shown = in_tree(
        "pytest -q -p no:cacheprovider tests/dispatch/test_import.py -k exported_by_its_category", with_op
    )
    assert re.search(r"add NegateDescriptor to \S+elementwise/__init__.py", shown)


@pytest.fixture(scope="module")
def with_kernel(with_op):
    found = files("A new kernel for an op")
    assert list(found) == ["kernels/elementwise/negate.cu", "kernels/elementwise/negate.py"]
    (with_op / "kernels/elementwise/negate.cu").write_text(found["kernels/elementwise/negate.cu"])
    module = with_op / "kernels/elementwise/negate.py"
    lines = module.read_text().splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if line.startswith("SKUS")]
    module.write_text("".join([*lines[:at], "\n\n", found["kernels/elementwise/negate.py"], *lines[at + 1 :]]))
    return with_op


def test_a_new_kernel_is_a_source_and_an_entry(with_kernel):
    explain, test = commands("A new kernel for an op")
    status, shown = in_tree(explain, with_kernel)
    assert status == 0, shown
    assert "unary_elementwise.negate.f32.plain.sm_80.pycuda.chunked" in shown
    status, shown = in_tree(f"{test} -q -p no:cacheprovider", with_kernel)
    assert status == 0, shown
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 2 + 6


def test_a_new_backend_is_a_package_of_three_files(clean_python, tmp_path):
    found = files("A new backend")
    assert list(found) == ["pyproject.toml", "skuda_mine.py", "test_mine.py"]
    for name, code in found.items():
        (tmp_path / name).write_text(code)
    path = f"{clean_python('new-backend').parent}{os.pathsep}{os.environ['PATH']}"
    # The build requirements are installed already.
    changes = {"PATH": path, "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    install, test, doctor = commands("A new backend")
    status, shown = typed(install, tmp_path, **changes)
    assert status == 0, shown
    status, shown = typed(test, tmp_path, **changes)
    assert status == 0, shown
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 12
    status, shown = typed(doctor, tmp_path, **changes)
    assert status == 0, shown
    assert "ok\tPlug-ins\tmine\tskuda.backends of skuda-mine 1.0" in shown
