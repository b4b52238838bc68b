"""Norms and gated activations write codes in the graphs that vLLM compiles, and vLLM's caches know of it."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import pickle
import re
import subprocess
import sys
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
import vllm_layers
from support import fresh
from tensors import normal, same
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.inductor_pass import CallableInductorPass, InductorPass, pass_context
from vllm.compilation.passes.utility import fix_functionalization
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.compilation import DynamicShapesType
from vllm.config.utils import Range
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform
from vllm_layers import ELEMENTS, K, checkpoint, default_dtype, expected, joined, load, made, quantization, ready

from skuda.registry.errors import InvalidRecord
from skuda.torch.fuse import patterns
from skuda.vllm import fusion
from skuda.vllm.config import SkudaVllmConfig
from skuda.vllm.fusion import FusionPass, add_pass

OPS, IR = torch.ops.skuda, torch.ops.vllm_ir
EPS = 1e-5
DYNAMIC = {"q_min": -127, "q_max": 127, "output_element": "s8"}
STATIC = {"scaling": "static", "q_min": -128, "q_max": 127, "output_element": "s8"}
KEY = "post_grad_custom_post_pass"
INNER = vllm_layers.PARTS["merged"][0]
ACTS = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu"}


@pytest.fixture(scope="module", autouse=True)
def library():
    """The ops of vLLM's library that its passes name, which is not installed here."""
    made = torch.library.Library("_C", "FRAGMENT")
    named = re.findall(r"torch\.ops\._C\.(\w+)", inspect.getsource(fix_functionalization))
    for name in sorted({*named, *ACTS}):
        if not hasattr(torch.ops._C, name):
            made.define(f"{name}(Tensor! result, Tensor input) -> ()")
    yield
    made._destroy()


@pytest.fixture
def passed(monkeypatch):
    """Each graph after the pass: how often it calls each op."""
    found, run = [], FusionPass.__call__

    def call(self, graph):
        run(self, graph)
        found.append(calls(graph))

    monkeypatch.setattr(FusionPass, "__call__", call)
    return found


@pytest.fixture
def config(served, monkeypatch, tmp_path):
    """Compile as vLLM does on a GPU, with caches of its own."""
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setitem(vllm_layers.PARTS, "row", {None: K})
    torch._dynamo.reset()
    yield compiling(served)
    torch._dynamo.reset()


def compiling(config):
    options = config.compilation_config
    options.mode, options.backend, options.custom_ops = CompilationMode.VLLM_COMPILE, "inductor", ["none"]
    options.compile_sizes, options.compile_ranges_endpoints, options.splitting_ops = [], [64], []
    return config


