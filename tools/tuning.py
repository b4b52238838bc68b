"""Timing every kernel that serves a problem, in each of its configurations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.device import Device
from skuda.dispatch.environment import Environment, driver_of
from skuda.dispatch.explanation import as_json
from skuda.dispatch.timing import Timing
from skuda.dispatch.tuning import Candidate, Entry
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import Unsupported
from skuda.registry.sku import KernelSku
from skuda.tools.bench_lab import Lab, Replay
from skuda.tools.bench_rivals import said
from skuda.tools.benching import max_ulps, rounds_each, time_in_turn
from skuda.tools.cubins import Wanted, build_cubins, cubins_of
from skuda.tools.fingerprint import source_hash
from skuda.tools.output import Report
from skuda.tools.verifying import skuda_version, versions


class Offer(NamedTuple):
    """One kernel in one configuration.

    Attributes
    ----------
    sku : KernelSku
        The kernel.
    choice : str
        Name of its configuration; empty where it has but one.
    """

    sku: KernelSku
    choice: str


@dataclass(frozen=True)
class Tuner:
    """How to measure.

    Attributes
    ----------
    dispatcher : Dispatcher
        What knows the kernels; one without a tuning, so that its ranking is that of the registry.
    device : Device
        Where.
    lab : Lab
        Arrays and clock there.
    seed : int
        What inputs are drawn from.
    repeats : int
        Rounds of every candidate that its budget holds as often.
    budget : float
        Seconds for the rounds of one candidate.
    backend : str or None
        Only kernels of this backend.
    """

    dispatcher: Dispatcher
    device: Device
    lab: Lab
    seed: int
    repeats: int = 20
    budget: float = 0.4
    backend: str | None = None

    def run(self, problems: Sequence[Descriptor], progress: Report | None = None) -> tuple[Entry, ...]:
        """Measure problems; what is refused is recorded and the rest goes on.

        Parameters
        ----------
        problems : sequence of Descriptor
            The problems.
        progress : callable or None
            Told about every candidate.

        Raises
        ------
        Unsupported
            Where no kernel serves one of them; nothing is measured then.
        """
        report: Report = progress or (lambda done, total, what: None)  # noqa: ARG005  nobody is told
        offers = {problem: self._offers(problem) for problem in problems}
        total = sum(map(len, offers.values()))
        report(0, total, "compiling")
        self._compile(offers)
        entries: list[Entry] = []
        for problem, offered in offers.items():
            done = sum(len(entry.candidates) for entry in entries)
            candidates = self._measure(problem, offered, partial(_told, report, done, total))
            date = datetime.now(UTC).isoformat(timespec="seconds")
            entries.append(Entry(problem=as_json(problem), date=date, seed=self.seed, candidates=candidates))
        return tuple(entries)

    def _offers(self, problem: Descriptor) -> list[Offer]:
        """Return every kernel that serves a problem in each of its configurations, best first."""
        explained = self.dispatcher.explain(problem, PlanPreference(backend=self.backend), self.device)
        skus = [self.dispatcher.registry.sku(decision.sku) for decision in explained.accepted]
        if not skus:
            raise Unsupported(explained)
        return [Offer(sku, choice) for sku in skus if sku is not None for choice in self._choices(sku, problem)]

    def _choices(self, sku: KernelSku, problem: Descriptor, device: Device | None = None) -> tuple[str, ...]:
        return self.dispatcher.choices(sku, problem, device or self.device) or ("",)

    def _compile(self, offers: Mapping[Descriptor, Sequence[Offer]]) -> None:
        """Fill the cubin cache: one kernel after the other would take minutes."""
        jobs: dict[tuple[object, ...], Wanted] = {}
        for problem, offered in offers.items():
            skus = dict.fromkeys(offer.sku for offer in offered)
            problems, backends = {problem.op_name(): (problem,)}, self.dispatcher.backends
            found = cubins_of(skus, problems, backends, self.device, choices=self._choices)
            jobs |= {job.identity: job for job in found}
        # What goes wrong here goes wrong again when the kernel is prepared, and is recorded there.
        build_cubins(list(jobs.values()))

    def _measure(
        self, problem: Descriptor, offered: Sequence[Offer], tell: Callable[[int, str], None]
    ) -> tuple[Candidate, ...]:
        """Time what gives right results; say why of everything else."""
        lab = self.lab
        inputs = lab.draw(problem, zlib.crc32(f"{self.seed} {as_json(problem)}".encode()))
        outputs = lab.outputs(problem)
        replays: dict[Offer, Replay] = {}
        estimates: dict[Offer, float] = {}
        refused: dict[Offer, str] = {}
        for number, offer in enumerate(offered):
            tell(number, offer.sku.op)
            try:
                replay = lab.capture(self._bound(problem, offer, {**inputs, **outputs}), careful=False)
                # What is compared is what is timed: one replay into poisoned outputs.
                lab.poison(outputs)
                estimates[offer] = lab.measure([replay])[0]
                op, ulps = self.dispatcher.registry.ops[offer.sku.op], max_ulps(offer.sku, problem)
                refused[offer] = _line(lab.mismatch(op, problem, inputs, outputs, ulps))
                replays[offer] = replay
            except Exception as error:  # noqa: BLE001  a kernel that does not compile, too little memory, a lost device
                refused[offer] = _line(said(error))
        able = {offer: replay for offer, replay in replays.items() if not refused[offer]}
        timings: dict[Offer, Timing] = {}
        try:
            rounds = rounds_each({offer: estimates[offer] for offer in able}, self.repeats, self.budget)
            timings = time_in_turn(lab, able, rounds)
        except Exception as error:  # noqa: BLE001  a lost device
            refused |= dict.fromkeys(able, _line(said(error)))
        del replays, able
        # A device that is lost says so here too; it is recorded already.
        with suppress(Exception):
            lab.tidy()
        return tuple(
            Candidate(
                sku=offer.sku.id,
                choice=offer.choice,
                source_hash=source_hash(offer.sku),
                timing=timings.get(offer),
                refused=refused[offer],
            )
            for offer in offered
        )

    def _bound(self, problem: Descriptor, offer: Offer, arrays: Mapping[str, Any]) -> Callable[[], object]:
        """Return what runs exactly this kernel: a plan would hand arrays that it cannot read to another one."""
        backend = self.dispatcher.backends[offer.sku.backend]
        more = {"choice": offer.choice} if offer.choice else {}
        return backend.prepare(offer.sku, problem, self.device, **more).bind(arrays, None)


def environment(device: Device) -> Environment:
    """Return what times measured on a device now depend on.

    Parameters
    ----------
    device : Device
        A device that is here.
    """
    facts = device.model_copy(update={"ordinal": None})
    return Environment(device=facts, driver=driver_of(device), versions=versions(), skuda=skuda_version())


def _told(report: Report, before: int, total: int, done: int, what: str) -> None:
    report(before + done, total, what)


def _line(text: str) -> str:
    """Return a message as one line that a tuning may hold."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:1000]
