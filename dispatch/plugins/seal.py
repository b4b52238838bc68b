"""Detects and undoes changes that a plug-in makes to records that are not its own."""

from __future__ import annotations

from typing import Any

from skuda.registry.registry import Registry
from skuda.registry.value import Value

_Watched = dict[int, tuple[str, dict[Any, Any]]]
"""Name and fields of each object, by the object's identity."""
_TABLE = "the registry's "


class Seal:
    """Remembers the fields of all records of some registries. Records are frozen, but Python code can bypass that.

    It is not a security boundary: code in the process can also replace functions and classes.
    """

    def __init__(self, *registries: Registry) -> None:
        watched: _Watched = {}
        for registry in registries:
            _watch_all(watched, registry)
        self._watched = [(name, fields, dict(fields)) for name, fields in watched.values()]

    def mend(self) -> tuple[str, ...]:
        """Restore every changed record and return the names of those that were changed."""
        changed = []
        for name, fields, before in self._watched:
            same = all(fields.get(key) is value for key, value in before.items())
            # A record's own cached properties may have joined its fields; nothing may join a registry's tables.
            if same and (len(fields) == len(before) or not name.startswith(_TABLE)):
                continue
            changed.append(name)
            fields.clear()
            fields.update(before)
        return tuple(changed)


def _watch_all(watched: _Watched, registry: Registry) -> None:
    for name, table in vars(registry).items():
        if isinstance(table, dict):
            watched[id(table)] = (_TABLE + name.strip("_"), table)
    for op in registry.ops.values():
        watched[id(op)] = (f"op {op.name}", vars(op))
    for spec in registry.backends.values():
        _watch(watched, f"backend {spec.name}", spec)
    for sku in registry:
        _watch(watched, sku.id, sku)


def _watch(watched: _Watched, name: str, value: object) -> None:
    """Watch a record and the records in it. A guarantee that many of them share is watched once."""
    if isinstance(value, tuple):
        for part in value:
            _watch(watched, name, part)
    elif isinstance(value, Value) and id(value) not in watched:
        watched[id(value)] = (name, vars(value))
        for part in vars(value).values():
            _watch(watched, name, part)