def calls(graph):
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(getattr(target, "_opname", target) for target in targets)


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Block(torch.nn.Module):
    """A decoder layer of Llama without its attention, and the norm of the next one with its first layer."""

    KINDS = {"qkv": K, "o": K, "gate_up": K, "down": INNER, "next": K}  # noqa: RUF012

    def __init__(self, *, vllm_config, dtype, scheme):
        del vllm_config
        super().__init__()
        self.dtype, self.scheme = dtype, scheme
        with default_dtype(dtype):
            self.norms = torch.nn.ModuleList([RMSNorm(K, eps=EPS), RMSNorm(K, eps=1e-3), RMSNorm(K, eps=0.1)])
            self.act = SiluAndMul()
        kinds = zip(self.KINDS, ("qkv", "row", "merged", "row", "column"), strict=True)
        self.layers = torch.nn.ModuleDict()
        for name, kind in kinds:
            self.layers[name] = made(kind, dtype, quantization(**scheme), k=self.KINDS[name])
            self.layers[name].kind = kind

    def filled(self, rng):
        """Give all layers weights. Keep their parts."""
        self.parts = {}
        for name, layer in self.layers.items():
            self.parts[name] = checkpoint(layer.kind, rng, **self.scheme, k=self.KINDS[name])
            for tensors in self.parts[name].values():
                tensors["weight_scale"] *= 0.02
            load(layer, self.parts[name])
            ready(layer)
        for norm in self.norms:
            norm.weight.data.copy_(torch.from_numpy(rng.uniform(0.3, 1.7, K)))
        return self

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x
        h = self.norms[0](x)
        h, _ = self.layers["qkv"](h)
        h, _ = self.layers["o"](h[:, :K])
        h, residual = self.norms[1](h, residual)
        h, _ = self.layers["gate_up"](h)
        h, _ = self.layers["down"](self.act(h))
        h, residual = self.norms[2](h, residual)
        h, _ = self.layers["next"](h)
        return h, residual

    def by_hand(self, x):
        """The same by skuda's ops."""
        h, _ = self.coded("qkv", OPS.rms_norm_quantize, (x, None, self.norms[0].weight), eps=EPS)
        h = expected(h[:, :K].contiguous(), self.parts["o"], **self.scheme)
        h, (x,) = self.coded("gate_up", OPS.rms_norm_quantize, (h, x, self.norms[1].weight), eps=1e-3)
        h, _ = self.coded("down", OPS.silu_mul_quantize, (None, None, h))
        h, (x,) = self.coded("next", OPS.rms_norm_quantize, (h, x, self.norms[2].weight), eps=0.1)
        return h, x

    def coded(self, name, op, tensors, **fields):
        """A layer's output from the codes that an op writes, and what else the op returns."""
        parts = self.parts[name]
        first, zero, scale = next(iter(parts.values())), None, None
        if self.scheme.get("dynamic", True):
            codes, scale, *rest = op(*tensors, **fields, **DYNAMIC)
        else:
            scale = first["input_scale"]
            given = first.get("input_zero_point", torch.zeros(1)).to(torch.int32)
            codes, *rest = op(*tensors, scale, given, **fields, **STATIC)
            zero = None if self.scheme.get("symmetric", True) else given
        bias, weight_scale = joined(parts, "bias").to(self.dtype), joined(parts, "weight_scale").reshape(-1)
        scope = "token" if self.scheme.get("dynamic", True) else "tensor"
        given = codes, joined(parts, "weight"), scale, zero, weight_scale, None, bias
        return OPS.scaled_linear(*given, output_element=ELEMENTS[self.dtype], act_scale_scope=scope), rest


def run(model, config, x):
    with set_forward_context(None, config):
        return model(x)


SCHEMES = {
    "dynamic": {"dynamic": True, "symmetric": True},
    "static": {"dynamic": False, "symmetric": True},
    "static with zero points": {"dynamic": False, "symmetric": False},
    "4 bits": {"group_size": 64},
}


BLOCKS = [
    *itertools.product((torch.bfloat16, torch.float16), SCHEMES, ["backed"]),
    (torch.bfloat16, "dynamic", "unbacked"),
    (torch.float16, "static", "backed_size_oblivious"),
]


@pytest.mark.parametrize(("dtype", "scheme", "sizes"), BLOCKS)
def test_a_block_compiled_by_vllm_has_the_bits_of_the_fused_ops(config, passed, dtype, scheme, sizes):
    config.compilation_config.dynamic_shapes_config.type = DynamicShapesType(sizes)
    rng = fresh(dtype, scheme, sizes)
    model = Block(vllm_config=config, dtype=dtype, scheme=SCHEMES[scheme]).filled(rng)
    for rows in (5, 1, 33):
        x = normal(rng, rows, K, dtype=dtype)
        assert all(map(same, run(model, config, x), model.by_hand(x)))
    (count,) = passed
    assert count["rms_norm_quantize"] == 3
    assert count["silu_mul_quantize"] == 1
    assert count["quantized_linear"] + count["quantize_per_tensor"] == 1  # the input of `o` is no norm
    assert count["scaled_linear"] == 5 - count["quantized_linear"]
    assert not count["rms_norm"] + count["fused_add_rms_norm"] + count["exp"] + count["dynamic_range"]


