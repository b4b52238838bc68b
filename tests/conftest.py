"""What tests share: a toy op whose kernels can be declared for any card, and a fresh seed that failures show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy import toy_op

from skuda.registry import Registry


@pytest.fixture
def toy_registry():
    return Registry([toy_op()], origin="toy")
