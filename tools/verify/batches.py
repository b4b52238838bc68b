"""Rows of a problem in other batches: in another order, fewer of them, and alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skuda.kernels.attention.cache import PAGE, CacheProblem, column_of
from skuda.kernels.attention.drawn import named_slots
from skuda.registry.argument import Role
from skuda.registry.descriptor import Descriptor
from skuda.tools.verify.problems import axes_of, fewer_rows, row_arguments, row_field

if TYPE_CHECKING:  # the code of an op does not decide what is verified
    from skuda.kernels.attention.attention import AttentionDescriptor

Array = npt.NDArray[Any]
_NO_SCALES = np.array([np.nan, np.inf, -1], np.float32)


class Batch(NamedTuple):
    """Some rows of a problem, as a problem of their own.

    Attributes
    ----------
    how : str
        What the batch is, for a message.
    problem : Descriptor
        The new problem.
    picked : dict of str to array
        Of each argument that has rows, or pages of a cache, the old ones in their new order.
    tables : dict of str to array
        The new tables of sequences; empty where there are none.
    """

    how: str
    problem: Descriptor
    picked: dict[str, Array]
    tables: dict[str, Array]

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the new problem."""
        own = {name: array[self.picked[name]] if name in self.picked else array for name, array in inputs.items()}
        return own | self.tables

    def wanted(self, inputs: Mapping[str, Array], first: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs, from those of the old problem: pages that nobody writes any more are as they were."""
        found = {name: array[self.picked[name]] for name, array in first.items() if name in self.picked}
        for argument in self.problem.arguments():
            if argument.role is Role.STATE:
                name = argument.name
                new = np.isin(np.arange(len(found[name])), self._written())
                found[name][~new] = inputs[name][self.picked[name]][~new]
        return found

    def _written(self) -> Array:
        """Return the pages that new tokens are in."""
        table, lengths = self.tables["block_table"], self.tables["lengths"][:, None]
        new, block = np.diff(self.tables["starts"])[:, None], np.arange(table.shape[1])
        found: Array = table[(block >= (lengths - new) // PAGE) & (block * PAGE < lengths) & (new > 0)]
        return found


def batches_of(problem: Descriptor, inputs: Mapping[str, Any], rng: np.random.Generator) -> Iterator[Batch]:
    """Yield permuted rows and some of the rows; of a cache, sequences in permuted pages. Nothing if rows depend."""
    if isinstance(problem, CacheProblem):
        count = problem.sequences if problem.tokens else 0
        if count:
            yield _sequences("permuted sequences and pages give", problem, inputs, rng.permutation(count), rng)
        if count > 1:
            some = np.sort(rng.choice(count, -(-count // 3), replace=False))
            yield _sequences(f"{len(some)} of {count} sequences alone give", problem, inputs, some, rng)
        return
    name, fewer = row_field(problem), fewer_rows(problem)
    if name is None or fewer is None:
        return
    count = getattr(problem, name)
    order, some = rng.permutation(count), np.sort(rng.choice(count, getattr(fewer, name), replace=False))
    yield rows_of(problem, order, "permuted rows give")
    yield rows_of(problem, some, f"{len(some)} of {count} rows alone give")


def rows_of(problem: Descriptor, picked: Array, how: str = "") -> Batch:
    """Return some rows of a problem whose rows are independent, in an order."""
    part = problem.model_copy(update={row_field(problem) or "": len(picked)})
    return Batch(how, part, dict.fromkeys(row_arguments(problem), picked), {})


def _picked(problem: CacheProblem, rows: Array, pages: Array) -> dict[str, Array]:
    axes = axes_of(problem)
    found = {name: rows for name, axis in axes["tokens", None] if axis == 0}
    return found | {name: pages for name, axis in axes.get(("pages", None), ()) if axis == 0}


def _sequences(
    how: str, problem: CacheProblem, inputs: Mapping[str, Any], order: Array, rng: np.random.Generator
) -> Batch:
    """Return some sequences in an order, in permuted pages; rows of no sequence stay if all sequences do."""
    starts, pages = inputs["starts"].astype(int), rng.permutation(problem.pages)
    spans = [np.arange(starts[s], starts[s + 1]) for s in order]
    own = np.concatenate(([0], np.cumsum([len(span) for span in spans])))
    if len(order) == problem.sequences:
        spans.append(np.arange(starts[-1], problem.tokens))
    table = inputs["block_table"][order]
    known = (table >= 0) & (table < problem.pages)
    table[known] = np.argsort(pages)[table[known]]
    tables = {"block_table": table, "lengths": inputs["lengths"][order], "starts": own.astype(np.int32)}
    rows = np.concatenate(spans)
    part = problem.model_copy(update={"tokens": len(rows), "sequences": len(order)})
    return Batch(how, part, _picked(problem, rows, pages), tables)


def whole_sequences(problem: CacheProblem, inputs: Mapping[str, Any]) -> Batch:
    """Return the rows that belong to sequences, as they are."""
    rows = np.arange(int(inputs["starts"][-1]))
    part = problem.model_copy(update={"tokens": len(rows)})
    return Batch("rows of sequences give", part, _picked(problem, rows, np.arange(problem.pages)), {})


def alone(problem: AttentionDescriptor, tables: Mapping[str, Array], rows: Array) -> Batch:
    """Return each of some rows as the only new one of a sequence of its own, in a cache of the pages that they need."""
    starts, lengths = tables["starts"].astype(int), tables["lengths"].astype(int)
    owners = np.searchsorted(starts, rows, side="right") - 1  # of rows of no sequence, the number of sequences
    of = np.where(owners < problem.sequences, owners, 0)
    positions = np.where(owners < problem.sequences, lengths[of] - starts[of + 1] + rows, -1)
    seen = np.where(positions < 0, 0, positions + 1 if problem.causal else lengths[of])
    table = tables["block_table"][of]
    needed = np.arange(problem.most_blocks) < -(-seen // PAGE)[:, None]
    pages, moved = np.unique(table[needed], return_inverse=True)
    own = np.full(table.shape, -1, np.int32)
    own[needed] = moved
    part = problem.model_copy(update={"tokens": len(rows), "sequences": len(rows), "pages": len(pages)})
    new = {"block_table": own, "lengths": seen.astype(np.int32), "starts": np.arange(len(rows) + 1, dtype=np.int32)}
    return Batch("rows alone give", part, _picked(problem, rows, pages), new)


def poisoned(problem: Descriptor, inputs: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return inputs whose cache, if it is only read, holds anything at slots that no sequence names."""
    found = dict(inputs)
    if not isinstance(problem, CacheProblem) or any(one.role is Role.STATE for one in problem.arguments()):
        return found
    live = named_slots(problem.pages, inputs["block_table"], inputs["lengths"])
    columns = np.zeros_like(live)
    columns[:, column_of(np.arange(PAGE))] = live
    for name, mask in (("k_codes", live[:, None, :, None]), ("v_codes", columns[:, None, None])):
        found[name] = np.where(mask, inputs[name], rng.integers(-128, 128, inputs[name].shape, np.int8))
    for name in ("k_scale", "v_scale"):
        found[name] = np.where(live[:, None], inputs[name], rng.choice(_NO_SCALES, inputs[name].shape))
    return found