def test_a_compiled_block_is_loaded_again_with_the_same_bits(config, passed):
    results, loaded = [], []
    x = normal(fresh("again"), 5, K, dtype=torch.bfloat16)
    for engine in (config, compiling(VllmConfig())):
        torch._dynamo.reset()
        with set_current_vllm_config(engine):
            model = Block(vllm_config=engine, dtype=torch.bfloat16, scheme=SCHEMES["dynamic"]).filled(fresh("weights"))
            results.append(run(model, engine, x))
        loaded.append(model.was_aot_compile_fn_loaded_from_disk)
    assert loaded == [False, True]
    assert len(passed) == 1
    assert all(map(same, *results))


def test_rows_with_zero_points_and_the_setting_keep_the_graph(config, passed, monkeypatch):
    rng = fresh("asymmetric")
    x = normal(rng, 5, K, dtype=torch.bfloat16)
    results = []
    logger = Mock()
    monkeypatch.setattr(fusion, "logger", logger)
    for number, fuses in enumerate("10"):
        monkeypatch.setenv("SKUDA_VLLM_FUSE", fuses)
        config.compilation_config.inductor_compile_config.pop(KEY, None)
        config.compilation_config.cache_dir = ""
        torch._dynamo.reset()
        scheme = {"dynamic": True, "symmetric": False}
        model = Block(vllm_config=config, dtype=torch.bfloat16, scheme=scheme).filled(fresh("weights"))
        results.append(run(model, config, x))
        assert passed[number] == passed[0]
    assert len(passed) == 2
    assert all(map(same, *results))
    assert (passed[0]["dynamic_range"], passed[0]["rms_norm"], passed[0]["fused_add_rms_norm"]) == (5, 1, 2)
    (said,) = logger.info_once.call_args_list
    text = said.args[0] % said.args[1:]
    assert "0 norms and 0 gated activations" in text
    assert "5 x its rows have zero points, which no norm or gated activation writes" in text


class Unit:
    """Small graphs as vLLM's passes see them."""

    def __init__(self, rng, dtype=torch.bfloat16):
        self.x, self.residual = (normal(rng, 6, K, dtype=dtype) for _ in range(2))
        self.weight = normal(rng, K, dtype=dtype)
        self.w, self.v = (torch.from_numpy(rng.integers(-127, 128, (48, K), dtype="int8")) for _ in range(2))
        self.w_scale = torch.from_numpy(rng.uniform(0.001, 0.01, (48, 1))).float()
        self.scale = torch.tensor([rng.uniform(0.01, 0.1)]).float()
        self.zero = torch.tensor([rng.integers(-90, 90)], dtype=torch.int32)

    def layer(self, h, weight=None):
        return OPS.quantized_linear(h, self.w if weight is None else weight, self.w_scale)

    def static(self, h, scale=None, element="s8", low=-128):
        scale = self.scale if scale is None else scale
        codes = OPS.quantize_per_tensor(h, scale, self.zero, q_min=low, q_max=-low - 1, output_element=element)
        return self.product(codes, scale, "tensor", self.zero)

    def product(self, codes, scale, scope, zero=None, weight=None):
        given = codes, self.w if weight is None else weight, scale, zero, self.w_scale
        return OPS.scaled_linear(*given, output_element="bf16", act_scale_scope=scope)

    def norm(self, **more):
        return IR.rms_norm(self.x, self.weight, EPS, **more)

    def fused_add(self):
        return IR.fused_add_rms_norm(self.x, self.residual, self.weight, EPS)

    def coded(self, x, residual=None, weight=None, **fields):
        return OPS.rms_norm_quantize(x, residual, weight, eps=EPS, **fields)


