"""An activation is a value, and a new one is a class: no layer changes for it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from support import fresh
from tensors import assert_same, normal
from test_formats import OfTensors

from skuda.dispatch.shard import on_ranks
from skuda.registry.errors import InvalidProblem
from skuda.torch import ColumnLinear, DynamicLinear, RowLinear, SmoothedLinear, StaticLinear
from skuda.torch.exact.exact_modules import ExactHead
from skuda.torch.linear.activation import PER_ROW, PerRow, Static
from skuda.torch.linear.int8_linear import Int8Linear

N, K = 32, 256


class Coarse(Static):
    codes = {"q_min": -7, "q_max": 7, "output_element": "s8"}  # noqa: RUF012  it is not changed


def weights(rng):
    return torch.from_numpy(rng.integers(-127, 128, (N, K), "int8")), normal(rng, N).abs(), normal(rng, N)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_a_new_activation_runs_compiles_and_splits():
    rng = fresh()
    (codes, scale, bias), x = weights(rng), normal(rng, 5, K)
    layer = Int8Linear(codes, scale, bias, activation=Coarse(), input_scale=torch.tensor([0.3]))
    found, head = layer(x), ExactHead.of(DynamicLinear(codes, scale))
    floats = (x / 0.3).round().clamp(-7, 7).mul(0.3) @ (codes * scale[:, None]).t() + bias
    torch.testing.assert_close(found, floats, rtol=1e-4, atol=1e-2)
    torch.compiler.reset()
    assert_same(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), found)

    def work(group):
        group, half = OfTensors(group), slice(N // 2 * group.rank, N // 2 * (group.rank + 1))
        assert_same(RowLinear(layer, group)(x.chunk(2, 1)[group.rank].contiguous()), found)
        assert_same(ColumnLinear(layer, group)(x), found[:, half])
        loaded = ColumnLinear(head, group).like(DynamicLinear(codes, scale))
        assert loaded(x.bfloat16()).dtype is torch.float32

    on_ranks(2, work)
    with pytest.raises(InvalidProblem, match="Int8Linear: output_scale must be one of input_scale, smooth"):
        Int8Linear(codes, scale, activation=Coarse(), input_scale=scale[:1], output_scale=scale[:1])


def test_layers_are_their_activations():
    codes, scale, bias = weights(fresh())
    one, many, at = {"input_scale": torch.ones(1)}, {"smooth": torch.ones(K)}, torch.tensor([3])
    for other in (many, {"activation": Static(), **one}):
        with pytest.raises(InvalidProblem, match="DynamicLinear: activation must be PerRow, and not smoothed"):
            DynamicLinear(codes, scale, **other)
    made = {
        PER_ROW: DynamicLinear(codes, scale, bias),
        PerRow(smoothed=True): SmoothedLinear(codes, scale, **many),
        Static(): StaticLinear(codes, scale, **one),
        Static(shifted=True, smoothed=True): StaticLinear(codes, scale, **one, **many, input_zero_point=at),
    }
    for activation, layer in made.items():
        old = {name: value for name, value in vars(layer).items() if name not in ("activation", "family")}
        assert pickle.loads(pickle.dumps(layer)).activation == layer.activation == activation  # noqa: S301  ours
        read = type(layer).__new__(type(layer))
        read.__setstate__(old | {"nonfinite": "propagate"})  # as version 0.1 wrote them
        assert read.activation == replace(activation, nonfinite="propagate") == layer.propagating().activation
        assert read.family == layer.family
