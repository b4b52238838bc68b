"""After an interrupted import of a module of skuda.torch, the same import works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = "skuda.functional,skuda.kernels.attention,skuda.kernels.linear,skuda.kernels.quantize"
TRANSFORMERS = (
    "skuda.torch,transformers.conversion_mapping,transformers.modeling_utils,transformers.quantizers.auto,"
    "transformers.masking_utils"
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="every interrupt has a fork")
@pytest.mark.parametrize(
    ("module", "count", "packages", "parts"),
    [
        ("skuda.torch", 2, KERNELS, ["/dispatch/torch/"]),
        ("skuda.torch", 4, KERNELS, ["/torch/library.py", "/torch/_library/", "/registering.py", "/interrupts.py"]),
        ("skuda.torch.hf.transformers", 2, TRANSFORMERS, ["/dispatch/torch/", "/quantizers/auto.py"]),
        ("skuda.torch.hf.peft", 2, "skuda.torch,peft", ["/dispatch/torch/"]),
    ],
    ids=["skuda.torch", "torch.library", "transformers", "peft"],
)
def test_an_interrupted_import_is_made_again(module, count, packages, parts):
    pytest.importorskip(packages.rpartition(",")[2].partition(".")[0])
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "helpers"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "import_interrupter.py", module, str(count), packages, *parts]
    subprocess.run(command, env=environment, check=True, timeout=600)
