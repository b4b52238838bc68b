"""The words that options take, for completion and for suggestions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from skuda.kernels.catalog import built_in_ops
from skuda.registry.arch import ArchSku
from skuda.registry.backend import BUILT_IN
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.elements import FLOATS, ElementKind

_WORDS: dict[str, Callable[[], Iterable[str]]] = {
    "op": lambda: (op.name for op in built_in_ops()),
    "op or kernel": lambda: (name for op in built_in_ops() for name in (op.name, *(sku.id for sku in op.skus))),
    "element": lambda: ElementKind,
    "float": lambda: FLOATS,
    "arch": lambda: ArchSku,
    "backend": lambda: (spec.name for spec in BUILT_IN),
    "device": lambda: KNOWN_DEVICES,
}


def words_of(kind: str) -> list[str]:
    """Return the words of a kind; those of plug-ins are not loaded for it."""
    return list(map(str, _WORDS[kind]()))
