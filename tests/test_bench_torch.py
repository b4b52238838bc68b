"""What `skuda bench` does with torch, on the CPU: its formulas mean what the ops mean, and its rivals run."""

from __future__ import annotations

import warnings

import pytest
from stub_cutlass import build, needs_cc
from support import fresh

from skuda.dispatch.device import device_named
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor, QuantizePerChannelDescriptor
from skuda.registry import InvalidProblem
from skuda.tools.bench_cases import problem_of, select_cases
from skuda.tools.bench_cutlass import Cutlass
from skuda.tools.bench_formulas import answer, formula
from skuda.tools.bench_lab import TorchLab, _device, _host
from skuda.tools.bench_rivals import rivals_of
from skuda.tools.trial import answer as reference_answer

torch = pytest.importorskip("torch")

REGISTRY = built_in_registry()
OPS = {op.name: op for op in built_in_ops()}
CASES = (
    *select_cases(REGISTRY, ["quantize"], [(6, 256), (1, 128)], ["f16", "bf16", "f32", "f64"]),
    *select_cases(REGISTRY, ["linear"], [(24, 16, 32)], ["f16", "bf16", "f32", "f64"]),
)


@pytest.fixture
def lab():
    """The lab's arrays, without its clock."""
    made = TorchLab.__new__(TorchLab)
    made._torch, made._place = torch, torch.device("cpu")
    return made


@pytest.fixture
def seed(request):
    return int(fresh(request.node.name).integers(2**31))


def solved(lab, problem, seed):
    """Return inputs, and outputs as the op's reference has them."""
    op = OPS[problem.op_name()]
    inputs = lab.draw(problem, seed)
    host = {name: _host(torch, value) for name, value in inputs.items()}
    return inputs, {name: _device(torch, value, "cpu") for name, value in reference_answer(op, problem, host).items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_formulas_are_the_reference_bit_for_bit(lab, case, seed):
    inputs, outputs = solved(lab, case.problem, seed)
    assert answer(case.problem, inputs) is not None
    assert lab.mismatch(OPS[case.op], case.problem, inputs, outputs, 0) == ""
    first = next(iter(outputs))
    lab.poison({first: outputs[first][-1:]})
    if outputs[first].dtype != torch.int8:
        assert "got nan" in lab.mismatch(OPS[case.op], case.problem, inputs, outputs, 0)
        assert "got nan" in lab.mismatch(OPS[case.op], case.problem, inputs, outputs, None)


@pytest.mark.parametrize(
    "problem",
    [
        DynamicRangeQuantizeDescriptor(
            n=6, d=24, q_min=-127, q_max=127, input_element="bf16", output_element="s8", **how
        )
        for how in (
            {"scope": "tensor"},
            {"scope": "channel", "axis": 0},
            {"scope": "channel", "axis": 1},
            {"scope": "group", "group_size": 8},
        )
    ]
    + [
        QuantizePerChannelDescriptor(
            shape=(3, 4, 5), axis=1, q_min=-128, q_max=127, input_element="f32", output_element="s8"
        )
    ],
    ids=repr,
)
def test_formulas_of_other_scopes_and_ranks(lab, problem, seed):
    inputs, outputs = solved(lab, problem, seed)
    assert formula(problem, inputs) is not None
    assert lab.mismatch(OPS[problem.op_name()], problem, inputs, outputs, 0) == ""


def test_the_reference_answers_where_there_is_no_formula(lab, seed):
    fields = {"n": 4, "d": 8, "input_element": "bf16"}
    asymmetric = {"q_min": -128, "q_max": 127, "mode": "asymmetric", "output_element": "s8"}
    packed = {"q_min": -7, "q_max": 7, "output_element": "s4"}
    for more in (asymmetric, packed):
        problem = DynamicRangeQuantizeDescriptor(**fields, **more)
        inputs, outputs = solved(lab, problem, seed)
        assert answer(problem, inputs) is None
        assert lab.mismatch(OPS["dynamic_range"], problem, inputs, outputs, 0) == ""
        outputs["output"][2, 1] ^= 1
        assert "output[2, 1]" in lab.mismatch(OPS["dynamic_range"], problem, inputs, outputs, 0)


def test_a_mismatch_is_told_with_its_place_and_a_distance_is_granted(lab, seed):
    problem = problem_of(OPS["dequantize_per_token"].descriptor, (4, 8), "bf16")
    inputs, outputs = solved(lab, problem, seed)
    bits = outputs["output"].view(torch.int16)
    bits[2, 5] ^= 1
    told = lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, 0)
    assert told.startswith("wrong result: output[2, 5]: got ")
    assert told.endswith("1 of 32 elements differ")
    assert lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, 1) == ""
    bits[2, 5] ^= 0x100
    assert lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, 1) != ""
    assert lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, None) == ""


