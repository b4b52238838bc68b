"""Lines of Python that a part may have. A capability that raises one says so in its commit."""

import pytest
from paths import ROOT

BUDGETS = {"dispatch without torch and vllm": 11_600}
PARTS = {"dispatch without torch and vllm": ("dispatch", ("torch", "vllm"))}
"""The folder of each part, and the folders in it that do not count."""


@pytest.mark.parametrize("part", BUDGETS)
def test_a_part_has_no_more_lines_than_it_may(part):
    folder, without = PARTS[part]
    paths = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")]
    counted = [path for path in paths if path.parts[0] not in without]
    lines = sum((ROOT / folder / path).read_text(encoding="utf-8").count("\n") for path in counted)
    assert counted
    assert lines <= BUDGETS[part], f"{part}: {lines} lines"
