"""What one package brings, and its kernels run over problems: what the checks of `skuda.tools.conforming` look at.

The numbers come from `skuda verify`'s machinery: its questions, layouts, guard zones, repeats and rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.backends.base import Backend
from skuda.dispatch.device import Device
from skuda.dispatch.plan import Plan
from skuda.dispatch.plugins import Plugin
from skuda.registry.arch import ArchSku
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.errors import MissingDependency
from skuda.registry.op import Case, Op
from skuda.registry.sku import KernelSku
from skuda.tools.edges import accepts, edges
from skuda.tools.placing import LAYOUTS, Image, Placement, placed
from skuda.tools.trial import Finding, Question, Trial, images_of

Array = npt.NDArray[Any]
Outputs = dict[str, Array]
DRAWS = 3
"""Inputs that every case is run on: the first in all layouts, the others in one."""


class Broken(Exception):
    """A check that failed: what was promised and what came instead."""


class NotRun(Exception):
    """A check that could not be run here, and why."""


@dataclass(frozen=True)
class Laid:
    """The arguments of one run: arrays between guard zones, outputs poisoned, and numbers."""

    placement: Placement
    images: dict[str, Image]
    buffers: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]

    @classmethod
    def out(cls, question: Question, placement: Placement) -> Laid:
        """Lay a question's arguments out."""
        arguments = question.case.problem.arguments()
        names = [a.name for a in arguments if a.role is Role.OUTPUT]
        images, numbers = images_of(arguments, question.drawn, "contiguous", 0)
        buffers, views = placed(placement, images)
        inputs = {**{name: view for name, view in views.items() if name not in names}, **numbers}
        return cls(placement, images, buffers, inputs, {name: views[name] for name in names})

    def written(self) -> Outputs:
        """Return what the outputs hold now."""
        return {
            name: np.array(self.images[name].geometry.view(self.placement.download(self.buffers[name])))
            for name in self.outputs
        }


def run(plan: Plan, question: Question, placement: Placement) -> Outputs:
    """Run once with outputs given, and return what they hold then."""
    laid = Laid.out(question, placement)
    plan.run(**laid.inputs, **laid.outputs)
    return laid.written()


