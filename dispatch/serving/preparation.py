"""Kernels of all numbers of tokens are compiled and loaded before an engine says that it is ready.

What an engine will call is known in two ways. While it starts, it runs the model, and the dispatcher records every
problem. What it does not run then is named by `want`. Each problem stands for all numbers of rows up to the engine's
limit. When a graph is compiled, its ops are prepared first, with all that is known by then, so that kernels compile
side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import monotonic
from typing import Any

import torch
from torch import Tensor, fx

from skuda.dispatch.advance import Prepared, Rows, rows_of
from skuda.functional import default_dispatcher
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import SkudaError
from skuda.torch.ops.tensor_op import OPS

_BETWEEN = 5.0
"""Seconds between two lines of progress."""
_wanted: set[Rows] = set()
_prepared: set[tuple[str, Rows]] = set()
"""What was prepared before, so that nobody asks again, by device."""


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


def select(problems: Iterable[Descriptor], device: str) -> None:
    """Plan problems, so that a graph with them can be captured. What fails now fails again where it is called."""
    dispatcher = default_dispatcher()
    for problem in problems:
        try:
            dispatcher.select(problem, device=device)
        except SkudaError:
            continue


def want(problems: Iterable[Descriptor], most: int) -> None:
    """Let the next preparation include problems with every number of rows from 1 to `most`."""
    _wanted.update(rows for problem in problems for rows in rows_of(problem, most))


def prepare(device: str, log: logging.Logger) -> Prepared | None:
    """Load all kernels that are wanted and not ready, with lines of progress in a log. None if there was nothing."""
    missing = [rows for rows in _wanted if (device, rows) not in _prepared]
    _wanted.clear()
    if not missing:
        return None
    shown = monotonic()

    def progress(done: int, count: int) -> None:
        nonlocal shown
        if monotonic() - shown > _BETWEEN and done < count:
            shown = monotonic()
            log.info("skuda: %d of %d kernels are ready", done, count)

    found = default_dispatcher().prepare_rows(missing, device, progress)
    _prepared.update((device, rows) for rows in missing)
    log.info("skuda: %s", found)
    for sku, reason in found.failed:
        log.warning("skuda: %s cannot be prepared: %s", sku, reason)
    return found