def passed_graph(unit, function, rows="symbolic", change=lambda graph: None):
    """A graph of a function of a unit, before and after the pass."""
    names = list(vars(unit))

    def call(*tensors):
        vars(unit).update(zip(names, tensors, strict=True))
        return function(unit)

    real = tuple(vars(unit).values())
    graph_module = make_fx(call, tracing_mode=rows)(*real)
    vars(unit).update(zip(names, real, strict=True))
    change(graph_module.graph)
    before = calls(graph_module.graph)
    guards = [] if graph_module.shape_env is None else graph_module.shape_env.guards
    count = len(guards)
    FusionPass(None, fuses=True)(graph_module.graph)
    graph_module.recompile()
    assert len(guards) == count  # vLLM drops them
    return graph_module(*real), before, calls(graph_module.graph)


def both(unit):
    norm, total = unit.fused_add()
    return unit.layer(norm), unit.layer(norm, unit.v), total


def both_by_hand(unit):
    codes, scale, total = unit.coded(unit.x, unit.residual, unit.weight, **DYNAMIC)
    return unit.product(codes, scale, "token"), unit.product(codes, scale, "token", None, unit.v), total


def static_both(unit):
    norm, total = unit.fused_add()
    return unit.static(norm), unit.static(norm), total * 2


def static_both_by_hand(unit):
    codes, total = unit.coded(unit.x, unit.residual, unit.weight, scale=unit.scale, zero_point=unit.zero, **STATIC)
    return *(2 * [unit.product(codes, unit.scale, "tensor", unit.zero)]), total * 2


def bare(unit):
    return (unit.layer(IR.rms_norm(unit.x, None, EPS)),)


def bare_by_hand(unit):
    return (unit.product(*unit.coded(unit.x, **DYNAMIC), "token"),)


FUSED = {
    "two layers and the sum behind a norm with residual": (both, both_by_hand),
    "two static layers of one scale": (static_both, static_both_by_hand),
    "a norm without weight": (bare, bare_by_hand),
}


@pytest.mark.parametrize("rows", ["real", "symbolic"])
@pytest.mark.parametrize("case", FUSED)
def test_no_separate_quantization_remains(alone, case, rows):
    function, by_hand = FUSED[case]
    unit = Unit(fresh(case, rows))
    with torch.inference_mode():
        found, _, after = passed_graph(unit, function, "fake" if rows == "real" else "symbolic")
        assert all(map(same, found, by_hand(unit)))
    assert after["rms_norm_quantize"] == 1
    assert not after["rms_norm"] + after["fused_add_rms_norm"]
    assert not after["quantized_linear"] + after["quantize_per_tensor"]


def two_scales(unit):
    norm = unit.norm()
    return unit.static(norm), unit.static(norm, unit.scale * 2)


def wide_residual(unit):
    norm, total = IR.fused_add_rms_norm(unit.x, unit.residual.float(), unit.weight, EPS)
    return unit.layer(norm), total


