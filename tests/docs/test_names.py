"""Every module, function, file and link on a page exists."""

from __future__ import annotations

import importlib.util
import re

import pytest
from paths import ROOT

PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
FOLDERS = "registry|kernels|dispatch|tests|tools|docs|.ci|.typing"
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`(skuda(?:\.\w+)+(?::[\w.]+)?)`|^::: (skuda[\w.]+)$", re.MULTILINE)
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ATTRIBUTES = ("skuda.op", "skuda.sku.id", "skuda.sku.choice", "skuda.selection.duration", "skuda.selection.measured")
NO_MODULES = dict.fromkeys(ATTRIBUTES, "an attribute of a selection")
NO_MODULES |= {"skuda.backends": "the entry-point group", "skuda.compile": "a logger"}
RECIPES = {"kernels/elementwise/negate.py", "kernels/elementwise/negate.cu"}
"""What the reader of CONTRIBUTING writes."""


def prose(page):
    """Return a page without its code blocks, which tests/docs/test_code_blocks.py runs."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def resolve(name):
    """Return what a dotted name stands for; everything behind a colon is an attribute."""
    module, _, attributes = name.partition(":")
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for attribute in (*parts[end:], *filter(None, attributes.split("."))):
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def names(text):
    return {first or second for first, second in NAME.findall(text)} - set(NO_MODULES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_and_path_on_a_page_exists(page):
    text = prose(page)
    for name in names(text):
        if name.startswith("skuda.torch") and importlib.util.find_spec("torch") is None:
            continue  # the tests with torch run this file too
        resolve(name)
    absent = [path for path in set(PATH.findall(text)) - RECIPES if not (ROOT / path).exists()]
    # What docs/generate.py makes is not there yet; MkDocs checks the links between pages.
    absent += [link for link in LINK.findall(text) if page.parent == ROOT and not (ROOT / link).exists()]
    assert not absent


def test_the_road_of_one_call_names_a_function_for_each_step():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    road = text.partition("## The road of one call\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\| [^|]+ \| `(skuda\.[\w.]+:[\w.]+)` \| [^|]+ \|$", road, re.MULTILINE)
    assert len(steps) == road.count("\n| ") - 2 >= 10
    assert all(callable(resolve(step)) for step in steps)


def test_the_map_names_every_folder_of_code():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w/-]+)/` \|", text, re.MULTILINE))
    packages = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/__init__.py")}
    code = {path for path in packages if path.split("/")[0] in {"registry", "kernels", "dispatch", "tools"}}
    assert code - named <= {"tools/bench/cutlass"}
    assert all((ROOT / path).is_dir() for path in named)


def test_a_name_that_is_gone_is_found():
    text = "`skuda.dispatch.gone` `skuda.dispatch.plan:Plan.gone` `tools/gone.py`\n::: skuda.gone\n"
    assert PATH.findall(text) == ["tools/gone.py"]
    assert len(names(text)) == 3
    for name in names(text):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve(name)
    assert resolve("skuda.dispatch.plan:Plan.run").__name__ == "run"
