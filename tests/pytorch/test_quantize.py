"""`quantize_`: a layer becomes the right int8 layer, or stays unchanged with a reason."""

from __future__ import annotations

import copy
import io
import warnings
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from support import fresh
from tensors import GatedMLP, calibrated, copies
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.registry import InvalidProblem
from skuda.torch import Dynamic, DynamicLinear, FakeQuant, Mixed, SmoothStatic, fuse_, quantize_

DYNAMIC = Dynamic()
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def tensor(rng, *shape, dtype=torch.float32):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


class Model(nn.Module):
    """An embedding, a block and a head that can be tied."""

    def __init__(self, width=16, *, tied=False, bias=True):
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.block = nn.Sequential(nn.Linear(width, 2 * width, bias=bias), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.embed(tokens))))

    @property
    def dtype(self):
        return next(p.dtype for p in self.parameters() if p.is_floating_point())


TOKENS = torch.arange(8).reshape(2, 4)
NAMES = {"block.0", "block.2", "head"}


def one(linear):
    """A model with a single layer."""
    return nn.ModuleDict({"layer": linear})


def left(model, reason, config=DYNAMIC, **more):
    """Check that the only layer stays, for this reason, and that strict refuses to leave it; return the report."""
    before = model["layer"]
    with pytest.raises(InvalidProblem, match="nothing was replaced") as refused:
        quantize_(model, config, strict=True, **more)
    assert reason in refused.value.had
    report = quantize_(model, config, **more)
    (found,) = report.left.values()
    assert reason in found
    assert reason in str(report)
    assert not report.converted
    assert report.layer_bytes_before == report.layer_bytes_after == 0
    assert model["layer"] is before
    return report


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_every_linear_becomes_what_from_linear_makes_of_it(dtype, bias):
    model = Model(bias=bias).to(dtype).eval()
    want = copy.deepcopy(model)
    for name in NAMES:
        want.set_submodule(name, DynamicLinear.from_linear(model.get_submodule(name)))
    report = quantize_(model, Dynamic(), strict=True)
    assert dict(report.converted) == dict.fromkeys(("block.0", "block.2", "head"), "DynamicLinear")
    assert set(report.left) == {"embed.weight"}
    with torch.no_grad():
        assert torch.equal(model(TOKENS), want(TOKENS))
    assert model.dtype is dtype
    assert model.block[0].bias is None or model.block[0].bias.dtype is dtype


def test_the_weights_shrink_to_half_of_bf16():
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).bfloat16()
    before = sum(p.nbytes for p in model.parameters())
    report = quantize_(model, Dynamic())
    assert report.bytes_before == before
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert report.bytes_after <= 0.52 * report.bytes_before
    assert f"{before} -> {report.bytes_after} bytes" in str(report)


def test_a_filter_takes_module_and_name():
    model, seen = Model(), []

    def chosen(module, name):
        seen.append((module, name))
        return name.startswith("block.")

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    report = quantize_(model, Dynamic(), chosen)
    assert {name: module for module, name in seen} == linears
    assert set(report.converted) == {"block.0", "block.2"}
    assert report.left["head"] == "it is not selected"
    assert type(model.head) is nn.Linear


def test_a_second_call_changes_nothing():
    model = Model()
    quantize_(model, Dynamic())
    layers = {name: model.get_submodule(name) for name in NAMES}
    with pytest.raises(FrozenInstanceError):
        quantize_(model, Dynamic()).bytes_after = 0
    for strict in (False, True):
        report = quantize_(model, Dynamic(), strict=strict)
        assert {name for name, why in report.left.items() if why == "it is already int8"} == NAMES
        assert report.bytes_before == report.bytes_after > report.layer_bytes_before == report.layer_bytes_after == 0
        assert all(model.get_submodule(name) is layer for name, layer in layers.items())


def test_strict_replaces_all_or_nothing():
    model = Model()
    with torch.no_grad():
        model.head.weight[1, 2] = torch.inf
    before = dict(model.named_modules())
    with pytest.raises(InvalidProblem, match="head"):
        quantize_(model, Dynamic(), strict=True)
    assert dict(model.named_modules()) == before
    report = quantize_(model, Dynamic())
    assert set(report.converted) == {"block.0", "block.2"}
    assert "finite" in report.left["head"]
    assert model.head is before["head"]


