"""The NumPy linears compute in boxes: every weight is converted once for many rows, and no bit depends on the boxes."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from support import assert_same_bits, dispatcher, draw, every_case, fresh, run, sampled

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear import reference as product
from skuda.kernels.linear.quantized_linear import QuantizedLinearDescriptor
from skuda.kernels.linear.scaled_linear import ScaledLinearDescriptor
from skuda.kernels.linear.smoothquant_linear import SmoothQuantLinearDescriptor
from skuda.registry.descriptor import Role

LINEAR = [pytest.param(op, case, id=name) for name, op, case in every_case() if op.name.endswith("_linear")]
CUTS = ("_MIN_ROWS", "_ROWS", "_COLUMNS", "_CODES_AT_ONCE", "_SUMS_AT_ONCE", "BLOCK")
VARIED = sampled(LINEAR, 12, each=lambda op, case: op.name)


@pytest.mark.parametrize("with_scratch", [False, True])
@pytest.mark.parametrize(("op", "case"), VARIED)
def test_the_boxes_change_no_bit(op, case, with_scratch, monkeypatch):
    rng = fresh(op.name, case)
    given = draw(op, case, rng).inputs
    scratch = [a for a in case.problem.arguments() if a.role is Role.SCRATCH and with_scratch]
    made = []
    for sizes in (None, (2, 7, 3, 29, 35, 16)):
        for name, size in zip(CUTS, sizes or (), strict=False):
            monkeypatch.setattr(product, name, size)
        more = {a.name: np.zeros(a.shape, storage_dtype(a.elements[0])) for a in scratch}
        made.append(run(case.problem, given, **more) | more)
    for name, array in made[0].items():
        assert_same_bits(made[1][name], array, name)


MANY = 2**31 - 1
EMPTY = [(MANY, 0, 0), (MANY, 0, 3), (0, MANY, 0), (0, MANY, 3), (0, 3, MANY), (3, 0, MANY), (0, 0, MANY)]


@contextmanager
def few_calls(most=2000):
    """Raise as soon as more functions are called than a loop over rows could do with."""
    count = itertools.count()

    def called(*_):
        assert next(count) < most, f"more than {most} calls"

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


def spread_over(shape, dtype):
    return np.broadcast_to(np.ones((), dtype), shape) if 0 not in shape else np.ones(shape, dtype)


@pytest.mark.parametrize("sizes", EMPTY)
@pytest.mark.parametrize("op", ["smoothquant_linear", "quantized_linear", "scaled_linear"])
def test_a_linear_without_outputs_takes_a_few_steps_whatever_the_sizes(op, sizes):
    m, n, k = sizes
    rest = {"weight_q": spread_over((n, k), np.int8), "weight_scale": spread_over((n,), np.float32)}
    if op == "smoothquant_linear":
        problem = SmoothQuantLinearDescriptor(m=m, n=n, k=k, act_scale=1.0, output_element="f32")
        rest["act_q"] = spread_over((m, k), np.int8)
    elif op == "scaled_linear":
        problem = ScaledLinearDescriptor(m=m, n=n, k=k, output_element="f32", has_act_zero_point=True)
        rest |= {"act_q": spread_over((m, k), np.int8), "act_scale": spread_over((m,), np.float32)}
        rest["act_zero_point"] = spread_over((m,), np.int32)
    else:
        problem = QuantizedLinearDescriptor(m=m, c_out=n, k=k, q_min=-1, q_max=1, activation_element="f32")
        rest["activation"] = spread_over((m, k), np.float32)
    plan = dispatcher().select(problem)
    with few_calls():
        output = plan.run(**rest)
    assert output.shape == (m, n)
