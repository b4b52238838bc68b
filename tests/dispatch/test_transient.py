"""The answer of a backend during a shortage of memory or files is not kept."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
from fakes import toy_dispatcher
from toy import ToyDescriptor

from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.compile import compilers
from skuda.dispatch.cuda import driver

SHORTAGES = [
    MemoryError(),
    RecursionError("maximum recursion depth exceeded"),
    KeyboardInterrupt(),
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
]
every_shortage = pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)


def raising(error):
    def asked(*_, **__):
        raise error

    return asked


@every_shortage
@pytest.mark.parametrize("question", ["status", "devices"])
def test_a_backend_is_asked_again(monkeypatch, error, question):
    dispatcher = toy_dispatcher()
    with monkeypatch.context() as short:
        short.setattr(NumpyBackend, question, raising(error))
        with pytest.raises(type(error)):
            dispatcher.select(ToyDescriptor(m=4))
    assert dispatcher.status["numpy"].available
    assert dispatcher.select(ToyDescriptor(m=4)).sku.backend == "numpy"


def test_a_driver_without_free_files_is_opened_again(monkeypatch):
    text = f"libcuda.so.1: cannot open shared object file: {os.strerror(errno.EMFILE)}"
    dispatcher = toy_dispatcher(backends=[NumpyBackend(), CudaCoreBackend()])
    monkeypatch.setattr(CudaCoreBackend, "trouble", lambda _: None)
    driver.driver.cache_clear()
    with monkeypatch.context() as short:
        short.setattr(driver.ctypes, "CDLL", raising(OSError(text)))
        with pytest.raises(OSError, match="libcuda"):
            dispatcher.select(ToyDescriptor(m=4))
    with monkeypatch.context() as absent:
        absent.setattr(driver.ctypes, "CDLL", raising(OSError("libcuda.so.1: no such file")))
        assert not dispatcher.status["cuda_core"].available
        assert dispatcher.select(ToyDescriptor(m=4)).sku.backend == "numpy"


@every_shortage
def test_a_compiler_is_looked_for_again(monkeypatch, error):
    monkeypatch.setattr(compilers.shutil, "which", lambda _: f"/a place/{type(error).__name__}")
    monkeypatch.setattr(compilers, "installed", lambda _: True)
    for finds, place, name in (
        (compilers.find_nvcc, compilers.programs, "run"),
        (compilers.find_nvrtc, compilers, "_nvrtc"),
    ):
        compilers.nvrtc_trouble.cache_clear()
        with monkeypatch.context() as short:
            short.setattr(place, name, raising(error))
            with pytest.raises(type(error)):
                finds()
        with monkeypatch.context() as working:
            done = subprocess.CompletedProcess([], 0, "release 13.0, V13.0.88", "")
            working.setattr(place, name, lambda *_, done=done, **__: done)
            assert finds() is not None
    compilers.nvrtc_trouble.cache_clear()
