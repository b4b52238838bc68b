"""The folders of the repository and of the tests, and which tests use torch."""

import re
from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
# A test file without one of these would fail where torch or PyCUDA is not installed.
_ASKS = re.compile(r"importorskip|find_spec\(.(?:torch|pycuda|triton)|^from wrong import", re.MULTILINE)


def uses_torch(path: Path) -> bool:
    """Whether a test file or a folder has tests that use torch or PyCUDA where they are installed."""
    files = [path] if path.is_file() else path.rglob("test_*.py")
    return any("pytorch" in file.parts or _ASKS.search(file.read_text(encoding="utf-8")) for file in files)
