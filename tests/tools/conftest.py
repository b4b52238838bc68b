"""The command line as on a terminal."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    sys.stdout.write(f"seed {seed}\n")  # shown with a failure
    return np.random.default_rng(seed)


@pytest.fixture
def terminal(monkeypatch, skuda):
    """Run the command as on a terminal of 80 columns; gives status, the text without colours, and standard error."""

    def run(*arguments, width=80):
        with monkeypatch.context() as patch:
            patch.setenv("FORCE_COLOR", "1")
            patch.setenv("COLUMNS", str(width))
            status, out, err = skuda(*arguments)
        text = ANSI.sub("", out)
        # Only a path, which is copied as a whole, may be longer.
        assert not [line for line in text.splitlines() if len(line.rstrip()) > width and "/" not in line]
        assert "…" not in text
        return status, text, ANSI.sub("", err)

    return run
