"""What importing skuda costs beyond the packages it stands on; `make bench` runs this."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    ["import numpy, ml_dtypes, pydantic; from pydantic import BaseModel", "import numpy, ml_dtypes, skuda.dispatch"],
)
def test_import(benchmark, code):
    command = [sys.executable, "-c", code]
    benchmark.pedantic(subprocess.run, args=(command,), kwargs={"check": True}, rounds=15, warmup_rounds=2)


def test_first_dispatcher(benchmark):
    command = [sys.executable, "-c", "from skuda.dispatch import Dispatcher; Dispatcher()"]
    benchmark.pedantic(subprocess.run, args=(command,), kwargs={"check": True}, rounds=15, warmup_rounds=2)
