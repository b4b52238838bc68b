"""Files are replaced when they are complete, and only then."""

from __future__ import annotations

import pytest

from skuda.tools.files import replacing, write_whole


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "old ü")

    def fails():
        with replacing(path) as fresh:
            fresh.write_text("half")
            assert path.read_text(encoding="utf-8") == "old ü"
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert path.read_text(encoding="utf-8") == "old ü"
    write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_an_error_and_stays_away(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "file", "")
    assert list(tmp_path.iterdir()) == []
