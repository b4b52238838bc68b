"""Streams of any library as handles of the driver."""

from __future__ import annotations

from typing import Any

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown

LEGACY = 1
"""The driver's other name for the default stream, 0."""


def stream_handle(op: str, stream: Any, ordinal: int) -> int:
    """Return the handle of a stream for work on device `ordinal`; 0 is the default stream.

    `stream` is a handle, a stream of torch, CuPy or PyCUDA, or an object with ``__cuda_stream__``. Errors name `op`.
    Raise `InvalidProblem` for anything else, or a stream of another device.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if not 0 <= stream < 1 << 64:
            raise InvalidProblem(op, "stream", shown(stream), "be a handle, 0 for the default stream")
        return 0 if stream == LEGACY else stream
    device = _ordinal_of(stream)
    if device is not None and device != ordinal:
        raise InvalidProblem(op, "stream", f"a stream of cuda:{device}", f"be on cuda:{ordinal}, where this plan runs")
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int) and not isinstance(handle, bool):
            return 0 if handle == LEGACY else handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # In cuda.core it was a property first and is a method now.
        _, handle = protocol() if callable(protocol) else protocol
        return 0 if handle == LEGACY else int(handle)
    rule = "be None, an int handle, a stream of torch, CuPy or PyCUDA, or follow __cuda_stream__"
    raise InvalidProblem(op, "stream", shown(stream), rule)


def _ordinal_of(stream: Any) -> int | None:
    """Return the device of a torch or CuPy stream, or None if it fits any (CuPy's default streams report -1)."""
    found = getattr(stream, "device_index", getattr(stream, "device_id", None))
    return found if isinstance(found, int) and found >= 0 else None
