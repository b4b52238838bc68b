"""Time every kernel that serves a problem, in each of its configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice

from skuda.dispatch.select.environment import Environment, driver_of, skuda_version, versions
from skuda.dispatch.select.explanation import as_json
from skuda.dispatch.select.tuning import Candidate, Entry, Timing
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem, Unsupported
from skuda.tools.bench.clock import Replay
from skuda.tools.bench.measurement import Arrays, Measurement, Offer, error_line, max_ulps
from skuda.tools.output import Report, words
from skuda.tools.verify.fingerprint import source_hash
from skuda.tools.words.problem import pairs

_NEAR, _AGAIN = 1.1, 4
"""Candidates up to so many times slower than the fastest are timed again, in so many times the rounds.

Among many that are nearly as fast, the one with the shortest time of few rounds is often just the luckiest.
"""


@dataclass(frozen=True)
class Tuner(Measurement):
    """Measures candidates. The dispatcher must have no tuning, so that its ranking is that of the registry.

    With `variants`, only the kernels of those are candidates. `repeats` are the rounds of all; those near the fastest
    are then timed anew in four times as many. With several `layers`, a candidate is launched as often in one graph, as
    a model runs it, and its times are those of one launch: all read the op's first argument, which a model has just
    written, and have arrays of their own for all others.
    """

    variants: frozenset[str] = frozenset()
    layers: int = 1

    def run(self, problems: Sequence[Descriptor], progress: Report | None = None) -> tuple[Entry, ...]:
        """Measure problems; refused candidates are recorded and the run continues.

        Raise `Unsupported` before measuring if no kernel serves one of the problems.
        """
        report: Report = progress or (lambda done, total, what: None)  # noqa: ARG005  nobody watches
        offers = {problem: self._offers(problem) for problem in problems}
        total = sum(map(len, offers.values()))
        report(0, total, "compiling")
        self.compile(offer for offered in offers.values() for offer in offered)
        entries: list[Entry] = []
        for problem, offered in offers.items():
            done = sum(len(entry.candidates) for entry in entries)
            candidates = self._measure(problem, offered, partial(_tell, report, done, total))
            date = datetime.now(UTC).isoformat(timespec="seconds")
            facts = {"date": date, "seed": self.seed, "layers": self.layers}
            entries.append(Entry(problem=as_json(problem), candidates=candidates, **facts))
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
        return [
            Offer(sku, problem, choice)
            for sku in skus
            for choice in self.dispatcher.choices(sku, problem, self.device) or ("",)
        ]

    def _measure(
        self, problem: Descriptor, offered: Sequence[Offer], tell: Callable[[int, str], None]
    ) -> tuple[Candidate, ...]:
        """Time the candidates with right results; give the reasons for all others."""
        layers = [self.draw(problem) for _ in range(self.layers)]  # equal values, so that one answer serves all
        source = dict(islice(layers[0][0].items(), 1))
        layers = [({**inputs, **source}, outputs) for inputs, outputs in layers]
        replays: dict[Offer, Replay] = {}
        estimates: dict[Offer, float] = {}
        refused: dict[Offer, str] = {}
        for number, offer in enumerate(offered):
            tell(number, offer.sku.op)
            try:
                replay, estimates[offer], wrong = self._checked(offer, layers)
            except Exception as error:  # noqa: BLE001  a kernel that does not compile, too little memory, a lost device
                wrong = error_line(error)
            if wrong:
                refused[offer] = wrong
            else:
                replays[offer] = replay
        timings: dict[Offer, Timing] = {}
        try:
            timings = self.timed(replays, estimates)
            timings |= self._again(replays, timings)
        except Exception as error:  # noqa: BLE001  a lost device
            refused |= dict.fromkeys(replays, error_line(error))
        replays.clear()  # before `tidy`, which gives back their memory
        self.tidy()
        return tuple(
            Candidate(
                sku=offer.sku.id,
                choice=offer.choice,
                source_hash=source_hash(offer.sku),
                timing=timings[offer].shared_by(self.layers) if offer in timings else None,
                refused=_line(refused.get(offer, "")),
            )
            for offer in offered
        )

    def _checked(self, offer: Offer, layers: Sequence[tuple[Arrays, Arrays]]) -> tuple[Replay, float, str]:
        """Capture a candidate's launches and check every result; see `checked`."""
        calls = [self._bound(offer, {**inputs, **outputs}) for inputs, outputs in layers]
        (inputs, first), *others = layers
        # Named otherwise than the op's outputs, so that they are poisoned with those of the first layer, not compared.
        written = {f"{name} {number}": array for number, (_, made) in enumerate(others) for name, array in made.items()}
        replay, us, wrong = self.checked(partial(_all, calls), offer.sku, offer.problem, inputs, {**written, **first})
        op, ulps = self.dispatcher.registry.ops[offer.sku.op], max_ulps(offer.sku, offer.problem)
        compared = (self.lab.mismatch(op, offer.problem, inputs, outputs, ulps) for _, outputs in others)
        told = (f"layer {number}: {each}" for number, each in enumerate(compared, 1) if each)
        return replay, us, wrong or next(told, "")

    def _again(self, replays: Mapping[Offer, Replay], timings: Mapping[Offer, Timing]) -> dict[Offer, Timing]:
        """Time those near the fastest anew, unless it is alone."""
        medians = {offer: timing.median for offer, timing in timings.items()}
        most = _NEAR * min(medians.values(), default=0.0)
        near = {offer: replay for offer, replay in replays.items() if medians[offer] <= most}
        if len(near) < 2:
            return {}
        return replace(self, repeats=_AGAIN * self.repeats).timed(near, medians)

    def _bound(self, offer: Offer, arrays: Arrays) -> Callable[[], object]:
        """Return a call of exactly this kernel; a plan would choose another one for arrays that it cannot read."""
        backend = self.dispatcher.backends[offer.sku.backend]
        more = {"choice": offer.choice} if offer.choice else {}
        return backend.prepare(offer.sku, offer.problem, self.device, **more).bind(arrays, None)


def environment(device: Device) -> Environment:
    """Return the environment on which times measured now on a present device depend."""
    facts = device.model_copy(update={"ordinal": None})
    return Environment(device=facts, driver=driver_of(device), versions=versions(), skuda=skuda_version())


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _tell(report: Report, before: int, total: int, done: int, what: str) -> None:
    report(before + done, total, what)


def _line(text: str) -> str:
    """Return a message as one line of at most 1000 printable characters, as a tuning requires."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:1000]
