"""Plant faults in the kernels of a copy of the repository, one at a time, and check that a test fails of each.

    python tests/programs/faults.py                   the planted faults, and some drawn ones
    python tests/programs/faults.py linear-           those whose names begin so
    python tests/programs/faults.py none --drawn 20   edits of operators and numbers, drawn at random

`FAULTS` has one fault of each kind. The exit status is 1 if one of them is not caught, or cannot be planted: its text
must stand in its file exactly once. Drawn edits that no test notices are shown with their line: they may change no
result, and a person judges them; their tests run as `make test` runs them. All named tests first run without any
fault, and must pass.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 1800.0
"""Seconds after which the tests of a fault are ended."""


class Fault(NamedTuple):
    """A wrong edit: `new` in place of `old`, which stands in the file `path` once, and tests of which one must fail."""

    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]
    at: int | None = None
    """Where `old` begins, if it stands in the file more than once."""
    options: Sequence[str] = ()
    """What pytest is told besides."""


def on_cpu(*skus: str) -> list[str]:
    """Return tests that run kernels on the CPU; a SKU is given by category, op and elements."""
    test = "tests/kernels/test_cuda_on_cpu.py::test_kernel_equals_the_reference"
    return [f"{test}[{sku}]" for sku in skus]


def chunked(*skus: str) -> list[str]:
    """Return those of quantization ops."""
    return on_cpu(*(f"quantization.{sku}.plain.sm_80.chunked" for sku in skus))


def hopper(way: str) -> list[str]:
    """Return the test of a kernel of Hopper's at the ends of all ranges; a way is given with its zero points."""
    return [f"tests/kernels/test_hopper_on_cpu.py::test_extreme_values_give_the_bits_of_the_reference[{way}]"]


