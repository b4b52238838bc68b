"""The base of the CUDA backends, which differ in compiler and launch API. It turns a kernel into a loaded launch."""

from __future__ import annotations

import hashlib
import threading
from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from struct import Struct
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar, cast

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.compile.bundle import Bundle
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.cubin import Kernel, read_kernels
from skuda.dispatch.compile.provider import CubinProvider, agreeing
from skuda.dispatch.cuda.arrays import current_streams
from skuda.dispatch.cuda.driver import FORK_REMEDY, NOT_INITIALIZED, driver
from skuda.dispatch.cuda.launcher import Engine, NoSteps
from skuda.dispatch.cuda.packing import Packed, formats_of, packing
from skuda.dispatch.cuda.runner import CudaRunner
from skuda.dispatch.telemetry import KERNELS, Loaded
from skuda.kernels.launch import Choice, Launch, Step
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import BundleError, DriverError, NotPrepared
from skuda.registry.sku import KernelSku
from skuda.registry.source import resolve

_DRIVER_REMEDY = "install the NVIDIA driver: https://www.nvidia.com/drivers (in a container: run it with --gpus all)"

Module = TypeVar("Module")
_modules: dict[tuple[str, bytes, int], object] = {}
_loading = threading.Lock()


class _Kernel(NamedTuple, Generic[Module]):
    """A loaded kernel, which plans of all sizes share."""

    sku: KernelSku
    module: Module
    entries: dict[str, Kernel]  # the properties of every entry point
    notes: tuple[str, ...]  # notes on the launch and the origin of the cubin
    packings: dict[tuple[str, tuple[str, ...]], Struct]
    """How steps pack their parameters, by entry point and formats. All of them agree with the compiled kernel."""
    built: bool  # whether it was compiled here

    def packing(self, step: Step) -> Struct:
        """Return how a step packs its parameters. Raise `CompileError` if the compiled kernel takes others."""
        form = step.entry, formats_of(step)
        whole = self.packings.get(form)
        if whole is None:
            (compiled,) = agreeing(self.sku, (step,), self.entries)
            whole = self.packings[form] = packing(compiled)
        return whole


