"""`fuse_`: the bits of fused models, and the structures that it leaves unchanged."""

import copy
import dataclasses
import re
import warnings
from functools import partial, wraps

import pytest
import torch
from support import fresh, sampled
from tensors import array_of, copies, same, tensor_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import prune

import skuda
from skuda.registry.errors import InvalidProblem
from skuda.tools.studies import llama
from skuda.torch import DynamicLinear, StaticLinear, fuse_
from skuda.torch.fuse.fused_modules import FusedAttention, FusedDecoderLayer, FusedGatedMLP
from skuda.torch.linear.joined import Part

SIZES = llama.LlamaSizes(hidden=48, intermediate=72, heads=4, kv_heads=2, layers=2)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODES = {"q_min": -127, "q_max": 127, "output_element": "s8"}


def drawn(rng, *shape, dtype=torch.float32):
    """Gaussian numbers, and some rows of another size."""
    found = rng.standard_normal(shape) * rng.choice([1e-2, 1.0, 30.0], (*shape[:-1], 1))
    return torch.from_numpy(found).to(dtype)


def quantized(model):
    """Replace every linear layer of a model, and return the model."""
    for name, child in list(model.named_children()):
        if type(child) is nn.Linear:
            setattr(model, name, DynamicLinear.from_linear(child))
        else:
            quantized(child)
    return model


