"""What the records of commands share: how they are written, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from skuda.registry.errors import InvalidRecord
from skuda.registry.value import Value
from skuda.tools.files import read_json, read_text, write_whole


class Record(Value):
    """The base of records; a subclass has the fields `kind`, such as ``skuda train-check``, and `schema_version`."""

    def save(self, path: Path) -> None:
        """Write the file and create its folder; a reader never sees a partial file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; raise `InvalidRecord` if it cannot be read or is not a record of this kind."""
        kind, schema = (cls.model_fields[name].default for name in ("kind", "schema_version"))
        command = kind.removeprefix("skuda ")
        try:
            found: Any = read_json(read_text(path))
        except (OSError, ValueError) as error:
            raise InvalidRecord(command, str(path), str(error), "be readable JSON") from error
        had = (found.get("kind"), found.get("schema_version")) if isinstance(found, dict) else (None, None)
        if had != (kind, schema):
            rule = f"be a record of kind {kind!r}, schema {schema}: `{kind} --output FILE` makes one"
            raise InvalidRecord(command, str(path), f"kind {had[0]!r}, schema {had[1]!r}", rule)
        try:
            return cls.model_validate(found)
        except InvalidRecord as error:
            raise InvalidRecord(f"{command} {path}: {error.subject}", error.field, error.had, error.must) from error
