"""Records of ``skuda verify``, and what they say about today's kernels.

A record is valid while the recorded hashes of the kernel and of its reference are those of today's sources, and while
the checks are as strong as today's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, model_validator

from skuda.registry.device import Device
from skuda.registry.errors import InvalidRecord
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.registry.value import Size, Value
from skuda.tools.frame.record import Record
from skuda.tools.parse.devices import card_words
from skuda.tools.verify.fingerprint import reference_hash, source_hash

Word = Literal["verified", "failed", "stale", "unverified", "reference"]
_WORDS: tuple[Word, ...] = get_args(Word)
DIGITS = 16
"""Hexadecimal digits of a hash that a record keeps: enough to see a change."""
Digest = Annotated[str, AfterValidator(lambda digest: digest[:DIGITS])]
METHOD = 1
"""Version of the checks. Whoever makes them stronger raises it, which makes earlier records stale."""
_OWN = ("sku", "source_hash", "cases", "runs", "outputs", "machine_code", "launches")
"""Fields that differ from kernel to kernel; kernels that are equal in all others share them in the file."""


class Failure(Value):
    """A check that failed: on which case, at which stored element, and in which layouts.

    `case` is -1 where the failure is of no case, and `problem` is JSON. `got` and `want` are values with their bits.
    `more` other cases fail, too.
    """

    check: str
    case: int = -1
    problem: str = ""
    values: str = ""
    layout: str = ""
    output: str = ""
    at: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    message: str = ""
    passes: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    more: Size = 0

    def describe(self) -> str:
        """Return a description in one line."""
        where = f"{self.output}{list(self.at)}" if self.got else self.output
        values = f" is {self.got}, must be {self.want}" if self.got else ""
        drawn = ", ".join(filter(None, (self.values, self.layout)))
        case = f"case {self.case}" + (f" ({drawn})" if drawn else "") if self.case >= 0 else ""
        return f"{self.check}: " + "; ".join(filter(None, (where + values, self.message, case)))

    def lines(self) -> tuple[str, ...]:
        """Return a full description."""
        found = [self.describe(), self.problem and f"problem: {self.problem}"]
        if self.passes and self.fails:
            found.append(f"layouts: {', '.join(self.passes)} pass; {', '.join(self.fails)} fail")
        if self.more:
            found.append(f"{self.more} more cases fail this check")
        return tuple(filter(None, found))


class SkuEvidence(Value):
    """The record of one kernel: how much of it was run, and what failed.

    A `battery` is ``full``, or ``spot`` for a sample. `cases`, `runs` and `outputs` count problems, launches and output
    elements. `layouts` are those that the kernel accepted, `checks` those that were run, and `failures` the first of
    each check. A `note` says why a kernel was skipped, or what was left out. Hashes are cut to their first digits:
    of sources, and of what they gave, which stays the same through a refactoring. See `skuda.tools.verify.stamps` for
    `machine_code`, `launches` and `meaning`, that of the reference; they are empty where nothing is compiled.
    """

    sku: str
    source_hash: Digest
    reference_hash: Digest = ""
    machine_code: Digest = ""
    launches: Digest = ""
    meaning: Digest = ""
    verdict: Literal["verified", "failed", "skipped"]
    battery: Literal["full", "spot"] = "full"
    cases: Size = 0
    runs: Size = 0
    outputs: Size = 0
    layouts: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    note: str = ""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.verdict == "failed") is not bool(self.failures):
            rule = f"be given if {self.sku} failed, and only then"
            self.refuse("failures", f"{len(self.failures)} and {self.verdict}", rule)
        verified = self.verdict == "verified"
        if not (0 < self.cases <= self.runs if verified else self.runs or not self.outputs):
            had = f"{self.cases} with {self.runs} runs and {self.outputs} outputs"
            self.refuse("cases", had, f"be at least 1 if {self.sku} is verified, with a run each")
        return self


class EvidenceFile(Record):
    """One run of ``skuda verify`` on one device.

    `versions` are those of Python, the libraries and compilers that are installed, and bundles of kernels. `quick` runs
    spot checks only. `skus` are sorted.
    """

    METHOD: ClassVar[int] = METHOD
    kind: Literal["skuda verify"] = "skuda verify"
    schema_version: Literal[3] = 3
    device: Device
    seed: Size
    quick: bool = False
    skus: tuple[SkuEvidence, ...]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        twice = [sku for sku, count in Counter(one.sku for one in self.skus).items() if count > 1]
        if not self.skus or twice:
            self.refuse("skus", f"{twice[0]} twice" if twice else "none", "be at least one kernel, each once")
        return self

    @property
    def failed(self) -> tuple[SkuEvidence, ...]:
        """The kernels that failed."""
        return tuple(sku for sku in self.skus if sku.verdict == "failed")

    def text(self) -> str:
        """Return the record as JSON; kernels with equal results are a group, and each has a line in it."""
        groups: dict[str, list[str]] = {}
        for one in self.skus:
            found = one.model_dump(mode="json", exclude_defaults=True)
            own = json.dumps([found.pop(name, "" if name in {"machine_code", "launches"} else 0) for name in _OWN])
            groups.setdefault(json.dumps(found), []).append(own)
        lines = [shared[:-1] + ', "kernels": [\n' + ",\n".join(rows) + "]}" for shared, rows in groups.items()]
        kind = {"kind": self.kind, "schema_version": self.schema_version}
        facts = json.dumps(kind | self.model_dump(mode="json", exclude={"skus", "command", "seconds"}))
        return facts[:-1] + ',\n"groups": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def _read(cls, path: Path) -> Any:
        """Read a file; the members of its groups become kernels."""
        found = super()._read(path)
        if not isinstance(found, dict) or found.get("kind") != "skuda verify" or found.get("schema_version") != 3:
            return found
        try:
            skus: list[dict[str, Any]] = []
            for group in found.pop("groups"):
                rows = group.pop("kernels")
                skus += ({**group, **dict(zip(_OWN, row, strict=True))} for row in rows)
            return {**found, "skus": sorted(skus, key=lambda one: str(one["sku"]))}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            rule = "be objects with `kernels`, as `skuda verify` writes them"
            raise InvalidRecord(f"evidence {path}", "groups", f"{type(error).__name__}: {error}", rule) from error


class Records:
    """All loaded runs."""

    def __init__(self, files: Iterable[EvidenceFile] = ()) -> None:
        self.files = tuple(files)
        self._by_sku: dict[str, dict[str, tuple[EvidenceFile, SkuEvidence]]] = {}
        for file in sorted(self.files, key=lambda file: file.date):
            for one in (one for one in file.skus if one.verdict != "skipped"):
                self._by_sku.setdefault(one.sku, {})[file.device.name] = file, one

    def of(self, sku_id: str) -> list[tuple[EvidenceFile, SkuEvidence]]:
        """Return a kernel's latest record from every device, without skipped ones."""
        return list(self._by_sku.get(sku_id, {}).values())


