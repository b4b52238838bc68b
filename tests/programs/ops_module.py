"""Writes the types of the functions of `skuda.ops`, one for every built-in op: ``make ops``."""

import importlib
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from skuda.functional import built_in, signature_of

PATH = Path(__file__).resolve().parents[2] / "dispatch" / "skuda-package" / "ops.pyi"

HEAD = """
# Made by `make ops` from the registry. For an op of a plug-in there is a function too, of any type.
# fmt: off
from collections.abc import Callable, Sequence
from typing import Any

{imports}

def __getattr__(name: str) -> Callable[..., Any]: ...
"""


def written():
    """Return the module's text."""
    imports = {}
    functions = [_function(op, imports) for op in built_in().values()]
    lines = (f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items()))
    return HEAD.lstrip().format(imports="\n".join(lines)) + "".join(functions)


def _function(op, imports):
    signature = signature_of(op)
    parameters = [
        f"{name}: {_text(one.annotation, imports)}{'' if one.default is one.empty else ' = None'}"
        for name, one in signature.parameters.items()
    ]
    # A parameter is not broken over two lines.
    glued = " ".join(("*,", *(f"{one.replace(' ', '~')}," for one in parameters)))
    body = textwrap.fill(glued, 116, break_on_hyphens=False, break_long_words=False).replace("~", " ")
    head = f"def {op.name}(\n{textwrap.indent(body, '    ')}\n)"
    return f'{head} -> {_text(signature.return_annotation, imports)}:\n    """{op.summary}"""\n'


def _text(kind, imports):
    """Return a type as it is written in the file."""
    if isinstance(kind, types.UnionType):
        return " | ".join(_text(part, imports) for part in get_args(kind))
    if kind in {Any, Sequence[int]}:
        return str(kind).rpartition("typing.")[2].rpartition("abc.")[2]
    if kind is type(None):
        return "None"
    if kind.__module__ != "builtins":
        # As its package exports it.
        module, package = kind.__module__, kind.__module__.rpartition(".")[0]
        found = package if getattr(importlib.import_module(package), kind.__name__, None) is kind else module
        imports.setdefault(found, set()).add(kind.__name__)
    return kind.__name__


if __name__ == "__main__":
    PATH.write_text(written(), encoding="utf-8")
