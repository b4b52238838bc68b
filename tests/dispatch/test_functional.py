"""`skuda.ops`: the descriptor of a call follows from its arrays, for every op."""

from __future__ import annotations

import inspect
import math
import pickle
import pydoc
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import ops_module
import pytest
from support import arguments_of, assert_same_bits, dispatcher, draw, fresh, parts_of
from toy import ToyDescriptor, toy_op

import skuda
from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.select.fields import Fields
from skuda.functional import call
from skuda.kernels.catalog import built_in_ops
from skuda.registry import Case, InvalidProblem, Registry, Unsupported

OPS = {op.name: op for op in built_in_ops()}
X, CODES = np.float32([[0.3, -1.2, 3], [9, 0, -4]]), np.int8([[1, -2, 3], [4, 5, -6]])
SCALE, WEIGHT_SCALE = np.float32([0.1, 0.2]), np.float32([0.5, 0.25])


def needed(fields, problem, given):
    """The fields that do not follow from the arrays given."""
    packed = {a.name for a in problem.arguments() if a.elements[0].is_packed}
    # Three axes say that a weight is packed, but its rows only up to a multiple of 16.
    of_weight, rows = (), ""
    if getattr(problem, "weight_element", None) == "s4":
        of_weight, rows = ("weight_element", "group_size"), "" if "weight_scale" in given else problem.channels
    # The dtype of halves is s8, and they are twice as many as codes.
    split = {a.name for a in problem.arguments() if a.elements[0].is_split}
    halved = {name for name in type(problem).model_fields if {*fields.sources(name)} & split and "element" in name}
    sources = {name: set(fields.sources(name)) & given.keys() for name in type(problem).model_fields if name != "op"}
    return {
        name: getattr(problem, name)
        for name, found in sources.items()
        # Whether a zero point is passed shows.
        if name in halved
        or (name not in of_weight and (name == rows or (not found - packed and name != "has_weight_zero_point")))
    }


@pytest.mark.parametrize("name", OPS)
def test_the_problem_follows_from_the_arrays_of_every_case(name):
    fields, rng = Fields(OPS[name]), fresh(name)
    for case in OPS[name].cases:
        given = draw(OPS[name], case, rng).inputs
        problem, arrays = fields.split(given | needed(fields, case.problem, given))
        assert problem == case.problem
        assert arrays.keys() == given.keys()


@pytest.mark.parametrize("name", OPS)
def test_a_function_gives_the_bits_of_the_dispatcher(name):
    fields, rng = Fields(OPS[name]), fresh(name)
    for case in OPS[name].cases[:: max(1, len(OPS[name].cases) // 8)]:
        given = draw(OPS[name], case, rng).inputs
        more = needed(fields, case.problem, given)
        got = getattr(skuda.ops, name)(**given, **more, dispatcher=dispatcher())
        want = dispatcher().run(case.problem, **given)
        for one, other in zip(parts_of(got), parts_of(want), strict=True):
            assert_same_bits(one, other)


def test_the_types_are_what_their_generator_writes():
    assert ops_module.PATH.read_text(encoding="utf-8") == ops_module.written(), "run `make ops`"


@pytest.mark.parametrize("name", OPS)
def test_a_signature_has_every_argument_and_every_field(name):
    parameters = inspect.signature(getattr(skuda.ops, name)).parameters
    arguments = {a.name for case in OPS[name].cases for a in arguments_of(case.problem)}
    fields = set(OPS[name].descriptor.model_fields) - {"op"}
    assert not arguments & fields
    assert set(parameters) == arguments | fields | {"dispatcher", "preference", "stream"}
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", OPS)
def test_a_parameter_has_the_type_of_every_value_that_cases_give_it(name):
    parameters = inspect.signature(getattr(skuda.ops, name)).parameters
    for case in OPS[name].cases:
        for field in type(case.problem).model_fields.keys() & parameters:
            value, kind = getattr(case.problem, field), parameters[field].annotation
            if not isinstance(value, tuple) and value is not None:
                assert isinstance(value, kind), field


def test_a_function_is_made_once_and_is_found_by_its_name():
    functions = {name: getattr(skuda.ops, name) for name in OPS}
    assert functions == {name: pickle.loads(pickle.dumps(one)) for name, one in functions.items()}  # noqa: S301  our own
    assert {(one.__module__, one.__name__) for one in functions.values()} == {("skuda.ops", name) for name in OPS}
    for name, one in functions.items():
        assert pydoc.render_doc(one, renderer=pydoc.plaintext).count(f"\n{name}(*, ") == 1
        assert OPS[name].documentation == one.__doc__
    assert set(skuda.ops.__all__) == OPS.keys()


def test_bounds_are_those_of_the_codes_and_outputs_are_written():
    out = np.empty((2, 3), np.uint8)
    got = skuda.ops.quantize_per_tensor(input=X, scale=0.5, zero_point=128, output=out)
    assert got is out
    assert got.tolist() == [[129, 126, 134], [146, 128, 120]]


def test_a_preference_and_a_stream_are_passed_on():
    with pytest.raises(Unsupported, match="no kernel"):
        skuda.ops.fill(value=1, output=np.empty(2, np.float32), preference=PlanPreference(sku="none"))
    with pytest.raises(InvalidProblem, match="stream must be None"):
        skuda.ops.fill(value=1, output=np.empty(2, np.float32), stream=7)


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        ("quantize_per_token", {"input": X, "scale": SCALE, "zero_point": SCALE.astype("i4")},
         "output_element must be given, unless output is; had nothing"),
        ("fake_quantize", {"input": X, "scale": 1.0, "zero_point": 0},
         "q_min must be given: it does not follow from the arguments"),
        ("fill", {"value": 1, "output_element": "f32"}, "numel must be given, unless output is"),
        ("quantize_per_token", {"input": X[0], "scale": SCALE, "zero_point": SCALE, "output_element": "s8"},
         r"input must have the axes \(n, d\); had shape \(3,\)"),
        ("dequantize_per_tensor", {"input": CODES.view("u1"), "input_element": "s4", "scale": 1.0, "zero_point": 0,
          "output_element": "f32"}, "numel must be given: input holds two elements to a byte"),
        ("fake_quantize", {"input": X.astype("c8"), "scale": 1.0, "zero_point": 0, "q_min": 0, "q_max": 1},
         "input must be of one of float32, .*; had an array of complex64"),
        ("fake_quantize", {"input": [1.0], "scale": 1.0, "zero_point": 0, "q_min": 0, "q_max": 1},
         "input must be an array with a shape and a dtype; had a list"),
        ("fake_quantize", {"input": SimpleNamespace(shape=(3,), dtype=[]), "scale": 1.0, "zero_point": 0},
         "input must be an array with a shape and a dtype; had a SimpleNamespace"),
        ("dynamic_range", {"input": X, "output_element": "s8", "scope": [["row"]]}, "scope must be a plain value"),
        ("dynamic_range", {"input": X, "output_element": b"s8"}, "output_element must be one of"),
        ("smoothquant_linear", {"act_q": CODES, "weight_q": CODES, "weight_scale": SCALE, "act_scale": SCALE},
         "act_scale must be a plain value: it is a field, not an argument; had array"),
    ],
)  # fmt: skip
def test_what_does_not_follow_is_refused_with_what_to_do(op, given, message):
    with pytest.raises(InvalidProblem, match=message):
        call(op, given)


