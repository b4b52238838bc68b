"""What the records of all studies share: the circumstances of a run, and their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from skuda.registry.device import Device
from skuda.registry.errors import InvalidRecord
from skuda.registry.value import Real, Size, Value
from skuda.tools.files import read_json, read_text, write_whole

_DIGITS = 6
"""Significant digits of a float in a file; a time varies from run to run in the third."""


class Record(Value):
    """One run of a study; a subclass has the fields `kind`, such as ``skuda bench-model``, and `schema_version`.

    Attributes
    ----------
    device : Device or str
        The device that was measured; its name alone in older records.
    driver, versions : str and dict
        Version of a GPU's driver, and those of the software that took part, by name.
    date, skuda, seconds
        Time of the run in UTC, version of skuda, and duration.
    seed, command
        Seed of all random numbers, and the command line that repeats the run.
    method : int
        Version of how it was measured: the `METHOD` of its time.
    METHOD : int
        Today's version. Whoever changes what is measured, or how, raises it, which makes earlier records stale.
    """

    METHOD: ClassVar[int] = 1
    device: Device | str
    driver: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    date: str
    skuda: str
    seed: Size | None = None
    command: str = ""
    seconds: Real = 0.0
    method: Size = 0

    @property
    def card(self) -> str:
        """Name of the device."""
        return self.device if isinstance(self.device, str) else self.device.name

    @property
    def where(self) -> str:
        """Device and day, for titles."""
        return f"{self.card}, {self.date[:10]}"

    @property
    def outdated(self) -> str:
        """Why the whole record is stale; empty if it was measured in the same way as today."""
        return "" if self.method == self.METHOD else f"measured by method {self.method}, today's is {self.METHOD}"

    @property
    def wrong(self) -> tuple[str, ...]:
        """What went wrong, one line each; the command that made the record then exits with 1."""
        return ()

    def facts(self, **own: str) -> dict[str, str]:
        """Return the circumstances by name, with those of a study between."""
        device = self.card if isinstance(self.device, str) else self.device.describe()
        driver = f", driver {self.driver}" if self.driver else ""
        about = {"command": self.command, "device": device + driver, "date": self.date, "stale": self.outdated}
        return {**about, **own, "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items())}

    @classmethod
    def maker(cls) -> str:
        """Return the name of the command that makes it, such as ``bench-model``."""
        return str(cls.model_fields["kind"].default).removeprefix("skuda ")

    def text(self) -> str:
        """Return the record as JSON with one line for each field, and for each member of a list of objects.

        Floats are rounded, and fields that have their default are left out.
        """
        kind = dict(zip(("kind", "schema_version"), self._kind(), strict=True))
        fields = {**kind, **_rounded(self.model_dump(mode="json", exclude_defaults=True))}
        return "{\n" + ",\n".join(f' "{name}": {_lines(value)}' for name, value in fields.items()) + "\n}\n"

    def digest(self) -> str:
        """Return a hash of what was measured, by which a plot of another record is detected."""
        # A method or a stamp may be said anew of the same measurements.
        said: Any = {"method": True, "cases": {"__all__": {"source_hash", "machine_code", "launches"}}}
        measured = _rounded(self.model_dump(mode="json", exclude_defaults=True, exclude=said))
        return hashlib.sha256(json.dumps(measured).encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the file, and create its folder; a reader never sees a part of the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.text())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; raise `InvalidRecord` if it cannot be read or is not a valid record of this kind."""
        return cls._parsed(path, cls._read(path))

    @classmethod
    def files(cls, folder: Path | None) -> dict[Path, Self]:
        """Read every record of this kind in a folder, in order of the files' names; None is a folder without files.

        Raise `InvalidRecord` if a file cannot be read, or if a file of this kind is not a valid record.
        """
        paths = sorted(filter(Path.is_file, folder.glob("*.json"))) if folder is not None else ()
        files = {path: cls._read(path) for path in paths}
        return {path: cls._parsed(path, found) for path, found in files.items() if _kind_of(found)[0] == cls._kind()[0]}

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the record of a text; raise `InvalidRecord` if it is not valid."""
        return cls.model_validate(read_json(text))

    @classmethod
    def _kind(cls) -> tuple[object, object]:
        return cls.model_fields["kind"].default, cls.model_fields["schema_version"].default

    @classmethod
    def _read(cls, path: Path) -> Any:
        try:
            return read_json(read_text(path))
        except (OSError, ValueError) as error:
            raise InvalidRecord(cls.maker(), str(path), str(error), "be readable JSON") from error

    @classmethod
    def _parsed(cls, path: Path, found: Any) -> Self:
        had, wanted = _kind_of(found), cls._kind()
        if had != wanted:
            rule = f"be a record of kind {wanted[0]!r}, schema {wanted[1]}: `{wanted[0]} --output FILE` makes one"
            raise InvalidRecord(cls.maker(), str(path), f"kind {had[0]!r}, schema {had[1]!r}", rule)
        try:
            return cls.model_validate(found)
        except InvalidRecord as error:
            raise InvalidRecord(f"{cls.maker()} {path}: {error.subject}", error.field, error.had, error.must) from error


def _kind_of(found: Any) -> tuple[object, object]:
    return (found.get("kind"), found.get("schema_version")) if isinstance(found, dict) else (None, None)


def _rounded(found: Any) -> Any:
    if isinstance(found, float):
        return float(f"{found:.{_DIGITS}g}")
    if isinstance(found, dict):
        return {name: _rounded(value) for name, value in found.items()}
    return [_rounded(value) for value in found] if isinstance(found, list) else found


def _lines(found: Any) -> str:
    def compact(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    if isinstance(found, list) and any(isinstance(each, dict) for each in found):
        return "[\n  " + ",\n  ".join(map(compact, found)) + "\n ]"
    return compact(found)
