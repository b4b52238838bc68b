"""`ShardedPlan`: the chosen kernels of all ranks. `BoundShards`: the layer on one rank, ready to run."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np

from skuda.dispatch.dispatcher import Dispatcher
from skuda.dispatch.plan import Plan
from skuda.dispatch.preference import NO_PREFERENCE, PlanPreference
from skuda.dispatch.select.explanation import as_json
from skuda.dispatch.shard import layer
from skuda.dispatch.shard.explanation import MAIN, explain_shards, held, preference_of, problems, schedule
from skuda.dispatch.shard.group import Group, GroupMismatch, differing
from skuda.dispatch.shard.layer import LayerInput, RankWork, Sums
from skuda.dispatch.shard.shards import Shards
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.argument import storage_shape
from skuda.registry.device import Device
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem, Unsupported
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.text import shown
from skuda.registry.value import expect

_OF_WEIGHT = ("weight_scale", "weight_zero_point", "bias", "output_scale", "output_zero_point")
"""Arguments of the epilogue, besides those of the activation."""


class ShardedGuarantee(PrecisionGuarantee):
    """The promises of a layer on several ranks.

    Attributes
    ----------
    shard_invariant : bool
        The result has the same bits for every number of ranks, also for one: every step is bit-exact, and nothing is
        rounded between the steps.
    """

    shard_invariant: bool

    def describe(self) -> str:
        """Return the promise as one line of text."""
        return super().describe() + (", shard-invariant" if self.shard_invariant else "")


@dataclass(frozen=True)
class ShardedPlan:
    """The chosen kernels of every rank. `bind` makes the plan ready to run on one rank.

    Attributes
    ----------
    problem : LinearProblem
        The whole layer.
    shards : Shards
        How it is split.
    device : Device
        The kind of device of the ranks.
    preference : PlanPreference
        The caller's requirements.
    kernels : tuple
        The steps of every rank, with the ids of their kernels.
    precision_guarantee : ShardedGuarantee
        The promises that all steps make.
    """

    problem: LinearProblem
    shards: Shards
    device: Device
    preference: PlanPreference
    kernels: tuple[tuple[tuple[str, str], ...], ...]
    precision_guarantee: ShardedGuarantee
    _dispatcher: Dispatcher = field(repr=False, compare=False)

    @property
    def properties(self) -> dict[str, Any]:
        """The properties that all ranks must have in common, by name."""
        return {
            "version": version("skuda"),
            "registry": self._dispatcher.registry.digest,
            "problem": as_json(self.problem),
            "shards": as_json(self.shards),
            "kernels": self.kernels,
        }

    def bind(self, group: Group, name: str = "") -> BoundShards:
        """Check that all ranks have selected the same, then make the plan ready on this rank.

        Parameters
        ----------
        group : Group
            The ranks. All of them call this.
        name : str
            Name of the layer. It tells layers with equal problems apart, in case the ranks run them in other orders.

        Raises
        ------
        InvalidProblem
            For an argument of the wrong type, and a group with another number of ranks than the plan.
        GroupMismatch
            If the ranks selected differently, on every rank.
        GroupBroken
            If a rank does not take part.
        """
        expect("ShardedPlan.bind", "group", group, Group, "be a Group, such as one of on_ranks, or a TorchGroup")
        expect("ShardedPlan.bind", "name", name, str, "be a string")
        properties = {"layer": name, **self.properties, "ranks": group.count}
        compare(group, properties)
        if group.count != self.shards.count:
            rule = f"have the {self.shards.count} ranks of the plan"
            raise InvalidProblem("ShardedPlan.bind", "group", f"{group.count} ranks", rule)
        way = schedule(self.problem, self.shards)
        plans = {
            (step, rows): self._dispatcher.select(local, preference_of(step, self.preference), self.device)
            for (step, rows), local in problems(self.problem, way, group.rank).items()
        }
        return BoundShards(self, group, name, way, plans)


def select_shards(
    dispatcher: Dispatcher,
    problem: LinearProblem,
    shards: Shards,
    preference: PlanPreference | None = NO_PREFERENCE,
    device: Device | str | None = None,
) -> ShardedPlan:
    """Choose the kernels for a linear layer that the ranks of a group share.

    Every rank calls this with the same arguments, on its own device, and binds the plan to the group.

    Parameters
    ----------
    dispatcher : Dispatcher
        Chooses the kernel of each step.
    problem : Descriptor
        The whole linear layer, with its whole sizes.
    shards : Shards
        How the layer is split.
    preference, device
        As in `Dispatcher.select`. A `sku` names the kernel of the product.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, an unknown device, or a problem that cannot be split this way.
    Unsupported
        If a step of a rank has no kernel. The error carries every reason.
    """
    explanation = explain_shards(dispatcher, problem, shards, preference, device)
    if explanation.refused is not None:
        raise Unsupported(explanation.refused)
    kernels = explanation.chosen or ()
    steps = dict.fromkeys(step for rank in kernels for step in rank)
    skus = [(name, sku) for name, kernel in steps if (sku := dispatcher.registry.sku(kernel)) is not None]
    main = next(sku.precision_guarantee for name, sku in skus if name in MAIN)
    least = _least(main, [sku.precision_guarantee for _, sku in skus])
    on = explanation.steps[0].explanation.device
    return ShardedPlan(problem, shards, on, preference or NO_PREFERENCE, kernels, least, dispatcher)


def _least(main: PrecisionGuarantee, promises: list[PrecisionGuarantee]) -> ShardedGuarantee:
    """Return the promises that all guarantees make, with the math and accumulator of the product."""
    flags = ("deterministic", "bit_stable_on_same_hardware", "batch_invariant")
    ulps = [one.max_ulp for one in promises]
    numbers = [ulp for ulp in ulps if ulp is not None]
    return ShardedGuarantee(
        math_precision=main.math_precision,
        accumulator=main.accumulator,
        max_ulp=max(numbers) if len(numbers) == len(ulps) else None,
        shard_invariant=all(one.bit_exact for one in promises),
        **{flag: all(getattr(one, flag) for one in promises) for flag in flags},
    )


def compare(group: Group, properties: Mapping[str, Any]) -> None:
    """Check that all ranks have the same properties.

    Raise `GroupMismatch` if they differ, on every rank. The error names the first difference, and the ranks.
    """
    texts = group.exchange(json.dumps(properties, sort_keys=True, default=str))
    if not differing(texts):
        return
    heard = [json.loads(text) for text in texts]
    for name in (*properties, *(name for one in heard for name in one)):
        found = differing(tuple(json.dumps(one.get(name), sort_keys=True) for one in heard))
        if found:
            raise GroupMismatch(name, found)


class BoundShards:
    """A layer on one rank of a group, ready to run.

    Attributes
    ----------
    plan : ShardedPlan
        The plan.
    """

    def __init__(
        self,
        plan: ShardedPlan,
        group: Group,
        name: str,
        way: layer.ShardSchedule,
        plans: Mapping[tuple[str, int], Plan],
    ) -> None:
        self.plan, self._group, self._way, self._plans = plan, group, way, plans
        self._held = held(plan.problem, way, group.rank)
        text = json.dumps(plan.properties, sort_keys=True, default=str)
        self._call = f"{name or plan.problem.op_name()} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._known: dict[tuple[Any, ...], Any] = {}

    def run(self, *, stream: object = None, **arrays: Any) -> Any:
        """Run the layer. Every rank calls this.

        Parameters
        ----------
        stream : object
            As in `Plan.run`.
        **arrays
            This rank's parts of the layer's inputs, by name. ``shards.input`` says which part of the activation that
            is. Scales, zero points and bias are those of the rank's output channels.

        Returns
        -------
        array
            This rank's part of the output; see ``shards.output``.

        Raises
        ------
        InvalidProblem
            For a missing, unknown or unsuitable argument.
        GroupMismatch
            If another rank runs another layer.
        GroupBroken
            If another rank does not take part.
        """
        self._check(arrays)
        self._group.agree(self._call)
        problem, steps = self.plan.problem, self._steps(arrays, stream)
        if problem.dynamic:
            activation = LayerInput(arrays["activation"])
        else:
            codes = arrays["act_q"]
            activation = LayerInput(codes, *self._scales(problem, codes, arrays))
        return layer.run(self._way, steps, self._group, activation)

    def _check(self, arrays: Mapping[str, Any]) -> None:
        name, wanted = type(self.plan.problem).__name__, {argument.name: argument for argument in self._held}
        for unknown in arrays.keys() - wanted.keys():
            raise InvalidProblem(name, unknown, "given", f"be left out: the arguments are {', '.join(wanted)}")
        for argument in wanted.values():
            given = arrays.get(argument.name)
            if given is None:
                raise InvalidProblem(name, argument.name, "nothing", "be given")
            shape = getattr(given, "shape", None)
            shape = list(shape) if isinstance(shape, tuple) else None
            stored = list(storage_shape(argument.shape, argument.elements[0]))
            if not argument.is_scalar and shape != stored:
                had = shown(given) if shape is None else f"shape {shape}"
                rule = f"have shape {stored} on rank {self._group.rank}"
                raise InvalidProblem(name, argument.name, had, rule)

    def _scales(self, problem: LinearProblem, like: Any, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return scales and zero points of codes. Fields of the problem become arrays of one element."""
        if "act_scale" in arrays:
            return arrays["act_scale"], arrays.get("act_zero_point")
        zero_point = getattr(problem, "act_zero_point", 0)
        return (
            self._filled(like, (1,), getattr(problem, "act_scale", 1.0), problem.compute),
            self._filled(like, (1,), zero_point, ElementKind.S32) if zero_point else None,
        )

    def _filled(self, like: Any, shape: tuple[int, ...], value: float, element: ElementKind) -> Any:
        """Return a kept array filled with one value, in the framework and on the device of another array."""
        key = (shape, value, element, getattr(like, "device", None))
        if key not in self._known:
            if isinstance(like, np.ndarray):
                self._known[key] = np.full(shape, value, storage_dtype(element))
            else:
                torch, name = sys.modules["torch"], storage_dtype(element).name
                self._known[key] = torch.full(shape, value, dtype=getattr(torch, name), device=like.device)
        return self._known[key]

    def _steps(self, arrays: Mapping[str, Any], stream: object) -> RankWork:
        weight, names = arrays["weight_q"], {name for name, _ in self._plans}
        about = {name: arrays[name] for name in _OF_WEIGHT if name in arrays}

        def run(step: str, rows: int, **given: Any) -> Any:
            present = {name: array for name, array in given.items() if array is not None}
            return self._plans[step, rows].run(stream=stream, **present)

        def ones(count: int) -> Any:
            return self._filled(weight, (1, count), 1, ElementKind.S8)

        def inner() -> int:
            return int(self._plans["channel_sums", 1].problem.arguments()[0].shape[1])

        def rescale(whole: Sums, activation: LayerInput) -> Any:
            sums = {"sums": whole.products, "act_sums": whole.of_rows, "weight_sums": whole.of_channels}
            scales = {"act_scale": activation.scale, "act_zero_point": activation.zero_point}
            return run("rescale", len(whole.products), **sums, **scales, **about)

        def product(activation: LayerInput) -> Any:
            rows = len(activation.data)
            given = {"activation" if activation.scale is None else "act_q": activation.data}
            if self._plans["layer", rows].problem.op_name() == "scaled_linear":
                given |= {"act_scale": activation.scale, "act_zero_point": activation.zero_point}
            return run("layer", rows, **given, weight_q=weight, **about)

        of_zero_points: dict[str, Any] = {
            "row_sums": lambda codes: run("row_sums", len(codes), act_q=codes, weight_q=ones(codes.shape[1]))[:, 0],
            "channel_sums": lambda: run("channel_sums", 1, act_q=ones(inner()), weight_q=weight)[0],
        }

        def amax(data: Any) -> Any:
            return run("amax", len(data), input=data)

        def quantize(data: Any, amax: Any) -> Any:
            return run("quantize", len(data), input=data, amax=amax)[:2]

        def quantize_rows(data: Any) -> Any:
            step = "quantize_rows"
            return run(step, len(data), input=data)[:2] if step in names else quantize(data, amax(data))

        return RankWork(
            amax=amax,
            quantize=quantize,
            quantize_rows=quantize_rows,
            sums=lambda codes: run("sums", len(codes), act_q=codes, weight_q=weight),
            rescale=rescale,
            layer=product,
            **{step: sums for step, sums in of_zero_points.items() if step in names},
        )
