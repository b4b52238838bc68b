"""Calls to a backend: whatever a plug-in's backend raises or returns, the dispatcher gets an answer or `Misbehaved`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.device import Device
from skuda.kernels.launch import Choice
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.registry.sku import KernelSku


class Misbehaved(Exception):
    """A backend raised where it must answer, or returned an invalid answer."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(message)
        self.backend = backend


def ask_status(backend: Backend) -> BackendStatus:
    """Ask a backend whether it works here; raises `Misbehaved`."""
    found: BackendStatus = _asked(backend, "status", lambda it: isinstance(it, BackendStatus), "a BackendStatus")
    return found


def ask_devices(backend: Backend) -> tuple[Device, ...]:
    """Ask a backend for its devices; raises `Misbehaved`, also for a device of another processor or an absent one."""
    processor = backend.spec.processor

    def right(found: Any) -> bool:
        return isinstance(found, tuple) and all(
            isinstance(each, Device) and each.ordinal is not None and each.processor == processor for each in found
        )

    found: tuple[Device, ...] = _asked(backend, "devices", right, f"a tuple of {processor} Devices with an ordinal")
    return found


def ask_words(backend: Backend, question: str, *asked: Any) -> tuple[str, ...]:
    """Ask a backend for its remarks (`notes` or `told`); raises `Misbehaved`."""

    def right(found: Any) -> bool:
        return isinstance(found, tuple) and all(isinstance(line, str) for line in found)

    found: tuple[str, ...] = _asked(backend, question, right, "a tuple of str", *asked)
    return found


def ask_choices(backend: Backend, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[str, ...]:
    """Ask a backend for the names of a kernel's configurations; raises `Misbehaved`."""

    def right(found: Any) -> bool:
        return isinstance(found, tuple) and all(isinstance(choice, Choice) for choice in found)

    found: tuple[Choice, ...] = _asked(backend, "choices", right, "a tuple of Choices", sku, problem, device)
    return tuple(choice.name for choice in found)


def ask_runner(backend: Backend, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:
    """Ask a backend to prepare a kernel; raises `Misbehaved`, or the `SkudaError` with which it refuses."""

    def right(found: Any) -> bool:
        able = all(callable(getattr(found, name, None)) for name in ("run", "check", "bind"))
        return able and isinstance(getattr(found, "notes", None), tuple)

    kind = "a Runner: notes, check, run and bind"
    # A backend without choices need not accept the parameter.
    asked = (sku, problem, device, *filter(None, [choice]))
    found: Runner = _asked(backend, "prepare", right, kind, *asked, refusal=SkudaError)
    return found


class _Never(Exception):
    """Never raised."""


def _asked(
    backend: Backend,
    question: str,
    right: Callable[[Any], bool],
    kind: str,
    *asked: Any,
    refusal: type[Exception] = _Never,
) -> Any:
    try:
        found = getattr(backend, question)(*asked)
    except (KeyboardInterrupt, refusal):
        raise
    except BaseException as error:
        raise Misbehaved(backend.spec.name, f"{question}() raised {told(error)}") from error
    if not right(found):
        raise Misbehaved(backend.spec.name, f"{question}() must return {kind}; had {_safely(repr, found)[:80]}")
    return found


def told(error: BaseException) -> str:
    """Return an error's kind and text, even if its ``__str__`` fails."""
    return f"{type(error).__name__}: {_safely(str, error)}"


def _safely(show: Callable[[Any], str], value: Any) -> str:
    try:
        return show(value)
    except Exception:  # noqa: BLE001  a plug-in's object may fail here too
        return f"(a {type(value).__name__} that cannot be shown)"
