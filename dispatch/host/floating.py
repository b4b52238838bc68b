"""Checks the floating-point mode of the calling thread, on which the bits of NumPy's results depend.

A program can change the mode with ``fesetround`` or ``torch.set_flush_denormal``. A library built with ``-ffast-math``
changes it when it is loaded. On x86-64 and AArch64 the mode is one register for f32 and f64, so Python's own f64
arithmetic shows it. Every thread has its own mode. NumPy's elementwise arithmetic runs in the calling thread. BLAS has
its own threads, but it gets only sums of integers, which are exact in f32 in any mode.
"""

from __future__ import annotations

import sys

from skuda.registry.errors import FloatModeError

# Names of the module, because the compiler would compute an expression of constants in its own mode.
_ONE, _QUARTER, _REST, _NEXT = 1.0, 2.0**-54, 3 * 2.0**-54, 1 + 2.0**-52
_TINY, _HALF = sys.float_info.min, 0.5


SUMMANDS = {"one": _ONE, "quarter": _QUARTER, "rest": _REST, "following": _NEXT}
IS_NEAREST = "one + quarter + rest == following"
"""An expression of `SUMMANDS` that is true if this thread rounds to nearest: a quarter of an ulp then rounds to
nothing, and three quarters to a whole ulp."""


def require_exact_mode() -> None:
    """Raise `FloatModeError` unless this thread rounds to nearest and keeps subnormal numbers."""
    # As `IS_NEAREST`.
    if _ONE + _QUARTER + _REST != _NEXT or not _TINY * _HALF:
        raise FloatModeError(*map(" and ".join, zip(*_changes(), strict=True)))


def _changes() -> list[tuple[str, str]]:
    """Return the differences of this thread's mode, each with its remedy."""
    found = []
    above, below = _ONE + _QUARTER + _REST, -_ONE - _QUARTER - _REST
    if above != _NEXT:
        way = "upward" if above > _NEXT else "downward" if below < -_NEXT else "toward zero"
        found.append((f"rounds {way}", "call fesetround(FE_TONEAREST)"))
    if not _TINY * _HALF:
        remedy = "call torch.set_flush_denormal(False), and load no library built with -ffast-math"
        found.append(("flushes subnormal numbers to zero", remedy))
    return found
