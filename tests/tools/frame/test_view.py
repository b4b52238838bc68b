"""A report as Markdown, whose cells stay cells."""

from __future__ import annotations

from skuda.tools.frame.view import Table, markdown, markdown_table

TABLE = Table(("name", "first number", "second number", "kernel"), [("a_b*c", "1.0", "2.0", "some.kernel")], "Numbers")


def test_a_cell_stays_one_cell():
    assert markdown_table(("a", "b"), [("x|y", "two\nlines")]) == "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n"


def test_markdown_has_every_part_and_leaves_out_what_is_empty():
    facts = {"command": "skuda bench_x", "a_name": "a *value*", "empty": ""}
    text = markdown((TABLE, "red_line", facts, Table(("a",), [])))
    assert text == (
        "### Numbers\n\n| name | first number | second number | kernel |\n| --- | --- | --- | --- |\n"
        "| a_b*c | 1.0 | 2.0 | some.kernel |\n\nred\\_line\n\n- command: `skuda bench_x`\n- a\\_name: a \\*value\\*\n"
    )


def test_a_terminal_gets_padded_tables_that_do_not_control_it():
    text = markdown((Table(("a", "b"), [("long\x1b[2J", "1")]), {"device": "an H200\x1b[2J"}), padded=True)
    assert text == ("| a        | b   |\n| ---      | --- |\n| long?[2J | 1   |\n\n- device: an H200?[2J\n")
