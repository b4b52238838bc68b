"""What the normalizing ops promise beyond their formula: fused and unfused agree, and a row depends on itself alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from harness.binding import launch_of
from support import assert_same_bits, dispatcher, draw, every_case, fresh, in_range, quantizes_apart, run, sampled

import skuda
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.quantize import NormQuantized
from skuda.kernels.quantize.norm import NormProblem, fold
from skuda.registry.arch import ArchSku
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Case
from skuda.registry.vocabulary import Scaling

OPS = {op.name: op for op in built_in_ops() if issubclass(op.descriptor, NormProblem)}
CASES = sampled(
    [
        pytest.param(op, case, id=name)
        for name, op, case in every_case()
        if op.name in OPS and quantizes_apart(case.problem)
    ],
    6,
    each=lambda op, case: (op.name, case.problem.scaling),
)
H200 = KNOWN_DEVICES["h200"]


def _described(op, n, d, **fields):
    known = OPS[op].descriptor.model_fields
    whole = {"eps": 1e-6, "q_min": -127, "q_max": 127, "input_element": "bf16", "output_element": "s8"} | fields
    return OPS[op].descriptor(n=n, d=d, **{name: value for name, value in whole.items() if name in known})


@pytest.mark.parametrize(("op", "case"), CASES)
def test_codes_are_those_of_the_unfused_op_on_the_normalized_rows(op, case):
    problem = case.problem.model_copy(update={"has_normalized": True})
    drawn = draw(op, Case(problem, case.values), fresh(op.name, case))
    found = run(problem, drawn.inputs)
    fields = {name: getattr(problem, name) for name in ("q_min", "q_max", "input_element", "output_element")}
    y = found["normalized_out"]
    if problem.scaling is Scaling.DYNAMIC:
        ranged = {"input": in_range(problem, y)}
        apart = run(dispatcher().describe("dynamic_range", n=problem.n, d=problem.d, **fields), ranged)
        assert_same_bits(found["scale_out"], apart["scale_out"], "scale_out")
    else:
        given = {name: drawn.inputs[name] for name in ("scale", "zero_point")}
        apart = run(dispatcher().describe("quantize_per_tensor", numel=y.size, **fields), {"input": y, **given})
    assert_same_bits(found["output"], apart["output"], "output")


@pytest.mark.parametrize("op", ["rms_norm_quantize", "silu_mul_quantize"])
def test_a_given_scale_propagates_nothing(op):
    fields = {"eps": 0.0} if op in OPS else {}
    fields |= {"q_min": -127, "q_max": 127, "input_element": "bf16", "output_element": "s8", "scaling": "static"}
    with pytest.raises(InvalidProblem, match="nonfinite must be 'ignore' unless scaling is dynamic"):
        dispatcher().describe(op, n=1, d=8, nonfinite="propagate", **fields)


def test_a_sum_has_the_documented_order():
    small, large = np.float32(1), np.float32(2**24)
    places = ((8, 4, "its half of the chunk"), (16, 8, "another lane"), (8200, 8192, "a later chunk of the lane"))
    for d, at, adds in places:
        row = np.zeros((1, d), np.float32)
        row[0, 0], row[0, at] = large, small
        assert fold(lambda columns, row=row: row[:, columns], 1, d, row.dtype)[0] == large, adds
    # Element 4 meets element 0 before element 1 and 5 meet each other: 1 is lost, 2 is not.
    row = np.float32([[2**24, 1, 0, 0, 0, 1, 0, 0]])
    assert fold(lambda columns: row[:, columns], 1, 8, row.dtype)[0] == 2**24 + 2
    row = np.float32([[2**24, 1, 0, 0, 1, 0, 0, 0]])
    assert fold(lambda columns: row[:, columns], 1, 8, row.dtype)[0] == 2**24
    # Lanes: chunk 1024 joins chunk 0, and is lost there, before lane 512 joins it.
    row = np.zeros((1, 8200), np.float32)
    row[0, [0, 4096, 8192]] = 2**24, 1, 1
    assert fold(lambda columns: row[:, columns], 1, 8200, row.dtype)[0] == 2**24
    row[0, [8192, 4104]] = 0, 1
    assert fold(lambda columns: row[:, columns], 1, 8200, row.dtype)[0] == 2**24
    row[0, [4096, 4104, 8]] = 0, 1, 1
    assert fold(lambda columns: row[:, columns], 1, 8200, row.dtype)[0] == 2**24 + 2
    # A sum of zeros is +0, whatever their signs.
    zeros = np.full((1, 24), -0.0, np.float32)
    assert not np.signbit(fold(lambda columns: zeros[:, columns], 1, 24, zeros.dtype)[0])


@pytest.mark.parametrize("op", OPS)
def test_what_a_problem_does_not_write_is_none_in_its_result(op):
    x = fresh(op).standard_normal((2, 8)).astype(np.float32)
    function = getattr(skuda.ops, op)
    result = function(input=x, eps=0.1, scale=0.1, zero_point=0, output_element="u8", dispatcher=dispatcher())
    assert isinstance(result, NormQuantized)
    assert result[1:] == (None, None, None)
    result = function(
        input=x, residual=x, eps=0.1, scale=0.1, zero_point=0, output_element="u8", dispatcher=dispatcher()
    )
    assert_same_bits(result.residual_out, x + x)
    assert (result.scale_out, result.normalized_out) == (None, None)
    room = np.empty_like(x)
    result = function(input=x, eps=0.1, normalized_out=room, output_element="s8", dispatcher=dispatcher())
    assert result.normalized_out is room
    assert (result.scale_out.shape, result.residual_out) == ((2,), None)


def test_every_entry_is_launched_and_rows_of_usual_models_are_held_in_registers():
    entries = Counter()
    for op in OPS.values():
        (sku, *_) = (sku for sku in op.skus if sku.arch is not ArchSku.CPU)
        for n, d, end in (
            (4096, 128, "lanes"),
            (1, 1024, "lanes"),
            (1, 4096, "2"),
            (64, 8192, "2"),
            (16, 16384, "4"),
            (4096, 2048, "2" if op.name.startswith("rms") else "4"),
            (4096, 4096, "2" if op.name.startswith("rms") else "4"),
            (16384, 8192, "8" if op.name.startswith("rms") else "4"),
            (16384, 16384, "8" if op.name.startswith("rms") else "4"),
            (16, 16392, "long"),
        ):
            (step,) = launch_of(sku, _described(op.name, n, d), H200).steps
            assert step.entry == f"{op.name}_{end}", (n, d)
            assert step.block[0] % 32 == 0
            entries[step.entry] += 1
    assert len(entries) == 5 + 4, "layer norm of these holds fewer octets a thread"
