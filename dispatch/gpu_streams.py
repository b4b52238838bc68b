"""Streams of any library as the driver's handles."""

from __future__ import annotations

from typing import Any

from skuda.registry.errors import InvalidProblem

LEGACY = 1
"""The driver's other name for the default stream, 0."""


def stream_handle(op: str, stream: Any, ordinal: int) -> int:
    """Return the handle of a stream; 0 is the default stream.

    Parameters
    ----------
    op : str
        For errors.
    stream : int or object
        A handle, a stream of torch, CuPy or PyCUDA, or an object that follows ``__cuda_stream__``.
    ordinal : int
        The device that the work runs on.

    Raises
    ------
    InvalidProblem
        For anything else, or a stream of another device.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise InvalidProblem(op, "stream", repr(stream), "be a handle, 0 for the default stream")
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
        # cuda.core made a method of what was a property first.
        _, handle = protocol() if callable(protocol) else protocol
        return 0 if handle == LEGACY else int(handle)
    rule = "be None, an int handle, a stream of torch, CuPy or PyCUDA, or follow __cuda_stream__"
    raise InvalidProblem(op, "stream", repr(stream), rule)


def _ordinal_of(stream: Any) -> int | None:
    """Return the device that a torch or CuPy stream says it is on; CuPy's default streams say -1, which is any."""
    found = getattr(stream, "device_index", getattr(stream, "device_id", None))
    return found if isinstance(found, int) and found >= 0 else None
