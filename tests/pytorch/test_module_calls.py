"""A module calls the op that it explains, with its present tensors."""

from __future__ import annotations

import pytest
import torch
from support import fresh
from tensors import OPS, copies, same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from skuda.registry.errors import InvalidProblem
from skuda.torch import DynamicLinear, StaticLinear
from skuda.torch.ops.tensor_op import launched, run_module


def layer(rng, *, bias):
    codes = torch.from_numpy(rng.integers(-127, 127, (8, 16), "int8", endpoint=True))
    scale, shift = (torch.from_numpy(rng.random(8, "float32")) for _ in range(2))
    return DynamicLinear(codes, scale, shift if bias else None)


def explained(module, x):
    name, arguments = module.call(x)
    assert OPS[name].problem(**arguments).m == x.shape[:-1].numel()
    return getattr(torch.ops.skuda, name)(**arguments)


@pytest.fixture(params=[False, True], ids=["not recorded", "recorded"])
def recorded(request):
    """Whether gradients are recorded; without them, a layer calls its kernel itself where torch need not see it."""
    with torch.set_grad_enabled(request.param):
        yield request.param


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_called_is_what_is_explained(bias):
    rng = fresh(bias)
    module = layer(rng, bias=bias)
    for shape in ((16,), (3, 16), (2, 3, 16), (0, 16)):
        x = torch.from_numpy(rng.standard_normal(shape, "float32"))
        assert same(module(x), explained(module, x))
    x = torch.from_numpy(rng.standard_normal((3, 16), "float32"))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert same(compiled(x), module(x))
    other = layer(rng, bias=bias)
    want = other(x)
    assert same(torch.func.functional_call(module, other.state_dict(), (x,)), want)
    assert not same(module(x), want)
    module.load_state_dict(other.state_dict(), assign=True)
    assert same(module(x), want)
    module.load_state_dict(layer(rng, bias=bias).state_dict())
    assert same(module(x), explained(module, x))
    for moved in copies(module):
        moved.weight_q.neg_()
        assert same(moved(x), explained(moved, x))
        assert not same(moved(x), module(x))
    module.weight_scale.data = module.weight_scale * 3
    assert same(module(x), explained(module, x))
    module.bias = torch.ones(8)
    assert same(module(x), explained(module, x))
    assert same(module(x.t().contiguous().t()), module(x))
    assert same(module(x.bfloat16()), explained(module, x.bfloat16()))


@pytest.mark.parametrize("shifted", [False, True])
def test_a_static_layer_runs_known_launches_with_its_present_tensors(shifted, monkeypatch):
    rng = fresh(shifted)

    def made():
        weight = layer(rng, bias=True)
        held = weight.weight_q, weight.weight_scale, weight.bias
        zero_point = torch.tensor([int(rng.integers(-9, 9))], dtype=torch.int32) if shifted else None
        return StaticLinear(*held, input_scale=torch.from_numpy(rng.random(1, "float32")), input_zero_point=zero_point)

    module, other, x = made(), made(), torch.from_numpy(rng.standard_normal((2, 3, 16), "float32"))
    want, others = module(x), other(x)
    monkeypatch.setattr(StaticLinear, "_taken", None)  # which every call that is not known takes
    assert same(module(x.clone()), want)
    module.load_state_dict(other.state_dict(), assign=True)
    assert same(module(x), others)
    monkeypatch.undo()
    assert same(module(x.bfloat16()), explained_static(module, x.bfloat16()))
    with pytest.raises(InvalidProblem, match="StaticLinear: input must be detached"):
        module(x.clone().requires_grad_())


def explained_static(module, x):
    name, arguments = module.call(x)
    return getattr(torch.ops.skuda, name)(**arguments | {"act_q": module.codes(x)})


def test_what_looks_at_ops_sees_them():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    rng, seen = fresh(), []
    module, x = layer(rng, bias=True), torch.from_numpy(rng.standard_normal((3, 16), "float32"))
    with torch.no_grad():
        want = module(x)
        with Names():
            assert same(module(x), want)
        assert "skuda::quantized_linear" in seen
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            assert same(module(x), want)
        assert "skuda::quantized_linear" in [event.name for event in profile.events()]
        traced = make_fx(module)(x)
        assert "skuda.quantized_linear" in traced.code
        assert same(traced(x), want)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x).dtype is torch.bfloat16
        with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
            assert module(fakes.from_tensor(x)).shape == want.shape


def test_a_parameter_is_recognized_unless_gradients_are_recorded():
    """The weight of a norm is one, and requires grad in a model that is only used."""
    x, weight = torch.randn(2, 3, 16), torch.nn.Parameter(torch.rand(16))
    op, fields = "rms_norm_quantize", {"eps": 1e-5, "q_min": -127, "q_max": 127, "output_element": "s8"}
    key, tensors = ("a norm", x.shape), (x, None, weight)
    assert launched(key, *tensors) is None
    with torch.no_grad():
        want = run_module(op, key, tensors, fields)
        found = launched(key, *tensors)
        assert found is not None
        assert all(map(torch.equal, found, want))
        assert launched(key, x.double(), None, weight) is None
    assert launched(key, *tensors) is None, "gradients are recorded"
    with torch.inference_mode():
        assert launched(key, *tensors) is None, "other dispatch keys"
        assert all(map(torch.equal, run_module(op, key, tensors, fields), want))
        assert launched(key, *tensors) is not None
    assert launched(key, x, None, weight.detach()) is None, "no parameter"
