"""What the two CUDA backends share: from a SKU to a loaded launch. They differ in who compiles and who launches."""

from __future__ import annotations

import hashlib
import math
import threading
from abc import abstractmethod
from dataclasses import replace
from time import perf_counter
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar, cast

from skuda.dispatch.backends.base import Backend, BackendStatus, Runner
from skuda.dispatch.bundle import Bundle, open_bundle
from skuda.dispatch.compiling import Compiler, Job
from skuda.dispatch.cubin import read_kernels
from skuda.dispatch.cubin_cache import CubinCache, Found, Key
from skuda.dispatch.device import Device
from skuda.dispatch.driver import driver
from skuda.dispatch.gpu_arrays import current_streams
from skuda.dispatch.gpu_call import parameter_layout
from skuda.dispatch.gpu_run import Bound, CudaRunner, Engine
from skuda.dispatch.settings import bundle_names
from skuda.dispatch.sources import Source, read_source
from skuda.dispatch.telemetry import logger_of
from skuda.kernels.launch import Choice, Launch, Step
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import BundleError, CompileError, DriverError, NotPrepared
from skuda.registry.sku import KernelSku
from skuda.registry.source import resolve

_DRIVER_REMEDY = "install the NVIDIA driver: https://www.nvidia.com/drivers (in a container: run it with --gpus all)"
_MOST_SHARED = 48 << 10
"""Bytes of shared memory that a block gets without asking."""

Module = TypeVar("Module")


class Sought(NamedTuple):
    """A cubin that is looked for.

    Attributes
    ----------
    key : Key
        What it is found by.
    source : Source
        What it is compiled from.
    compiler : Compiler or None
        Who would compile it here.
    identity : str or None
        That of the compiler.
    """

    key: Key
    source: Source
    compiler: Compiler | None
    identity: str | None


