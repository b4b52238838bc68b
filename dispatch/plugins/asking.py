"""Calls the methods of backends. Whatever a backend raises or returns, the dispatcher gets a value or `Misbehaved`.

Output that a backend prints in a call goes to standard error. Its texts become single lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.plugins.stdout import kept_clean
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import SkudaError
from skuda.registry.sku import KernelSku
from skuda.registry.text import one_line

KERNELS = "skuda.kernels"
"""The entry-point group of kernels."""
Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Misbehaved(Exception):
    """A backend raised an error, or returned an invalid value."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(message)
        self.backend = backend


def ask_status(backend: Backend) -> BackendStatus:
    """Return `Backend.status`. Raise `Misbehaved` for an error or an invalid value."""

    def taken(found: Any) -> BackendStatus:
        words = {"detail": one_line(found.detail), "remedy": one_line(found.remedy)}
        return BackendStatus(available=found.available, **words)

    return _asked(backend, "status", taken, "a BackendStatus")


def ask_devices(backend: Backend) -> tuple[Device, ...]:
    """Return `Backend.devices`. Raise `Misbehaved` also for a device of another processor or an absent one."""
    processor = backend.spec.processor

    def taken(found: Any) -> tuple[Device, ...]:
        devices = tuple(each.model_copy(update={"name": one_line(each.name)}) for each in _tuple(found, Device))
        if any(each.ordinal is None or each.processor != processor for each in devices):
            raise TypeError
        return devices

    return _asked(backend, "devices", taken, f"a tuple of {processor} Devices with an ordinal")


def ask_words(backend: Backend, question: str, *asked: Any) -> tuple[str, ...]:
    """Return a backend's `notes` or `describe_choice`. Raise `Misbehaved` for an error or an invalid value."""
    return _asked(backend, question, _lines, "a tuple of str", *asked)


def ask_choices(backend: Backend, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[str, ...]:
    """Return the names of a kernel's configurations, as single lines. Raise `Misbehaved` for an invalid value."""

    def taken(found: Any) -> tuple[str, ...]:
        from skuda.kernels.launch import Choice  # imported here: with it come the launches of all kernels

        names = tuple(choice.name for choice in _tuple(found, Choice))
        if names != _lines(names):
            raise TypeError
        return names

    return _asked(backend, "choices", taken, "a tuple of Choices", sku, problem, device)


def ask_runner(backend: Backend, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:
    """Return `Backend.prepare`. Raise `Misbehaved`, or the `SkudaError` of the backend."""

    def taken(found: Any) -> Runner:
        if not all(callable(getattr(found, name)) for name in ("run", "check", "bind")):
            raise TypeError
        _lines(found.notes)
        runner: Runner = found
        return runner

    kind = "a Runner: notes, check, run and bind"
    # A backend without choices need not accept the parameter.
    asked = (sku, problem, device, *filter(None, [choice]))
    return _asked(backend, "prepare", taken, kind, *asked, refusal=SkudaError)


def _tuple(found: Any, kind: type[Item]) -> tuple[Item, ...]:
    if isinstance(found, tuple) and all(isinstance(each, kind) for each in found):
        return found
    raise TypeError


def _lines(found: Any) -> tuple[str, ...]:
    return tuple(one_line(each) for each in _tuple(found, str))


class _Never(Exception):
    """Never raised."""


def _asked(
    backend: Backend,
    question: str,
    taken: Callable[[Any], Answer],
    kind: str,
    *asked: Any,
    refusal: type[Exception] = _Never,
) -> Answer:
    """Call a method. `taken` converts the value, and raises if the value is not of this kind."""
    with kept_clean():
        try:
            found = getattr(backend, question)(*asked)
        except (KeyboardInterrupt, refusal):
            raise
        except BaseException as error:
            raise Misbehaved(backend.spec.name, f"{question}() raised {error_text(error)}") from error
        try:
            return taken(found)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            had = _shown(repr, found)[:80]
            raise Misbehaved(backend.spec.name, f"{question}() must return {kind}; had {had}") from error


def error_text(error: BaseException) -> str:
    """Return an error's type and text on one line, even if its ``__str__`` fails or exits."""
    return one_line(f"{_kind(error)}: {_shown(str, error)}")


def _shown(show: Callable[[Any], str], value: Any) -> str:
    try:
        return one_line(show(value))
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  a plug-in's object may do anything here too
        return f"(a {_kind(value)} that cannot be shown)"


def _kind(value: object) -> str:
    """Return the name of a value's type. A metaclass may run any code for it."""
    return one_line(type.__dict__["__name__"].__get__(type(value)))
