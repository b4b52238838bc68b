"""``skuda merge``: one record of those that the shards of one run wrote."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from skuda.dispatch.select.tuning import Entry, Tuning
from skuda.dispatch.select.work import WorkShard, hash_of
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.tools.files import read_json, read_text
from skuda.tools.output import count, stdout, words
from skuda.tools.verify.evidence import EvidenceFile, SkuEvidence

Record = EvidenceFile | Tuning
Piece = SkuEvidence | Entry

_KINDS: dict[str, type[Record]] = {model.model_fields["kind"].default: model for model in (EvidenceFile, Tuning)}
_NAMED = 10
"""The most missing shards that are named."""


class Part(NamedTuple):
    """The record of one shard, with its file."""

    path: Path
    record: Record
    shard: WorkShard

    @property
    def field(self) -> str:
        """The field of the record that holds the pieces of work."""
        return "skus" if isinstance(self.record, EvidenceFile) else "entries"

    @property
    def pieces(self) -> list[tuple[str, Piece]]:
        """The pieces of work with their names, in order."""
        if isinstance(self.record, EvidenceFile):
            return [(found.sku, found) for found in self.record.skus]
        return [(entry.key, entry) for entry in self.record.entries]

    def conditions(self) -> dict[str, object]:
        """Return, by field, what the shards of one run share."""
        whole = self.record.model_copy(update={"shard": None})
        mine = {f"shard.{name}": getattr(self.shard, name) for name in ("count", "total", "list_hash")}
        return {"kind": self.record.kind, **whole.conditions(), **mine}

    def refuse(self, field: str, had: object, must: str) -> NoReturn:
        """Raise the error for a field of this file."""
        raise InvalidRecord(str(self.path), field, _told(had), must)


def run(files: Sequence[Path], output: Path) -> int:
    """Merge files into one; return the exit status of the whole run: 1 if a kernel failed or was refused, else 0.

    Raises
    ------
    InvalidProblem
        If `output` is one of the files, or is there and a tuning is to be written.
    InvalidRecord
        If the files are not the records of all shards of one run, each once.
    """
    if output.resolve() in {path.resolve() for path in files}:
        raise InvalidProblem("merge", "--output", str(output), "be another file than those that are merged")
    found = merged(files)
    if isinstance(found, Tuning) and output.exists():
        raise InvalidProblem("merge", "--output", f"{output}, which is there", "be a new file")
    found.save(output)
    if isinstance(found, EvidenceFile):
        verdicts = [sku.verdict for sku in found.skus]
        told = [count(len(verdicts), "kernel"), *(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))]
        bad = bool(found.failed)
    else:
        told = [count(len(found.entries), "problem")]
        bad = any(candidate.refused for entry in found.entries for candidate in entry.candidates)
    stdout().print(f"{count(len(files), 'shard')}: {words(told)}; written to {output}", soft_wrap=True)
    return 1 if bad else 0


def merged(files: Sequence[Path]) -> Record:
    """Return the record that one run without shards would have made, apart from times; raise `InvalidRecord`."""
    parts = [_load(path) for path in files]
    _check_conditions(parts)
    _check_disjoint(parts)
    _check_complete(parts)
    places: dict[int, tuple[str, Piece]] = {}
    for part in parts:
        places |= zip(part.shard.places(), part.pieces, strict=True)
    ordered = [places[place] for place in sorted(places)]
    first = min(parts, key=lambda part: part.shard.index)
    if hash_of(name for name, _ in ordered) != first.shard.list_hash:
        rule = "be those of the list that all files are shards of; at least one file holds others"
        raise InvalidRecord("merge", first.field, words(files), rule)
    update: dict[str, Any] = {"shard": None, first.field: tuple(piece for _, piece in ordered)}
    if isinstance(first.record, EvidenceFile):
        update["date"] = max(part.record.date for part in parts if isinstance(part.record, EvidenceFile))
    return first.record.model_copy(update=update)


def _load(path: Path) -> Part:
    try:
        found = read_json(read_text(path))
    except (OSError, ValueError) as error:
        raise InvalidRecord("merge", str(path), str(error), "be readable JSON") from error
    kind = str(found.get("kind")) if isinstance(found, dict) else "none"
    record = _KINDS[kind].load(path) if kind in _KINDS else None
    if record is None:
        schema = found.get("schema_version") if isinstance(found, dict) else None
        rule = f"be {' or '.join(map(repr, _KINDS))}, of a schema that this version knows"
        raise InvalidRecord(str(path), "kind", f"{kind!r}, schema {schema!r}", rule)
    if record.shard is None:
        raise InvalidRecord(str(path), "shard", "none", "be there: `--shard I/N` makes records that can be merged")
    return Part(path, record, record.shard)


def _told(value: object) -> str:
    return str(value) or "nothing"


def _check_conditions(parts: Sequence[Part]) -> None:
    first, *others = parts
    must = first.conditions()
    for part in others:
        had = part.conditions()
        for name in dict.fromkeys((*must, *had)):
            if had.get(name, "") != must.get(name, ""):
                part.refuse(name, had.get(name, ""), f"be that of {first.path}, {_told(must.get(name, ''))}")


def _check_disjoint(parts: Sequence[Part]) -> None:
    shards: dict[int, Part] = {}
    seen: dict[str, tuple[Path, Piece]] = {}
    for part in parts:
        same = shards.setdefault(part.shard.index, part)
        if same is not part:
            part.refuse("shard.index", f"{part.shard.index}, as {same.path}", "be that of another shard")
        for name, piece in part.pieces:
            if name in seen:
                holder, other = seen[name]
                outcome = "the same" if other == piece else "another"
                part.refuse(part.field, name, f"be there once; {holder} holds it too, with {outcome} outcome")
            seen[name] = (part.path, piece)


def _check_complete(parts: Sequence[Part]) -> None:
    there = {part.shard.index for part in parts}
    whole = parts[0].shard.count
    lacking = list(islice((index for index in range(1, whole + 1) if index not in there), _NAMED + 1))
    if lacking:
        more = ", ..." if len(lacking) > _NAMED else ""
        had = f"{words(sorted(there))} of {whole}"
        raise InvalidRecord("merge", "shards", had, f"be all of the run; missing: {words(lacking[:_NAMED])}{more}")
    for part in parts:
        if len(part.pieces) != part.shard.size:
            rule = f"be the {part.shard.size} of shard {part.shard.label} of a list of {part.shard.total}"
            part.refuse(part.field, len(part.pieces), rule)