def test_a_layer_with_two_names_is_converted_once():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared))
    report = quantize_(model, Dynamic())
    assert dict(report.converted) == {"0": "DynamicLinear"}
    assert isinstance(model[0], DynamicLinear)
    assert model[0] is model[2]
    assert model[0] is model[3][0]
    block = nn.Sequential(nn.Linear(4, 4))
    model = nn.Sequential(block, block)
    quantize_(model, Dynamic(), strict=True)
    assert isinstance(model[0][0], DynamicLinear)
    assert model[0] is model[1]


def test_a_tied_head_stays_unless_a_filter_selects_it():
    model = Model(tied=True)
    report = quantize_(model, Dynamic())
    assert set(report.converted) == {"block.0", "block.2"}
    assert "embed" in report.left["head"]
    assert model.head.weight is model.embed.weight
    table = model.embed.weight.clone()
    report = quantize_(model, Dynamic(), lambda _, name: name == "head", strict=True)
    assert set(report.converted) == {"head"}
    assert torch.equal(model.embed.weight, table)


@pytest.mark.parametrize(
    "view", [lambda t: t, lambda t: t.t(), lambda t: t[1:], lambda t: t.view(-1)[3:15].view(3, 4), lambda t: t[:, 1:]]
)
def test_layers_with_one_memory_are_tied(view):
    first, other = nn.Linear(4, 4), nn.Module()
    other.weight = nn.Parameter(view(first.weight.detach()))  # another parameter, the same memory
    model = nn.Sequential(first, other, nn.Linear(4, 4))
    before = sum(each.numel() for each in (first.weight, first.bias, *model[2].parameters())) * 4
    report = quantize_(model, Dynamic())
    assert set(report.converted) == {"2"}
    assert report.left["0"] == "its weight is also that of 1: choose it with filter_fn"
    assert report.bytes_before - before in (0, other.weight.nbytes)
    assert set(quantize_(model, Dynamic(), lambda _, name: name == "0").converted) == {"0"}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(view(model[0].weight.detach()))
    assert set(quantize_(model, Dynamic()).left) == {"0", "1"}


def test_slices_of_one_memory_are_not_tied():
    memory = torch.zeros(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight, model[1].weight = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    assert set(quantize_(model, Dynamic(), strict=True).converted) == {"0", "1"}


class Fancy(torch.Tensor):
    """A tensor that may mean something else."""


def holding(change):
    """A layer with a weight of another kind."""
    linear = nn.Linear(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is in beta
        linear.weight = nn.Parameter(change(linear.weight.detach()))
    return linear


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(3, 4, device="meta"), "meta device"),
        (lambda: nn.Linear(3, 4, dtype=torch.float64), "torch.float64"),
        (lambda: nn.Linear(3, 4, dtype=torch.complex64), "torch.complex64"),
        (lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(3, 4), "NonDynamicallyQuantizableLinear"),
        (lambda: nn.LazyLinear(4), "lazy"),
        (lambda: holding(lambda weight: weight.to_sparse()), "not dense"),
        (lambda: holding(lambda weight: weight.to_sparse_csr()), "not dense"),
        (lambda: holding(lambda weight: weight.as_subclass(Fancy)), "Fancy"),
    ],
)
def test_a_layer_of_an_odd_kind_stays(make, reason):
    left(one(make()), reason)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_weight_that_is_not_finite_stays(value, dtype):
    linear = nn.Linear(3, 4, dtype=dtype)
    with torch.no_grad():
        linear.weight[3, 2] = value
    left(one(linear), "finite")


def unused(*_):
    raise AssertionError


@pytest.mark.parametrize(
    "hook",
    [
        lambda m: m.register_forward_hook(unused),
        lambda m: m.register_forward_pre_hook(unused),
        lambda m: m.register_full_backward_hook(unused),
        lambda m: m.register_full_backward_pre_hook(unused),
        lambda m: m.register_state_dict_post_hook(unused),
        lambda m: m.register_load_state_dict_post_hook(unused),
        lambda m: m.weight.register_hook(unused),
        lambda m: m.bias.register_hook(unused),
        lambda m: m.weight.register_post_accumulate_grad_hook(unused),
        lambda m: m.bias.register_post_accumulate_grad_hook(unused),
    ],
)
def test_a_layer_with_hooks_stays_until_they_are_removed(hook):
    model = one(nn.Linear(3, 4))
    handle = hook(model["layer"])
    left(model, "hooks")
    handle.remove()
    quantize_(model, Dynamic(), strict=True)


