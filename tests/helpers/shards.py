"""Each rank's part of a split layer's inputs and output."""

from __future__ import annotations

import numpy as np

from skuda.dispatch.shard.explanation import schedule
from skuda.dispatch.shard.shards import own, span
from skuda.kernels.blocks import halves
from skuda.kernels.linear import packed

WAYS = [
    *(("n", given, wanted) for given in ("whole", "rows", "columns") for wanted in ("columns", "whole")),
    *(("k", "columns", wanted) for wanted in ("rows", "whole")),
]
"""Axis, input and output of every way to split a layer."""


def part(problem, shards, rank, inputs):
    """What a rank has of a layer's inputs."""
    way, cut = schedule(problem, shards), dict(inputs)
    scales = ("act_scale", "act_zero_point") if way.per_row else ()
    if shards.input == "rows":
        cut |= {n: own(inputs[n], 0, way.rows, rank) for n in ("activation", "act_q", *scales) if n in inputs}
    if shards.input == "columns":
        split = not problem.dynamic and problem.code_element.is_split
        cut |= {n: _columns(inputs[n], way.columns, rank, split=split) for n in ("activation", "act_q") if n in inputs}
    if problem.weight_element == "s4":
        if shards.axis == "n":
            cut |= {n: own(inputs[n], 0, way.parts, rank) for n in ("weight_scale", "bias") if n in inputs}
        axis, weight = "nk".index(shards.axis), inputs["weight_q"]
        if packed.fits(shards.axis, way.parts):
            at = span(way.parts, rank)
            cut["weight_q"] = packed.cut(weight, shards.axis, at.start, at.stop)
        else:
            cut["weight_q"] = _part_of_packed(problem, weight, lambda a: own(a, axis, way.parts, rank), axis)
    elif shards.axis == "k":
        cut["weight_q"] = _columns(inputs["weight_q"], way.parts, rank, split=problem.weight_element.is_split)
    else:
        names = ("weight_q", "weight_scale", "weight_zero_point", "bias")
        cut |= {n: own(inputs[n], 0, way.parts, rank) for n in names if n in inputs}
    return cut


def ways_of(problem):
    """The ways to split a layer: columns of halves are not gathered."""
    return [way for way in WAYS if way[:2] != ("n", "columns") or not problem.code_element.is_split]


def _columns(array, sizes, rank, *, split):
    return (
        np.concatenate([own(half, 1, sizes, rank) for half in halves(array)], 1)
        if split
        else own(array, 1, sizes, rank)
    )


def cuttable(problem, shards, inputs):
    """Inputs with one scale and offset for all groups of a row of a packed weight, if it is cut within units."""
    _, n, k = problem.sizes
    if problem.weight_element != "s4" or packed.fits(shards.axis, shards.parts(n, k)):
        return inputs
    weight = inputs["weight_q"].copy()
    groups = weight[..., 1024:].reshape(*weight.shape[:2], 8, 128 // problem.group_size, 4)
    weight[..., 1024:] = np.broadcast_to(groups[:, :1, :, :1], groups.shape).reshape(weight[..., 1024:].shape)
    return inputs | {"weight_q": weight}


def _part_of_packed(problem, weight, own_part, axis):
    _, n, k = problem.sizes
    plain = weight.copy()
    plain[..., 1024::2], plain[..., 1025::2] = 1, 128
    levels = own_part(packed.unpacked(plain, n, k))
    groups = np.zeros((n, 2), np.int64)
    if weight.size:
        first = weight[:, 0, 1024:].reshape(-1, 8, 128 // problem.group_size, 2, 2)[:, :, 0]
        groups = first.transpose(0, 2, 1, 3).reshape(-1, 2)[:n].astype(np.int64)
    groups = own_part(groups) if axis == 0 else groups
    count = -(-levels.shape[1] // problem.group_size)
    scale, base = (np.repeat(groups[:, [at]], count, axis=1) for at in (0, 1))
    return packed.packed(levels.astype(np.uint8), scale, base - 128, problem.group_size)


def wanted_of(whole, problem, shards, rank):
    """What a rank should get of the whole output."""
    way = schedule(problem, shards)
    if shards.output == "rows":
        return own(whole, 0, way.rows, rank)
    return own(whole, 1, way.parts, rank) if shards.output == "columns" else whole
