"""Calls the methods of backends. Whatever a backend raises or returns, the dispatcher gets a value or `Misbehaved`.

Its texts become single lines.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TypeVar

from skuda.dispatch.backends.base import Backend, BackendStatus
from skuda.registry.device import Device
from skuda.registry.errors import SkudaError
from skuda.registry.text import one_line, shown

KERNELS = "skuda.kernels"
"""The entry-point group of kernels."""
Item = TypeVar("Item")


class Misbehaved(Exception):
    """A backend raised an error, or returned an invalid value."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(message)
        self.backend = backend


@contextmanager
def kept_clean() -> Iterator[None]:
    """Send to standard error what this block prints, also by C code and child processes.

    In a program with several threads nothing is redirected, because the others print, too.
    """
    if threading.active_count() > 1:
        yield
        return
    saved = None
    with redirect_stdout(sys.stderr):
        try:
            with suppress(OSError):  # a program can run without these descriptors
                saved = os.dup(1)
                os.dup2(2, 1)
            yield
        finally:
            if saved is not None:
                os.dup2(saved, 1)
                os.close(saved)


def ask(backend: Backend, question: str, *asked: Any) -> Any:
    """Return what a method of a backend returns, checked, with its texts as single lines. Of ``choices``, return names.

    Leave out an empty choice: a backend without configurations need not accept the parameter. Raise `Misbehaved` for an
    error, and for a value of another kind. A `SkudaError` of ``prepare`` is raised as it is.
    """
    taken, kind = _ANSWERS[question]
    with kept_clean():
        try:
            found = getattr(backend, question)(*asked)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if question == "prepare" and isinstance(error, SkudaError):
                raise
            raise Misbehaved(backend.spec.name, f"{question}() raised {error_text(error)}") from error
        try:
            return taken(found, backend)
        except Exception as error:
            wanted = kind.format(processor=backend.spec.processor)
            message = f"{question}() must return {wanted}; had {shown(found)}"
            raise Misbehaved(backend.spec.name, message) from error


def _status(found: Any, _: Backend) -> BackendStatus:
    words = {"detail": one_line(found.detail), "remedy": one_line(found.remedy)}
    return BackendStatus(available=found.available, **words)


def _devices(found: Any, backend: Backend) -> tuple[Device, ...]:
    devices = tuple(each.model_copy(update={"name": one_line(each.name)}) for each in _tuple(found, Device))
    if any(each.ordinal is None or each.processor != backend.spec.processor for each in devices):
        raise TypeError
    return devices


def _choices(found: Any, backend: Backend) -> tuple[str, ...]:
    from skuda.kernels.launch import Choice  # imported here: with it come the launches of all kernels

    names = tuple(choice.name for choice in _tuple(found, Choice))
    if names != _lines(names, backend):
        raise TypeError
    return names


def _runner(found: Any, backend: Backend) -> Any:
    if not all(callable(getattr(found, name)) for name in ("run", "check", "bind")):
        raise TypeError
    _lines(found.notes, backend)
    return found


def _lines(found: Any, _: Backend) -> tuple[str, ...]:
    return tuple(one_line(each) for each in _tuple(found, str))


def _tuple(found: Any, kind: type[Item]) -> tuple[Item, ...]:
    if isinstance(found, tuple) and all(isinstance(each, kind) for each in found):
        return found
    raise TypeError


_ANSWERS: dict[str, tuple[Callable[[Any, Backend], Any], str]] = {
    "status": (_status, "a BackendStatus"),
    "devices": (_devices, "a tuple of {processor} Devices with an ordinal"),
    "notes": (_lines, "a tuple of str"),
    "describe_choice": (_lines, "a tuple of str"),
    "choices": (_choices, "a tuple of Choices"),
    "prepare": (_runner, "a Runner: notes, check, run and bind"),
}
"""For each method: what checks and converts its value or raises, and the kind of value in words."""


def error_text(error: BaseException) -> str:
    """Return an error's type and text on one line, even if its ``__str__`` fails."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a plug-in's object may do anything here too
        text = f"(a {kind} that cannot be shown)"
    return one_line(f"{kind}: {text}")