def test_the_same_seed_draws_the_same(lab, seed):
    problem = problem_of(OPS["quantized_linear"].descriptor, (3, 4, 5), "bf16")
    one, same, other = (lab.draw(problem, each) for each in (seed, seed, seed + 1))
    assert list(one) == ["activation", "weight_q", "weight_scale"]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["activation"], other["activation"])
    assert int(lab.draw(problem_of(OPS["fake_quantize"].descriptor, (3, 4), "f32"), seed)["zero_point"]) in range(-8, 9)


@pytest.mark.parametrize("case", [case for case in CASES if case.element == "f32"], ids=lambda case: case.label)
def test_rivals_compute_what_they_say(lab, case, seed):
    inputs, outputs = solved(lab, case.problem, seed)
    want = next(iter(outputs.values()))
    ran = []
    for rival in rivals_of(case.problem):
        if rival.needs or rival.away or rival.name == "compile":
            continue
        if rival.name == "fp8" and not hasattr(torch, "_scaled_mm"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that quantized tensors are on their way out
            got = rival.make(case.problem, inputs)()
        got = got[0] if isinstance(got, tuple) else got
        got = got.int_repr() if got.is_quantized else got
        assert got.numel() == want.numel(), rival.name
        ran.append(rival.name)
        if rival.name in ("eager", "builtin"):
            apart = (got.reshape(want.shape).double() - want.double()).abs()
            # The reciprocal of a scale may send a tie, or a bound, the other way.
            assert float((apart > 1e-5).double().mean()) < 0.01, rival.name
        if rival.name == "bf16":
            torch.testing.assert_close(got.double(), want.double(), rtol=0.05, atol=0.05 * float(want.abs().max()))
    assert {"copy", "eager"} <= set(ran) or {"bf16", "int_mm"} <= set(ran)


def test_int_mm_compiled_is_the_layer(lab, seed, monkeypatch):
    from skuda.tools import bench_rivals

    monkeypatch.setattr(bench_rivals, "_compile", lambda function, tensors: lambda: function(*tensors))
    for op in ("smoothquant_linear", "quantized_linear"):
        problem = problem_of(OPS[op].descriptor, (24, 16, 32), "bf16")
        inputs, outputs = solved(lab, problem, seed)
        (rival,) = (each for each in rivals_of(problem) if each.name == "compile")
        torch.testing.assert_close(rival.make(problem, inputs)(), outputs["output"])


@needs_cc
@pytest.mark.parametrize("op", ["smoothquant_linear", "quantized_linear"])
def test_cutlass_writes_the_layer(lab, seed, op, tmp_path):
    found = Cutlass.load(build(tmp_path, "s64x16x256", "t64x256x128_pp"))
    problem = problem_of(OPS[op].descriptor, (5, 24, 32), "bf16")
    inputs = lab.draw(problem, seed)
    rival = rivals_of(problem, found)[0]
    assert ("the product alone, activation quantized before" in rival.computes) is (op == "quantized_linear")
    assert "the fastest of 4 configurations for this shape, found by quick runs" in rival.computes
    ways = rival.make(problem, inputs)
    assert list(ways.calls) == [
        "s64x16x256",
        "t64x256x128_pp",
        "t64x256x128_pp swizzle=8",
        "t64x256x128_pp raster=1 swizzle=2",
    ]
    library = found.configurations[1].library
    tuned = []
    for call in ways.calls.values():
        lab.poison(ways.outputs)
        call()
        assert lab.mismatch(OPS[op], problem, inputs, ways.outputs, 0) == ""
        tuned.append(tuple(library.tuned_to(at) for at in range(3)))
    assert tuned == [(-1, -1, -1), (1, 0, 0), (8, 0, 0), (2, 1, 0)]
    wide = problem_of(OPS[op].descriptor, (5, 24, 32), "f32")
    inputs = lab.draw(wide, seed)
    with pytest.raises(ValueError, match="built for a bf16 output, not f32"):
        rival.make(wide, inputs)


def test_a_flush_writes_and_then_reads(lab):
    lab._written = torch.ones(8, dtype=torch.uint8)
    lab._read = torch.full((4,), 2.0)
    lab._sum = torch.zeros(())
    lab._flush()
    assert not lab._written.any()
    assert lab._sum == 8


def test_torch_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidProblem, match="torch must see CUDA device 0: install a build with CUDA"):
        TorchLab(device_named("h200").model_copy(update={"ordinal": 0}))
