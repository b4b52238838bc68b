"""Every generated block on a page is the output of its command."""

from __future__ import annotations

import importlib.util
import re

import pytest
from paths import ROOT

PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
FIGURE = re.compile(r"\d ?(?:us|ms|TOPS|TFLOP/s|[GT]B/s)\b|\d x (?:faster|slower)|\dx\b")
"""A time, a speed, or a ratio of two."""


SPEC = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
TABLES = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TABLES)
blocks = TABLES.blocks


@pytest.fixture
def tables():
    return TABLES


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


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "examples"], ids=lambda page: page.name)
def test_no_figure_is_written_by_hand(page):
    assert not [line for line in outside(page.read_text(encoding="utf-8")).splitlines() if FIGURE.search(line)]


def test_a_figure_is_known_when_it_is_seen():
    for text in ("12.8 us", "| 301 ms |", "1,437 TFLOP/s", "4.1 TB/s", "2.0 x faster", "1.50x"):
        assert FIGURE.search(text), text
    for text in ("16x4096", "128 x 256", "sm_90a", "100 columns", "64 MiB"):
        assert not FIGURE.search(text), text
