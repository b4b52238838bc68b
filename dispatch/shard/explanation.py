"""`ShardedExplanation`: the kernels that the ranks of a group would select, and their exchanges."""

from __future__ import annotations

from skuda.dispatch.dispatcher import Dispatcher
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.select.explanation import Explanation
from skuda.dispatch.shard import problems
from skuda.dispatch.shard.cost import Transfer
from skuda.dispatch.shard.shards import Shards
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.value import Value, expect


class ShardedStep(Value):
    """One step, on the ranks that solve the same problem.

    Attributes
    ----------
    name : str
        The step. ``layer`` or ``sums`` is the product.
    ranks : tuple of int
        The ranks.
    explanation : Explanation
        Why its kernel was chosen, or why none was.
    """

    name: str
    ranks: tuple[int, ...]
    explanation: Explanation

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.name} on rank{'s' if len(self.ranks) > 1 else ''} {ranks}: {self.explanation.question()}"


class ShardedExplanation(Value):
    """The kernels of every rank, why they were chosen, and the exchanges.

    Attributes
    ----------
    shards : Shards
        How the layer is split.
    steps : tuple of ShardedStep
        The steps of the ranks, in order.
    transfers : tuple of Transfer
        The collectives in order, with their predicted times.
    chunks : tuple of int
        Rows of each chunk. The ranks exchange one chunk while they compute the next.
    """

    shards: Shards
    steps: tuple[ShardedStep, ...]
    transfers: tuple[Transfer, ...]
    chunks: tuple[int, ...]

    @property
    def chosen(self) -> tuple[tuple[tuple[str, str], ...], ...] | None:
        """The steps of every rank with the ids of their kernels, or None if a step has no kernel."""
        if self.refused is not None:
            return None
        made = [(step.ranks, (step.name, step.explanation.chosen or "")) for step in self.steps]
        return tuple(tuple(each for ranks, each in made if rank in ranks) for rank in range(self.shards.count))

    @property
    def refused(self) -> Explanation | None:
        """The explanation of the first step without a kernel, or None if every step has one."""
        return next((step.explanation for step in self.steps if step.explanation.chosen is None), None)

    def __str__(self) -> str:
        lines = [f"split along {self.shards.axis} over {self.shards.count} ranks"]
        for step in self.steps:
            lines += [f"  {step}", f"    {step.explanation.chosen or step.explanation.why_not()}"]
        lines += [f"  exchange: {transfer}" for transfer in self.transfers]
        if any(transfer.chunks > 1 for transfer in self.transfers):
            exposed = sum(transfer.exposed for transfer in self.transfers)
            lines.append(
                f"  in chunks of {', '.join(map(str, self.chunks))} rows; {exposed:.1f} us are behind no product"
            )
        return "\n".join(lines)


def explain_shards(
    dispatcher: Dispatcher,
    problem: Descriptor,
    shards: Shards,
    preference: PlanPreference | None = NO_PREFERENCE,
    device: Device | str | None = None,
) -> ShardedExplanation:
    """Return what `select_shards` would choose for the same arguments and why, and what the ranks would exchange.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, an unknown device, or a problem that cannot be split this way.
    """
    expect("explain_shards", "dispatcher", dispatcher, Dispatcher, "be a Dispatcher")
    expect("explain_shards", "shards", shards, Shards, "be a Shards, such as Shards(axis='k', count=2)")
    expect("explain_shards", "preference", preference, PlanPreference | None, "be a PlanPreference or None")
    layer = problems.check(problem, shards)
    way = problems.course(layer, shards)
    found: dict[tuple[str, Descriptor], list[int]] = {}
    for rank in range(shards.count):
        for (name, _), local in problems.problems(layer, way, rank).items():
            found.setdefault((name, local), []).append(rank)
    names = list(dict.fromkeys(name for name, _ in found))
    steps = tuple(
        ShardedStep(
            name=name,
            ranks=tuple(ranks),
            explanation=dispatcher.explain(local, preference_of(name, preference or NO_PREFERENCE), device),
        )
        for (name, local), ranks in sorted(found.items(), key=lambda item: names.index(item[0][0]))
    )
    scattered, chunks = way.scattered or len(way.chunks) > 1, len(way.chunks)
    transfers = problems.traffic(layer).transfers(shards, scattered=scattered, chunks=chunks)
    return ShardedExplanation(shards=shards, steps=steps, transfers=transfers, chunks=way.chunks)


def preference_of(step: str, preference: PlanPreference) -> PlanPreference:
    """Return the requirements on one step. Kernel, math and accumulator are required of the product only."""
    if step in problems.MAIN:
        return preference
    require = preference.require.model_copy(update={"math_precision": None, "accumulator": None})
    asked = preference.model_copy(update={"sku": None, "require": require})
    return NO_PREFERENCE if asked == NO_PREFERENCE else asked
