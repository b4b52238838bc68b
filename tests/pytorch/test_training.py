"""Layers for training: results, gradients, cached codes, and the features of torch that they work with."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import fresh, sampled
from tensors import assert_same, normal
from torch import nn
from torch.utils.checkpoint import checkpoint

from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    DynamicLinear,
    FakeQuant,
    FakeQuantLinear,
    Mixed,
    MixedLinear,
    StaticLinear,
    observe,
)
from skuda.torch.linear.autograd import dequantized, row_codes

LOW = (torch.float16, torch.bfloat16)
TRAINED = (*LOW, torch.float32)
FAKES = tuple((activation, learn) for activation in ("token", "tensor", None) for learn in (False, True))
WAYS = (*(FakeQuant(*fake) for fake in FAKES), Mixed())
K, N = 24, 7


class Frozen:
    """The base of LoRA, converted as the other ways are; only its input has a gradient."""

    def convert(self, name, layer):
        return DynamicLinear.from_linear(layer)

    def __str__(self):
        return "Frozen()"


STEPS = (*WAYS, Frozen())


def linear(rng, k=K, n=N, *, bias=True, dtype=torch.float32):
    made = nn.Linear(k, n, bias, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(normal(rng, *parameter.shape))
    return made


def converted(way, layer, *inputs):
    """Return the layer that a way makes, which has observed some inputs."""
    made = way.convert("layer", layer)
    with observe(made), torch.no_grad():
        for x in inputs:
            made(x)
    return made


def step(model, *inputs):
    """Return the outputs of a model, and the gradients that they accumulate in inputs and parameters."""
    model.zero_grad()
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = [model(x) for x in inputs]
    for y in outputs:
        y.float().square().sum().backward()
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def same_step(got, want):
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.dtype == want[name].dtype, name
        assert torch.equal(value, want[name]), name


# --- fake quantization -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("dtype", TRAINED)
def test_the_int8_layer_has_the_weight_that_was_trained(dtype, learn):
    rng = fresh(dtype, learn)
    layer = FakeQuantLinear(linear(rng, dtype=dtype), learn_scale=learn)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(normal(rng, 3, K, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    trained = layer.fake_quantized_weight()
    int8 = layer.to_int8()
    found = dequantized(int8.weight_q, int8.weight_scale.view(-1), dtype)
    # Where a scale became negative, dequantizing code 0 gives -0 and rounding gives +0.
    assert found.dtype is trained.dtype
    assert torch.equal(found, trained.detach())
    if not learn:
        also = DynamicLinear.from_linear(layer)
        assert_same(also.weight_q, int8.weight_q)
        assert_same(also.weight_scale, int8.weight_scale)


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("fake", [fake for fake in FAKES if fake[0]])
def test_the_int8_output_is_within_the_stated_bound(fake, dtype):
    rng = fresh(fake, dtype)
    x = normal(rng, 50, K, dtype=dtype)
    layer = converted(FakeQuant(*fake), linear(rng, dtype=dtype), x).eval()
    with torch.no_grad():
        float_y, int8 = layer(x), layer.to_int8()
        assert type(int8) is (DynamicLinear if fake[0] == "token" else StaticLinear)
        int8_y = int8(x)
        w = layer.fake_quantized_weight()
        captured = {}
        handle = nn.functional.linear
        try:
            nn.functional.linear = lambda x, w, b: captured.setdefault("x", x) is None or handle(x, w, b)
            layer(x)
        finally:
            nn.functional.linear = handle
    size = captured["x"].double().abs() @ w.double().abs().t() + layer.bias.detach().double().abs()
    unit, unit32 = (torch.finfo(kind).eps / 2 for kind in (dtype, torch.float32))
    assert ((float_y.double() - int8_y.double()).abs() <= ((K + 8) * unit32 + 5 * unit) * size).all()
    assert int8_y.dtype is dtype


@pytest.mark.parametrize("dtype", TRAINED)
def test_fake_quantization_has_the_gradients_of_a_float_layer_of_rounded_values(dtype):
    rng = fresh(dtype)
    layer = FakeQuantLinear(linear(rng, dtype=dtype))
    x = normal(rng, 2, 3, K, dtype=dtype)
    got = step(layer, x)
    rows, scales, _ = torch.ops.skuda.dynamic_range(x, q_min=-127, q_max=127, output_element="s8")
    float_layer = nn.Linear(K, N, dtype=dtype)
    float_layer.load_state_dict({"weight": layer.fake_quantized_weight().detach(), "bias": layer.bias.detach()})
    same_step(got, step(float_layer, (rows * scales[..., None]).to(dtype)))


def test_scales_are_observed_in_float_and_then_fixed():
    rng = fresh()
    layer = FakeQuant("tensor").convert("layer", linear(rng))
    x, larger = normal(rng, 3, K), 10 * normal(rng, 4, K)
    with pytest.raises(InvalidProblem, match=r"input_scale must be set before.*observe"):
        layer(x)
    with observe(layer):
        assert_same(layer(x), nn.functional.linear(x, layer.fake_quantized_weight(), layer.bias))
        layer(larger)
        layer(torch.empty(0, K))
    assert_same(layer.input_scale, (larger.abs().max() / 127).reshape(1))
    layer(100 * larger)
    assert_same(layer.input_scale, (larger.abs().max() / 127).reshape(1))
    fresh_layer = FakeQuant("tensor").convert("layer", linear(rng))
    fresh_layer.load_state_dict(layer.state_dict())
    assert_same(fresh_layer(x), layer(x))


def test_a_range_of_zero_is_no_scale():
    layer = converted(FakeQuant("tensor"), linear(fresh()), torch.zeros(2, K))
    with pytest.raises(InvalidProblem, match="input_scale must be set before"):
        layer(torch.ones(2, K))


def test_without_rounded_inputs_there_is_no_int8_layer():
    with pytest.raises(InvalidProblem, match="activation must be 'token' or 'tensor'"):
        FakeQuant(None).convert("layer", linear(fresh())).to_int8()


# --- mixed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TRAINED)
@pytest.mark.parametrize("bias", [True, False])
def test_mixed_has_the_bits_of_the_int8_layer_and_gradients_by_ordinary_products(dtype, bias):
    rng = fresh(dtype, bias)
    master = linear(rng, bias=bias)
    layer, x = MixedLinear(master), normal(rng, 2, 5, K, dtype=dtype)
    got = step(layer, x)
    int8 = DynamicLinear.from_linear(master)
    y = int8(x)
    assert_same(layer.to_int8()(x), y)
    assert_same(got["output 0"], y)
    grad = (2 * y.float()).to(dtype)
    assert_same(got["input 0"], grad @ dequantized(int8.weight_q, int8.weight_scale.view(-1), dtype))
    assert_same(got["weight"], (grad.view(-1, N).t() @ x.view(-1, K)).float())
    if bias:
        assert_same(got["bias"], grad.view(-1, N).sum(0).float())


def gathered(weight, other):
    """Fill a parameter as `fully_shard` does after it has gathered it."""
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(other)


def swapped(weight, other):
    """Put averaged weights in, as is done for an evaluation."""
    weight.data, other.data = other.data, weight.data


CHANGES = {
    "in place": lambda weight, other: weight.copy_(other),
    "through data": lambda weight, other: weight.data.copy_(other),
    "data": lambda weight, other: setattr(weight, "data", other),
    "swapped": swapped,
    "gathered": gathered,
    "foreach": lambda weight, other: torch._foreach_copy_([weight], [other]),
    "foreach through data": lambda weight, other: torch._foreach_lerp_([weight.data], [other], 1.0),
    "by numpy": lambda weight, other: np.copyto(weight.numpy(), other.numpy()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_mixed_notices_every_change_of_its_weight(change):
    rng = fresh(change)
    layer, x, other = MixedLinear(linear(rng)), normal(rng, 3, K), normal(rng, N, K)
    before, wanted = layer(x).detach(), MixedLinear(nn.Linear(K, N))
    wanted.load_state_dict({"weight": other, "bias": layer.bias})
    with torch.no_grad():
        CHANGES[change](layer.weight, other)
    assert not torch.equal(layer(x), before)
    same_step(step(layer, x), step(wanted, x))


@pytest.mark.parametrize("way", ["replaced", "loaded", "assigned", "cast", "copied", "pickled"])
def test_mixed_has_the_weight_that_it_holds(way):
    rng = fresh(way)
    layer, x, other = MixedLinear(linear(rng)), normal(rng, 3, K), normal(rng, N, K)
    layer(x)
    if way == "replaced":
        layer.weight = nn.Parameter(other)
    elif way in ("loaded", "assigned"):
        layer.load_state_dict({"weight": other, "bias": layer.bias}, assign=way == "assigned")
    elif way == "cast":
        layer.bfloat16()
    else:
        layer = copy.deepcopy(layer) if way == "copied" else pickle.loads(pickle.dumps(layer))  # noqa: S301
        layer.weight.data.copy_(other)
    assert_same(layer(x).detach(), DynamicLinear.from_linear(layer)(x).detach())


def test_mixed_trains_after_inference_mode():
    rng = fresh()
    layer, x = MixedLinear(linear(rng)), normal(rng, 3, K)
    with torch.inference_mode():
        y = layer(x)
    same_step(step(layer, x), step(MixedLinear(layer), x))
    assert_same(layer(x).detach(), y.clone())


VALUES = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("value", sampled(VALUES))
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("way", sampled(WAYS, 4), ids=str)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_what_is_not_finite_shows_in_the_result(way, compiles, value):
    rng = fresh(way, compiles, value)
    x = normal(rng, 4, K)
    layer = converted(way, linear(rng), x)
    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
    finite = step(run, x)["output 0"]
    bad = x.clone()
    bad[2, 3] = value
    y = run(bad.requires_grad_())
    if getattr(way, "activation", "token") is not None:  # without rounding, infinities are those of a float layer
        assert y[2].isnan().all()
        assert torch.equal(torch.cat([y[:2], y[3:]]), torch.cat([finite[:2], finite[3:]]))
    y.square().mean().backward()
    assert not layer.weight.grad.isfinite().any()
    assert not bad.grad.isfinite().all()
    with torch.no_grad():
        layer.weight[1, 2] = value
        found = run(x).isnan()
    assert found[:, 1].all()
    assert found.sum() == 4


def test_rows_without_elements_have_the_scale_1():
    assert row_codes(torch.empty(3, 0))[1].tolist() == [1, 1, 1]


# --- what both work with ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_layers_share_the_parameters_of_what_they_replace(way):
    plain = linear(fresh(way)).eval()
    made = way.convert("layer", plain)
    assert isinstance(made, nn.Linear)
    assert made.weight is plain.weight
    assert made.bias is plain.bias
    assert not made.training
    assert {"weight", "bias"} <= set(made.state_dict())
    if not getattr(way, "learn_scale", False) and getattr(way, "activation", None) != "tensor":
        assert set(made.state_dict()) == {"weight", "bias"}
        nn.Linear(K, N).load_state_dict(made.state_dict())
        made.load_state_dict(nn.Linear(K, N).state_dict())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_functional_calls_have_the_same_gradients(way):
    rng = fresh(way)
    x = normal(rng, 5, K)
    layer = converted(way, linear(rng), x)
    wanted = step(layer, x)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    for _ in range(2):
        found = torch.func.grad(loss)(parameters)
        for name in parameters:
            assert_same(found[name], wanted[name])
    with torch.no_grad():
        double = torch.func.functional_call(layer, {"weight": 2 * layer.weight, "bias": 2 * layer.bias}, (x,))
        if not getattr(way, "learn_scale", False):
            assert_same(double, 2 * layer(x))


class Twice(nn.Module):
    """Two layers with a nonlinearity between, each of them optionally computed again in the backward pass."""

    def __init__(self, way, rng, dtype=torch.float32):
        super().__init__()
        x = normal(rng, 30, K, dtype=dtype)
        self.first = converted(way, linear(rng, K, K, dtype=dtype), x)
        self.second = converted(way, linear(rng, dtype=dtype), nn.functional.silu(self.first(x)))
        self.again = None

    def part(self, x):
        return self.second(nn.functional.silu(self.first(x)))

    def forward(self, x):
        return self.part(x) if self.again is None else checkpoint(self.part, x, use_reentrant=self.again)


@pytest.mark.parametrize("way", sampled(STEPS, 2, each=type), ids=str)
@pytest.mark.parametrize("low", sampled([None, *LOW], 2))
def test_checkpoints_with_and_without_autocast(way, low):
    rng = fresh(str(way), low)
    model, x = Twice(way, rng), normal(rng, 5, K)

    def run():
        with torch.autocast("cpu", low, enabled=low is not None):
            return step(model, x)

    wanted = run()
    assert wanted["output 0"].dtype is (low or torch.float32)
    assert {value.dtype for name, value in wanted.items() if name != "output 0"} == {torch.float32}
    for model.again in (True, False):
        same_step(run(), wanted)


@pytest.mark.parametrize(
    ("way", "low"),
    sampled([pytest.param(way, low) for way in STEPS for low in (None, torch.bfloat16)], each=lambda way, _: type(way)),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_a_compiled_step_has_no_graph_break_and_the_same_bits(way, low):
    rng = fresh(str(way), low)
    torch.compiler.reset()
    model, inputs = Twice(way, rng), [normal(rng, rows, K) for rows in (4, 9)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=low is not None):
        wanted = step(model, *inputs)
        got = step(compiled, *inputs)
    same_step({name.removeprefix("_orig_mod."): value for name, value in got.items()}, wanted)


def on_two_processes(worker, saved, path):
    """Return what each of two processes found out about what was saved."""
    torch.save(saved, path)
    command = [sys.executable, Path(__file__).with_name(worker)]
    processes = [subprocess.Popen([*command, str(rank), "2", path]) for rank in range(2)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(f"{path}.{rank}") for rank in range(2)]


def stack(rng):
    """Return a model with a layer of every way, and a norm after each."""
    layers = [converted(way, linear(rng, K, K), normal(rng, 30, K)) for way in WAYS]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.RMSNorm(K))))


def test_distributed_gradients_are_the_mean_of_those_of_each_process(tmp_path):
    rng = fresh()
    model, parts = stack(rng), [normal(rng, 4, K), normal(rng, 4, K)]
    steps = [step(model, part) for part in parts]
    for found in on_two_processes("ddp_worker.py", {"model": model, "parts": parts}, tmp_path / "model"):
        for (name, _), grad in zip(model.named_parameters(), found, strict=True):
            assert_same(grad, steps[0][name] / 2 + steps[1][name] / 2)


def test_sharded_training_has_the_results_of_one_process(tmp_path):
    rng = fresh()
    model, batches = stack(rng), [[normal(rng, 4, K), normal(rng, 4, K)] for _ in range(3)]
    given = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [[], []]
    for parts in batches:
        for rank, part in enumerate(parts):
            loss = model(part).square().mean()
            (loss / 2).backward()
            losses[rank].append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    found = on_two_processes("fsdp_worker.py", {"model": given, "batches": batches}, tmp_path / "model")
    for rank, (heard, weights) in enumerate(found):
        assert heard == losses[rank]
        for (name, parameter), weight in zip(model.named_parameters(), weights, strict=True):
            assert torch.equal(weight, parameter), name


def test_a_result_of_a_first_call_can_be_changed_in_place():
    """Torch refuses this for a view that an autograd function returns, as a first call once did."""
    rng = fresh()
    for way in STEPS:
        for rows in (3, 4):
            y = converted(way, linear(rng), normal(rng, 3, K))(normal(rng, 2, rows, K).requires_grad_())
            y += 1
            y.sum().backward()


@pytest.mark.parametrize("bias", sampled([True, False]))
@pytest.mark.parametrize("way", sampled(STEPS, each=type), ids=str)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # torch's export uses deprecated things
def test_no_exported_program_stops_a_gradient_silently(way, bias):
    rng = fresh(way, bias)
    x = normal(rng, 3, K)
    layer = converted(way, linear(rng, bias=bias), x)
    model = nn.Sequential(layer)
    if isinstance(layer, nn.Linear):
        with pytest.raises(InvalidProblem, match=r"layer must be exported under torch.no_grad\(\)"):
            torch.export.export(model, (x,))
    for recording in (False, True)[: 1 + (not isinstance(layer, nn.Linear))]:
        with torch.set_grad_enabled(recording):
            program = torch.export.export(model, (x,)).module()
        with torch.no_grad():
            assert_same(program(x), model(x))
        if getattr(way, "activation", "token") is not None:
            with pytest.raises(InvalidProblem, match="this op has no gradient"):
                program(x.clone().requires_grad_())
        if isinstance(layer, nn.Linear):
            with pytest.raises(InvalidProblem, match="this op has no gradient"):
                program(x)


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [FakeQuant(), Mixed()], ids=str)
def test_layers_that_cannot_be_served_are_refused_by_name(way):
    hooked = nn.Linear(3, 2)
    hooked.register_forward_hook(lambda *_: None)
    refused = {
        "be a torch.nn.Linear itself": torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        "be a torch.nn.Linear itself: a subclass": nn.modules.linear.NonDynamicallyQuantizableLinear(3, 2),
        "have none: remove them": hooked,
        "have a weight of float16, bfloat16 or float32; had torch.float64": nn.Linear(3, 2, dtype=torch.float64),
    }
    for rule, layer in refused.items():
        with pytest.raises(InvalidProblem, match=f"{type(way).__name__}: model.layer must {rule}"):
            way.convert("model.layer", layer)


def test_configs_check_their_values():
    meta = nn.Linear(3, 2, device="meta")
    assert FakeQuant().convert("layer", meta).weight is meta.weight
    with pytest.raises(InvalidProblem, match="layer must have data"):
        FakeQuant(learn_scale=True).convert("layer", meta)
    with pytest.raises(InvalidProblem, match="activation must be 'token', 'tensor' or None; had 'row'"):
        FakeQuant("row")
    with pytest.raises(InvalidProblem, match="learn_scale must be True or False; had 1"):
        FakeQuant(learn_scale=1)
