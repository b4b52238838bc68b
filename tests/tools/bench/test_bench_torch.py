"""What `skuda bench` does with torch, on the CPU: rows are compared with the reference, and its rivals run."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import stub_rivals
from stub_cutlass import build, needs_cc
from support import fresh

from skuda.dispatch import BackendStatus, Dispatcher
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.linear import ScaledLinearDescriptor
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor, QuantizePerChannelDescriptor
from skuda.registry import InvalidProblem, Role
from skuda.registry.device import HOST, device_named
from skuda.tools.bench import lab as lab_module
from skuda.tools.bench import rivals as bench_rivals
from skuda.tools.bench.bench import KernelBench
from skuda.tools.bench.clock import CudaClock
from skuda.tools.bench.cutlass.rival import Cutlass
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.rivals import absence, rivals_of
from skuda.tools.bench.tune import Tuner
from skuda.tools.frame.run import silent
from skuda.tools.parse.cases import groups, problem_of, select_cases
from skuda.tools.verify.trial import answer as reference_answer

torch = pytest.importorskip("torch")

REGISTRY = built_in_registry()
FP8 = hasattr(torch, "_scaled_mm")
OPS = {op.name: op for op in built_in_ops()}
CASES = (
    *select_cases(REGISTRY, ["quantize"], [(6, 256), (1, 128)], ["f16", "bf16", "f32", "f64"]),
    *select_cases(REGISTRY, ["linear"], [(24, 16, 32)], ["f16", "bf16", "f32", "f64"]),
)


CACHE = {
    op: select_cases(REGISTRY, [op], [(2, 1, 256, 32), (1, 128, 128, 64)], ["f32", "bf16"])
    for op in groups(REGISTRY)["cache"]
}
EVERY_CACHE = [case for cases in CACHE.values() for case in cases]
LOGITS = select_cases(REGISTRY, ["logits"], [(4, 700)], ["f32", "bf16"])


@pytest.fixture
def lab():
    return TorchLab(HOST, flushed=1 << 12, copied=1 << 12, product=32)


@pytest.fixture
def seed(request):
    return int(fresh(request.node.name).integers(2**31))


def solved(lab, problem, seed):
    """Return inputs, and outputs as the op's reference has them."""
    op = OPS[problem.op_name()]
    inputs = lab.draw(problem, seed)
    state = {a.name: lab.outputs(problem)[a.name] for a in problem.arguments() if a.role is Role.STATE}
    lab.poison(state)
    given = inputs | {name: one.numpy() for name, one in state.items()}
    return inputs, {name: torch.as_tensor(one) for name, one in reference_answer(op, problem, given).items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("sampled", [1 << 20, 1])
def test_rows_of_every_op_are_compared_with_the_reference(lab, case, sampled, seed, monkeypatch):
    monkeypatch.setattr(lab_module, "_SAMPLED_ELEMENTS", sampled)  # of few, 16 rows are compared, or elements
    inputs, outputs = solved(lab, case.problem, seed)
    assert lab.mismatch(OPS[case.op], case.problem, inputs, outputs, 0) == ""
    first = next(iter(outputs))
    lab.poison({first: outputs[first][-1:]})
    if outputs[first].dtype != torch.int8:
        assert "got nan" in lab.mismatch(OPS[case.op], case.problem, inputs, outputs, 0)
        assert "got nan" in lab.mismatch(OPS[case.op], case.problem, inputs, outputs, None)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_rows_of_a_channel_have_its_scales(lab, seed, axis, monkeypatch):
    monkeypatch.setattr(lab_module, "_SAMPLED_ELEMENTS", 1)
    fields = {"shape": (40, 4, 5), "axis": axis, "q_min": -128, "q_max": 127}
    problem = QuantizePerChannelDescriptor(**fields, input_element="f32", output_element="s8")
    inputs, outputs = solved(lab, problem, seed)
    assert lab.mismatch(OPS[problem.op_name()], problem, inputs, outputs, 0) == ""
    outputs["output"][-1, 0, 0] ^= 1
    assert "output[15, 0, 0]: got" in lab.mismatch(OPS[problem.op_name()], problem, inputs, outputs, 0)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_packed_weight_is_drawn_so_that_its_codes_fit(lab, seed, group_size):
    problem = ScaledLinearDescriptor(m=5, n=40, k=272, weight_element="s4", group_size=group_size, output_element="f32")
    inputs, outputs = solved(lab, problem, seed)
    scale, base = np.moveaxis(inputs["weight_q"].numpy()[..., 1024:].reshape(-1, 2), 1, 0).astype(int)
    assert (scale * 15 + base).max() <= 255
    assert lab.mismatch(OPS[problem.op_name()], problem, inputs, outputs, 0) == ""


def test_all_is_compared_where_rows_depend_on_each_other(lab, seed):
    fields = {"n": 4, "d": 8, "input_element": "bf16"}
    asymmetric = {"q_min": -128, "q_max": 127, "mode": "asymmetric", "output_element": "s8"}
    packed = {"q_min": -7, "q_max": 7, "output_element": "s4"}
    scoped = [{"scope": "tensor"}, {"scope": "channel", "axis": 0}, {"scope": "group", "group_size": 4}]
    symmetric = {"q_min": -127, "q_max": 127, "output_element": "s8"}
    for more in (asymmetric, packed, *({**symmetric, **scope} for scope in scoped)):
        problem = DynamicRangeQuantizeDescriptor(**fields, **more)
        inputs, outputs = solved(lab, problem, seed)
        assert lab.mismatch(OPS["dynamic_range"], problem, inputs, outputs, 0) == ""
        outputs["output"].reshape(-1)[3] ^= 1
        assert "1 of " in lab.mismatch(OPS["dynamic_range"], problem, inputs, outputs, 0)


def test_a_mismatch_is_reported_with_its_place_and_a_distance_is_granted(lab, seed):
    problem = problem_of(OPS["dequantize_per_token"].descriptor, (4, 8), "bf16")
    inputs, outputs = solved(lab, problem, seed)
    bits = outputs["output"].view(torch.int16)
    bits[2, 5] ^= 1
    message = lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, 0)
    assert message.startswith("wrong result: output[2, 5]: got ")
    assert message.endswith("1 of 32 elements differ")
    assert lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, 1) == ""
    bits[2, 5] ^= 0x100
    assert lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, 1) != ""
    assert lab.mismatch(OPS["dequantize_per_token"], problem, inputs, outputs, None) == ""


