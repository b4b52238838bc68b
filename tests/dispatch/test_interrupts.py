"""Ctrl-C at every bytecode leaves nothing locked and nothing half made."""

from __future__ import annotations

import signal
from functools import partial
from types import SimpleNamespace

from fakes import toy_dispatcher
from interrupts import bytecodes, elsewhere, interrupted
from support import fresh
from toy import ToyDescriptor

from skuda import functional
from skuda.dispatch.cuda import pycuda_context
from skuda.dispatch.system.interrupts import held_back
from skuda.kernels import catalog
from skuda.registry import KernelSku

PROBLEM, OTHER = ToyDescriptor(m=4), ToyDescriptor(m=5)
SELECTING = ("/dispatcher.py", "/locks.py", "/telemetry.py", "/match.py", "/backends/", "/plan.py")


def made():
    dispatcher = toy_dispatcher()
    assert dispatcher.devices
    return dispatcher


def test_an_interrupted_selection_leaves_nothing_locked():
    points = bytecodes(partial(made().select, PROBLEM), *SELECTING)
    assert points > 300
    raised = 0
    for at in range(1, points + 1):
        dispatcher = made()
        raised += interrupted(partial(dispatcher.select, PROBLEM), at, *SELECTING)
        plan = elsewhere(partial(dispatcher.select, PROBLEM))
        assert plan.problem == PROBLEM
        assert plan is dispatcher.select(PROBLEM)
        assert elsewhere(partial(dispatcher.select, OTHER)).problem == OTHER
    assert raised > points // 2


def test_an_interrupted_first_call_of_an_op_is_made_again(monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    ours = ("/functional.py", "/locks.py", "/dispatcher.py")
    monkeypatch.setattr(functional, "_default", [])
    points = bytecodes(functional.default_dispatcher, *ours)
    for at in 1 + fresh("default").permutation(points)[:30]:
        monkeypatch.setattr(functional, "_default", [])
        interrupted(functional.default_dispatcher, at, *ours)
        dispatcher = elsewhere(functional.default_dispatcher)
        assert dispatcher is functional.default_dispatcher()
        assert dispatcher.plugins == ()


def test_an_interrupted_first_question_is_asked_again():
    def asked(dispatcher):
        return dispatcher.status, dispatcher.devices

    points = bytecodes(partial(asked, toy_dispatcher()), "/dispatcher.py", "/asking.py")
    for at in range(1, points + 1):
        dispatcher = toy_dispatcher()
        interrupted(partial(asked, dispatcher), at, "/dispatcher.py", "/asking.py")
        assert asked(dispatcher) == asked(toy_dispatcher())


def test_an_interrupt_that_is_held_back_comes_at_the_end():
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame is not None)))
    try:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [(signal.SIGINT, True)]
        signal.raise_signal(signal.SIGINT)
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_a_kernel_is_described_is_raised():
    known = next(sku for sku in catalog.built_in_registry() if len(sku.constraints) > 1)
    fields = {name: getattr(known, name) for name in KernelSku.model_fields}
    describe, within = partial(KernelSku, **fields), ("/registry/", "<frozen abc>")
    points = bytecodes(describe, *within)
    assert points > 50
    assert all(interrupted(describe, at, *within) for at in range(1, points + 1))


def test_an_interrupt_leaves_no_context_on_the_stack_of_pycuda(monkeypatch):
    stack = []
    # Both run no bytecode, as those of PyCUDA do not.
    context = SimpleNamespace(push=partial(stack.append, 1), pop=stack.pop)
    monkeypatch.setattr(pycuda_context, "_context", lambda _: context)

    def work():
        with pycuda_context.pushed(0):
            assert stack == [1]

    ours = ("/cuda/pycuda_context.py", "/contextlib.py")
    points = bytecodes(work, *ours)
    assert points > 50
    for at in range(1, points + 1):
        interrupted(work, at, *ours)
        assert stack == []