def old_weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(linear)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: parametrize.register_parametrization(m, "weight", Doubled()), "parametrizations"),
        (parametrizations.weight_norm, "parametrizations"),
        (parametrizations.spectral_norm, "parametrizations"),
        (old_weight_norm, "hooks"),
        (nn.utils.spectral_norm, "hooks"),
        (lambda m: prune.l1_unstructured(m, "weight", amount=2), "hooks"),
        (lambda m: setattr(m, "forward", lambda x: x), "forward was replaced"),
        (lambda m: m.register_parameter("gain", nn.Parameter(torch.ones(1))), "gain"),
        (lambda m: m.register_buffer("mask", torch.ones(1)), "mask"),
        (lambda m: m.add_module("lora", nn.Identity()), "lora"),
        (lambda m: m.compile(backend="eager"), "compiled"),
        (lambda m: setattr(m, "explain", "mine"), "explain must have another name"),
    ],
)
def test_a_layer_that_does_more_stays(change, reason):
    linear = nn.Linear(3, 4)
    change(linear)
    left(one(linear), reason)


class Scaled(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = 3


class Spelled(nn.Linear):
    def forward(self, rows):
        """Return the product."""
        found = rows @ self.weight.t()
        if self.bias is not None:
            found = found + self.bias
        return found


class Called(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Twice(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) * 2


class Named(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight, self.bias)


class Wrapped(nn.Linear):
    @torch.no_grad()
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Reads(nn.Linear):
    @property
    def weight_of(self):
        return self.weight


def linear(x, weight, bias):
    return nn.functional.bilinear(x, x, weight, bias)


@pytest.mark.parametrize("kind", [Scaled, Spelled, Called])
def test_a_subclass_that_is_proven_to_be_a_linear_layer_becomes_int8(kind):
    model, plain = one(kind(3, 4)), one(nn.Linear(3, 4))
    plain.load_state_dict(model.state_dict())
    x = torch.ones(2, 3)
    for each in (model, plain):
        quantize_(each, Dynamic(), strict=True)
    assert torch.equal(model["layer"](x), plain["layer"](x))
    assert kind is not Scaled or model["layer"].gain == 3
    assert quantize_(one(kind(3, 4)), Mixed()).converted == {"layer": "MixedLinear"}


@pytest.mark.parametrize("kind", [Twice, Named, Wrapped, Reads, nn.modules.linear.NonDynamicallyQuantizableLinear])
def test_another_subclass_stays(kind):
    left(one(kind(3, 4)), f"it is a {kind.__name__}, wh")


def test_a_layer_trained_for_its_int8_form_becomes_it():
    class Trained(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.step = nn.Parameter(torch.ones(1))

        def to_int8(self):
            return DynamicLinear(torch.full((4, 3), 7, dtype=torch.int8), torch.full((4,), 2.0))

    model = one(Trained(3, 4))
    quantize_(model, Dynamic(), strict=True)
    assert torch.equal(model["layer"].weight_q, torch.full((4, 3), 7, dtype=torch.int8))


def test_adapters_stay_in_floating_point_whether_they_are_trained_or_not():
    class Adapted(nn.Module):
        """What a layer of peft looks like."""

        adapter_layer_names = ("lora_A", "lora_B", "lora_missing")

        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(4, 3)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2), "other": nn.Linear(4, 2)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3)})

    model = nn.Sequential(Adapted(), nn.Linear(3, 3)).requires_grad_(requires_grad=False)
    model[0].lora_A["default"].requires_grad_()
    report = quantize_(model, Dynamic())
    assert set(report.converted) == {"0.base_layer", "1"}
    assert set(report.left) == {"0.lora_A.default", "0.lora_A.other", "0.lora_B.default"}
    assert set(report.left.values()) == {"it is an adapter beside a layer, and stays as it was trained"}


