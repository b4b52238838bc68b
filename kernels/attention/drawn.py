"""Random tables and scales of a paged cache, for tests and ``skuda verify``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.kernels.attention.cache import PAGE, CacheProblem
from skuda.registry.op import Values

Array = npt.NDArray[Any]


def drawn_tables(problem: CacheProblem, blocks: int, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    """Return `block_table`, `lengths` and `starts`, and which slots some sequence names, as bool [pages, 128].

    Sequences have at most `blocks` pages, of the columns that the table has. Pages lie in any order, and sequences
    share some. Entries that no length needs are outside of the pages. Some sequences begin with rows of padding.
    """
    most = min(problem.most_blocks, blocks) * PAGE if problem.pages else 0
    shares = np.sort(rng.integers(0, problem.tokens + 1, max(problem.sequences - 1, 0)))
    ends = np.append(shares, problem.tokens - (rng.integers(0, 2) if problem.tokens > 1 else 0))[: problem.sequences]
    new = np.minimum(np.diff(np.maximum.accumulate(ends), prepend=0), most)
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    lengths = rng.integers(new, most, endpoint=True).astype(np.int32)
    lengths = np.where(rng.random(problem.sequences) < 0.2, new, lengths).astype(np.int32)
    padded = rng.random(problem.sequences) < rng.choice([0, 0.3])
    lengths = np.where(padded, rng.integers(0, new, endpoint=True), lengths).astype(np.int32)
    table = rng.integers(0, max(problem.pages, 1), (problem.sequences, problem.most_blocks), np.int32)
    nowhere = rng.choice(np.array([-1, problem.pages, 2**31 - 1], np.int32), (problem.sequences, 1))
    table = np.where(np.arange(problem.most_blocks) * PAGE < lengths[:, None], table, nowhere)
    tables = {"block_table": table, "lengths": lengths, "starts": starts}
    return tables, named_slots(problem.pages, table, lengths)


def named_slots(pages: int, block_table: Array, lengths: Array) -> Array:
    """Return which slots of a cache some position of a sequence names, as bool [pages, 128]."""
    left = lengths[:, None] - np.arange(block_table.shape[1], dtype=np.int64) * PAGE
    filled = np.zeros(pages, np.int64)
    np.maximum.at(filled, block_table[left > 0], left[left > 0])
    return np.asarray(np.arange(PAGE) < filled[:, None])


def full_tables(problem: CacheProblem, rng: np.random.Generator) -> dict[str, Array]:
    """Return the tables of sequences with equally many rows, whose tables are full of pages of their own, in any order.

    For `pages` of at least `sequences` times `most_blocks`.
    """
    pages = rng.permutation(problem.pages)[: problem.sequences * problem.most_blocks]
    each = problem.tokens // max(problem.sequences, 1)
    return {
        "block_table": pages.astype(np.int32).reshape(problem.sequences, problem.most_blocks),
        "lengths": np.full(problem.sequences, problem.most_blocks * PAGE, np.int32),
        "starts": np.arange(problem.boundaries, dtype=np.int32) * np.int32(each),
    }


def drawn_scales(shape: tuple[int, ...], unit: float, values: Values, rng: np.random.Generator) -> Array:
    """Return f32 scales around `unit`, some of them 0; for ``special``, a few of any size or not finite."""
    scales = unit * np.exp2(rng.normal(0, 1, shape)) * (rng.random(shape) > 0.1)
    if values in {"special", "infinite"}:
        odd = np.array([np.nan, np.inf, -1, 3e38, 2.0**106, 8e31, 2.0**-118, 2.0**-119, 1e-44, -0.0])
        scales = np.where(rng.random(shape) < rng.choice([0, 0.002, 0.05]), rng.choice(odd, shape), scales)
    return scales.astype(np.float32)
