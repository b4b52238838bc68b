"""The two views of a report: Markdown whose cells stay cells, and a terminal that leaves out what does not fit."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from skuda.tools.frame.view import Table, markdown, markdown_table, show

TABLE = Table(
    ("name", "first number", "second number", "kernel"), [("a_b*c", "1.0", "2.0", "some.kernel")], "Numbers", extra=2
)


def in_terminal(parts, width):
    console = Console(file=io.StringIO(), width=width)
    show(console, parts)
    return console.file.getvalue()


def test_a_cell_stays_one_cell():
    assert markdown_table(("a", "b"), [("x|y", "two\nlines")]) == "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n"


def test_markdown_has_every_part_and_leaves_out_what_is_empty():
    facts = {"command": "skuda bench_x", "a_name": "a *value*", "empty": ""}
    text = markdown((TABLE, Text("red_line"), facts, Table(("a",), [])))
    assert text == (
        "### Numbers\n\n| name | first number | second number | kernel |\n| --- | --- | --- | --- |\n"
        "| a_b*c | 1.0 | 2.0 | some.kernel |\n\nred\\_line\n\n- command: `skuda bench_x`\n- a\\_name: a \\*value\\*\n"
    )


@pytest.mark.parametrize(("width", "left"), [(80, ""), (30, "kernel"), (20, "second number, kernel")])
def test_a_narrow_terminal_leaves_out_the_last_columns_and_names_them(width, left):
    text = in_terminal((TABLE,), width)
    assert "Numbers" in text
    assert "1.0" in text
    assert ("some.kernel" in text) is (not left)
    said = " ".join(text.split())
    assert ("also shows:" in said) is bool(left)
    assert said.endswith(f"also shows: {left}" if left else "some.kernel")
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_shows_facts_and_paragraphs():
    text = in_terminal(({"device": "an H200", "stale": ""}, "a paragraph"), 80)
    assert "device an H200" in text
    assert "stale" not in text
    assert "a paragraph" in text
