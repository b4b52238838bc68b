"""`fuse_graph`: what it finds in graphs of any model, the bits of the result, and what it leaves."""

from collections import Counter

import pytest
import torch
import transformers
from support import fresh, sampled
from tensors import normal, same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F  # noqa: N812  torch's name

from skuda.registry.errors import InvalidProblem
from skuda.torch import Dynamic, DynamicLinear, fuse_graph, fused_backend, graph_pass, quantize_

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
D, H = 32, 48
CODES = {"q_min": -127, "q_max": 127, "output_element": "s8"}
OPS = torch.ops.skuda
SHARED = "one quantization of the input for all"
NORM, NORM_OF_SUM = "the norm writes codes", "the norm adds the residual and writes codes"
GATED = "the gated activation writes codes"


class HandNorm(nn.Module):
    """The norm of Meta's Llama."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class FeedForward(nn.Module):
    """That of Meta's Llama, gpt-fast and torchtitan."""

    def __init__(self, act=F.silu):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(D, H, bias=False) for _ in range(2))
        self.w2 = nn.Linear(H, D, bias=False)
        self.act = act

    def forward(self, x):
        return self.w2(self.act(self.w1(x)) * self.w3(x))

    def by_hand(self, codes, scale, op, **fields):
        gate, up = (scaled(layer, codes, scale) for layer in (self.w1, self.w3))
        return scaled(self.w2, *op(gate=gate, up=up, **fields, **CODES))


class Joined(FeedForward):
    """One layer for gates and ups."""

    def __init__(self, halve=lambda y: y.chunk(2, -1), act=F.silu):
        super().__init__(act)
        self.w1, self.w3, self.halve = nn.Linear(D, 2 * H), None, halve

    def forward(self, x):
        gate, up = self.halve(self.w1(x))
        return self.w2(self.act(gate) * up)

    def by_hand(self, codes, scale, op, **fields):
        return scaled(self.w2, *op(gate_up=scaled(self.w1, codes, scale), **fields, **CODES))


class Block(nn.Module):
    """h = x + wo(x); h + feed_forward(norm(h))."""

    def __init__(self, feed_forward, norm):
        super().__init__()
        self.wo, self.feed_forward, self.norm = nn.Linear(D, D), feed_forward, norm

    def forward(self, x):
        h = x + self.wo(x)
        return h + self.feed_forward(self.norm(h))

    def by_hand(self, x, op, **fields):
        eps = {"eps": self.norm.eps}
        codes, scale, h = OPS.rms_norm_quantize(self.wo(x), x, self.norm.weight, **eps, **CODES)
        return h + self.feed_forward.by_hand(codes, scale, op, **fields)


def scaled(layer, codes, scale):
    given = codes, layer.weight_q, scale, None, layer.weight_scale.view(-1), None, layer.bias
    return OPS.scaled_linear(*given, output_element="bf16", act_scale_scope="token")


def made(rng, kind, *given):
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = kind(*given)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.from_numpy(rng.uniform(0.3, 1.7, parameter.shape)))
    model = model.bfloat16().eval()
    quantize_(model, Dynamic())
    return model


def fused_graph(model, x, bits, **given):
    """Return the result of a model, the report, and the number of calls of each op, of skuda and aten."""
    kept = []

    def fused(graph_module, _):
        kept.append(fuse_graph(graph_module, bits=bits))
        targets = (node.target for node in graph_module.graph.nodes if node.op == "call_function")
        kept.append(Counter(t._schema.name.partition("::")[2] for t in targets if hasattr(t, "_schema")))
        return make_boxed_func(graph_module.forward)

    with torch.no_grad():
        y = torch.compile(model, backend=aot_autograd(fw_compiler=fused), fullgraph=True)(x, **given)
    return y, *kept[:2]


