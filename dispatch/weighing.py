"""Measured times against the ranking: whether they say something here, and whether they change the choice.

Nothing here touches a device: what is installed comes as functions, and sources are read as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skuda.dispatch.device import Device
from skuda.dispatch.explanation import Measured, Verdict
from skuda.dispatch.sources import source_hash
from skuda.dispatch.tuning import Candidate, Entry, Tuning
from skuda.registry.descriptor import Descriptor
from skuda.registry.guarantee import falls_short
from skuda.registry.sku import KernelSku


class Pick(NamedTuple):
    """A kernel and how it is to run.

    Attributes
    ----------
    sku : KernelSku
        The kernel.
    choice : str
        Name of its configuration; empty for the one that its launch rule ranks first.
    reason : str
        The measurement that decided for it; empty where the ranking did.
    """

    sku: KernelSku
    choice: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Tuned:
    """Measured times, and what they are compared with here.

    Attributes
    ----------
    tuning : Tuning
        The times.
    origin : str
        Where they are from, for people.
    driver : callable
        Returns what runs a device; None where it is not here.
    choices : callable
        Returns the names of a kernel's configurations for a problem on a device, best first; empty where it has but
        one.
    """

    tuning: Tuning
    origin: str
    driver: Callable[[Device], str | None]
    choices: Callable[[KernelSku, Descriptor, Device], tuple[str, ...]]

    def weigh(
        self,
        problem: Descriptor,
        device: Device,
        accepted: Sequence[KernelSku],
        against: Callable[[str], str],
    ) -> tuple[Pick | None, Verdict]:
        """Compare the times of a problem.

        Only kernels that are accepted, are what they were when they were measured, and promise no less than the first
        of the ranking are compared with it. What takes its place is faster by more than the margin: the first, in the
        order of the ranking, of the kernels within the margin of the fastest, in its fastest configuration.

        Parameters
        ----------
        problem : Descriptor
            The problem.
        device : Device
            Where it should run.
        accepted : sequence of KernelSku
            The kernels that can serve it, best first; at least one.
        against : callable
            Says what speaks against the kernel of an id that is not among them.

        Returns
        -------
        pick : Pick or None
            What is chosen before the first of the ranking; None where that one stays.
        verdict : Verdict
            Why.
        """
        entry = self.tuning.entry(problem)
        if entry is None:
            alike = sum(entry.op == problem.op_name() for entry in self.tuning.entries)
            return None, self._kept(f"it has no entry for exactly this problem ({alike} of this op)")
        offered = self._offered(entry, problem, device, accepted)
        found = _judge(entry, offered, against)
        told = tuple(
            Measured(sku=one.candidate.sku, choice=one.candidate.choice, microseconds=one.us, against=one.against)
            for one in sorted(found, key=lambda one: (one.us is None, one.us or 0.0))
        )
        unlike = self.tuning.environment.mismatch(device, self.driver(device))
        best, reason = (None, unlike) if unlike else _decide(found, accepted[0].id, offered, self.tuning.margin)
        if best is None:
            return None, self._kept(reason, told)
        sku, choice = next(sku for sku in accepted if sku.id == best.sku), best.choice
        verdict = Verdict(origin=self.origin, chosen=True, reason=reason, choice=choice, times=told)
        return Pick(sku, choice, str(verdict)), verdict

    def _offered(
        self, entry: Entry, problem: Descriptor, device: Device, accepted: Sequence[KernelSku]
    ) -> dict[str, _Offered]:
        """Return the first of the ranking, and every other accepted kernel that was measured; by id, best first."""
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
    """A kernel that can be chosen here, as it is today.

    Attributes
    ----------
    choices : tuple of str
        Names of its configurations, best first; one empty name where it has but one.
    source_hash : str
        Of what makes it; empty where that cannot be read.
    short : str or None
        What it promises less than the first of the ranking.
    """

    choices: tuple[str, ...]
    source_hash: str
    short: str | None


class _Judged(NamedTuple):
    """A candidate and what is made of it here.

    Attributes
    ----------
    candidate : Candidate
        The candidate.
    us : float or None
        Its time.
    rank : (int, int)
        Places of its kernel in the ranking, and of its configuration in the kernel's; where it counts.
    against : str
        Why its time does not count; empty where it does.
    """

    candidate: Candidate
    us: float | None
    rank: tuple[int, int]
    against: str


def _hash(sku: KernelSku) -> str:
    try:
        return source_hash(sku)
    except LookupError:
        return ""


def _judge(entry: Entry, offered: dict[str, _Offered], against: Callable[[str], str]) -> list[_Judged]:
    """Say of every candidate whether its time counts here."""
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
    """Say why a time does not count though its kernel can be chosen; nothing where it does."""
    if offered.source_hash != candidate.source_hash:
        return "its source has changed since it was measured"
    if candidate.choice not in offered.choices:
        return "there is no such configuration any more" if candidate.choice else "it has several configurations now"
    return f"promises less than the first of the ranking: {offered.short}" if offered.short else ""


def _decide(
    found: Sequence[_Judged], standing: str, offered: dict[str, _Offered], margin: float
) -> tuple[Candidate | None, str]:
    """Return what is chosen before the first of the ranking, or None where that one stays; and why.

    Parameters
    ----------
    found : sequence of _Judged
        What was measured.
    standing : str
        Id of the first of the ranking.
    offered : dict
        The kernels that can be chosen.
    margin : float
        Per cent.
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
    # Between kernels that are as fast as each other the ranking decides, and not what the clock happened to show; one
    # source that two compilers made is two such kernels.
    near = (pair for pair in timed if _gain(was, pair[1]) > margin and _gain(pair[1], least) <= margin)
    best, us = min(near, key=lambda pair: (pair[0].rank[0], pair[1], pair[0].rank[1]))
    return best.candidate, f"{us:.1f} us measured, {_compared(was, us)}"


def _gain(was: float, now: float) -> float:
    """Return by how many per cent of one time another is shorter."""
    return 100 * (was - now) / was if was else 0.0


def _compared(was: float, now: float) -> str:
    return f"{_gain(was, now):.1f} % faster than the {was:.1f} us of the first of the ranking"
