"""`layer.weight` of an int8 layer reads as the weight that its codes stand for, and cannot be changed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from support import fresh
from tensors import GatedMLP, assert_same, copies, normal, same
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch.nn.functional import linear

from skuda.dispatch.shard import Shards, on_ranks
from skuda.registry.errors import InvalidProblem
from skuda.torch import (
    CodesLinear,
    ColumnLinear,
    Dynamic,
    DynamicLinear,
    RowLinear,
    SmoothedLinear,
    StaticLinear,
    fuse_,
    quantize_,
)
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.int4 import int4_linear
from skuda.torch.linear.dequantized_weight import DequantizedWeight

N, K = 6, 10
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALE = torch.tensor([0.02])


def dynamic(rng, dtype=torch.float32):
    return DynamicLinear(*quantized_weight(normal(rng, N, K)), normal(rng, N), dtype=dtype)


def static(rng, dtype=torch.float32):
    smooth = torch.from_numpy(rng.uniform(0.5, 2, K).astype("float32"))
    codes = quantized_weight(normal(rng, N, K))
    return StaticLinear(*codes, normal(rng, N), input_scale=SCALE, smooth=smooth, dtype=dtype)


def smoothed(rng, dtype=torch.float32):
    smooth = torch.from_numpy(rng.uniform(0.5, 2, K).astype("float32"))
    return SmoothedLinear(*quantized_weight(normal(rng, N, K)), normal(rng, N), smooth=smooth, dtype=dtype)


def codes(rng, dtype=torch.float32):
    return CodesLinear(*quantized_weight(normal(rng, N, K)), normal(rng, N), input_scale=SCALE, dtype=dtype)


def part(rng, dtype=torch.float32):
    mlp = GatedMLP(K, N)
    quantize_(mlp, Dynamic())
    fuse_(mlp)
    made = mlp.to(dtype).up_proj
    assert type(made).__name__ == "Part"
    made.joined.weight_q.copy_(torch.from_numpy(rng.integers(-127, 128, (2 * N, K), "int8")))
    return made


MADE = (dynamic, smoothed, static, codes, part)


def meant(layer):
    """Return the weight in f64, from the buffers."""
    smooth = getattr(layer, "smooth", None)
    return layer.weight_q.double() * layer.weight_scale.double() / (1 if smooth is None else smooth.double())


def drawn(make=dynamic, dtype=torch.float32):
    return make(fresh(make.__name__, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MADE)
def test_it_is_the_weight_that_multiplies_the_input(make, dtype):
    layer = drawn(make, dtype)
    weight = layer.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((N, K), dtype, "cpu")
    assert (weight.ndim, weight.size(0), weight.requires_grad, weight.is_contiguous()) == (2, N, False, True)
    exact = meant(layer)
    error = (weight.double() - exact).abs() / exact.abs().clamp_min(1e-9)
    assert error.max() <= torch.finfo(dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
    if make not in (smoothed, static):
        assert_same(
            weight.clone(),
            (layer.weight_q * layer.weight_scale.to(torch.promote_types(dtype, torch.float32))).to(dtype),
        )


def test_nothing_is_computed_until_values_are_read(monkeypatch):
    layer, made = drawn(), []
    monkeypatch.setattr(
        "skuda.torch.linear.dequantized_weight.weight_of", lambda *_, **__: made.append(1) or torch.zeros(N, K)
    )
    weight = layer.weight
    _ = weight.shape, weight.dtype, weight.device, weight.ndim, weight.size(), weight.stride(), weight.numel()
    _ = weight.requires_grad, weight.is_cuda, weight.is_meta, weight.detach(), weight.data
    _ = weight.float(), weight.to("cpu"), weight.cpu(), weight.to("meta")
    assert not made
    _ = weight + 1
    assert made == [1]


READS = {
    "arithmetic": lambda w: w + 1,
    "a matrix product": lambda w: torch.ones(2, K, dtype=w.dtype) @ w.T,
    "linear": lambda w: linear(torch.ones(3, K, dtype=w.dtype), w),
    "a cast": lambda w: w.to(torch.float64),
    "a clone": lambda w: w.clone(),
    "a row": lambda w: w[1].clone(),
    "rows": lambda w: torch.stack(list(w)),
    "a view": lambda w: w.view(-1).sum(),
    "another dtype's view": lambda w: w.view(torch.int32).sum(),
    "an array": lambda w: torch.from_numpy(np.asarray(w)),
    "numbers": lambda w: torch.tensor(w.tolist()),
    "a copy": copy.deepcopy,
    "a pickle": lambda w: pickle.loads(pickle.dumps(w)),  # noqa: S301  our own
    "text": lambda w: torch.tensor([ord(letter) for letter in repr(w)]),
    "a capsule": torch.from_dlpack,
    "copy_ of another": lambda w: torch.zeros(N, K).copy_(w),
    "vmap": torch.func.vmap(lambda row: row.sum()),
    "meta": lambda w: torch.tensor(w.to("meta").shape),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("recorded", [False, True])
def test_reading_gives_what_an_ordinary_tensor_gives(read, recorded):
    layer = drawn()
    with torch.set_grad_enabled(recorded):
        found, want = read(layer.weight), read(layer.weight.clone())
    assert type(found) is torch.Tensor
    assert_same(found, want)
    with torch.inference_mode():
        assert_same(read(layer.weight), want)


def _set(name, value):
    return lambda w: setattr(w, name, value)


WRITES = {
    "zero_": lambda w: w.zero_(),
    "copy_": lambda w: w.copy_(torch.zeros(N, K)),
    "a row's": lambda w: w[0].zero_(),
    "setitem": lambda w: w.__setitem__(0, 1),
    "a transposed": lambda w: w.T.mul_(2),
    "a chunk's": lambda w: w.chunk(2)[1].add_(1),
    "data's": lambda w: w.data.add_(1),
    "data": _set("data", torch.zeros(N, K)),
    "out": lambda w: torch.add(torch.zeros(N, K), 1, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "init": nn.init.zeros_,
    "set_": lambda w: w.set_(torch.zeros(N, K)),
    "requires_grad_": lambda w: w.requires_grad_(),
    "requires_grad": _set("requires_grad", 1),
    "parameter": nn.Parameter,
    "share_memory_": lambda w: w.share_memory_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("make", [dynamic, part])
def test_writes_are_refused(write, make):
    layer = drawn(make)
    before = layer.weight_q.clone()
    with torch.no_grad(), pytest.raises(InvalidProblem, match=f"^{type(layer).__name__}: weight must"):
        write(layer.weight)
    assert_same(layer.weight_q, before)


@pytest.mark.parametrize("make", MADE)
def test_another_weight_is_refused(make):
    layer = drawn(make)
    before = layer.weight_q.clone()
    for value in (torch.zeros(N, K), nn.Parameter(torch.zeros(N, K)), torch.zeros(2, 2, dtype=torch.int8), None, 3):
        for name in ("weight", "weight_q"):
            with pytest.raises(InvalidProblem, match=rf"{name} must not be changed.*dequantize_\(model\)"):
                setattr(layer, name, value)
    assert_same(layer.weight_q, before)


def test_codes_are_taken_under_both_names():
    layer, other, third = (drawn() for _ in range(3))
    for name, given in (("weight", other), ("weight_q", third)):
        setattr(layer, name, given.weight_q)  # as `load_state_dict(assign=True)` and transformers do
        assert_same(layer.weight_q, given.weight_q)
    layer.weight = layer.weight  # as peft does
    assert_same(layer.weight_q, third.weight_q)


@pytest.mark.parametrize("make", MADE)
def test_stored_names_are_those_of_the_codes(make):
    layer = drawn(make)
    assert_same(layer.state_dict()["weight"], layer.weight_q)
    assert not any(isinstance(tensor, DequantizedWeight) for tensor in layer.state_dict().values())
    if make is not part:
        assert dict(layer.named_buffers())["weight"] is layer.weight_q
        for again in copies(layer):
            assert again.weight.dtype is layer.weight.dtype
            assert_same(again.weight.clone(), layer.weight.clone())


def test_the_dtype_is_that_of_the_float_layer_and_follows_casts():
    for dtype in DTYPES[:3]:
        assert DynamicLinear.from_linear(nn.Linear(K, N).to(dtype)).weight.dtype is dtype
    one = torch.ones(N, dtype=torch.bfloat16)
    given = torch.zeros(N, K, dtype=torch.int8), torch.ones(N)
    assert DynamicLinear(*given).weight.dtype is torch.float32
    assert DynamicLinear(given[0], one).weight.dtype is torch.bfloat16
    assert DynamicLinear(*given, one).weight.dtype is torch.bfloat16
    layer = drawn()
    before = layer.weight_q
    for dtype in DTYPES:
        assert layer.to(dtype).weight.dtype is dtype
        assert_same(layer.weight_q, before)
    assert layer.to("meta").weight.is_meta
    assert layer.to_empty(device="cpu").weight.dtype is DTYPES[-1]


class Reader(nn.Module):
    """A model that casts its input to its weight's dtype, as models of transformers do, and may read the values."""

    def __init__(self, layer, *, values):
        super().__init__()
        self.layer, self.values = layer, values

    def forward(self, x):
        x = x.to(self.layer.weight.device, self.layer.weight.dtype)
        return linear(x, self.layer.weight) * self.layer.weight.shape[0] if self.values else self.layer(x)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_code_reads_it(values, dtype):
    rng = fresh(values, dtype)
    model, x = Reader(dynamic(rng, dtype), values=values), normal(rng, 3, K)
    counted = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        assert same(torch.compile(model, fullgraph=True, backend=counted)(x), model(x))
        assert same(torch.export.export(model, (x,)).module()(x), model(x))
    assert counted.frame_count == 1


