"""The code blocks of README and the documentation run; tests/docs/test_contributing.py runs those of CONTRIBUTING.

The Python blocks of a page run in order, in one namespace. A comment after or below a print is what it prints. The
commands of a console block run one by one in a terminal of 100 columns. The lines below a command are its output, where
``...`` stands for any text. A block that cannot run here follows a comment that says why, and is only parsed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import ROOT

from skuda.dispatch import telemetry
from skuda.tools.cli import main
from skuda.tools.commands import loaded

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n+ *\Z")
PRINTED = re.compile(r"^ *print\(.*\)(?:  |\n *)# (.*)$", re.MULTILINE)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    title: str
    text: str
    not_run: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page, text=None):
    text = page.read_text(encoding="utf-8") if text is None else text
    for found in BLOCK.finditer(text):
        marked = NOT_RUN.search(text[: found.start()])
        title = re.search(r'title="(.+?)"', found[3])
        line = text[: found.start()].count("\n") + 1
        body = textwrap.dedent(found[4])
        yield Block(page, line, found[2], title[1] if title else "", body, marked[1] if marked else "")


NEEDS = {f"docs/{name}.md": ("torch",) for name in ("format", "int16", "int4", "training", "vllm")}
NEEDS |= {f"docs/{name}.md": ("torch", "transformers") for name in ("accuracy", "attention", "exact")}
NEEDS |= {"docs/torch.md": ("torch", "transformers", "safetensors")}
"""Packages without which a page is not run."""
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


# Bundles are compiled by every compiler that is here; `tests/tools/ship` has the tests that are quick.
SLOW = re.compile(r"^(?:\$ )?skuda (?:bundle|compile) (?!--show)", re.MULTILINE)


def of_language(*languages, run):
    return [block for block in BLOCKS if block.language in languages and bool(run) != bool(block.not_run)]


def matches(expected, got):
    """Whether a text is the expected one, where ``...`` stands for any text. Trailing blanks do not count."""
    lines = "\n".join(line.rstrip() for line in got.strip().splitlines())
    return re.fullmatch(".*?".join(map(re.escape, expected.strip().split("..."))), lines, re.DOTALL) is not None


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch, tmp_path):
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "SKUDA_LOG", "SKUDA_NVTX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    monkeypatch.setattr(telemetry, "KERNELS", telemetry.Kernels())  # other tests load kernels in this process
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs_in_order_and_prints_what_it_says(page, capsys):
    for package in NEEDS.get(str(page.relative_to(ROOT)), ()):
        pytest.importorskip(package)
    # As in a program: classes that a block defines belong to a module.
    space = {"__name__": "__main__"}
    for block in (block for block in of_language("python", run=True) if block.page == page):
        # Blank lines in front, so that a traceback has the page's line.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), space)  # noqa: S102  our own text
        shown = capsys.readouterr().out
        for expected in PRINTED.findall(block.text):
            assert any(matches(expected, line) for line in shown.splitlines()), f"{block}: {expected!r} in {shown}"


COMMANDS = [
    pytest.param(block, marks=[pytest.mark.full] if SLOW.search(block.text) else [])
    for block in of_language("console", "sh", "bash", run=True)
]


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_the_commands_of_a_block_run_and_write_what_it_says(block, monkeypatch, capfd, tmp_path):
    for other in BLOCKS:
        if other.page == block.page and other.title:
            (tmp_path / other.title).write_text(other.text)
    for words, expected in commands(block):
        with monkeypatch.context() as patch:
            for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "100")):
                patch.setenv(name, value)
            while re.match(r"\w+=", words[0]):
                name, _, value = words.pop(0).partition("=")
                patch.setenv(name, value)
            status = run(words)
        shown = ANSI.sub("", "".join(capfd.readouterr()))
        assert status == 0, f"{block}: {shlex.join(words)} ends with {status}: {shown}"
        assert not expected.strip() or matches(expected, shown), f"{block}: {shlex.join(words)} writes\n{shown}"


def commands(block):
    """Return the words of each command with its output; a block of a shell has no output."""
    found = []
    for line in block.text.replace("\\\n", "").splitlines():
        if block.language != "console" or line.startswith("$ "):
            # A comment is for the reader.
            words = shlex.split(line.removeprefix("$ "), comments=True)
            found += [(words, [])] if words else []
        elif found:
            found[-1][1].append(line)
    return [(words, "\n".join(below)) for words, below in found]


def run(words):
    """Run a command line. A command that would install something or take long is only looked up."""
    match words:
        case ["skuda", *arguments]:
            return main(arguments)
        case ["python", file]:
            return subprocess.run([sys.executable, file], env=os.environ, timeout=120, check=False).returncode
        case ["make", *targets]:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return 0 if set(targets) <= set(known) else f"no target among {known}"
        case ["pip", "install", package]:
            return extras_known(package)
    return "no rule to run it: see `run` in tests/docs/test_code_blocks.py, or say why it is not run"


def extras_known(package):
    found = re.fullmatch(r"(?:\.|skuda)(?:\[([\w,]+)\])?", package)
    if found is None:
        return "not a package of ours"
    known = metadata.metadata("skuda").get_all("Provides-Extra")
    unknown = set((found[1] or known[0]).split(",")) - set(known)
    return f"no extra {unknown}" if unknown else 0


def test_the_extras_that_a_text_names_exist():
    for page in PAGES:
        for package in re.findall(r"pip install '((?:skuda|\.)\[.*?\])'", page.read_text()):
            assert extras_known(package) == 0, f"{page}: {package}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.not_run], ids=str)
def test_a_block_that_is_not_run_parses(block):
    if block.language == "python":
        compile(block.text, str(block), "exec")
        return
    for words, _ in commands(block):
        if words[0] == "skuda":
            assert loaded(words[1]).make_context(words[1], words[2:])


def test_the_commands_that_make_records_parse():
    listed = subprocess.run(["make", "-n", "gpu", "gpu-ranks"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [line.split() for line in listed.stdout.splitlines() if line.startswith("python3 -m skuda ")]
    assert len(found) == 8
    for _, _, _, command, *words in found:
        assert loaded(command).make_context(command, words)


def test_data_is_well_formed():
    for block in of_language("json", "toml", run=True):
        assert {"json": json.loads, "toml": tomllib.loads}[block.language](block.text), block


def test_the_pages_have_the_blocks_that_they_should():
    """A pattern that finds nothing would pass everything above."""
    python, console = of_language("python", run=True), of_language("console", run=True)
    assert {"README.md", "index.md", "choosing.md", "telemetry.md"} <= {block.page.name for block in python}
    entered = [(words, expected) for block in console for words, expected in commands(block)]
    assert sum(words[0] == "skuda" for words, _ in entered) >= 5
    assert sum(bool(expected) for _, expected in entered) >= 3


def test_a_page_that_is_wrong_is_found():
    page = ROOT / "page.md"
    text = (
        "<!-- not run: no card -->\n```python\nprint(1)\n```\n\n  ```console\n  $ skuda list  # all\n  a...z\n  ```\n"
    )
    python, console = blocks_of(page, text)
    assert (python.not_run, python.line, python.text) == ("no card", 2, "print(1)\n")
    assert commands(console) == [(["skuda", "list"], "a...z")]
    assert console.not_run == ""
    assert matches("a...z\nb", "a to z  \nb\n")
    assert not matches("a...z\nb", "a to y\nb")
    assert PRINTED.findall("print(1)  # 1\n  print(2)\n  # 2\nx = 3  # 3") == ["1", "2"]
    assert run(["skuda", "nonsense"]) == 2
    assert run(["make", "nonsense"]) != 0
    assert run(["rm", "-r"]) != 0
    assert extras_known("skuda[nonsense]") != 0
