"""Cubins for kernels and their launches, from a bundle, the cache or a compiler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from time import perf_counter
from typing import ClassVar, NamedTuple, NoReturn

from skuda.dispatch.compile.bundle import Bundle, open_bundle
from skuda.dispatch.compile.cache import CubinCache, Found
from skuda.dispatch.compile.compilers import Compiler, Job
from skuda.dispatch.compile.cubin import Kernel, read_kernels
from skuda.dispatch.compile.member import Key
from skuda.dispatch.cuda.packing import parameter_layout
from skuda.dispatch.settings import bundle_names
from skuda.dispatch.telemetry import logger_of
from skuda.kernels.launch import Launch, Step
from skuda.kernels.sources import Source, read_source
from skuda.registry.backend import BackendSpec
from skuda.registry.cached import cached_property
from skuda.registry.device import Device
from skuda.registry.errors import CompileError
from skuda.registry.sku import KernelSku


class Sought(NamedTuple):
    """One lookup of a cubin."""

    key: Key  # key of the cubin
    source: Source  # source of the kernel
    compiler: Compiler | None  # the compiler here, if any
    identity: str | None  # identity of that compiler


class CubinProvider(ABC):
    """Provides the cubins of one backend.

    `bundles` are searched before the cache. None means those in the settings.
    """

    spec: BackendSpec  # the backend; two backends never share a cubin
    compilers: ClassVar[str]  # how to get a compiler, for messages

    def __init__(self, cache: CubinCache | None = None, bundles: tuple[Bundle, ...] | None = None) -> None:
        self._cache, self._bundles = cache, bundles

    @abstractmethod
    def compiler(self) -> Compiler | None:
        """Return the compiler, or None if there is none here."""

    @cached_property
    def cache(self) -> CubinCache:
        """The cubin cache, created on first use."""
        return self._cache or CubinCache()

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles to search, in order, before the cache; opened on first use.

        Raise `BundleError` if a bundle in the settings must not be used.
        """
        return tuple(map(open_bundle, bundle_names())) if self._bundles is None else self._bundles

    def sought(self, sku: KernelSku, launch: Launch, device: Device) -> Sought:
        """Return the key of a SKU's cubin for a device, with the source and the compiler that would build it."""
        source, compiler = read_source(sku.source), self.compiler()
        flags, arch = (*sku.flags, *launch.flags), arch_of(sku, device)
        key = Key(source.digest, flags, arch, f"{sku.entry_point} {sku.launch}", self.spec.name)
        return Sought(key, source, compiler, None if compiler is None else compiler.identity(source))

    def shipped(self, sku: KernelSku, launch: Launch, device: Device) -> Found | None:
        """Return a SKU's cubin for a device from the first bundle that has it, or None.

        The user named the bundle, so its cubin is used regardless of which compiler made it or is installed here. Raise
        `BundleError` if a bundle must not be used, or its entry for the key is damaged or not a cubin; `CompileError`
        if the parameters of the cubin's kernels differ from those of the launch.
        """
        if not self.bundles:
            return None
        sought = self.sought(sku, launch, device)
        for bundle in self.bundles:
            member = bundle.find(sought.key, sought.identity)
            if member is None:
                continue
            cubin, kernels = bundle.load(member)
            agreeing(sku, launch.steps, kernels)
            log = logger_of("compile")
            if log is not None:
                log.info("%s for %s: found in %s", sku.id, sought.key.arch, bundle.path)
            return Found(cubin, (f"from {bundle.path}, compiled by {member.compiler}",))
        return None

    def cubin(self, sku: KernelSku, launch: Launch, device: Device) -> Found:
        """Return a SKU's cubin for a device, from the cache or the compiler.

        Raise `CompileError` if it does not compile, is not cached and there is no compiler, or its parameters differ
        from the launch's.
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

        found = self.cache.get(sought.key, sought.identity, build, sku=sku.id, file=sku.source)
        if log is not None and not built:
            log.info("%s for %s: found in %s", sku.id, arch, self.cache.folder)
        agreeing(sku, launch.steps, read_kernels(found.cubin))
        return found._replace(built=built)

    def cached(self, sku: KernelSku, launch: Launch, device: Device) -> bool:
        """Return whether `cubin` would compile nothing."""
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


def arch_of(sku: KernelSku, device: Device) -> str:
    """Return the target architecture: the SKU's own if it has a suffix such as ``a``, else that of the card."""
    if sku.arch.is_specific or device.compute_capability is None:
        return sku.arch.value
    major, minor = device.compute_capability
    return f"sm_{major}{minor}"


def agreeing(sku: KernelSku, steps: tuple[Step, ...], kernels: Mapping[str, Kernel]) -> tuple[Step, ...]:
    """Compare a launch's parameters with those of the compiled kernels; return the steps with parameter offsets.

    Raise `CompileError` if a kernel is missing, or the number or size of its parameters differs.
    """
    found = []
    for step in steps:
        kernel = kernels.get(step.entry)
        lead = kernel.parameters[0][0] if kernel is not None and kernel.parameters else 0
        found.append(step if step.lead == lead else step._replace(lead=lead))
        given = parameter_layout(found[-1])
        if kernel is None and kernels:
            raise CompileError(sku.id, f"there is no kernel {step.entry} in it; it has {', '.join(sorted(kernels))}")
        if kernel is not None and kernel.parameters and kernel.parameters != given:
            message = f"{step.entry} takes parameters of (offset, bytes) {kernel.parameters}, the launch gives {given}"
            raise CompileError(sku.id, message)
    return tuple(found)
