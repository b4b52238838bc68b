"""Splits a linear layer over several devices, with the bits of one device."""

from __future__ import annotations

from skuda.dispatch.shard.cost import Traffic, Transfer
from skuda.dispatch.shard.explanation import ShardedExplanation, ShardedStep, explain_shards
from skuda.dispatch.shard.group import Group, GroupBroken, GroupMismatch
from skuda.dispatch.shard.local import on_ranks
from skuda.dispatch.shard.plan import BoundShards, ShardedGuarantee, ShardedPlan, select_shards
from skuda.dispatch.shard.shards import NVLINK, Link, Shards, split

__all__ = [
    "NVLINK",
    "BoundShards",
    "Group",
    "GroupBroken",
    "GroupMismatch",
    "Link",
    "ShardedExplanation",
    "ShardedGuarantee",
    "ShardedPlan",
    "ShardedStep",
    "Shards",
    "Traffic",
    "Transfer",
    "explain_shards",
    "on_ranks",
    "select_shards",
    "split",
]
