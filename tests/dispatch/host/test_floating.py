"""Floating-point modes that would change bits are refused; after the mode is restored, calls work again."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import threading

import numpy as np
import pytest
from fakes import FakeArray, Rig
from support import assert_same_bits, dispatcher
from toykernels.scaled import ScaledDescriptor, scaled

from skuda.dispatch.cuda.packing import packable
from skuda.registry import ElementKind, FloatModeError, SkudaError
from skuda.tools import smoothquant

# The values of FE_UPWARD, FE_DOWNWARD and FE_TOWARDZERO.
_ROUNDING = {
    "x86_64": {"upward": 0x800, "downward": 0x400, "toward zero": 0xC00},
    "aarch64": {"upward": 0x400000, "downward": 0x800000, "toward zero": 0xC00000},
}.get(platform.machine(), {})
# Bits of MXCSR: results, and operands, that are subnormal count as zero.
_FLUSHING = {"results": 1 << 15, "operands": 1 << 6} if platform.machine() == "x86_64" else {}
WORDS = [f"rounds {way}" for way in _ROUNDING] + [f"flushes {which}" for which in _FLUSHING]
WORDS = WORDS if platform.libc_ver()[0] == "glibc" else []
pytestmark = pytest.mark.skipif(not WORDS, reason="the modes of this processor are not known here")
X = np.float32([[1, 2, 3]])
EACH_MODE = pytest.mark.parametrize("word", WORDS)


class _Environment(ctypes.Structure):
    """glibc's fenv_t on x86-64."""

    _fields_ = (("x87", ctypes.c_ubyte * 28), ("mxcsr", ctypes.c_uint))


@contextlib.contextmanager
def mode(word):
    """Set one mode in this thread, for as long as the context lasts."""
    libm = ctypes.CDLL("libm.so.6")
    kind, _, which = word.partition(" ")
    before = _Environment()
    if kind == "rounds":
        libm.fesetround(_ROUNDING[which])
    else:
        libm.fegetenv(ctypes.byref(before))
        changed = _Environment.from_buffer_copy(before)
        changed.mxcsr |= _FLUSHING[which]
        libm.fesetenv(ctypes.byref(changed))
    try:
        yield
    finally:
        if kind == "rounds":
            libm.fesetround(0)
        else:
            libm.fesetenv(ctypes.byref(before))


def refused(call):
    """Return the error that a call raises, formatted outside of the mode."""
    try:
        call()
    except FloatModeError as error:
        return error
    return None


def _calls():
    """Return the ways to run an op on the CPU; a mode is set only after the preparations."""
    arrays = {"input": np.float32([0.1, 2, -3, 1e-40]), "scale": 0.3, "zero_point": 1}
    problem = dispatcher().describe("fake_quantize", numel=4, q_min=-8, q_max=7, input_element="f32")
    plan = dispatcher().select(problem)
    bound = plan.bind(**arrays)
    return {
        "run": lambda: plan.run(**arrays),
        "bound": bound,
        "bind": lambda: plan.bind(**arrays),
        "can_implement": lambda: plan.can_implement(**arrays),
        "dispatcher": lambda: dispatcher().run(problem, **arrays),
    }


@EACH_MODE
def test_every_call_on_the_cpu_is_refused_and_works_again_at_once(word):
    for name, call in _calls().items():
        want = call()
        with mode(word):
            error = refused(call)
        assert error is not None, name
        assert isinstance(error, SkudaError)
        kind, _, which = word.partition(" ")
        assert error.mode == (f"rounds {which}" if kind == "rounds" else "flushes subnormal numbers to zero")
        assert ("FE_TONEAREST" if kind == "rounds" else "torch.set_flush_denormal(False)") in error.remedy
        assert f"this thread {error.mode}: {error.remedy}" in str(error)
        assert "\n" not in str(error)
        if isinstance(want, np.ndarray):
            assert_same_bits(call(), want, name)


@EACH_MODE
def test_the_mode_of_another_thread_does_not_count(word):
    calls = _calls()
    found = []
    with mode(word):
        # A new thread inherits the mode of the one that starts it.
        thread = threading.Thread(target=lambda: found.append(refused(calls["run"])))
        thread.start()
        thread.join()
    assert isinstance(found[0], FloatModeError)
    ready, done = threading.Event(), threading.Event()

    def stay():
        with mode(word):
            ready.set()
            done.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    ready.wait()
    try:
        assert refused(calls["run"]) is None
    finally:
        done.set()
        thread.join()


@EACH_MODE
def test_smoothquant_computes_nothing_in_another_mode(word):
    weight, maxima = np.float32([[1, -2, 3]]), np.float32([1, 50, 2])
    layer = smoothquant.SmoothQuantLayer.quantize(dispatcher(), maxima, weight, alpha=0.5)
    ranges = smoothquant.ActivationRanges()
    for call in (
        lambda: ranges.observe("layer", X),
        lambda: smoothquant.smoothing_factors(maxima, maxima, 0.5),
        lambda: smoothquant.quantize_weight(dispatcher(), weight),
        lambda: smoothquant.SmoothQuantLayer.quantize(dispatcher(), maxima, weight, alpha=0.5),
        lambda: layer.run(dispatcher(), X),
    ):
        with mode(word):
            error = refused(call)
        assert error is not None
        call()
    assert ranges.channel_max("layer").tolist() == [1, 2, 3]


@pytest.mark.parametrize("word", [word for word in WORDS if word.startswith("rounds")])
def test_a_number_for_a_gpu_is_rounded_to_nearest_or_refused(word):
    rig = Rig(ScaledDescriptor(numel=32), scaled)
    arrays = {"x": FakeArray((4, 8), address=0x10000), "y": FakeArray((4, 8), address=0x20000)}
    with mode(word):
        cold = refused(lambda: rig.run(**arrays, scale=0.3))
    assert cold is not None, "the first call"
    rig.run(**arrays, scale=0.3)
    launched = len(rig.engine.launches)
    with mode(word):
        warm = refused(lambda: rig.run(**arrays, scale=0.3))
    assert warm is not None, "a call like one before"
    assert len(rig.engine.launches) == launched
    rig.run(**arrays, scale=0.3)
    assert len(rig.engine.launches) == launched + 1


def test_a_constant_of_a_gpu_is_rounded_once():
    assert packable(0.1, ElementKind.F32) == float(np.float32(0.1)) != packable(0.1, ElementKind.F64) == 0.1
