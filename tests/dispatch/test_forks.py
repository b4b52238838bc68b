"""Forks: a child can use the CPU whatever other threads were doing, and CUDA refuses with the reason."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import Rig, toy_dispatcher
from interrupts import fork
from toy import ToyDescriptor
from toykernels import scaled as toy

from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.cuda import driver as cuda_driver
from skuda.dispatch.system import forks
from skuda.dispatch.system.locks import lock
from skuda.registry.errors import DriverError
from skuda.registry.source import resolve

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
PROBLEM, OTHER = ToyDescriptor(m=4), ToyDescriptor(m=5)


def in_child(call, patience=20):
    """Call a function in a forked child and return its exit status: 0 if it returned true, -14 if it hung."""
    child = fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(patience)
            status = 0 if call() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Slow(NumpyBackend):
    """A backend whose `prepare` waits, but not in a child."""

    def __init__(self):
        self.begun, self.go_on, self._home = threading.Event(), threading.Event(), os.getpid()

    def prepare(self, *asked, **more):
        if os.getpid() == self._home:
            self.begun.set()
            assert self.go_on.wait(60)
        return super().prepare(*asked, **more)


def test_a_child_selects_what_another_thread_was_selecting():
    backend = Slow()
    dispatcher = toy_dispatcher(backends=[backend])
    thread = threading.Thread(target=dispatcher.select, args=(PROBLEM,))
    thread.start()
    assert backend.begun.wait(60)
    x = np.ones(4, np.float32)
    try:
        assert in_child(lambda: np.array_equal(dispatcher.run(PROBLEM, x=x), x + x)) == 0
        assert in_child(lambda: dispatcher.select(OTHER).problem == OTHER) == 0
    finally:
        backend.go_on.set()
        thread.join()
    assert dispatcher.select(PROBLEM).problem == PROBLEM


def test_a_lock_held_by_another_thread_is_open_in_a_child():
    shared = lock()
    held, done = threading.Event(), threading.Event()

    def hold():
        with shared:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        assert in_child(lambda: shared.acquire(timeout=10)) == 0
        assert shared.locked()
    finally:
        done.set()
        thread.join()


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """A module whose import waits: what it shares with the test."""
    text = "import sys\nshared = sys.shared\nshared.begun.set()\nassert shared.go_on.wait(60)\nfound = 5\n"
    (tmp_path / "imported_slowly.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    shared = SimpleNamespace(begun=threading.Event(), go_on=threading.Event())
    monkeypatch.setattr(sys, "shared", shared, raising=False)
    yield shared
    sys.modules.pop("imported_slowly", None)
    resolve.cache_clear()


def in_thread(call, *given):
    thread = threading.Thread(target=call, args=given)
    thread.start()
    return thread


def test_a_fork_waits_for_an_import_that_another_thread_began_in_a_first_call(slow):
    def asks():
        return resolve("imported_slowly", "found") == 5

    importing = in_thread(asks)
    assert slow.begun.wait(60)
    later = in_thread(lambda: (time.sleep(0.3), slow.go_on.set()))
    usual = sys.getswitchinterval()
    assert in_child(lambda: asks() and sys.getswitchinterval() == usual) == 0
    assert slow.go_on.is_set()
    assert sys.getswitchinterval() == usual
    importing.join()
    later.join()


LOGS = """
import os, signal, sys, threading, time
import skuda.dispatch.system.forks
from skuda.registry.source import resolve

begun = sys.begun = threading.Event()
threading.Thread(target=resolve, args=("logs", "logger")).start()
begun.wait()
if os.fork() == 0:
    signal.alarm(20)
    os._exit(resolve("logs", "logger").name != "here")
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_fork_waits_for_an_import_that_needs_a_lock_of_logging(tmp_path):
    """The hook of `logging` takes that lock; it must not run before ours, which waits."""
    text = "import sys, time, logging\nsys.begun.set()\ntime.sleep(0.3)\nlogger = logging.getLogger('here')\n"
    (tmp_path / "logs.py").write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", LOGS]
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=120).returncode == 0


def test_a_fork_waits_for_no_import_of_somebody_else_and_not_for_ever(slow, monkeypatch):
    waits = []
    importing = in_thread(importlib.import_module, "imported_slowly")
    try:
        assert slow.begun.wait(60)
        monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waits.append))
        assert in_child(lambda: True) == 0
        assert len(waits) == 1
    finally:
        monkeypatch.setattr(forks, "time", time)
        slow.go_on.set()
        importing.join()
    sys.modules.pop("imported_slowly")
    slow.begun.clear()
    slow.go_on.clear()
    monkeypatch.setattr(forks, "PATIENCE", 0.05)
    importing = in_thread(resolve, "imported_slowly", "shared")
    try:
        assert slow.begun.wait(60)
        assert in_child(lambda: not slow.go_on.is_set()) == 0
    finally:
        slow.go_on.set()
        importing.join()


def test_an_interrupt_of_a_fork_that_waits_comes_after_it(slow):
    importing = in_thread(resolve, "imported_slowly", "found")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert slow.begun.wait(60)
        later = in_thread(lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  it comes while the parent goes on
            assert in_child(lambda: not slow.go_on.is_set()) == 0
            slow.go_on.wait(20)
    finally:
        signal.signal(signal.SIGINT, before)
        slow.go_on.set()
        importing.join()
        later.join()


class Loaded:
    """What stands for the driver in a process that has used CUDA."""

    version, device_count = "13.0", 1


@pytest.fixture
def used(monkeypatch):
    """Let this process have used CUDA, and leave no trace of that."""
    monkeypatch.setattr(cuda_driver, "Driver", Loaded)
    cuda_driver.driver.cache_clear()
    assert cuda_driver.driver().version == "13.0"
    monkeypatch.undo()
    yield
    cuda_driver.driver.cache_clear()


def test_scratch_of_the_parent_is_not_freed_in_a_child(used):
    rig = Rig(toy.SummedDescriptor(n=32), toy.summed)
    assert rig.driver.allocated

    def forget():
        rig.plan = rig.runner = None
        rig.launches.forget()
        gc.collect()
        return rig.driver.freed == []

    assert in_child(forget) == 0
    forget()
    assert rig.driver.freed


def test_a_driver_that_another_library_used_before_the_fork_is_reported_alike(monkeypatch):
    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda _: 3))
    monkeypatch.setattr(cuda_driver.ctypes, "PyDLL", lambda _: None)
    with pytest.raises(DriverError, match="spawn") as caught:
        cuda_driver.Driver()
    assert cuda_driver.FORKED in str(caught.value)
    assert "\n" not in str(caught.value)
