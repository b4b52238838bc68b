"""Fake device arrays, driver, engine and compiler: what runs on a GPU can be tested without one."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
from cubins import elf
from toy import toy_op, toy_sku

from skuda.dispatch import Backend, BackendStatus, Dispatcher
from skuda.dispatch.backends import cuda
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.cuda.driver import Capture
from skuda.dispatch.cuda.packing import packer
from skuda.dispatch.cuda.runner import CudaRunner
from skuda.dispatch.launch_cache import LaunchCache
from skuda.dispatch.plan import Plan, Ready
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.kernels.launch import Launch
from skuda.registry import CompileError, Registry
from skuda.registry.backend import BUILT_IN
from skuda.registry.device import device_named

CONTEXT = 0xC0
DEVICE = device_named("h200").model_copy(update={"ordinal": 0})


class FakeArray:
    """Memory at an address that nobody reads: the CUDA array interface, and where it is."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any = np.float32,
        address: int = 0x10000,
        strides: tuple[int, ...] | None = None,
        *,
        read_only: bool = False,
        ordinal: int | None = 0,
        stream: int | None = None,
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        strides = None if strides is None else tuple(step * self.dtype.itemsize for step in strides)
        typestr = self.dtype.str if self.dtype.isbuiltin == 1 else f"<V{self.dtype.itemsize}"
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "data": (address, read_only),
            "strides": strides,
            "stream": stream,
        }
        self._place = (1, 0) if ordinal is None else (2, ordinal)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._place


