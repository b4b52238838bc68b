"""The ``pycuda`` backend: nvcc, modules and launches through PyCUDA.

PyCUDA launches on its own streams and on the default stream. On a stream of another library, cuda-bindings launches the
same cubin if it is installed, and the plan's notes say so; otherwise the stream is refused. cuda-bindings also launches
a step that may overlap the previous one, which PyCUDA does not support; without cuda-bindings the step waits.

Only loading a module needs a pushed context: PyCUDA's launch calls the driver directly.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.compile.compilers import Nvcc, find_nvcc
from skuda.dispatch.cuda.launcher import Bound, Engine, Send
from skuda.dispatch.cuda.modules import BindingsEngine, BindingsModule, bindings_trouble, bindings_version, load_module
from skuda.dispatch.cuda.packing import Packed
from skuda.dispatch.cuda.pycuda_context import keep_forever, pushed
from skuda.dispatch.cuda.runner import must_opt_in
from skuda.dispatch.system.packages import installed
from skuda.kernels.launch import Dim3, Step
from skuda.registry.backend import BUILT_IN
from skuda.registry.cached import cached_property
from skuda.registry.errors import InvalidProblem

_setting = threading.Lock()
_REMEDY = "with nvcc on PATH: pip install 'skuda[pycuda]'"


class _Loaded(NamedTuple):
    """One cubin, loaded by PyCUDA and, for foreign streams, by cuda-bindings if installed.

    `stream` is PyCUDA's class of streams. `functions` keeps PyCUDA's functions by name with the shared memory that
    their blocks may have, for plans of other sizes.
    """

    module: Any
    stream: type
    foreign: BindingsModule | None
    functions: dict[str, tuple[Any, int]]

    def knows(self, step: Step) -> bool:
        """Whether `function` only looks it up."""
        known = self.functions.get(step.entry)
        return known is not None and (not must_opt_in(step) or step.shared <= known[1])

    def function(self, step: Step) -> Any:
        """Return the function of a step; unless it is known, PyCUDA's context is pushed."""
        known = self.functions.get(step.entry)
        function, opted_in = (self.module.get_function(step.entry), 0) if known is None else known
        # All launches of a function share the limit, so it only rises.
        if must_opt_in(step) and step.shared > opted_in:
            import pycuda.driver

            attribute = pycuda.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
            function.set_attribute(attribute, step.shared)
            opted_in = step.shared
        if known is None or opted_in != known[1]:
            self.functions[step.entry] = function, opted_in
        return function


class PycudaBackend(CudaBackend[_Loaded]):
    """CUDA source through nvcc and PyCUDA."""

    spec = next(spec for spec in BUILT_IN if spec.name == "pycuda")
    compilers = "put nvcc on PATH (CUDA toolkit)"

    def trouble(self) -> BackendStatus | None:
        """Return what is missing, or None."""
        if not installed("pycuda"):
            return BackendStatus(available=False, detail="pycuda is not installed", remedy=_REMEDY)
        try:
            importlib.import_module("pycuda.driver")
        except ImportError as error:
            remedy = "install the NVIDIA driver, or rebuild PyCUDA for this machine"
            return BackendStatus(available=False, detail=f"pycuda cannot be imported: {error}", remedy=remedy)
        return None

    def compiler(self) -> Nvcc | None:
        """Return nvcc, or None if it is not on PATH."""
        return find_nvcc()

    def versions(self) -> str:
        """Return the versions of PyCUDA, nvcc and the package that launches on foreign streams."""
        import pycuda

        nvcc = find_nvcc()
        return f"PyCUDA {pycuda.VERSION_TEXT}, {f'nvcc {nvcc.version}' if nvcc else 'no nvcc'}; {self.notes()[0]}"

    def notes(self) -> tuple[str, ...]:
        """Return remarks on streams of other libraries."""
        trouble = bindings_trouble()
        if trouble is None:
            return (f"streams of other libraries: the same cubin is launched by cuda_core ({bindings_version()})",)
        return (f"streams of other libraries are refused: {trouble}",)

    def load(self, cubin: bytes, ordinal: int) -> _Loaded:
        """Load a cubin with PyCUDA, and with cuda-bindings if installed."""
        import pycuda.driver

        with pushed(ordinal):
            module = keep_forever(pycuda.driver.module_from_buffer(cubin))
            foreign = load_module(cubin) if bindings_trouble() is None else None
            return _Loaded(module, pycuda.driver.Stream, foreign, {})

    def engine(self, module: _Loaded, packed: Packed, ordinal: int) -> Engine:
        """Return the steps of a launch."""
        foreign = None if module.foreign is None else BindingsEngine(module.foreign, packed)
        # PyCUDA cannot let a step overlap.
        if foreign is not None and all(step.overlaps for step in packed.steps):
            return foreign
        return PycudaEngine(module, foreign, packed, ordinal)


