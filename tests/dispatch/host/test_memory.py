"""Peak memory beyond inputs and outputs is a few megabytes for any size."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import numpy as np
import pytest
from support import dispatcher, sampled

from skuda.kernels.catalog import built_in_ops
from skuda.kernels.dtypes import storage_dtype
from skuda.registry import OutOfMemory
from skuda.registry.descriptor import Role, storage_shape

MIB = 1 << 20
BIG = 1 << 24  # elements: 64 MiB of f32
OPS = {op.name: op for op in built_in_ops() if not op.name.endswith("_linear")}
SIZES = {
    "numel": {"numel": BIG},
    "shape": {"shape": (256, 64, 1024), "axis": 1},
    "outer_size": {"outer_size": 4096, "axis_size": 4096, "group_size": 128},
    "v": {"n": 256, "v": 65536, "t": 16},
    "n": {"n": 4096, "d": 4096, "k": 4096},
    "rotated": {"tokens": 4096, "sequences": 1, "heads": 32, "pages": 32, "most_blocks": 32, "most_positions": 4096},
    "causal": {"tokens": 1024, "sequences": 1, "heads": 32, "kv_heads": 8, "pages": 32, "most_blocks": 32},
}


def peak_of(call):
    """Return the bytes that a call held at most beyond what was there before; NumPy reports its arrays."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _arrays(problem):
    """Return arguments of a problem, outputs too; values do not matter here, so pages need not be touched."""
    arrays = {}
    for argument in problem.arguments():
        element = argument.elements[0]
        if argument.role in (Role.SCALE, Role.VALUE):
            arrays[argument.name] = 1.0
        elif argument.role is Role.ZERO_POINT:
            arrays[argument.name] = 0
        elif argument.required:
            fill = np.ones if "scale" in argument.name else np.zeros
            arrays[argument.name] = fill(storage_shape(argument.shape, element), storage_dtype(element))
    if "block_table" in arrays:  # one sequence has all rows
        arrays["block_table"][0] = np.arange(problem.most_blocks)
        arrays["starts"][1] = arrays["lengths"][0] = problem.tokens
    return arrays


def _extra(problem, arrays):
    plan = dispatcher().select(problem)
    return peak_of(lambda: plan.run(**arrays))


def _elementwise(op, **changes):
    """Return a large problem of an op, with the elements of its first case where nothing else is said."""
    names, fields = op.descriptor.model_fields, op.cases[0].problem.model_dump(exclude={"op"})
    size = next(sizes for name, sizes in SIZES.items() if name in names)
    bounds = {"q_min": -8, "q_max": 7}
    return op.descriptor(**{name: value for name, value in (fields | size | bounds | changes).items() if name in names})


def _dynamic_range(**fields):
    return _elementwise(OPS["dynamic_range"], **fields)


PROBLEMS = {
    **{name: partial(_elementwise, op) for name, op in OPS.items()},
    **{f"{name} packed": partial(_elementwise, OPS[name], **{OPS[name].descriptor.aux_field or "output_element": "s4"})
       for name in ("quantize_per_group", "dequantize_per_group", "fill")},
    **{f"{more} {code}": partial(_dynamic_range, mode="asymmetric", output_element=code, **more)
       for more in ({"scope": "tensor"}, {"scope": "channel", "axis": 1}, {"scope": "group", "group_size": 128})
       for code in ("s8", "s4")},
    **{f"short {more} {mode}": partial(_dynamic_range, mode=mode, n=BIG // 2, d=2, **more)
       for more in ({"scope": "token"}, {"scope": "channel", "axis": 0}, {"scope": "group", "group_size": 2})
       for mode in ("symmetric", "asymmetric")},
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(PROBLEMS, 12))
def test_an_elementwise_op_needs_a_few_megabytes_over_64(name):
    problem = PROBLEMS[name]()
    assert _extra(problem, _arrays(problem)) < 8 * MIB


def test_an_output_left_out_costs_the_output_alone():
    problem = _elementwise(OPS["quantize_per_tensor"])
    arrays = {name: value for name, value in _arrays(problem).items() if name != "output"}
    assert BIG <= _extra(problem, arrays) < BIG + 8 * MIB


@pytest.mark.parametrize("element", ["f64", "s8", "s4"])
@pytest.mark.parametrize("numel", [2**50, 2**63 - 1])
def test_an_output_that_fits_nowhere_is_named_with_its_bytes(numel, element):
    problem = dispatcher().describe("fill", numel=numel, output_element=element)
    size = {"f64": 8 * numel, "s8": numel, "s4": -(-numel // 2)}[element]
    for call in (dispatcher().run, dispatcher().select(problem).can_implement, dispatcher().select(problem).bind):
        given = {"value": 1} | ({"problem": problem} if call == dispatcher().run else {})
        with pytest.raises(OutOfMemory, match=f"fill: output needs {size} bytes") as caught:
            call(**given)
        assert (caught.value.argument, caught.value.size) == ("output", size)
        assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("code", ["u4", "s4", "u8"])
def test_arrays_of_the_highest_rank(code):
    shape = (1,) * 63 + (4,)
    fields, scale = {"output_element": "f32", "input_element": code}, {"scale": 0.5, "zero_point": 1}
    dtype = np.uint8
    problem = dispatcher().describe("dequantize_per_tensor", numel=4, **fields)
    x = np.array([0x21, 0x43] if code != "u8" else [1, 2, 3, 4], dtype)
    want = dispatcher().run(problem, input=x, **scale)
    deep = x.reshape(*shape[:-1], -1)
    assert deep.ndim == 64
    assert dispatcher().run(problem, input=deep, **scale).ravel().tolist() == want.tolist()
    assert dispatcher().run(problem, input=deep[0], **scale).ravel().tolist() == want.tolist()
    back = dispatcher().describe(
        "quantize_per_tensor", numel=4, q_min=0, q_max=7, input_element="f32", output_element=code
    )
    assert dispatcher().run(back, input=want.reshape(shape), **scale).ravel().tolist() == x.tolist()


LINEARS = [pytest.param(512, 1536, 384), pytest.param(64, 4096, 8192), pytest.param(16, 24, 1 << 20)]


@pytest.mark.parametrize("epilogue", sampled(["identity", "bias_gelu"]))
@pytest.mark.parametrize(("m", "n", "k"), sampled(LINEARS))
@pytest.mark.parametrize("shifted", [False, True])
def test_a_linear_needs_a_few_blocks(m, n, k, epilogue, shifted):
    fields = {"m": m, "k": k, "epilogue": epilogue, "has_weight_zero_point": shifted, "output_element": "f32"}
    describe = dispatcher().describe
    for problem in (
        describe("smoothquant_linear", n=n, act_scale=0.1, **fields),
        describe("quantized_linear", c_out=n, q_min=-127, q_max=127, activation_element="f32", **fields),
    ):
        arrays = _arrays(problem)
        dispatcher().run(problem, **arrays)  # what is built once, on first use, is not counted
        assert _extra(problem, arrays) < 24 * MIB, problem.op


def test_the_measure_sees_a_temporary():
    assert peak_of(lambda: np.ones(4 * MIB, np.float64).sum()) >= 32 * MIB
