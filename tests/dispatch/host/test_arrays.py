"""Subclasses of ndarray: their values are taken, their code never runs, and masked arrays are refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import arguments_of, assert_same_bits, dispatcher, draw, fresh, guarded_outputs

import skuda
from skuda.dispatch.host.arrays import host_view
from skuda.dispatch.select.fields import Fields
from skuda.kernels.catalog import built_in_ops
from skuda.registry import Case, InvalidProblem, Role
from skuda.tools import smoothquant

OPS = built_in_ops()
EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


class Loud(np.ndarray):
    """An array all of whose hooks raise, once it is `armed`."""

    armed = False

    def _shout(self, *args, **kwargs):
        if Loud.armed:
            raise AssertionError("code of a subclass ran")
        return NotImplemented

    __array_finalize__ = __array_ufunc__ = __array_function__ = __array_wrap__ = __array__ = _shout
    __getitem__ = __setitem__ = __len__ = __iter__ = __float__ = __index__ = __bool__ = _shout
    shape = dtype = strides = flags = ctypes = property(_shout)
    astype = reshape = view = max = sum = _shout


class Metres(np.ndarray):
    """An array with a unit: arithmetic on it converts to kilometres, as a library of units may."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [np.asarray(x) / 1000 if isinstance(x, Metres) else x for x in inputs]
        into = {} if out is None else {"out": tuple(np.asarray(x) for x in out)}
        return getattr(ufunc, method)(*plain, **into, **kwargs)

    def __getitem__(self, index):
        return np.asarray(self)[index] / 1000


def _ready(op):
    """Return a problem of the op without empty arrays, inputs and new outputs."""
    case = next(c for c in op.cases if all(math.prod(a.shape) for a in c.problem.arguments()))
    drawn = draw(op, Case(case.problem), fresh(op.name))
    outputs = {name: made.array for name, made in guarded_outputs(case.problem, drawn.shapes, "contiguous").items()}
    return case.problem, drawn.inputs, outputs


def _as(kind, arrays):
    return {name: np.ndarray.view(x, kind) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}


@EACH_OP
@pytest.mark.parametrize("kind", [Loud, Metres, np.memmap, np.recarray])
def test_a_subclass_gives_the_bits_of_its_values_and_comes_back_as_it_was_given(op, kind):
    problem, inputs, outputs = _ready(op)
    want = {name: array.copy() for name, array in outputs.items()}
    dispatcher().run(problem, **inputs, **want)
    given = _as(kind, outputs)
    called = {**_as(kind, inputs), **given}
    Loud.armed = True
    try:
        result = dispatcher().run(problem, **called)
    finally:
        Loud.armed = False
    for name, array in want.items():
        assert_same_bits(outputs[name], array, name)
    names = [a.name for a in arguments_of(problem, Role.OUTPUT)]
    results = [part for part in result if part is not None] if isinstance(result, tuple) else [result]
    for name, one in zip(names, results, strict=True):
        assert one is given[name]


@EACH_OP
def test_a_subclass_as_input_gives_plain_outputs_and_the_same_problem(op):
    problem, inputs, _ = _ready(op)
    fields = Fields(op)
    more = {name: getattr(problem, name) for name in type(problem).model_fields if name != "op"}
    want, _ = fields.split(inputs | more)
    called = _as(Loud, inputs)
    Loud.armed = True
    try:
        assert fields.split(called | more)[0] == want
        result = dispatcher().run(problem, **called)
    finally:
        Loud.armed = False
    for one in result if isinstance(result, tuple) else (result,):
        assert one is None or type(one) is np.ndarray


@EACH_OP
def test_a_masked_array_is_refused_as_input_and_as_output(op):
    problem, inputs, outputs = _ready(op)
    given = inputs | outputs
    for name, array in given.items():
        if not isinstance(array, np.ndarray):
            continue
        before = outputs_of(outputs)
        for masked in (np.ma.array(array), np.ma.array(array, mask=True), np.ma.array(array, hard_mask=True)):
            with pytest.raises(InvalidProblem, match=rf"{name} must have no mask: pass x\.filled\(value\)") as caught:
                dispatcher().run(problem, **given | {name: masked})
            assert (caught.value.field, caught.value.had) == (name, "a masked array")
        assert outputs_of(outputs) == before, "a refused run has written nothing"
    for name in inputs:
        with pytest.raises(InvalidProblem, match="no mask") as caught:
            dispatcher().run(problem, **inputs | {name: np.ma.masked})
        assert caught.value.field == name