def vary(model, rng):
    """Draw the vectors of norms, so that they are not 1, and of biases."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.copy_(torch.from_numpy(rng.uniform(0.3, 1.7, parameter.shape)))
    return model


def stack(rng, dtype=torch.bfloat16, sizes=SIZES, change=lambda stack: None):
    """A quantized stack; `change` is applied before."""
    made = llama.drawn(llama.LlamaStack, sizes, seed=int(rng.integers(1 << 30)), dtype=dtype)
    change(made)
    return quantized(vary(made.to(dtype), rng)).requires_grad_(requires_grad=False)


def call(rng, model, dtype=torch.bfloat16, rows=(2, 1), positions=5):
    """Return a function that runs a stack, or another module of the sizes, on the same input."""
    x = drawn(rng, *rows, SIZES.hidden, dtype=dtype)
    if not isinstance(model, llama.LlamaStack):
        return lambda module: module(x)
    at = torch.arange(positions - rows[1], positions)
    angles = llama.angles_of(SIZES, at, dtype)
    seed = int(rng.integers(1 << 30))
    return lambda module: module(x, angles, llama.random_caches(SIZES, rows[0], positions, x, seed), at)


class NumpyLinear(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = (layer,)

    def arrays(self):
        (layer,) = self.layer
        bias = {} if layer.bias is None else {"bias": array_of(layer.bias)}
        return {"weight_q": array_of(layer.weight_q), "weight_scale": array_of(layer.weight_scale).reshape(-1), **bias}

    def forward(self, x):
        rows = array_of(x.reshape(-1, x.shape[-1]))
        y = skuda.ops.quantized_linear(activation=rows, **self.arrays())
        return tensor_of(y).view(*x.shape[:-1], -1)


class NumpyNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = (norm,)

    def forward(self, x):
        (norm,) = self.norm
        op = skuda.ops.layer_norm_quantize if isinstance(norm, nn.LayerNorm) else skuda.ops.rms_norm_quantize
        vectors = {name: array_of(vector) for name, vector in norm.named_parameters()}
        rows = array_of(x.reshape(-1, x.shape[-1]))
        return tensor_of(op(input=rows, eps=norm.eps, has_normalized=True, **vectors, **CODES).normalized_out).view(
            x.shape
        )


class NumpyMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate, self.up, self.down = (NumpyLinear(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down"))
        self.act = mlp.act_fn

    def forward(self, x):
        gate, up = (array_of(layer(x)).reshape(-1, SIZES.intermediate) for layer in (self.gate, self.up))
        if isinstance(self.act, nn.GELU):
            form = {"none": "erf", "tanh": "tanh"}[self.act.approximate]
            found = skuda.ops.gelu_mul_quantize(gate=gate, up=up, approximation=form, **CODES)
        else:
            found = skuda.ops.silu_mul_quantize(gate=gate, up=up, **CODES)
        element = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[x.dtype]
        codes, scale = found.output, found.scale_out
        y = skuda.ops.scaled_linear(act_q=codes, act_scale=scale, output_element=element, **self.down.arrays())
        return tensor_of(y).view(x.shape)


def numpy_stack(model):
    """A stack with the modules and the forward of an unfused one, but every op run by itself in NumPy."""
    made = copy.deepcopy(model)
    for layer, source in zip(made.layers, model.layers, strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, NumpyNorm(getattr(source, name)))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, NumpyLinear(getattr(source.self_attn, name)))
        layer.mlp = NumpyMLP(source.mlp)
    return made


def change_parts(norm, act, *, bias):
    """Return a function that gives every layer this norm and activation, and biases to the projections."""

    def change(model):
        for layer in model.layers:
            layer.input_layernorm, layer.post_attention_layernorm = norm(SIZES.hidden), norm(SIZES.hidden)
            layer.mlp.act_fn = act()
            for module in (layer.self_attn, layer.mlp):
                for name, child in list(module.named_children()):
                    if bias and isinstance(child, nn.Linear):
                        setattr(module, name, nn.Linear(child.in_features, child.out_features))

    return change


PARTS = [
    pytest.param(partial(nn.RMSNorm, eps=1e-5), nn.SiLU, id="rms-silu"),
    pytest.param(partial(nn.RMSNorm, eps=1e-6, elementwise_affine=False), partial(nn.GELU, "tanh"), id="bare-tanh"),
    pytest.param(nn.LayerNorm, nn.GELU, id="layer-gelu"),
    pytest.param(partial(nn.LayerNorm, bias=False), nn.SiLU, id="unbiased-silu"),
]


@pytest.mark.parametrize("rows", sampled([(2, 1), (1, 4), (3, 1)]))
@pytest.mark.parametrize("dtype", sampled(DTYPES, 2))
@pytest.mark.parametrize(("norm", "act"), PARTS)
def test_a_fused_stack_has_the_bits_of_numpys_ops(norm, act, dtype, rows):
    rng = fresh("numpy", dtype, rows)
    model = stack(rng, dtype, change=change_parts(norm, act, bias=bool(rng.integers(2))))
    positions = rows[1] if rows[1] > 1 else 5
    run = call(rng, model, dtype, rows, positions)
    want = run(numpy_stack(model))
    report = fuse_(model)
    assert len(report.fused) == 6
    assert not report.left
    assert {type(module).__mro__[1] for module in model.modules() if "Fused" in type(module).__name__} == {
        FusedDecoderLayer,
        FusedAttention,
        FusedGatedMLP,
    }
    assert same(run(model), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_joined_products_have_the_bits_of_those_that_they_join(dtype):
    rng = fresh("joined", dtype)
    model = stack(rng, dtype, change=change_parts(partial(nn.RMSNorm, eps=None), nn.Tanh, bias=True))
    run = call(rng, model, dtype)
    want = run(model)
    with pytest.warns(
        UserWarning, match="because its activation, Tanh, is neither SiLU nor GELU: layers.0.mlp, layers.1"
    ):
        assert set(fuse_(model).fused) == {"layers.0.self_attn", "layers.1.self_attn"}
    attention = model.layers[0].self_attn
    assert isinstance(attention, llama.LlamaAttention)
    assert all(isinstance(getattr(attention, name), Part) for name in ("q_proj", "k_proj", "v_proj"))
    assert same(run(model), want)


BACKENDS = ["inductor", *(pytest.param(name, marks=pytest.mark.full) for name in ("eager", "aot_eager"))]


@pytest.fixture
def compiled():
    """Return a function that compiles a module for a backend, and the counter of its graphs."""

    def made(module, backend):
        counted = CompileCounterWithBackend(backend)
        return torch.compile(module, backend=counted, fullgraph=True), counted

    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(emulate_precision_casts=True):
        yield made
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_stack_has_the_same_bits(compiled, backend):
    rng = fresh("compiled", backend)
    model = stack(rng)
    fuse_(model)
    run = call(rng, model)
    made, _ = compiled(model, backend)
    assert same(run(made), run(model))


class Cacheless(llama.LlamaAttention):
    def forward(self, hidden_states, angles, cache, positions):
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_batches_and_lengths_of_any_size_need_two_graphs(compiled, backend):
    rng = fresh("sizes", backend)
    layer = stack(rng).layers[0]
    layer.self_attn.__class__ = Cacheless
    assert len(fuse_(layer).fused) == 3
    made, counted = compiled(layer, backend)
    for rows in ((2, 3), (3, 4), (5, 7), (4, 2), (9, 11)):
        run = call(rng, layer, rows=rows)
        assert same(run(made), run(layer))
    assert counted.frame_count <= 2


def test_copies_are_models_of_their_own():
    rng = fresh("copies")
    model = stack(rng)
    fuse_(model)
    run = call(rng, model)
    want = run(model)
    for other in copies(model):
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        assert same(run(other), want)
        other.layers[0].self_attn.q_proj.weight_q.zero_()
        assert not same(run(other), want)
        assert same(run(model), want)


def test_the_names_and_tensors_of_a_state_dict_stay():
    rng = fresh("state")
    model, other = stack(rng), stack(rng)
    run = call(rng, model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fuse_(model)
    saved = model.state_dict()
    assert set(saved) == set(state)
    assert all(saved[name].dtype is state[name].dtype and torch.equal(saved[name], state[name]) for name in state)
    wanted = copy.deepcopy(other)
    fuse_(wanted)
    for assign in (False, True):
        fused = copy.deepcopy(model)
        assert not any(fused.load_state_dict(other.state_dict(), assign=assign))
        assert same(run(fused), run(wanted))
    plain = copy.deepcopy(other)
    assert not any(plain.load_state_dict(saved))
    fuse_(plain)
    assert same(run(plain), run(model))


def test_a_state_dict_that_does_not_fit_is_refused():
    model = stack(fresh("refused"))
    fuse_(model)
    state = model.state_dict()
    name = "layers.1.self_attn.k_proj.weight"
    without = {key: value for key, value in state.items() if key != name}
    assert model.load_state_dict(without, strict=False).missing_keys == [name]
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{name}"'):
        model.load_state_dict(without)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*k_proj\.other"):
        model.load_state_dict({**state, "layers.1.self_attn.k_proj.other": state[name]})
    with pytest.raises(RuntimeError, match=f"{name}: the checkpoint has shape"):
        model.load_state_dict({**state, name: state[name][1:]})
    with pytest.raises(RuntimeError, match="on meta"):
        model.to("meta").load_state_dict(state, assign=True)


def test_casts_keep_scales():
    rng = fresh("casts")
    model = stack(rng, torch.float32)
    cast = copy.deepcopy(model).half()
    fuse_(cast)
    fuse_(model)
    model.half()
    run = call(rng, model, torch.float16)
    assert same(run(model), run(cast))
    assert {one.dtype for name, one in model.state_dict().items() if "scale" in name} == {torch.float32}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("compile_with", sampled([None, "aot_eager"]))
@pytest.mark.parametrize(("norm", "act"), PARTS)
def test_a_fused_layer_has_the_gradients_of_the_original(norm, act, compile_with):
    rng = fresh("gradients", compile_with)
    layer = stack(rng, torch.float32, change=change_parts(norm, act, bias=True)).layers[0]
    fused = copy.deepcopy(layer)
    fuse_(fused)
    x, towards = drawn(rng, 1, 4, SIZES.hidden), drawn(rng, 1, 4, SIZES.hidden)
    angles = llama.angles_of(SIZES, torch.arange(4), torch.float32)
    with torch.no_grad():
        want = fused(x, angles=angles)
    found = []
    for module in (layer, fused):
        for parameter in module.parameters():
            parameter.requires_grad_()
        given = x.clone().requires_grad_()
        run = module if compile_with is None else torch.compile(module, backend=compile_with, fullgraph=True)
        y = run(given, angles=angles)
        (y * towards).sum().backward()
        found.append([y.detach(), given.grad, *(parameter.grad for parameter in module.parameters())])
    torch._dynamo.reset()
    assert same(found[1][0], want)
    for got, one in zip(found[1], found[0], strict=True):
        assert (got - one).norm() < 0.05 * one.norm()
    with torch.no_grad():
        assert same(fused(x, angles=angles), want)


def test_autocast_is_that_of_the_original():
    rng = fresh("autocast")
    model = stack(rng, torch.float32)
    layer = copy.deepcopy(model).layers[0]
    fused = copy.deepcopy(layer)
    fuse_(fused)
    x = drawn(rng, 2, 1, SIZES.hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.mlp(x).dtype is torch.bfloat16
        angles = torch.ones(1, 12).bfloat16(), torch.zeros(1, 12).bfloat16()
        given = {"angles": angles, "positions": torch.arange(1)}
        found = [one(x, cache=tuple(torch.zeros(2, 2, 2, 1, 12).bfloat16()), **given) for one in (layer, fused)]
    assert found[0].dtype is found[1].dtype
    assert (found[0] - found[1]).norm() < 1e-2 * found[0].norm()


# --- what is left ----------------------------------------------------------------------------------------------------


class Residual(llama.LlamaAttention):
    def forward(self, hidden_states, angles, cache, positions):
        found, weights = super().forward(hidden_states, angles, cache, positions)
        return found + hidden_states, weights


class Twice(llama.LlamaAttention):
    def forward(self, hidden_states, angles, cache, positions):
        q, k = self.q_proj(hidden_states), self.k_proj(hidden_states)
        return self.o_proj(q + self.q_proj(hidden_states)), self.v_proj(hidden_states) + k


class Reflecting(llama.LlamaAttention):
    def forward(self, hidden_states, angles, cache, positions):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return self.o_proj(q + len(locals())), k + v


class Ungated(llama.LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Branching(llama.LlamaMLP):
    def forward(self, x):
        if x.shape[0] > 1:
            return self.down_proj(self.gate_proj(x))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def loud(function):
    @wraps(function)
    def wrapped(*args):
        return -function(*args)

    return wrapped


class Called(llama.LlamaMLP):
    def __call__(self, x):
        return -super().__call__(x)


class Unnamed(llama.LlamaMLP):
    def forward(*given, scale=1):
        return given[0].down_proj(scale * given[1])


class Wrapped(llama.LlamaMLP):
    forward = loud(llama.LlamaMLP.forward)


class Scaled(llama.LlamaLayer):
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), angles=angles, cache=cache, positions=positions
        )
        hidden_states = hidden_states + attended
        return hidden_states + 2 * self.mlp(self.post_attention_layernorm(hidden_states))


class Fixed(llama.LlamaLayer):
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), angles=angles, cache=cache, positions=None
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Repeating(llama.LlamaLayer):
    def forward(self, hidden_states, angles=None, cache=None, positions=None):
        given = self.input_layernorm(hidden_states)
        first = self.self_attn(hidden_states=given, angles=angles, cache=cache, positions=positions)[0]
        second = self.self_attn(hidden_states=given, angles=angles, cache=cache, positions=positions)[0]
        return hidden_states + first + self.mlp(self.post_attention_layernorm(hidden_states + second))


class Shifted(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) * (1.0 + self.weight)


def of_class(path, kind):
    """Return a function that changes the class of a module of a layer."""
    return lambda layer: setattr(layer.get_submodule(path), "__class__", kind)


def hooked(path, register):
    return lambda layer: getattr(layer.get_submodule(path), register)(lambda *_: None)


def with_child(path, name, make):
    return lambda layer: setattr(layer.get_submodule(path), name, make(layer))


def parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer.post_attention_layernorm, "weight", nn.Identity())


def static(layer):
    old = layer.mlp.up_proj
    return StaticLinear(old.weight_q, old.weight_scale, input_scale=torch.ones(1))


def biased(layer):
    old = layer.self_attn.k_proj
    return DynamicLinear(old.weight_q, old.weight_scale, torch.ones(old.out_features))


def narrow_scale(layer):
    old = layer.self_attn.v_proj
    return DynamicLinear(old.weight_q, old.weight_scale.bfloat16())


LEFT = {
    "another use of the input": (of_class("self_attn", Residual), "self_attn", "may use hidden_states in another way"),
    "a projection twice": (of_class("self_attn", Twice), "self_attn", "calls q_proj 2 times"),
    "reflection": (of_class("self_attn", Reflecting), "self_attn", "may use locals in another way"),
    "no gate": (of_class("mlp", Ungated), "mlp", "not a known form of a gated MLP"),
    "a branch": (of_class("mlp", Branching), "mlp", "does more than assign names"),
    "a wrapped forward": (of_class("mlp", Wrapped), "mlp", "is wrapped"),
    "a call of its own": (of_class("mlp", Called), "mlp", "was replaced"),
    "no input by name": (of_class("mlp", Unnamed), "mlp", "not a plain method of an input"),
    "a replaced norm": (lambda layer: setattr(layer.input_layernorm, "forward", torch.neg), "", "was replaced"),
    "compiled": (lambda layer: layer.mlp.compile(backend="eager"), "mlp", "is compiled"),
    "a replaced forward": (lambda layer: setattr(layer.mlp, "forward", torch.neg), "mlp", "was replaced"),
    "a scaled residual": (of_class("", Scaled), "", "not a known form of a decoder layer"),
    "an attention twice": (of_class("", Repeating), "", "reads self.self_attn twice"),
    "another argument": (of_class("", Fixed), "", "passes more than its arguments on"),
    "another norm": (of_class("input_layernorm", Shifted), "", "input_layernorm"),
    "another activation": (with_child("mlp", "act_fn", lambda _: nn.Tanh()), "mlp", "neither SiLU nor GELU"),
    "static": (with_child("mlp", "up_proj", static), "mlp", "up_proj is StaticLinear"),
    "real": (with_child("mlp", "up_proj", lambda _: nn.Linear(48, 72)), "mlp", "up_proj is Linear, no DynamicLinear"),
    "one bias": (with_child("self_attn", "k_proj", biased), "self_attn", "has a bias, the other has none"),
    "scales": (with_child("self_attn", "v_proj", narrow_scale), "self_attn", "differ in a dtype"),
    "shared": (with_child("self_attn", "o_proj", lambda layer: layer.mlp.up_proj), "mlp", "belongs to other modules"),
    "a taken name": (with_child("self_attn", "qkv_proj", lambda _: nn.Identity()), "self_attn", "a qkv_proj already"),
    "torch's eps": (with_child("", "input_layernorm", lambda _: nn.RMSNorm(48)), "", "its eps is torch's default"),
    "a forward hook": (hooked("self_attn.k_proj", "register_forward_hook"), "self_attn", "has forward hooks"),
    "a pre-hook": (hooked("mlp", "register_forward_pre_hook"), "mlp", "has forward pre hooks"),
    "a backward hook": (hooked("mlp.act_fn", "register_full_backward_hook"), "mlp", "has backward hooks"),
    "a hook of a norm": (
        hooked("input_layernorm", "register_forward_hook"),
        "",
        "input_layernorm: it has forward hooks",
    ),
    "a parametrization": (parametrized, "", "has parametrizations"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_proven_stays_as_it_was(case):
    change, path, why = LEFT[case]
    layer = stack(fresh("left")).layers[0]
    change(layer)
    kind, children = type(layer.get_submodule(path)), dict(layer.get_submodule(path).named_children())
    with pytest.warns(UserWarning, match=re.escape(why)) as told:
        report = fuse_(layer)
    assert why in report.left[path]
    assert f"left: {report.left[path]}" in str(report)
    assert f"  because {report.left[path]}: {path or 'the model'}" in str(told[0].message)
    assert type(layer.get_submodule(path)) is kind
    assert dict(layer.get_submodule(path).named_children()) == children
    assert type(layer).forward is kind.forward or path


def test_a_model_is_fused_once():
    rng = fresh("once")
    model = stack(rng)
    fuse_(model)
    run = call(rng, model)
    want = run(model)
    again = fuse_(model)
    assert not again.fused
    assert not again.left
    assert "nothing to fuse" in str(again)
    assert same(run(model), want)


def test_layers_of_no_known_structure_are_named():
    loose = nn.ModuleDict({"up_proj": nn.Linear(4, 4), "down_proj": nn.Linear(4, 4), "norm": nn.RMSNorm(4)})
    assert fuse_(quantized(loose)).left == {"": "up_proj, down_proj are not part of a known structure"}
    assert not fuse_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).left


class WithoutNorms(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


def test_one_warning_counts_the_modules_that_could_have_been_fused():
    model = stack(fresh("warning"), sizes=dataclasses.replace(SIZES, layers=5))
    for layer in model.layers[:4]:
        layer.mlp.act_fn = nn.Tanh()
    model.layers[4].mlp.up_proj = nn.Linear(48, 72)
    without_norms = WithoutNorms(stack(fresh("without norms")).layers[0].mlp)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fuse_(model)
        assert fuse_(without_norms).left == {"": "its forward is not a known form of a decoder layer"}
        assert not fuse_(llama.LlamaStack(SIZES)).left, "nothing in it is quantized"
    (told,) = told
    assert told.filename == __file__
    assert str(told.message).splitlines() == [
        "fuse_ left some modules as they were:",
        "  because its activation, Tanh, is neither SiLU nor GELU: layers.0.mlp, layers.1.mlp, layers.2.mlp and 1 more",
        "  because up_proj is Linear, no DynamicLinear: layers.4.mlp",
        "  because its mlp is not fused: layers.0, layers.1, layers.2 and 2 more",
    ]


def test_an_input_of_another_width_is_refused():
    model = stack(fresh("width"))
    fuse_(model)
    with pytest.raises(InvalidProblem, match=r"be the output of the joined layer, or an input of shape \[..., 48\]"):
        model.layers[0].self_attn.k_proj(torch.ones(2, SIZES.hidden + 1, dtype=torch.bfloat16))
    with pytest.raises(InvalidProblem):
        model.layers[0].mlp(torch.ones(2, SIZES.hidden + 1, dtype=torch.bfloat16))


@pytest.mark.parametrize("width", [72, 24])  # with 24, the joined output is as wide as the input
def test_a_part_takes_the_input_of_the_original_layer_too(width):
    rng = fresh("part", width)
    mlp = stack(rng, sizes=dataclasses.replace(SIZES, intermediate=width)).layers[0].mlp
    original = mlp.up_proj
    fuse_(mlp)
    x = drawn(rng, 3, SIZES.hidden, dtype=torch.bfloat16)
    assert same(mlp.up_proj(x), original(x))


# --- what is done to a fused module -----------------------------------------------------------------------------------


def pruned(layer):
    prune.random_unstructured(layer.input_layernorm, "weight", 0.5)


def with_forward(path):
    return lambda layer: setattr(layer.get_submodule(path), "forward", lambda x: -x)


PARTS_HOOKED = [f"mlp.{name}" for name in ("gate_proj", "up_proj", "act_fn", "down_proj")]
PARTS_HOOKED += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]
PARTS_HOOKED += ["input_layernorm", "post_attention_layernorm", "mlp"]
SENT = {f"a forward hook of {path}": (hooked(path, "register_forward_hook"), "has hooks") for path in PARTS_HOOKED}
SENT |= {f"a pre-hook of {path}": (hooked(path, "register_forward_pre_hook"), "has hooks") for path in PARTS_HOOKED}
SENT |= {
    "a pre-hook of the attention": (hooked("self_attn", "register_forward_pre_hook"), "self_attn has hooks"),
    "another activation": (with_child("mlp", "act_fn", lambda _: nn.Tanh()), "act_fn was replaced"),
    "another norm": (with_child("", "input_layernorm", lambda _: Shifted(48).bfloat16()), "layernorm was replaced"),
    "a float layer": (
        with_child("mlp", "down_proj", lambda _: nn.Linear(72, 48).bfloat16()),
        "down_proj was replaced",
    ),
    "a layer of its own": (
        with_child(
            "self_attn",
            "k_proj",
            lambda layer: DynamicLinear(*map(torch.clone, layer.self_attn.k_proj.views().values())),
        ),
        "k_proj was replaced",
    ),
    "another mlp": (with_child("", "mlp", lambda _: nn.Linear(48, 48).bfloat16()), "mlp was replaced"),
    "pruned": (pruned, "input_layernorm has hooks"),
    "a forward of a norm": (with_forward("post_attention_layernorm"), "forward of post_attention_layernorm was"),
    "a forward of the activation": (with_forward("mlp.act_fn"), "forward of act_fn was"),
    "a forward of the mlp": (with_forward("mlp"), "forward of mlp was"),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("case", sampled(SENT, 12))
def test_a_fused_layer_whose_parts_changed_runs_the_original(case, copied):
    rng = fresh("sent", case)
    layer = stack(rng).layers[0]
    fused = copy.deepcopy(layer)
    fuse_(fused)
    change, why = SENT[case]
    seed = int(rng.integers(1 << 30))
    for each in (layer, fused):
        torch.manual_seed(seed)
        if case != "a layer of its own" or each is fused:
            change(each)
    fused = copy.deepcopy(fused) if copied else fused
    x, angles = (
        drawn(rng, 2, 3, SIZES.hidden, dtype=torch.bfloat16),
        llama.angles_of(SIZES, torch.arange(3), torch.bfloat16),
    )
    with torch.no_grad():
        with pytest.warns(UserWarning, match=why) as told:
            got = fused(x, angles)
        want = layer(x, angles)
        assert same(fused(x, angles), got)  # a second warning would be an error
    assert "runs its original forward" in str(told[0].message)
    # The parts that nothing was done to may stay fused. Those with another result are far from each other.
    assert (got.float() - want.float()).norm() < 0.1 * want.float().norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_layer_with_a_hook_runs_the_original():
    rng = fresh("compiled hook")
    mlp = stack(rng).layers[0].mlp
    want = copy.deepcopy(mlp)
    fuse_(mlp)
    for each in (want, mlp):
        each.act_fn.register_forward_hook(lambda _, __, got: got * 2)
    x = drawn(rng, 3, SIZES.hidden, dtype=torch.bfloat16)
    with torch.no_grad():
        assert same(torch.compile(mlp, backend="eager", fullgraph=True)(x), want(x))
    torch._dynamo.reset()


def test_global_hooks_are_a_reason_not_to_fuse():
    rng = fresh("global")
    layer = stack(rng).layers[0]
    fused = copy.deepcopy(layer)
    fuse_(fused)
    x, angles = (
        drawn(rng, 2, 3, SIZES.hidden, dtype=torch.bfloat16),
        llama.angles_of(SIZES, torch.arange(3), torch.bfloat16),
    )
    seen = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with torch.no_grad(), pytest.warns(UserWarning, match="hooks of all modules"):
            assert same(fused(x, angles), layer(x, angles))
        with pytest.warns(UserWarning, match="hooks of all modules"):
            assert not fuse_(layer).fused
    finally:
        hook.remove()
    assert {fused.mlp.act_fn, fused.input_layernorm, fused.self_attn.q_proj} < set(seen)
