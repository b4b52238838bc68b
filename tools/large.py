"""Problems too large for a reference: 70,000 rows, and more than 2^31 bytes.

Their inputs are a small problem's, again and again, so their outputs are the small one's again and again, and the
comparison stays on the device. Rows are repeated whole, so a range over all of them is the range over one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from skuda.dispatch.plan import Plan
from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry.descriptor import Descriptor, Role, storage_shape
from skuda.registry.errors import Unsupported
from skuda.registry.op import Case, Op
from skuda.tools.evidence import Failure
from skuda.tools.placing import GUARD, OUTSIDE, Geometry, TorchPlacement, is_float, stored_bytes
from skuda.tools.trial import Trial, answer

ROWS = 70_000
"""More than the 65,535 blocks that the second axis of a grid has."""

BYTES = 1 << 31
MEMORY = 24 << 30
"""Bytes of device memory below which these problems are left out."""


@dataclass(frozen=True)
class Large:
    """A problem made of copies of a small one.

    Attributes
    ----------
    small, problem : Descriptor
        The two problems.
    copies : int
        How many.
    name : str
        What is large about it.
    """

    small: Descriptor
    problem: Descriptor
    copies: int
    name: str


def suitable(problems: Iterable[Descriptor]) -> Descriptor | None:
    """Return the problem whose largest array is nearest to a page: neither one element a row nor a row of megabytes.

    Parameters
    ----------
    problems : iterable of Descriptor
        The problems of cases.
    """
    return min(
        (problem for problem in problems if _bytes(problem)),
        key=lambda problem: abs(math.log2(_bytes(problem)) - 12),
        default=None,
    )


def large_problems(problem: Descriptor) -> Iterator[Large]:
    """Yield large problems like a small one; none where it has no axis to grow along, or is empty.

    Parameters
    ----------
    problem : Descriptor
        A problem of some case.
    """
    if _bytes(problem) == 0:
        return
    if _flat(problem):
        # A flat problem has no rows; an even number, so that every copy of packed elements starts at a byte.
        small = problem.model_copy(update={"numel": 1 << 20})
    else:
        few = grown(problem, 70)
        if few is None:
            return
        yield Large(few, _grown(problem, ROWS), ROWS // 70, "70,000 rows")
        small = _grown(problem, max(1, (1 << 20) // max(1, _bytes(_grown(problem, 64)) // 64)))
    copies = BYTES // _bytes(small) + 2
    flat = _flat(problem)
    large = problem.model_copy(update={"numel": copies << 20}) if flat else _grown(problem, copies * _rows(small))
    yield Large(small, large, copies, "more than 2^31 bytes")


def grown(problem: Descriptor, rows: int) -> Descriptor | None:
    """Return a problem with another extent along its first axis; None where it has none.

    Parameters
    ----------
    problem : Descriptor
        The problem.
    rows : int
        The extent.
    """
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
    """Return the bytes of the largest array."""
    return max(
        (
            stored_bytes(storage_shape(a.shape, a.elements[0]), storage_dtype(a.elements[0]))
            for a in problem.arguments()
            if not a.is_scalar
        ),
        default=0,
    )


def run_large(
    trial: Trial, op: Op, large: Large, select: Callable[[Descriptor], Plan], placement: TorchPlacement, seed: int
) -> None:
    """Run a large problem and compare it; nothing is raised.

    Parameters
    ----------
    trial : Trial
        Where it is noted.
    op : Op
        The op.
    large : Large
        The problem.
    select : callable
        ``select(problem)`` returns a plan for the trial's kernel.
    placement : TorchPlacement
        How arrays get to the device.
    seed : int
        What the small problem's inputs are drawn from.
    """

    def fail(**fields: Any) -> None:
        said = {"case": -1, "problem": large.problem.model_dump_json(), "values": "normal", "layout": "contiguous"}
        trial.finding.fail(Failure(**{**said, **fields}))

    try:
        _run(trial, op, large, select(large.problem), placement, seed, fail)
    except Unsupported as error:
        trial.finding.note = f"{large.name} is refused: {error}".partition("\n")[0]
    except Exception as error:  # noqa: BLE001  whatever a kernel does, the others are still to be run
        fail(check="error", message=f"{large.name}: {type(error).__name__}: {error}")
    finally:
        if placement.device != "cpu":
            # Scratch comes from the driver, which cannot use what torch keeps for later.
            with suppress(Exception):
                placement.torch.cuda.empty_cache()


def _run(
    trial: Trial,
    op: Op,
    large: Large,
    plan: Plan,
    placement: TorchPlacement,
    seed: int,
    fail: Callable[..., None],
) -> None:
    torch = placement.torch
    inputs = draw(op, Case(large.small), np.random.default_rng(seed)).inputs
    # A flat problem may be drawn with more axes; its copies are joined along the only one.
    inputs = {k: v.reshape(-1) if _flat(large.small) and _sized(v) else v for k, v in inputs.items()}
    want = answer(op, large.small, inputs)
    arrays: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for small, argument in zip(large.small.arguments(), large.problem.arguments(), strict=True):
        name, value = argument.name, inputs.get(argument.name)
        if argument.role is Role.OUTPUT:
            element = argument.elements[0]
            shape, dtype = storage_shape(argument.shape, element), storage_dtype(element)
            geometry = Geometry.of(shape, dtype, "contiguous")
            buffers[name] = torch.full((geometry.size,), OUTSIDE, dtype=torch.uint8, device=placement.device)
            buffers[name][GUARD : GUARD + stored_bytes(shape, dtype)] = 0xFF if is_float(dtype) else 0xA6
            arrays[name] = placement.view(buffers[name], geometry)
        elif isinstance(value, np.ndarray):
            geometry = Geometry.of(value.shape, value.dtype, "contiguous")
            whole = np.full(geometry.size, OUTSIDE, np.uint8)
            geometry.view(whole)[...] = value
            one = placement.view(placement.upload(whole), geometry)
            repeated = not argument.is_scalar and small.shape != argument.shape
            arrays[name] = one.repeat(large.copies, *(1,) * (one.dim() - 1)) if repeated else one.clone()
        elif value is not None:
            arrays[name] = value
    plan.run(**arrays)
    trial.finding.cases += 1
    for name, expected in want.items():
        size = arrays[name].numel() * expected.dtype.itemsize
        guards = torch.cat((buffers[name][:GUARD], buffers[name][GUARD + size :]))
        if bool((guards != OUTSIDE).any()):
            fail(check="guard", output=name, message=f"{large.name}: beside the array was written")
        if trial.sku.precision_guarantee.bit_exact:
            _compare(trial, name, arrays[name], expected, large, placement, fail)


def _sized(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size > 1


def _compare(
    trial: Trial,
    name: str,
    got: Any,
    expected: Any,
    large: Large,
    placement: TorchPlacement,
    fail: Callable[..., None],
) -> None:
    torch = placement.torch
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    geometry = Geometry.of(expected.shape, expected.dtype, "contiguous")
    whole = np.full(geometry.size, OUTSIDE, np.uint8)
    geometry.view(whole)[...] = expected
    want = placement.view(placement.upload(whole), geometry).contiguous().reshape(1, -1)
    # Every copy against the one; an output that is one for all copies has the small one's shape.
    rows = got.contiguous().reshape(-1, max(1, math.prod(expected.shape)))
    kind = integers[expected.dtype.itemsize]
    bad = rows.view(kind) != want.view(kind)
    if is_float(expected.dtype):
        bad &= ~(torch.isnan(rows) & torch.isnan(want))
    trial.finding.outputs += int(got.numel())
    wrong = bool(bad.any())
    trial.finding.held("bit_exact", ok=not wrong)
    if wrong:
        # torch.argmax takes no bool, and nonzero of 2^31 elements takes too much memory.
        row = int(bad.any(dim=1).to(torch.uint8).argmax())
        column = int(bad[row].to(torch.uint8).argmax())
        at = np.unravel_index(row * rows.shape[1] + column, tuple(got.shape))
        fail(
            check="bits",
            output=name,
            at=tuple(int(i) for i in at),
            got=str(rows[row, column].item()),
            want=str(want[0, column].item()),
            message=f"{large.name}: {int(bad.sum())} of {bad.numel()} elements differ",
        )
