"""Problems that are too large for a reference: 70,000 rows, and arrays of more than 2^31 bytes.

The inputs are copies of a small problem's inputs, so the outputs are copies of its outputs, and the device compares
them. Whole rows are repeated, so the range over all rows equals the range of one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skuda.dispatch.plan import Plan
from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.errors import Unsupported
from skuda.registry.op import Case, Op
from skuda.tools.verify.compare import allowed_ulps, difference, differing
from skuda.tools.verify.evidence import Failure
from skuda.tools.verify.placement import GUARD, OUTSIDE, Geometry, Placement, is_float, stored_bytes
from skuda.tools.verify.trial import Trial, answer

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the large problems.

    Attributes
    ----------
    rows : int
        Rows of the first problem: more than the 65,535 blocks of a grid's second axis.
    few : int
        Rows of one copy; divides `rows`.
    total : int
        Bytes that the largest array of the second problem exceeds.
    piece : int
        Elements, or approximate bytes, of one copy; even, so that a copy of packed elements starts at a byte.
    memory : int
        Bytes of device memory below which these problems are left out.
    """

    rows: int = 70_000
    few: int = 70
    total: int = 1 << 31
    piece: int = 1 << 20
    memory: int = 24 << 30


LARGE = Sizes()


@dataclass(frozen=True)
class Large:
    """A problem made of `copies` copies of a small one; `name` says what is large about it."""

    small: Descriptor
    problem: Descriptor
    copies: int
    name: str


def suitable(problems: Iterable[Descriptor]) -> Descriptor | None:
    """Return the problem whose largest array is nearest to 4 KiB, or None if all are empty.

    Rows of one element and rows of megabytes are both unsuitable for repetition.
    """
    return min(
        (problem for problem in problems if _bytes(problem)),
        key=lambda problem: abs(math.log2(_bytes(problem)) - 12),
        default=None,
    )


