"""Registers ops with torch, each whole or not at all, also when an import is interrupted and made again.

Python forgets a module whose import fails, but torch keeps what the module has registered, and refuses it the next
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._library import simple_registry
from torch.library import Library

from skuda.dispatch.system.interrupts import held_back
from skuda.torch.ops.tensor_op import OPS

NAMESPACE = "skuda"
_LIBRARIES: dict[str, Library] = {}
"""What torch knows, by op. A library must live as long as its op."""


@contextmanager
def registering(name: str) -> Iterator[Library]:
    """Give a library for an op and its overloads.

    An interrupt is held back until the block ends. With any other error, nothing remains registered. What an earlier
    block has registered under this name, in an import that failed afterwards, is replaced.

    Parameters
    ----------
    name : str
        The op, without an overload.
    """
    with held_back():
        _undo(name)
        # Of this kind there may be several: one may be left by an interrupt in its constructor.
        library = _LIBRARIES[name] = Library(NAMESPACE, "FRAGMENT")
        try:
            yield library
        except BaseException:
            _undo(name)
            raise


def overload_of(name: str) -> Any:
    """Return the overload of a name such as ``fill.number``, or the default one."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload or "default")


def _undo(name: str) -> None:
    """Let torch forget an op. An interrupt in torch may have left what the library itself does not know of."""
    library = _LIBRARIES.get(name)
    if library is None:
        return
    OPS.pop(name, None)
    library._destroy()  # noqa: SLF001  nothing public undoes a registration
    for known in (library._op_defs, library._op_impls):  # noqa: SLF001  else a destructor forgets the next library's
        known.clear()
    namespace = getattr(torch.ops, NAMESPACE)
    vars(namespace).pop(name, None)
    with suppress(ValueError):
        namespace._dir.remove(name)  # noqa: SLF001
    torch.library._impls -= {each for each in torch.library._impls if _is_of(name, each.split("/")[:2])}  # noqa: SLF001
    fakes = simple_registry.singleton._data  # noqa: SLF001
    for each in [each for each in fakes if _is_of(name, each.split("::"))]:
        del fakes[each]
    del _LIBRARIES[name]


def _is_of(name: str, parts: list[str]) -> bool:
    """Whether a namespace and a name with an overload mean this op."""
    namespace, _, overload = ".".join(parts).partition(".")
    return namespace == NAMESPACE and overload.partition(".")[0] == name
