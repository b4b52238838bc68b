"""What makes evidence stale: everything that decides bits or verdicts, and nothing else."""

from __future__ import annotations

import importlib
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from toykernels import scaled as toy

from skuda.kernels import sources
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.code import c_tokens, code_hash, reached
from skuda.kernels.sources import read_source, source_hash
from skuda.registry import Op
from skuda.registry.device import device_named
from skuda.tools.verify import evidence
from skuda.tools.verify.evidence import EvidenceFile, Records, SkuEvidence, status
from skuda.tools.verify.fingerprint import reference_hash

FILES = {
    "__init__.py": "from hashed.rules import rule\n",
    "k.cu": """
        #include "include/a.cuh"
        #define STEP 1 /* a step */
        extern "C" __global__ void k(float *y) { y[0] = halved(STEP); }  // the kernel
        """,
    "include/a.cuh": '#include "include/b.cuh"\n// A header.\n',
    "include/b.cuh": "__device__ float halved(float x) { return x / 2; }\n",
    "rules.py": """
        from hashed import sizes
        from hashed.sizes import half as _half

        THREADS = 128
        _CHOICES = {"plain": 1}
        _CHOICES.update(fast=2)

        def rule(problem, device):
            "Launch it."
            return blocks(problem), THREADS, sizes.TILE, _half(4)

        def blocks(problem):
            return problem.n // 2  # halves

        def other(problem, device):
            return 3
        """,
    "sizes.py": """
        TILE = 64
        WARP = 32

        def half(x):
            return x // deeper()

        def deeper():
            from hashed.numbers import TWO
            return TWO
        """,
    "numbers.py": "TWO = 2\nTHREE = 3\n",
    "meaning.py": """
        from hashed.rules import rule
        from hashed import numbers

        def reference(problem, *, x, y):
            'Halve.'
            y[...] = halved(x)

        def halved(x):
            return x / numbers.TWO

        SKUS = (
            1,
        )
        """,
}
COUNTS_NOT = [
    ("k.cu", "// the kernel", "// what it does"),
    ("k.cu", "/* a step */", ""),
    ("k.cu", "y[0] = halved", "y[0]  =\n    halved"),
    ("include/a.cuh", "// A header.", "// A header of ours."),
    ("include/b.cuh", "return x / 2;", "return x / 2; /* exact */"),
    ("__init__.py", "import rule", "import other, rule"),
    ("rules.py", "Launch it.", "Return the launch."),
    ("rules.py", "# halves", "# two of them"),
    ("rules.py", "return 3", "return 4"),
    ("rules.py", "(problem, device):\n", "(problem, device) :\n\n"),
    ("sizes.py", "WARP = 32", "WARP = 64"),
    ("numbers.py", "THREE = 3", "THREE = 4"),
    ("meaning.py", "'Halve.'", "'Write half of it.'"),
    ("meaning.py", "    1,\n", "    1,\n    2,\n"),
]
COUNTS = [
    ("k.cu", "define STEP 1", "define STEP 2"),
    ("k.cu", "y[0] =", "y[0] +="),
    ("include/b.cuh", "x / 2", "x * 2"),
    ("include/a.cuh", "// A header.", "#define halved(x) (x)"),
    ("rules.py", "return blocks(problem), THREADS", "return THREADS, blocks(problem)"),
    ("rules.py", "problem.n // 2", "problem.n // 4"),
    ("rules.py", "THREADS = 128", "THREADS = 256"),
    ("rules.py", "import half as _half", "import deeper as _half"),
    ("rules.py", "fast=2", "fast=3"),
    ("sizes.py", "TILE = 64", "TILE = 128"),
    ("sizes.py", "return x // deeper()", "return x / deeper()"),
    ("numbers.py", "TWO = 2", "TWO = 4"),
    ("meaning.py", "x / numbers.TWO", "x * numbers.TWO"),
    ("meaning.py", "halved(x)\n\n", "halved(x + 0)\n\n"),
]
OP = next(op for op in toy.ops() if isinstance(op, Op))
SKU = toy.sku("scaled", "pycuda").model_copy(
    update={"source": "hashed:k.cu", "entry_point": "k", "launch": "hashed.rules:rule"}
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a kernel, its launch rule and its reference; imported, and forgotten afterwards."""
    root = tmp_path / "hashed"
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sources._folders.cache_clear()
    yield root
    sources._folders.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "hashed"]:
        del sys.modules[name]


def meant() -> Op:
    return replace(OP, reference=importlib.import_module("hashed.meaning").reference)


def record_of(sku: Any, op: Op, **changes: Any) -> Records:
    """Return the record of a run that verified a kernel just now."""
    found = SkuEvidence(
        sku=sku.id,
        source_hash=source_hash(sku),
        reference_hash=reference_hash(op),
        verdict="verified",
        cases=1,
        runs=1,
    )
    file = EvidenceFile(
        device=device_named("h200"),
        date="2026-01-01",
        skuda="0",
        method=evidence.METHOD,
        seed=1,
        skus=(found.model_copy(update=changes),),
    )
    return Records((file,))


def edit(path: Any, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    before = path.stat().st_mtime_ns
    path.write_text(text.replace(old, new))
    while path.stat().st_mtime_ns == before:  # a clock of few ticks
        time.sleep(0.001)
        path.touch()


@pytest.mark.parametrize(
    ("word", "file", "old", "new"),
    [*(("verified", *edited) for edited in COUNTS_NOT), *(("stale", *edited) for edited in COUNTS)],
)
def test_what_decides_bits_makes_evidence_stale_and_nothing_else_does(package, word, file, old, new):
    op = meant()
    records = record_of(SKU, op)
    assert status(SKU, op, records).word == "verified"
    text = (package / file).read_text()
    edit(package / file, old, new)
    found = status(SKU, op, records)
    assert found.word == word
    assert found.reason == ("the kernel or its reference has changed since it was run" if word == "stale" else "")
    edit(package / file, text.replace(old, new), text)
    assert status(SKU, op, records).word == "verified"


@pytest.mark.parametrize(
    "changes",
    [
        {"flags": ("-O3",)},
        {"entry_point": "other"},
        {"launch": "hashed.rules:other"},
        {"precision_guarantee": SKU.precision_guarantee.model_copy(update={"max_ulp": None})},
    ],
)
def test_what_a_record_says_of_its_kernel_counts(package, changes):
    op = meant()
    assert status(SKU.model_copy(update=changes), op, record_of(SKU, op)).word == "stale"


@pytest.mark.parametrize("file", ["numbers.py", "rules.py", "k.cu", "include/b.cuh"])
def test_evidence_of_what_is_gone_is_stale(package, file):
    op = meant()
    records = record_of(SKU, op)
    (package / file).unlink()
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("hashed.")]:
        del sys.modules[name]
    assert status(SKU, op, records).word == "stale"


def test_other_cases_make_evidence_stale(package):
    op = meant()
    assert status(SKU, replace(op, cases=op.cases[1:]), record_of(SKU, op)).word == "stale"


def test_evidence_of_weaker_checks_is_stale(package, monkeypatch):
    op = meant()
    records = record_of(SKU, op)
    monkeypatch.setattr(evidence, "METHOD", 7)
    found = status(SKU, op, records)
    assert found.word == "stale"
    assert found.describe() == "no: stale, verified by method 1, today's is 7 (H200, 2026-01-01)"


@pytest.mark.parametrize("field", ["source_hash", "reference_hash"])
def test_a_record_without_a_hash_is_stale(package, field):
    op = meant()
    assert status(SKU, op, record_of(SKU, op, **{field: ""})).word == "stale"


def test_what_is_compiled_is_still_hashed_byte_for_byte(package):
    before = read_source("hashed:k.cu").digest
    edit(package / "k.cu", "// the kernel", "// what it does")
    assert read_source("hashed:k.cu").digest != before


@pytest.mark.parametrize(
    ("one", "another", "same"),
    [
        ("a+b", "a + b", True),
        ("a /* x */ b // y", "a b", True),
        ("a\\\n b", "a b", True),
        ("#define A 1\nint b;", "#define  A 1\n\n\nint b;", True),
        ("#define A 1\nint b;", "#define A 1 int\nb;", False),
        ("a > > b", "a >> b", False),
        ("ab", "a b", False),
        ('"// no comment" x', '"// no comment" y', False),
        ("1'000'000 + 'a'", "1'000'000 + 'b'", False),
        ("x = 1'000; // it's", "x = 1'000;", True),
        ('f("a b")', 'f("a  b")', False),
        ("1.5e-3f", "1.5e -3f", False),
    ],
)
def test_tokens_of_c(one, another, same):
    assert (c_tokens(one) == c_tokens(another)) is same


@pytest.mark.parametrize(
    ("text", "new", "same"),
    [
        ("def f():\n    return g()\ndef g():\n    return 1\n", ("return 1", "return 2"), False),
        ("def f():\n    return [h for h in 'ab']\ndef g():\n    return 1\n", ("return 1", "return 2"), True),
        ("def f():\n    return globals()['g']\ndef g():\n    return 1\n", ("return 1", "return 2"), False),
        (
            "import sys\nif sys.platform:\n    A = 1\nelse:\n    A = 2\ndef f():\n    return A\n",
            ("A = 2", "A = 3"),
            False,
        ),
        ("import math as m\ndef f():\n    return m.pi\n", ("math as m", "cmath as m"), False),
        ("from math import sin as s\ndef f():\n    return s\n", ("sin", "cos"), False),
        ("A, (B, *C) = 1, (2, 3)\ndef f():\n    return C\n", ("(2, 3)", "(2, 4)"), False),
        ("class K:\n    x = 1\ndef f(k: K):\n    return k.x\n", ("x = 1", "x = 2"), False),
        ("T = []\nT.append(1)\ndef f():\n    return T\n", ("append(1)", "append(2)"), False),
        ("from probe import g\ndef g():\n    return 1\ndef f():\n    return g()\n", ("return 1", "return 2"), False),
        ("def f():\n    return f'{1:>{2}}'\n", ("{2}", "{3}"), False),
    ],
)
def test_what_a_function_reaches(tmp_path, monkeypatch, text, new, same):
    path = tmp_path / "probe.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = code_hash("probe", "f")
    edit(path, *new)
    assert (code_hash("probe", "f") == before) is same


def test_relative_imports_and_modules_as_a_whole(tmp_path, monkeypatch):
    root = tmp_path / "relative"
    root.mkdir()
    (root / "__init__.py").touch()
    (root / "a.py").write_text("from . import b\nfrom .c import *\ndef f():\n    return vars(b), d()\n")
    (root / "b.py").write_text("X = 1\n")
    (root / "c.py").write_text("def d():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for name, old, new in (("b.py", "X = 1", "X = 2"), ("c.py", "return 1", "return 2")):
        before = code_hash("relative.a", "f")
        edit(root / name, old, new)
        assert code_hash("relative.a", "f") != before, name


def test_a_reference_that_is_made_by_a_call_is_hashed_with_its_module(package):
    op = meant()
    made = replace(op, reference=partial(op.reference))
    assert reference_hash(made) != reference_hash(op)


def test_every_built_in_op_has_a_meaning_of_its_own_that_reaches_its_arithmetic():
    ops = built_in_ops()
    assert len({reference_hash(op) for op in ops}) == len(ops)
    for op in ops:
        found = reached(op.reference.__module__, op.reference.__name__)
        names = {name for _, name in found}
        assert {"blocks", "fma", "quantize_rows", "LogitsProblem"} & names
        curved = op.name.endswith("linear") or op.name == "rescale"
        assert {"gelu", "silu"} <= names if curved else not {"gelu", "silu"} & names
        assert not [
            module for module, _ in reached(op.reference.__module__, op.reference.__name__) if "launch" in module
        ]
