"""A strategy is one module, its sources and one line: the toy of docs/card.md, in a copy of the tree."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from copied_tree import copied_tree, in_tree
from harness import emulator
from paths import HELPERS, ROOT

PAGE = (ROOT / "docs" / "card.md").read_text(encoding="utf-8").replace("\\\n", "")
(TESTS,) = re.findall(r"^\$ pytest (.+) -k backwards$", PAGE, re.MULTILINE)
FULL = pytest.mark.full
OPS = ("scaled", pytest.param("quantized", marks=FULL), pytest.param("smoothquant", marks=FULL))
PROBLEMS = [{"op": "scaled_linear", "m": m, "n": 4096, "k": 512, "output_element": "bf16"} for m in (1, 60, 65)]
CANDIDATES = """
from skuda.dispatch import Dispatcher
from skuda.registry.device import KNOWN_DEVICES
from skuda.tools.bench.tune import Tuner

d = Dispatcher(tuning="")
tuner = Tuner(d, KNOWN_DEVICES["a100"], None, seed=0, backend="cuda_core")
for offer in tuner._offers(d.describe("scaled_linear", m=4, n=64, k=256, output_element="bf16")):
    print(offer.sku.variant, offer.choice, sep=": ")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the tree with the toy in it: its files, and the line of the page."""
    tree = copied_tree(tmp_path_factory.mktemp("toy") / "tree")
    linear = tree / "kernels" / "linear"
    for path in (HELPERS / "toy_strategy").iterdir():
        shutil.copy(path, linear)
    (lines,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    first, _ = lines.split("\n", 1)
    before = (linear / "strategies.py").read_text(encoding="utf-8")
    assert before.count(f"{first}\n") == 1
    (linear / "strategies.py").write_text(before.replace(f"{first}\n", lines), encoding="utf-8")
    return tree


def shown(command, tree):
    status, text = in_tree(command, tree)
    assert status == 0, f"{command}\n{text}"
    return text


def test_the_commands_of_the_page_show_it(tree):
    show, explain = re.findall(r"^\$ (skuda (?:show|explain) .+)$", PAGE, re.MULTILINE)
    assert "scaled_linear.f32-s8.rcr-bias.sm_80.cuda_core.backwards\n" in shown(show, tree)
    text = shown(explain, tree)
    assert "chosen\n  quantization.scaled_linear.bf16-s8.rcr-identity.sm_80.pycuda.backwards" in text
    assert re.search(r"configuration 64 results backwards: .* us predicted; others: .* us for 256 results", text)


def test_a_lock_has_the_fastest_tile_and_the_next_strategy_where_its_constraints_end(tree):
    (tree / "problems.json").write_text(json.dumps(PROBLEMS))
    text = shown("skuda lock --descriptors problems.json --device a100 --output -", tree)
    answers = [re.search(rf'"m": {p["m"]}, .*"kernel": "sm_80.pycuda.(\w+)", .*"us": ([\d.]+)', text) for p in PROBLEMS]
    assert [found[1] for found in answers] == ["backwards", "backwards", "mma"]
    assert [float(found[2]) for found in answers[:2]] == [3.83, 19.3]  # of 64 results, and of 256


def test_tuning_times_it(tree):
    (tree / "candidates.py").write_text(CANDIDATES)
    first, second, *others = shown("python candidates.py", tree).splitlines()
    assert (first, second) == ("backwards: 64 results backwards", "backwards: 256 results backwards")
    assert {line.partition(":")[0] for line in others} == {"mma", "plain"}


@pytest.mark.long
@pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
@pytest.mark.parametrize("op", OPS)
def test_its_kernels_have_the_bits_of_the_reference_and_compile(op, tree):
    chosen = f"-k 'backwards and (equals_the_reference and {op}_linear or not equals_the_reference)' -m 'not full'"
    text = shown(f"pytest -q -p no:cacheprovider {TESTS} {chosen}", tree)
    # Of weights with 8 bits, and with 4, which are unpacked in front; the comments on top of four sources; and NVRTC.
    assert int(re.search(r"(\d+) passed", text)[1]) >= 6, text
