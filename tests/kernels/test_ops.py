"""Every op over every one of its cases: against the definition, in every layout, and in place."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from support import (
    LAYOUTS,
    Guarded,
    arguments_of,
    assert_same_bits,
    coordinates,
    draw,
    every_case,
    fresh,
    guarded_outputs,
    run,
    sampled,
)

from skuda.kernels.catalog import built_in_ops
from skuda.registry.descriptor import Role, storage_shape
from skuda.registry.op import Case

ALL = [pytest.param(op, case, id=name) for name, op, case in every_case()]
EVERY = sampled(ALL, 2, each=lambda op, case: (op.name, case.values))
IN_PLACE = [param for param in EVERY if param.values[0].descriptor.in_place]
ELEMENTWISE = [op for op in built_in_ops() if not op.name.endswith("_linear")]
_BIG = 200_000


def laid_out(values, layout):
    return Guarded.laid_out(values.shape, values.dtype, layout).fill(values)


def _assert_defined(problem, inputs, outputs, shapes, rng):
    define = oracle.definition(problem, inputs)
    for argument in arguments_of(problem, Role.OUTPUT, Role.SCRATCH, Role.STATE):
        name, element = argument.name, argument.elements[0]
        if name not in outputs:
            continue
        for at in coordinates(shapes[name], rng):
            got, want = oracle.element_at(outputs[name], element, at), define(name, at)
            assert oracle.matches(got, want), f"{name}{list(at)}: got {got!r}, want {want!r} for {problem!r}"


def _assert_spare_nibbles_are_zero(problem, outputs, shapes):
    for argument in arguments_of(problem, Role.OUTPUT):
        shape = shapes[argument.name]
        if argument.elements[0].is_packed and shape[-1] % 2:
            assert not (outputs[argument.name][..., -1] >> 4).any(), "a spare high nibble is not zero"


def test_every_kernel_promises_the_bits_of_the_reference():
    assert [sku.id for op in built_in_ops() for sku in op.skus if not sku.precision_guarantee.bit_exact] == []


@pytest.mark.parametrize(("op", "case"), EVERY)
def test_result_is_what_the_definition_says(op, case):
    rng = fresh(op.name, case)
    drawn = draw(op, case, rng)
    problem = case.problem
    outputs = run(problem, drawn.inputs)
    for argument in arguments_of(problem, Role.OUTPUT):
        want = storage_shape(drawn.shapes[argument.name], argument.elements[0])
        assert outputs[argument.name].shape == want, argument.name
    _assert_defined(problem, drawn.inputs, outputs, drawn.shapes, rng)
    _assert_spare_nibbles_are_zero(problem, outputs, drawn.shapes)


@pytest.mark.parametrize(("op", "case"), EVERY)
def test_layout_changes_no_bit_and_nothing_beside_the_outputs_is_written(op, case):
    rng = fresh(op.name, case)
    drawn = draw(op, case, rng)
    problem = case.problem
    want = run(problem, drawn.inputs)
    some = list(LAYOUTS) if sum(array.size for array in want.values()) < _BIG else ["strided", "reversed"]
    for layout in some:
        inputs = {
            name: laid_out(value, str(rng.choice(LAYOUTS) if layout == "contiguous" else layout))
            for name, value in drawn.inputs.items()
            if isinstance(value, np.ndarray)
        }
        outputs = guarded_outputs(problem, drawn.shapes, layout)
        given = drawn.inputs | {name: guarded.array for name, guarded in (inputs | outputs).items()}
        got = run(problem, given, copies_state=False)
        for name, array in got.items():
            assert array is given[name], f"{name} was given and another array came back"
            assert_same_bits(array, want[name], f"{name}, {layout}")
        written = {argument.name for argument in arguments_of(problem, Role.STATE)}
        for name, guarded in inputs.items():
            if name not in written:
                guarded.assert_unchanged()
        for guarded in (*outputs.values(), *(inputs[name] for name in written)):
            guarded.assert_only_elements_written()


@pytest.mark.parametrize(("op", "case"), IN_PLACE)
def test_output_may_be_the_input_itself_where_the_descriptor_allows_it(op, case):
    drawn = draw(op, case, fresh(op.name, case))
    problem = case.problem
    (target,) = arguments_of(problem, Role.OUTPUT)
    want = run(problem, drawn.inputs)[target.name]
    shape, element = drawn.shapes[target.name], target.elements
    sources = [a for a in arguments_of(problem, Role.INPUT) if a.elements == element and drawn.shapes[a.name] == shape]
    # A scale of the data's own shape (one element per channel) must stay apart.
    sources = [a for a in sources if "scale" not in a.name]
    assert sources
    for source in sources:
        for layout in ("contiguous", "strided", "reversed"):
            shared = laid_out(drawn.inputs[source.name], layout)
            got = run(problem, drawn.inputs | {source.name: shared.array, target.name: shared.array})
            assert_same_bits(got[target.name], want, f"in place of {source.name}, {layout}")
            shared.assert_only_elements_written()


SCRATCH = [param for param in EVERY if param.values[0].name.endswith("_linear")]


@pytest.mark.parametrize(("op", "case"), SCRATCH)
def test_scratch_of_a_linear_receives_the_activation_codes_and_scales(op, case):
    rng = fresh(op.name, case)
    drawn = draw(op, case, rng)
    problem = case.problem
    given = {name: guarded.array for name, guarded in guarded_outputs(problem, drawn.shapes, "contiguous").items()}
    want = run(problem, drawn.inputs)["output"]
    assert_same_bits(run(problem, drawn.inputs | given)["output"], want, "with scratch")
    _assert_defined(problem, drawn.inputs, given, drawn.shapes, rng)


CACHE = {"head_size": 32, "rotated": 32, "pages": 560, "most_blocks": 550, "most_positions": 70_400}
LONG = {
    "m": [{"m": 2, "n": 70_001}, {"m": 70_001, "n": 2}],
    "k": [{"n": 2, "k": 70_001}, {"n": 70_001, "k": 2}],
    "group_size": [{"outer_size": 2, "axis_size": 70_007, "group_size": 73}],
    "shape": [
        {"shape": (2, 70_001), "axis": 1},
        {"shape": (70_001, 2), "axis": 0},
        {"shape": (3, 2, 70_001), "axis": 0},
    ],
    "v": [{"n": 70_001, "v": 2}],
    "n": [{"n": 2, "d": 70_001}, {"n": 70_001, "d": 2}],
    "numel": [{"numel": 140_001}],
    "rotated": [{"tokens": 2, "heads": 2048, "head_size": 128}, {"tokens": 70_001, "heads": 1, "kv_heads": 1, **CACHE}],
    "tokens": [{"tokens": 300}],
}


@pytest.mark.parametrize("op", sampled(ELEMENTWISE, 8), ids=lambda op: op.name)
def test_axes_longer_than_any_block_are_cut_in_the_right_places(op):
    fields = op.cases[0].problem.model_dump()
    changes = next(found for name, found in LONG.items() if fields.get(name) is not None)
    for change in changes:
        case = Case(op.descriptor(**fields | change))
        rng = fresh(op.name, case)
        drawn = draw(op, case, rng)
        _assert_defined(case.problem, drawn.inputs, run(case.problem, drawn.inputs), drawn.shapes, rng)


def _gates_f64(op, case):
    problem = case.problem
    return "_mul_" in op.name and problem.input_element == "f64" and problem.n and problem.d


GATED_F64 = sampled([param for param in ALL if _gates_f64(*param.values)], 4, each=lambda op, case: op.name)


@pytest.mark.parametrize(("op", "case"), GATED_F64)
def test_large_products_beside_gates_that_vanish(op, case):
    rng = fresh(op.name, case)
    drawn = draw(op, case, rng)
    problem, inputs = case.problem, drawn.inputs
    gate, up = np.split(inputs["gate_up"], 2, axis=1) if problem.fused else (inputs["gate"], inputs["up"])
    gate[:] = rng.standard_normal(gate.shape)
    up[:] = rng.standard_normal(up.shape) * np.exp2(rng.uniform(-60, 60, (len(up), 1)))
    least, most = np.finfo(gate.dtype).smallest_subnormal, np.finfo(gate.dtype).max
    for row in range(len(gate)):
        at = rng.integers(gate.shape[1])
        gate[row, at] = rng.choice([least, -least, 2 * least, 3 * least, -np.exp(rng.uniform(0, 7))])
        up[row, at] = rng.choice([np.inf, -np.inf, np.nan, most, -most, most * np.exp2(rng.uniform(-600, 0))])
    _assert_defined(problem, inputs, run(problem, inputs), drawn.shapes, rng)


def test_every_family_element_pair_and_flavour_is_among_the_cases():
    for op in built_in_ops():
        keys = {case.problem.key() for case in op.cases}
        assert {sku.key for sku in op.skus} == keys, op.name
    assert {case.values for _, _, case in every_case()} == {"normal", "special", "ties", "zero", "infinite"}


@pytest.mark.parametrize("op", built_in_ops(), ids=lambda op: op.name)
def test_every_kernel_on_offer_serves_a_case(op):
    for sku in op.skus:
        mine = [case.problem for case in op.cases if case.problem.key() == sku.key]
        assert any(not any(rule.check(problem) for rule in sku.constraints) for problem in mine), sku.id
