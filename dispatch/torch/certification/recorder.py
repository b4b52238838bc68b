"""`Recorder`: keeps the rows of a model's layers and ops by token, whatever batch and order they came in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Token = tuple[int, int]
"""The number of a prompt, and a position in it."""


class Site(NamedTuple):
    """A place in a model.

    Attributes
    ----------
    layer : str
        Name of the module.
    op : str
        Name of an op of skuda in it, or nothing for its result.
    number : int
        Which call of that op.
    output : int
        Which output.
    """

    layer: str
    op: str = ""
    number: int = 0
    output: int = 0

    def __str__(self) -> str:
        if not self.op:
            return self.layer
        return f"{self.layer}, call {self.number + 1} of {self.op}, output {self.output + 1}"


class Recorder(TorchDispatchMode):
    """Sees the results of a language model's layers, and of the ops of skuda in them.

    Attributes
    ----------
    rows : dict
        For each `Site`, in the order of execution, the row of each token, on the CPU.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rows: dict[Site, dict[Token, Tensor]] = {}
        base = model.base_model
        self._names = {name: module for name, module in model.named_modules() if self._is_layer(base, module)}
        self._tokens: Sequence[Sequence[Token | None]] = ()
        self._layer = ""
        self._calls: Counter[tuple[str, str]] = Counter()

    @staticmethod
    def _is_layer(base: Any, module: nn.Module) -> bool:
        return module in base.layers or module in (base.embed_tokens, base.norm)

    @contextmanager
    def call(self, tokens: Sequence[Sequence[Token | None]]) -> Iterator[None]:
        """Record in this block a call whose rows are these tokens; None is padding, or of another sequence."""
        self._tokens, self._calls = tokens, Counter()
        handles = []
        for name, module in self._names.items():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "_layer", name)))
            handles.append(module.register_forward_hook(lambda _, __, found, name=name: self._keep(Site(name), found)))
        self._layer = "before the layers"
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and keep the rows of its results."""
        found = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "skuda":
            name = func._schema.name.removeprefix("skuda::")  # noqa: SLF001  it has no public name
            key = (self._layer, name)
            outputs = found if isinstance(found, (tuple, list)) else [found]
            for number, each in enumerate(outputs):
                self._keep(Site(self._layer, name, self._calls[key], number), each)
            self._calls[key] += 1
        return found

    def _keep(self, site: Site, found: Any) -> None:
        found = found[0] if isinstance(found, tuple) else found
        count = (len(self._tokens), len(self._tokens[0]))
        if not isinstance(found, Tensor) or found.dim() == 0:
            return
        if tuple(found.shape[:2]) != count and found.shape[0] != count[0] * count[1]:
            return
        rows = found.detach().reshape(count[0] * count[1], -1)
        own = self.rows.setdefault(site, {})
        with torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001  copies are not the model's
            tokens = [token for row in self._tokens for token in row]
            own |= {token: row for token, row in zip(tokens, rows.cpu().clone(), strict=True) if token is not None}
