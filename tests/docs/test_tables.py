"""Every table of figures in README and the documentation is what a command prints about the records."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from paths import ROOT

from skuda.tools.bench.record import BenchRecord
from skuda.tools.parallel.record import ParallelRecord, RowsResult
from skuda.tools.show.embed import blocks

PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
RECORDS = sorted(BenchRecord.files(ROOT / "docs" / "evidence"))
RECORD = next(iter(ParallelRecord.files(ROOT / "docs" / "evidence").values()))
FIGURE = re.compile(r"\d ?(?:us|ms|TOPS|TFLOP/s|[GT]B/s)\b|\d x (?:faster|slower)|\dx\b")
"""A time, a speed, or a ratio of two."""


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outside(text):
    """Return a page without its generated blocks."""
    for content in blocks(text).values():
        text = text.replace(content, "")
    return text


def test_every_block_is_what_its_command_prints(tables, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    assert {page.name for page in PAGES if blocks(page.read_text())} >= {"README.md", "performance.md"}
    stale = [f"{page.relative_to(ROOT)} is out of date: run `make tables`" for page, _ in tables.outdated()]
    assert not stale


def test_an_outdated_block_is_written_anew(tables, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- made by `skuda list --op fill` -->\nold\n<!-- end of it -->\n1\n")
    monkeypatch.setattr(tables, "PAGES", (page,))
    ((found, text),) = tables.outdated()
    assert found == page
    assert re.fullmatch(r"<!-- made .* -->\nfill\t[^<]*\n<!-- end of it -->\n1\n", text)
    page.write_text(text)
    assert not list(tables.outdated())


@pytest.mark.parametrize("command", ["skuda nonsense", "ls"])
def test_a_block_of_a_command_that_fails_is_an_error(tables, command):
    with pytest.raises(ValueError, match=f"cannot make a block with `{command}`"):
        tables.printed(command)


def test_a_record_of_a_wrong_result_is_shown(tables, tmp_path):
    record = RECORD.model_copy(update={"results": (RowsResult(rows=3, wrong="a bit"),)})
    record.save(tmp_path / "wrong.json")
    assert "failed for 3 rows: a bit" in tables.printed(
        f"skuda bench-parallel --show {tmp_path}/wrong.json --markdown facts"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_is_written_by_hand(page):
    assert not [line for line in outside(page.read_text(encoding="utf-8")).splitlines() if FIGURE.search(line)]


def test_a_figure_is_known_when_it_is_seen():
    for text in ("12.8 us", "| 301 ms |", "1,437 TFLOP/s", "4.1 TB/s", "2.0 x faster", "1.50x"):
        assert FIGURE.search(text), text
    for text in ("16x4096", "128 x 256", "sm_90a", "100 columns", "64 MiB"):
        assert not FIGURE.search(text), text


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_figures_of_the_performance_page_are_those_of_the_record(path):
    found = blocks((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    (text,) = (content for command, content in found.items() if path.name in command)
    record = json.loads(path.read_text())
    assert f"`{record['command']}`" in text
    assert record["date"] in text
    for case in record["cases"]:
        table = text.partition(f"### {case['op']}\n")[2].partition("\n### ")[0]
        us = case["timing"]["median"]
        cells = ("x".join(map(str, case["shape"])), case["element"], f"{us:.1f}" if us < 1000 else f"{us:.0f}")
        (row,) = (line for line in table.splitlines() if line.startswith(f"| {' | '.join(cells)} |"))
        for rival in case["rivals"]:
            if rival["ratio"] is not None:
                assert f" {rival['ratio']:.2f} |" in row
