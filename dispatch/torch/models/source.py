"""Reads the source of a module's ``forward`` to prove what it computes.

A structure may be replaced only if its computation is known. The name of a class proves nothing, and a run proves it
for one input only. So the source is read: a ``forward`` that only assigns names and returns is one expression of its
input, which is compared with known forms.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REFLECTION = frozenset({"eval", "exec", "globals", "locals", "vars"})
_OF_ANY_CLASS = frozenset(
    {"__annotations__", "__doc__", "__firstlineno__", "__init__", "__module__", "__static_attributes__", "forward"}
)
"""What a class may define without doing more than its base."""
_WEIGHT = r"self\.weight\.(?:T|mT|t\(\))"
_PRODUCT = re.compile(
    rf"(\w+) = (?:x @ {_WEIGHT}|torch\.matmul\(x, {_WEIGHT}\))\n"
    r"(?:if self\.bias is None:\n    return \1\nreturn \1 \+ self\.bias"
    r"|if self\.bias is not None:\n    \1 = \1 \+ self\.bias\nreturn \1)"
)
"""The statements of a linear layer that multiplies by its weight and adds its bias, if it has one."""
_CHECKPOINTING = "transformers.modeling_layers"
"""The module that adds `torch.utils.checkpoint` to layers: in ``__call__``, and since 5.23 around ``forward``."""
_RENAMING = "transformers.utils.deprecation"
"""The module of the decorator `deprecate_kwarg`, which renames arguments with a former name."""


class NotProven(Exception):
    """The computation of a module is unknown, or is not the expected one. The message says why."""


class Forward:
    """The ``forward`` of a module.

    Parameters
    ----------
    module : Module
        Any module.

    Attributes
    ----------
    parameters : tuple of inspect.Parameter
        The parameters without ``self``. The first one is the input.
    renamed : frozenset of str
        Former names of parameters other than the input, which a decorator also accepts.

    Raises
    ------
    NotProven
        If calling the module runs other code than this source, or there is no source.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        hooked = next((name for name in CALL_HOOKS if getattr(module, name, None)), None)
        if hooked is not None:
            raise NotProven(f"it has {hooked.strip('_').replace('_', ' ')}")
        if any(getattr(torch_module, f"_global{name}") for name in CALL_HOOKS):
            raise NotProven("there are hooks of all modules")
        if hasattr(module, "parametrizations"):
            raise NotProven("it has parametrizations")
        own = MethodType(type(module).forward, module)  # the package kernels sets it where it has no kernel
        if vars(module).get("forward", own) != own or not _runs_forward(_unwrapped(type(module).__call__)):
            raise NotProven("its forward was replaced")
        if module._compiled_call_impl is not None:  # noqa: SLF001  it has no public name
            raise NotProven("it is compiled")
        self._function = _unwrapped(type(module).forward)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self._function))).body[0]
        except (OSError, SyntaxError, TypeError) as error:
            raise NotProven("the source of its forward cannot be read") from error
        parameters = inspect.signature(self._function).parameters
        self.parameters = tuple(parameters.values())[1:]
        if not isinstance(tree, ast.FunctionDef) or next(iter(parameters), "") != "self" or not self.parameters:
            raise NotProven("its forward is not a plain method of an input")
        self._tree = tree
        self._reads = Counter(  # of attributes of self
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        )
        self.input = self.parameters[0].name
        self.renamed = frozenset(map(self._renamed_by, tree.decorator_list))

    def expression(self) -> str:
        """Return the result as one expression of the input ``x``. Other parameters keep their names.

        Raises
        ------
        NotProven
            If it does more than assign names and return, or reads a submodule twice.
        """
        known: dict[str, ast.expr] = {self.input: ast.Name("x")}
        body = copy.deepcopy(self._tree.body)
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        for statement in body[:-1]:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise NotProven("its forward does more than assign names")
            value, target = _Replaced(known).visit(statement.value), statement.targets[0]
            known |= dict(_bound(target, value))
        if not isinstance(body[-1], ast.Return) or body[-1].value is None:
            raise NotProven("its forward does not end with a result")
        twice = [name for name, count in self._reads.items() if count > 1]
        if twice:
            raise NotProven(f"its forward reads self.{twice[0]} twice")
        return ast.unparse(_Replaced(known).visit(body[-1].value))

    def statements(self) -> str:
        """Return all that it does, without the docstring."""
        return text_of(self._tree)

    def projects(self) -> tuple[str, ...]:
        """Return the submodules that take the input and nothing else, in the order of the source."""
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        of_self = ((call, call.func.attr) for call in calls if isinstance(call.func, ast.Attribute))
        found = [(call, name) for call, name in of_self if ast.unparse(call) == f"self.{name}({self.input})"]
        found.sort(key=lambda each: (each[0].lineno, each[0].col_offset))
        return tuple(name for _, name in found)

    def only_projects(self, names: Iterable[str]) -> None:
        """Prove that only the input's leading shape is used, and that each submodule of `names` takes it once.

        Raises
        ------
        NotProven
            If the input or one of these submodules may be used in another way.
        """
        names, allowed = tuple(names), set()
        read = {
            node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and ast.unparse(node) in [f"self.{name}({self.input})" for name in names]:
                allowed |= {id(node.args[0]), id(node.func)}
            elif isinstance(node, ast.Subscript) and ast.unparse(node) == f"{self.input}.shape[:-1]":
                allowed.add(id(node.value.value))  # type: ignore[attr-defined]
            elif isinstance(node, ast.Assign) and ast.unparse(node.value) == f"{self.input}.shape":
                last = getattr(node.targets[-1], "elts", [None])[-1]  # the joined output has another last axis
                if len(node.targets) == 1 and isinstance(last, ast.Name) and last.id not in read:
                    allowed.add(id(node.value.value))  # type: ignore[attr-defined]
        for node in ast.walk(self._tree):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in _REFLECTION or (id(node) not in allowed and name in (self.input, *names)):
                raise NotProven(f"its forward may use {name} in another way")
        for name in names:
            if self._reads[name] != 1:
                raise NotProven(f"its forward calls {name} {self._reads[name]} times")

    def resolve(self, path: str) -> Any:
        """Return the object of a dotted name in the source, or None if it is not defined."""
        first, *rest = path.split(".")
        code = self._function.__code__
        if first in (*code.co_freevars, *code.co_varnames[1:]):
            return None
        found = self._module if first == "self" else self._function.__globals__.get(first)
        for name in rest:
            found = getattr(found, name, None)
        return found

    def _renamed_by(self, decorator: ast.expr) -> str:
        """Return the former name that a decorator replaces, if that is all it does."""
        called = self.resolve(ast.unparse(decorator.func)) if isinstance(decorator, ast.Call) else None
        known = getattr(called, "__module__", ""), getattr(called, "__name__", "")
        if not isinstance(decorator, ast.Call) or known != (_RENAMING, "deprecate_kwarg"):
            raise NotProven("its forward is not a plain method of an input")
        try:
            former, _ = map(ast.literal_eval, decorator.args)
            given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
        except ValueError:
            raise NotProven("its forward has a decorator with other than literal arguments") from None
        others = {each.name for each in self.parameters[1:] if each.kind is not each.VAR_KEYWORD}
        if set(given) != {"new_name"} or given["new_name"] not in others or former in (self.input, *others):
            raise NotProven(f"its forward may take {former} in the place of {given.get('new_name', 'nothing')}")
        return str(former)


def source_of(function: Any) -> str:
    """Return what a function does, without its docstring; nothing if there is no source."""
    try:
        return text_of(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0])
    except (OSError, SyntaxError, TypeError):
        return ""