@pytest.fixture(autouse=True)
def compiler():
    torch._dynamo.reset()
    with torch._inductor.config.patch(emulate_precision_casts=True, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def by_hand_silu(x):
    return x * torch.sigmoid(x)


ACTS = {
    F.silu: (OPS.silu_mul_quantize, {}),
    by_hand_silu: (OPS.silu_mul_quantize, {}),
    F.gelu: (OPS.gelu_mul_quantize, {"approximation": "erf"}),
    gelu_tanh: (OPS.gelu_mul_quantize, {"approximation": "tanh"}),
}
HALVES = {
    "apart": FeedForward,
    "chunk": lambda act: Joined(act=act),
    "split": lambda act: Joined(lambda y: y.split(H, -1), act),
    "slice": lambda act: Joined(lambda y: (y[..., :H], y[..., H:]), act),
}
NORMS = {"nn": lambda: nn.RMSNorm(D, eps=1e-5), "hand": lambda: HandNorm(D)}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("halves", HALVES)
def test_by_default_layers_share_codes_and_no_bit_changes(halves, norm):
    rng = fresh("eager", halves, norm)
    model = made(rng, lambda: Block(HALVES[halves](F.silu), NORMS[norm]()))
    x = normal(rng, 2, 3, D, dtype=torch.bfloat16)
    y, report, count = fused_graph(model, x, "eager")
    with torch.no_grad():
        assert same(y, model(x))
    shared = halves == "apart"
    assert list(report.fused.values()) == [SHARED] * shared
    assert (count["dynamic_range"], count["scaled_linear"]) == (shared, 2 * shared)
    assert count["quantized_linear"] == 3 - shared
    assert all("no other layer has its input" in why for why in report.left.values())


WAYS = [(halves, act, way) for halves in HALVES for act in ACTS for way in ("aten", "inductor")]


@pytest.mark.parametrize("case", sampled(WAYS, 10))
def test_norms_and_gates_write_the_codes_of_the_ops(case):
    halves, act, way = case
    rng = fresh("fused", halves, act.__name__, way)
    norm = NORMS[rng.choice(list(NORMS))]
    model = made(rng, lambda: Block(HALVES[halves](act), norm()))
    x = normal(rng, 2, 3, D, dtype=torch.bfloat16)
    if way == "aten":
        y, report, count = fused_graph(model, x, "fused")
        joined = halves != "apart"
        assert count["rms_norm_quantize"] == count[ACTS[act][0].__name__] == count["quantized_linear"] == 1
        assert count["scaled_linear"] == 3 - joined
        assert not count["rsqrt"] + count["silu"] + count["gelu"] + count["sigmoid"] + count["dynamic_range"]
    else:
        found = graph_pass(bits="fused")
        with torch.no_grad():
            y = torch.compile(model, fullgraph=True, options={"post_grad_custom_pre_pass": found})(x)
        (report,) = found.reports
    assert sorted(report.fused.values()) == sorted([NORM_OF_SUM, GATED])
    assert len(report.left) == 1
    op, fields = ACTS[act]
    with torch.no_grad():
        assert same(y, model.by_hand(x, op, **fields))


@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_layers_that_propagate_do_so_in_a_graph(mode):
    rng = fresh("propagate", mode)
    model = made(rng, lambda: Block(FeedForward(F.silu), nn.RMSNorm(D, eps=1e-5)))
    for layer in (model.wo, model.feed_forward.w1, model.feed_forward.w2, model.feed_forward.w3):
        layer.propagating()
    x = normal(rng, 2, 3, D, dtype=torch.bfloat16)
    x[1, 2, 7] = torch.nan
    model.norm.weight.data[3] = torch.nan if mode == "fused" else 1
    y, _, count = fused_graph(model, x, mode)
    assert count["rms_norm_quantize"] == count["silu_mul_quantize"] == (mode == "fused")
    assert y[1, 2].isnan().all()
    assert y.isnan().all() == (mode == "fused")


@pytest.mark.parametrize("bits", ["eager", "fused"])
def test_one_graph_serves_any_number_of_rows(bits):
    rng = fresh("rows", bits)
    model = made(rng, lambda: Block(FeedForward(), nn.RMSNorm(D, eps=1e-5)))
    backend = fused_backend(bits=bits)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for shape in ((2, 3), (4, 5), (7, 2), (3, 9)):
            x = normal(rng, *shape, D, dtype=torch.bfloat16)
            want = model(x) if bits == "eager" else model.by_hand(x, OPS.silu_mul_quantize)
            assert same(compiled(x), want)
    assert len(backend.reports) <= 2
    assert backend.reports[0].fused == backend.reports[-1].fused


def test_gradients_are_those_of_the_model():
    rng = fresh("gradients")
    model = made(rng, FeedForward).float()
    backend = fused_backend(bits="fused")
    found = []
    for run in (model, torch.compile(model, backend=backend)):
        x = normal(fresh("x"), 3, D).requires_grad_()
        run(x).square().sum().backward()
        found.append(x.grad)
    assert same(*found)
    assert not backend.reports


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_graph_of_export_is_fused():
    rng = fresh("export")
    model = made(rng, lambda: Block(FeedForward(), nn.RMSNorm(D, eps=1e-5)))
    x = normal(rng, 2, 3, D, dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).run_decompositions({})
        assert len(fuse_graph(program.graph_module, bits="fused").fused) == 2
        assert same(program.module()(x), model.by_hand(x, OPS.silu_mul_quantize))


def test_a_layer_of_transformers_is_fused():
    rng = fresh("transformers")
    sizes = {"hidden_size": D, "intermediate_size": H, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, head_dim=8, attn_implementation="sdpa")
    model = made(rng, transformers.models.llama.modeling_llama.LlamaDecoderLayer, config, 0)
    x = normal(rng, 1, 3, D, dtype=torch.bfloat16)
    angles = {"position_embeddings": (torch.ones(1, 3, 8).bfloat16(), torch.zeros(1, 3, 8).bfloat16())}
    for bits, shared, whole in (("eager", 2, ()), ("fused", 0, (NORM, NORM_OF_SUM, GATED))):
        torch._dynamo.reset()
        y, report, count = fused_graph(model, x, bits, **angles)
        assert count["dynamic_range"] == shared
        assert sorted(report.fused.values()) == sorted([SHARED] * shared + list(whole))
        with torch.no_grad():
            assert bits == "fused" or same(y, model(x, **angles))
            assert (y - model(x, **angles)).float().norm() < 0.05 * y.float().norm()


class Both(FeedForward):
    """Its gated product is used twice."""

    def forward(self, x):
        h = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(h) + h.sum()


class SeenNorm(Block):
    def forward(self, x):
        h = x + self.wo(x)
        n = self.norm(h)
        return n + self.feed_forward(n)


class Broadcast(Joined):
    def forward(self, x):
        gate, up = self.halve(self.w1(x))
        return self.w2(F.silu(gate) * up[..., :1])


class NarrowNorm(HandNorm):
    """It computes the mean of squares in 16 bits."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class FirstAxisNorm(HandNorm):
    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + self.eps)).type_as(x) * self.weight


class OtherNorm(HandNorm):
    """It takes the mean of squares of another tensor."""

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt((wide + 1).pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class WideNorm(HandNorm):
    """Its weight is f32, as 1 + weight of Gemma."""

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


def nearly_gelu(x):
    return 0.5 * x * (1 + torch.erf(x * 0.7))


class Ungated(FeedForward):
    def forward(self, x):
        return self.w2(self.w1(x) + self.w3(x))


MISSES = {
    "a product that is used elsewhere": (Both, (), "is also used by sum"),
    "a norm that is used elsewhere": (SeenNorm, (Ungated, NORMS["nn"]), "is also used by add"),
    "relu": (FeedForward, (F.relu,), "no known form"),
    "nearly gelu": (FeedForward, (nearly_gelu,), "no known form"),
    "a gate that is broadcast": (Broadcast, (), "differ in dtype or shape"),
    "squares of 16 bits": (Block, (Ungated, lambda: NarrowNorm(D)), "no known form"),
    "another axis": (Block, (Ungated, lambda: FirstAxisNorm(D)), "no known form"),
    "squares of another tensor": (Block, (Ungated, lambda: OtherNorm(D)), "no known form"),
    "a wide weight": (Block, (Ungated, lambda: WideNorm(D)), "has another dtype or shape"),
}


@pytest.mark.parametrize("case", MISSES)
def test_what_only_looks_like_it_keeps_its_bits(case):
    kind, given, why = MISSES[case]
    rng = fresh("misses", case)
    model = made(rng, lambda: kind(*(each() if kind in (Block, SeenNorm) else each for each in given)))
    x = normal(rng, 2, 3, D, dtype=torch.bfloat16)
    y, report, count = fused_graph(model, x, "fused")
    with torch.no_grad():
        assert same(y, model(x))
    assert not set(report.fused.values()) & {NORM, NORM_OF_SUM, GATED}
    assert why in str(report)
    assert not count["rms_norm_quantize"] + count["silu_mul_quantize"] + count["gelu_mul_quantize"]


def test_layers_with_other_ranges_or_in_f64_keep_their_bits():
    rng = fresh("ranges")
    layer = DynamicLinear.from_linear(nn.Linear(D, H))
    given = layer.weight_q, layer.weight_scale.view(-1), None, layer.bias

    def run(x):
        narrow = OPS.quantized_linear(x, *given, q_min=-7, q_max=7)
        wide = OPS.quantized_linear(x.double(), *given)
        return narrow + OPS.quantized_linear(x, *given), wide + OPS.quantized_linear(x.double(), *given)

    x = normal(rng, 3, D)
    found, report, count = fused_graph(run, x, "eager")
    assert all(map(same, found, run(x)))
    assert not report.fused
    assert count["quantized_linear"] == 4
    assert "another range of codes" in str(report)
    assert "computes in f64" in str(report)


STATIC = {"q_min": -128, "q_max": 127, "output_element": "s8"}
KINDS = {"norm": NORM, "norm of a sum": NORM_OF_SUM, "norm of a sum that decides the scale": NORM, "gate": GATED}


@pytest.mark.parametrize("kind", KINDS)
def test_static_codes_are_those_of_the_fused_ops_by_hand(kind):
    rng = fresh("static", kind)
    x, y = (normal(rng, 2, 3, D, dtype=torch.bfloat16) for _ in range(2))
    weight, zero = normal(rng, D, dtype=torch.bfloat16), torch.tensor([rng.integers(-90, 90)], dtype=torch.int32)
    given = torch.tensor([rng.uniform(0.01, 0.1)]).float()

    def run(x, y):
        total = x + y if "sum" in kind else x
        h = F.silu(x) * y if kind == "gate" else F.rms_norm(total, (D,), weight, 1e-5)
        scale = total.float().abs().amax().reshape(1) / 64 if "decides" in kind else given
        return OPS.quantize_per_tensor(h, scale, zero, **STATIC), total, scale

    (*_, total, scale), report, count = fused_graph(run, x, "eager", y=y)
    assert count["quantize_per_tensor"] == 1
    assert "only with bits='fused'" in str(report)
    torch._dynamo.reset()
    (codes, *rest), report, count = fused_graph(run, x, "fused", y=y)
    assert list(report.fused.values()) == [KINDS[kind]]
    assert count["quantize_per_tensor"] + count["rsqrt"] + count["silu"] == 0
    assert count["add"] == (kind == "norm of a sum that decides the scale")
    tensors = {"scale": scale, "zero_point": zero, "scaling": "static", **STATIC}
    if kind == "gate":
        (want,) = OPS.silu_mul_quantize(gate=x, up=y, **tensors)
    else:
        want = OPS.rms_norm_quantize(total, weight=weight, eps=1e-5, **tensors)[0]
    assert all(map(same, (codes, *rest), (want, total, scale)))


REFUSED = {
    "codes of 4 bits": (1e-5, -8, "s4", "another element than s8 and u8"),
    "eps": (1e300, -128, "s8", "eps must be finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_fused_op_refuses_is_a_reason(case):
    eps, low, element, why = REFUSED[case]
    x, scale, zero = normal(fresh(case), 2, D), torch.ones(1), torch.zeros(1, dtype=torch.int32)

    def run(x):
        normed = F.rms_norm(x, (D,), None, eps)
        return OPS.quantize_per_tensor(normed, scale, zero, q_min=low, q_max=-low - 1, output_element=element)

    found, report, _ = fused_graph(run, x, "fused")
    assert same(found, run(x))
    assert not report.fused
    assert why in str(report)


def test_numbers_that_are_inputs_of_the_graph_are_a_reason():
    rng = fresh("numbers")
    model = made(rng, lambda: Block(FeedForward(), HandNorm(D)))
    x = normal(rng, 2, 3, D, dtype=torch.bfloat16)
    backend = fused_backend(bits="fused")
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=True)(x)
    assert "dynamic=True makes one of every number" in str(backend.reports[0])


def test_arguments_of_the_wrong_type_are_refused():
    with pytest.raises(InvalidProblem, match=r"graph_module must be a torch\.fx\.GraphModule"):
        fuse_graph(nn.Linear(2, 2))
    for each in (lambda bits: fuse_graph(torch.fx.symbolic_trace(nn.ReLU()), bits=bits), graph_pass, fused_backend):
        with pytest.raises(InvalidProblem, match="bits must be one of eager, fused"):
            each(bits="both") if each in (graph_pass, fused_backend) else each("both")


def test_the_key_of_inductors_cache_depends_on_bits_and_sources(monkeypatch, tmp_path):
    keys = [graph_pass(bits=bits).uuid() for bits in ("eager", "fused")]
    (tmp_path / "patterns.py").write_text("changed")
    monkeypatch.setattr("skuda.torch.fuse.patterns.__file__", str(tmp_path / "patterns.py"))
    keys.append(graph_pass().uuid())
    assert len(set(keys)) == 3
