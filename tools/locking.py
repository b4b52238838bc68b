"""What is registered and what it would select, written down.

A lock is made on paper: for known cards, with every CUDA backend taken to be there, from the registry and the launch
rules alone. So it is the same on every machine, and a change of it is a change of the program.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

from pydantic import Field, JsonValue, StringConstraints, ValidationError

from skuda.dispatch import Device, Dispatcher, match
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.registry.value import Integer, Value
from skuda.tools.bench_cases import select_cases

VERSION = 1


Id = Annotated[str, StringConstraints(pattern=r"^[^.]+(\.[^.]+){6}$")]
"""Of a kernel; its second part names the op."""


class Selection(Value):
    """What one problem gets on one device.

    Attributes
    ----------
    kernel : str or None
        End of the chosen kernel's id: architecture, backend and variant. None where no kernel serves it.
    rank : int
        How many kernels that the device could run stand before it in the ranking, and refuse the problem.
    us : float or None
        Time that its launch rule predicts, three digits of it; None where the rule predicts none.
    why : str
        Where there is no kernel, the first thing that speaks against the nearest one; where the launch rule fails, how.
    """

    kernel: str | None = None
    rank: Annotated[Integer, Field(ge=0)] = 0
    us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    why: str = ""


class Row(Value):
    """One problem.

    Attributes
    ----------
    problem : dict
        The descriptor's fields, without defaults: a field that is added with one changes nothing here.
    kernels : str
        What the ids of all kernels for it begin with; empty where there is none.
    on : dict
        The selection by device.
    """

    problem: dict[str, JsonValue]
    kernels: str = ""
    on: dict[str, Selection]


class Lock(Value):
    """Everything that is registered, and what is selected from it.

    Attributes
    ----------
    version : int
        Of this form.
    guarantees : dict
        Guarantees by what `PrecisionGuarantee.describe` says.
    skus : dict
        Ids of all kernels by the guarantee that they give, each list in the order of the ranking.
    selection : dict
        Problems by op.
    """

    version: Integer
    guarantees: dict[str, PrecisionGuarantee]
    skus: dict[str, tuple[Id, ...]]
    selection: dict[str, tuple[Row, ...]]

    @cached_property
    def promised(self) -> dict[str, PrecisionGuarantee]:
        """What every kernel promises, by id."""
        return {sku: self.guarantees[name] for name, skus in self.skus.items() for sku in skus}

    def answers(self) -> Iterator[tuple[tuple[str, str, str], Answer]]:
        """Yield every selection by op, problem and device."""
        for op, rows in self.selection.items():
            for row in rows:
                problem = _problem_words(row.problem)
                for device, found in row.on.items():
                    sku = f"{row.kernels}.{found.kernel}" if found.kernel is not None else None
                    yield (op, problem, device), Answer(sku, found.rank, found.us, found.why)


class Answer(NamedTuple):
    """A `Selection` with the whole id of its kernel."""

    sku: str | None
    rank: int
    us: float | None
    why: str

    def __str__(self) -> str:
        time = "" if self.us is None else f", {self.us:g} us"
        why = f" ({self.why})" if self.why else ""
        return f"{self.sku or 'none'}{time}{why}"


def default_problems(registry: Registry) -> list[Descriptor]:
    """Return the cases of every op, and what `skuda bench` measures.

    Parameters
    ----------
    registry : Registry
        Whose ops.
    """
    cases = [case.problem for op in registry.ops.values() for case in op.cases]
    return list(dict.fromkeys((*cases, *(case.problem for case in select_cases(registry)))))


def make_lock(dispatcher: Dispatcher, problems: Iterable[Descriptor], devices: Mapping[str, Device]) -> Lock:
    """Write down what is registered and what it would select.

    Parameters
    ----------
    dispatcher : Dispatcher
        Its registry and its backends' launch rules; which of its backends work here makes no difference.
    problems : iterable of Descriptor
        What is asked for.
    devices : mapping of str to Device
        For which devices, none of them here.
    """
    registry = dispatcher.registry
    ranked = [sku for op in registry.ops for sku in registry.skus_of(op)]
    guarantees = {sku.precision_guarantee.describe(): sku.precision_guarantee for sku in ranked}
    selection: dict[str, list[Row]] = {op: [] for op in registry.ops}
    for problem in problems:
        selection[problem.op_name()].append(_row(dispatcher, problem, devices))
    return Lock(
        version=VERSION,
        guarantees=dict(sorted(guarantees.items())),
        skus={
            name: tuple(sku.id for sku in ranked if sku.precision_guarantee == guarantee)
            for name, guarantee in sorted(guarantees.items())
        },
        selection={op: tuple(rows) for op, rows in selection.items() if rows},
    )


def _row(dispatcher: Dispatcher, problem: Descriptor, devices: Mapping[str, Device]) -> Row:
    candidates = dispatcher.registry.candidates(problem.key())
    return Row(
        problem=problem.model_dump(mode="json", exclude_defaults=True),
        kernels=_parted(candidates[0])[0] if candidates else "",
        on={name: _selection(dispatcher, problem, device) for name, device in devices.items()},
    )


def _selection(dispatcher: Dispatcher, problem: Descriptor, device: Device) -> Selection:
    registry = dispatcher.registry
    pick = match.choose(registry, problem, device, NO_PREFERENCE, {})
    if pick is None:
        decisions = match.explain(registry, problem, device, NO_PREFERENCE, {}).decisions
        return Selection(why=str(decisions[0].reasons[0]) if decisions else "no kernel is registered")
    chosen = pick.sku
    before = registry.candidates(problem.key())[: registry.candidates(problem.key()).index(chosen)]
    rank = sum(sku.arch.runs_on(device.compute_capability) for sku in before)
    us, why = None, ""
    backend = dispatcher.backends.get(chosen.backend)
    try:
        choices = backend.choices(chosen, problem, device) if backend is not None else ()
        us = float(f"{choices[0].microseconds:.3g}") if choices else None
    except Exception as error:  # noqa: BLE001  a plug-in's launch rule can fail in any way; a lock is made still
        why = f"its launch rule fails: {' '.join(str(error).split()) or type(error).__name__}"
    return Selection(kernel=_parted(chosen)[1], rank=rank, us=us, why=why)


def _parted(sku: KernelSku) -> tuple[str, str]:
    """Return what an id has in common with those of all kernels for the same problems, and what it has not."""
    parts = sku.id.rsplit(".", 3)
    return parts[0], ".".join(parts[1:])


def write_lock(lock: Lock) -> str:
    """Return a lock as JSON: one line for every kernel, and one for every problem and device."""

    def lines(items: Iterable[str]) -> str:
        return ",\n".join(items)

    def row(found: Row) -> str:
        head = f' {{"problem": {json.dumps(found.problem)}, "kernels": {json.dumps(found.kernels)}, "on": {{'
        on = lines(
            f"  {json.dumps(device)}: {json.dumps(selection.model_dump(mode='json', exclude_defaults=True))}"
            for device, selection in found.on.items()
        )
        return f"{head}\n{on}\n }}}}"

    guarantees = lines(
        f" {json.dumps(name)}: {json.dumps(found.model_dump(mode='json'))}" for name, found in lock.guarantees.items()
    )
    skus = lines(
        f" {json.dumps(name)}: [\n{lines(f'  {json.dumps(sku)}' for sku in found)}\n ]"
        for name, found in lock.skus.items()
    )
    ops = lines(f"{json.dumps(op)}: [\n{lines(map(row, rows))}\n]" for op, rows in lock.selection.items())
    return (
        f'{{\n"version": {lock.version},\n"guarantees": {{\n{guarantees}\n}},\n'
        f'"skus": {{\n{skus}\n}},\n"selection": {{\n{ops}\n}}\n}}\n'
    )


def read_lock(name: str, path: Path) -> Lock:
    """Read a lock.

    Parameters
    ----------
    name : str
        What the file is called in messages.
    path : Path
        The file.

    Raises
    ------
    InvalidProblem
        For a file that cannot be read or is no lock of this version.
    """
    try:
        lock = Lock.model_validate_json(path.read_bytes())
    except OSError as error:
        _refuse(name, path, f"be a file that can be read: {error.strerror or error}")
    except InvalidRecord as error:
        _refuse(name, path, f"be a lock, made by `skuda lock` of this version: {error}")
    except ValidationError as error:
        _refuse(name, path, f"be a lock, made by `skuda lock`: {error.errors()[0]['msg']}")
    if lock.version != VERSION:
        told = f"be a lock of version {VERSION}, not {lock.version}"
        _refuse(name, path, f"{told}: make it again with `skuda lock`")
    lacking = lock.skus.keys() - lock.guarantees.keys()
    if not lacking:
        lacking = {answer.sku for _, answer in lock.answers() if answer.sku is not None} - lock.promised.keys()
    if lacking:
        told = f"list every kernel and guarantee that it names, and lacks {min(lacking)!r}"
        _refuse(name, path, f"{told}: make it again with `skuda lock`")
    return lock


def _problem_words(fields: Mapping[str, JsonValue]) -> str:
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()
    )


def _refuse(name: str, path: Path, rule: str) -> NoReturn:
    # What is quoted of a file may be as long as the file.
    raise InvalidProblem("diff", name, str(path), textwrap.shorten(rule, 400))
