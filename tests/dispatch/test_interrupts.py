"""Ctrl-C at every bytecode leaves nothing locked and nothing half made."""

from __future__ import annotations

import signal
from functools import partial
from types import SimpleNamespace

import pytest
from fakes import toy_dispatcher
from interrupts import bytecodes, elsewhere, interrupted
from support import fresh
from toy import ToyDescriptor

from skuda import functional
from skuda.dispatch import Dispatcher
from skuda.dispatch.cuda import pycuda_context
from skuda.dispatch.plugins import loading
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


class Dying:
    """Interrupts in its destructor, from which Python raises nothing."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("module", "name"), [(catalog, "built_in_registry"), (loading, "entry_points")])
def test_an_interrupt_while_a_dispatcher_is_built_is_delivered_once(monkeypatch, module, name):
    right = getattr(module, name)

    def planted(**asked):
        Dying()
        return right(**asked)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, planted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                Dispatcher()
            came = []
            host = lambda number, frame: came.append((number, frame is not None))  # noqa: E731
            signal.signal(signal.SIGINT, host)
            found = Dispatcher()
            # One for each time that the planted function was called.
            assert came == [(signal.SIGINT, True)] * (2 if module is loading else 1)
            assert signal.getsignal(signal.SIGINT) is host
        finally:
            signal.signal(signal.SIGINT, before)
    for built in (found, Dispatcher(), elsewhere(Dispatcher)):
        assert list(built.registry) == list(Dispatcher().registry)
        assert len(built.registry) > 100


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