class _Step(NamedTuple):
    """The arguments of PyCUDA's launch other than parameters and stream."""

    start: Callable[..., None]
    grid: Dim3
    block: Dim3
    shared: int


class PycudaEngine:
    """Launches through PyCUDA's pre-packed path.

    The engine `foreign` launches the steps that PyCUDA cannot: overlapping steps, and steps on foreign streams.
    """

    def __init__(self, loaded: _Loaded, foreign: BindingsEngine | None, packed: Packed, ordinal: int) -> None:
        self._packed, self._own, self._foreign = packed, loaded.stream, foreign
        ours = {at: step for at, step in enumerate(packed.steps) if foreign is None or not step.overlaps}
        self._steps: dict[int, _Step] = {}
        with nullcontext() if all(map(loaded.knows, ours.values())) else pushed(ordinal), _setting:
            for at, step in ours.items():
                # Neither the number nor the types of parameters are checked beyond this point; the binder did both.
                start = loaded.function(step)._launch_kernel  # noqa: SLF001  PyCUDA's own prepared calls end here
                self._steps[at] = _Step(start, step.grid, step.block, step.shared)

    @cached_property
    def sends(self) -> list[Send]:
        """The function that enqueues each step; the first run makes them."""
        return [self._send(at) for at in range(len(self._packed.steps))]

    def _send(self, step: int) -> Send:
        if self._foreign is not None and step not in self._steps:
            return self._foreign.sends[step]
        (start, grid, block, shared), pack = self._steps[step], self._packed.packers[step].pack
        own, foreign = self._own, self._foreign.sends[step] if self._foreign is not None else self._refuse

        def send(parameters: tuple[Any, ...], handle: int, stream: object) -> None:
            if handle == 0:
                start(grid, block, pack(*parameters), shared, None)
            elif isinstance(stream, own):
                start(grid, block, pack(*parameters), shared, stream)
            else:
                foreign(parameters, handle, stream)

        return send

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Return a function that enqueues one step with these parameters."""
        if self._foreign is not None and step not in self._steps:
            return self._foreign.bound(step, parameters)
        start, grid, block, shared = self._steps[step]
        packed, own = self._packed.packers[step].pack(*parameters), self._own
        other = partial(self._refuse, parameters)
        foreign: Bound = self._foreign.bound(step, parameters) if self._foreign is not None else other

        def send(handle: int, stream: object) -> None:
            if handle == 0:
                start(grid, block, packed, shared, None)
            elif isinstance(stream, own):
                start(grid, block, packed, shared, stream)
            else:
                foreign(handle, stream)

        return send

    def _refuse(self, parameters: tuple[Any, ...], handle: int, stream: object) -> None:  # noqa: ARG002  a Send
        rule = "be the default stream or PyCUDA's own: PyCUDA cannot launch on others; pip install 'skuda[cuda13]'"
        raise InvalidProblem(self._packed.op, "stream", f"a stream of another library ({handle:#x})", rule)
