"""The recipes of CONTRIBUTING work as they are written, in a copy of the tree and in a package of their own."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from copied_tree import copied_tree, in_tree, typed
from paths import ROOT

from skuda.kernels.catalog import built_in_ops

FULL = pytest.mark.full
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPE = ROOT / "tests" / "docs" / "recipe"
DEFINITION = """
@defines("requantize")
def _requantize(problem: Any, inputs: dict[str, Any]) -> Definition:
    multiplier, zero_point = (_only(inputs[name]) for name in ("multiplier", "zero_point"))

    def at(_: str, where: Coordinate) -> int:
        sum_ = to_format(Fraction(int(inputs["input"][where])), "f32")
        real = multiply(sum_, convert(float(multiplier), "f32"), "f32")
        t = nearest_even(Fraction(real)) if math.isfinite(real) else real
        return code_of(t, int(zero_point), problem.q_min, problem.q_max)

    return at
"""
EVERY_OP = (
    *("tests/registry", "tests/dispatch/host", "tests/dispatch/test_functional.py", "tests/dispatch/test_import.py"),
    *("tests/kernels/test_descriptors.py", "tests/kernels/test_ops.py", "tests/kernels/test_cuda_on_cpu.py"),
    *("tests/kernels/test_cuda_compiles.py", "tests/docs/test_tables.py", "tests/tools/show/test_list.py"),
    *("tests/docs/test_site.py", "tests/docs/test_readme.py", "tests/tools/test_cli.py"),
    *("tests/tools/bench/test_bench.py", "tests/tools/ship/test_selection_lock.py", "tests/test_layout.py"),
    *(f"tests/tools/verify/test_{name}.py" for name in ("verify", "fingerprint", "large")),
)
"""The tests that have a case, or an assertion, for every op."""
OTHER_OPS = " or ".join(f"[{op.name} or .{op.name}." for op in built_in_ops())
NEW = f"negate or requantize or not ({OTHER_OPS})"
"""Leaves out the cases of the ops that there are already, which run outside of the copy."""


def section(title):
    """Return the text before each code block of a section, with the block's language and content."""
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE)
    return re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", body, re.DOTALL | re.MULTILINE)


def files(title):
    """Return the files of a section by name. The sentence before a block ends with the name of its file."""
    found = {}
    for before, kind, code in section(title):
        if kind != "console" and (name := re.search(r"`([\w./]+\.\w+)`[^`]*\Z", before)):
            found[name[1]] = code
    return found


def commands(title):
    return [line[2:] for _, kind, code in section(title) if kind == "console" for line in code.splitlines()]


@pytest.fixture
def tree(tmp_path):
    return copied_tree(tmp_path / "tree")


def make(command):
    """Return a `make` command that uses this environment and installs nothing."""
    venv = Path(sys.executable).parent.parent
    return command.replace("make ", f"make -o {venv}/.test VENV={venv} ", 1)


def add_modules(tree):
    (tree / "kernels/elementwise/negate.py").write_text(files("A new op")["kernels/elementwise/negate.py"])
    for name in ("requantize.py", "requantize.cu"):
        shutil.copy(RECIPE / name, tree / "kernels" / "quantize" / name)


def test_a_new_op_is_one_module_and_the_tests_say_what_they_need(tree):
    add_modules(tree)
    for command in commands("A new op")[:3]:
        status, shown = in_tree(command, tree)
        assert status == 0, f"{command}\n{shown}"
        assert "negate" in shown
    status, shown = in_tree("skuda verify --device cpu --op requantize", tree)
    assert (status, "requantize: 2 verified" in shown) == (0, True), shown
    tests = "tests/kernels/test_ops.py tests/dispatch/test_import.py -k 'definition and negate or exported_by'"
    status, shown = in_tree(f"pytest -q -p no:cacheprovider {tests}", tree)
    assert status != 0
    assert 'add an exact definition to tests/helpers/oracle.py, below @defines("negate")' in shown
    assert re.search(r"add NegateDescriptor to \S+elementwise/__init__.py", shown)


