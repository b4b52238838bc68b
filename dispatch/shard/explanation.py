"""The problem of each rank, derived from a linear layer and its shards, and the kernels that would be selected."""

from __future__ import annotations

from typing import Any

from skuda.dispatch.dispatcher import Dispatcher
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.select.explanation import Explanation
from skuda.dispatch.shard.cost import Traffic, Transfer
from skuda.dispatch.shard.layer import ShardSchedule
from skuda.dispatch.shard.shards import Shards
from skuda.kernels.linear.problem import SUMS, LinearProblem, longest_k
from skuda.kernels.linear.quantized_linear import QuantizedLinearDescriptor
from skuda.kernels.linear.rescale import RescaleDescriptor
from skuda.kernels.linear.scaled_linear import ScaledLinearDescriptor
from skuda.kernels.quantize.amax import AmaxDescriptor
from skuda.kernels.quantize.amax_quantize import AmaxQuantizeDescriptor
from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import Value, expect
from skuda.registry.vocabulary import DynamicRangeScope, Nonfinite

MAIN = ("layer", "sums")
"""The names of the product. A layer has one of them."""


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
    other_way : float or None
        Microseconds of the collectives in the other way, which was not chosen: all-reduce instead of reduce-scatter, or
        the reverse.
    """

    shards: Shards
    steps: tuple[ShardedStep, ...]
    transfers: tuple[Transfer, ...]
    chunks: tuple[int, ...]
    other_way: float | None = None

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
        if self.other_way is not None:
            took, other = sum(transfer.microseconds for transfer in self.transfers), f"{self.other_way:.1f} us"
            lines.append(f"  by the model {took:.1f} us in all; the other way to add up would take {other}")
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
    layer = check(problem, shards)
    way = schedule(layer, shards)
    found: dict[tuple[str, Descriptor], list[int]] = {}
    for rank in range(shards.count):
        for (name, _), local in problems(layer, way, rank).items():
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
    exchanges, scattered = traffic(layer), way.scattered or len(way.chunks) > 1
    optional = shards.axis == "k" and shards.output == "whole" and shards.count > 1
    return ShardedExplanation(
        shards=shards,
        steps=steps,
        transfers=exchanges.transfers(shards, scattered=scattered, chunks=len(way.chunks)),
        chunks=way.chunks,
        other_way=exchanges.microseconds(shards, scattered=not scattered) if optional else None,
    )


def preference_of(step: str, preference: PlanPreference) -> PlanPreference:
    """Return the requirements on one step. Kernel, math and accumulator are required of the product only."""
    if step in MAIN:
        return preference
    require = preference.require.model_copy(update={"math_precision": None, "accumulator": None})
    asked = preference.model_copy(update={"sku": None, "require": require})
    return NO_PREFERENCE if asked == NO_PREFERENCE else asked


def check(problem: Descriptor, shards: Shards) -> LinearProblem:
    """Return the problem if it can be split this way.

    Raise `InvalidProblem` for an op that is not a linear layer, sizes that do not add up, sums that could leave s32,
    and activations in f64 with a narrower output.
    """
    if not isinstance(problem, LinearProblem):
        raise InvalidProblem(
            "Shards", "problem", shown(problem), "be a linear layer, such as QuantizedLinearDescriptor"
        )
    name = type(problem).__name__
    if problem.output in SUMS:
        rule = "be the output's element: a split layer adds up the sums"
        raise InvalidProblem(name, "output_element", str(problem.output), rule)
    if problem.code_element.is_split and (shards.axis, shards.input) == ("n", "columns"):
        rule = "be of 8 bits where columns of codes are gathered: the halves of rows would not lie together"
        raise InvalidProblem(name, "activation_element", str(problem.code_element), rule)
    _, n, k = problem.sizes
    shards.parts(n, k)
    if shards.input == "columns":
        shards.columns(k)
    if shards.axis == "k" and problem.sums_element is ElementKind.S32:
        longest = longest_k(problem.code_element, problem.weight_code)
        if k > longest:
            codes = f"{problem.code_element} by {problem.weight_code}"
            rule = f"be at most {longest} where it is split, so that no sum of {codes} leaves s32, or split n"
            raise InvalidProblem(name, "k", str(k), rule)
    cut = (shards.axis, shards.input) != ("n", "whole")
    if cut and problem.compute is not problem.output.compute:
        rule = "have the output_element f64 where it is f64 and the layer is split so"
        raise InvalidProblem(name, "activation_element", "f64", rule)
    return problem


def schedule(problem: LinearProblem, shards: Shards) -> ShardSchedule:
    """Return the schedule of a layer on the ranks."""
    return ShardSchedule.of(shards, traffic(problem))


def per_row(problem: LinearProblem) -> bool:
    """Whether each row of the activation has a scale of its own."""
    return problem.dynamic or getattr(problem, "act_scale_scope", None) is DynamicRangeScope.TOKEN


def traffic(problem: LinearProblem) -> Traffic:
    """Return the facts on which the cost of a layer's exchanges depends."""
    m, n, k = problem.sizes
    beside = 0
    if per_row(problem):
        beside = problem.compute.bits // 8 + 4 * bool(getattr(problem, "has_act_zero_point", False))
    sizes = {"output_bytes": problem.output.bits // 8, "scale_bytes": beside, "halves": problem.code_element.halves}
    return Traffic(m=m, n=n, k=k, dynamic=problem.dynamic, **sizes)


def problems(problem: LinearProblem, schedule: ShardSchedule, rank: int) -> dict[tuple[str, int], Descriptor]:
    """Return the problems of a rank, in the order of the steps.

    A key is the name of a step in `skuda.dispatch.shard.layer.RankWork` and its number of rows, which may
    differ between chunks. ``row_sums`` and ``channel_sums`` are products with ones.
    """
    (m, n, k), shards, part = problem.sizes, schedule.shards, schedule.parts[rank]
    found: dict[tuple[str, int], Descriptor] = {}
    if isinstance(problem, QuantizedLinearDescriptor) and shards.input != "whole":
        found |= _quantizing(problem, schedule, rank)
    if shards.axis == "n":
        if isinstance(problem, QuantizedLinearDescriptor) and shards.input != "whole":
            found |= {("layer", m): ScaledLinearDescriptor(m=m, n=part, k=k, **_same(problem)) for m in schedule.chunks}
        else:
            found |= {("layer", m): _sized(problem, m, part, k) for m in schedule.chunks}
        return found
    s8, codes, shifted = ElementKind.S8, problem.code_element, problem.shifts_activation
    sums = {"output_element": problem.sums_element, "activation_element": codes, **_of_weight(problem)}
    found |= {("sums", rows): ScaledLinearDescriptor(m=rows, n=n, k=part, **sums) for rows in schedule.chunks}
    if problem.has_weight_zero_point:
        found["row_sums", m] = ScaledLinearDescriptor(m=m, n=1, k=part, **sums | {"weight_element": s8})
    if shifted:
        found["channel_sums", 1] = ScaledLinearDescriptor(m=1, n=n, k=part, **sums | {"activation_element": s8})
    about = _same(problem) | {"has_act_zero_point": shifted, "sums_element": problem.sums_element}
    about = {name: about[name] for name in RescaleDescriptor.model_fields if name in about}
    every = len(schedule.chunks) == 1 and not schedule.scattered
    for rows in (m,) if every else (shards.rows(rows)[rank] for rows in schedule.chunks):
        found["rescale", rows] = RescaleDescriptor(m=rows, n=n, k=k, **about)
    return found


def _same(problem: LinearProblem) -> dict[str, Any]:
    """Return the fields of the `scaled_linear` that computes the layer from codes and scales."""
    return {
        "activation_element": problem.code_element,
        **_of_weight(problem),
        "output_element": problem.output,
        "epilogue": problem.epilogue,
        "has_weight_zero_point": problem.has_weight_zero_point,
        "act_scale_scope": DynamicRangeScope.TOKEN if per_row(problem) else DynamicRangeScope.TENSOR,
    }


def _of_weight(problem: LinearProblem) -> dict[str, Any]:
    return {"weight_element": problem.weight_element, "group_size": problem.group_size}


def _quantizing(
    problem: QuantizedLinearDescriptor, schedule: ShardSchedule, rank: int
) -> dict[tuple[str, int], Descriptor]:
    bounds = {"q_min": problem.q_min, "q_max": problem.q_max, "output_element": problem.code_element}
    data = {"input_element": problem.activation_element}
    rows, columns = problem.m, problem.k
    if schedule.shards.input == "rows":
        rows = schedule.rows[rank]
        if problem.nonfinite is Nonfinite.IGNORE:
            return {("quantize_rows", rows): DynamicRangeQuantizeDescriptor(n=rows, d=columns, **data, **bounds)}
    else:
        columns = schedule.columns[rank]
    return {
        ("amax", rows): AmaxDescriptor(n=rows, d=columns, **data, nonfinite=problem.nonfinite),
        ("quantize", rows): AmaxQuantizeDescriptor(n=rows, d=columns, **data, **bounds),
    }


_OF_ACTIVATION = ("activation", "act_q", "act_scale", "act_zero_point")


def held(problem: LinearProblem, schedule: ShardSchedule, rank: int) -> tuple[Argument, ...]:
    """Return the arguments that a rank passes: its parts of the weight and of the activation."""
    (m, n, k), shards = problem.sizes, schedule.shards
    rows = schedule.rows[rank] if shards.input == "rows" else m
    columns = schedule.columns[rank] if shards.input == "columns" else k
    channels, inner = (schedule.parts[rank], k) if shards.axis == "n" else (n, schedule.parts[rank])
    activation, weight = (_sized(problem, *sizes) for sizes in ((rows, n, columns), (m, channels, inner)))
    return tuple(
        given if given.name in _OF_ACTIVATION else other
        for given, other in zip(activation.arguments(), weight.arguments(), strict=True)
        if given.role not in (Role.OUTPUT, Role.SCRATCH)
    )


def _sized(problem: LinearProblem, m: int, n: int, k: int) -> LinearProblem:
    channels = "c_out" if isinstance(problem, QuantizedLinearDescriptor) else "n"
    return type(problem)(**problem.model_dump() | {"m": m, channels: n, "k": k})