class CudaBackend(Backend, Generic[Module]):
    """A way to compile and launch CUDA source.

    Parameters
    ----------
    cache : CubinCache or None
        None for the one that the settings name.
    bundles : tuple of Bundle or None
        What is looked at before the cache; None for those that the settings name.

    Attributes
    ----------
    compilers : str
        How to get a cubin, for messages.
    """

    compilers: ClassVar[str]

    def __init__(self, cache: CubinCache | None = None, bundles: tuple[Bundle, ...] | None = None) -> None:
        self._cache, self._bundles = cache, bundles

    @abstractmethod
    def trouble(self) -> BackendStatus | None:
        """Say why the backend's own packages do not work here, or None."""

    @abstractmethod
    def compiler(self) -> Compiler | None:
        """Return the compiler, or None where there is none here."""

    @abstractmethod
    def versions(self) -> str:
        """Name what works here, with versions."""

    @abstractmethod
    def load(self, cubin: bytes, ordinal: int) -> Module:
        """Load a cubin into a device's primary context. Called once per cubin and device."""

    @abstractmethod
    def engine(self, module: Module, launch: Launch, op: str, ordinal: int) -> Engine:
        """Return the steps of a launch, ready to be enqueued."""

    @property
    def cache(self) -> CubinCache:
        """The cubin cache; its folder is asked for when it is first needed."""
        if self._cache is None:
            self._cache = CubinCache()
        return self._cache

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles that are looked at before the cache, in this order; opened when they are first needed.

        Raises
        ------
        BundleError
            Where one that the settings name is not to be used.
        """
        if self._bundles is None:
            self._bundles = tuple(open_bundle(name) for name in bundle_names())
        return self._bundles

    def status(self) -> BackendStatus:
        """Say whether the backend works here; makes no context."""
        trouble = self.trouble()
        if trouble is not None:
            return trouble
        try:
            found = driver()
            count, version = found.device_count, found.version
        except DriverError as error:
            return BackendStatus(available=False, detail=str(error), remedy=_DRIVER_REMEDY)
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
            told = f"{detail}; no compiler: only kernels from {' and '.join(shipped)} run"
            return BackendStatus(available=True, detail=told)
        remedy = f"{self.compilers}, or set SKUDA_BUNDLE to a file of `skuda bundle` made for {self.spec.name}"
        return BackendStatus(available=False, detail=f"{detail}; no compiler", remedy=remedy)

    def devices(self) -> tuple[Device, ...]:
        """Return the CUDA devices in the driver's order."""
        return driver().devices()

    def prepare(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Runner:
        """Compile or find the kernel, load it, check its parameters, allocate scratch.

        Raises
        ------
        BundleError
            Where a bundle that the settings name is not to be used.
        CompileError
            Where it does not compile, or is neither bundled nor cached and there is no compiler.
        NotPrepared
            While a stream is being captured.
        """
        found, ordinal = driver(), device.ordinal or 0
        context = _context(ordinal)
        launch = self.launch_of(sku, problem, device, choice)
        if not launch.steps:
            return CudaRunner(problem, launch, _Nothing(), found, (ordinal, context), self.notes())
        with found.using(context):
            _refuse_capture(sku, ordinal)
            cubin = self.shipped(sku, launch, device) or self.cubin(sku, launch, device)
            launch = replace(launch, steps=placed(sku, launch.steps, cubin.cubin))
            module = self._loaded(sku, cubin.cubin, ordinal)
            engine = self.engine(module, launch, problem.op_name(), ordinal)
            notes = (*launch.told(), *self.notes(), *cubin.notes)
            return CudaRunner(problem, launch, engine, found, (ordinal, context), notes)

    def choices(self, sku: KernelSku, problem: Descriptor, device: Device) -> tuple[Choice, ...]:
        """Return the configurations that the kernel's launch rule ranks."""
        return self.launch_of(sku, problem, device).choices if sku.launch is not None else ()

    def told(self, sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> tuple[str, ...]:
        """Say what the kernel's launch rule chose."""
        if sku.launch is None:
            return ()
        try:
            return self.launch_of(sku, problem, device, choice).told()
        except Exception as error:  # noqa: BLE001  a plug-in's launch rule can fail in any way; an explanation is given still
            return (f"its launch rule fails: {type(error).__name__}: {error}",)

    @staticmethod
    def launch_of(sku: KernelSku, problem: Descriptor, device: Device, choice: str = "") -> Launch:
        """Return what a SKU launches for a problem, without steps that do nothing."""
        module, _, name = (sku.launch or "").partition(":")
        rule = resolve(module, name)
        launch: Launch = rule(problem, device, choice) if choice else rule(problem, device)
        return replace(launch, steps=tuple(step for step in launch.steps if math.prod(step.grid)))

    def sought(self, sku: KernelSku, launch: Launch, device: Device) -> Sought:
        """Return what a SKU's cubin for a device is found by, and who would compile it."""
        source, compiler = read_source(sku.source), self.compiler()
        flags, arch = (*sku.flags, *launch.flags), arch_of(sku, device)
        key = Key(source.digest, flags, arch, f"{sku.entry_point} {sku.launch}", self.spec.name)
        return Sought(key, source, compiler, None if compiler is None else compiler.identity(source))

    def shipped(self, sku: KernelSku, launch: Launch, device: Device) -> Found | None:
        """Return a SKU's cubin for a device from the first bundle that has it, or None.

        A bundle was named to be used, so it is whichever compiler is here, or made it.

        Raises
        ------
        BundleError
            Where a bundle is not to be used, or what it has for the key is not what the key says.
        CompileError
            Where the cubin does not take what the launch gives.
        """
        if not self.bundles:
            return None
        sought = self.sought(sku, launch, device)
        for bundle in self.bundles:
            member = bundle.find(sought.key, sought.identity)
            if member is None:
                continue
            cubin = bundle.read(member)
            try:
                placed(sku, launch.steps, cubin)
            except ValueError as error:
                told = f"what it has for {sku.id} is no cubin ({error}); make it again with `skuda bundle`"
                raise BundleError(bundle.path, told) from error
            log = logger_of("compile")
            if log is not None:
                log.info("%s for %s: found in %s", sku.id, sought.key.arch, bundle.path)
            return Found(cubin, (f"from {bundle.path}, compiled by {member.compiler}",))
        return None

    def cubin(self, sku: KernelSku, launch: Launch, device: Device) -> Found:
        """Return a SKU's cubin for a device, from the cache or the compiler.

        Raises
        ------
        CompileError
            Where it does not compile, is not cached and there is no compiler, or does not take what the launch gives.
        """
        sought = self.sought(sku, launch, device)
        arch, flags = sought.key.arch, sought.key.flags

        log, built = logger_of("compile"), False

        def build() -> bytes:
            nonlocal built
            built = True
            if sought.compiler is None:
                self._refuse_without_compiler(sku, sought.key)
            start = perf_counter()
            cubin = sought.compiler.compile(Job(sku.id, sought.source, flags, arch))
            if log is not None:
                log.info("%s for %s: compiled in %.2f s by %s", sku.id, arch, perf_counter() - start, sought.identity)
            return cubin

        facts = {"sku": sku.id, "source": sku.source, "flags": flags}
        found = self.cache.get(sought.key, sought.identity, build, facts)
        if log is not None and not built:
            log.info("%s for %s: found in %s", sku.id, arch, self.cache.folder)
        placed(sku, launch.steps, found.cubin)
        return found

    def cached(self, sku: KernelSku, launch: Launch, device: Device) -> bool:
        """Whether `cubin` would compile nothing."""
        sought = self.sought(sku, launch, device)
        return self.cache.has(sought.key, sought.identity)

    def _refuse_without_compiler(self, sku: KernelSku, key: Key) -> NoReturn:
        lacking = "".join(f", nor in {bundle.path}: {bundle.lacks(key, sku.source)}" for bundle in self.bundles)
        raise CompileError(
            sku.id,
            f"there is no compiler here and no cubin for {key.arch} in {self.cache.folder}{lacking}; either "
            f"{self.compilers}, or compile it on a machine that has one and copy the result: set SKUDA_BUNDLE to the "
            f"file of `skuda bundle`, or SKUDA_CACHE_DIR to the cache of `skuda compile`",
        )

    def _loaded(self, sku: KernelSku, cubin: bytes, ordinal: int) -> Module:
        # For the life of the process: a captured graph may hold a kernel, and there are few cubins.
        key = (self.spec.name, hashlib.sha256(cubin).digest(), ordinal)
        with _loading:
            if key not in _modules:
                try:
                    _modules[key] = self.load(cubin, ordinal)
                except Exception as error:  # PyCUDA's or cuda-bindings'
                    raise DriverError(f"loading {sku.id}", str(error)) from error
            return cast("Module", _modules[key])


class _Nothing:
    """The engine of a launch without steps: a problem of no elements."""

    sends = ()

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Never called: there is no step."""
        raise IndexError(step, parameters)


_loading = threading.Lock()
_modules: dict[tuple[str, bytes, int], object] = {}
_contexts: dict[int, int] = {}


def _context(ordinal: int) -> int:
    with _loading:
        if ordinal not in _contexts:
            _contexts[ordinal] = driver().primary_context(ordinal)
        return _contexts[ordinal]


def arch_of(sku: KernelSku, device: Device) -> str:
    """Return what to compile for: a plain SKU for the card at hand, one with a suffix for exactly its own."""
    if sku.arch.is_specific or device.compute_capability is None:
        return sku.arch.value
    major, minor = device.compute_capability
    return f"sm_{major}{minor}"


def _refuse_capture(sku: KernelSku, ordinal: int) -> None:
    # Loading a module, let alone compiling, would break the capture.
    if any(driver().capture_of(stream) for stream in (0, *current_streams(ordinal))):
        raise NotPrepared(f"{sku.id} cannot be prepared while a stream is being captured: select the plan before")


def placed(sku: KernelSku, steps: tuple[Step, ...], cubin: bytes) -> tuple[Step, ...]:
    """Compare what the launch gives with what the compiled kernels take; return it with its place in memory.

    Raises
    ------
    CompileError
        Where an entry is missing, or the number or size of its parameters differs.
    """
    kernels = read_kernels(cubin)
    found = []
    for step in steps:
        kernel = kernels.get(step.entry)
        lead = kernel.parameters[0][0] if kernel is not None and kernel.parameters else 0
        found.append(replace(step, lead=lead))
        given = parameter_layout(found[-1])
        if kernel is None and kernels:
            raise CompileError(sku.id, f"there is no kernel {step.entry} in it; it has {', '.join(sorted(kernels))}")
        if kernel is not None and kernel.parameters and kernel.parameters != given:
            told = f"{step.entry} takes parameters of (offset, bytes) {kernel.parameters}, the launch gives {given}"
            raise CompileError(sku.id, told)
    return tuple(found)


def must_opt_in(step: Step) -> bool:
    """Whether a step needs more shared memory than a block gets unasked."""
    return step.shared > _MOST_SHARED
