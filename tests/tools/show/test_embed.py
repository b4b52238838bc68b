"""Generated blocks of Markdown files."""

from __future__ import annotations

import pytest

from skuda.registry import InvalidProblem
from skuda.tools.show.embed import blocks, embedded, write_into

PAGE = """before
<!-- made by `skuda one` -->
1
1
<!-- end of one -->
between
<!-- two: made by `skuda two --x` -->
<!-- end of two -->
behind
"""


def test_a_block_is_replaced_and_the_rest_stays():
    assert blocks(PAGE) == {"skuda one": "1\n1\n", "skuda two --x": ""}
    fresh = embedded(PAGE, "skuda two --x", "\\1 new\n")
    assert blocks(fresh) == {"skuda one": "1\n1\n", "skuda two --x": "\\1 new\n"}
    assert fresh.replace("\\1 new\n", "") == PAGE
    assert embedded(PAGE, "skuda two", "x\n") is None


def test_a_file_is_written_where_that_changes_it(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert write_into(path, "skuda one", "2\n")
    assert blocks(path.read_text())["skuda one"] == "2\n"
    before = path.stat()
    assert not write_into(path, "skuda one", "2\n")
    assert path.stat().st_ino == before.st_ino
    assert [file.name for file in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize("text", ["", "<!-- made by `a` -->\n", "<!-- end of a -->\n<!-- made by `a` -->\n"])
def test_a_file_without_the_block_is_refused(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(InvalidProblem, match="one behind the other"):
        write_into(path, "a", "1\n")
    assert path.read_text() == text