CURVES = ["tests/kernels/test_curves.py::test_every_16_bit_argument_gives_the_same_bits_on_the_fast_path"]
SAMPLING = ["tests/kernels/test_sampling_on_cpu.py"]
_INCLUDE, _LINEAR = "kernels/include", "kernels/linear"
FAULTS = (
    Fault(
        "rounds-half-away",
        f"{_INCLUDE}/quotient.cuh",
        "const f64 t = (f64)rint(div_rn(x, s));\n  return t >=",
        "const f64 t = (f64)round(div_rn(x, s));\n  return t >=",
        chunked("fake_quantize_backward.f32"),
    ),
    Fault(
        "product-with-the-reciprocal",
        f"{_INCLUDE}/quotient.cuh",
        "  C q = mul_rn(x, g.y);\n#pragma",
        "  return mul_rn(x, g.y);\n  C q = 0;\n#pragma",
        chunked("quantize_per_tensor.f32-s8"),
    ),
    Fault(
        "special-values-on-the-fast-path",
        f"{_INCLUDE}/quotient.cuh",
        "if (all_quick(g) && all_finite(x)) {\n    quick_codes(x, g, q);",
        "if (true) {\n    quick_codes(x, g, q);",
        chunked("quantize_per_token.f32-s8"),
    ),
    Fault(
        "the-mask-excludes-its-bound",
        f"{_INCLUDE}/quotient.cuh",
        "t <= (C)(g.q_max - g.z)",
        "t < (C)(g.q_max - g.z)",
        chunked("fake_quantize_backward.f32"),
    ),
    Fault(
        "the-tail-is-missing",
        f"{_INCLUDE}/walk.cuh",
        "unit < all_units;",
        "unit < all_units - 1;",
        chunked("fake_quantize_per_channel.f32"),
    ),
    Fault(
        "nibbles-in-another-order",
        f"{_INCLUDE}/elements.cuh",
        "w |= (q[i] & 15u) << 4 * i",
        "w |= (q[i] & 15u) << 4 * (N - 1 - i)",
        chunked("quantize_per_group.f32-s4"),
    ),
    Fault(
        "nan-is-ignored",
        f"{_INCLUDE}/runs.cuh",
        "bool quick = by_chunks && !has_nan(r);",
        "bool quick = by_chunks;",
        chunked("dynamic_range.f32-s8"),
    ),
    Fault(
        "a-missing-barrier",
        "kernels/quantize/dynamic_range.cu",
        "    __syncthreads();\n    up[band][lane] = r.up, down[band][lane] = r.down;\n    __syncthreads();\n",
        "    up[band][lane] = r.up, down[band][lane] = r.down;\n",
        chunked("dynamic_range.f32-s8"),
    ),
    Fault(
        "begins-before-the-previous-kernel-ends",
        "kernels/quantize/norm.cuh",
        "  griddepcontrol_wait();\n",
        "",
        chunked("rms_norm_quantize.f32-s8"),
    ),
    Fault(
        "sums-in-another-order",
        "kernels/quantize/norm.cuh",
        "half[i] = v[i] + v[i + N / 2];",
        "half[i] = v[2 * i] + v[2 * i + 1];",
        chunked("rms_norm_quantize.f32-s8"),
    ),
    Fault("a-doubtful-value-is-kept", f"{_INCLUDE}/curves.cuh", "if (any) {", "if (false) {", CURVES),
    Fault("of-equals-the-last", "kernels/sampling/weights.cuh", "| (u32)~index", "| index", SAMPLING),
    Fault(
        "a-wrong-sign",
        f"{_LINEAR}/pack_weight.cu",
        "turn = scale < 0 ? 15 : 0",
        "turn = 0",
        on_cpu("shape_layout.pack_weight.s8.plain.sm_80.blocks"),
    ),
    Fault(
        "linear-sums-of-32-bits",
        f"{_LINEAR}/epilogue.cuh",
        "return acc - (s64)za * w;",
        "return (s32)((u32)acc - (u32)za * (u32)w);",
        hopper("warpgroup-both"),
    ),
    Fault(
        "linear-a-stage-is-read-before-it-is-full",
        f"{_LINEAR}/warpgroup.cuh",
        "        mbarrier_wait(full + 8 * at.stage, at.parity);\n",
        "",
        hopper("warpgroup-none"),
    ),
    Fault(
        "linear-a-wrong-stride",
        f"{_LINEAR}/streamed.cuh",
        "order.at(step) * K_BLOCKS + c, token0",
        "step * K_BLOCKS + c, token0",
        hopper("ordered-none"),
    ),
    Fault(
        "linear-codes-beyond-k-are-added",
        f"{_LINEAR}/streamed.cuh",
        "if (W_ZERO_POINTS) {  // beyond",
        "if (false) {  // beyond",
        hopper("fused-weight"),
    ),
)

_CPU = "tests/kernels/test_cuda_on_cpu.py::test_kernel_equals_the_reference"
RUN_BY = {
    "kernels/attention": [_CPU, "tests/kernels/test_attention_on_cpu.py"],
    "kernels/elementwise": [_CPU],
    "kernels/include": [_CPU, *SAMPLING],
    "kernels/linear": ["tests/kernels/test_hopper_on_cpu.py", _CPU],
    "kernels/quantize": [_CPU],
    "kernels/sampling": SAMPLING,
}
"""The tests of drawn edits, by the folder of the source."""
EDITS = {
    "+": "-",
    " - ": " + ",
    "*": "+",
    "<": "<=",
    ">": ">=",
    "<=": "<",
    ">=": ">",
    "==": "!=",
    "&&": "||",
    "||": "&&",
}
_SAMPLE = ("-m", "not full")
_TOKEN = re.compile(r"(?<![-+<>=&|*/.\w])(?:[+*<>]|<=|>=|==|&&|\|\||\d+)(?![-+<>=&|*/.\w])| - ")


