"""The ``pycuda`` backend: nvcc, modules and launches through PyCUDA.

PyCUDA launches on its own streams and on the default one. On a stream of another library the same cubin is launched by
cuda-bindings where they are installed, and the plan's notes say so; else the stream is refused. They launch a step too
that may overlap the one before it, which PyCUDA cannot ask for; without them it waits.

No context is left pushed: PyCUDA aborts the process where one is when a thread ends or the interpreter exits. Its
launch asks the driver alone, so a pushed context is needed only to load a module.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from skuda.dispatch.backends.base import BackendStatus
from skuda.dispatch.backends.cuda import CudaBackend, must_opt_in
from skuda.dispatch.backends.cuda_core import BindingsEngine, bindings_trouble, bindings_version, load_module
from skuda.dispatch.compiling import Nvcc, find_nvcc
from skuda.dispatch.gpu_call import packer
from skuda.dispatch.gpu_run import Bound, Send
from skuda.kernels.launch import Dim3, Launch
from skuda.registry.backend import BUILT_IN
from skuda.registry.errors import InvalidProblem

_REMEDY = "with nvcc on PATH: pip install 'skuda[pycuda]'"


class _Loaded(NamedTuple):
    """One cubin in both worlds: PyCUDA's, and cuda-bindings' for foreign streams where there are any."""

    module: Any
    foreign: Any


class PycudaBackend(CudaBackend[_Loaded]):
    """CUDA source through nvcc and PyCUDA."""

    spec = next(spec for spec in BUILT_IN if spec.name == "pycuda")
    compilers = "put nvcc on PATH (CUDA toolkit)"

    def trouble(self) -> BackendStatus | None:
        """Say what is missing, or None."""
        if importlib.util.find_spec("pycuda") is None:
            return BackendStatus(available=False, detail="pycuda is not installed", remedy=_REMEDY)
        try:
            importlib.import_module("pycuda.driver")
        except ImportError as error:
            remedy = "install the NVIDIA driver, or rebuild PyCUDA for this machine"
            return BackendStatus(available=False, detail=f"pycuda cannot be imported: {error}", remedy=remedy)
        return None

    def compiler(self) -> Nvcc | None:
        """Return nvcc, or None where it is not on PATH."""
        return find_nvcc()

    def versions(self) -> str:
        """Name PyCUDA, nvcc and what serves foreign streams."""
        import pycuda

        nvcc = find_nvcc()
        return f"PyCUDA {pycuda.VERSION_TEXT}, {f'nvcc {nvcc.version}' if nvcc else 'no nvcc'}; {self.notes()[0]}"

    def notes(self) -> tuple[str, ...]:
        """Say what happens on streams of other libraries."""
        trouble = bindings_trouble()
        if trouble is None:
            return (f"streams of other libraries: the same cubin is launched by cuda_core ({bindings_version()})",)
        return (f"streams of other libraries are refused: {trouble}",)

    def load(self, cubin: bytes, ordinal: int) -> _Loaded:
        """Load a cubin with PyCUDA, and with cuda-bindings where they are installed."""
        import pycuda.driver

        with pushed(ordinal):
            module = _forever(pycuda.driver.module_from_buffer(cubin))
            return _Loaded(module, load_module(cubin) if bindings_trouble() is None else None)

    def engine(self, module: _Loaded, launch: Launch, op: str, ordinal: int) -> PycudaEngine:
        """Return the steps of a launch."""
        return PycudaEngine(module, launch, op, ordinal)


class _Step(NamedTuple):
    """What PyCUDA's launch takes but for parameters and stream."""

    start: Callable[..., None]
    grid: Dim3
    block: Dim3
    pack: Callable[..., bytes]
    shared: int
    overlaps: bool


class PycudaEngine:
    """Launches through PyCUDA's pre-packed path.

    Parameters
    ----------
    loaded : _Loaded
        The loaded cubin.
    launch : Launch
        What to launch.
    op : str
        For errors.
    ordinal : int
        The device.
    """

    def __init__(self, loaded: _Loaded, launch: Launch, op: str, ordinal: int) -> None:
        import pycuda.driver

        self._op, self._own = op, pycuda.driver.Stream
        self._steps: list[_Step] = []
        attribute = pycuda.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        with pushed(ordinal):
            self._foreign = BindingsEngine(loaded.foreign, launch, op) if loaded.foreign is not None else None
            for step in launch.steps:
                function = loaded.module.get_function(step.entry)
                if must_opt_in(step):
                    function.set_attribute(attribute, step.shared)
                # Neither the number nor the types of parameters are checked beyond this point; the binder did both.
                start = function._launch_kernel  # noqa: SLF001  PyCUDA's own prepared calls end here
                pack = packer(step, op).pack
                self._steps.append(_Step(start, step.grid, step.block, pack, step.shared, step.overlaps))
        self.sends = [self._send(step) for step in range(len(self._steps))]

    def _send(self, step: int) -> Send:
        start, grid, block, pack, shared, overlaps = self._steps[step]
        if overlaps and self._foreign is not None:  # PyCUDA cannot ask for it
            return self._foreign.sends[step]
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
        """Return what enqueues one step with these parameters."""
        start, grid, block, pack, shared, overlaps = self._steps[step]
        if overlaps and self._foreign is not None:
            return self._foreign.bound(step, parameters)
        packed, own = pack(*parameters), self._own
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
        raise InvalidProblem(self._op, "stream", f"a stream of another library ({handle:#x})", rule)


_contexts: dict[int, Any] = {}
_retaining = threading.Lock()


def _forever(value: Any) -> Any:
    """Keep an object beyond the interpreter's end.

    PyCUDA's destructors push contexts; they fail in a thread other than the one that retained them, and at exit the
    driver may be gone. The driver cleans up after a process by itself.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


def _context(ordinal: int) -> Any:
    import pycuda.driver

    with _retaining:
        if ordinal not in _contexts:
            pycuda.driver.init()
            _contexts[ordinal] = _forever(pycuda.driver.Device(ordinal).retain_primary_context())
        return _contexts[ordinal]


@contextlib.contextmanager
def pushed(ordinal: int) -> Iterator[None]:
    """Push a device's primary context on PyCUDA's stack for a while."""
    context = _context(ordinal)
    context.push()
    try:
        yield
    finally:
        context.pop()