class CudaBackend(CubinProvider, Backend, Generic[Module]):
    """A way to compile and launch CUDA source. The parameters are those of `CubinProvider`."""

    def __init__(self, cache: CubinCache | None = None, bundles: tuple[Bundle, ...] | None = None) -> None:
        super().__init__(cache, bundles)
        self._kernels: dict[tuple[KernelSku, tuple[str, ...], Device], _Kernel[Module]] = {}

    @abstractmethod
    def trouble(self) -> BackendStatus | None:
        """Return why the backend's own packages do not work here, or None."""

    @abstractmethod
    def versions(self) -> str:
        """Return the names and versions of its packages."""

    @abstractmethod
    def load(self, cubin: bytes, ordinal: int) -> Module:
        """Load a cubin into a device's primary context. Called once per cubin and device."""

    @abstractmethod
    def engine(self, module: Module, packed: Packed, ordinal: int) -> Engine:
        """Return the steps of a launch, ready to be enqueued."""

    def status(self) -> BackendStatus:
        """Return whether the backend works here, without creating a context."""
        trouble = self.trouble()
        if trouble is not None:
            return trouble
        try:
            found = driver()
            count, version = found.device_count, found.version
        except DriverError as error:
            remedy = FORK_REMEDY if error.code == NOT_INITIALIZED else _DRIVER_REMEDY
            return BackendStatus(available=False, detail=str(error), remedy=remedy)
        if count == 0:
            return BackendStatus(available=False, detail="the driver sees no GPU", remedy="set CUDA_VISIBLE_DEVICES")
        try:
            shipped = [str(bundle.path) for bundle in self.bundles if bundle.serves(self.spec.name)]
        except BundleError as error:
            return BackendStatus(available=False, detail=str(error), remedy="replace it, or unset SKUDA_BUNDLE")
        detail = f"{self.versions()}, driver for CUDA {version}"
        if self.compiler() is not None:
            return BackendStatus(
                available=True, detail=detail + (f"; first from {', '.join(shipped)}" if shipped else "")
            )
        shipped += ["the cache"] if self.cache.has_any(self.spec.name) else []
        if shipped:
            message = f"{detail}; no compiler: only kernels from {' and '.join(shipped)} run"
            return BackendStatus(available=True, detail=message)
        remedy = f"{self.compilers}, or set SKUDA_BUNDLE to a file of `skuda bundle` made for {self.spec.name}"
        return BackendStatus(available=False, detail=f"{detail}; no compiler", remedy=remedy)

    def devices(self) -> tuple[Device, ...]:
        """Return the CUDA devices in the driver's order."""
        return driver().devices()

    def prepare(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:
        """Compile or find the kernel, load it, check its parameters, allocate scratch.

        Raise `BundleError` if a bundle that the settings name cannot be used; `CompileError` if it does not compile, or
        is neither bundled nor cached and there is no compiler; `NotPrepared` while a stream is being captured.
        """
        found, ordinal = driver(), device.ordinal or 0
        context = found.primary_context(ordinal)
        launch = self.launch_of(sku, problem, device, choice)
        if not launch.steps:
            return CudaRunner(problem, launch, NoSteps(), found, (ordinal, context), self.notes())
        with found.using(context):
            kernel = self._kernel(sku, launch, device)
            packed = Packed(launch.steps, tuple(map(kernel.packing, launch.steps)), sku.op)
            engine = self.engine(kernel.module, packed, ordinal)
            return CudaRunner(problem, launch, engine, found, (ordinal, context), kernel.notes)

    def kernel_of(
        self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = ""
    ) -> tuple[tuple[str, ...], int]:
        """Return the compiler flags of a launch, and how many rows have them certainly."""
        launch = self.launch_of(sku, problem, device, choice)
        return launch.flags, launch.alike

    def make_ready(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> bool | None:
        """Compile or find a kernel, and load it with all of its functions. Errors as `prepare`.

        Return whether it was compiled; None if it was loaded already.
        """
        found, ordinal = driver(), device.ordinal or 0
        launch = self.launch_of(sku, problem, device, choice)
        key = (sku, launch.flags, device)
        with found.using(found.primary_context(ordinal)):
            known = key in self._kernels
            kernel = self._kernel(sku, launch, device)
            # Kernels have names of C. Functions of C++ that were not inlined may be listed, too.
            entries = [entry for entry in kernel.entries if not entry.startswith("_Z")]
            steps = tuple(Step(entry, (1, 1, 1), (1, 1, 1), ()) for entry in entries)
            self.engine(kernel.module, Packed(steps, tuple(map(packing, steps)), sku.op), ordinal)
        return None if known else kernel.built

    def _kernel(self, sku: KernelSku, launch: Launch, device: Device) -> _Kernel[Module]:
        """Return the loaded kernel of a launch. It is looked up once, so a later change of its source has no effect.

        A plan for another size therefore reads neither the source nor the cache.
        """
        key = (sku, launch.flags, device)
        found = self._kernels.get(key)
        if found is None:
            start, ordinal = perf_counter(), device.ordinal or 0
            _refuse_capture(sku, ordinal)
            cubin = self.shipped(sku, launch, device) or self.cubin(sku, launch, device)
            module, notes = self._loaded(sku, cubin.cubin, ordinal), (*self.notes(), *cubin.notes)
            made = _Kernel(sku, module, read_kernels(cubin.cubin), notes, {}, cubin.built)
            found = self._kernels.setdefault(key, made)
            if found is made:
                KERNELS.add(Loaded(sku.id, cubin.built, perf_counter() - start))
        return found

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[Choice, ...]:
        """Return the configurations that the kernel's launch rule ranks."""
        return self.launch_of(sku, problem, device).choices if sku.launch is not None else ()

    def describe_choice(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> tuple[str, ...]:
        """Return what the kernel's launch rule chose."""
        if sku.launch is None:
            return ()
        try:
            return self.launch_of(sku, problem, device, choice).explanation()
        except Exception as error:  # noqa: BLE001  a plug-in's launch rule can raise anything; an explanation must not fail
            return (f"its launch rule fails: {type(error).__name__}: {error}",)

    @staticmethod
    def launch_of(sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Launch:
        """Return a SKU's launch for a problem, without steps that do nothing."""
        rule = _rule(sku.launch or "")
        launch: Launch = rule(problem, device, choice) if choice else rule(problem, device)
        steps = [step for step in launch.steps if 0 not in step.grid]
        return launch if len(steps) == len(launch.steps) else launch._replace(steps=tuple(steps))

    def _loaded(self, sku: KernelSku, cubin: bytes, ordinal: int) -> Module:
        # Modules are never unloaded: a captured graph may hold a kernel, and there are few cubins.
        key = (self.spec.name, hashlib.sha256(cubin).digest(), ordinal)
        with _loading:
            if key not in _modules:
                try:
                    _modules[key] = self.load(cubin, ordinal)
                except Exception as error:  # an error of PyCUDA or cuda-bindings
                    raise DriverError(f"loading {sku.id}", str(error)) from error
            return cast("Module", _modules[key])


@cache
def _rule(launch: str) -> Callable[..., Launch]:
    module, _, name = launch.partition(":")
    found: Callable[..., Launch] = resolve(module, name)
    return found


def _refuse_capture(sku: KernelSku, ordinal: int) -> None:
    # Loading a module breaks a capture.
    if any(driver().capture_of(stream) for stream in (0, *current_streams(ordinal))):
        raise NotPrepared(f"{sku.id} cannot be prepared while a stream is being captured: select the plan before")