@dataclass(frozen=True)
class KernelStatus:
    """What the evidence says about a kernel.

    `device` and `date` are those of the run that it comes from, `reason` says why it is stale, and `cards` are the
    short names of the devices that the kernel was verified on, failed on, or was last run on.
    """

    word: Word
    device: str = ""
    date: str = ""
    reason: str = ""
    cards: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The word with the cards: ``verified on H100 and H200``, ``stale, last run on H200``."""
        word = "stale, last run" if self.word == "stale" and self.cards else self.word
        return f"{word} on {' and '.join(self.cards)}" if self.cards else word

    def describe(self) -> str:
        """Return a description in one line."""
        match self.word:
            case "reference":
                return "by definition: it is the reference"
            case "unverified":
                return "no: no record here compares it with the reference"
            case "stale":
                return f"no: stale, {self.reason} ({' and '.join(self.cards)}, {self.date[:10]})"
            case _:
                return f"{'yes' if self.word == 'verified' else 'no'}: {self.words}, {self.date[:10]}"


def status(sku: KernelSku, op: Op, records: Records, *, reference: bool = False) -> KernelStatus:
    """Return a kernel's status; `reference` says whether it is the reference of its op.

    It is ``failed`` if the latest run of the unchanged kernel failed on any device, else ``verified`` if one verified
    it.
    """
    found = records.of(sku.id)
    try:
        today = (source_hash(sku)[:DIGITS], reference_hash(op)[:DIGITS]) if found else None
    except LookupError:
        today = None
    unchanged = [(file, one) for file, one in found if (one.source_hash, one.reference_hash) == today]
    current = [(file, one) for file, one in unchanged if file.method == METHOD]
    failed = [(file, one) for file, one in current if one.verdict == "failed"]
    if not failed and (reference or not found):
        return KernelStatus("reference" if reference else "unverified")
    word: Word = "failed" if failed else "verified" if current else "stale"
    runs = failed or current or (unchanged or found)[-1:]
    last, reason = runs[-1][0], ""
    if not current:
        changed = "the kernel or its reference has changed since it was run"
        reason = f"verified by method {runs[-1][0].method}, today's is {METHOD}" if unchanged else changed
    cards = tuple(dict.fromkeys(card_words(file.device.name) for file, _ in runs))
    return KernelStatus(word, last.device.name, last.date, reason, cards)


def tally(found: Iterable[KernelStatus]) -> str:
    """Count statuses: ``24 verified on H200, 2 stale``, or the words alone if all are equal.

    References are left out unless there is nothing else.
    """
    every = sorted(found, key=lambda status: _WORDS.index(status.word))
    shown = [status for status in every if status.word != "reference"] or every
    counts = Counter(status.words for status in shown)
    return (
        next(iter(counts))
        if len(counts) == 1
        else ", ".join(f"{number} {words}" for words, number in counts.items()) or "-"
    )


class OpCounts(NamedTuple):
    """Counts of an op's kernels by verdict, and the totals of their cases and compared output elements."""

    op: str
    verified: int
    failed: int
    skipped: int
    cases: int
    outputs: int


