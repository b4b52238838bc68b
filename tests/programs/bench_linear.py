"""The NumPy linear against NumPy's own integer matmul, at 512x1536x384; `make bench` runs this."""

from __future__ import annotations

import numpy as np
import pytest

from skuda.dispatch import Dispatcher
from skuda.kernels.quantize import SmoothQuantLinearDescriptor

M, N, K = 512, 1536, 384


@pytest.fixture
def operands():
    rng = np.random.default_rng()
    return rng.integers(-128, 128, (M, K), np.int8), rng.integers(-128, 128, (N, K), np.int8)


def test_integer_matmul_of_numpy(benchmark, operands):
    act, weight = (codes.astype(np.int32) for codes in operands)
    benchmark(np.matmul, act, weight.T)


def test_linear_of_skuda(benchmark, operands):
    act, weight = operands
    problem = SmoothQuantLinearDescriptor(m=M, n=N, k=K, act_scale=1.0, output_element="f32")
    run = Dispatcher().select(problem).run
    result = benchmark(run, act_q=act, weight_q=weight, weight_scale=np.ones(N, np.float32))
    np.testing.assert_array_equal(result, act.astype(np.int32) @ weight.astype(np.int32).T)
