"""What the records of commands share: how they are written, and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from skuda.registry.errors import InvalidRecord
from skuda.registry.value import Value
from skuda.tools.files import read_json, read_text, write_whole


class Record(Value):
    """The base of records; a subclass has the fields `kind`, such as ``skuda train-check``, and `schema_version`.

    Attributes
    ----------
    undrawn : dict
        Fields that are in none of its plots, as `pydantic.BaseModel.model_dump` excludes them.
    """

    undrawn: ClassVar[Any] = {"measurer_hash": True}

    def save(self, path: Path) -> None:
        """Write the file and create its folder; a reader never sees a partial file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def maker(cls) -> str:
        """Return the name of the command that makes it, such as ``train-check``."""
        kind: str = cls.model_fields["kind"].default
        return kind.removeprefix("skuda ")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file; raise `InvalidRecord` if it cannot be read or is not a record of this kind."""
        found = cls._read(path)
        had, wanted = _kind_of(found), cls._kind()
        if had != wanted:
            rule = f"be a record of kind {wanted[0]!r}, schema {wanted[1]}: `{wanted[0]} --output FILE` makes one"
            raise InvalidRecord(cls.maker(), str(path), f"kind {had[0]!r}, schema {had[1]!r}", rule)
        return cls._parsed(path, found)

    @classmethod
    def files(cls, folder: Path | None) -> dict[Path, Self]:
        """Read every record of this kind in a folder, in order of the files' names; None is a folder without files.

        Raise `InvalidRecord` if a file cannot be read, or if a file of this kind is not a valid record.
        """
        paths = sorted(filter(Path.is_file, folder.glob("*.json"))) if folder is not None else ()
        files = {path: cls._read(path) for path in paths}
        return {path: cls._parsed(path, found) for path, found in files.items() if _kind_of(found) == cls._kind()}

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
        try:
            return cls.model_validate(found)
        except InvalidRecord as error:
            raise InvalidRecord(f"{cls.maker()} {path}: {error.subject}", error.field, error.had, error.must) from error


def _kind_of(found: Any) -> tuple[object, object]:
    return (found.get("kind"), found.get("schema_version")) if isinstance(found, dict) else (None, None)
