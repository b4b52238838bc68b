"""Fingerprints of what evidence speaks about: a kernel with its launch, and the meaning that it was compared with."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from skuda.dispatch.sources import module_file, source_hash
from skuda.registry.op import Op

__all__ = ["modules_of", "reference_hash", "source_hash"]

_DECLARING = frozenset({"skuda.kernels.launch", "skuda.registry.sku"})
"""A module that imports one of these declares or launches kernels; that it holds arithmetic too, nothing here does."""

_DECLARED = frozenset({"SKUS", "OP"})


def reference_hash(op: Op) -> str:
    """Return the fingerprint of what an op means and of the cases that its kernels are run over.

    The module of its reference and those of the same package that it imports, but for the ones that declare or launch
    kernels. Comments, docstrings and the declaration of kernels do not count.

    Parameters
    ----------
    op : Op
        The op.

    Raises
    ------
    LookupError
        Where a module of it does not exist.
    """
    state = hashlib.sha256()
    for name in modules_of(op):
        state.update(f"{name}\0{_code(_read(name))}\0".encode())
    return state.hexdigest()


def modules_of(op: Op) -> list[str]:
    """Return the modules that say what an op means; see `reference_hash`."""
    first = op.reference.__module__
    family = _package(first)
    names, waiting = {first}, [first]
    for name in waiting:
        for found in _imported(name):
            declares = _DECLARING.intersection(_imported(found)) if found.startswith(family) else {found}
            if not declares and found not in names:
                names.add(found)
                waiting.append(found)
    return sorted(names)


def _package(module: str) -> str:
    """Return the start of the names of modules that belong together: skuda's kernels, or somebody else's package."""
    top = module.partition(".")[0]
    return "skuda.kernels." if top == "skuda" else f"{top}."


@cache
def _text(path: Path, changed: int) -> str:  # noqa: ARG001  another time of change is another text
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _read(module: str) -> str:
    path = module_file(module)
    return _text(path, path.stat().st_mtime_ns if path.is_file() else 0)


def _imported(module: str) -> frozenset[str]:
    """Return the modules that a module imports when it runs."""
    return _imports(_read(module))


@cache
def _imports(text: str) -> frozenset[str]:
    return frozenset(_walk(ast.parse(text)))


def _walk(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                if _is_module(name):
                    yield name
        elif not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield from _walk(child)


@cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@cache
def _code(text: str) -> str:
    """Return the lines of a module that mean something; the same whatever version of Python reads it."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            said = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            declared = node is tree and isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in _DECLARED
            if said or declared:
                lines[child.lineno - 1 : child.end_lineno] = [""] * ((child.end_lineno or 0) - child.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())