def add_ops(tree):
    add_modules(tree)
    found = files("A new op")
    assert list(found) == [
        "kernels/elementwise/negate.py",
        "kernels/elementwise/__init__.py",
        "tests/helpers/oracle.py",
    ]
    (tree / "kernels/elementwise/__init__.py").write_text(found["kernels/elementwise/__init__.py"])
    package = tree / "kernels/quantize/__init__.py"
    imported = "    from skuda.kernels.quantize.requantize import RequantizeDescriptor\n"
    behind = "    from skuda.kernels.quantize.rms_norm_quantize"
    text = package.read_text().replace(behind, f"{imported}{behind}")
    package.write_text(text.replace('    "Rescale', '    "RequantizeDescriptor",\n    "Rescale'))
    with (tree / "tests/helpers/oracle.py").open("a") as oracle:
        oracle.write(f"\n\n{found['tests/helpers/oracle.py']}\n{DEFINITION}")


@FULL
def test_the_tests_of_ops_pass_for_new_ones(tree):
    add_ops(tree)
    tests = "tests/kernels/test_ops.py tests/kernels/test_descriptors.py tests/dispatch/host/test_memory.py"
    chosen = "-k 'negate or requantize or every_op or every_family'"
    status, shown = in_tree(f"pytest -q -p no:cacheprovider {tests} {chosen}", tree)
    assert status == 0, shown
    assert int(re.search(r"(\d+) passed", shown)[1]) > 80


def add_kernels(tree):
    add_ops(tree)
    found = files("A new kernel for an op")
    assert list(found) == ["kernels/elementwise/negate.cu", "kernels/elementwise/negate.py"]
    (tree / "kernels/elementwise/negate.cu").write_text(found["kernels/elementwise/negate.cu"])
    module = tree / "kernels/elementwise/negate.py"
    lines = module.read_text().splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if line.startswith("SKUS")]
    module.write_text("".join([*lines[:at], "\n\n", found["kernels/elementwise/negate.py"], *lines[at + 1 :]]))


@FULL
def test_a_new_kernel_is_a_source_and_an_entry(tree):
    add_kernels(tree)
    explain, test = commands("A new kernel for an op")
    status, shown = in_tree(explain, tree)
    assert status == 0, shown
    assert "unary_elementwise.negate.f32.plain.sm_80.pycuda.chunked" in shown
    status, shown = in_tree(f"{test} -q -p no:cacheprovider".replace("negate", "'negate or requantize'"), tree)
    assert status == 0, shown
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 2 * (2 + 6)


@FULL
@pytest.mark.long
def test_every_test_that_asks_all_ops_passes_for_new_ones_with_kernels(tree):
    add_kernels(tree)
    generated, test = commands("A new op")[3:]
    status, shown = in_tree(make(generated), tree)
    assert status == 0, shown
    assert "def negate(" in (tree / "dispatch/skuda-package/ops.pyi").read_text()
    assert "| `negate` |" in (tree / "docs/ops.md").read_text()
    assert "requantize" in (tree / "docs/selection.lock.json").read_text()
    status, shown = in_tree(f"{test} -q -p no:cacheprovider", tree)
    assert status == 0, shown
    status, shown = in_tree(f"pytest -q -p no:cacheprovider -m 'not full' -k '{NEW}' {' '.join(EVERY_OP)}", tree)
    assert status == 0, shown


@FULL
def test_what_is_typed_passes_the_checks(tree):
    for program in ("ruff", "mypy"):
        pytest.importorskip(program)
    add_kernels(tree)
    for check in ("ruff check registry kernels dispatch tests tools", "ruff format --check .", "mypy"):
        status, shown = in_tree(check, tree)
        assert status == 0, shown


@FULL
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
    assert re.search(r"ok +mine +skuda\.backends of skuda-mine 1\.0", shown)
