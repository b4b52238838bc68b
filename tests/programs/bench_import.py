"""What importing skuda costs beyond the packages it stands on; `make bench` runs this."""

from __future__ import annotations

import subprocess
import sys

import pytest

# One model of one field: pydantic loads most of itself when the first model is defined.
BASELINE = "import numpy, ml_dtypes, pydantic\nclass Model(pydantic.BaseModel):\n    x: int"


@pytest.mark.parametrize("code", [BASELINE, "import skuda.dispatch"], ids=["numpy_and_pydantic", "skuda"])
def test_import(benchmark, code):
    command = [sys.executable, "-c", code]
    benchmark.pedantic(subprocess.run, args=(command,), kwargs={"check": True}, rounds=15, warmup_rounds=2)


def test_first_dispatcher(benchmark):
    command = [sys.executable, "-c", "from skuda.dispatch import Dispatcher; Dispatcher()"]
    benchmark.pedantic(subprocess.run, args=(command,), kwargs={"check": True}, rounds=15, warmup_rounds=2)