@pytest.mark.parametrize("first_the_wrong_one", [False, True])
def test_a_field_of_another_type_is_not_taken_for_an_equal_one(first_the_wrong_one):
    """1, 1.0 and True are equal and have one hash, and so are zeros of both signs: a cache could confuse them."""
    fields = Fields(OPS["smoothquant_linear"])
    given = {"act_q": CODES, "weight_q": CODES, "weight_scale": SCALE, "output_element": "f32", "act_scale": 1.0}
    point, flag = "act_zero_point", "has_weight_zero_point"
    for name, good, wrong in ((point, 0, 0.0), (point, 1, True), (flag, False, 0.0), (flag, True, 1)):
        pair = (good, wrong)[:: -1 if first_the_wrong_one else 1]
        for value in pair * 2:
            if value is wrong:
                with pytest.raises(InvalidProblem, match=f"{name} must be"):
                    fields.split(given | {name: value})
            else:
                assert getattr(fields.split(given | {name: value})[0], name) is good
    for value in (0.0, -0.0):
        found = fields.split(given | {"act_scale": value})[0].act_scale
        assert math.copysign(1, found) == math.copysign(1, value)


def test_an_argument_that_there_is_not_is_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        skuda.ops.fill(x=1)
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'q_min' and 'q_max'"):
        skuda.ops.fake_quantize(input=X, scale=1.0, zero_point=0)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        skuda.ops.quantise  # noqa: B018  the access is the test


def test_an_op_of_a_plug_in_is_a_function_too(monkeypatch):
    cases = (Case(ToyDescriptor(m=3)),)
    monkeypatch.setattr("skuda.functional._default", [Dispatcher(Registry([replace(toy_op(), cases=cases)]))])
    monkeypatch.setattr("skuda.functional._fields", {})
    assert dir(skuda.ops) == ["toy"]
    assert skuda.ops.toy(x=X[0]).tolist() == (X[0] + X[0]).tolist()
    assert list(inspect.signature(skuda.ops.toy).parameters)[:3] == ["x", "y", "m"]
    with pytest.raises(InvalidProblem, match="other must be one of x, y, m, "):
        skuda.ops.toy(x=X[0], other=1)
    with pytest.raises(InvalidProblem, match="op must be one of toy, which this dispatcher has; had 'fill'"):
        skuda.ops.fill(value=1, output=X)


def test_an_op_that_computes_its_arguments_is_a_function_that_needs_every_field(monkeypatch):
    class ComputingDescriptor(ToyDescriptor):
        def arguments(self):
            return super().arguments()

    computing = replace(toy_op(), descriptor=ComputingDescriptor, cases=())
    monkeypatch.setattr("skuda.functional._default", [Dispatcher(Registry([computing]))])
    monkeypatch.setattr("skuda.functional._fields", {})
    *_, last = inspect.signature(skuda.ops.toy).parameters.values()
    assert last.kind is inspect.Parameter.VAR_KEYWORD
    assert skuda.ops.toy(x=X[0], m=3).tolist() == (X[0] + X[0]).tolist()
    with pytest.raises(InvalidProblem, match="toy: x must be an array of shape"):
        skuda.ops.toy(x=X[0])


def test_the_package_imports_nothing_before_it_is_asked():
    code = "import skuda, sys; print([m for m in sys.modules if m.startswith('skuda.')], 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[] False"
    assert set(dir(skuda)) >= {"__version__", "ops", "dispatch"}
    with pytest.raises(AttributeError, match="no attribute 'Dispatcher'"):
        skuda.Dispatcher  # noqa: B018  the access is the test