LEFT = {
    "two scales": (two_scales, "rms_norm is also used by"),
    "the variance of some columns": (lambda unit: unit.layer(unit.norm(variance_size=32)), "has variance_size"),
    "a wide residual": (wide_residual, "the residual of the norm getitem has another dtype"),
    "no norm": (lambda unit: unit.layer(unit.x * 2), "its input is no known form of a norm or gated activation"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_no_fused_op_computes_stays_as_it_is_with_a_reason(alone, monkeypatch, case):
    function, why = LEFT[case]
    logger = Mock()
    monkeypatch.setattr(fusion, "logger", logger)
    unit = Unit(fresh(case))
    with torch.inference_mode():
        _, before, after = passed_graph(unit, function)
    assert before == after
    (said,) = logger.info_once.call_args_list
    assert why in said.args[0] % said.args[1:]


@pytest.mark.parametrize("op", ACTS)
def test_activations_of_vllms_library_write_codes(alone, op):
    graph = torch.fx.Graph()
    unit = Unit(fresh(op), torch.float32)
    mode = torch._subclasses.FakeTensorMode()
    named = {"x": unit.x, "result": unit.x[:, : K // 2], "w": unit.w[:, : K // 2].contiguous(), "s": unit.w_scale}
    nodes = {}
    for name, tensor in named.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = mode.from_tensor(tensor)
    written = {"result": nodes["result"], "input": nodes["x"]}
    both = graph.call_function(auto_functionalized, (getattr(torch.ops._C, op).default,), written)
    act = graph.call_function(operator.getitem, (both, 1))
    act.meta["val"] = nodes["result"].meta["val"]
    layer = graph.call_function(OPS.quantized_linear.default, (act, nodes["w"], nodes["s"]))
    with mode:
        layer.meta["val"] = OPS.quantized_linear(*(node.meta["val"] for node in layer.args))
    graph.output(layer)
    graph_module = torch.fx.GraphModule({}, graph)
    FusionPass(None, fuses=True)(graph_module.graph)
    graph_module.recompile()
    form = {"gelu_and_mul": {"approximation": "erf"}, "gelu_tanh_and_mul": {"approximation": "tanh"}}.get(op, {})
    codes, scale = getattr(OPS, f"{ACTS[op]}_mul_quantize")(gate_up=unit.x, **form, **DYNAMIC)
    given = codes, named["w"], scale, None, unit.w_scale
    want = OPS.scaled_linear(*given, output_element="f32", act_scale_scope="token")
    assert same(graph_module(*named.values()), want)
    assert auto_functionalized not in calls(graph_module.graph)


@pytest.mark.parametrize("at", ["while it plans", "in the middle"])
def test_an_error_leaves_the_graph_as_it_is_and_is_logged(alone, monkeypatch, at):
    logger = Mock()
    monkeypatch.setattr(fusion, "logger", logger)
    if at == "while it plans":
        monkeypatch.setattr(patterns, "rms_norm", Mock(side_effect=ValueError("unforeseen")))
    else:
        monkeypatch.setattr("skuda.torch.fuse.graph._product", Mock(side_effect=ValueError("unforeseen")))
    with torch.inference_mode():
        _, before, after = passed_graph(Unit(fresh(at)), both)
    assert before == after
    assert "unforeseen" in str(logger.warning_once.call_args)


class Others(InductorPass):
    """A pass of a user, for few tokens only."""

    def __init__(self):
        self.ran = 0

    def __call__(self, graph):
        self.ran += 1

    def is_applicable_for_range(self, compile_range):
        return compile_range.end < 100


def test_a_pass_of_the_user_stays_and_runs_first_where_it_applies():
    config = VllmConfig()
    options, theirs = config.compilation_config.inductor_compile_config, Others()
    options[KEY] = theirs
    with set_current_vllm_config(config):
        for _ in range(3):
            add_pass()
    ours = options[KEY]
    assert (type(ours), ours.before) == (FusionPass, theirs)
    assert theirs.uuid() in ours.uuid()
    graph = torch.fx.symbolic_trace(torch.nn.ReLU()).graph
    for end in (50, 200):
        with pass_context(Range(start=1, end=end)):
            ours(graph)
    assert theirs.ran == 1
    ours(graph)  # by Inductor itself, without vLLM's backend
    assert theirs.ran == 2


def test_what_is_no_pass_of_vllm_stays_and_the_log_says_so(monkeypatch):
    logger = Mock()
    monkeypatch.setattr(fusion, "logger", logger)
    config = VllmConfig()
    config.compilation_config.inductor_compile_config[KEY] = print
    with set_current_vllm_config(config):
        add_pass()
    assert config.compilation_config.inductor_compile_config[KEY] is print
    assert "is no InductorPass" in str(logger.warning_once.call_args)


def test_each_config_gets_a_pass_and_no_config_is_no_error(monkeypatch):
    assert current_platform.pass_key == KEY
    add_pass()
    configs = [VllmConfig(), VllmConfig()]
    for config in configs:
        config.compilation_config.mode = CompilationMode.NONE
        with set_current_vllm_config(config):
            add_pass()
    first, second = (config.compilation_config.inductor_compile_config[KEY] for config in configs)
    assert first is not second
    monkeypatch.setenv("SKUDA_VLLM_FUSE", "2")
    with set_current_vllm_config(VllmConfig()), pytest.raises(InvalidRecord, match="SKUDA_VLLM_FUSE must be 0 or 1"):
        add_pass()


@pytest.mark.parametrize("given", [None, False])
def test_bits_depend_on_no_timing_and_no_fused_gate(given):
    config = VllmConfig()
    options = config.compilation_config.inductor_compile_config
    options["benchmark_combo_kernel"] = True  # as vLLM has it on a GPU
    if given is not None:
        options["deterministic"] = given
    before = dict(options)
    with set_current_vllm_config(config):
        add_pass()
    assert options.pop(KEY).gates
    assert options == before
    config.quant_config = SkudaVllmConfig()
    with set_current_vllm_config(config):
        add_pass()
    assert not options.pop(KEY).gates
    changed = {"deterministic": True, "benchmark_combo_kernel": False} if given is None else {}
    assert options == before | changed


HASH = """
import torch
torch.cpu._is_amx_tile_supported = lambda: False  # as in conftest.py
from vllm.config import VllmConfig, set_current_vllm_config
from skuda.vllm.fusion import add_pass
config = VllmConfig()
with set_current_vllm_config(config):
    add_pass()
print(config.compute_hash())
"""


def test_the_hash_of_the_config_says_whether_graphs_have_ops_of_skuda(monkeypatch):
    hashes = []
    for fuses in (None, "1", "0"):
        config = VllmConfig()
        if fuses is not None:
            monkeypatch.setenv("SKUDA_VLLM_FUSE", fuses)
            with set_current_vllm_config(config):
                add_pass()
        hashes.append(config.compute_hash())
    assert len(set(hashes)) == 3
    monkeypatch.setenv("SKUDA_VLLM_FUSE", "1")
    other = subprocess.run([sys.executable, "-c", HASH], capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == hashes[1]
    monkeypatch.setattr(fusion, "_sources", lambda: "changed")
    assert config.compute_hash() != hashes[2]


def test_kernels_are_prepared_for_every_captured_size(config, monkeypatch):
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4]
    config.scheduler_config.max_num_batched_tokens = 64
    warmed, ready, logger = [], [], Mock()
    monkeypatch.setattr(fusion.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fusion.torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(fusion, "select", lambda problems, device: warmed.extend((device, each) for each in problems))
    monkeypatch.setattr(fusion, "want", lambda problems, most: ready.append((len(problems), most)))
    monkeypatch.setattr(fusion, "prepare", lambda device, _: ready.append(device))
    add_pass()
    shapes = {0: torch.export.Dim("tokens", max=4096)}, None, None
    graph = torch.export.export(Product(), (torch.ones(6, K), *weights()), dynamic_shapes=shapes).graph
    for _ in range(2):  # once for each form of a call
        config.compilation_config.inductor_compile_config[KEY](graph)
        assert sorted(problem.m for _, problem in warmed) == [1, 2, 4, 64]
    assert {device for device, _ in warmed} == {"cuda:3"}
    assert ready == [(4, 64), "cuda:3", (0, 64), "cuda:3"]
    monkeypatch.setattr(fusion, "problems_of", lambda *_: 1 / 0)
    monkeypatch.setattr(fusion, "logger", logger)
    config.compilation_config.inductor_compile_config[KEY](graph)
    assert "division by zero" in str(logger.warning_once.call_args)


class Product(torch.nn.Module):
    def forward(self, x, codes, scale):
        return OPS.quantized_linear(x, codes, scale)


def weights():
    return torch.ones(48, K, dtype=torch.int8), torch.ones(48, 1)


def pickled(one):
    return pickle.loads(pickle.dumps(one))  # noqa: S301  our own


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_is_the_same_pass(copied):
    for one in (FusionPass(None, fuses=True), FusionPass(CallableInductorPass(print, "mine"), fuses=False)):
        assert copied(one).uuid() == one.uuid()
        assert copied(one).fuses == one.fuses
