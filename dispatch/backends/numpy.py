"""The ``numpy`` backend: the reference of every op, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.host.binding import Binding
from skuda.dispatch.host.floating import require_exact_mode
from skuda.dispatch.host.launcher import host_launch, host_launch_at_positions
from skuda.dispatch.launch_cache import FirstRun, PositionalCall
from skuda.registry.backend import BUILT_IN
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import HOST, Device
from skuda.registry.errors import InvalidProblem
from skuda.registry.sku import KernelSku
from skuda.registry.source import resolve
from skuda.registry.text import shown


class HostRunner:
    """Runs a Python kernel over host arrays. ``kernel(problem, **arrays)`` writes the outputs."""

    notes: tuple[str, ...] = ()

    def __init__(self, problem: Descriptor, kernel: Callable[..., None]) -> None:
        self._problem = problem
        self._arguments = problem.arguments()
        self._kernel = kernel

    def check(self, arrays: Mapping[str, object]) -> None:
        """Raise `InvalidProblem` for arguments that `run` would refuse."""
        Binding(self._problem, self._arguments, arrays)

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Run and return the op's result.

        Raises
        ------
        InvalidProblem
            For a missing, unknown or unsuitable argument, or a stream, since a CPU has none.
        FloatModeError, OutOfMemory
            As `Binding`.
        """
        self._refuse_stream(stream)
        binding = Binding(self._problem, self._arguments, arrays)
        self._kernel(self._problem, **binding.values)
        return binding.result()

    def first_run(
        self,
        arrays: Mapping[str, object],
        stream: object,
        failed: Callable[[BaseException], None],
        positions: PositionalCall | None,
    ) -> FirstRun:
        """Run, and return a launch for calls like this one, which passes its errors to `failed` before it raises them.

        Raises
        ------
        InvalidProblem, FloatModeError, OutOfMemory
            As `run`.
        """
        result = self.run(arrays, stream)
        if type(self).run is not HostRunner.run:  # a launch would not do what a derived class does
            return FirstRun(result, None, placed=True)
        made = host_launch if positions is None else partial(host_launch_at_positions, positions)
        return FirstRun(result, made(self._problem, self._kernel, arrays, failed), placed=True)

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check the arguments once. Return a callable that only calls the kernel.

        Raises
        ------
        InvalidProblem
            As `run`.
        """
        self._refuse_stream(stream)
        binding = Binding(self._problem, self._arguments, arrays)
        result = binding.result()

        def launch() -> object:
            require_exact_mode()
            self._kernel(self._problem, **binding.values)
            return result

        return launch

    def _refuse_stream(self, stream: object) -> None:
        if stream is not None:
            raise InvalidProblem(self._problem.op_name(), "stream", shown(stream), "be None: this plan runs on the CPU")


class NumpyBackend(Backend):
    """Python kernels over NumPy arrays."""

    spec = next(spec for spec in BUILT_IN if spec.name == "numpy")

    def status(self) -> BackendStatus:
        """Return NumPy's version. This backend always works."""
        return BackendStatus(available=True, detail=f"numpy {np.__version__}")

    def devices(self) -> tuple[Device, ...]:
        """Return the CPU."""
        return (HOST,)

    def prepare(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:  # noqa: ARG002  one CPU, one way
        """Look up the kernel's function."""
        return HostRunner(problem, resolve(sku.source, sku.entry_point))
