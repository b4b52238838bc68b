"""The op of another package becomes an op of torch, or is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from skuda_absmax.row_absmax import OP as ROW_ABSMAX
from support import assert_same_bits, fresh
from tensors import array_of, tensor_of
from toy import ToyDescriptor, toy_op

from skuda import functional
from skuda.dispatch import Dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.draw import draw
from skuda.registry import Argument, Case, InvalidProblem, Op
from skuda.torch import register


def brings(monkeypatch, *ops: Op) -> None:
    """Let the default dispatcher have some ops besides the built-in ones, as after an installation."""
    registry = built_in_registry().register(*ops, origin="a package")
    monkeypatch.setattr(functional, "_default", [Dispatcher(registry)])


def named(name: str, first: str = "x") -> Op:
    """Return a toy op of another name, and with another name of its first argument."""
    x, y = ToyDescriptor.signature

    class Named(ToyDescriptor):
        op: Literal[name] = name  # type: ignore[valid-type]
        signature = (replace(x, name=first), y)

    return replace(toy_op(), descriptor=Named, cases=(Case(Named()),), skus=())


def undeclared() -> Op:
    """Return a toy op that computes its arguments."""

    class Undeclared(ToyDescriptor):
        op: Literal["bare"] = "bare"

        def arguments(self) -> tuple[Argument, ...]:
            return super().arguments()

    return replace(toy_op(), descriptor=Undeclared, cases=(Case(Undeclared()),), skus=())


def test_an_op_of_another_package(monkeypatch):
    brings(monkeypatch, ROW_ABSMAX)
    packet = register("row_absmax")
    assert packet is torch.ops.skuda.row_absmax
    assert register("row_absmax") is packet
    rng = fresh()
    for case in ROW_ABSMAX.cases:
        inputs = draw(ROW_ABSMAX, case, rng).inputs
        x = tensor_of(inputs["input"])
        (want,) = [functional.call("row_absmax", inputs)]
        got = packet(x)
        assert_same_bits(array_of(got), want)
        assert packet(x.to("meta")).shape == got.shape
        if case.problem.n == 40:
            assert torch.equal(packet(x.reshape(5, 8, -1)), got.reshape(5, 8))
    torch.library.opcheck(packet.default, (torch.randn(3, 4),), {})
    compiled = torch.compile(lambda x: packet(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.tensor([[3.0, -4.0]])), torch.tensor([5.0]))
    with pytest.raises(InvalidProblem, match="requires grad"):
        packet(torch.randn(3, 4, requires_grad=True))


def refused(monkeypatch, op: Op | None, name: Any, message: str) -> None:
    if op is not None:
        brings(monkeypatch, op)
    for _ in range(2):
        with pytest.raises(InvalidProblem, match=message):
            register(name)
    assert not hasattr(torch.ops.skuda, str(name)) or name == "smooth"


def test_what_cannot_be_an_op_of_torch_is_refused(monkeypatch):
    refused(monkeypatch, None, "absent", "name must be one of .*quantized_linear.*; had 'absent'")
    refused(monkeypatch, None, np.float32, "name must be one of")
    refused(monkeypatch, None, "fill", "take a tensor: call it through skuda.ops")
    refused(monkeypatch, undeclared(), "bare", "declares its signature")
    refused(monkeypatch, named("smooth"), "smooth", r"torch\.ops\.skuda\.smooth is something else")
    refused(monkeypatch, named("odd", "x-y"), "odd", "have names that a schema of torch can hold")


def test_an_op_that_torch_knows_in_part_is_forgotten(monkeypatch):
    op = named("half_known")
    brings(monkeypatch, op)
    right = torch.library.Library.impl

    def fails(library, name, function, key, **options):
        right(library, name, function, key, **options)
        if key == "Autograd":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.library.Library, "impl", fails)
        with pytest.raises(KeyboardInterrupt):
            register("half_known")
    assert not hasattr(torch.ops.skuda, "half_known")
    assert register("half_known") is torch.ops.skuda.half_known
