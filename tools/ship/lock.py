"""``skuda lock``: registered kernels and their selection, as a file for version control.

A lock is computed from the registry and the launch rules alone, for known cards and as if every CUDA backend were
available. It is therefore the same on every machine, and only a change of the program changes it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue, StringConstraints, ValidationError

from skuda.dispatch import KNOWN_DEVICES, Device, Dispatcher
from skuda.dispatch.preference import NO_PREFERENCE
from skuda.dispatch.select import match
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku
from skuda.registry.value import Integer, Value
from skuda.tools.files import write_whole
from skuda.tools.output import count, split, stdout, tell
from skuda.tools.words.cases import select_cases
from skuda.tools.words.devices import named_device
from skuda.tools.words.problem import read_problems

VERSION = 1

Id = Annotated[str, StringConstraints(pattern=r"^[^.]+(\.[^.]+){6}$")]
"""The id of a kernel; its second part names the op."""


class Selection(Value):
    """The selection for one problem on one device.

    Attributes
    ----------
    kernel : str or None
        End of the kernel's id: architecture, backend and variant.
    rank : int
        Number of better-ranked kernels that the device could run but that refuse the problem.
    us : float or None
        Time in microseconds that its launch rule predicts, to three digits.
    why : str
        The reason of the nearest kernel, if none serves the problem; or the error of the launch rule.
    """

    kernel: str | None = None
    rank: Annotated[Integer, Field(ge=0)] = 0
    us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    why: str = ""

    def __str__(self) -> str:
        time = "" if self.us is None else f", {self.us:g} us"
        why = f" ({self.why})" if self.why else ""
        return f"{self.kernel or 'none'}{time}{why}"


_MOST_OF_A_KEY = 3
"""Cases that ask about the same kernels; more would make the file large and find little more."""


class Row(Value):
    """One problem: its fields without defaults, the common start of its kernels' ids, and selections by device.

    A new field with a default does not change it.
    """

    problem: dict[str, JsonValue]
    kernels: str = ""
    on: dict[str, Selection]


class Lock(Value):
    """All registered kernels and their selections.

    Guarantees are by `PrecisionGuarantee.describe`, kernel ids by guarantee in the order of the ranking, and problems
    by op.
    """

    version: Integer
    guarantees: dict[str, PrecisionGuarantee]
    skus: dict[str, tuple[Id, ...]]
    selection: dict[str, tuple[Row, ...]]

    @cached_property
    def promised(self) -> dict[str, PrecisionGuarantee]:
        """The guarantee of every kernel, by id."""
        return {sku: self.guarantees[name] for name, skus in self.skus.items() for sku in skus}

    def answers(self) -> Iterator[tuple[tuple[str, str, str], Selection]]:
        """Yield every selection, with the whole id of its kernel, by op, problem and device."""
        for op, rows in self.selection.items():
            for row in rows:
                problem = _problem_words(row.problem)
                for device, found in row.on.items():
                    sku = f"{row.kernels}.{found.kernel}" if found.kernel is not None else None
                    yield (op, problem, device), found.model_copy(update={"kernel": sku})


def run(*, descriptors: Path | None = None, devices: Sequence[str] = (), output: Path | None = None) -> int:
    """Run ``skuda lock``; raise `InvalidProblem` for an unknown device, or a file that cannot be read or written."""
    chosen = dict(named_device("lock", name) for name in split(devices)) or KNOWN_DEVICES
    dispatcher = Dispatcher()
    registry = dispatcher.registry
    problems = default_problems(registry) if descriptors is None else read_problems("lock", registry, descriptors)
    text = write_lock(make_lock(dispatcher, problems, chosen))
    if output is None:
        stdout().file.write(text)
        return 0
    write_whole(output, text)
    asked = f"{count(len(problems), 'problem')} on {count(len(chosen), 'device')}"
    tell(f"{output}: {count(len(registry), 'kernel')}, {asked}", "dim")
    return 0


def default_problems(registry: Registry) -> list[Descriptor]:
    """Return some cases of every op of a registry for each of its functional keys, and the cases of `skuda bench`."""
    cases: dict[object, dict[Descriptor, None]] = {}
    for op in registry.ops.values():
        for case in op.cases:
            mine = cases.setdefault(case.problem.key(), {})
            if len(mine) < _MOST_OF_A_KEY:
                mine[case.problem] = None
    chosen = (problem for mine in cases.values() for problem in mine)
    return list(dict.fromkeys((*chosen, *(case.problem for case in select_cases(registry)))))


def make_lock(dispatcher: Dispatcher, problems: Iterable[Descriptor], devices: Mapping[str, Device]) -> Lock:
    """Return the lock of a registry; it does not depend on which backends work on this machine."""
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
    """Split an id into the part shared by all kernels for the same problems, and the rest."""
    parts = sku.id.rsplit(".", 3)
    return parts[0], ".".join(parts[1:])


def write_lock(lock: Lock) -> str:
    """Return a lock as JSON: one line per kernel, and one per problem and device."""

    def lines(items: Iterable[str]) -> str:
        return ",\n".join(items)

    def row(found: Row) -> str:
        on = lines(
            f"  {json.dumps(device)}: {json.dumps(selection.model_dump(mode='json', exclude_defaults=True))}"
            for device, selection in found.on.items()
        )
        head = f'{{"problem": {json.dumps(found.problem)}, "kernels": {json.dumps(found.kernels)}, "on": {{'
        return f" {head}\n{on}\n }}}}"

    guarantees = (
        f" {json.dumps(name)}: {json.dumps(found.model_dump(mode='json'))}" for name, found in lock.guarantees.items()
    )
    skus = (
        f" {json.dumps(name)}: [\n{lines(f'  {json.dumps(sku)}' for sku in found)}\n ]"
        for name, found in lock.skus.items()
    )
    ops = (f"{json.dumps(op)}: [\n{lines(map(row, rows))}\n]" for op, rows in lock.selection.items())
    return (
        f'{{\n"version": {lock.version},\n"guarantees": {{\n{lines(guarantees)}\n}},\n'
        f'"skus": {{\n{lines(skus)}\n}},\n"selection": {{\n{lines(ops)}\n}}\n}}\n'
    )


def read_lock(name: str, path: Path) -> Lock:
    """Read a lock; `name` is the name of the file's argument.

    Raise `InvalidProblem` for a file that cannot be read or is not a lock of this version.
    """

    def refused(rule: str) -> InvalidProblem:
        # The quotation is cut off, because it may be as long as the file.
        return InvalidProblem("diff", name, str(path), textwrap.shorten(rule, 400))

    try:
        lock = Lock.model_validate_json(path.read_bytes())
    except OSError as error:
        raise refused(f"be a file that can be read: {error.strerror or error}") from error
    except (InvalidRecord, ValidationError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise refused(f"be a lock, made by `skuda lock` of this version: {said}") from error
    if lock.version != VERSION:
        raise refused(f"be a lock of version {VERSION}, not {lock.version}: make it again with `skuda lock`")
    lacking = lock.skus.keys() - lock.guarantees.keys() or (
        {answer.kernel for _, answer in lock.answers() if answer.kernel is not None} - lock.promised.keys()
    )
    if lacking:
        rule = f"list every kernel and guarantee that it names, and lacks {min(lacking)!r}"
        raise refused(f"{rule}: make it again with `skuda lock`")
    return lock


def _problem_words(fields: Mapping[str, JsonValue]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())
