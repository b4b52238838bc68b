"""Decisions and explanations. An `Explanation` has the same form whether or not a kernel was chosen."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from skuda.dispatch.preference import PlanPreference
from skuda.registry.device import Device
from skuda.registry.reason import Reason
from skuda.registry.value import Real, Value


class Decision(Value):
    """The verdict on one kernel for a problem on a device.

    Attributes
    ----------
    sku : str
        Id of the kernel.
    rank : int or None
        Rank among the accepted kernels, 0 for the chosen one; None if refused.
    reasons : tuple of Reason
        Every reason for the refusal; empty if accepted.
    """

    sku: str
    rank: int | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the kernel can serve the problem."""
        return not self.reasons

    @property
    def changes(self) -> tuple[str, ...]:
        """The changes that would make the kernel acceptable, one line each."""
        return tuple(reason.change for reason in self.reasons)

    def __str__(self) -> str:
        if self.accepted:
            return f"{self.sku}: accepted, rank {self.rank}"
        return f"{self.sku}: refused: {'; '.join(str(reason) for reason in self.reasons)}"


class Measured(Value):
    """The measured time of one kernel in one configuration.

    Attributes
    ----------
    sku : str
        Id of the kernel.
    choice : str
        Name of the configuration; empty if the kernel has only one.
    microseconds : float or None
        Median of its times; None if it was not timed.
    against : str
        Why its time does not count; empty if it counts.
    """

    sku: str
    choice: str = ""
    microseconds: Real | None = None
    against: str = ""

    def __str__(self) -> str:
        took = "not timed" if self.microseconds is None else f"{self.microseconds:.1f} us"
        name = f"{self.sku}, {self.choice}" if self.choice else self.sku
        return f"{took}: {name}" + (f": {self.against}" if self.against else "")


class Verdict(Value):
    """The result of comparing measured times for one selection.

    Attributes
    ----------
    origin : str
        The file with the times.
    chosen : bool
        Whether the times overruled the ranking.
    reason : str
        Why they did or did not.
    choice : str
        The chosen configuration. Empty if the times chose none, or the kernel has only one.
    times : tuple of Measured
        The times, fastest first. Empty if the file has no times of the problem.
    """

    origin: str
    chosen: bool
    reason: str
    choice: str = ""
    times: tuple[Measured, ...] = ()

    def __str__(self) -> str:
        return f"{'chosen' if self.chosen else 'not chosen'} by {self.origin}: {self.reason}"


class Explanation(Value):
    """Why a kernel was chosen, or why none was.

    Attributes
    ----------
    op : str
        Name of the op.
    problem : dict
        The descriptor's fields.
    device : Device
        The device to run on.
    preference : PlanPreference
        The caller's requirements.
    decisions : tuple of Decision
        One for every kernel of the op: first the accepted ones by rank, then the refused ones, with the fewest reasons
        first.
    notes : tuple of str
        Further remarks, for example about a plug-in that was set aside.
    registry : str
        Digest of the registry.
    verdict : Verdict or None
        The result of comparing measured times; None if there are none.
    """

    op: str
    problem: dict[str, JsonValue]
    device: Device
    preference: PlanPreference
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...] = ()
    registry: str
    verdict: Verdict | None = None

    @property
    def chosen(self) -> str | None:
        """Id of the chosen kernel, or None."""
        return self.decisions[0].sku if self.decisions and self.decisions[0].accepted else None

    @property
    def choice(self) -> str:
        """Name of the configuration that measured times chose. Empty for the first one of the launch rule."""
        return self.verdict.choice if self.verdict is not None else ""

    @property
    def accepted(self) -> tuple[Decision, ...]:
        """The accepted kernels, best first."""
        return tuple(decision for decision in self.decisions if decision.accepted)

    @property
    def refused(self) -> tuple[Decision, ...]:
        """The refused kernels, those with the fewest reasons first."""
        return tuple(decision for decision in self.decisions if not decision.accepted)

    def __hash__(self) -> int:
        return hash((self.op, self.device, self.preference, self.decisions, self.registry))

    def question(self) -> str:
        """Return the op, its problem and the device in one line."""
        fields = ", ".join(f"{name}={value}" for name, value in self.problem.items() if name != "op")
        return f"{self.op}({fields}) on {self.device.describe()}"

    def why_not(self, limit: int = 4) -> str:
        """Return why no kernel was chosen, with the nearest candidates first.

        Parameters
        ----------
        limit : int
            Number of candidates to list.
        """
        if not self.decisions:
            return "\n  ".join((f"no kernel for {self.question()}: none is registered for this op", *self.notes))
        lines = [f"no kernel for {self.question()}; {len(self.decisions)} candidates, the nearest:"]
        for decision in self.refused[:limit]:
            lines += [f"  {decision.sku}", *(f"    {reason}  ->  {reason.change}" for reason in decision.reasons)]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [self.question()]
        lines += [f"  {'* ' if d.rank == 0 else '  '}{d}" for d in self.accepted]
        lines += [f"    {d}" for d in self.refused]
        if self.verdict is not None:
            lines += [f"  {self.verdict}", *(f"    {measured}" for measured in self.verdict.times)]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def as_json(problem: Value) -> dict[str, Any]:
    """Return a descriptor's fields as JSON values."""
    return problem.model_dump(mode="json")
