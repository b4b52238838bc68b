"""Hashes of code that change only when its meaning may have changed.

Comments, docstrings and layout do not count. In a Python module only the definitions that a function reaches count, so
a re-export or an unrelated function does not change the hash.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from skuda.registry.cached import cached_property

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|(?<![\w.])\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|(?<![\w.])\'(?:\\.|[^\'\\])*\''  # strings and characters
    r"|\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*|\w+"  # numbers and names
    r"|<<=|>>=|\.\.\.|::|->|\+\+|--|&&|\|\||##|[<>=!+\-*/%&|^]=|<<|>>|\S"
)
_ANY_NAME = frozenset({"globals", "eval", "exec"})
"""Code that uses one of these may reach every name of its module."""

_SHARED = ("skuda.kernels",)
VOCABULARY = ("skuda.kernels.launch",)
"""The types that every launch rule uses; they do not affect any single kernel."""

Names = tuple[str, ...]


def c_tokens(text: str) -> str:
    """Return the tokens of C or CUDA source, separated by blanks; preprocessor lines stay separate lines.

    Raw string literals are not supported.
    """
    plain = _COMMENT.sub(lambda found: found[1] or " ", text.replace("\\\n", " "))
    lines = (" ".join(_TOKEN.findall(line)) for line in plain.splitlines())
    return " ".join(f"\n{line}\n" if line.startswith("#") else line for line in lines if line)


def code_hash(module: str, name: str = "", within: Names = (), without: Names = VOCABULARY) -> str:
    """Return the hash of a definition and of every definition that it reaches.

    Raise `LookupError` if a module that is followed does not exist. `name` is a function, class or constant at the top
    of the module; empty for the whole module. Definitions in the modules and packages `within`, but not `without`, are
    followed; of any other only the name counts. An empty `within` means the module's own distribution and skuda's
    kernels.
    """
    key = module_file(module), module, name, within, without
    stamps, digest = _KNOWN.get(key, ({}, ""))
    if not stamps or any(_stamp(path) != stamp for path, stamp in stamps.items()):
        found = reached(module, name, within, without)
        stamps = {path: _stamp(path) for path in {module_file(owner) for owner, _ in found}}
        digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
        _KNOWN[key] = stamps, digest
    return digest


_KNOWN: dict[tuple[Path, str, str, Names, Names], tuple[dict[Path, int], str]] = {}
"""Hashes, with the time stamps of their files, because hundreds of kernels share a few launch rules."""


def _stamp(path: Path) -> int:
    """Return the modification time of a file in nanoseconds; 0 if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


Key = tuple[str, str]
"""A module and a name in it; an empty name means the whole module."""


def reached(
    module: str, name: str = "", within: Names = (), without: Names = VOCABULARY
) -> dict[Key, tuple[str, list[str]]]:
    """Return the definitions that `code_hash` hashes, each with its canonical text and the targets of its names."""
    within = within or (*_SHARED, *(() if module.startswith("skuda.") else (module.partition(".")[0],)))

    def follows(path: str) -> bool:
        return _inside(path, within) and not _inside(path, without)

    found: dict[Key, tuple[str, list[str]]] = {}
    modules: dict[str, _Module] = {}
    waiting = [(module, name)]
    for key in waiting:
        here = modules[key[0]] if key[0] in modules else modules.setdefault(key[0], _module(key[0]))
        name = key[1] if here.defines(key[1]) else ""
        if (key[0], name) in found:
            continue
        text, names, imports = here.part(name)
        edges = []
        for chain in names:
            target = _resolved(chain, imports, here, modules, follows)
            if isinstance(target, tuple):
                waiting.append(target)
            if target is not None:
                edges.append(f"{chain}={target}")
        found[key[0], name] = text, edges
        # Statements that run on import count for every definition of the module.
        waiting += [(key[0], "*")] if here.defines("*") else []
        waiting += [(star, "") for star in here.stars if follows(star)]
    return found


def _resolved(
    chain: str, imports: Mapping[str, str], here: _Module, modules: dict[str, _Module], follows: Callable[[str], bool]
) -> Key | str | None:
    """Return the definition that a dotted name refers to; its path if it is not followed, None for a local name."""
    head, _, rest = chain.partition(".")
    for _ in range(20):  # re-exports of re-exports
        if head not in imports:
            return (here.name, head) if here.defines(head) else None
        path = f"{imports[head]}.{rest}".rstrip(".")
        if not follows(path):
            return path
        parts = path.split(".")
        depth = next(depth for depth in range(len(parts), 0, -1) if depth == 1 or _file(".".join(parts[:depth])))
        owner, head, rest = ".".join(parts[:depth]), *(*parts[depth:], "", "")[:2]
        here = modules[owner] if owner in modules else modules.setdefault(owner, _module(owner))
        imports = here.imports
        if not head or (not here.defines(head) and head not in imports):
            return owner, ""
    raise LookupError(f"{chain} is imported in a circle")


