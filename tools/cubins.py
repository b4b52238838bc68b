"""Compiling kernels ahead of their use, for cards that need not be here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any, Literal, NamedTuple

from skuda.dispatch.backends.base import Backend
from skuda.dispatch.backends.cuda import CudaBackend, arch_of
from skuda.dispatch.device import Device
from skuda.kernels.launch import Launch
from skuda.registry.descriptor import Descriptor
from skuda.registry.sku import KernelSku
from skuda.tools.output import Report

Choices = Callable[[KernelSku, Descriptor, Device], Iterable[str]]
State = Literal["compiled", "cached", "failed"]


class Wanted(NamedTuple):
    """A cubin that a device would look for.

    Attributes
    ----------
    sku : KernelSku
        The kernel, or one of several that share the cubin.
    launch : Launch
        Its configuration is what counts, and its parameters are compared with the compiled ones.
    backend : CudaBackend
        Who looks for it.
    device : Device
        For whom; it need not be here.
    trouble : str
        What went wrong when the launch rule was asked; empty where nothing did.
    """

    sku: KernelSku
    launch: Launch
    backend: CudaBackend[Any]
    device: Device
    trouble: str = ""

    @property
    def arch(self) -> str:
        """What it is compiled for."""
        return arch_of(self.sku, self.device)

    @property
    def identity(self) -> tuple[object, ...]:
        """What its key is made of: kernels that differ in other things, such as the epilogue, may share a cubin."""
        sku = self.sku
        flags = (*sku.flags, *self.launch.flags)
        return (sku.backend, sku.source, sku.entry_point, sku.launch, flags, self.arch)


class Outcome(NamedTuple):
    """What came of a cubin.

    Attributes
    ----------
    wanted : Wanted
        The cubin.
    state : str
        Whether it was compiled now, was in the cache, or is not there now.
    reason : str
        Why it failed; empty where it did not.
    """

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
    """Return what devices would look for, each cubin once: one for every configuration that a launch rule chooses.

    Parameters
    ----------
    skus : iterable of KernelSku
        Kernels; those that a device cannot run, and those of other backends than CUDA's, are left out.
    problems : mapping of str to sequence of Descriptor
        What may be run, by op.
    backends : mapping of str to Backend
        By name.
    *devices : Device
        For whom.
    choices : callable
        Returns the names of the configurations that are wanted of a kernel for a problem on a device; an empty one
        stands for that which its launch rule ranks first.
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
    """Fill the cubin cache with all processors; a failure is told and the rest goes on.

    Parameters
    ----------
    wanted : sequence of Wanted
        What should be in the cache.
    progress : callable or None
        Told about every cubin.
    """
    found = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for turn, outcome in enumerate(pool.map(_build, wanted)):
            found.append(outcome)
            if progress is not None:
                progress(turn + 1, len(wanted), "compiling")
    return found


def _build(wanted: Wanted) -> Outcome:
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
