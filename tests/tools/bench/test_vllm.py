"""vLLM's kernels as rivals: how its library is loaded, what is refused, and that wrong results are not timed."""

from __future__ import annotations

import re
from functools import partial

import pytest
from measured import REGISTRY
from stub_cutlass import build, needs_cc
from stub_vllm import FILE, vllm_stub
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry.device import HOST
from skuda.tools.bench import bench as bench_module
from skuda.tools.bench.bench import KernelBench
from skuda.tools.bench.cutlass.rival import Cutlass
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.record import BenchRecord
from skuda.tools.bench.rivals import absence, rivals_of
from skuda.tools.bench.vllm import Vllm
from skuda.tools.cli import main
from skuda.tools.parse.cases import problem_of, select_cases

torch = pytest.importorskip("torch")

OPS = REGISTRY.ops
__all__ = ["vllm_stub"]
PRODUCTS = ("quantized_linear", "scaled_linear", "smoothquant_linear")


@pytest.fixture
def lab():
    return TorchLab(HOST, flushed=1 << 12, copied=1 << 12, product=32)


@pytest.fixture
def seed(request):
    return int(fresh(request.node.name).integers(2**31))


def problem(op, element="bf16", **changes):
    found = problem_of(OPS[op].descriptor, (24, 48, 64) if op in PRODUCTS else (40, 256), element)
    return type(found)(**{**{name: getattr(found, name) for name in type(found).model_fields}, **changes})


def vllm_of(of, path):
    (rival,) = (rival for rival in rivals_of(of, (Vllm.load(path),)) if rival.name == "vllm")
    return rival


def measured(lab, seed, of, path):
    """Return the result of the rival in a run with nothing beside it."""
    (case,) = (case for case in select_cases(REGISTRY, [of.op_name()], [of.sizes], ["bf16"]))
    dispatcher = Dispatcher(REGISTRY, backends=(NumpyBackend(),))
    libraries = (Vllm.load(path),)
    rivals = lambda each: [rival for rival in rivals_of(each, libraries) if rival.name == "vllm"]  # noqa: E731
    result = KernelBench(dispatcher, HOST, lab, seed, 2, rivals=rivals).measure(case)
    assert result.refused == ""
    (rival,) = result.rivals
    return rival


@pytest.mark.parametrize("folder", [False, True], ids=["file", "package"])
@pytest.mark.parametrize("op", PRODUCTS)
def test_each_op_is_compared_and_timed_with_outputs_that_are_there_before(lab, seed, vllm_stub, op, folder):
    path, stub = vllm_stub()
    rival = measured(lab, seed, problem(op), path.parent if folder else path)
    assert (rival.refused, rival.chosen, rival.computes[:7]) == ("", "", "vLLM's ")
    assert rival.timing.rounds == 2
    assert vllm_stub.loader.loaded == [str(path.resolve())]
    assert all(name in rival.computes for name in set(stub.calls))


@pytest.mark.parametrize("element", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(
    "of",
    [
        partial(problem, "quantized_linear", output_element="bf16"),
        partial(problem, "quantized_linear", output_element="f16"),
    ],
)
def test_results_of_vllm_are_near_those_of_the_op(lab, seed, vllm_stub, of, element):
    path, _ = vllm_stub()
    made = of(element=element)
    inputs = lab.draw(made, seed)
    before = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
    ways = vllm_of(made, path).make(made, inputs)
    (call,) = ways.calls.values()
    for _ in range(3):
        call()
    for check in ways.checks:
        lab.poison(check.outputs)
    call()
    for check in ways.checks:
        assert lab.mismatch(OPS[check.problem.op_name()], *check) == ""
    assert all(torch.equal(inputs[name], value) for name, value in before.items()), "the others read the same inputs"


@pytest.mark.parametrize(
    ("op", "fault", "says"),
    [
        ("quantized_linear", "scale", r"scale_out\["),
        ("quantized_linear", "code", r"output\["),
        *((op, "weights", "output") for op in PRODUCTS),
    ],
)
def test_a_library_that_computes_something_else_is_not_timed(lab, seed, vllm_stub, op, fault, says):
    path, _ = vllm_stub(fault)
    rival = measured(lab, seed, problem(op), path)
    assert re.match(rf"wrong result: {says}", rival.refused), rival.refused
    assert rival.timing is None


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (partial(problem, "quantized_linear", q_min=-100, q_max=100), "built for q_min -127, -128, not -100"),
        (partial(problem, "quantized_linear", "f32"), "built for a bf16, f16 output, not f32"),
        (partial(problem, "scaled_linear", "s32"), "built for a bf16, f16 output, not s32"),
        (partial(problem, "scaled_linear", has_act_zero_point=True), "built without zero points"),
        (partial(problem, "smoothquant_linear", epilogue="bias_relu"), "built without an epilogue such as bias_relu"),
    ],
)
def test_what_vllm_does_not_compute_is_refused_with_the_reason(vllm_stub, of, says):
    path, _ = vllm_stub()
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        vllm_of(of(), path).make(of(), {})