def test_compiled_code_that_reads_only_the_dtype_does_not_compute_the_values():
    graphs = EagerAndRecordGraphs()
    model = Reader(drawn(), values=False)
    with torch.no_grad():
        backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=graphs)
        torch.compile(model, fullgraph=True, backend=backend)(torch.ones(3, K))
    targets = [str(node.target) for node in graphs.graphs[0].graph.nodes]
    assert any("quantized_linear" in target for target in targets)
    assert not any("dequantize" in target for target in targets)


def test_compiled_code_takes_it_as_an_argument():
    for make in (dynamic, static):
        weight = drawn(make).weight
        for backend in ("eager", "aot_eager"):
            compiled = torch.compile(lambda w: w @ w[:2].T, backend=backend, fullgraph=True)
            assert_same(compiled(weight), weight @ weight[:2].T)


def test_a_parametrization_of_it_is_refused():
    layer = drawn()
    with pytest.raises(InvalidProblem, match="weight must not be changed"):
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())


def test_what_moves_layers_puts_codes_back():
    """Packages such as accelerate write what they read from a layer, moved or cast, into its buffers."""
    rng = fresh()
    layer, x = dynamic(rng, torch.bfloat16), normal(rng, 3, K)
    with torch.no_grad():
        want, state = layer(x), copy.deepcopy(layer.state_dict())
        for moved in (layer.weight, layer.weight.to("cpu"), layer.weight_q.to(layer.weight.dtype)):
            for use in (lambda: layer(x), layer.state_dict, layer.cpu, lambda: layer.weight + 1):
                layer._buffers["weight"] = moved
                use()
                assert same(layer(x), want)
                assert all(same(value, state[name]) for name, value in layer.state_dict().items())
        layer._buffers["weight"] = layer.weight.clone()
        with pytest.raises(InvalidProblem, match="weight must be codes, int8"):
            layer(x)


@pytest.mark.parametrize("kind", ["dynamic", "static", "packed"])
def test_a_ranks_part_reads_as_its_part_of_the_weight(kind):
    rng = fresh(kind)
    if kind == "packed":
        layer = int4_linear(nn.Linear(256, 130), int(rng.choice((0, 32, 64, 128))))
    else:
        layer = (dynamic if kind == "dynamic" else static)(rng, torch.bfloat16)
    n, k = layer.weight.shape
    ways = [{"axis": "n"}, {"axis": "k"}, *([{"axis": "n", "input": "columns"}] if kind == "packed" else [])]

    def work(group):
        for way in ways:
            shards = Shards(count=group.count, **way)
            made = (ColumnLinear if shards.axis == "n" else RowLinear)(layer, group, shards)
            own = layer.weight.split(made.shards.parts(n, k), "nk".index(shards.axis))[group.rank]
            assert_same(made.weight.clone(), own.clone())
            assert made.explain().chosen
            assert same(made.gathered().weight.clone(), layer.weight.clone())
            with pytest.raises(InvalidProblem, match="Linear: weight must not be changed"):
                made.weight.zero_()

    on_ranks(2, work)