@dataclass
class Kit:
    """Everything that one package brings, and what has been found out about it.

    Attributes
    ----------
    package : str
        The distribution, or the origin under which its records are registered.
    dispatcher : Dispatcher
        With the package's plug-ins.
    placement : callable
        How arrays get to a device.
    seed : int
        What inputs are drawn from.
    more : tuple of Case
        Cases beside those of the ops.
    """

    package: str
    dispatcher: Dispatcher
    placement: Callable[[Device], Placement]
    seed: int
    more: tuple[Case, ...] = ()
    _cases: dict[str, tuple[Case, ...]] = field(default_factory=dict)
    _findings: dict[str, Finding] = field(default_factory=dict)

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """The package's entry points."""
        return tuple(plugin for plugin in self.dispatcher.plugins if _plain(plugin.package) == _plain(self.package))

    @cached_property
    def backends(self) -> tuple[Backend, ...]:
        """The backends that the package brings."""
        return tuple(each for name, each in self.dispatcher.backends.items() if self._owns(name))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops that it brings."""
        return tuple(op for name, op in self.dispatcher.registry.ops.items() if self._owns(name))

    @cached_property
    def skus(self) -> tuple[KernelSku, ...]:
        """The kernels that it brings, and everybody's that run on its backends."""
        names = {backend.spec.name for backend in self.backends}
        return tuple(sku for sku in self.dispatcher.registry if sku.backend in names or self._owns(sku.id))

    def _owns(self, name: str) -> bool:
        origin = self.dispatcher.registry.origin(name) or ""
        return _plain(self.package) in {_plain(origin), _plain(origin.rpartition(" ")[0])}

    def device_for(self, sku: KernelSku) -> Device:
        """Return where a kernel can run here.

        Raises
        ------
        NotRun
            Where nothing here runs it.
        """
        state = self.dispatcher.status[sku.backend]
        if not state.available:
            raise NotRun(f"backend {sku.backend}: {state.detail}" + (f" ({state.remedy})" if state.remedy else ""))
        for device in self.dispatcher.devices:
            same = (sku.arch is ArchSku.CPU) is (device.processor == "cpu")
            if same and sku.arch.runs_on(device.compute_capability):
                return device
        raise NotRun(f"it needs {sku.arch.describe()}, and no device here has that")

    def place(self, device: Device) -> Placement:
        """Return how arrays get to a device; raises `NotRun` where nothing here does that."""
        try:
            return self.placement(device)
        except MissingDependency as error:
            raise NotRun(str(error)) from error

    def select(self, sku: KernelSku, problem: Descriptor) -> Plan:
        """Return a plan of exactly this kernel."""
        return self.dispatcher.select(problem, PlanPreference(sku=sku.id), self.device_for(sku))

    def fresh(self, sku: KernelSku, problem: Descriptor) -> Plan:
        """Return a plan that nobody has run yet."""
        apart = Dispatcher(self.dispatcher.registry, backends=self.dispatcher.backends.values())
        return apart.select(problem, PlanPreference(sku=sku.id), self.device_for(sku))

    # --- problems and inputs -----------------------------------------------------------------------------------------

    def cases(self, sku: KernelSku) -> tuple[Case, ...]:
        """Return the cases that a kernel's constraints accept: its op's, ours, and ones at the edge of each constraint.

        Raises
        ------
        Broken
            Where there is none.
        """
        if sku.id not in self._cases:
            known = self.known(sku)
            every = dict.fromkeys((*known, *map(Case, edges(sku, known))))
            self._cases[sku.id] = tuple(case for case in every if accepts(sku, case.problem))
        if not self._cases[sku.id]:
            count = len(self.dispatcher.registry.ops[sku.op].cases)
            raise Broken(f"no case of {sku.op} is for it: its key or its constraints accept none of {count}")
        return self._cases[sku.id]

    def known(self, sku: KernelSku) -> list[Case]:
        """Return the cases of a kernel's key, whether its constraints accept them or not."""
        cases = (*self.dispatcher.registry.ops[sku.op].cases, *self.more)
        return [case for case in cases if case.problem.key() == sku.key]

    def question(self, sku: KernelSku, number: int, case: Case, turn: int = 0) -> Question:
        """Draw a case's inputs, other ones in every turn, and work the answer out."""
        name = f"{sku.op} {number} {turn}"
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return Question.ask(self.dispatcher.registry.ops[sku.op], number, case, rng)

    def largest(self, sku: KernelSku) -> tuple[int, Case]:
        """Return the case with the most elements, outputs first: where there is most to go wrong."""

        def size(numbered: tuple[int, Case]) -> tuple[bool, int]:
            arguments = numbered[1].problem.arguments()
            written = [math.prod(a.shape) for a in arguments if a.role is Role.OUTPUT]
            return 0 not in written, sum(math.prod(a.shape) for a in arguments)

        return max(enumerate(self.cases(sku)), key=size)

    def finding(self, sku: KernelSku) -> Finding:
        """Run a kernel over its cases, once."""
        if sku.id not in self._findings:
            trial = Trial(sku, partial(self.select, sku), self.place(self.device_for(sku)))
            for (number, case), turn in product(enumerate(self.cases(sku)), range(DRAWS)):
                before = trial.finding.cases
                layouts = LAYOUTS if turn == 0 else LAYOUTS[:1]
                trial.run(self.question(sku, number, case, turn), layouts, np.random.default_rng([self.seed, number]))
                if trial.finding.cases == before and trial.finding.failure is None:
                    trial.refuse(number, case, f"its constraints accept this problem; {trial.finding.note}")
            self._findings[sku.id] = trial.finding
        return self._findings[sku.id]


def _plain(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()