def test_what_is_too_far_is_found_behind_any_number_that_are_near(lab, seed):
    problem = problem_of(OPS["dynamic_range"].descriptor, (4, 8), "bf16")
    inputs, outputs = solved(lab, problem, seed)
    outputs["output"] = (outputs["output"].int() - outputs["output"].int().sign()).to(torch.int8)
    assert lab.mismatch(OPS["dynamic_range"], problem, inputs, {"output": outputs["output"]}, 1) == ""
    outputs["output"][3, 6] ^= 64
    assert "output[3, 6]: got" in lab.mismatch(OPS["dynamic_range"], problem, inputs, outputs, 1)


def test_the_same_seed_draws_the_same(lab, seed):
    problem = problem_of(OPS["quantized_linear"].descriptor, (3, 4, 5), "bf16")
    one, same, other = (lab.draw(problem, each) for each in (seed, seed, seed + 1))
    assert list(one) == ["activation", "weight_q", "weight_scale"]
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["activation"], other["activation"])
    assert int(lab.draw(problem_of(OPS["fake_quantize"].descriptor, (3, 4), "f32"), seed)["zero_point"]) in range(-8, 9)


@pytest.fixture
def uncompiled(monkeypatch):
    """Let what would be compiled run as it is."""
    monkeypatch.setattr(bench_rivals, "_compile", lambda function, *tensors, **how: lambda: function(*tensors))


