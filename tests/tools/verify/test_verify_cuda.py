"""`skuda verify` on a stub driver, by the real cuda_core backend: what only CUDA reaches. Nothing is computed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from paths import HELPERS
from stub_driver.build import build

from skuda.dispatch.compile.compilers import find_nvrtc
from skuda.tools.verify.evidence import EvidenceFile

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build the stub driver with"),
    pytest.mark.skipif(importlib.util.find_spec("cuda") is None or find_nvrtc() is None, reason="no NVRTC"),
]

SCRIPT = f"""
import sys
sys.path.insert(0, {str(HELPERS)!r})
import numpy as np
from fakes import FakeArray
from toykernels.scaled import ops
from skuda.dispatch import Dispatcher
from skuda.dispatch.cuda.driver import driver
from skuda.registry import Registry
from skuda.tools.verify.placement import HostPlacement
from skuda.tools.verify import large
from skuda.tools.verify.verification import verify


class Stub(HostPlacement):
    "Bytes on the host, each buffer with an address on the stub's first device."

    def __init__(self):
        self.addresses = {{}}
        self.kept = []

    def upload(self, content):
        return self.placed(super().upload(content))

    def full(self, size, byte):
        return self.placed(super().full(size, byte))

    def placed(self, buffer):
        self.kept.append(buffer)
        self.addresses[id(buffer)] = 0x1000000000000000 + (len(self.kept) << 32)
        return buffer

    def view(self, buffer, geometry):
        strides = tuple(step // geometry.dtype.itemsize for step in geometry.strides)
        return FakeArray(geometry.shape, geometry.dtype, self.addresses[id(buffer)] + geometry.start, strides)

    def download(self, buffer):
        driver().synchronize(0)
        return super().download(buffer)


d = Dispatcher(Registry(ops(), origin="toy"))
device = next(device for device in d.devices if device.processor == "cuda")
large.TOTAL, large.PIECE, large.MEMORY = 1 << 13, 1 << 10, 1
found = verify(d, device, backends=["cuda_core"], seed=1, placement=Stub())
print(found.text())
"""


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """Return a function that verifies the toy ops in a process over the stub."""
    folder = tmp_path_factory.mktemp("stub")
    stub = build(folder).parent

    def start(**environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SKUDA_", "CUDA_"))}
        fixed = {"LD_LIBRARY_PATH": str(stub), "SKUDA_CACHE_DIR": str(folder / "cubins"), "SKUDA_PLUGINS": "0"}
        log = folder / "log"
        log.unlink(missing_ok=True)
        fixed["SKUDA_STUB_LOG"] = str(log)
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(
            command, env=clean | fixed | environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        record = folder / "record.json"
        record.write_text(done.stdout)
        return EvidenceFile.load(record), log.read_text()

    return start


def test_kernels_are_compiled_launched_and_compared(verified):
    found, log = verified()
    assert found.device.processor == "cuda"
    assert found.driver
    assert found.versions["nvrtc"]
    assert found.skus
    for sku in found.skus:
        assert sku.failures[0].check == "meaning", "nothing is computed, so nothing is right"
        assert sku.failures[0].got
        assert sku.cases >= 2
    assert log.count("cuLaunchKernel") > len(found.skus)


def test_a_device_that_a_kernel_kills_is_lost_to_the_rest(verified):
    illegal_access = 700
    found, _ = verified(SKUDA_STUB_FAIL=f"cuLaunchKernel:{illegal_access},cuStreamSynchronize:{illegal_access}")
    (lethal,) = found.failed
    behind = [sku for sku in found.skus if sku is not lethal]
    assert "700" in lethal.failures[0].message or "ILLEGAL" in lethal.failures[0].message.upper()
    assert {sku.verdict for sku in behind} == {"skipped"}
    assert {sku.note for sku in behind} == {f"the device was lost to {lethal.sku}"}
