"""Ops as functions: the implementation of `skuda.ops`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from skuda.dispatch.system.locks import lock
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from skuda.dispatch.dispatcher import Dispatcher
    from skuda.dispatch.launches import Launch
    from skuda.dispatch.select.fields import Fields
    from skuda.registry.op import Op

LAUNCHES: dict[Hashable, tuple[Launch, ...]] = {}
"""The launches of the default dispatcher, by key; see `skuda.dispatch.launches`."""

_lock = lock()
_default: list[Dispatcher] = []
_fields: dict[type, Fields] = {}


def default_dispatcher() -> Dispatcher:
    """Return the dispatcher for calls without one. The first such call makes it."""
    if not _default:
        with _lock:
            if not _default:
                from skuda.dispatch.dispatcher import Dispatcher

                made = Dispatcher()
                made._launches.of = LAUNCHES  # noqa: SLF001
                _default.append(made)
    return _default[0]


def op_names() -> list[str]:
    """Return the names of all ops, including those of plug-ins."""
    return list(default_dispatcher().registry.ops)


def function(name: str) -> Callable[..., Any] | None:
    """Return an op as a function, or None if there is no such op."""
    if name not in default_dispatcher().registry.ops:
        return None
    return partial(_called_by_name, name)


def _called_by_name(op: str, **given: Any) -> Any:
    return call(op, given)


def call(op: str, given: Mapping[str, Any]) -> Any:
    """Derive the descriptor of a call from its arguments, and run it.

    Parameters
    ----------
    op : str
        Name of the op.
    given : mapping of str to object
        The op's arguments, the descriptor's fields, and `dispatcher`, `preference` and `stream`. None means left out.

    Raises
    ------
    InvalidProblem
        For an unknown op, a bad argument, and a missing field that follows from no argument.
    Unsupported
        If no kernel can serve the problem.
    """
    given = dict(given)
    dispatcher = given.pop("dispatcher", None)
    if dispatcher is None:
        dispatcher = default_dispatcher()
    how = {"stream": given.pop("stream", None), "preference": given.pop("preference", None)}
    try:
        known = dispatcher.registry.ops
    except AttributeError:
        rule = "be a Dispatcher, or None for one that all calls share"
        raise InvalidProblem(op, "dispatcher", shown(dispatcher), rule) from None
    if op not in known:
        raise InvalidProblem("skuda.ops", "op", repr(op), f"be one of {', '.join(known)}, which this dispatcher has")
    problem, arguments = _fields_of(known[op]).split(given)
    return dispatcher.run(problem, **how, **arguments)


def _fields_of(op: Op) -> Fields:
    found = _fields.get(op.descriptor)
    if found is None:
        from skuda.dispatch.select.fields import Fields

        found = _fields[op.descriptor] = Fields(op)
    return found
