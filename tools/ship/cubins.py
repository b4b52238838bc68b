"""Compile kernels ahead of their use, also for cards that are not present."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from typing import Any, Literal, NamedTuple

from skuda.dispatch.backends.base import Backend
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.compile.provider import arch_of
from skuda.dispatch.system import programs
from skuda.kernels.launch import Launch
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.sku import KernelSku
from skuda.tools.output import Report

Choices = Callable[[KernelSku, Descriptor, Device], Iterable[str]]
State = Literal["compiled", "cached", "failed"]


class Wanted(NamedTuple):
    """A cubin that a device would look for; the device need not be present.

    Several kernels may share the cubin, and `sku` is one of them. The launch gives the configuration and the parameters
    to compare with the compiled ones. `trouble` is the error of the launch rule; empty if there is none.
    """

    sku: KernelSku
    launch: Launch
    backend: CudaBackend[Any]
    device: Device
    trouble: str = ""

    @property
    def arch(self) -> str:
        """The architecture that it is compiled for."""
        return arch_of(self.sku, self.device)

    @property
    def identity(self) -> tuple[object, ...]:
        """The parts of its key; kernels that differ only in other ways, such as the epilogue, share a cubin."""
        sku = self.sku
        flags = (*sku.flags, *self.launch.flags)
        return (sku.backend, sku.source, sku.entry_point, sku.launch, flags, self.arch)


class Outcome(NamedTuple):
    """The result for a cubin: compiled now, found in the cache, or failed, with the reason."""

    wanted: Wanted
    state: State
    reason: str = ""


def cubins_of(
    skus: Iterable[KernelSku],
    problems: Mapping[str, Sequence[Descriptor]],
    backends: Mapping[str, Backend],
    *devices: Device,
    choices: Choices = lambda *_: ("",),
) -> list[Wanted]:
    """Return the cubins that devices would look for, each once: one per configuration that a launch rule chooses.

    Kernels that a device cannot run and kernels of other backends than CUDA's are left out. `problems` are by op and
    `backends` by name. `choices` returns the names of a kernel's configurations for a problem on a device; an empty
    name stands for the first one of its launch rule.
    """
    found: dict[tuple[object, ...], Wanted] = {}
    for sku in skus:
        backend = backends.get(sku.backend)
        if not isinstance(backend, CudaBackend):
            continue
        mine = [p for p in problems.get(sku.op, ()) if p.key() == sku.key]
        fit = [p for p in mine if not any(constraint.check(p) for constraint in sku.constraints)]
        for device, problem in product((d for d in devices if sku.arch.runs_on(d.compute_capability)), fit):
            for choice in choices(sku, problem, device):
                wanted = _asked(sku, problem, backend, device, choice)
                # A launch without steps needs no cubin.
                if wanted.launch.steps or wanted.trouble:
                    found.setdefault((*wanted.identity, wanted.trouble), wanted)
    return list(found.values())


def _asked(sku: KernelSku, problem: Descriptor, backend: CudaBackend[Any], device: Device, choice: str) -> Wanted:
    try:
        return Wanted(sku, backend.launch_of(sku, problem, device, choice), backend, device)
    except Exception as error:  # noqa: BLE001  a plug-in's launch rule can fail in any way
        return Wanted(sku, Launch(steps=()), backend, device, f"its launch rule fails: {_said(error)}")


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


def build_cubins(wanted: Sequence[Wanted], progress: Report | None = None) -> list[Outcome]:
    """Fill the cubin cache with all processors and report the progress; a failure does not stop the others."""
    found = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures: list[Future[Outcome]] = []
        try:
            futures += (pool.submit(build_cubin, each) for each in wanted)
            for turn, future in enumerate(futures):
                found.append(future.result())
                if progress is not None:
                    progress(turn + 1, len(wanted), "compiling")
        except BaseException:
            # The pool waits for its threads, and they wait for compilers, which do not see a terminal's Ctrl-C.
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                programs.kill_all()
                time.sleep(0.05)
            raise
    return found


def build_cubin(wanted: Wanted) -> Outcome:
    """Return a cubin from the cache, or compile it."""
    sku, launch, backend, device, trouble = wanted
    if trouble:
        return Outcome(wanted, "failed", trouble)
    try:
        there = backend.cached(sku, launch, device)
        notes = backend.cubin(sku, launch, device).notes
        if there:
            return Outcome(wanted, "cached")
        if backend.cached(sku, launch, device):
            return Outcome(wanted, "compiled")
    except Exception as error:  # noqa: BLE001  a plug-in's source or compiler can fail in any way
        return Outcome(wanted, "failed", _said(error))
    return Outcome(wanted, "failed", "; ".join(notes) or "it was compiled but is not in the cache")
