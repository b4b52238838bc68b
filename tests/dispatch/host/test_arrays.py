"""Subclasses of ndarray: skuda uses their values, never runs their code, and refuses masked arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import arguments_of, assert_same_bits, dispatcher, draw, fresh, guarded_outputs, parts_of

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
def test_a_subclass_gives_the_bits_of_its_values_and_returns(op, kind):
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
    for name, one in zip(names, parts_of(result), strict=True):
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
    for one in parts_of(result):
        assert type(one) is np.ndarray


@EACH_OP
def test_a_masked_array_is_refused_as_input_and_as_output(op):
    problem, inputs, outputs = _ready(op)
    given = inputs | outputs
    for name, array in given.items():
        if not isinstance(array, np.ndarray):
            continue
        before = [output.tobytes() for output in outputs.values()]
        for masked in (np.ma.array(array), np.ma.array(array, mask=True), np.ma.array(array, hard_mask=True)):
            with pytest.raises(InvalidProblem, match=rf"{name} must have no mask: pass x\.filled\(value\)") as caught:
                dispatcher().run(problem, **given | {name: masked})
            assert (caught.value.field, caught.value.had) == (name, "a masked array")
        assert [output.tobytes() for output in outputs.values()] == before, "a refused run has written nothing"
    for name in inputs:
        with pytest.raises(InvalidProblem, match="no mask") as caught:
            dispatcher().run(problem, **inputs | {name: np.ma.masked})
        assert caught.value.field == name


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


def test_smoothquant_takes_the_values_of_a_subclass():
    weight, maxima, bias = np.float32([[1, -2, 3], [0.5, 4, -1]]), np.float32([1, 50, 2]), np.float32([1, -1])
    want, got = (
        smoothquant.SmoothQuantLayer.quantize(
            dispatcher(), maxima.view(kind), weight.view(kind), bias.view(kind), alpha=0.5
        )
        for kind in (np.ndarray, Metres)
    )
    x = np.float32([[1, 20, 0.5]])
    for name, array in want.tensors().items():
        assert type(got.tensors()[name]) is np.ndarray
        assert_same_bits(got.tensors()[name], array, name)
    assert got.act_scale == want.act_scale
    assert_same_bits(got.run(dispatcher(), x.view(Metres)), want.run(dispatcher(), x))
    ranges = smoothquant.ActivationRanges()
    ranges.observe("layer", x.view(Metres))
    assert ranges.channel_max("layer").tolist() == [1, 20, 0.5]
