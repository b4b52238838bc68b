"""NVTX ranges round launches, for Nsight Systems; imported only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skuda.dispatch.backends.base import Runner
from skuda.registry.errors import MissingDependency
from skuda.registry.sku import KernelSku

_DOMAIN = "skuda"


class Ranges:
    """Opens and closes ranges of the domain ``skuda``.

    Raises
    ------
    MissingDependency
        Where the package ``nvtx`` is absent.
    """

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise MissingDependency("nvtx", "pip install 'skuda[nvtx]'") from error
        self._domain = nvtx.get_domain(_DOMAIN)

    def round(self, runner: Runner, sku: KernelSku) -> Runner:
        """Return a runner whose every launch is a range named by op and SKU."""
        return _InRange(runner, self._domain, self._domain.get_event_attributes(message=f"{sku.op}: {sku.id}"))


class _InRange:
    """A runner inside a range.

    Parameters
    ----------
    runner : Runner
        What runs.
    domain, attributes
        As the package ``nvtx`` has them.
    """

    def __init__(self, runner: Runner, domain: Any, attributes: Any) -> None:
        self.notes = runner.notes
        self._runner = runner
        self._push, self._pop, self._attributes = domain.push_range, domain.pop_range, attributes

    def check(self, arrays: Mapping[str, object]) -> None:
        """Check without running, and without a range."""
        self._runner.check(arrays)

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Run inside the range."""
        self._push(self._attributes)
        try:
            return self._runner.run(arrays, stream)
        finally:
            self._pop()

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Return a launch inside the range."""
        launch, push, pop, attributes = self._runner.bind(arrays, stream), self._push, self._pop, self._attributes

        def ranged() -> object:
            push(attributes)
            try:
                return launch()
            finally:
                pop()

        return ranged
