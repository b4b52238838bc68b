"""Derives the problem of each rank from a linear layer and its shards."""

from __future__ import annotations

from typing import Any

from skuda.dispatch.shard.cost import Traffic
from skuda.dispatch.shard.layer import Course
from skuda.dispatch.shard.shards import Shards
from skuda.kernels.linear.problem import LinearProblem, longest_k
from skuda.kernels.linear.quantized_linear import QuantizedLinearDescriptor
from skuda.kernels.linear.rescale import RescaleDescriptor
from skuda.kernels.linear.scaled_linear import ScaledLinearDescriptor
from skuda.kernels.quantize.amax import AmaxDescriptor
from skuda.kernels.quantize.amax_quantize import AmaxQuantizeDescriptor
from skuda.kernels.quantize.dynamic_range import DynamicRangeQuantizeDescriptor
from skuda.registry.descriptor import Argument, Descriptor, Role
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.vocabulary import DynamicRangeScope

MAIN = ("layer", "sums")
"""The names of the product. A layer has one of them."""


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
    if problem.output is ElementKind.S32:
        raise InvalidProblem(name, "output_element", "s32", "be the output's element: a split layer adds up the sums")
    _, n, k = problem.sizes
    shards.parts(n, k)
    if shards.input == "columns":
        shards.columns(k)
    if shards.axis == "k":
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


def course(problem: LinearProblem, shards: Shards) -> Course:
    """Return the course of a layer on the ranks."""
    return Course.of(shards, traffic(problem))


def per_row(problem: LinearProblem) -> bool:
    """Whether each row of the activation has a scale of its own."""
    return problem.dynamic or getattr(problem, "act_scale_scope", None) is DynamicRangeScope.TOKEN


def traffic(problem: LinearProblem) -> Traffic:
    """Return the facts on which the cost of a layer's exchanges depends."""
    m, n, k = problem.sizes
    beside = 0
    if per_row(problem):
        beside = problem.compute.bits // 8 + 4 * bool(getattr(problem, "has_act_zero_point", False))
    return Traffic(m=m, n=n, k=k, output_bytes=problem.output.bits // 8, dynamic=problem.dynamic, scale_bytes=beside)


def problems(problem: LinearProblem, course: Course, rank: int) -> dict[tuple[str, int], Descriptor]:
    """Return the problems of a rank, in the order of the steps.

    A key is the name of a step in `skuda.dispatch.shard.layer.Steps` and its number of rows, which may differ between
    chunks. ``row_sums`` and ``channel_sums`` are products with ones.
    """
    (m, n, k), shards, part = problem.sizes, course.shards, course.parts[rank]
    found: dict[tuple[str, int], Descriptor] = {}
    if isinstance(problem, QuantizedLinearDescriptor) and shards.input != "whole":
        found |= _quantizing(problem, course, rank)
    if shards.axis == "n":
        if isinstance(problem, QuantizedLinearDescriptor) and shards.input != "whole":
            found |= {("layer", m): ScaledLinearDescriptor(m=m, n=part, k=k, **_same(problem)) for m in course.chunks}
        else:
            found |= {("layer", m): _sized(problem, m, part, k) for m in course.chunks}
        return found
    s8, codes, shifted = ElementKind.S8, problem.code_element, problem.shifts_activation
    sums = {"output_element": ElementKind.S32, "activation_element": codes, **_of_weight(problem)}
    found |= {("sums", rows): ScaledLinearDescriptor(m=rows, n=n, k=part, **sums) for rows in course.chunks}
    if problem.has_weight_zero_point:
        found["row_sums", m] = ScaledLinearDescriptor(m=m, n=1, k=part, **sums | {"weight_element": s8})
    if shifted:
        found["channel_sums", 1] = ScaledLinearDescriptor(m=1, n=n, k=part, **sums | {"activation_element": s8})
    about = _same(problem) | {"has_act_zero_point": shifted}
    about = {name: about[name] for name in RescaleDescriptor.model_fields if name in about}
    every = len(course.chunks) == 1 and not course.scattered
    for rows in (m,) if every else (shards.rows(rows)[rank] for rows in course.chunks):
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


def _quantizing(problem: QuantizedLinearDescriptor, course: Course, rank: int) -> dict[tuple[str, int], Descriptor]:
    bounds = {"q_min": problem.q_min, "q_max": problem.q_max, "output_element": problem.code_element}
    data = {"input_element": problem.activation_element}
    if course.shards.input == "rows":
        rows = course.rows[rank]
        return {("quantize_rows", rows): DynamicRangeQuantizeDescriptor(n=rows, d=problem.k, **data, **bounds)}
    size = {"n": problem.m, "d": course.columns[rank]}
    return {
        ("amax", problem.m): AmaxDescriptor(**size, **data),
        ("quantize", problem.m): AmaxQuantizeDescriptor(**size, **data, **bounds),
    }


_OF_ACTIVATION = ("activation", "act_q", "act_scale", "act_zero_point")


def held(problem: LinearProblem, course: Course, rank: int) -> tuple[Argument, ...]:
    """Return the arguments that a rank passes: its parts of the weight and of the activation."""
    (m, n, k), shards = problem.sizes, course.shards
    rows = course.rows[rank] if shards.input == "rows" else m
    columns = course.columns[rank] if shards.input == "columns" else k
    channels, inner = (course.parts[rank], k) if shards.axis == "n" else (n, course.parts[rank])
    activation, weight = (_sized(problem, *sizes) for sizes in ((rows, n, columns), (m, channels, inner)))
    return tuple(
        given if given.name in _OF_ACTIVATION else other
        for given, other in zip(activation.arguments(), weight.arguments(), strict=True)
        if given.role not in (Role.OUTPUT, Role.SCRATCH)
    )


def _sized(problem: LinearProblem, m: int, n: int, k: int) -> LinearProblem:
    channels = "c_out" if isinstance(problem, QuantizedLinearDescriptor) else "n"
    return type(problem)(**problem.model_dump() | {"m": m, channels: n, "k": k})
