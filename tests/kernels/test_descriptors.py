"""Every bad field of every descriptor, and every bad argument of `run`, gets its documented error."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

import ml_dtypes
import numpy as np
import pytest
from oracle import DEFINITIONS
from support import arguments_of, dispatcher, draw, every_case, fresh, guarded_outputs, run

from skuda.kernels.catalog import built_in_ops
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.quantize import SmoothQuantLinearDescriptor
from skuda.registry.descriptor import Role
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, Unsupported
from skuda.registry.op import Case
from skuda.registry.vocabulary import (
    DynamicRangeMode,
    DynamicRangeScope,
    EpilogueKind,
    GeluForm,
    Nonfinite,
    RotaryLayout,
    Scaling,
)

OPS = built_in_ops()
EACH_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
SIZES_OF_CACHES = ("tokens", "heads", "kv_heads", "sequences", "pages", "most_blocks")
COUNTS = ("numel", "n", "d", "m", "k", "c_out", "outer_size", "axis_size", *SIZES_OF_CACHES)


def _fields(op):
    """Fields of a good problem of the op, none empty."""
    problem = next(c.problem for c in op.cases if all(math.prod(a.shape) for a in c.problem.arguments()))
    return {name: value for name, value in problem.model_dump().items() if name != "op" and value is not None}


def _bad_fields(op):
    """Yield (what is wrong, changes, the field that the error names)."""
    good, names = _fields(op), op.descriptor.model_fields
    yield from _bad_sizes(good, names)
    if "q_min" in names:
        yield "q_max < q_min", {"q_min": 3, "q_max": 2}, "q_max"
        for value in (2**31, -(2**31) - 1, 1.0, "1"):
            yield f"q_max={value!r}", {"q_max": value}, "q_max"
            yield f"q_min={value!r}", {"q_min": value}, "q_min"
        yield from _bad_bounds(op, names)
    if op.name == "dynamic_range":
        yield from _bad_dynamic_ranges()
    if "epilogue" in names:
        yield from _bad_linears(op)
    if "scaling" in names and "eps" in names:
        yield from _bad_norms()
    for name in names:
        if name.endswith("_element"):
            for value in ("f23", "float32", 32):
                yield f"{name}={value!r}", {name: value}, name
    yield "unknown field", {"colour": "red"}, "colour"
    yield "another op's name", {"op": "no_such_op"}, "op"


def _bad_sizes(good, names):
    for name in COUNTS:
        if name in names:
            beyond = 2**63 if name == "numel" else 2**31
            for value in (-1, beyond, 4.0, "4", True, None):
                yield f"{name}={value!r}", {name: value}, name
    if "shape" in names:
        for value in ((), (2, -1), (2, 2**31), (2, 1.5), (2, True), 3, "23"):
            yield f"shape={value!r}", {"shape": value, "axis": 0}, "shape"
        yield "2^63 elements", {"shape": (2**30, 2**30, 2**3), "axis": 0}, "shape"
        rank = len(good["shape"])
        for value in (rank, -rank - 1, 0.0, None):
            yield f"axis={value!r}", {"axis": value}, "axis"
    if "group_size" in names and "outer_size" in names:
        for value in (0, -4, 2.0, 2**31):
            yield f"group_size={value!r}", {"group_size": value}, "group_size"
        yield "groups that do not divide", {"axis_size": 10, "group_size": 4}, "axis_size"


def _bad_linears(op):
    if op.name == "quantized_linear":
        yield "q_max = 0", {"q_min": -127, "q_max": 0}, "q_max"
        yield "bounds of no element of codes", {"q_min": -1, "q_max": 32_640}, "q_min, q_max"
    elif op.name in ("scaled_linear", "rescale"):
        yield from _bad_sums() if op.name == "scaled_linear" else ()
        for scope in ("channel", "group", "row", None):
            yield f"act_scale_scope={scope!r}", {"act_scale_scope": scope}, "act_scale_scope"
        yield "act_scale is an array", {"act_scale": 0.5}, "act_scale"
    else:
        for value in (math.inf, -math.inf, math.nan, 1e39, "one", None):
            yield f"act_scale={value!r}", {"act_scale": value, "output_element": "f32"}, "act_scale"
        for value in (-129, 128, 0.0):
            yield f"act_zero_point={value!r}", {"activation_element": "s8", "act_zero_point": value}, "act_zero_point"
        yield "act_zero_point of u8", {"activation_element": "u8", "act_zero_point": -1}, "act_zero_point"
    yield "misspelt epilogue", {"epilogue": "bias_gleu"}, "epilogue"
    yield "flag that is no boolean", {"has_weight_zero_point": "maybe"}, "has_weight_zero_point"


def _bad_sums():
    sums = {"output_element": "s32", "epilogue": "identity", "act_scale_scope": "token"}
    sums |= {"has_act_zero_point": False, "has_weight_zero_point": False}
    for changes in ({"epilogue": "bias"}, {"act_scale_scope": "tensor"}, {"has_act_zero_point": True}):
        yield f"sums with {changes}", sums | changes, next(iter(changes))
    yield "sums with zero points of the weight", sums | {"has_weight_zero_point": True}, "has_weight_zero_point"
    for activation, weight, longest in (("s8", "s8", 131_071), ("u8", "s8", 65_793), ("u8", "u8", 33_025)):
        kinds = {"activation_element": activation, "weight_element": weight}
        yield f"sums of {activation} by {weight} beyond s32", sums | kinds | {"k": longest + 1}, "k"


def _bad_bounds(op, names):
    codes = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7), "u4": (0, 15), "s16": (-32_639, 32_639)}
    for q_max in (0, -1) if op.name == "amax_quantize" else ():
        yield f"q_max={q_max}", {"q_min": -8, "q_max": q_max}, "q_max"
    if "output_element" not in names or op.name == "quantized_linear":
        return
    for code, (low, high) in codes.items():
        mode = {"mode": "asymmetric"} if op.name == "dynamic_range" else {}
        yield f"{code} above", {"output_element": code, "q_min": low, "q_max": high + 1, **mode}, "q_max"
        yield f"{code} below", {"output_element": code, "q_min": low - 1, "q_max": high, **mode}, "q_min"


def _bad_dynamic_ranges():
    for q_max in (0, -1):
        yield f"symmetric q_max={q_max}", {"q_min": -8, "q_max": q_max, "mode": "symmetric"}, "q_max"
    yield "asymmetric q_max = q_min", {"q_min": 5, "q_max": 5, "mode": "asymmetric"}, "q_max"
    yield "misspelt mode", {"mode": "symetric"}, "mode"
    yield "misspelt scope", {"scope": "row"}, "scope"
    for axis in (None, 2, -3):
        yield f"channel axis={axis}", {"scope": "channel", "axis": axis}, "axis"
    yield "axis without a use", {"scope": "token", "axis": 0}, "axis"
    yield "axis of a tensor", {"scope": "tensor", "axis": 1}, "axis"
    yield "group along the first axis", {"scope": "group", "axis": 0, "group_size": 4}, "axis"
    yield "no group_size", {"scope": "group"}, "group_size"
    yield "group_size 0", {"scope": "group", "group_size": 0}, "group_size"
    yield "group_size without a use", {"scope": "token", "group_size": 4}, "group_size"
    yield "groups that do not divide", {"scope": "group", "group_size": 4, "d": 10}, "d"


def _bad_norms():
    for value in (-1e-9, math.inf, math.nan, 1e39, "one", None):
        yield f"eps={value!r}", {"eps": value, "input_element": "f32"}, "eps"
    for q_max in (0, -1):
        yield f"dynamic q_max={q_max}", {"q_min": -8, "q_max": q_max, "scaling": "dynamic"}, "q_max"
    yield "misspelt scaling", {"scaling": "dynamical"}, "scaling"
    yield "flag that is no boolean", {"has_residual": "maybe"}, "has_residual"


@EACH_OP
def test_a_bad_field_is_refused_by_name(op):
    good = _fields(op)
    op.descriptor(**good)
    for wrong, changes, field in _bad_fields(op):
        error = _made(op.descriptor, good | changes)
        assert isinstance(error, InvalidProblem), wrong
        assert (error.subject, error.field.partition(".")[0]) == (op.descriptor.__name__, field), wrong
        assert all((error.had, error.must))
        assert str(error) == f"{error.subject}: {error.field} must {error.must}; had {error.had}"


@EACH_OP
def test_every_missing_field_is_named(op):
    good = _fields(op)
    for name, field in op.descriptor.model_fields.items():
        if field.is_required():
            with pytest.raises(InvalidProblem) as caught:
                op.descriptor(**{key: value for key, value in good.items() if key != name})
            assert (caught.value.field, caught.value.must) == (name, "be given")


def _kinds(op):
    """Return, by name, what the fields of an op hold: the one type beside None, tuples without their elements."""
    found = {}
    for name, info in op.descriptor.model_fields.items():
        parts = [part for part in get_args(info.annotation) or (info.annotation,) if part is not NoneType]
        of = get_origin(info.annotation)
        inner = get_args(parts[0])[0] if get_origin(parts[0]) is Annotated else parts[0]
        found[name] = of if of in {tuple, Literal} else inner
    return found


WRONG = {
    "none": None, "bytes": b"f32", "byte array": bytearray(b"f32"), "float": 1.0, "nan": math.nan, "complex": 1j,
    "list": [1], "dict": {1: 1}, "set": {1, 2}, "generator": (n for n in (1, 2)), "array": np.array([1, 2]),
    "array without axes": np.array(1), "array of a word": np.array(["f32"]), "array of a flag": np.array([True])[0:1],
    "NumPy flag": np.True_, "flag": True, "NumPy bytes": np.bytes_(b"f32"), "NumPy word": np.str_("1"),
    "NumPy complex": np.complex64(1), "date": np.datetime64(1, "s"), "class": int, "element class": ElementKind,
    "object": object(), "word": "x" * 100_000, "digits": "1", "yes": "yes", "huge": 10**5000, "integer": 1,
    "range": range(2), "tuple": (1, 2), "nested": ((1,),), "lambda": lambda: 1, "module": math,
}  # fmt: skip
RIGHT = {
    bool: {"flag", "NumPy flag"},
    int: {"integer"},
    float: {"integer", "float"},
    tuple: {"list", "tuple"},
}
"""The only ones that a field of each kind takes."""


@EACH_OP
def test_every_field_takes_values_of_its_own_type_alone(op):
    good, kinds = _fields(op), _kinds(op)
    assert kinds.pop("op") is Literal
    for name, kind in kinds.items():
        takes = RIGHT.get(kind, set()) | ({"none"} if not op.descriptor.model_fields[name].is_required() else set())
        for what, value in WRONG.items():
            made = _made(op.descriptor, good | {name: value})
            if isinstance(made, InvalidProblem):
                assert len(str(made)) < 1000, "a long value is cut"
                assert str(made).isprintable(), "one line"
                assert what in takes or made.field.partition(".")[0] == name, (name, what, made)
            else:
                assert what in takes, (name, what)
                held = getattr(made, name)
                assert held is None or type(held) is kind, (name, what, held)


def _made(make, fields):
    """Return a descriptor, or why there is none."""
    try:
        return make(**fields)
    except InvalidProblem as error:
        return error


def test_the_kinds_of_fields_are_those_that_are_tested():
    kinds = {kind for op in OPS for kind in _kinds(op).values()}
    enums = {ElementKind, EpilogueKind, DynamicRangeMode, DynamicRangeScope, GeluForm, Nonfinite, RotaryLayout, Scaling}
    assert kinds == {bool, int, float, tuple, Literal, *enums}


def test_numbers_of_numpy_are_numbers():
    fields = {"m": 1, "n": 1, "k": 1, "output_element": "f32"}
    for scale in (np.float32(0.5), np.float16(0.5), np.longdouble(0.5), ml_dtypes.bfloat16(0.5), Fraction(1, 2)):
        assert SmoothQuantLinearDescriptor(act_scale=scale, **fields).act_scale == 0.5
    for one in (np.int8(1), np.uint64(1), np.intp(1)):
        assert type(SmoothQuantLinearDescriptor(act_scale=one, **fields | {"m": one}).m) is int
    for flag in (np.True_, np.False_):
        made = SmoothQuantLinearDescriptor(act_scale=1, has_weight_zero_point=flag, **fields)
        assert made.has_weight_zero_point is bool(flag)


@pytest.mark.parametrize(
    ("op", "field"),
    [
        pytest.param(op, field, id=f"{op.name}-{field}")
        for op in OPS
        for field, kind in _kinds(op).items()
        if kind is ElementKind
    ],
)
def test_an_element_that_no_kernel_serves_is_unsupported_with_every_reason(op, field):
    unserved = (ElementKind.FP8_E4M3, ElementKind.COMPLEX64, ElementKind.BOOL)
    element = unserved[fresh(op.name, field).integers(3)]
    problem = op.descriptor(**_fields(op) | {field: element})
    with pytest.raises(Unsupported) as caught:
        dispatcher().select(problem)
    explanation = caught.value.explanation
    assert {decision.sku for decision in explanation.decisions} == {sku.id for sku in op.skus}
    assert explanation.chosen is None
    for decision in explanation.decisions:
        assert not decision.accepted
        named = [reason for reason in decision.reasons if reason.field == field]
        assert named, decision
        assert named[0].had == element
        assert f"set {field} to" in named[0].change
    if field not in {op.descriptor.element_field, op.descriptor.aux_field}:
        assert "one of" in str(caught.value), "the elements that there are"
    nearest = explanation.decisions[0]
    assert nearest.sku in str(caught.value)
    assert {reason.field for reason in nearest.reasons} == {field}


# --- descriptors as values -------------------------------------------------------------------------------------------


@EACH_OP
def test_descriptors_compare_hash_and_survive_json(op):
    problems = [case.problem for case in op.cases]
    again = [op.descriptor.model_validate_json(problem.model_dump_json()) for problem in problems]
    assert again == problems
    assert [hash(problem) for problem in again] == [hash(problem) for problem in problems]
    assert len(set(problems + again)) == len(set(problems))
    assert [pickle.loads(pickle.dumps(problem)) for problem in problems] == problems  # noqa: S301  our own
    fields = _fields(op)
    assert len({op.descriptor(**fields), op.descriptor(**fields)}) == 1
    name = next(name for name in (*COUNTS, "axis") if name in fields)
    other = op.descriptor(**fields | {name: 8 * fields[name] if name != "axis" else 0})
    assert other != op.descriptor(**fields)


def test_two_spellings_of_one_problem_are_equal():
    describe = dispatcher().describe
    fields = {"shape": (2, 3), "q_min": 0, "q_max": 1, "input_element": "f32"}
    assert describe("fake_quantize_per_channel", axis=-1, **fields) == describe(
        "fake_quantize_per_channel", axis=np.int64(1), **fields | {"shape": [np.int32(2), 3]}
    )
    fields = {"n": 2, "d": 4, "q_min": 0, "q_max": 1, "input_element": "f32", "output_element": "u8"}
    group = {"scope": "group", "group_size": 2}
    assert describe("dynamic_range", **group, **fields) == describe("dynamic_range", **group, axis=-1, **fields)
    fields = {"m": 1, "c_out": 1, "k": 1, "q_min": -1, "q_max": 1, "activation_element": "f16"}
    assert describe("quantized_linear", **fields) == describe("quantized_linear", **fields, output_element="f16")


# --- arguments of run ------------------------------------------------------------------------------------------------

BY_TENSOR = [op for op in OPS if any(a.role is Role.SCALE for case in op.cases for a in case.problem.arguments())]


def _ready(op):
    """Return a good problem of the op, its inputs and its outputs."""
    problem = op.descriptor(**_fields(op))
    drawn = draw(op, Case(problem), fresh(op.name))
    outputs = guarded_outputs(problem, drawn.shapes, "contiguous")
    return problem, drawn.inputs, {name: guarded.array for name, guarded in outputs.items()}


def _refused(problem, arrays, name, **more):
    with pytest.raises(InvalidProblem) as caught:
        run(problem, arrays, **more)
    assert (caught.value.subject, caught.value.field) == (problem.op, name)
    with pytest.raises(InvalidProblem):
        dispatcher().select(problem).can_implement(**arrays)
    return caught.value


@EACH_OP
def test_every_missing_argument_is_named(op):
    problem, inputs, _ = _ready(op)
    for name in inputs:
        missing = {key: value for key, value in inputs.items() if key != name}
        assert _refused(problem, missing, name).had == "nothing"
        _refused(problem, inputs | {name: None}, name)


@EACH_OP
def test_an_unknown_argument_is_refused_with_the_known_ones(op):
    problem, inputs, outputs = _ready(op)
    error = _refused(problem, inputs | {"scael": 1.0}, "scael")
    assert all(name in error.must for name in (*inputs, *outputs))


@EACH_OP
def test_arrays_of_another_dtype_or_shape_are_refused(op):
    problem, inputs, outputs = _ready(op)
    given = inputs | outputs
    for argument in problem.arguments():
        array = given.get(argument.name)
        if not isinstance(array, np.ndarray) or argument.is_scalar:
            continue
        wrong = np.uint32 if array.dtype.itemsize == 4 else np.int16
        error = _refused(problem, given | {argument.name: np.zeros(array.shape, wrong)}, argument.name)
        assert np.dtype(wrong).name in error.had
        longer = np.zeros((*array.shape[:-1], array.shape[-1] + 1) if array.ndim else (2,), array.dtype)
        named = {a.name for a in problem.arguments() if a.flat} if argument.flat else {argument.name}
        with pytest.raises(InvalidProblem) as caught:
            run(problem, given | {argument.name: longer})
        assert caught.value.field in named
        if not argument.flat:
            _refused(problem, given | {argument.name: array.reshape(1, *array.shape)}, argument.name)


class Lying:
    """Reports through a standard what is no array."""

    def __init__(self, **reports):
        self._reports = reports

    def __getattr__(self, name):
        if name in vars(self).get("_reports", {}):
            return self._reports[name]
        raise AttributeError(name)


def _raising():
    raise KeyError("device")


NO_ARRAYS = {
    "objects": np.array([1, "a"], object), "text": np.array("x"), "dates": np.zeros(2, "M8[s]"),
    "records": np.zeros(2, [("a", "f4")]), "complex numbers": np.zeros(2, np.complex64), "class of arrays": np.ndarray,
    "bytes of NumPy": np.void(b"12"), "the masked constant": np.ma.masked, "other byte order": np.zeros(2, ">f4"),
    "wide floats": np.zeros(2, np.longdouble), "memory": memoryview(b"ab"), "ellipsis": ...,
    "a device that is none": Lying(__dlpack_device__=lambda: 7), "no device": Lying(__dlpack_device__=_raising),
    "a capsule that is none": Lying(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda **_: 3),
}  # fmt: skip


@EACH_OP
def test_what_is_no_array_is_refused(op):
    problem, inputs, _ = _ready(op)
    strange = WRONG | NO_ARRAYS
    for name, value in inputs.items():
        is_scalar = next(a for a in problem.arguments() if a.name == name).is_scalar
        for what, wrong in strange.items():
            if not (is_scalar and what in {"integer", "float", "nan"}):
                with pytest.raises(InvalidProblem, match=name) as caught:
                    run(problem, inputs | {name: wrong})
                assert str(caught.value).isprintable(), what
                assert len(str(caught.value)) < 1000, what
        if isinstance(value, np.ndarray) and not next(a for a in problem.arguments() if a.name == name).is_scalar:
            _refused(problem, inputs | {name: 1.0}, name)


@EACH_OP
def test_outputs_that_cannot_be_written_are_refused(op):
    problem, inputs, outputs = _ready(op)
    for name, array in outputs.items():
        locked = array.copy()
        locked.flags.writeable = False
        assert "read-only" in _refused(problem, inputs | {name: locked}, name).had
        if array.size > 1:
            row = np.zeros((1,) * array.ndim, array.dtype)
            repeated = np.lib.stride_tricks.as_strided(row, array.shape, (0,) * array.ndim)
            assert "strides" in _refused(problem, inputs | {name: repeated}, name).had


@EACH_OP
def test_outputs_that_overlap_anything_are_refused(op):
    problem, inputs, outputs = _ready(op)
    given = inputs | outputs
    for target in outputs:
        for name, array in given.items():
            if name == target or not isinstance(array, np.ndarray):
                continue
            room = np.zeros(array.nbytes + outputs[target].nbytes, np.uint8)
            first = np.ndarray(array.shape, array.dtype, room)
            first[...] = array
            # One byte into the other array.
            shared = np.ndarray(outputs[target].shape, outputs[target].dtype, room, array.nbytes - 1)
            with pytest.raises(InvalidProblem, match="apart") as caught:
                run(problem, given | {name: first, target: shared}, copies_state=False)
            assert caught.value.field in (target, name)
            beside = np.ndarray(outputs[target].shape, outputs[target].dtype, room, array.nbytes)
            run(problem, given | {name: first, target: beside})


NOT_IN_PLACE = [op for op in OPS if not op.descriptor.in_place and op.name != "fill"]


@pytest.mark.parametrize("op", NOT_IN_PLACE, ids=lambda op: op.name)
def test_an_output_over_an_input_is_refused(op):
    problem, inputs, outputs = _ready(op)
    name = next(a.name for a in arguments_of(problem, Role.INPUT))
    written = arguments_of(problem, Role.OUTPUT)[0].name
    target = outputs[written]
    size = max(inputs[name].nbytes, target.nbytes)
    room = np.zeros(size, np.uint8)
    source = np.ndarray(inputs[name].shape, inputs[name].dtype, room)
    sink = np.ndarray(target.shape, target.dtype, room)
    _refused(problem, inputs | {name: source, written: sink}, written)


def _scalars(problem, inputs, *roles):
    return [a for a in arguments_of(problem, *roles) if a.is_scalar and a.name in inputs]


@pytest.mark.parametrize("op", BY_TENSOR, ids=lambda op: op.name)
def test_bad_scalars_are_refused(op):
    problem, inputs, _ = _ready(op)
    for scale in _scalars(problem, inputs, Role.SCALE):
        name, dtype = scale.name, storage_dtype(scale.elements[0])
        tiny, huge = (1e-60, 1e60) if dtype == np.float32 else (0, math.inf)
        for value in (0, -0.0, math.inf, -math.inf, math.nan, np.float32(0), np.float64(math.nan), tiny, huge, True):
            _refused(problem, inputs | {name: value}, name)
        _refused(problem, inputs | {name: np.ones(2, dtype)}, name)
        _refused(problem, inputs | {name: np.ones(1, np.int32)}, name)
    for zero_point in _scalars(problem, inputs, Role.ZERO_POINT):
        name = zero_point.name
        for value in (2**31, -(2**31) - 1, 0.5, math.nan, math.inf, False, np.int64(2**31)):
            _refused(problem, inputs | {name: value}, name)
        _refused(problem, inputs | {name: np.zeros(1, np.int64)}, name)
        _refused(problem, inputs | {name: np.zeros(0, np.int32)}, name)


@pytest.mark.parametrize(
    ("element", "value"),
    [
        *(("s8", 128), ("s8", -129), ("u8", -1), ("u4", 16), ("s4", 8), ("s8", 0.5), ("s32", 2**31), ("f16", 65520)),
        *(("f32", 1e39), ("bf16", 3.4e38), ("s8", math.nan), ("u8", math.inf), ("f32", "1"), ("f32", True)),
        *(("f32", None), ("f64", 10**400), ("s32", 10**400), ("f32", np.str_("1")), ("u4", np.array([200], np.uint8))),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_fill_refuses_a_value_that_the_element_cannot_represent(element, value):
    _refused(dispatcher().describe("fill", numel=3, output_element=element), {"value": value}, "value")


# Beside the middle between two numbers of the element, by less than f64 tells apart.
BESIDE = [
    ("f32", 2**60 + 2**36 + 1, 2**60 + 2**37),
    ("f32", 2**60 + 2**36, 2**60),
    ("f32", 2**60 + 2**36 - 1, 2**60),
    ("f32", 2**60 + 3 * 2**36 - 1, 2**60 + 2**37),
    ("f32", -(2**60) - 2**36 - 1, -(2**60) - 2**37),
    ("bf16", 2**60 + 2**52 + 1, 2**60 + 2**53),
    ("bf16", np.uint64(2**60 + 2**52 + 1), 2**60 + 2**53),
    ("f64", 2**60 + 2**7 + 1, 2**60 + 2**8),
    ("f64", 2**60 + 2**7, 2**60),
]
if np.finfo(np.longdouble).nmant > 60:
    BESIDE.append(("f32", np.longdouble(1) + np.longdouble(2) ** -24 + np.longdouble(2) ** -60, 1 + 2**-23))


@pytest.mark.parametrize(("element", "value", "want"), BESIDE)
def test_a_number_of_more_bits_than_f64_is_rounded_once(element, value, want):
    (got,) = run(dispatcher().describe("fill", numel=1, output_element=element), {"value": value}).values()
    assert float(got[0]) == want


def test_every_op_is_covered():
    assert set(DEFINITIONS) == {op.name for op in OPS}
    assert {op.name for op in OPS} == {op.name for _, op, _ in every_case()}
