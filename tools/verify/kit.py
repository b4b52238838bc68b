"""The ops, kernels and backends of one package, and the trials of its kernels that conformance checks look at.

The trials are those of `skuda verify`: the same questions, layouts, guard zones, repeats and rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.backends.base import Backend
from skuda.dispatch.plan import Plan
from skuda.dispatch.plugins.loading import Plugin
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.device import Device
from skuda.registry.errors import MissingDependency
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.tools.verify.calls import Laid, Outputs
from skuda.tools.verify.edges import accepts, always, edges
from skuda.tools.verify.placement import LAYOUTS, Placement
from skuda.tools.verify.trial import Finding, Question, Trial

DRAWS = 3
"""Number of draws per case of an op: the first is run in all layouts, the others in one."""


class Broken(Exception):
    """A check failed; the message names the promise and what happened instead."""


class NotRun(Exception):
    """A check could not be run; the message says why."""


def run(plan: Plan, question: Question, placement: Placement) -> Outputs:
    """Run a plan once with outputs given, and return their contents."""
    laid = Laid.out(plan.problem, question.drawn, placement)
    plan.run(**laid.inputs, **laid.outputs)
    return laid.written()


@dataclass
class Kit:
    """The ops, kernels and backends of one package, with cached findings.

    Attributes
    ----------
    package : str
        The distribution, or the origin under which its records are registered.
    dispatcher : Dispatcher
        A dispatcher with the package's plug-ins.
    placement : callable
        ``placement(device)`` returns the `Placement` for a device.
    seed : int
        Seed of the inputs.
    more : tuple of Case
        Cases in addition to those of the ops.
    """

    package: str
    dispatcher: Dispatcher
    placement: Callable[[Device], Placement]
    seed: int
    more: tuple[Case, ...] = ()
    _cases: dict[str, tuple[Case, ...]] = field(default_factory=dict)
    _own: dict[str, int] = field(default_factory=dict)
    _findings: dict[str, Finding] = field(default_factory=dict)

    # --- the package -------------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The package's plug-ins."""
        return tuple(plugin for plugin in self.dispatcher.plugins if _plain(plugin.package) == _plain(self.package))

    @cached_property
    def backends(self) -> tuple[Backend, ...]:
        """The backends that the package brings."""
        return tuple(each for name, each in self.dispatcher.backends.items() if self._owns(name))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops that the package brings."""
        return tuple(op for name, op in self.dispatcher.registry.ops.items() if self._owns(name))

    @cached_property
    def skus(self) -> tuple[KernelSku, ...]:
        """The kernels that the package brings, and all other kernels on its backends."""
        names = {backend.spec.name for backend in self.backends}
        return tuple(sku for sku in self.dispatcher.registry if sku.backend in names or self._owns(sku.id))

    def _owns(self, name: str) -> bool:
        origin = self.dispatcher.registry.origin(name) or ""
        return _plain(self.package) in {_plain(origin), _plain(origin.rpartition(" ")[0])}

    def device_for(self, sku: KernelSku) -> Device:
        """Return the first device here that can run a kernel; raise `NotRun` if there is none."""
        state = self.dispatcher.status[sku.backend]
        if not state.available:
            raise NotRun(f"backend {sku.backend}: {state.detail}" + (f" ({state.remedy})" if state.remedy else ""))
        for device in self.dispatcher.devices:
            same = (sku.arch is ArchSku.CPU) is (device.processor == "cpu")
            if same and sku.arch.runs_on(device.compute_capability):
                return device
        raise NotRun(f"it needs {sku.arch.describe()}, and no device here has that")

    def place(self, device: Device) -> Placement:
        """Return the placement for a device; raise `NotRun` if its library is missing."""
        try:
            return self.placement(device)
        except MissingDependency as error:
            raise NotRun(str(error)) from error

    def select(self, sku: KernelSku, problem: Descriptor) -> Plan:
        """Return a plan for exactly this kernel."""
        return self.dispatcher.select(problem, PlanPreference(sku=sku.id), self.device_for(sku))

    def fresh(self, sku: KernelSku, problem: Descriptor) -> Plan:
        """Return a plan that is not cached, so that nobody has run it yet."""
        apart = Dispatcher(self.dispatcher.registry, backends=self.dispatcher.backends.values())
        return apart.select(problem, PlanPreference(sku=sku.id), self.device_for(sku))

    # --- problems and inputs -----------------------------------------------------------------------------------------

    def cases(self, sku: KernelSku) -> tuple[Case, ...]:
        """Return the cases that a kernel is run over: its op's, `more`, those at edges of constraints, and `always`.

        Raises
        ------
        Broken
            If its constraints accept none of them.
        """
        if sku.id not in self._cases:
            known = self.known(sku)
            own = dict.fromkeys(case for case in (*known, *map(Case, edges(sku, known))) if accepts(sku, case.problem))
            self._own[sku.id] = len(own)
            self._cases[sku.id] = tuple(own | dict.fromkeys(always(sku, known)))
        if not self._cases[sku.id]:
            count = len(self.dispatcher.registry.ops[sku.op].cases)
            raise Broken(f"no case of {sku.op} is for it: its key or its constraints accept none of {count}")
        return self._cases[sku.id]

    def known(self, sku: KernelSku) -> list[Case]:
        """Return the cases with the kernel's key, including those that its constraints refuse."""
        cases = (*self.dispatcher.registry.ops[sku.op].cases, *self.more)
        return [case for case in cases if case.problem.key() == sku.key]

    def question(self, sku: KernelSku, number: int, case: Case, turn: int = 0) -> Question:
        """Draw a case's inputs, different ones for each `turn`, and compute the reference's outputs."""
        name = f"{sku.op} {number} {turn}"
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return Question.ask(self.dispatcher.registry.ops[sku.op], number, case, rng)

    def largest(self, sku: KernelSku) -> tuple[int, Case]:
        """Return the case with the most elements; empty outputs rank last, and cases from `always` do not count."""

        def size(numbered: tuple[int, Case]) -> tuple[bool, int]:
            arguments = numbered[1].problem.arguments()
            written = [math.prod(a.shape) for a in arguments if a.role is Role.OUTPUT]
            return 0 not in written, sum(math.prod(a.shape) for a in arguments)

        numbered = list(enumerate(self.cases(sku)))
        return max(numbered[: self._own[sku.id]] or numbered, key=size)

    def finding(self, sku: KernelSku) -> Finding:
        """Run a kernel once over its cases; those from `always` run in one layout and on one draw."""
        if sku.id not in self._findings:
            trial = Trial(sku, partial(self.select, sku), self.place(self.device_for(sku)))
            for number, case in enumerate(self.cases(sku)):
                own = number < self._own[sku.id]
                for turn in range(DRAWS if own else 1):
                    before = trial.finding.cases
                    one = (LAYOUTS[0 if own else number % len(LAYOUTS)],)
                    layouts = LAYOUTS if own and turn == 0 else one
                    rng = np.random.default_rng([self.seed, number])
                    trial.run(self.question(sku, number, case, turn), layouts, rng, again=own)
                    if trial.finding.cases == before and trial.finding.failure is None:
                        trial.refuse(number, case, f"its constraints accept this problem; {trial.finding.note}")
            self._findings[sku.id] = trial.finding
        return self._findings[sku.id]


def _plain(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