def drawn(root: Path, rng: random.Random, count: int) -> list[Fault]:
    """Return `count` edits of an operator or a number in the code of a kernel."""
    paths = sorted(path for folder in RUN_BY for path in (root / folder).glob("*.cu*"))
    found: list[Fault] = []
    while len(found) < count:
        path = rng.choice(paths)
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        places = [m for m in _TOKEN.finditer(text) if _is_code(text, m.start())]
        if places:
            token, at = (place := rng.choice(places)).group(), place.start()
            new = EDITS[token] if token in EDITS else str(int(token) + 1)
            line = text.count("\n", 0, at) + 1
            title = f"{name}:{line} {token.strip()} -> {new.strip()}"
            found.append(Fault(title, name, token, new, RUN_BY[name.rpartition("/")[0]], at, _SAMPLE))
    return found


def _is_code(text: str, at: int) -> bool:
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return "//" not in before and not before.lstrip().startswith(("#", "template", "typedef", "*", "/*"))


class Tree:
    """A copy of the repository's files, from which `skuda` is imported."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (root / name).is_symlink() or (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name, follow_symlinks=False)

    def test(self, tests: Sequence[str], *options: str) -> tuple[int, str]:
        """Run tests; return pytest's exit status (-1 if they take too long) and what it wrote."""
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *options, *tests]
        # The links in .typing make a package of the folders; an editable install is looked at only after them.
        environment = {**os.environ, "PYTHONPATH": str(self.folder / ".typing")}
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, f"they ran for more than {LONGEST:.0f} s"
        return done.returncode, done.stdout + done.stderr

    def verdict(self, fault: Fault) -> str:
        """Plant a fault, run its tests, and take it out again; return an empty string if it is caught, or why not."""
        file = self.folder / fault.path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if fault.at is None and text.count(fault.old) != 1:
            return f"its text stands {text.count(fault.old)} times in {fault.path}"
        at = text.index(fault.old) if fault.at is None else fault.at
        file.write_text(text[:at] + fault.new + text[at + len(fault.old) :], encoding="utf-8")
        try:
            status, said = self.test(fault.tests, "-x", *fault.options)
        finally:
            file.write_text(text, encoding="utf-8")
        if status == 1:
            return ""
        last = said.strip().splitlines()[-1:] or ["they said nothing"]
        return "its tests pass" if status == 0 else f"its tests do not run (status {status}): {last[0]}"


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT, faults: Sequence[Fault] = FAULTS) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names of planted faults")
    parser.add_argument("--drawn", type=int, help="how many edits to draw: 8, or none beside names")
    parser.add_argument("--seed", default=os.environ.get("SKUDA_TEST_SEED", str(random.randrange(2**32))))  # noqa: S311
    given = parser.parse_args(arguments)
    chosen = [fault for fault in faults if not given.names or fault.name.startswith(tuple(given.names))]
    count = (0 if given.names else 8) if given.drawn is None else given.drawn
    edits = drawn(root, random.Random(given.seed), count)  # noqa: S311  no secret
    missed: list[Fault] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Tree(root, Path(folder))
        for some, options in ((chosen, ()), (edits, _SAMPLE)):
            tests = sorted({test for fault in some for test in fault.tests})
            status, said = tree.test(tests, *options) if tests else (0, "")
            if status != 0:
                raise SystemExit(f"{said}\ntests named for the faults fail without any fault")
        for fault in (*chosen, *edits):
            verdict = tree.verdict(fault)
            print(f"{verdict or 'caught':15} {fault.name}", flush=True)  # noqa: T201
            missed += [fault] if verdict else []
    planted = sum(fault in chosen for fault in missed)
    print(f"{len(chosen) - planted} of {len(chosen)} planted faults are caught, and")  # noqa: T201
    print(f"{len(edits) - len(missed) + planted} of {len(edits)} drawn ones (--seed {given.seed})")  # noqa: T201
    return 1 if planted else 0


if __name__ == "__main__":
    sys.exit(main())
