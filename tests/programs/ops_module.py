"""Writes the functions of `skuda.ops`, one for every built-in op: ``make ops``."""

import importlib
import inspect
from pathlib import Path
from typing import get_args, get_origin

from skuda.dispatch.select.fields import Fields
from skuda.kernels.catalog import built_in_ops

PATH = Path(__file__).resolve().parents[2] / "dispatch" / "skuda-package" / "ops.py"

HEAD = '''
"""Every op as a function of its arrays: the descriptor follows from their shapes and dtypes.

``make ops`` writes this file from the registry. An op of a plug-in is here as well, without a signature.

>>> import numpy, skuda
>>> skuda.ops.fake_quantize(input=numpy.float32([0.26, 99]), scale=0.5, zero_point=0, q_min=-128, q_max=127)
array([ 0.5, 63.5], dtype=float32)

Every argument is a keyword: the op's arguments, then the fields of its descriptor, of which those that are left out
follow from the arguments or have a default. Three more say how to run: `dispatcher` (one for the whole process where
it is left out), `preference` and `stream`. An output that is left out is made in the framework of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skuda.functional import call, function, op_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skuda.dispatch import Dispatcher, PlanPreference
{imports}

def __getattr__(name: str) -> Callable[..., Any]:
    found = None if name.startswith("_") else function(name)
    if found is None:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
    return found


def __dir__() -> list[str]:
    return op_names()
'''

OPTIONS = ("dispatcher: Dispatcher | None = None", "preference: PlanPreference | None = None", "stream: object = None")


def written():
    """Return the module's text."""
    ops = sorted(built_in_ops(), key=lambda op: op.name)
    imports = {}
    bodies = [_function(op, imports) for op in ops]
    lines = (f"    from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(imports.items()))
    return HEAD.lstrip().format(imports="".join(lines)) + "".join(bodies)


def _function(op, imports):
    fields = Fields(op)
    lines = []
    for argument in fields.arguments.values():
        needed = argument.name in fields.always and argument.is_needed
        lines.append(f"{argument.name}: Any" if needed else f"{argument.name}: Any = None")
    for name, info in op.descriptor.model_fields.items():
        if name != "op":
            kind = _kind(info.annotation, imports)
            needed = info.is_required() and not fields.follows(name)
            lines.append(f"{name}: {kind}" if needed else f"{name}: {kind} | None = None")
    result = op.descriptor.result
    returned = "Any" if result is None else result.__name__
    body = f'return call("{op.name}", locals())'
    if result is not None:
        package = result.__module__.rpartition(".")[0]
        imports.setdefault(package, set()).add(returned)
        assert hasattr(importlib.import_module(package), returned)
        body = f'found: {returned} = call("{op.name}", locals())\n    return found'
    parameters = "".join(f"    {line},\n" for line in ("*", *lines, *OPTIONS))
    return f'\n\ndef {op.name}(\n{parameters}) -> {returned}:\n    """{op.summary}"""\n    {body}\n'


def _kind(annotation, imports):
    """Return a field's type as it is written: what a caller may pass, not what the descriptor makes of it."""
    if get_origin(annotation) is tuple:
        return "Sequence[int]"
    kind = next(kind for kind in _flat(annotation) if inspect.isclass(kind))
    if kind in {int, float, bool}:
        return kind.__name__
    imports.setdefault(kind.__module__, set()).add(kind.__name__)
    return f"{kind.__name__} | str"


def _flat(annotation):
    inner = get_args(annotation)
    return [kind for part in inner for kind in _flat(part)] if inner else [annotation]


if __name__ == "__main__":
    PATH.write_text(written(), encoding="utf-8")
