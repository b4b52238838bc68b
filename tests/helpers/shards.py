"""Each rank's part of a split layer's inputs and output."""

from __future__ import annotations

from skuda.dispatch.shard.problems import course
from skuda.dispatch.shard.shards import own

WAYS = [
    *(("n", given, wanted) for given in ("whole", "rows", "columns") for wanted in ("columns", "whole")),
    *(("k", "columns", wanted) for wanted in ("rows", "whole")),
]
"""Axis, input and output of every way to split a layer."""


def part(problem, shards, rank, inputs):
    """What a rank has of a layer's inputs."""
    way, cut = course(problem, shards), dict(inputs)
    scales = ("act_scale", "act_zero_point") if way.per_row else ()
    if shards.input == "rows":
        cut |= {n: own(inputs[n], 0, way.rows, rank) for n in ("activation", "act_q", *scales) if n in inputs}
    if shards.input == "columns":
        cut |= {n: own(inputs[n], 1, way.columns, rank) for n in ("activation", "act_q") if n in inputs}
    if shards.axis == "k":
        cut["weight_q"] = own(inputs["weight_q"], 1, way.parts, rank)
    else:
        names = ("weight_q", "weight_scale", "weight_zero_point", "bias")
        cut |= {n: own(inputs[n], 0, way.parts, rank) for n in names if n in inputs}
    return cut


def wanted_of(whole, problem, shards, rank):
    """What a rank should get of the whole output."""
    way = course(problem, shards)
    if shards.output == "rows":
        return own(whole, 0, way.rows, rank)
    return own(whole, 1, way.parts, rank) if shards.output == "columns" else whole
