"""Amax and amax quantize: together they are dynamic range, of whole rows and of rows in parts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support import assert_same_bits, draw, fresh, run

from skuda.kernels import blocks
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.quantize import AmaxDescriptor, AmaxQuantizeDescriptor, DynamicRangeQuantizeDescriptor
from skuda.registry import Case
from skuda.registry.elements import FLOATS, WHOLE_CODES

PAIRS = list(product(FLOATS, WHOLE_CODES))
SIZES = ((1, 1), (5, 0), (7, 33), (3, 300))


@pytest.mark.parametrize("values", ["normal", "special", "infinite", "zero", "ties"])
@pytest.mark.parametrize(("data", "code"), PAIRS)
def test_the_maxima_of_parts_give_the_codes_of_dynamic_range(data, code, values):
    rng = fresh(data, code, values)
    op = built_in_registry().ops["dynamic_range"]
    low, high = code.integer_range
    for n, d in SIZES:
        bounds = {"q_min": int(rng.integers(low, 2)), "q_max": int(rng.integers(1, high, endpoint=True))}
        shared = {"n": n, "input_element": data}
        whole = DynamicRangeQuantizeDescriptor(d=d, output_element=code, **bounds, **shared)
        x = draw(op, Case(whole, values), rng).inputs["input"]
        want = run(whole, {"input": x})
        parts = np.split(x, np.sort(rng.integers(0, d + 1, 3)), axis=1)
        peaks = [run(AmaxDescriptor(d=part.shape[1], **shared), {"input": part})["output"] for part in parts]
        amax = np.max(peaks, axis=0)
        problems = [AmaxQuantizeDescriptor(d=part.shape[1], output_element=code, **bounds, **shared) for part in parts]
        got = [run(problem, {"input": part, "amax": amax}) for problem, part in zip(problems, parts, strict=True)]
        planes = zip(*(blocks.planes(each["output"], code) for each in got), strict=True)
        assert_same_bits(np.concatenate([each for plane in planes for each in plane], axis=1), want["output"], "codes")
        for each in got:
            assert_same_bits(each["scale_out"], want["scale_out"], "scales")