def test_layers_whose_weights_torch_reads_stay():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    report = quantize_(model, Dynamic())
    assert not report.converted
    assert {"linear1", "linear2", "self_attn.out_proj", "self_attn.in_proj_weight"} == set(report.left)
    with torch.no_grad():
        model(torch.zeros(1, 2, 8))


def test_inside_data_parallelism_all_layers_stay(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4))), nn.Linear(4, 4))
        report = quantize_(model, Dynamic())
    finally:
        torch.distributed.destroy_process_group()
    assert set(report.converted) == {"1"}
    assert "DistributedDataParallel" in report.left["0.module.0"]


def test_inside_sharded_parallelism_all_layers_stay():
    class FullyShardedDataParallel(nn.Sequential):
        """The name of torch's class, whose import costs seconds."""

    report = quantize_(FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 4))), Dynamic())
    assert "before it is wrapped" in report.left["0.0"]


def test_a_layer_that_no_kernel_serves_stays(monkeypatch):
    found = DynamicLinear.from_linear(nn.Linear(3, 4))
    monkeypatch.setattr(
        "skuda.torch.linear.int8_linear.default_dispatcher", lambda: Dispatcher(built_in_registry(), backends=[])
    )
    left(one(nn.Linear(3, 4)), "have a kernel", Own(lambda _: found))


@pytest.mark.parametrize("grad", [True, False])
def test_flags_are_kept(grad):
    model = Model().requires_grad_(grad)
    model.block.eval()
    training = {name: module.training for name, module in model.named_modules()}
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    quantize_(model, Dynamic())
    assert {name: module.training for name, module in model.named_modules()} == training
    assert all(grads[name] == p.requires_grad for name, p in model.named_parameters())
    assert {name for name, _ in model.named_parameters()} == {"embed.weight", "norm.weight", "norm.bias"}
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())


