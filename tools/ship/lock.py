"""``skuda lock``: registered kernels and their selection, as a file for version control.

A lock is computed from the registry and the launch rules alone, for known cards and as if every CUDA backend were
available. It is therefore the same on every machine, and only a change of the program changes it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
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
from skuda.tools.files import check, read_text, write_whole
from skuda.tools.options import Descriptors, Words, option
from skuda.tools.output import count, new_console, split, tell
from skuda.tools.parse.cases import select_cases
from skuda.tools.parse.devices import named_device
from skuda.tools.parse.problem import read_problems

VERSION = 1

DEVICES = {name: KNOWN_DEVICES[name] for name in ("cpu", "a100", "h100", "h200", "rtx4090", "b200")}
"""The devices of a lock for which none are given."""

_MOST_OF_A_KEY = 2
"""Cases that ask about the same kernels; more would make the file large and find little more."""

Id = Annotated[str, StringConstraints(pattern=r"^[^.]+(\.[^.]+){6}$")]
"""The id of a kernel; its second part names the op."""


class Answer(Value):
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


class Row(Value):
    """One problem: its fields without defaults, the common start of its kernels' ids, and selections by device.

    Devices with the same selection share a key: their names, separated by ``, ``.

    A new field with a default does not change it.
    """

    problem: dict[str, JsonValue]
    kernels: str = ""
    on: dict[str, Answer]


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

    def answers(self) -> Iterator[tuple[tuple[str, str, str], Answer]]:
        """Yield every selection, with the whole id of its kernel, by op, problem and device."""
        for op, rows in self.selection.items():
            for row in rows:
                fields = {name: v if isinstance(v, str) else json.dumps(v) for name, v in row.problem.items()}
                problem = " ".join(f"{name}={text}" for name, text in fields.items())
                for device, found in ((name, found) for names, found in row.on.items() for name in names.split(", ")):
                    sku = f"{row.kernels}.{found.kernel}" if found.kernel is not None else None
                    yield (op, problem, device), found.model_copy(update={"kernel": sku})


def run(
    *,
    descriptors: Descriptors = None,
    devices: Annotated[Words, option("NAME", "For these, such as cpu,h200; else one of each kind.", "--device")] = None,
    output: Annotated[Path, option("FILE", "Write it here, else into skuda.lock.json; - prints it.")] = Path(
        "skuda.lock.json"
    ),
) -> int:
    """Write down the kernels, and which problem gets which.

    One line for every kernel, and one for every problem: on each device the kernel that it gets, its place in the
    ranking, and the time that its launch rule predicts. Needs no GPU. Without --descriptors, the problems are some
    cases of every op and those of `skuda bench`. `skuda diff` compares two such files.
    """
    if str(output) != "-":
        check("lock", "--output", output)
    chosen = dict(named_device("lock", name) for name in split(devices)) or DEVICES
    dispatcher = Dispatcher()
    registry = dispatcher.registry
    problems = default_problems(registry) if descriptors is None else read_problems("lock", registry, descriptors)
    text = write_lock(make_lock(dispatcher, problems, chosen))
    if str(output) == "-":
        new_console().file.write(text)
        return 0
    write_whole(output, text)
    asked = f"{count(len(problems), 'problem')} on {count(len(chosen), 'device')}"
    tell(f"wrote {output}: {count(len(registry), 'kernel')}, {asked}", "dim")
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
    skus: dict[str, list[str]] = {}
    for sku in ranked:
        skus.setdefault(sku.precision_guarantee.describe(), []).append(sku.id)
    selection: dict[str, list[Row]] = {op: [] for op in registry.ops}
    for problem in problems:
        candidates = registry.candidates(problem.key())
        answers = {name: _answer(dispatcher, problem, device) for name, device in devices.items()}
        row = Row(
            problem=problem.model_dump(mode="json", exclude_defaults=True),
            kernels=_parted(candidates[0])[0] if candidates else "",
            on={", ".join(n for n, found in answers.items() if found == each): each for each in answers.values()},
        )
        selection[problem.op_name()].append(row)
    return Lock(
        version=VERSION,
        guarantees=dict(sorted((s.precision_guarantee.describe(), s.precision_guarantee) for s in ranked)),
        skus={name: tuple(ids) for name, ids in sorted(skus.items())},
        selection={op: tuple(rows) for op, rows in selection.items() if rows},
    )


def _answer(dispatcher: Dispatcher, problem: Descriptor, device: Device) -> Answer:
    registry = dispatcher.registry
    pick = match.choose(registry, problem, device, NO_PREFERENCE, match.ALL_AVAILABLE)
    if pick is None:
        decisions = match.explain(registry, problem, device, NO_PREFERENCE, match.ALL_AVAILABLE).decisions
        return Answer(why=str(decisions[0].reasons[0]) if decisions else "no kernel is registered")
    chosen = pick.sku
    candidates = registry.candidates(problem.key())
    rank = sum(sku.arch.runs_on(device.compute_capability) for sku in candidates[: candidates.index(chosen)])
    us, why = None, ""
    backend = dispatcher.backends.get(chosen.backend)
    try:
        choices = backend.choices(chosen, problem, device) if backend is not None else ()
        us = float(f"{choices[0].microseconds:.3g}") if choices else None
    except Exception as error:  # noqa: BLE001  a plug-in's launch rule can fail in any way; a lock is made still
        why = f"its launch rule fails: {' '.join(str(error).split()) or type(error).__name__}"
    return Answer(kernel=_parted(chosen)[1], rank=rank, us=us, why=why)


def _parted(sku: KernelSku) -> tuple[str, str]:
    """Split an id into the part shared by all kernels for the same problems, and the rest."""
    shared, *own = sku.id.rsplit(".", 3)
    return shared, ".".join(own)


def write_lock(lock: Lock) -> str:
    """Return a lock as JSON: one line for every kernel, and one for every problem."""
    # The guarantees are whole, so that another default of a promise is a difference.
    whole = lock.model_dump(include={"guarantees"})
    return _laid_out({**lock.model_dump(exclude_defaults=True), **whole}) + "\n"


def _laid_out(value: object, depth: int = 3) -> str:
    """Return JSON: down to `depth`, a line for every item that is not a value of a plain dict."""
    inner = "\n" + " " * (4 - depth)
    if depth and isinstance(value, tuple):
        items, ends = [_laid_out(item, depth - 1) for item in value], "[]"
    elif depth and isinstance(value, dict) and any(isinstance(item, (dict, tuple)) for item in value.values()):
        items, ends = [f"{json.dumps(name)}: {_laid_out(item, depth - 1)}" for name, item in value.items()], "{}"
    else:
        return json.dumps(value)
    return ends[0] + inner + f",{inner}".join(items) + inner[:-1] + ends[1]


def read_lock(name: str, path: Path) -> Lock:
    """Read a lock; `name` is the name of the argument that names the file.

    Raise `InvalidProblem` for a file that cannot be read or is not a lock of this version.
    """
    try:
        lock = Lock.model_validate_json(read_text(path))
        trouble = _trouble(lock)
    except OSError as error:
        trouble = error.strerror or str(error)
    except (InvalidRecord, ValueError) as error:
        trouble = str(error.errors()[0]["msg"] if isinstance(error, ValidationError) else error)
    if trouble:
        # A quotation may be as long as the file.
        rule = textwrap.shorten(f"be a lock, made by `skuda lock` of this version: {trouble}", 400)
        raise InvalidProblem("diff", name, str(path), rule)
    return lock


def _trouble(lock: Lock) -> str:
    """Return why a lock cannot be compared; empty if it can."""
    if lock.version != VERSION:
        return f"it has version {lock.version}, not {VERSION}; make it again with `skuda lock`"
    named = {found.kernel for _, found in lock.answers() if found.kernel is not None}
    lacking = lock.skus.keys() - lock.guarantees.keys() or named - lock.promised.keys()
    return f"it names {min(lacking)!r} and does not list it; make it again with `skuda lock`" if lacking else ""