def test_without_a_library_vllm_is_absent_and_an_op_that_it_lacks_has_no_such_rival():
    for op in PRODUCTS:
        assert absence(vllm_of(problem(op), None)) == (
            f"no library is named; bench with --vllm LIBRARY, the path of {FILE} or of the package vllm"
        )
    for op in ("rms_norm_quantize", "dynamic_range", "fake_quantize"):
        assert "vllm" not in {rival.name for rival in rivals_of(problem(op, "f32"))}


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    monkeypatch.setattr(bench_module, "Dispatcher", lambda: Dispatcher(REGISTRY, backends=(NumpyBackend(),)))


OTHER = "Tensor! result, Tensor input, Tensor! scale"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda stub, tmp: tmp / "nowhere.so", "; had .*nowhere.so, which is not there"),
        (lambda stub, tmp: tmp, f"; had .*{FILE}, which is not there"),
        (lambda stub, tmp: tmp / "text.so", "; had .*text.so, which does not load: .*(too short|invalid ELF header)"),
        (lambda stub, tmp: stub(cutlass_scaled_mm=None)[0], r"with an op cutlass_scaled_mm of \(.*\); had none in "),
        (
            lambda stub, tmp: stub(dynamic_scaled_int8_quant=OTHER)[0],
            r"dynamic_scaled_int8_quant of \(.*, Optional\[Tensor\]\); had one of \(Tensor, Tensor, Tensor\)$",
        ),
    ],
)
def test_another_file_is_refused_before_anything_is_timed(vllm_stub, no_cuda, tmp_path, capsys, make, says):
    (tmp_path / "text.so").write_text("no library")
    status = main(["bench", "linear", "--vllm", str(make(vllm_stub, tmp_path))])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    must = re.escape(f"--vllm must be {FILE} of vLLM 0.26 to 0.33, or the folder of the package vllm that holds it")
    assert re.search(f"bench: {must}.*{says}", err), err


@needs_cc
def test_one_run_has_both_libraries_and_its_record_names_them(lab, vllm_stub, no_cuda, tmp_path, monkeypatch, capsys):
    path, _ = vllm_stub()
    folder, output = build(tmp_path / "objects", "s64x16x256"), tmp_path / "out.json"
    card = HOST.model_copy(update={"name": "a card", "processor": "cuda", "compute_capability": (9, 0)})
    monkeypatch.setattr(Dispatcher, "devices", (card, HOST))
    monkeypatch.setattr(bench_module, "TorchLab", lambda device: lab)
    monkeypatch.setattr(
        bench_module,
        "KernelBench",
        lambda dispatcher, device, *more, **named: KernelBench(dispatcher, HOST, *more, **named),
    )
    typed = ["bench", "scaled_linear", "amax", "--shapes", "8x48x64,8x128", "--element", "bf16"]
    typed += ["--rivals", "vllm,cutlass", "--repeats", "2", "--seed", "7", "--cutlass", str(folder)]
    assert main([*typed, "--vllm", str(path.parent), "--output", str(output)]) == 0
    record = BenchRecord.load(output)
    assert record.command.endswith(f"--cutlass {folder} --vllm {path.parent}")
    found = {case.op: [(rival.name, rival.refused) for rival in case.rivals] for case in record.cases}
    assert found == {"scaled_linear": [("cutlass", ""), ("vllm", "")], "amax": []}
    shown = capsys.readouterr().out
    assert "x cutlass | x vllm" in shown
    assert r"- x vllm: vLLM's cutlass\_scaled\_mm" in shown
    assert main(typed) == 0
    assert "absent: vllm" in capsys.readouterr().out


def test_cutlass_and_vllm_come_first_and_take_part_at_random_shapes():
    names = [rival.name for rival in rivals_of(problem("quantized_linear"), (Cutlass(), Vllm()))]
    assert names[:3] == ["cutlass", "vllm", "bf16"]
    assert set(bench_module._FEW) == set(names[:3])
