"""Lines of Python below a folder: what is added has to replace something."""

from __future__ import annotations

import pytest
from paths import ROOT

LINES = {"tools": 13_200}


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_has_no_more_lines_than_its_budget(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert 0 < lines <= LINES[folder]
