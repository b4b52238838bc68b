"""Layers that several ranks share have the bits of the whole layer on one device, and those of NumPy.

Ranks are processes: of gloo with small sizes on CPUs, and of NCCL with a GPU each, if there are two; `docs/bench.md`
has the command for these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import fresh

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
PATIENCE = 300
"""Seconds; most of them go by while Inductor compiles."""
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        ("gloo", 2),
        pytest.param("gloo", 3, marks=pytest.mark.full),
        pytest.param("nccl", GPUS, marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
    ],
)
def test_layers_of_ranks_have_the_bits_of_the_whole(backend, count, tmp_path):
    seed = str(int(fresh(backend).integers(2**31)))
    threads = {} if backend == "nccl" else {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "ranks_worker.py"]
    logs = [(tmp_path / f"{rank}.log").open("w") for rank in range(count)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(count), tmp_path, seed, backend], env=os.environ | threads, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    try:
        until = time.monotonic() + PATIENCE
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            assert time.monotonic() < until, "the ranks took too long"
            time.sleep(0.05)
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    ends = {rank: (tmp_path / f"{rank}.log").read_text()[-2000:] for rank in range(count)}
    assert codes == [0] * count, ends
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    assert [one["wrong"][:5] for one in found] == [[]] * count
    assert {one["done"] for one in found} == {found[0]["done"]}
    assert found[0]["done"] >= 24 * 11
