"""An activation is a value, and a new one is a class: no layer changes for it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from support import fresh
from tensors import assert_same, normal
from test_formats import OfTensors

from skuda.dispatch.shard import on_ranks
from skuda.dispatch.shard.layer import LayerInput
from skuda.registry.errors import InvalidProblem
from skuda.torch import ColumnLinear, DynamicLinear, RowLinear, SmoothedLinear, StaticLinear
from skuda.torch.exact.exact_modules import ExactHead
from skuda.torch.linear.activation import PER_ROW, ActivationQuant, PerRow, Static
from skuda.torch.linear.int8_linear import Int8Linear
from skuda.torch.ops.dtypes import element_of

N, K = 32, 256


@dataclass(frozen=True)
class Coarse(ActivationQuant):
    """Codes -7..7 with a scale of the caller's, as a class of another package may have them."""

    op = "scaled_linear"
    buffers = ("input_scale",)
    zero = True

    def rows(self, input, held):
        return torch.ops.skuda.quantize_per_tensor(
            input, held("input_scale"), held("zero"), q_min=-7, q_max=7, output_element="s8"
        )

    def tensors(self, rows, held):
        return rows, held("weight"), held("input_scale"), None, held("weight_scale"), None, held("bias")

    def fields(self, dtype):
        return {"output_element": str(element_of(dtype)), "act_scale_scope": "tensor"}

    def shared(self, rows, held):
        return LayerInput(self.rows(rows, held), held("input_scale"))


def weights(rng):
    return torch.from_numpy(rng.integers(-127, 128, (N, K), "int8")), normal(rng, N).abs(), normal(rng, N)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_a_new_activation_runs_compiles_splits_and_is_copied():
    rng = fresh()
    codes, scale, bias = weights(rng)
    step, x = torch.tensor([0.3]), normal(rng, 5, K)
    layer = Int8Linear(codes, scale, bias, activation=Coarse(), input_scale=step)
    floats = (x / 0.3).round().clamp(-7, 7).mul(0.3) @ (codes * scale[:, None]).t() + bias
    found = layer(x)
    torch.testing.assert_close(found, floats, rtol=1e-4, atol=1e-2)
    assert_same(layer(x), found)
    assert layer.explain(x).chosen is not None
    assert_same(pickle.loads(pickle.dumps(layer))(x), found)  # noqa: S301  ours
    torch.compiler.reset()
    assert_same(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), found)

    def work(group):
        group = OfTensors(group)
        assert_same(RowLinear(layer, group)(x[:, K // 2 * group.rank :][:, : K // 2].contiguous()), found)
        assert_same(ColumnLinear(layer, group)(x), found[:, N // 2 * group.rank :][:, : N // 2])

    on_ranks(2, work)
    with pytest.raises(InvalidProblem, match="only dynamic layers"), torch.enable_grad():
        layer(x.clone().requires_grad_())
    with pytest.raises(InvalidProblem, match="Int8Linear: smooth must be one of input_scale, or left out"):
        Int8Linear(codes, scale, activation=Coarse(), input_scale=step, smooth=torch.ones(K))


@torch.no_grad()
def test_a_split_head_that_is_loaded_anew_still_has_logits_in_f32():
    codes, scale, bias = weights(fresh())
    head, loaded = (DynamicLinear(codes, scale, bias) for _ in range(2))

    def work(group):
        group = OfTensors(group)
        parts = ColumnLinear(ExactHead.of(head), group)
        for each in (parts, parts.like(loaded)):
            assert each(torch.ones(2, K, dtype=torch.bfloat16)).dtype is torch.float32

    on_ranks(2, work)


def test_layers_are_their_activations():
    codes, scale, bias = weights(fresh())
    one, many, at = torch.ones(1), torch.ones(K), torch.tensor([3])
    for other in ({"smooth": many}, {"activation": Static(), "input_scale": one}):
        with pytest.raises(InvalidProblem, match="DynamicLinear: activation must be PerRow, and not smoothed"):
            DynamicLinear(codes, scale, **other)
    made = {
        PER_ROW: DynamicLinear(codes, scale, bias),
        PerRow(smoothed=True): SmoothedLinear(codes, scale, smooth=many),
        Static(): StaticLinear(codes, scale, input_scale=one),
        Static(shifted=True, smoothed=True): StaticLinear(
            codes, scale, input_scale=one, input_zero_point=at, smooth=many
        ),
    }
    for activation, layer in made.items():
        assert layer.activation == activation == copy.deepcopy(layer).activation
        old = {name: value for name, value in vars(layer).items() if name not in ("activation", "family")}
        read = type(layer).__new__(type(layer))
        read.__setstate__(old | {"nonfinite": "propagate"})  # as version 0.1 wrote them
        assert read.activation == replace(activation, nonfinite="propagate") == layer.propagating().activation
        assert read.family == layer.family
