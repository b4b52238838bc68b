"""The ops of torch under `torch.compile` and `torch.export`: registered correctly, opaque, with symbolic sizes."""

from __future__ import annotations

import shutil
from functools import cache
from itertools import islice

import pytest
import torch
from support import fresh, sampled
from tensors import NAMES, OPS, REGISTRY, all_same, call_of, overloads, results, same
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from skuda.registry import Case

# torch warns of its own deprecated functions when it compiles.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
SKUDA = torch.ops.skuda
LED = [name for name in NAMES if OPS[name]._rows]
INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()


def comparable_calls(name, rng, overload="default"):
    """Calls in a random order whose results hold no NaN: opcheck compares values."""
    cases = REGISTRY[name].cases
    for i in rng.permutation(len(cases)):
        call = call_of(name, Case(cases[i].problem), rng, overload)
        if not any(bool(result.isnan().any()) for result in call()):
            yield call


def checked(op, arguments, fields):
    given = [arguments.get(argument.name) for argument in op._schema.arguments if not argument.kwarg_only]
    torch.library.opcheck(op, tuple(given), fields)


@pytest.mark.parametrize(("name", "overload"), [(name, overload) for name in NAMES for overload in overloads(name)])
def test_opcheck(name, overload):
    rng = fresh(name, overload)
    for call in islice(comparable_calls(name, rng, overload), 2):
        checked(call.op, call.tensors, call.fields)


# --- symbolic sizes --------------------------------------------------------------------------------------------------

W, SCALE, NORM = torch.arange(-64, 64, dtype=torch.int8).reshape(8, 16), torch.linspace(0.1, 1, 8), torch.ones(16)
FUNCTIONS = {
    "linear": lambda x: SKUDA.quantized_linear(x, W, SCALE, bias=SCALE, epilogue="bias_gelu"),
    "dynamic_range": lambda x: SKUDA.dynamic_range(x, output_element="s8"),
    "dynamic_range by tensor": lambda x: SKUDA.dynamic_range(x, scope="tensor", output_element="s8"),
    "dynamic_range by group": lambda x: SKUDA.dynamic_range(x, scope="group", group_size=4, output_element="s8"),
    "rms_norm": lambda x: SKUDA.rms_norm_quantize(x, x, NORM, eps=1e-5, output_element="s8"),
    "layer_norm": lambda x: SKUDA.layer_norm_quantize(x, None, NORM, NORM, eps=1e-5, output_element="u8"),
    "gated": lambda x: SKUDA.silu_mul_quantize(x, 2 * x, output_element="s8", has_product=True),
    "fused gated": lambda x: SKUDA.gelu_mul_quantize(gate_up=x, output_element="s8"),
    "per tensor": lambda x: SKUDA.quantize_per_tensor(x, 0.1, 3, output_element="s8"),
    "fake per tensor": lambda x: SKUDA.fake_quantize(x, 0.1, 3, q_min=-8, q_max=7),
    "packed per group": lambda x: SKUDA.quantize_per_group(
        x, SCALE[0].expand(*x.shape[:-1], 4), W[0, 0].int().expand(*x.shape[:-1], 4), group_size=4, output_element="s4"
    ),
    "argmax": SKUDA.argmax,
    "log_softmax_at": lambda x: SKUDA.log_softmax_at(x, SKUDA.argmax(x)[..., None], SCALE[0].expand(x.shape[:-1])),
    "sample": lambda x: SKUDA.sample(x, *_parameters(x), top_k=torch.full(x.shape[:-1], 3, dtype=torch.int32)),
    "two": lambda x: SKUDA.scaled_linear(*_range_and_weight(x), weight_scale=SCALE, output_element="bf16"),
}


def _parameters(x):
    """Temperature, seed, sequence and position of every row."""
    zero = torch.zeros(x.shape[:-1], dtype=torch.int64)
    return torch.ones(x.shape[:-1]), zero, zero + 1, zero + 2


def _range_and_weight(x):
    codes, scale, _ = SKUDA.dynamic_range(x, q_min=-127, q_max=127, output_element="s8")
    return codes, W, scale


