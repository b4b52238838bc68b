"""``--shard I/N``: which part of its work a command does."""

from __future__ import annotations

import re

from skuda.dispatch.select.work import WorkShard
from skuda.registry.errors import InvalidProblem
from skuda.tools.output import count, tell

_SHARD = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})")


def read_shard(command: str, text: str, *, seed: int | None) -> tuple[int, int]:
    """Return index and count of a shard of a record.

    Raises
    ------
    InvalidProblem
        If the text is no shard, or if there is no seed: a record of all shards has one.
    """
    found = shard_numbers(command, text)
    if seed is None:
        raise InvalidProblem(command, "--shard", f"{text} without --seed", "stand beside --seed, equal for all shards")
    return found


def shard_numbers(command: str, text: str) -> tuple[int, int]:
    """Return index and count of a shard; raise `InvalidProblem` for a text that is none."""
    found = _SHARD.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise InvalidProblem(command, "--shard", repr(text), "be I/N with I from 1 to N, such as 2/4")
    return int(found[1]), int(found[2])


def tell_shard(shard: WorkShard, noun: str) -> None:
    """Print how much of the work a shard is."""
    if shard.size:
        tell(f"shard {shard.label}: {shard.size} of {count(shard.total, noun)}", "dim")
    else:
        tell(f"shard {shard.label} is empty: there {'is' if shard.total == 1 else 'are'} {count(shard.total, noun)}")
