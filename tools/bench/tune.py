"""Time every kernel that serves a problem, in each of its configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import NamedTuple

from skuda.dispatch.select.environment import Environment, driver_of, skuda_version, versions
from skuda.dispatch.select.explanation import as_json
from skuda.dispatch.select.tuning import Candidate, Timing, TuningEntry
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem, Unsupported
from skuda.registry.sku import KernelSku
from skuda.registry.text import one_line
from skuda.tools.bench.timing import Arrays, Measurement, Ready, error_line, max_ulps, prepared
from skuda.tools.output import Report, words
from skuda.tools.parse.problem import pairs
from skuda.tools.ship.cubins import Wanted, build_cubins, cubins_of
from skuda.tools.verify.fingerprint import source_hash

_NEAR, _AGAIN = 1.1, 4
"""Candidates up to so many times slower than the fastest are timed again, in so many times the rounds.

Among many that are nearly as fast, the one with the shortest time of few rounds is often just the luckiest.
"""


class Offer(NamedTuple):
    """One kernel in one configuration; `choice` is its name, empty for the only one."""

    sku: KernelSku
    choice: str


@dataclass(frozen=True)
class Tuner(Measurement):
    """Measures candidates. The dispatcher must have no tuning, so that its ranking is that of the registry.

    Attributes
    ----------
    variants : frozenset of str
        Only the kernels of these are candidates; empty for all.
    layers : int
        Launches of a candidate in one graph, as a model runs it; its times are those of one launch. All launches read
        the op's first argument, which a model has just written, and have arrays of their own for all others.
    """

    variants: frozenset[str] = frozenset()
    layers: int = 1

    def run(self, problems: Sequence[Descriptor], watch: Report) -> tuple[TuningEntry, ...]:
        """Measure problems; refused candidates are recorded and the run continues.

        Raise `Unsupported` before measuring if no kernel serves one of the problems.
        """
        offers = {problem: self._offers(problem) for problem in problems}
        total = sum(map(len, offers.values()))
        watch(0, total, "compiling")
        self._compile(offers)
        entries: list[TuningEntry] = []
        for problem, offered in offers.items():
            done = sum(len(entry.candidates) for entry in entries)

            def tell(at: int, done: int = done) -> None:
                watch(done + at, total, "tune")

            candidates = self._measure(problem, offered, tell)
            how = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seed": self.seed, "layers": self.layers}
            entries.append(TuningEntry(problem=as_json(problem), candidates=candidates, **how))
        return tuple(entries)

    def _offers(self, problem: Descriptor) -> list[Offer]:
        """Return every kernel that serves a problem in each of its configurations, best first."""
        explained = self.dispatcher.explain(problem, self.preference, self.device)
        accepted = (self.dispatcher.registry.sku(decision.sku) for decision in explained.accepted)
        skus = [sku for sku in accepted if sku is not None and (not self.variants or sku.variant in self.variants)]
        if not explained.accepted:
            raise Unsupported(explained)
        if not skus:
            must = f"serve every problem, such as {' '.join(pairs(explained.problem))}"
            raise InvalidProblem("tune", "--variant", words(sorted(self.variants)), must)
        choices = self.dispatcher.choices
        return [Offer(sku, choice) for sku in skus for choice in choices(sku, problem, self.device) or ("",)]

    def _compile(self, offers: Mapping[Descriptor, Sequence[Offer]]) -> None:
        """Fill the cubin cache in parallel, because compiling in sequence takes minutes.

        A failure occurs again when the kernel is prepared, and is recorded there.
        """
        backends, jobs = self.dispatcher.backends, dict[object, Wanted]()
        for problem, offered in offers.items():
            for sku, choice in offered:
                problems = {sku.op: (problem,)}
                found = cubins_of((sku,), problems, backends, self.device, choices=lambda *_, c=choice: (c,))
                jobs |= {job.identity: job for job in found}
        build_cubins(list(jobs.values()), None)

    def _measure(
        self, problem: Descriptor, offered: Sequence[Offer], tell: Callable[[int], None]
    ) -> tuple[Candidate, ...]:
        """Time the candidates with right results; give the reasons for all others."""
        layers = [self.draw(problem) for _ in range(self.layers)]  # equal values, so that one answer serves all
        source = dict(islice(layers[0][0].items(), 1))
        layers = [({**inputs, **source}, outputs) for inputs, outputs in layers]
        makers = {
            offer: partial(self._ready, problem, offer, layers, partial(tell, at)) for at, offer in enumerate(offered)
        }
        ready, refused = prepared(makers)
        timings: dict[Offer, Timing] = {}
        try:
            timings = self.timed(ready)
            most = _NEAR * min((timing.median for timing in timings.values()), default=0.0)
            near = {offer: ready[offer]._replace(us=t.median) for offer, t in timings.items() if t.median <= most}
            if len(near) > 1:
                timings |= replace(self, repeats=_AGAIN * self.repeats).timed(near)
        except Exception as error:  # noqa: BLE001  a lost device
            refused |= dict.fromkeys(ready, error_line(error))
            timings = {}
        ready.clear()  # before `tidy`, which gives back their memory
        self.tidy()
        return tuple(
            Candidate(
                sku=offer.sku.id,
                choice=offer.choice,
                source_hash=source_hash(offer.sku),
                timing=timings[offer].shared_by(self.layers) if offer in timings else None,
                refused=one_line(refused.get(offer, "")),
            )
            for offer in offered
        )

    def _ready(
        self, problem: Descriptor, offer: Offer, layers: Sequence[tuple[Arrays, Arrays]], tell: Callable[[], None]
    ) -> Ready:
        """Capture a candidate's launches and check every result."""
        tell()
        calls = [self._bound(problem, offer, {**inputs, **outputs}) for inputs, outputs in layers]
        # All outputs are poisoned; the inputs of the first layer stand for those of all, which have the same values.
        written = {f"{name} {number}": one for number, (_, made) in enumerate(layers) for name, one in made.items()}

        def wrong() -> str:
            ulps = max_ulps(offer.sku, problem)
            found = (self.mismatch(problem, layers[0][0], outputs, ulps) for _, outputs in layers)
            messages = (f"layer {number}: {each}" if number else each for number, each in enumerate(found) if each)
            return next(messages, "")

        return self.checked(lambda: [call() for call in calls], partial(self.lab.poison, written), wrong)

    def _bound(self, problem: Descriptor, offer: Offer, arrays: Arrays) -> Callable[[], object]:
        """Return a call of exactly this kernel; a plan would choose another one for arrays that it cannot read."""
        backend = self.dispatcher.backends[offer.sku.backend]
        more = {"choice": offer.choice} if offer.choice else {}
        return backend.prepare(offer.sku, problem, self.device, **more).bind(arrays, None)


def environment(device: Device) -> Environment:
    """Return the environment on which times measured now on a present device depend."""
    facts = device.model_copy(update={"ordinal": None})
    return Environment(device=facts, driver=driver_of(device), versions=versions(), skuda=skuda_version())
