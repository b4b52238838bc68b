"""Where the repository and the tests' own files lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