def graphs(function, shapes):
    """Compile for dynamic sizes, compare with eager on every shape, and return the number of graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    rng = fresh(shapes)
    for shape in shapes:
        x = torch.from_numpy(rng.standard_normal(shape, "float32"))
        got, want = results(compiled(x)), results(function(x))
        assert all_same(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    return counter.frame_count


EVERY = [(batch, length, 16) for batch in (1, 2, 17) for length in (1, 5, 33)]


@cache
def graphs_of_torch():
    """How many graphs torch makes of an op of its own for the same shapes: it compiles anew for a size of 1."""
    return graphs(lambda x: x.abs(), EVERY)


@pytest.mark.parametrize("name", sampled(FUNCTIONS, 8))
def test_no_graph_break_and_few_graphs(name):
    function = FUNCTIONS[name]
    assert graphs(function, [(rows, 16) for rows in (1, 2, 3, 17, 64)]) <= 2
    torch._dynamo.reset()
    assert graphs(function, [shape for shape in EVERY if 1 not in shape]) == 1
    torch._dynamo.reset()
    assert graphs(function, EVERY) <= graphs_of_torch()


def test_one_graph_packs_and_unpacks_weights_of_any_number_of_rows():
    def function(x):
        of_row = [torch.full((len(x), 1), n, dtype=torch.int32) for n in (-9, 3)]
        packed, misfits = SKUDA.pack_weight((4 * x).clamp(-8, 7).to(torch.int8), *of_row, group_size=32)
        return packed, misfits, SKUDA.unpack_weight(packed, n=len(x), k=x.shape[1], group_size=32)

    assert graphs(function, [(rows, 16) for rows in (17, 32, 33, 90)]) == 1  # one unit of rows has a graph of its own


@pytest.mark.parametrize("name", sampled(FUNCTIONS, 5, key="export"))
def test_export_with_symbolic_sizes(name):
    class Model(torch.nn.Module):
        def forward(self, x):
            return results(FUNCTIONS[name](x))

    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(Model(), (torch.randn(3, 5, 16),), dynamic_shapes={"x": dims})
    for shape in ((2, 7, 16), (9, 3, 16)):
        x = torch.randn(shape)
        assert all_same(program.module()(x), Model()(x))


def test_numbers_may_change_between_calls():
    def function(x, scale, zero_point, q_max, group_size, eps):
        return (
            SKUDA.quantize_per_tensor.number(x, scale, zero_point, output_element="s8"),
            *SKUDA.dynamic_range(x, q_min=-q_max, q_max=q_max, output_element="s8"),
            *SKUDA.dynamic_range(x, scope="group", group_size=group_size, output_element="s8"),
            *SKUDA.rms_norm_quantize(x, eps=eps, has_normalized=q_max > 100, output_element="s8"),
        )

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for numbers in ((0.1, 0, 127, 4, 1e-5), (0.2, 3, 7, 8, 0.5), (1.0, -3, 15, 2, 0.25)):
        x = torch.randn(3, 16)
        assert all_same(compiled(x, *numbers), function(x, *numbers))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: SKUDA.quantized_linear(x, W[:, :8], SCALE), "weight_q must be an array of shape"),
        (lambda x: SKUDA.quantized_linear(x, W, SCALE, output_element="f8"), "output_element must be one of"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_bad_call_is_refused_while_it_is_compiled(function, message, dynamic):
    with pytest.raises(TorchRuntimeError, match=message):
        torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")(torch.randn(3, 16))


def test_gradients_are_not_lost_in_a_compiled_graph():
    x = torch.randn(3, 16, requires_grad=True)
    for function, message in ((FUNCTIONS["linear"], "activation"), (lambda x: SKUDA.smooth(x, NORM), "input")):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        with pytest.raises(TorchRuntimeError, match=f"{message}.*be detached"):
            compiled(x)
        with torch.no_grad():
            assert same(compiled(x), function(x))


# --- Inductor --------------------------------------------------------------------------------------------------------


@INDUCTOR
def test_inductor_changes_no_bits_of_an_op_between_fused_code():
    """The code around may be fused in its own way; from what it passes on, the op makes what it makes in eager mode."""

    def block(x, gain):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain
        z = SKUDA.quantized_linear(y, W, SCALE)
        return y, z, torch.nn.functional.silu(z) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for rows in (3, 5, 0, 1):
        x = torch.randn(rows, 16)
        y, z, after = compiled(x, NORM * 1.5)
        assert same(z, SKUDA.quantized_linear(y, W, SCALE))
        torch.testing.assert_close(after, torch.nn.functional.silu(z) * 2)


@INDUCTOR
def test_inductor_may_lay_an_input_out_in_its_own_way():
    def transposed(x):
        y = (x.mT + 1).relu()
        return (
            SKUDA.quantized_linear(y, W, SCALE),
            SKUDA.smooth(y, NORM),
            *SKUDA.dynamic_range(y, output_element="s8"),
            SKUDA.quantize_per_tensor(y, 0.1, 0, output_element="s8"),
        )

    compiled = torch.compile(transposed, fullgraph=True)
    for shape in ((16, 4), (3, 16, 4)):
        x = torch.randn(shape)
        got, want = compiled(x), transposed(x)
        assert all_same(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
        assert all(t.is_contiguous() for t in got)


@INDUCTOR
@pytest.mark.parametrize("name", sampled(LED, 3))
def test_inductor_gives_the_bits_of_eager(name):
    rng = fresh(name)
    call = next(comparable_calls(name, rng))
    compiled = torch.compile(lambda tensors: results(call.op(**tensors, **call.fields)), fullgraph=True)
    assert all_same(compiled(call.tensors), call())


@INDUCTOR
@torch._inductor.config.patch(fx_graph_cache=False)
@torch._functorch.config.patch(enable_autograd_cache=False)
@pytest.mark.parametrize("ours", [True, False], ids=["direct", "as torch does"])
def test_code_of_inductor_calls_launches(ours, monkeypatch):
    """Also where torch has changed what this needs of it, through the dispatcher."""
    if not ours:
        inductor = pytest.importorskip("skuda.torch.ops.inductor")
        monkeypatch.setattr(inductor, "lower", raising)
        for name in ("quantized_linear", "dynamic_range"):
            inductor.lowerings.pop(getattr(SKUDA, name).default, None)
    x = torch.randn(4, 32)
    weight, scale, _ = SKUDA.dynamic_range(
        torch.randn(16, 32), scope="token", q_min=-127, q_max=127, output_element="s8"
    )

    def function(x):
        y = SKUDA.quantized_linear(2 * x, weight, scale, epilogue=None)
        return SKUDA.dynamic_range(y + 1, scope="token", q_min=-127, q_max=127, output_element="s8")

    with torch.no_grad():
        made, (code, *_) = run_and_get_code(torch.compile(function, fullgraph=True), x)
        assert ("= site('dynamic_range'" in code) is ours
        assert ("torch.ops.skuda.dynamic_range" in code) is not ours
        assert all_same(made, function(x))
        compiled = torch.compile(function, fullgraph=True)
        compiled(x)
        with torch.profiler.profile() as profile:
            compiled(x)
        assert {"skuda::quantized_linear", "skuda::dynamic_range"} <= {event.key for event in profile.key_averages()}


def raising(name):
    raise AttributeError(name)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_what_an_op_writes_in_place_is_the_callers_own(backend):
    name = "rope_quantize_append"
    rng, op = fresh(name, backend), getattr(torch.ops.skuda, name)
    case = next(case for case in REGISTRY[name].cases if case.problem.tokens > 30 and case.problem.kv_heads > 1)
    call = call_of(name, case, rng)
    want = {key: call.tensors[key].clone() for key in OPS[name].state}
    codes, scale = op(**call.tensors | want, **call.fields)

    def used(tensors):
        codes, scale = op(**tensors, **call.fields)
        return codes.float() * scale[..., None], tensors["k_codes"].sum()

    function = used if backend is None else torch.compile(used, fullgraph=True, backend=backend)
    got = dict(call.tensors)
    if backend is None:
        got |= {key: got[key].transpose(0, 1).contiguous().transpose(0, 1) for key in want}
        assert not got["k_codes"].is_contiguous()
    product, total = function(got)
    assert all_same((product, total), (codes.float() * scale[..., None], want["k_codes"].sum()))
    for key, tensor in want.items():
        assert same(got[key], tensor), key
        assert not same(call.tensors[key], tensor) or backend is not None
