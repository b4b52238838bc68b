"""Kernels of all sizes are ready before a graph is captured."""

from __future__ import annotations

import pytest
import torch
from support import fresh
from torch import nn

import skuda.torch  # noqa: F401  it defines the ops
from skuda.dispatch import Dispatcher
from skuda.registry import InvalidProblem
from skuda.torch.int4 import int4_weight
from skuda.torch.tensor_op import OPS
from skuda.vllm.warming import problems_of, warm

N, K = 96, 64
CODES = {"q_min": -127, "q_max": 127, "output_element": "s8"}
PRODUCT = {"output_element": "bf16", "act_scale_scope": "token"}


class Block(nn.Module):
    """A norm that writes codes, a product, a gate that writes codes, and a layer that quantizes itself."""

    def forward(self, x, residual, weight, codes, scale):
        ops = torch.ops.skuda
        made, scales, *_, total = ops.rms_norm_quantize(x, residual, weight, eps=1e-5, **CODES)
        wide = ops.scaled_linear(made, codes, scales, None, scale, **PRODUCT)
        return ops.silu_mul_quantize(gate_up=wide, **CODES)[0], ops.quantized_linear(total, codes, scale)


def arguments(rng, rows, bits=8):
    x, residual, weight = (
        torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16) for shape in ((rows, K), (rows, K), (K,))
    )
    codes = torch.from_numpy(rng.integers(-127, 128, (N, K), dtype="int8"))
    return x, residual, weight, codes if bits == 8 else int4_weight(codes.float(), 32).packed(32), torch.ones(N, 1)


def called(x, residual, weight, codes, scale):
    """The problems of the calls in a block."""
    made, scales, wide = x.to(torch.int8), torch.ones(len(x)), torch.ones(len(x), N, dtype=torch.bfloat16)
    product = {"act_q": made, "weight_q": codes, "act_scale": scales, "weight_scale": scale}
    return {
        OPS["rms_norm_quantize"].problem(input=x, residual=residual, weight=weight, eps=1e-5, **CODES),
        OPS["scaled_linear"].problem(**product, **PRODUCT),
        OPS["silu_mul_quantize"].problem(gate_up=wide, **CODES),
        OPS["quantized_linear"].problem(activation=x, weight_q=codes, weight_scale=scale),
    }


@pytest.mark.parametrize("bits", [8, 4])
def test_the_problems_of_a_graph_are_those_of_its_calls(bits):
    rng, sizes, known = fresh(bits), (1, 3, 40), set()
    tokens = torch.export.Dim("tokens", max=4096)
    shapes = ({0: tokens}, {0: tokens}, None, None, None)
    with torch.no_grad():
        graph = torch.export.export(Block(), arguments(rng, 7, bits), dynamic_shapes=shapes).graph
        fixed = torch.export.export(Block(), arguments(rng, 7, bits)).graph
    assert problems_of(graph, sizes, known) == set().union(*(called(*arguments(rng, rows, bits)) for rows in sizes))
    assert problems_of(graph, sizes, known) == set()
    assert problems_of(fixed, sizes, known) == called(*arguments(rng, 7, bits))
    elements = {
        problem.weight_element for problem in problems_of(fixed, sizes, set()) if hasattr(problem, "weight_element")
    }
    assert elements == {f"s{bits}"}


def test_a_problem_that_fails_stops_no_other(monkeypatch):
    every, seen = called(*arguments(fresh(), 4)), []

    def select(self, problem, device):
        seen.append(problem)
        assert device == "cuda:1"
        raise InvalidProblem("select", "problem", "this", "be another")

    monkeypatch.setattr(Dispatcher, "select", select)
    warm(every, "cuda:1")
    assert set(seen) == every
    monkeypatch.setattr(Dispatcher, "select", lambda self, problem, device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warm(every, "cuda:1")