PRODUCTS = [case for case in CASES if case.element == "f32" and case.op.endswith("linear")]


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case.label)
def test_rivals_compute_what_they_say(lab, case, seed, uncompiled):
    inputs, outputs = solved(lab, case.problem, seed)
    want = next(iter(outputs.values()))
    ran = []
    for rival in rivals_of(case.problem):
        if rival.needs or rival.away or (rival.name == "fp8" and not FP8):
            continue
        got = rival.make(case.problem, inputs)()
        got = got[0] if isinstance(got, tuple) else got
        assert got.numel() == want.numel(), rival.name
        ran.append(rival.name)
        if rival.name in ("bf16", "bf16 compiled"):
            torch.testing.assert_close(got.double(), want.double(), rtol=0.05, atol=0.05 * float(want.abs().max()))
    assert ran[0] == "bf16"


@pytest.mark.parametrize("case", [*EVERY_CACHE, *LOGITS], ids=lambda case: case.label)
def test_rows_of_a_cache_and_of_logits_are_compared_with_the_reference(lab, case, seed):
    inputs, outputs = solved(lab, case.problem, seed)
    op, rows = OPS[case.op], lab.sample(case.problem)
    assert lab.mismatch(op, case.problem, inputs, outputs, 0) == ""
    last = getattr(case.problem, "tokens", getattr(case.problem, "n", 0)) - 1
    assert rows is None or {0, last} <= set(rows.tolist())
    for name, output in outputs.items():
        before = output.clone()
        output[-1:].view(torch.uint8).bitwise_xor_(1)
        assert f"wrong result: {name}[" in lab.mismatch(op, case.problem, inputs, outputs, 0)
        output.copy_(before)


@pytest.mark.parametrize("case", CACHE["attention"], ids=lambda case: case.label)
def test_rivals_of_attention_attend(lab, case, seed, uncompiled):
    inputs, outputs = solved(lab, case.problem, seed)
    ran = []
    for rival in rivals_of(case.problem):
        call = rival.make(case.problem, inputs) if rival.name == "flash" else None
        for name, one in call.calls.items() if call else ():
            got = one().reshape(case.shape[0], 32, case.shape[1], -1).transpose(1, 2).reshape(outputs["output"].shape)
            want = outputs["output"].double()
            assert float((got.double() - want).norm() / want.norm()) < 0.03, (rival.name, name)
            ran.append((rival.name, name))
    rows = [("flash", "heads as rows")] if case.shape[1] == 1 else []
    assert ran == [("flash", "shared heads"), *rows]


def test_a_problem_that_torch_has_no_mask_for_has_no_rivals(lab, seed):
    (case,) = select_cases(REGISTRY, ["attention"], [(1, 64, 128, 32)], ["bf16"])
    for rival in rivals_of(case.problem, ()):
        with pytest.raises(NotImplementedError, match="has a mask for one new token, or for all"):
            rival.make(case.problem, lab.draw(case.problem, seed))


def test_logits_are_drawn_so_that_few_tokens_have_most_of_the_probability(lab, seed):
    (case,) = select_cases(REGISTRY, ["log_softmax_at"], [(200, 300)], ["f16"])
    inputs = lab.draw(case.problem.model_copy(update={"t": 40, "has_temperature": True}), seed)
    assert 3.8 < float(inputs["logits"].double().std()) < 4.2
    assert set(inputs["tokens"].unique().tolist()) == set(range(300))
    assert set(inputs["temperature"].tolist()) == {np.float32(0.7)}


