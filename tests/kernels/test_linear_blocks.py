"""The NumPy linears compute in boxes: every weight is converted once for many rows, and no bit depends on the boxes."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_same_bits, draw, every_case, fresh, run, sampled

from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear import reference as product
from skuda.registry.argument import storage_shape
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
        more = {a.name: np.zeros(storage_shape(a.shape, a.elements[0]), storage_dtype(a.elements[0])) for a in scratch}
        made.append(run(case.problem, given, **more) | more)
    for name, array in made[0].items():
        assert_same_bits(made[1][name], array, name)
