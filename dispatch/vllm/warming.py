"""Kernels are compiled and loaded side by side when vLLM compiles a graph, so that capturing it compiles nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from skuda.functional import default_dispatcher
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.torch.tensor_op import OPS

_MOST_THREADS = 16


def problems_of(graph: fx.Graph, sizes: Iterable[int], known: set[Any]) -> set[Descriptor]:
    """Return the problems of the calls of skuda's ops in a graph, for each number of tokens.

    Parameters
    ----------
    graph : Graph
        Its nodes have fake tensors in ``meta["val"]``. The one symbol of their sizes is the number of tokens; calls
        with several are left out.
    sizes : iterable of int
        Numbers of tokens.
    known : set
        Calls of earlier graphs, which are left out. Those of this graph are added.
    """
    counts, found = tuple(sizes), set()
    for node in graph.nodes:
        schema: Any = getattr(node.target, "_schema", None)
        space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
        op = OPS.get(name) if space == "skuda" else None
        if op is None:
            continue
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        values = {key: _value(each) for key, each in given.items() if each is not None}
        call = name, *((key, _form(value)) for key, value in values.items())
        symbols = {symbol for value in values.values() for symbol in _symbols(value)}
        if call in known or len(symbols) > 1:
            continue
        known.add(call)
        for count in counts if symbols else (0,):
            concrete = {key: _at(value, symbols, count) for key, value in values.items()}
            try:
                found.add(op.problem(**concrete))
            except SkudaError:  # the call itself will say what is wrong
                break
    return found


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _form(value: Any) -> Any:
    """Return what tells a value from others: dtype and shape of a tensor."""
    return (value.dtype, *map(str, value.shape)) if isinstance(value, Tensor) else str(value)


def _symbols(value: Any) -> set[Any]:
    parts = value.shape if isinstance(value, Tensor) else (value,)
    return {symbol for part in parts if isinstance(part, torch.SymInt) for symbol in part.node.expr.free_symbols}


def _at(value: Any, symbols: set[Any], count: int) -> Any:
    """Return a value for a number of tokens: a tensor without data for a tensor."""

    def size(part: Any) -> Any:
        return int(part.node.expr.subs(dict.fromkeys(symbols, count))) if isinstance(part, torch.SymInt) else part

    if isinstance(value, Tensor):
        return torch.empty([size(part) for part in value.shape], dtype=value.dtype, device="meta")
    return size(value)


def warm(problems: Iterable[Descriptor], device: str) -> None:
    """Choose and load a kernel for every problem. What fails now fails again, with its reason, where it is called."""
    dispatcher = default_dispatcher()

    def ready(problem: Descriptor) -> None:
        try:
            dispatcher.select(problem, device=device)
        except SkudaError:
            return

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(ready, problems))