def by_op(skus: Iterable[SkuEvidence]) -> list[OpCounts]:
    """Count the verdicts of one run, op by op."""
    ops: dict[str, list[SkuEvidence]] = {}
    for sku in skus:
        ops.setdefault(sku.sku.split(".")[1], []).append(sku)
    rows = []
    for op, found in sorted(ops.items()):
        verdicts = Counter(one.verdict for one in found)
        counts = (verdicts["verified"], verdicts["failed"], verdicts["skipped"])
        rows.append(OpCounts(op, *counts, sum(one.cases for one in found), sum(one.outputs for one in found)))
    return rows


def default_path(device: Device) -> Path | None:
    """Return where a full run on a GPU is recorded, ``docs/evidence/h200-verify.json``; None where it is not."""
    folder = evidence_directory()
    if folder is None or device.processor == "cpu":
        return None
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', card_words(device.name).lower()).strip('-')}-verify.json"


def evidence_directory() -> Path | None:
    """Return ``docs/evidence`` of the checkout that this program runs from; None in an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    return root / "docs" / "evidence" if (root / "pyproject.toml").is_file() else None


def load_records(directory: Path | None = None) -> Records:
    """Read every record in a folder; None is the checkout's, which may be absent.

    Raises
    ------
    InvalidRecord
        If the named folder does not exist, or a record in it is invalid.
    """
    folder = directory if directory is not None else evidence_directory()
    if folder is None or not folder.is_dir():
        if directory is not None:
            raise InvalidRecord("evidence", "--evidence", str(directory), "be a folder")
        return Records()
    return Records(EvidenceFile.files(folder).values())
