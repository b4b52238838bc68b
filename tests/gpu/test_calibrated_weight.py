"""A calibrated weight has the same bits on a GPU and on a CPU."""

from __future__ import annotations

import pytest
from support import fresh

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize(("n", "k", "size"), [(96, 576, 128), (40, 300, 0), (64, 1536, 32)])
def test_a_gpu_makes_the_weight_of_a_cpu(n, k, size):
    from skuda.torch.int4 import Moments, calibrated_weight

    rng = fresh(n, k, size)
    weight, rows = (torch.from_numpy(rng.standard_normal(shape)).float() for shape in ((n, k), (2 * k, k)))
    rows = rows @ torch.from_numpy(rng.standard_normal((k, k))).float()
    here, there = (calibrated_weight(weight.to(place), Moments(rows.to(place)), size) for place in ("cpu", "cuda"))
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
