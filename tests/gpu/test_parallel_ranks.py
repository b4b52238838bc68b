"""Layers that several ranks share have the bits of the whole layer on one device, and those of NumPy.

Ranks are processes: of gloo with small sizes on CPUs, and of NCCL with a GPU each, if there are two; `docs/bench.md`
has the command for these.
"""

from __future__ import annotations

import pytest
from processes import ran_on_ranks, returned
from support import fresh

torch = pytest.importorskip("torch")

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
    seed = int(fresh(backend).integers(2**31))
    # Most of the seconds go by while Inductor compiles.
    ranks = ran_on_ranks("ranks_worker", {"every": (seed,)}, count, tmp_path, backend=backend)
    found = returned(ranks["every"])
    assert [wrong[:5] for _, wrong in found] == [[]] * count
    assert len({done for done, _ in found}) == 1
    assert found[0][0] >= 24 * 11
