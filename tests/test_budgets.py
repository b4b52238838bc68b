"""Lines of Python that a part may have. A capability that raises one says so in its commit, and never that of tools."""

from __future__ import annotations

import pytest
from paths import ROOT

PARTS = {
    # Part: its folder, the folders in it that do not count, and the most lines.
    "tools": ("tools", (), 11_800),
    "dispatch without torch and engines": ("dispatch", ("torch", "serving", "vllm"), 11_020),
    "torch": ("dispatch/torch", (), 17_600),
    "serving": ("dispatch/serving", (), 640),
    "vllm": ("dispatch/vllm", (), 2_910),
    "tests": ("tests", (), 49_850),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_no_more_lines_than_it_may(part):
    folder, without, most = PARTS[part]
    paths = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py")]
    counted = [path for path in paths if path.parts[0] not in without]
    lines = sum((ROOT / folder / path).read_text(encoding="utf-8").count("\n") for path in counted)
    assert counted
    assert lines <= most, f"{part}: {lines} lines"
