"""A folder has no more lines of Python than its budget."""

import pytest
from paths import ROOT

BUDGETS = {"tests": 50_000}
"""Lines of all `.py` files below a folder."""


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_keeps_to_its_budget(folder):
    files = (path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    assert sum(path.read_bytes().count(b"\n") for path in files) <= BUDGETS[folder]