def _inside(path: str, packages: Names) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)


class _Module:
    """The top level of a Python module.

    `name` is dotted. `package` is the one that its relative imports refer to. `text` is its source.
    """

    def __init__(self, name: str, package: str, text: str) -> None:
        self.name, self._package = name, package
        self._tree = ast.parse(text)
        self._parts: dict[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {}
        imported = self._imported(self._tree, top=True)
        self.stars = [path for name, path in imported.items() if name.startswith("*")]
        self.imports = {name: path for name, path in imported.items() if not self.defines(name)}

    @cached_property
    def _definitions(self) -> dict[str, list[ast.stmt]]:
        """The statements that define each name. ``*`` has statements that define no name but have an effect."""
        found: dict[str, list[ast.stmt]] = {}
        for statement in self._tree.body:
            if _is_text(statement):
                continue
            names = set(_bound(statement))
            only_imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(statement))
            for name in names or (() if only_imports else ("*",)):
                found.setdefault(name, []).append(statement)
        return found

    def defines(self, name: str) -> bool:
        """Return whether a name is defined here, not imported."""
        return name in self._definitions

    def part(self, name: str) -> tuple[str, tuple[str, ...], Mapping[str, str]]:
        """Return a definition's canonical text, its dotted names, and the paths of its imported names."""
        if name not in self._parts:
            statements = self._definitions[name] if name else self._tree.body
            names = {chain for statement in statements for chain in _chains(statement)}
            if not names.isdisjoint(_ANY_NAME):
                names |= self._definitions.keys()
            inner = ast.Module(list(statements), [])
            imports = {**self.imports, **self._imported(inner, top=False)} if name else self.imports
            text = repr([_canonical(statement) for statement in statements if not _is_import(statement)])
            self._parts[name] = text, tuple(sorted(names)), imports
        return self._parts[name]

    def _imported(self, tree: ast.Module, *, top: bool) -> dict[str, str]:
        """Return the paths of imported names: at the top of the module, or anywhere in the given statements."""
        found: dict[str, str] = {}
        for node in _at_the_top(tree) if top else ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.asname or alias.name.partition(".")[0]
                    found[whole] = alias.name if alias.asname else whole
            elif isinstance(node, ast.ImportFrom):
                source = "." * node.level + (node.module or "")
                source = importlib.util.resolve_name(source, self._package) if node.level else source
                for alias in node.names:
                    if alias.name == "*":
                        found[f"* of {source}"] = source
                    else:
                        found[alias.asname or alias.name] = f"{source}.{alias.name}"
        return found


def _module(name: str) -> _Module:
    path = module_file(name)
    # Built-in and compiled modules have no source; the record has their versions.
    return _parsed(name, path, _stamp(path)) if path.suffix == ".py" else _Module(name, name, "")


@cache
def _parsed(name: str, path: Path, changed: int) -> _Module:
    # `changed` is part of the cache key: a new modification time means a new text.
    if not changed:
        raise LookupError(f"{name} cannot be read: there is no {path}")
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return _Module(name, package, path.read_text(encoding="utf-8"))


def module_file(module: str) -> Path:
    """Return the path of a Python module's source without importing it; raise `LookupError` if there is none."""
    path = _file(module)
    if path is None:
        raise LookupError(f"{module} cannot be found")
    return path


def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else Path(spec.origin or "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _at_the_top(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it that run when the module is imported."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
        for child in ast.iter_child_nodes(node):
            yield from _at_the_top(child)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement defines, without imported ones."""
    for node in _at_the_top(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.stmt | ast.withitem):
            targets = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
            yield from (
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )


def _chains(node: ast.AST) -> Iterator[str]:
    """Yield every name that is used, with its attributes, for example ``rows`` and ``affine.quantize``."""
    attributes: list[str] = []
    base = node
    while isinstance(base, ast.Attribute):
        attributes.insert(0, base.attr)
        base = base.value
    if isinstance(base, ast.Name):
        yield ".".join((base.id, *attributes))
        return
    for child in ast.iter_child_nodes(base):
        yield from _chains(child)


def _canonical(node: object) -> object:
    """Return a syntax tree as nested tuples that do not depend on the version of Python."""
    if isinstance(node, ast.AST):
        skipped = ("ctx", "kind", "type_comment")
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in skipped)
        return type(node).__name__, *((name, _canonical(value)) for name, value in fields if value not in (None, []))
    if isinstance(node, list):
        return [_canonical(child) for child in node if not _is_text(child)]
    return node
