"""Chooses by measured times: checks whether they apply here and whether they overrule the ranking.

Nothing here touches a device. The caller passes functions that know what is installed, and sources are read as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skuda.dispatch.select.explanation import Measured, Verdict
from skuda.dispatch.select.match import Pick
from skuda.dispatch.select.tuning import Candidate, Tuning, TuningEntry
from skuda.kernels.sources import source_hash
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.guarantee import falls_short
from skuda.registry.sku import KernelSku


@dataclass(frozen=True)
class Tuned:
    """Measured times, and functions that describe this machine."""

    tuning: Tuning
    origin: str  # the source of the times, for messages
    driver: Callable[[Device], str | None]  # returns the driver of a device; None if the device is not here
    choices: Callable[[KernelSku, Descriptor, Device], tuple[str, ...]]
    """Returns the names of a kernel's configurations for a problem on a device, best first; empty if it has only
    one."""

    def weigh(
        self, problem: Descriptor, device: Device, accepted: Sequence[KernelSku], against: Callable[[str], str]
    ) -> tuple[Pick | None, Verdict]:
        """Return the kernel that replaces the first of the ranking, or None if the first stays, and the reason.

        A kernel's times count only if the kernel is accepted, has not changed since the measurement, and promises no
        less than the first of the ranking. Only a kernel that is faster by more than the margin replaces the first.
        Among the kernels within the margin of the fastest, the highest in the ranking wins, in its fastest
        configuration. `accepted` has at least one kernel, best first. `against` returns the reasons against a kernel
        that is not accepted, by its id.
        """
        entry = self.tuning.entry(problem)
        if entry is None:
            alike = sum(entry.op == problem.op_name() for entry in self.tuning.entries)
            return None, self._kept(f"it has no entry for exactly this problem ({alike} of this op)")
        offered = self._offered(entry, problem, device, accepted)
        found = _judge(entry, offered, against)
        times = tuple(
            Measured(sku=one.candidate.sku, choice=one.candidate.choice, microseconds=one.us, against=one.against)
            for one in sorted(found, key=lambda one: (one.us is None, one.us or 0.0))
        )
        unlike = self.tuning.environment.mismatch(device, self.driver(device))
        best, reason = (None, unlike) if unlike else _decide(found, accepted[0].id, offered, self.tuning.margin)
        if best is None:
            return None, self._kept(reason, times)
        sku, choice = next(sku for sku in accepted if sku.id == best.sku), best.choice
        verdict = Verdict(origin=self.origin, chosen=True, reason=reason, choice=choice, times=times)
        return Pick(sku, choice, str(verdict)), verdict

    def _offered(
        self, entry: TuningEntry, problem: Descriptor, device: Device, accepted: Sequence[KernelSku]
    ) -> dict[str, _Offered]:
        """Return the first of the ranking and the other accepted kernels that were measured, by id, best first."""
        named = {candidate.sku for candidate in entry.candidates}
        return {
            sku.id: _Offered(
                self.choices(sku, problem, device) or ("",),
                _hash(sku),
                falls_short(sku.precision_guarantee, accepted[0].precision_guarantee),
            )
            for sku in accepted
            if sku is accepted[0] or sku.id in named
        }

    def _kept(self, reason: str, times: tuple[Measured, ...] = ()) -> Verdict:
        return Verdict(origin=self.origin, chosen=False, reason=reason, times=times)


class _Offered(NamedTuple):
    """A kernel that can be chosen here."""

    choices: tuple[str, ...]  # names of its configurations, best first; a single empty name if it has only one
    source_hash: str  # its current hash; empty if its source cannot be read
    short: str | None  # where its guarantee is weaker than that of the first of the ranking; None if it is not


class _Judged(NamedTuple):
    """A measured candidate and whether its time counts."""

    candidate: Candidate
    us: float | None  # its median time in microseconds
    rank: tuple[int, int]
    """Rank of its kernel, and of its configuration within the kernel; valid only if the time counts."""
    against: str  # why its time does not count; empty if it does


def _hash(sku: KernelSku) -> str:
    try:
        return source_hash(sku)
    except LookupError:
        return ""


def _judge(entry: TuningEntry, offered: dict[str, _Offered], against: Callable[[str], str]) -> list[_Judged]:
    """Return every candidate with the reason, if any, why its time does not count here."""
    kernels = list(offered)
    found = []
    for candidate in entry.candidates:
        offer = offered.get(candidate.sku)
        us, rank = candidate.timing.median if candidate.timing is not None else None, (0, 0)
        if candidate.refused:
            why = f"refused when it was measured: {candidate.refused}"
        elif offer is None:
            why = against(candidate.sku)
        else:
            why = _trouble(candidate, offer)
            if not why:
                rank = kernels.index(candidate.sku), offer.choices.index(candidate.choice)
        found.append(_Judged(candidate, us, rank, why))
    return found


def _trouble(candidate: Candidate, offered: _Offered) -> str:
    """Return why the time of an accepted kernel does not count; an empty string if it counts."""
    if offered.source_hash != candidate.source_hash:
        return "its source has changed since it was measured"
    if candidate.choice not in offered.choices:
        return "there is no such configuration any more" if candidate.choice else "it has several configurations now"
    return f"promises less than the first of the ranking: {offered.short}" if offered.short else ""


def _decide(
    found: Sequence[_Judged], standing: str, offered: dict[str, _Offered], margin: float
) -> tuple[Candidate | None, str]:
    """Return the candidate that replaces the first of the ranking, or None, and the reason.

    `standing` is the id of the first of the ranking. `offered` can be chosen. `margin` is the least gain, in per cent.
    """
    stands = (standing, offered[standing].choices[0])
    first = next((one for one in found if (one.candidate.sku, one.candidate.choice) == stands), None)
    if first is None or first.against or first.us is None:
        why = "was not measured" if first is None else first.against
        return None, f"the first of the ranking, {', '.join(filter(None, stands))}: {why}"
    was = first.us
    timed = [(one, one.us) for one in found if not one.against and one.us is not None]
    fastest, least = min(timed, key=lambda pair: (pair[1], pair[0].rank))
    if least == was:
        return None, "the first of the ranking is the fastest measured"
    if _gain(was, least) <= margin:
        compared = f"{_compared(was, least)}, which is within the margin of {margin:g} %"
        return None, f"{least:.1f} us of {fastest.candidate.label} is {compared}"
    # Among almost equally fast kernels the ranking decides, so that noise does not. The same source built by two
    # compilers gives such a pair.
    near = (pair for pair in timed if _gain(was, pair[1]) > margin and _gain(pair[1], least) <= margin)
    best, us = min(near, key=lambda pair: (pair[0].rank[0], pair[1], pair[0].rank[1]))
    return best.candidate, f"{us:.1f} us measured, {_compared(was, us)}"


def _gain(was: float, now: float) -> float:
    """Return by how many per cent the time `now` is below the time `was`."""
    return 100 * (was - now) / was if was else 0.0


def _compared(was: float, now: float) -> str:
    return f"{_gain(was, now):.1f} % faster than the {was:.1f} us of the first of the ranking"
