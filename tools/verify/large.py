"""The check of arrays of more than 2^31 bytes, which are too large for a reference.

The inputs are copies of a small problem's inputs. The outputs are therefore copies of its outputs, which the device
compares. Whole rows are repeated, so the range over all rows equals the range of one copy. Of a paged cache, sequences
and pages are repeated, and each copy of the tables names its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skuda.kernels.attention.cache import CacheProblem
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.errors import Unsupported
from skuda.registry.op import Case
from skuda.tools.verify.batches import whole_sequences
from skuda.tools.verify.compare import Broken, NotRun, allowed_ulps, difference, differing
from skuda.tools.verify.placement import GUARD, OUTSIDE, Geometry, is_float
from skuda.tools.verify.trial import Trial, answer, sizes_of

Array = npt.NDArray[Any]
TOTAL, PIECE, MEMORY = 1 << 31, 1 << 20, 24 << 30
"""Bytes that the largest array exceeds; elements, or approximate bytes, of one copy, even, so that packed elements
start at a byte; and bytes of device memory below which the check is left out."""
ALIGNED = 16
"""The rows of a copy are a multiple of this, so that they fill the units of a packed weight."""


class Large(NamedTuple):
    """A problem made of `copies` copies of a small one."""

    small: Descriptor
    problem: Descriptor
    copies: int


def large_problem(trial: Trial) -> Large | None:
    """Return a large problem of a kernel; None if all its cases are empty, or have no axis to grow along."""
    problems = [each.case.problem for each in trial.cases if each.own and _bytes(each.case.problem)]
    cached = [problem for problem in problems if isinstance(problem, CacheProblem) and problem.sequences > 1]
    if cached:
        small = min((each for each in cached if each.tokens), key=lambda each: each.tokens / each.pages)  # most cache
        copies = TOTAL // _bytes(small) + 2
        return Large(small, _repeated(small, copies), copies)
    # Rows of one element and rows of megabytes are both unsuitable for repetition.
    base = min(problems, key=lambda problem: abs(math.log2(_bytes(problem)) - 12), default=None)
    if base is None or (one := _grown(base, 64)) is None:
        return None
    extent = PIECE
    if "numel" not in type(base).model_fields:
        extent = ALIGNED * -(-PIECE // (ALIGNED * max(1, _bytes(one) // 64)))
    few = _grown(base, extent)
    assert few is not None
    copies = TOTAL // _bytes(few) + 2
    many = _grown(base, copies * extent)
    assert many is not None
    return Large(few, many, copies)


def _repeated(problem: Descriptor, copies: int) -> Descriptor:
    sizes = {name: copies * getattr(problem, name) for name in ("tokens", "sequences", "pages")}
    return problem.model_copy(update=sizes)


def _tables(problem: Any, inputs: Mapping[str, Any], copies: int) -> dict[str, Array]:
    """Return the tables of copies of a problem all of whose rows belong to sequences."""
    each, table = np.arange(copies, dtype=np.int32)[:, None, None], inputs["block_table"]
    known = (table >= 0) & (table < problem.pages)
    starts = (inputs["starts"][:-1] + problem.tokens * each[:, 0]).reshape(-1)
    return {
        "block_table": np.where(known, table + problem.pages * each * known, table).reshape(-1, table.shape[1]),
        "lengths": np.tile(inputs["lengths"], copies),
        "starts": np.append(starts, problem.tokens * copies).astype(np.int32),
    }


def _grown(problem: Descriptor, extent: int) -> Descriptor | None:
    """Return a problem with another extent of its first axis; None if it has no such axis."""
    fields = type(problem).model_fields
    if "shape" in fields:
        shape: tuple[int, ...] = getattr(problem, "shape", ())
        return problem.model_copy(update={"shape": (extent, *shape[1:])})
    name = next((name for name in ("numel", "m", "outer_size", "n") if name in fields), None)
    return None if name is None else problem.model_copy(update={name: extent})


def _bytes(problem: Descriptor) -> int:
    """Return the size of the largest array in bytes."""
    return max(sizes_of(problem), default=0)


def check_large(trial: Trial) -> None:
    """Check that arrays of more than 2^31 bytes are right: offsets take 64 bits."""
    if trial.device.memory < MEMORY:
        raise NotRun(f"it takes a device with {MEMORY >> 30} GiB of memory")
    large = large_problem(trial)
    if large is None:
        raise NotRun("no case of its op can be repeated")
    large, inputs, tables = _drawn(trial, large)
    try:
        plan = trial.fresh(large.problem)  # a cached plan would keep gigabytes of scratch allocated
    except Unsupported as error:
        raise NotRun(f"it refuses a problem of {TOTAL:,} bytes: {error}".partition("\n")[0]) from error
    want = answer(trial.op, large.small, inputs)
    arrays, copied = dict(inputs), dict[str, tuple[Any, Any, Any]]()
    for one, whole in zip(large.small.arguments(), large.problem.arguments(), strict=True):
        content = want.get(one.name) if one.role is Role.OUTPUT else tables.get(one.name, inputs.get(one.name))
        if isinstance(content, np.ndarray):
            grows = not one.is_scalar and one.shape != whole.shape and one.name not in tables
            copies = large.copies if grows else 1
            shape = (content.shape[0] * copies, *content.shape[1:]) if copies > 1 else content.shape
            word = np.dtype(np.int8 if content.nbytes % 8 else np.int64)  # a device compares wide elements faster
            buffer = trial.placement.full(Geometry.of(shape, content.dtype).size, OUTSIDE[0])
            rows = trial.placement.view(buffer, Geometry.of((copies, content.nbytes // word.itemsize), word))
            poison = np.full(content.nbytes, 0xFF if is_float(content.dtype) else 0xA6, np.uint8)
            filled = poison if one.role is Role.OUTPUT else np.ascontiguousarray(content).reshape(-1)
            first = trial.placement.upload(filled.view(word))
            rows[...] = first
            copied[one.name] = buffer, rows, first
            arrays[one.name] = trial.placement.view(buffer, Geometry.of(shape, content.dtype))
    plan.run(**{name: value for name, value in arrays.items() if value is not None})
    trial.runs += 1
    for name, (buffer, rows, first) in copied.items():
        behind = GUARD + math.prod(rows.shape) * (1 if rows.dtype.itemsize == 1 else 8)
        zones = (trial.placement.download(zone) for zone in (buffer[:GUARD], buffer[behind:]))
        if any((zone != OUTSIDE[0]).any() for zone in zones):
            raise Broken("memory beside an array of a large problem was written", output=name)
        if name not in want and bool((rows != first).any()):
            raise Broken("an input of a large problem was written", output=name)
    for name, expected in want.items():
        _compare(trial, large, name, expected, copied[name][1])


def _drawn(trial: Trial, large: Large) -> tuple[Large, dict[str, Any], dict[str, Array]]:
    """Return a large problem, the inputs of the small one, and the tables of a cache for all copies.

    The rows of a cache that the drawn tables give to no sequence are left out.
    """
    inputs = dict(trial.examples.of(Case(large.small)).drawn.inputs)
    if isinstance(large.small, CacheProblem):
        batch = whole_sequences(large.small, inputs)
        inputs = batch.inputs(inputs)
        whole = Large(batch.problem, _repeated(batch.problem, large.copies), large.copies)
        return whole, inputs, _tables(batch.problem, inputs, large.copies)
    # A flat problem's inputs may have several axes; its copies are joined along a single one.
    flat = {argument.name for argument in large.problem.arguments() if argument.flat}
    return large, {k: v.reshape(-1) if k in flat and isinstance(v, np.ndarray) else v for k, v in inputs.items()}, {}


def _compare(trial: Trial, large: Large, name: str, want: Array, rows: Any) -> None:
    """Compare all copies with the first on the device; compare the first, and those that differ, on the host."""
    element = next(a.elements[0] for a in large.problem.arguments() if a.name == name)
    ulps = allowed_ulps(trial.sku, large.small, element)
    if ulps is None:
        return
    others = np.flatnonzero(trial.placement.download((rows != rows[0]).any(1)))
    trial.outputs += want.size * len(rows)
    for copy in (0, *map(int, others)):
        got = trial.placement.download(rows[copy]).view(want.dtype).reshape(want.shape)
        bad = differing(got, want, ulps)
        if bad.any():
            found = difference(name, bad, got, want, f"copy {copy} of {len(rows)} in {large.problem!r}")
            at = tuple(i + (copy * want.shape[0] if axis == 0 else 0) for axis, i in enumerate(found["at"]))
            raise Broken(**{**found, "at": at})