def scaled_mm(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
    """Stand in for torch's fp8 product, which a CPU may not have."""
    assert use_fast_accum
    assert (a.dtype, b.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert not b.is_contiguous(), "its columns are contiguous, as cuBLAS wants them"
    return ((a.double() @ b.double()) * scale_a.double() * scale_b.double()).to(out_dtype)


def test_the_fp8_layer_quantizes_the_activation_and_is_near_the_product(lab, seed, uncompiled, monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    problem = problem_of(OPS["quantized_linear"].descriptor, (24, 16, 32), "bf16")
    inputs, outputs = solved(lab, problem, seed)
    (rival,) = (each for each in rivals_of(problem) if each.name == "fp8")
    call, want = rival.make(problem, inputs), outputs["output"].double()
    assert float((call().double() - want).norm() / want.norm()) < 0.06, "3 bits of mantissa"
    inputs["activation"].mul_(2)
    assert float((call().double() - 2 * want).norm() / (2 * want).norm()) < 0.06, "the activation is read in the call"


@needs_cc
def test_cutlass_splits_k_in_several_ways_with_a_workspace_for_each(lab, seed, tmp_path):
    """The stub wants another size of workspace where K is split, as CUTLASS does."""
    found = Cutlass.load(build(tmp_path, "t128x128x128_sk"), None)
    problem = problem_of(OPS["smoothquant_linear"].descriptor, (5, 24, 32), "bf16")
    inputs, split = lab.draw(problem, seed), []
    ways = rivals_of(problem, [found])[0].make(problem, inputs)
    for call in ways.calls.values():
        lab.poison(ways.checks[0].outputs)
        call()
        assert lab.mismatch(OPS["smoothquant_linear"], *ways.checks[0]) == ""
        split.append(found.configurations[0].library.tuned_to(2))
    name = "t128x128x128_sk"
    assert dict(zip(ways.calls, split, strict=True)) == {
        name: 0,
        f"{name} stream-K": 1,
        f"{name} split=2": 3,
        f"{name} split=3": 4,
        f"{name} split=4": 5,
        f"{name} split=8": 9,
    }


@needs_cc
@pytest.mark.parametrize("op", groups(REGISTRY)["linear"])
def test_cutlass_writes_the_layer(lab, seed, op, tmp_path):
    found = Cutlass.load(build(tmp_path, "s64x16x256", "t64x256x128_pp"), None)
    problem = problem_of(OPS[op].descriptor, (5, 24, 32), "bf16")
    inputs = lab.draw(problem, seed)
    rival = rivals_of(problem, [found])[0]
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
        lab.poison(ways.checks[0].outputs)
        call()
        assert lab.mismatch(OPS[op], *ways.checks[0]) == ""
        tuned.append(tuple(library.tuned_to(at) for at in range(3)))
    # The size of the workspace depends on the options, so it was asked for with those of the last call.
    assert tuned == [(2, 1, 0), (1, 0, 0), (8, 0, 0), (2, 1, 0)]
    wide = problem_of(OPS[op].descriptor, (5, 24, 32), "f32")
    inputs = lab.draw(wide, seed)
    with pytest.raises(ValueError, match="built for a bf16 output, not f32"):
        rival.make(wide, inputs)


def test_a_flush_writes_and_then_reads(lab):
    lab._written.fill_(1)
    lab._read.fill_(2.0)
    lab.flush()
    assert not lab._written.any()
    assert lab._sum == 2 * (1 << 10)


def test_torch_without_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidProblem, match="torch must see CUDA device 0: install a build with CUDA"):
        TorchLab(device_named("h200").model_copy(update={"ordinal": 0}))


# ---------------------------------------------------------------------------------------------------------- whole runs


def lost(problem, **arrays):
    raise RuntimeError("an illegal memory access was encountered")


@pytest.fixture
def quiet(monkeypatch):
    """Stand in for torch's compiler."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def bench_of(lab, dispatcher=None, **more):
    dispatcher = dispatcher or Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    return KernelBench(dispatcher, HOST, lab, **{"seed": 5, "repeats": 2, **more})


FAKE = select_cases(REGISTRY, ["fake_quantize"], [(6, 256)], ["f32"])


@pytest.mark.parametrize("group", ["quantize", "linear", "cache", "logits"])
def test_a_whole_run_measures_every_op_and_its_rivals(lab, quiet, group):
    every = (*CASES, *EVERY_CACHE, *LOGITS)
    cases = [case for case in every if case.element == "f32" and case.op in groups(REGISTRY)[group]]
    cases += select_cases(REGISTRY, ["linear"], [(24, 16, 32)], ["bf16"]) if group == "linear" else []
    fields = bench_of(lab).run(dict.fromkeys(cases, False), silent)
    assert [case.refused for case in fields["cases"]] == [""] * len(cases)
    for case in fields["cases"]:
        problem = OPS[case.op].descriptor(**case.problem)
        names = {rival.name for rival in rivals_of(problem)}
        why = {rival.name: rival.refused for rival in case.rivals if rival.refused}
        optional = {"cutlass", "vllm", "torchao", "fp8", "cudnn"}
        assert case.ratios.keys() | optional == names | optional, why
        assert fields["ceilings"].least(case.bytes, case.operations) > 0
    assert fields["ceilings"].copy_bandwidth > 0
    assert fields["ceilings"].bf16 > 0


@needs_cc
@pytest.mark.parametrize(("fails", "says"), [(0, ""), (3, "CUTLASS cannot implement it"), (107, "CUTLASS status 7")])
def test_the_fastest_configuration_of_cutlass_is_timed(lab, quiet, tmp_path, fails, says):
    found = Cutlass.load(build(tmp_path, "s64x16x256", "t64x256x128_pp", fails=fails), None)
    (case,) = select_cases(REGISTRY, ["smoothquant_linear"], [(24, 16, 32)], ["bf16"])
    bench = bench_of(lab, rivals=partial(rivals_of, libraries=[found]))
    rival = bench.measure(case).rivals[0]
    assert says in rival.refused
    assert (rival.timing is None, rival.chosen == "") == (bool(fails), bool(fails))


def test_the_empty_kernel_is_asked_of_torch_and_its_absence_is_noted(lab, monkeypatch):
    launched = []
    notes = bench_of(lab).run({}, silent)["ceilings"].notes
    assert any(note.startswith("empty: ") for note in notes), "there is no CUDA here"
    monkeypatch.setattr(torch.cuda, "_sleep", launched.append)
    assert bench_of(lab).run({}, silent)["ceilings"].empty > 0
    assert set(launched) == {0}
    assert len(launched) == 1 + 2, "warmed up, and timed twice"


def test_a_device_that_is_lost_while_candidates_are_timed_refuses_all(lab, monkeypatch):
    tuner = Tuner(Dispatcher(REGISTRY, backends=(NumpyBackend(),), tuning=""), HOST, lab, seed=5, repeats=2)
    measure = lab.measure
    monkeypatch.setattr(lab, "measure", lambda replays: measure(replays) if len(replays) == 1 else lost(None))
    (entry,) = tuner.run([FAKE[0].problem], silent)
    assert [c.refused for c in entry.candidates] == ["RuntimeError: an illegal memory access was encountered"]


def test_a_gpu_gets_its_own_stream_events_and_flush(monkeypatch):
    cpu, made = torch.device("cpu"), []
    monkeypatch.setattr(torch, "device", lambda *names: made.append(names) or cpu)
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None), ("Stream", "a stream")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    facts = SimpleNamespace(L2_cache_size=1 << 25)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    card = device_named("h200").model_copy(update={"ordinal": 1, "l2_cache": 0})
    lab = TorchLab(card)
    assert made == [("cuda", 1)]
    assert isinstance(lab.clock, CudaClock)
    assert lab._written.numel() == 4 << 25


def test_what_a_plan_launches_is_named():
    class OnPaper(CudaCoreBackend):
        def status(self):
            return BackendStatus(available=True, detail="on paper")

    card = device_named("h200")
    dispatcher = Dispatcher(REGISTRY, backends=(OnPaper(), NumpyBackend()))
    problem = problem_of(OPS["fake_quantize"].descriptor, (1024, 1024), "f32")
    sku = next(sku for sku in REGISTRY.skus_of("fake_quantize") if (sku.backend, sku.element) == ("cuda_core", "f32"))
    bench = KernelBench(dispatcher, card, None, seed=1)
    fields = bench._named(SimpleNamespace(sku=sku, problem=problem, choice=""))
    assert fields["sku"] == sku.id
    assert [re.fullmatch(r"fake_quantize\w* grid \d+ block \d+", step) is not None for step in fields["steps"]] == [
        True
    ]


def test_torchao_quantizes_a_layer_with_the_weight_of_the_problem(lab, seed, uncompiled, monkeypatch):
    calls = stub_rivals.install(monkeypatch)
    problem = problem_of(OPS["quantized_linear"].descriptor, (24, 16, 32), "bf16")
    inputs, outputs = solved(lab, problem, seed)
    want = outputs["output"].double()
    for rival in rivals_of(problem):
        if rival.needs:
            assert absence(rival) == ""
            got = rival.make(problem, inputs)().double()
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))
    assert calls == ["torchao"]
