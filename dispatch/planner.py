"""`Planner`: selects kernels, prepares them, and caches the plans."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from skuda.dispatch.launch_cache import LaunchCache
from skuda.dispatch.plan import Plan, Ready
from skuda.dispatch.plugins.asking import Misbehaved
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.runtime import Runtime
from skuda.dispatch.select import match
from skuda.dispatch.select.match import Pick
from skuda.dispatch.system.locks import lock
from skuda.dispatch.telemetry import Observer, Ranges, Selection
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import NotPrepared, Unsupported
from skuda.registry.sku import KernelSku

if TYPE_CHECKING:
    from skuda.dispatch.select.explanation import Explanation
    from skuda.dispatch.select.measured import Tuned

_MOST_PLANS = 4096


class Planner:
    """Makes plans for a runtime, each of them once.

    The plans use the cache `launches`. The times of `tuned` may change the choice. `observers` are called with a
    `Selection` after every selection. `ranges` makes NVTX ranges of launches.
    """

    def __init__(
        self,
        runtime: Runtime,
        launches: LaunchCache,
        tuned: Tuned | None,
        observers: Iterable[Observer],
        ranges: Ranges | None,
    ) -> None:
        self._runtime, self._launches, self._tuned = runtime, launches, tuned
        self._observers, self._ranges = tuple(observers), ranges
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()  # finding the first key of a dict takes long
        self._lock = lock()
        self._making: dict[Hashable, threading.Lock] = {}
        self._recordings: list[set[tuple[Descriptor, Device]]] = []

    def plan(
        self, problem: Descriptor, preference: PlanPreference, device: Device, behind: KernelSku | None = None
    ) -> Plan | None:
        """Return a plan with the best kernel, or the best one ranked after `behind`. Return None if there is none."""
        for recording in self._recordings:
            recording.add((problem, device))
        # Keyed by place, not by "the current device", which can change between calls.
        where = device.place if device.ordinal is not None else device
        key = (problem, preference, where) if behind is None else (problem, preference, where, behind.id)
        return self._plans.get(key) or self._selected(key, problem, preference, device, behind)

    def chooser(
        self, problem: Descriptor, device: Device, fields: Collection[str]
    ) -> tuple[Callable[[Descriptor], Pick | None], KernelSku | None]:
        """Return a function that chooses for problems that differ in some fields, and the kernel that it always takes.

        That is None if the choice depends on the fields. They are not part of the functional key.
        """
        registry, how = self._runtime.registry, (device, NO_PREFERENCE, self._runtime.obstacles)
        if self._tuned is not None:
            return (lambda each: match.choose(registry, each, *how, tuned=self._tuned)), None
        fitting = match.shortlist(registry, problem.key(), *how)
        fixed = type(problem).model_fields.keys() - fields
        picks = []
        for sku in fitting:
            rules = [rule for rule in sku.constraints if not fixed.issuperset(rule.fields)]
            if all(rule.serves(problem) for rule in sku.constraints if rule not in rules):
                picks.append((Pick(sku), rules))

        def choose(each: Descriptor) -> Pick | None:
            return next((pick for pick, rules in picks if all(rule.serves(each) for rule in rules)), None)

        return choose, picks[0][0].sku if picks and not picks[0][1] else None

    def explain(self, problem: Descriptor, preference: PlanPreference, device: Device) -> Explanation:
        """Return what `plan` would choose and why."""
        runtime = self._runtime
        notes = runtime.notes(problem, preference, device)
        asked = (runtime.registry, problem, device, preference, runtime.obstacles, notes)
        found = match.explain(*asked, tuned=self._tuned)
        chosen = runtime.registry.sku(found.chosen or "")
        if chosen is None:
            return found
        remarks = runtime.remarks(chosen, problem, preference.part_of(device), found.choice)
        return found.model_copy(update={"notes": (*notes, *remarks)}) if remarks else found

    @contextmanager
    def recorded(self) -> Iterator[set[tuple[Descriptor, Device]]]:
        """Yield a set that gets every problem that is planned inside, with its device."""
        found: set[tuple[Descriptor, Device]] = set()
        self._recordings.append(found)
        self._launches.forget()  # a known launch asks for no plan
        try:
            yield found
        finally:
            self._recordings = [each for each in self._recordings if each is not found]

    def prepare(self, plan: Plan) -> Plan:
        """Return a plan with the same kernel that is ready here; see `Dispatcher.prepare`."""
        runtime, problem, device = self._runtime, plan.problem, plan.device
        preference = plan.preference.model_copy(update={"sku": plan.sku.id})
        found = match.choose(runtime.registry, problem, device, preference, runtime.obstacles)
        if found is None:
            raise Unsupported(self.explain(problem, preference, device))
        if plan.choice and plan.choice not in runtime.choices(found.sku, problem, device):
            raise NotPrepared(f"{plan.sku.id} has no configuration {plan.choice!r} any more: select again")
        pick = Pick(found.sku, plan.choice, plan.measured)
        try:
            make = partial(self._prepared, problem, preference, device, pick)
            ready = self._made((problem, preference, device, plan.choice), make)
        except Misbehaved as error:
            runtime.set_aside(error)
            raise Unsupported(self.explain(problem, preference, device)) from error
        assert ready is not None
        return ready

    def forget(self, ids: set[str]) -> None:
        """Forget the plans of these kernels, and all launches."""
        for key, plan in list(self._plans.items()):
            if plan.sku.id in ids:
                self._plans.pop(key, None)
        self._launches.forget()

    def _selected(
        self, key: Hashable, problem: Descriptor, preference: PlanPreference, device: Device, behind: KernelSku | None
    ) -> Plan | None:
        while True:
            selections: list[Selection] = []
            try:
                return self._made(key, partial(self._chosen, problem, preference, device, behind, selections.append))
            except Misbehaved as error:
                # Its kernels are refused from now on, so the next kernel of the ranking is chosen.
                self._runtime.set_aside(error)
            finally:
                # Only after the lock is released, because an observer may ask for the same plan.
                for selection in selections:
                    for observer in self._observers:
                        observer(selection)

    def _chosen(
        self,
        problem: Descriptor,
        preference: PlanPreference,
        device: Device,
        behind: KernelSku | None,
        report: Observer,
    ) -> Plan | None:
        start = perf_counter()
        asked = (self._runtime.registry, problem, device, preference, self._runtime.obstacles)
        pick = match.choose(*asked, behind=behind, tuned=self._tuned)
        chosen = perf_counter()

        def done(error: BaseException | None) -> None:
            if self._observers:
                times = chosen - start, perf_counter() - chosen
                explain = partial(self.explain, problem, preference, device)
                report(
                    Selection(problem, device, preference, pick, *times, error, behind.id if behind else None, explain)
                )

        try:
            plan = None if pick is None else self._prepared(problem, preference, device, pick)
        except BaseException as error:
            done(error)
            raise
        done(None)
        return plan

    def _made(self, key: Hashable, make: Callable[[], Plan | None]) -> Plan | None:
        """Make a plan once, even if several threads ask for it. Threads that ask for other plans do not wait."""
        # Only `with` holds the lock, so no interrupt leaves it locked; see `skuda.dispatch.system.locks`.
        with self._making.setdefault(key, lock()):
            try:
                # Another thread may have made it. If that thread failed, try again: the obstacle may be gone.
                plan = self._plans.get(key)
                if plan is None:
                    plan = make()
                    plan = plan if plan is None else self._kept(key, plan)
                return plan
            finally:
                self._making.pop(key, None)

    def _kept(self, key: Hashable, plan: Plan) -> Plan:
        with self._lock:
            while len(self._plans) >= _MOST_PLANS:
                self._plans.popitem(last=False)
            return self._plans.setdefault(key, plan)

    def _prepared(self, problem: Descriptor, preference: PlanPreference, device: Device, pick: Pick) -> Plan:
        sku, runtime = pick.sku, self._runtime
        part = preference.part_of(device) if preference.spare_multiprocessors else device
        choice = runtime.choice_within(sku, problem, part, pick.choice, preference.max_workspace_bytes)
        runner = runtime.prepared(sku, problem, part, choice) if device.ordinal is not None else None
        if runner is not None and self._ranges is not None:
            runner = self._ranges.round(runner, sku)
        ready, plugin = None, runtime.plugin_of(sku)
        if runner is not None:
            failed = None if plugin is None else partial(runtime.launch_failed, sku, plugin)
            ready = Ready(runner, self._launches, partial(self.plan, problem, preference, device, sku), failed)
        asked = {"problem": problem, "device": device, "preference": preference}
        measured = pick.reason if choice == pick.choice else ""
        return Plan.prepared(ready, sku=sku, choice=choice, measured=measured, **asked)
