"""A lab on the CPU: NumPy arrays, and the host's clock around each call. Caches are left as the last call left them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.op import Case, Op
from skuda.registry.registry import Registry
from skuda.tools.bench_lab import Ceiling, Replay, describe_mismatch
from skuda.tools.placing import differing, first_of
from skuda.tools.trial import answer


class HostLab:
    """NumPy arrays on the CPU. See `skuda.tools.bench_lab.Lab`.

    Parameters
    ----------
    registry : Registry
        Whose ops say how inputs are drawn.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._answered: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None

    def draw(self, problem: Descriptor, seed: int) -> dict[str, Any]:
        """Return fresh random inputs by argument name; what may have any shape is flat."""
        op = self._registry.ops[problem.op_name()]
        inputs = draw(op, Case(problem), np.random.default_rng(seed)).inputs
        flat = {a.name for a in problem.arguments() if a.flat}
        return {name: value.reshape(-1) if name in flat else value for name, value in inputs.items()}

    def outputs(self, problem: Descriptor) -> dict[str, Any]:
        """Return arrays for the outputs."""
        made = [a for a in problem.arguments() if a.role is Role.OUTPUT]
        return {a.name: np.empty(storage_shape(a.shape, a.elements[0]), storage_dtype(a.elements[0])) for a in made}

    def poison(self, arrays: Mapping[str, Any]) -> None:
        """Overwrite every byte: NaN in every float."""
        for array in arrays.values():
            array.view(np.uint8).fill(0xFF)

    def capture(self, call: Callable[[], object], *, careful: bool = True) -> Replay:  # noqa: ARG002  a CPU has nobody to wait for
        """Warm a call up and return it."""
        call()
        return call

    def measure(self, replays: Sequence[Replay]) -> list[float]:
        """Run each in order; return the microseconds of each."""
        times = []
        for replay in replays:
            start = time.perf_counter_ns()
            replay()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return times

    def mismatch(
        self, op: Op, problem: Descriptor, inputs: Mapping[str, Any], outputs: Mapping[str, Any], ulps: int | None
    ) -> str:
        """Compare every element with the reference."""
        # One for all that are compared with it: the reference of a large product takes seconds.
        if self._answered is None or self._answered[0] is not inputs:
            self._answered = (inputs, answer(op, problem, inputs))
        for name, wanted in self._answered[1].items():
            got, want = outputs[name].reshape(-1), wanted.reshape(-1)
            bad = differing(got, want, ulps or 0) & (ulps is not None)
            if bad.any():
                (at,) = first_of(bad)
                return describe_mismatch(name, (at,), got, want, at, int(bad.sum()), bad.size)
        return ""

    def ceilings(self) -> tuple[Ceiling, ...]:
        """Return nothing: what bounds a CPU is not measured."""
        return ()

    def tidy(self) -> None:
        """Give back what the last case was compared with."""
        self._answered = None
