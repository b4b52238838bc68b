"""The arguments of an op in words, from its declared signature."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from skuda.registry.argument import ArgumentSpec
from skuda.registry.descriptor import Descriptor

COLUMNS = ("argument", "role", "element", "axes", "when")


def argument_rows(descriptor: type[Descriptor]) -> list[tuple[str, str, str, str, str]]:
    """Return a row of `COLUMNS` for every declaration. Of several rows of an argument, the first one that holds counts.

    A class without a signature has no rows.
    """
    seen: set[str] = set()
    rows = []
    for each in descriptor.signature:
        role = each.role.replace("_", " ") + ("" if each.required else ", optional")
        when = " and ".join(_condition(names, values) for names, values in each.when.items())
        always = "otherwise" if each.name in seen else ""
        rows.append((each.name, role, _element(descriptor, each), _axes(descriptor, each), when or always))
        seen.add(each.name)
    return rows


def _element(descriptor: type[Descriptor], each: ArgumentSpec) -> str:
    named = [_explained(descriptor, name) or name for name in each.element_names]
    return " or ".join(named or each.fixed_elements)


def _axes(descriptor: type[Descriptor], each: ArgumentSpec) -> str:
    if each.is_scalar:
        return "a number, or an array of one element"
    notes = {name: _explained(descriptor, name) for name, _, _ in each.shape if name}
    about = "; ".join(f"{name}: {note}" for name, note in notes.items() if note)
    text = each.axes.removeprefix("*") or "none"
    return f"{text} in all, any shape" if each.flat else f"{text} ({about})" if about else text


def _explained(descriptor: type[Descriptor], name: str) -> str:
    """Return what a property is, by its docstring; nothing for a field."""
    found = getattr(descriptor, name, None) if name not in descriptor.model_fields else None
    first = (inspect.getdoc(found) or "").partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


def _condition(names: str, values: tuple[Any, ...]) -> str:
    if values in ((True,), (False,)):
        return names if values[0] else f"not {names}"
    others = [value for value in type(values[0]) if value not in values] if isinstance(values[0], Enum) else []
    if others and len(others) < len(values):
        return f"{names} is not {' or '.join(map(str, others))}"
    return f"{names} is {' or '.join(map(str, values))}"
