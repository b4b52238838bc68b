"""Kernels of all sizes are ready before a graph is captured."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fakes import loading_cuda
from support import fresh
from torch import nn

import skuda.torch  # noqa: F401  it defines the ops
from skuda.dispatch import Dispatcher
from skuda.dispatch.backends import cuda
from skuda.dispatch.telemetry import Kernels
from skuda.kernels.attention import AttentionDescriptor
from skuda.registry import InvalidProblem
from skuda.serving import preparation
from skuda.serving import tokens as by_ops
from skuda.serving.preparation import problems_of
from skuda.torch.int4 import int4_weight
from skuda.torch.ops.tensor_op import OPS
from skuda.vllm import warming

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
    preparation.select(every, "cuda:1")
    assert set(seen) == every
    monkeypatch.setattr(Dispatcher, "select", lambda self, problem, device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        preparation.select(every, "cuda:1")


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The backend of a GPU that `default_dispatcher` of `warming` has."""
    made = loading_cuda(monkeypatch, tmp_path)
    dispatcher = Dispatcher(backends=[made])
    for module in (preparation, warming):
        monkeypatch.setattr(module, "default_dispatcher", lambda: dispatcher)
    monkeypatch.setattr(warming, "logger", Mock())
    monkeypatch.setattr(preparation, "_prepared", set())
    monkeypatch.setattr(warming, "KERNELS", Kernels())
    monkeypatch.setattr(cuda, "KERNELS", warming.KERNELS)
    made.select = lambda problem: dispatcher.select(problem, device="cuda:0")
    return made


def started(backend, most, ran, *, wanted=()):
    """Start a worker that runs problems while it warms up. Gives what it returned."""
    limits = SimpleNamespace(max_num_batched_tokens=most)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(device=torch.device("cuda", 0)),
        vllm_config=SimpleNamespace(scheduler_config=limits),
        compile_or_warm_up_model=lambda: [backend.select(problem) for problem in ran] and "times",
    )
    warming.attend(worker)
    preparation.want(wanted, most)
    return worker.compile_or_warm_up_model()


def test_after_the_start_no_number_of_tokens_loads_a_kernel(backend):
    rng, most, counts = fresh(), 200, warming.KERNELS
    ran, sampled = called(*arguments(rng, most)), set(by_ops.problems(40))
    sizes = {"heads": 8, "kv_heads": 2, "head_size": 128, "pages": 50, "most_blocks": 9, "scale": 0.1}
    attended = AttentionDescriptor(tokens=most, sequences=1, **sizes, output_element="bf16")
    assert started(backend, most, ran, wanted={*sampled, attended}) == "times"
    ((line, found),) = [call.args for call in warming.logger.info.call_args_list]
    assert (line, found.kernels) == ("skuda: %s", len(backend.loaded))
    assert (counts.compiled, counts.late) == (len(backend.loaded), [])
    before = len(backend.loaded)
    assert before > len(ran) + 4
    for tokens in range(1, most + 1):
        for problem in called(*arguments(rng, tokens)):
            backend.select(problem)
        for problem in sampled:
            backend.select(problem.model_copy(update={"n": tokens}))
        backend.select(attended.model_copy(update={"tokens": tokens, "sequences": int(rng.integers(1, tokens + 1))}))
    assert len(backend.loaded) == before
    # What the worker did not run, and beyond its limit: late kernels are counted, and told of.
    other = called(*arguments(rng, 5, bits=4)) - called(*arguments(rng, 5))
    for problem in other:
        backend.select(problem)
    assert len(counts.late) == len(backend.loaded) - before > 0
    assert warming.logger.warning.call_count == len(counts.late)
    started(backend, most, ran)  # another engine
    assert len(counts.late) == len(backend.loaded) - before


def test_a_worker_without_our_kernels_and_a_cpu_are_left_alone(backend):
    assert started(backend, 64, ()) == []
    assert not warming.logger.info.called
    runner = SimpleNamespace(device=torch.device("cpu"))
    warming.attend(SimpleNamespace(model_runner=runner))


def test_progress_is_shown_and_what_fails_is_named(backend, monkeypatch):
    times = count(0, 6)
    monkeypatch.setattr(preparation, "monotonic", lambda: next(times))
    load = backend.load

    def fails(cubin, ordinal):
        if b"silu" in cubin:
            raise ValueError("no memory")
        load(cubin, ordinal)

    monkeypatch.setattr(backend, "load", fails)
    preparation.want(called(*arguments(fresh(), 3)), 90)
    found = preparation.prepare("cuda:0", warming.logger)
    assert len(found.failed) == 1
    assert "silu" in str(warming.logger.warning.call_args)
    shown = [call.args for call in warming.logger.info.call_args_list]
    line = "skuda: %d of %d kernels are ready"
    assert shown == [*((line, n, found.kernels) for n in range(1, found.kernels)), ("skuda: %s", found)]
    assert preparation.prepare("cuda:0", warming.logger) is None