def linear_subclass(layer: nn.Linear) -> str | None:
    """Return why a layer of a subclass of `nn.Linear` may do more than it, or None if it does the same."""
    kind: Any = type(layer)
    return _more_than_linear(kind)


@cache
def _more_than_linear(kind: Any) -> str | None:
    bases = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    if nn.modules.linear.NonDynamicallyQuantizableLinear in bases:
        return "whose weight torch reads instead of calling it"
    more = sorted({name for base in bases for name in vars(base)} - _OF_ANY_CLASS)
    if more:
        return f"which has its own {more[0]}"
    if kind.forward is nn.Linear.forward:
        return None
    function: Any = kind.forward
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) == 2 and parameters[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and _plain(function):
        known = function.__globals__
        text = re.sub(rf"\b{parameters[1].name}\b", "x", source_of(function))
        linear = re.fullmatch(r"return ([\w.]+)\(x, self\.weight, self\.bias\)", text)
        if linear is not None and _global(known, linear[1]) is nn.functional.linear:
            return None
        if _PRODUCT.fullmatch(text) and ("torch." not in text or known.get("torch") is torch):
            return None
    return "whose forward is not that of nn.Linear"


def _plain(function: Any) -> bool:
    """Whether the source of a function is its own, and its names are those of its module."""
    code = getattr(function, "__code__", None)
    return code is not None and not hasattr(function, "__wrapped__") and not code.co_freevars


def _global(known: Mapping[str, Any], path: str) -> Any:
    """Return the object of a dotted name, or None."""
    first, *rest = path.split(".")
    return reduce(lambda found, name: getattr(found, name, None), rest, known.get(first))


def text_of(tree: Any) -> str:
    """Return the statements of a function."""
    first = tree.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return "\n".join(map(ast.unparse, tree.body[documented:]))


def _unwrapped(function: Any) -> Any:
    """Return the function inside a wrapper that is known to change only names of arguments."""
    while hasattr(function, "__wrapped__"):
        if _home(function) not in (_CHECKPOINTING, _RENAMING):
            raise NotProven("its forward is wrapped")
        function = function.__wrapped__
    return function


def _runs_forward(call: Any) -> bool:
    """Whether a ``__call__`` runs ``forward`` and nothing else, except for checkpoints in training."""
    known = _home(call) == _CHECKPOINTING and call.__qualname__ == "GradientCheckpointingLayer.__call__"
    return known or call is nn.Module.__call__


def _home(function: Any) -> object:
    """Return the name of the module whose source defines a function. A decorator cannot change it."""
    return getattr(function, "__globals__", {}).get("__name__")


class _Replaced(ast.NodeTransformer):
    """Replaces names by their expressions."""

    def __init__(self, known: dict[str, ast.expr]) -> None:
        self._known = dict(known)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._known.get(node.id, node)

    def visit_NamedExpr(self, _: ast.NamedExpr) -> ast.expr:
        raise NotProven("its forward assigns within an expression")


def _bound(target: ast.expr, value: ast.expr) -> Iterable[tuple[str, ast.expr]]:
    """Return the names that an assignment binds, with their values."""
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if isinstance(target, ast.Tuple) and all(isinstance(part, ast.Name) for part in target.elts):
        return [(ast.unparse(name), ast.Subscript(value, ast.Constant(i))) for i, name in enumerate(target.elts)]
    raise NotProven("its forward assigns to something other than a name")