def loaded(model):
    """Yield models that load the state of one."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for state, assign in ((model.state_dict(), False), (torch.load(file, weights_only=True), True)):
        other = Model().eval()
        quantize_(other, Dynamic())
        other.load_state_dict(state, assign=assign)
        yield other


def test_copies_give_the_same_bits():
    model = Model().eval()
    quantize_(model, Dynamic())
    with torch.no_grad():
        want = model(TOKENS)
        for other in (*copies(model), *loaded(model)):
            assert torch.equal(other(TOKENS), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cast_keeps_codes_and_scales(dtype):
    model = Model().eval()
    quantize_(model, Dynamic())
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if not name.endswith("bias")}
    model.to(dtype)
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    assert all(after[name].dtype is buffer.dtype for name, buffer in before.items())
    assert model(TOKENS).dtype is dtype


@dataclass(frozen=True)
class Own:
    """A config of somebody else."""

    make: object

    def convert(self, name, linear):
        return self.make(linear)


def test_a_config_of_somebody_else():
    model = one(nn.Linear(3, 4))
    left(model, "leaves it", Own(lambda linear: linear))
    report = quantize_(model, Own(nn.Sequential), strict=True)
    assert dict(report.converted) == {"layer": "Sequential"}
    assert report.layer_bytes_before == report.layer_bytes_after == 4 * (3 * 4 + 4)


def test_a_config_that_returns_no_module_is_named():
    left(one(nn.Linear(3, 4)), "torch.nn.Module", Own(lambda _: 3))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((nn.Linear(3, 4), Dynamic()), "model"),
        ((torch.zeros(2), Dynamic()), "model"),
        ((nn.Sequential(), Dynamic), "config"),
        ((nn.Sequential(), None), "config"),
        ((nn.Sequential(), "int8"), "config"),
        ((nn.Sequential(), Dynamic(), "head"), "filter_fn"),
        ((nn.Sequential(), Dynamic(), lambda module: True), "filter_fn"),
        ((nn.Sequential(), Dynamic(), lambda module, name, more: True), "filter_fn"),
        ((one(nn.Linear(3, 4)), Dynamic(), lambda module, name: None), "filter_fn"),
        ((one(nn.Linear(3, 4)), Dynamic(), lambda module, name: "head"), "filter_fn"),
    ],
)
def test_bad_arguments(arguments, field):
    with pytest.raises(InvalidProblem) as refused:
        quantize_(*arguments)
    assert refused.value.field == field


def test_strict_is_a_bool():
    with pytest.raises(InvalidProblem, match=r"strict must be True or False; had 'no'"):
        quantize_(nn.Sequential(), Dynamic(), strict="no")


class Zoo(nn.Module):
    """Matrices of all kinds, with and without a linear layer around them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.table = nn.Embedding(5, 4)
        self.bags = nn.EmbeddingBag(5, 4)
        self.norm = nn.LayerNorm((3, 4))
        self.conv = nn.Conv1d(3, 4, 2)
        self.attention = nn.MultiheadAttention(8, 2, kdim=4)
        self.experts = nn.ParameterDict({"up": torch.zeros(2, 3, 4)})
        self.router = nn.Bilinear(3, 4, 2)
        self.lazy = nn.LazyConv2d(3, 3)
        self.own = nn.Parameter(torch.zeros(3, 4))
        self.vector = nn.Parameter(torch.zeros(3))
        self.packed = nn.Parameter(torch.zeros(3, 4, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("mask", torch.zeros(7))


UNREAD = {
    "table.weight": "a table, whose rows Embedding looks up",
    "bags.weight": "a table, whose rows EmbeddingBag looks up",
    "norm.weight": "LayerNorm scales elements",
    "norm.bias": "LayerNorm scales elements",
}
MULTIPLIED = {
    "conv.weight": "Conv1d, which has no int8 form",
    "attention.q_proj_weight": "without calling a layer",
    "attention.k_proj_weight": "without calling a layer",
    "attention.v_proj_weight": "without calling a layer",
    "experts.up": "give each an nn.Linear",
    "router.weight": "3 axes",
    "lazy.weight": "run the model once",
    "lazy.bias": "run the model once",
    "own": "Zoo is no linear layer",
}


def test_the_report_lists_every_matrix_that_stays():
    model = Zoo()
    before = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    report = quantize_(model, Dynamic())
    reasons = UNREAD | MULTIPLIED | {"attention.out_proj": "NonDynamicallyQuantizableLinear"}
    assert report.left.keys() == reasons.keys()
    assert all(reason in report.left[name] for name, reason in reasons.items())
    assert set(report.converted) == {"linear"}
    after = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert (report.bytes_before, report.bytes_after) == (before, after)
    assert (report.layer_bytes_before, report.layer_bytes_after) == (4 * 16 * 17, 16 * 16 + 2 * 4 * 16)
    first, *lines = str(report).splitlines()
    assert f"model {before} -> {after} bytes ({after / before:.3f}x), layers 1088 -> 384 bytes (0.353x)" in first
    for name, reason in reasons.items():
        assert any(line.startswith("  left:") and reason in line for line in lines), name


def test_attributes_of_a_layer_are_kept():
    model = Model()
    mark = object()
    model.head.mark, model.head._own = mark, 3
    quantize_(model, FakeQuant())
    assert model.head.mark is mark
    copied = copy.deepcopy(model)
    assert copied.head._own == 3
    quantize_(model, Dynamic())
    assert type(model.head) is DynamicLinear
    assert model.head.mark is mark
    assert model.head._own == 3
    assert not hasattr(model.head, "learn_scale")
    assert not hasattr(model.block[0], "mark")


def test_a_tracer_of_fx_takes_int8_layers_for_leaves():
    rng = fresh()
    x = tensor(rng, 3, 16)
    make = (Dynamic(), SmoothStatic(calibrated(nn.Sequential(nn.Linear(16, 16)), x)))
    for config in make:
        model = nn.Sequential(nn.Linear(16, 16))
        quantize_(model, config, strict=True)
        graph = torch.fx.symbolic_trace(model)
        assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0"]
        with torch.no_grad():
            assert torch.equal(graph(x), model(x))
        with pytest.raises(InvalidProblem, match="trace a model that contains the module"):
            torch.fx.symbolic_trace(model[0])
    mlp = GatedMLP(16, 32)
    quantize_(mlp, Dynamic())
    fuse_(mlp)
    with pytest.raises(InvalidProblem, match="before fuse_"):
        torch.fx.symbolic_trace(mlp)