def outputs_of(outputs):
    return {name: array.tobytes() for name, array in outputs.items()}


def test_scalars_may_be_arrays_without_axes_of_any_kind():
    x = np.float32([1, 2])
    problem = dispatcher().describe("fake_quantize", numel=2, q_min=-8, q_max=7, input_element="f32")
    want = dispatcher().run(problem, input=x, scale=0.5, zero_point=1)

    class Half(np.float32):
        pass

    for scale in (np.float32(0.5), Half(0.5), np.array(0.5, "f4"), np.array([0.5], "f4").view(Metres)):
        assert_same_bits(dispatcher().run(problem, input=x, scale=scale, zero_point=np.array(1, "i4")), want)
    for wrong in (np.True_, np.array([True])[0], np.array([True]), np.array([True]).reshape(())):
        with pytest.raises(InvalidProblem, match="scale must be"):
            dispatcher().run(problem, input=x, scale=wrong, zero_point=1)
        with pytest.raises(InvalidProblem, match="zero_point must be"):
            dispatcher().run(problem, input=x, scale=0.5, zero_point=wrong)


def test_a_matrix_and_a_record_array():
    x = np.float32([[0.3, -1.2], [9, 0]])
    want = skuda.ops.quantize_per_tensor(input=x, scale=0.5, zero_point=0, output_element="s8")
    got = skuda.ops.quantize_per_tensor(input=x.view(np.matrix), scale=0.5, zero_point=0, output_element="s8")
    assert type(got) is np.ndarray
    assert_same_bits(got, want)
    records = np.zeros(4, [("x", "f4")]).view(np.recarray)
    with pytest.raises(InvalidProblem, match="input must be of one of float32"):
        skuda.ops.quantize_per_tensor(input=records, scale=0.5, zero_point=0, output_element="s8")
    column = records["x"]
    column[...] = 3
    got = skuda.ops.quantize_per_tensor(input=column, scale=0.5, zero_point=0, output_element="s8")
    assert got.tolist() == [6] * 4


def test_a_memory_map_is_read_and_written_where_it_lies(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(8,))
    x[...] = np.arange(8)
    y = np.memmap(tmp_path / "y", np.int8, "w+", shape=(8,))
    assert skuda.ops.quantize_per_tensor(input=x, scale=1.0, zero_point=0, output=y) is y
    y.flush()
    assert np.fromfile(tmp_path / "y", np.int8).tolist() == list(range(8))


def test_a_view_shares_memory_and_needs_no_copy():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert host_view("op", "x", base) is base
    given = base.T[::-1].view(Metres)
    seen = host_view("op", "x", given)
    assert type(seen) is np.ndarray
    assert np.shares_memory(seen, base)
    assert (seen.shape, seen.strides) == ((4, 3), base.T[::-1].strides)


# --- smoothquant -----------------------------------------------------------------------------------------------------

WEIGHT, MAXIMA = np.float32([[1, -2, 3], [0.5, 4, -1]]), np.float32([1, 50, 2])


def _layer(weight=WEIGHT, maxima=MAXIMA, bias=None, alpha=0.5):
    return smoothquant.SmoothQuantLayer.quantize(dispatcher(), maxima, weight, bias, alpha=alpha)


def test_smoothquant_takes_the_values_of_a_subclass():
    bias = np.float32([1, -1])
    want = _layer(bias=bias)
    got = _layer(*(array.view(Metres) for array in (WEIGHT, MAXIMA, bias)))
    x = np.float32([[1, 20, 0.5]])
    for name, array in want.tensors().items():
        assert type(got.tensors()[name]) is np.ndarray
        assert_same_bits(got.tensors()[name], array, name)
    assert got.act_scale == want.act_scale
    assert_same_bits(got.run(dispatcher(), x.view(Metres)), want.run(dispatcher(), x))
    ranges = smoothquant.ActivationRanges()
    ranges.observe("layer", x.view(Metres))
    assert ranges.channel_max("layer").tolist() == [1, 20, 0.5]


@pytest.mark.parametrize("wrong", [None, 3, ["layer"], b"layer"])
def test_a_layer_has_a_name(wrong):
    ranges = smoothquant.ActivationRanges()
    for call in (lambda: ranges.observe(wrong, WEIGHT), lambda: ranges.channel_max(wrong)):
        with pytest.raises(InvalidProblem) as caught:
            call()
        assert caught.value.field == "layer"
