"""The floating-point mode of the calling thread, on which the bits of NumPy's results depend.

A program can change it with ``fesetround`` or ``torch.set_flush_denormal``, and a library built with ``-ffast-math``
does so when it is loaded. The mode is one register, in which x86-64 and AArch64 keep it for f32 and f64 alike, so
Python's own f64 arithmetic shows it. Every thread has its own. NumPy's elementwise arithmetic runs on the calling one;
BLAS has threads of its own, but it is given only sums of integers that are exact in f32, in any mode.
"""

from __future__ import annotations

import sys

from skuda.registry.errors import FloatModeError

# Names of the module, because the compiler would compute an expression of constants in its own mode.
_ONE, _QUARTER, _REST, _NEXT = 1.0, 2.0**-54, 3 * 2.0**-54, 1 + 2.0**-52
_TINY, _HALF = sys.float_info.min, 0.5


SUMMANDS = {"one": _ONE, "quarter": _QUARTER, "rest": _REST, "following": _NEXT}
IS_NEAREST = "one + quarter + rest == following"
"""An expression of `SUMMANDS`: whether this thread rounds to nearest. A quarter of an ulp is then lost, and three
quarters are a whole one."""


def require_exact_mode() -> None:
    """Raise `FloatModeError` unless this thread rounds to nearest and keeps subnormal numbers."""
    # As `IS_NEAREST`.
    if _ONE + _QUARTER + _REST != _NEXT or not _TINY * _HALF:
        raise FloatModeError(*map(" and ".join, zip(*_changes(), strict=True)))


def _changes() -> list[tuple[str, str]]:
    """Return what this thread does differently, and what undoes it."""
    found = []
    above, below = _ONE + _QUARTER + _REST, -_ONE - _QUARTER - _REST
    if above != _NEXT:
        way = "upward" if above > _NEXT else "downward" if below < -_NEXT else "toward zero"
        found.append((f"rounds {way}", "call fesetround(FE_TONEAREST)"))
    if not _TINY * _HALF:
        told = "call torch.set_flush_denormal(False), and load no library built with -ffast-math"
        found.append(("flushes subnormal numbers to zero", told))
    return found
