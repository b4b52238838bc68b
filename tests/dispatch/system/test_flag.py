"""A flag that C code raises: it stays raised, and its memory is there as long as somebody may raise it."""

from __future__ import annotations

import ctypes
import gc
import sys
from types import SimpleNamespace

import pytest
from interrupts import elsewhere

from skuda.dispatch.system import flag as module
from skuda.dispatch.system.flag import Flag

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the C library has no semaphores")


def raised(flag):
    return ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(flag.raiser.value)(flag.address)


@pytest.mark.parametrize("how", [raised, Flag.up])
def test_a_flag_stays_raised(how):
    flag, other = Flag(), Flag()
    assert not flag()
    elsewhere(lambda: how(flag))
    assert [flag(), flag(), other()] == [True, True, False]


@pytest.mark.parametrize("up", [True, False])
def test_its_memory_is_freed_only_when_it_was_raised(monkeypatch, up):
    real, freed = module._library(), []
    names = ("malloc", "sem_init", "sem_post", "sem_getvalue")
    library = SimpleNamespace(free=freed.append, **{name: getattr(real, name) for name in names})
    monkeypatch.setattr(module, "_library", lambda: library)
    flag = Flag()
    address = flag.address.value
    if up:
        flag.up()
    del flag
    gc.collect()
    assert [each.value for each in freed] == [address] * up
    real.free(ctypes.c_void_p(address))


def test_without_semaphores_there_is_no_flag(monkeypatch):
    module._library.cache_clear()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OSError, match="Windows"):
        Flag()