class FakeDriver:
    """Contexts, allocations and captures as the driver has them, per thread where it does."""

    def __init__(self, devices: int = 1) -> None:
        self.device_count = devices
        self.capturing: dict[int, int] = {}
        self.watched: list[int] = []
        self.destroyed: set[int] = set()
        self.watches = True
        self.allocated: dict[int, int] = {}
        self.freed: list[int] = []
        self.cleared: list[int] = []
        self.synchronized: list[int] = []
        self._end = 0x900000
        self._local = threading.local()

    @property
    def stack(self) -> list[int]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def current(self) -> int | None:
        return self.stack[-1] if self.stack else None

    @contextlib.contextmanager
    def using(self, context: int) -> Any:
        self.stack.append(context)
        try:
            yield
        finally:
            self.stack.pop()

    def capture_of(self, stream: int) -> int:
        return self.capturing.get(stream, 0)

    def graph_of(self, stream: int) -> Capture | None:
        number = self.capture_of(stream)
        return Capture(number, -number) if number else None

    def watch(self, graph: int) -> Any:
        self.watched.append(-graph)
        return (lambda: -graph in self.destroyed) if self.watches else None

    @property
    def kept(self) -> dict[int, int]:
        """The sizes of what was not freed, by address."""
        return {address: size for address, size in self.allocated.items() if address not in self.freed}

    def allocate(self, start: Any, size: int) -> None:
        assert self.current() == CONTEXT
        start.value, self._end = self._end, self._end + -(-size // 0x1000) * 0x1000
        self.allocated[start.value] = size

    def clear(self, address: int, size: int) -> None:
        assert self.allocated[address] >= size
        self.cleared.append(address)

    def free(self, address: int) -> None:
        assert self.current() == CONTEXT
        assert address in self.kept
        self.freed.append(address)

    def synchronize(self, stream: int) -> None:
        self.synchronized.append(stream)


class FakeTensor:
    """Memory of `FakeTorch`."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class FakeTorch:
    """What scratch asks torch inside a capture: its current stream, whether it captures, and memory.

    Attributes
    ----------
    current : int
        Its current stream.
    captures : bool
        Whether torch has begun the capture of its current stream.
    alive : set of FakeTensor
        The tensors that somebody holds. Their memory is used again once nobody does.
    sizes : dict
        Bytes of memory that it took from the driver, by address.
    """

    def __init__(self, current: int) -> None:
        self.current, self.captures, self.started = current, True, True
        self.alive: weakref.WeakSet[FakeTensor] = weakref.WeakSet()
        self.sizes: dict[int, int] = {}
        self._free: list[int] = []
        graphs = SimpleNamespace(get_currently_capturing_graph=self._graph)
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.started, device=lambda _: contextlib.nullcontext(), CUDAGraph=graphs
        )
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: self.current)
        self.uint8, self.version = "uint8", SimpleNamespace(cuda=None)

    def _graph(self) -> None:
        if not self.captures:
            raise RuntimeError("no graph")

    def empty(self, size: int, dtype: str, device: str) -> FakeTensor:
        assert (dtype, device) == ("uint8", "cuda:0")
        address = next((each for each in self._free if self.sizes[each] >= size), None)
        if address is None:
            address = 1 << 40 | len(self.sizes) << 30
            self.sizes[address] = size
        else:
            self._free.remove(address)
        made = FakeTensor(address)
        self.alive.add(made)
        weakref.finalize(made, self._free.append, address)
        return made


class FakeEngine:
    """Writes launches down, and refuses them in a wrong context as the driver does.

    Attributes
    ----------
    launches : list of (str, tuple, int)
        Entry, parameters and stream of every launch.
    """

    def __init__(self, launch: Launch, driver: FakeDriver) -> None:
        self._steps, self._driver = launch.steps, driver
        self.launches: list[tuple[str, tuple[Any, ...], int]] = []
        self.trouble: Exception | None = None
        self.sends = [functools.partial(self.launch, step) for step in range(len(launch.steps))]

    def launch(self, step: int, parameters: tuple[Any, ...], handle: int, stream: object) -> None:
        packer(self._steps[step], "fake").pack(*parameters)  # whatever cannot be packed raises here
        if self._driver.current() != CONTEXT:
            raise RuntimeError("invalid context")
        if self.trouble is not None:
            raise self.trouble
        self.launches.append((self._steps[step].entry, parameters, handle))

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Any:
        return lambda handle, stream: self.launch(step, parameters, handle, stream)


class Rig:
    """A runner over a fake driver and engine."""

    def __init__(self, problem: Any, rule: Any, *, devices: int = 1, in_context: bool = True) -> None:
        self.driver = FakeDriver(devices)
        if in_context:
            self.driver.stack.append(CONTEXT)
        launch = rule(problem, DEVICE)
        self.engine = FakeEngine(launch, self.driver)
        self.runner = CudaRunner(problem, launch, self.engine, self.driver, (0, CONTEXT))
        self.launches = LaunchCache()
        ready = Ready(self.runner, self.launches)
        self.plan = Plan.prepared(ready, sku=toy_sku(), problem=problem, device=DEVICE, preference=NO_PREFERENCE)

    def run(self, stream: object = None, **arrays: Any) -> Any:
        return self.plan.run(stream=stream, **arrays)

    @property
    def last(self) -> tuple[Any, ...]:
        return self.engine.launches[-1][1]


def toy_dispatcher(*skus: Any, backends: Any = None, **options: Any) -> Dispatcher:
    """Return a dispatcher of the toy op with these kernels, or its reference, over NumPy alone if nothing is given."""
    registry = Registry([toy_op(*skus)], origin="toy")
    return Dispatcher(registry, backends=[NumpyBackend()] if backends is None else backends, **options)


class FakeCuda(Backend):
    """A backend named pycuda that drives made-up cards, computes on the host, and writes down what it prepared."""

    spec = next(spec for spec in BUILT_IN if spec.name == "pycuda")

    def __init__(self, *cards: str) -> None:
        names = enumerate(cards)
        self.cards = tuple(device_named(name).model_copy(update={"ordinal": ordinal}) for ordinal, name in names)
        self.prepared: list[tuple[str, str]] = []

    def status(self) -> BackendStatus:
        return BackendStatus(available=True, detail="made up")

    def devices(self) -> Any:
        return self.cards

    def prepare(self, sku: Any, problem: Any, device: Any, choice: str = "") -> Any:
        self.prepared.append((sku.variant, choice))
        return HostRunner(problem, lambda problem, *, x, y: np.add(x, x, out=y))


class LoadingCuda(cuda.CudaBackend[int]):
    """A CUDA backend over no driver, which writes down the cubins that it loads."""

    spec = next(spec for spec in BUILT_IN if spec.name == "cuda_core")
    compilers = "none"

    def __init__(self, folder: Any) -> None:
        super().__init__(CubinCache(folder), ())
        self.loaded: list[bytes] = []

    trouble = versions = compiler = lambda self: None

    def status(self) -> BackendStatus:
        return BackendStatus(available=True, detail="made up")

    def devices(self) -> Any:
        return (DEVICE,)

    def load(self, cubin: bytes, ordinal: int) -> int:
        self.loaded.append(cubin)
        return len(self.loaded)

    def engine(self, module: int, packed: Any, ordinal: int) -> Any:
        return cuda.NoSteps()


def loading_cuda(monkeypatch: Any, folder: Any, **how: Any) -> Any:
    """Return a `LoadingCuda` with the cache in a folder and a compiler that compiles nothing, with its `jobs`."""
    driver, made = FakeDriver(), LoadingCuda(folder)
    driver.primary_context = lambda ordinal: CONTEXT  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "current_streams", lambda ordinal: ())
    monkeypatch.setattr(cuda, "_modules", {})
    made.jobs = fake_compiler(monkeypatch, made, cubin=lambda job: elf(f"{job.sku} {job.flags}"), **how)  # type: ignore[attr-defined]
    return made


def fake_compiler(
    monkeypatch: Any, backend: Any, identity: str = "fake 1.0", fails: Any = None, cubin: Any = None
) -> list[Any]:
    """Give a backend a compiler that compiles nothing; return the list of its jobs."""
    jobs: list[Any] = []

    class Compiler:
        def identity(self, source: Any) -> str:
            return identity

        def compile(self, job: Any) -> bytes:
            jobs.append(job)
            if fails is not None and fails(job):
                raise CompileError(job.sku, "no good")
            return cubin(job) if cubin else b"cubin"

    monkeypatch.setattr(backend, "compiler", lambda *_: Compiler())
    return jobs
