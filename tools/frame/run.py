"""The course of a run: options, seed, progress, the record's file, and what is shown of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

from skuda.dispatch.select.environment import driver_version, skuda_version, versions
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem, MissingDependency, SkudaError
from skuda.tools.files import check
from skuda.tools.frame.record import Record
from skuda.tools.frame.view import Sections, markdown
from skuda.tools.output import new_console, one_of, progress, split, tell

_PACKAGES = ("numpy", "torch", "triton", "torchao")
_Kind = TypeVar("_Kind", bound=Record)


Findings = tuple[Device, dict[str, Any]]
"""The result of a measurement: the device, and the fields of the record that are the study's own."""


class NoDevice(SkudaError):
    """No device here can run it, so nothing is measured; the text says what to do."""


@dataclass(frozen=True)
class Study(Generic[_Kind]):
    """One command that measures.

    `measure` takes a function that reports progress, and the command's options as keywords with defaults: among them
    `seed`, which is always given, and maybe `ops`, which are positional on a command line. It raises `NoDevice`.
    Of a record, `sections` returns the parts of a report by name, and `apart` the names of those that are shown only
    where they are named.
    """

    record: type[_Kind]
    measure: Callable[..., Findings]
    sections: Callable[[_Kind], Sections]
    apart: Callable[[_Kind], Iterable[str]] = lambda _: ()

    def run(
        self,
        *,
        output: Path | None = None,
        show: Path | None = None,
        markdown: str | None = None,
        as_json: bool = False,
        **options: Any,
    ) -> int:
        """Measure with some options, or show the record in the file `show`.

        The record goes to `output`; a section is printed as `markdown`, or the record as JSON.
        Return the exit status: 0; 1 if something is wrong in the record, or if no device here can run it.
        """
        command = self.record.maker()
        options = {name: value for name, value in options.items() if value is not None}
        if show is not None:
            refuse_beside_show(command, self.measure, {**options, "output": output})
            record = self.record.load(show)
        else:
            if output is not None:
                check(command, "--output", output)
            try:
                record = self.made(**options)
            except NoDevice as error:
                tell(str(error))
                return 1
            if output is not None:
                record.save(output)
        shown(command, self.sections(record), record.text(), markdown, self.apart(record), as_json=as_json)
        for line in record.wrong:
            tell(line, "red")
        if show is None and new_console().is_terminal and not as_json:
            line = f"recorded in {output}" if output else "not recorded: --output FILE does that"
            new_console().print(line, style="dim", soft_wrap=True)
        return 1 if record.wrong else 0

    def made(self, **options: Any) -> _Kind:
        """Measure, and return the record as its file will hold it."""
        options["seed"] = fresh_seed() if options.get("seed") is None else options["seed"]
        began, date = perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        with progress() as report:
            device, fields = self.measure(report or silent, **options)
        record = self.record(
            device=device.model_copy(update={"ordinal": None}),
            driver=driver_version() if device.processor == "cuda" else "",
            versions=versions(_PACKAGES),
            date=date,
            skuda=skuda_version(),
            seed=options["seed"],
            command=command_line(self.record.maker(), given(self.measure, options)),
            seconds=round(perf_counter() - began, 1),
            method=self.record.METHOD,
            **fields,
        )
        return self.record.parse(record.text())


def need(*names: str) -> None:
    """Raise `MissingDependency` for a package that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise MissingDependency(f"{name}, with which this measures,", f"pip install {name}")


def silent(_done: int, _total: int, _what: str) -> None:
    """Report no progress."""


def shown(
    command: str, sections: Sections, text: str, section: str | None = None, apart: Iterable[str] = (), *, as_json: bool
) -> None:
    """Print what was measured: JSON, a report for a person, or in a pipe Markdown, of all or of one section."""
    together = [part for name, parts in sections.items() if name not in set(apart) for part in parts]
    if section is not None:
        one_of(command, "--markdown", section, ("all", *sections))
        sys.stdout.write(markdown(sections.get(section, together)))
    elif as_json:
        sys.stdout.write(text)
    else:
        sys.stdout.write(markdown(together, padded=new_console().is_terminal))


def fresh_seed() -> int:
    """Return a seed that nobody chose."""
    return int.from_bytes(os.urandom(4), "little")


def given(measure: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the defaults of a function, by their names on the command line."""
    defaults = {name: one.default for name, one in signature(measure).parameters.items()} | {"seed": None}
    changed = {
        name: value for name, value in options.items() if value != defaults.get(name) and value not in (None, ())
    }
    return {"OPS" if name == "ops" else f"--{name.replace('_', '-')}": value for name, value in changed.items()}


def command_line(command: str, options: Mapping[str, Any]) -> str:
    """Return the command that repeats a run with some options, by their names on the command line."""
    words: list[str] = []
    for name, value in options.items():
        words += [name] if name.startswith("-") else []
        many = split(value) if isinstance(value, (list, tuple)) else (str(value),)
        words += [] if value is True else many if name == "OPS" else [",".join(many)]
    return shlex.join(["skuda", command, *words])


def refuse_beside_show(command: str, measure: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse any option beside ``--show``."""
    for name, value in given(measure, options).items():
        if value is not False:
            raise InvalidProblem(command, name, "--show beside it", "be left out: --show measures nothing")
