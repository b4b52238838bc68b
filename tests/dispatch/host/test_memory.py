"""Peak memory beyond inputs and outputs: a few megabytes, whatever the size."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from support import arguments_of, dispatcher, sampled

from skuda.kernels.catalog import built_in_ops
from skuda.kernels.dtypes import storage_dtype
from skuda.registry import OutOfMemory
from skuda.registry.descriptor import Role, storage_shape

MIB = 1 << 20
BIG = 1 << 24  # elements: 64 MiB of f32
ELEMENTWISE = [op for op in built_in_ops() if not op.name.endswith("_linear")]
SIZES = {
    "numel": {"numel": BIG},
    "shape": {"shape": (256, 64, 1024), "axis": 1},
    "outer_size": {"outer_size": 4096, "axis_size": 4096, "group_size": 128},
    "n": {"n": 4096, "d": 4096},
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


@pytest.mark.parametrize("op", sampled(ELEMENTWISE, 8), ids=lambda op: op.name)
def test_an_elementwise_op_needs_a_few_megabytes_over_64(op):
    problem = _elementwise(op)
    assert _extra(problem, _arrays(problem)) < 8 * MIB


@pytest.mark.parametrize("scope", sampled(["tensor", "channel", "group"]))
@pytest.mark.parametrize("code", ["s8", "s4"])
def test_a_dynamic_range_needs_a_few_megabytes_in_every_scope(scope, code):
    op = next(op for op in ELEMENTWISE if op.name == "dynamic_range")
    more = {"channel": {"axis": 1}, "group": {"group_size": 128}}.get(scope, {})
    problem = _elementwise(op, scope=scope, mode="asymmetric", output_element=code, **more)
    assert _extra(problem, _arrays(problem)) < 8 * MIB


@pytest.mark.parametrize("mode", ["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    "segments",
    sampled([{"scope": "token"}, {"scope": "channel", "axis": 0}, {"scope": "group", "group_size": 2}]),
    ids=lambda segments: segments["scope"],
)
def test_a_dynamic_range_of_many_short_segments_needs_a_few_megabytes(segments, mode):
    op = next(op for op in ELEMENTWISE if op.name == "dynamic_range")
    problem = _elementwise(op, mode=mode, **segments, n=BIG // 2, d=2)
    assert _extra(problem, _arrays(problem)) < 8 * MIB


@pytest.mark.parametrize("name", ["quantize_per_group", "dequantize_per_group", "fill"])
def test_packed_codes_need_a_few_megabytes(name):
    op = next(op for op in ELEMENTWISE if op.name == name)
    field = op.descriptor.aux_field or "output_element"
    problem = _elementwise(op, **{field: "s4"})
    assert _extra(problem, _arrays(problem)) < 8 * MIB


def test_strided_and_mixed_inputs_need_no_more():
    op = next(op for op in ELEMENTWISE if op.name == "fake_quantize_per_token")
    problem = _elementwise(op, input_element="f16")
    arrays = _arrays(problem)
    for name in ("input", "output"):
        arrays[name] = np.zeros(arrays[name].shape[::-1], np.float16).T
    assert _extra(problem, arrays) < 8 * MIB


def test_an_output_left_out_costs_the_output_alone():
    op = next(op for op in ELEMENTWISE if op.name == "quantize_per_tensor")
    problem = _elementwise(op)
    arrays = {name: value for name, value in _arrays(problem).items() if name != "output"}
    assert BIG <= _extra(problem, arrays) < BIG + 8 * MIB


@pytest.mark.parametrize("element", ["f64", "f32", "s8", "s4"])
@pytest.mark.parametrize("numel", [2**50, 2**62, 2**63 - 1])
def test_an_output_that_fits_nowhere_is_named_with_its_bytes(numel, element):
    problem = dispatcher().describe("fill", numel=numel, output_element=element)
    size = {"f64": 8 * numel, "f32": 4 * numel, "s8": numel, "s4": -(-numel // 2)}[element]
    for call in (dispatcher().run, dispatcher().select(problem).can_implement, dispatcher().select(problem).bind):
        given = {"value": 1} | ({"problem": problem} if call == dispatcher().run else {})
        with pytest.raises(OutOfMemory, match=f"fill: output needs {size} bytes") as caught:
            call(**given)
        assert (caught.value.argument, caught.value.size) == ("output", size)
        assert isinstance(caught.value, MemoryError)


def test_an_input_need_not_be_there_for_its_output_to_be_too_large():
    rows, columns = 2**30, 2**30
    x = np.broadcast_to(np.float32(1), (rows, columns))
    fields = {"n": rows, "d": columns, "q_min": -7, "q_max": 7, "input_element": "f32", "output_element": "s4"}
    with pytest.raises(OutOfMemory, match=f"dynamic_range: output needs {2**59} bytes"):
        dispatcher().run(dispatcher().describe("dynamic_range", **fields), input=x)


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
    assert all(arguments_of(op.cases[0].problem, Role.OUTPUT) for op in ELEMENTWISE)
