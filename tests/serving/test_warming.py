"""Kernels of all sizes are ready before a graph is captured."""

from __future__ import annotations

import pytest
import torch
from support import fresh
from torch import nn

import skuda.torch  # noqa: F401  it defines the ops
from skuda.dispatch import Dispatcher
from skuda.registry import InvalidProblem
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


def arguments(rng, rows):
    x, residual, weight = (
        torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16) for shape in ((rows, K), (rows, K), (K,))
    )
    return x, residual, weight, torch.from_numpy(rng.integers(-127, 128, (N, K), dtype="int8")), torch.ones(N, 1)


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


def test_the_problems_of_a_graph_are_those_of_its_calls():
    rng, sizes, known = fresh(), (1, 3, 40), set()
    tokens = torch.export.Dim("tokens", max=4096)
    shapes = ({0: tokens}, {0: tokens}, None, None, None)
    with torch.no_grad():
        graph = torch.export.export(Block(), arguments(rng, 7), dynamic_shapes=shapes).graph
        fixed = torch.export.export(Block(), arguments(rng, 7)).graph
    assert problems_of(graph, sizes, known) == set().union(*(called(*arguments(rng, rows)) for rows in sizes))
    assert problems_of(graph, sizes, known) == set()
    assert problems_of(fixed, sizes, known) == called(*arguments(rng, 7))


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