def large_problems(problem: Descriptor, sizes: Sizes = LARGE) -> Iterator[Large]:
    """Yield large problems derived from a small one; none if it is empty or has no axis to grow along."""
    if _bytes(problem) == 0:
        return
    if _flat(problem):
        small = problem.model_copy(update={"numel": sizes.piece})
    else:
        few = grown(problem, sizes.few)
        if few is None:
            return
        yield Large(few, _grown(problem, sizes.rows), sizes.rows // sizes.few, f"{sizes.rows:,} rows")
        row = max(1, _bytes(_grown(problem, 64)) // 64)
        small = _grown(problem, max(1, sizes.piece // row))
    copies = sizes.total // _bytes(small) + 2
    extent = copies * (sizes.piece if _flat(problem) else _rows(small))
    large = problem.model_copy(update={"numel": extent}) if _flat(problem) else _grown(problem, extent)
    yield Large(small, large, copies, f"more than {sizes.total:,} bytes")


def grown(problem: Descriptor, rows: int) -> Descriptor | None:
    """Return a problem with `rows` as the extent of its first axis; None if it has no such axis."""
    fields = type(problem).model_fields
    if "shape" in fields:
        shape: tuple[int, ...] = getattr(problem, "shape", ())
        return problem.model_copy(update={"shape": (rows, *shape[1:])})
    name = next((name for name in ("m", "outer_size", "n") if name in fields), None)
    return None if name is None else problem.model_copy(update={name: rows})


def _grown(problem: Descriptor, rows: int) -> Descriptor:
    found = grown(problem, rows)
    assert found is not None
    return found


def _flat(problem: Descriptor) -> bool:
    return "numel" in type(problem).model_fields


def _rows(problem: Descriptor) -> int:
    shape: tuple[int, ...] | None = getattr(problem, "shape", None)
    if shape is not None:
        return shape[0]
    name = next(name for name in ("m", "outer_size", "n") if name in type(problem).model_fields)
    return int(getattr(problem, name))


def _bytes(problem: Descriptor) -> int:
    """Return the size of the largest array in bytes."""
    return max(
        (
            stored_bytes(storage_shape(a.shape, a.elements[0]), storage_dtype(a.elements[0]))
            for a in problem.arguments()
            if not a.is_scalar
        ),
        default=0,
    )


class Copies:
    """A large problem on a device; its inputs are placed once for all kernels that are run on them.

    Parameters
    ----------
    op : Op
        The op.
    large : Large
        The problem.
    placement : Placement
        Moves arrays to the device and back.
    seed : int
        Seed of the small problem's inputs.
    """

    def __init__(self, op: Op, large: Large, placement: Placement, seed: int) -> None:
        self._large, self._placement = large, placement
        inputs = draw(op, Case(large.small), np.random.default_rng(seed)).inputs
        # A flat problem's inputs may have several axes; its copies are joined along a single one.
        flat = _flat(large.small)
        inputs = {
            k: v.reshape(-1) if flat and isinstance(v, np.ndarray) and v.size > 1 else v for k, v in inputs.items()
        }
        self._want = answer(op, large.small, inputs)
        self._numbers = {k: v for k, v in inputs.items() if v is not None and not isinstance(v, np.ndarray)}
        self._inputs: dict[str, tuple[Any, Any]] = {}
        self._arrays: dict[str, Any] = {}
        for small, argument in zip(large.small.arguments(), large.problem.arguments(), strict=True):
            value = inputs.get(argument.name)
            if argument.role not in (Role.OUTPUT, Role.SCRATCH) and isinstance(value, np.ndarray):
                repeated = not argument.is_scalar and small.shape != argument.shape
                self._lay_out(argument.name, value, large.copies if repeated else 1)

    def _lay_out(self, name: str, value: Array, copies: int) -> None:
        shape = (value.shape[0] * copies, *value.shape[1:]) if copies > 1 else value.shape
        buffer, rows = self._buffer(shape, value.dtype, copies)
        one = self._placement.upload(np.ascontiguousarray(value).reshape(-1).view(_word(value.nbytes)))
        rows[...] = one
        self._inputs[name] = rows, one
        self._arrays[name] = self._placement.view(buffer, Geometry.of(shape, value.dtype, "contiguous"))

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any], copies: int) -> tuple[Any, Any]:
        """Return a device buffer between guard zones, and a view of its elements with one row of integers per copy."""
        size = stored_bytes(shape, dtype) // copies
        word = _word(size)
        buffer = self._placement.full(Geometry.of(shape, dtype, "contiguous").size, OUTSIDE[0])
        return buffer, self._placement.view(buffer, Geometry.of((copies, size // word.itemsize), word, "contiguous"))

    def run(self, trial: Trial, select: Callable[[Descriptor], Plan]) -> None:
        """Run a kernel and record the result in its trial; nothing is raised.

        `select(problem)` returns a plan for exactly this kernel.
        """
        try:
            self._run(trial, select(self._large.problem))
        except Unsupported as error:
            trial.finding.note = f"{self._large.name} is refused: {error}".partition("\n")[0]
        except Exception as error:  # noqa: BLE001  the other kernels must still run
            failed(trial, self._large, check="error", message=f"{type(error).__name__}: {error}")

    def _run(self, trial: Trial, plan: Plan) -> None:
        outputs: dict[str, tuple[Any, Any]] = {}
        arrays = self._numbers | self._arrays
        for argument in self._large.problem.arguments():
            if argument.role is Role.OUTPUT:
                shape = storage_shape(argument.shape, argument.elements[0])
                want = self._want[argument.name]
                copies = self._large.copies if shape != want.shape else 1
                buffer, rows = outputs[argument.name] = self._buffer(shape, want.dtype, copies)
                poison = np.full(8, 0xFF if is_float(want.dtype) else 0xA6, np.uint8)
                rows[...] = int(poison.view(_word(want.nbytes))[0])
                arrays[argument.name] = self._placement.view(buffer, Geometry.of(shape, want.dtype, "contiguous"))
        plan.run(**arrays)
        trial.finding.cases += 1
        for name, (rows, one) in self._inputs.items():
            if bool((rows != one).any()):
                failed(trial, self._large, check="input", output=name, message="an input was written")
                rows[...] = one  # restored for the next kernel
        for name, (buffer, rows) in outputs.items():
            behind = GUARD + self._want[name].nbytes * len(rows)
            guards = (self._placement.download(zone) for zone in (buffer[:GUARD], buffer[behind:]))
            if any((zone != OUTSIDE[0]).any() for zone in guards):
                failed(trial, self._large, check="guard", output=name, message="beside the array was written")
            self._compare(trial, name, rows)

    def _compare(self, trial: Trial, name: str, rows: Any) -> None:
        """Compare all copies with the first on the device; compare the first, and those that differ, on the host."""
        want = self._want[name]
        element = next(a.elements[0] for a in self._large.problem.arguments() if a.name == name)
        ulps = allowed_ulps(trial.sku, self._large.small, element)
        if ulps is None:
            return
        others = np.flatnonzero(self._placement.download((rows != rows[0]).any(1)))
        trial.finding.outputs += want.size * len(rows)
        wrong = False
        for copy in (0, *map(int, others)):
            got = self._placement.download(rows[copy]).view(want.dtype).reshape(want.shape)
            bad = differing(got, want, ulps)
            wrong = bool(bad.any())
            if wrong:
                said = difference(name, bad, got, want, f"copy {copy} of {len(rows)}")
                at = tuple(i + (copy * want.shape[0] if axis == 0 else 0) for axis, i in enumerate(said["at"]))
                failed(trial, self._large, **{**said, "check": "ulp" if ulps else "bits", "at": at})
                break
        trial.finding.held("within_ulp" if ulps else "bit_exact", ok=not wrong)


def _word(size: int) -> np.dtype[Any]:
    """Return the widest integer dtype that divides a size in bytes; a device compares wide elements faster."""
    return np.dtype(np.int8 if size % 8 else np.int64)


def failed(trial: Trial, large: Large, **fields: Any) -> None:
    """Record a failure of a kernel on a large problem; its message begins with the problem's name."""
    said = {"case": -1, "problem": large.problem.model_dump_json(), "values": "normal", "layout": "contiguous"}
    message = f"{large.name}: {fields.pop('message')}"
    trial.finding.fail(Failure(**{**said, **fields, "message": message}))
