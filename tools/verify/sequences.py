"""Rows of ops on a paged cache, in other batches: sequences in another order, fewer of them, and rows alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import PAGE, CacheProblem
from skuda.tools.verify.problems import axes_of

Array = npt.NDArray[Any]
Tables = dict[str, Array]


class Batch(NamedTuple):
    """Some rows of a problem as a problem of their own.

    Attributes
    ----------
    problem : CacheProblem
        The new problem.
    tables : dict of str to array
        Its `block_table`, `lengths` and `starts`.
    picked : dict of str to array
        For each argument with a row for every token, or for every page, the old rows and pages in their new order.
    """

    problem: CacheProblem
    tables: Tables
    picked: dict[str, Array]

    def inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the new problem."""
        return {name: array[self.picked[name]] if name in self.picked else array for name, array in inputs.items()} | (
            self.tables
        )


def _picked(problem: CacheProblem, rows: Array, pages: Array) -> dict[str, Array]:
    axes = axes_of(problem)
    found = {name: rows for name, axis in axes["tokens", None] if axis == 0}
    return found | {name: pages for name, axis in axes["pages", None] if axis == 0}


def rearranged(problem: CacheProblem, tables: Tables, order: Array, rng: np.random.Generator) -> Batch:
    """Return some sequences in an order, with all pages permuted; rows of no sequence stay if all sequences do."""
    starts, pages = tables["starts"].astype(int), rng.permutation(problem.pages)
    spans = [np.arange(starts[s], starts[s + 1]) for s in order]
    counts = [len(span) for span in spans]
    if len(order) == problem.sequences:
        spans.append(np.arange(starts[-1], problem.tokens))
    rows = np.concatenate(spans).astype(int) if spans else np.zeros(0, int)
    table = tables["block_table"][order]
    known = (table >= 0) & (table < problem.pages)
    moved = np.argsort(pages)[np.where(known, table, 0)] if problem.pages else table
    new = {
        "block_table": np.where(known, moved, table).astype(np.int32),
        "lengths": tables["lengths"][order],
        "starts": np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
    }
    part = problem.model_copy(update={"tokens": len(rows), "sequences": len(order)})
    return Batch(part, new, _picked(problem, rows, pages))


def alone(problem: AttentionDescriptor, tables: Tables, rows: Array) -> Batch:
    """Return each of some rows as the only new one of a sequence of its own, in a cache of the pages that they need."""
    starts, lengths = tables["starts"].astype(int), tables["lengths"].astype(int)
    owners = np.searchsorted(starts, rows, side="right") - 1  # the last one for rows of no sequence
    owned = owners < problem.sequences
    of = np.where(owned, owners, 0)
    positions = np.where(owned, lengths[of] - starts[of + 1] + rows, -1)
    seen = np.where(positions < 0, 0, positions + 1 if problem.causal else lengths[of])
    table = tables["block_table"][of]
    needed = np.arange(problem.most_blocks) < -(-seen // PAGE)[:, None]
    pages, moved = np.unique(table[needed], return_inverse=True)
    own = np.full(table.shape, -1, np.int32)
    own[needed] = moved
    sizes = {"tokens": len(rows), "sequences": len(rows), "pages": len(pages)}
    new = {"block_table": own, "lengths": seen.astype(np.int32), "starts": np.arange(len(rows) + 1, dtype=np.int32)}
    return Batch(problem.model_copy(update=sizes), new, _picked(problem, rows, pages))
