"""Evidence: what ``skuda verify`` found, as records, and what they say about the kernels of today.

A record speaks for a kernel only as long as the hashes of everything that makes it, and of everything that says what it
should give, are those that were recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from skuda.dispatch.device import Device
from skuda.registry.backend import BUILT_IN
from skuda.registry.errors import InvalidRecord
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.registry.value import Size, Value
from skuda.tools.fingerprint import reference_hash, source_hash

Verdict = Literal["verified", "failed", "skipped"]
_REFERENCES = frozenset(spec.name for spec in BUILT_IN if spec.reference)
Word = Literal["verified", "unverified", "stale", "failed", "reference"]


class Failure(Value):
    """The first thing that was wrong with a kernel.

    Attributes
    ----------
    case : int
        Number of the op's case; -1 for one of the large problems.
    problem : str
        The problem, as JSON.
    values : str
        How its inputs were drawn.
    layout : str
        How its arrays lay in memory.
    check : str
        What failed: ``bits``, ``ulp``, ``guard``, ``input``, ``repeat``, ``rows`` or ``error``.
    output : str
        The argument, where it was one.
    at : tuple of int
        The first bad coordinate, in stored elements.
    got, want : str
        What stood there and what should have, each with its bits.
    message : str
        The rest, in words.
    """

    case: int
    problem: str
    values: str
    layout: str
    check: Literal["bits", "ulp", "guard", "input", "repeat", "rows", "error"]
    output: str = ""
    at: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    message: str = ""

    def describe(self) -> str:
        """Say it in one line."""
        where = f"{self.output}{list(self.at)}" if self.at else self.output
        told = f": got {self.got}, want {self.want}" if self.got else ""
        parts = (where + told, self.message, f"case {self.case} ({self.values}, {self.layout})")
        return f"{self.check}: " + "; ".join(part for part in parts if part)


class Promises(Value):
    """Which promises were exercised: True where one held, False where it was broken, None where it was not tried.

    Attributes
    ----------
    bit_exact : bool or None
        Every output has the reference's bits.
    within_ulp : bool or None
        Every output is as near to the reference as promised.
    deterministic : bool or None
        A repeated run gives the same bits.
    batch_invariant : bool or None
        Permuted rows, and some of the rows alone, give the same rows.
    """

    bit_exact: bool | None = None
    within_ulp: bool | None = None
    deterministic: bool | None = None
    batch_invariant: bool | None = None


class SkuEvidence(Value):
    """What one kernel did.

    Attributes
    ----------
    sku : str
        Its id.
    source_hash, reference_hash : str
        Of the kernel and of what it was compared with; see `skuda.tools.fingerprint`. Records made before there was
        the second one are stale.
    verdict : str
        ``verified``, ``failed``, or ``skipped`` where it could not be run here.
    cases : int
        Problems that it was run over.
    outputs : int
        Output elements that were compared.
    layouts : tuple of str
        Memory layouts that it accepted and was run with.
    first_failure : Failure or None
        The first thing that was wrong.
    promises : Promises
        Which promises were exercised.
    note : str
        Why it was skipped, or what was left out.
    """

    sku: str
    source_hash: str
    reference_hash: str = ""
    verdict: Verdict
    cases: Size = 0
    outputs: Size = 0
    layouts: tuple[str, ...] = ()
    first_failure: Failure | None = None
    promises: Promises = Promises()
    note: str = ""


class EvidenceFile(Value):
    """One run of ``skuda verify`` on one device.

    Attributes
    ----------
    kind : str
        What tells these files from other JSON in the same folder.
    schema_version : int
        Of this record.
    device : Device
        The device's facts.
    driver : str
        Version of its driver; empty on a CPU.
    versions : dict
        Versions by name: python, numpy, torch, pycuda, cuda-bindings, nvcc, nvrtc, those that are there;
        the bundles that kernels came from, where any were named.
    date : str
        When it was made, UTC.
    skuda : str
        Version of skuda.
    seed : int
        What the inputs were drawn from.
    quick : bool
        Whether the large problems and two of three layouts were left out.
    skus : tuple of SkuEvidence
        The kernels.
    """

    kind: Literal["skuda verify"] = "skuda verify"
    schema_version: Literal[1] = 1
    device: Device
    driver: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    date: str
    skuda: str
    seed: Size
    quick: bool = False
    skus: tuple[SkuEvidence, ...]

    @property
    def failed(self) -> tuple[SkuEvidence, ...]:
        """The kernels that failed."""
        return tuple(sku for sku in self.skus if sku.verdict == "failed")

    def save(self, path: Path) -> None:
        """Write the file; a reader never sees half of it.

        Parameters
        ----------
        path : Path
            Where to; its folder is made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(self.model_dump_json(indent=1, exclude_defaults=False) + "\n", encoding="utf-8")
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> EvidenceFile | None:
        """Read a file; None where it is some other JSON, or of another schema.

        Raises
        ------
        InvalidRecord
            Where it cannot be read, or says that it is evidence and is not.
        """
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidRecord("evidence", str(path), str(error), "be readable JSON") from error
        if not isinstance(found, dict) or (found.get("kind"), found.get("schema_version")) != ("skuda verify", 1):
            return None
        try:
            return cls.model_validate(found)
        except InvalidRecord as error:
            raise InvalidRecord(f"evidence {path}: {error.subject}", error.field, error.had, error.must) from error


@dataclass
class Records:
    """The evidence at hand.

    Attributes
    ----------
    files : tuple of EvidenceFile
        Every run.
    """

    files: tuple[EvidenceFile, ...] = ()
    _by_sku: dict[str, list[tuple[EvidenceFile, SkuEvidence]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_sku = {}
        for file in sorted(self.files, key=lambda file: file.date):
            for found in file.skus:
                if found.verdict != "skipped":
                    self._by_sku.setdefault(found.sku, []).append((file, found))

    def of(self, sku_id: str) -> list[tuple[EvidenceFile, SkuEvidence]]:
        """Return what is recorded about a kernel: the latest of every device, skipped ones left out."""
        return list({file.device.name: (file, found) for file, found in self._by_sku.get(sku_id, ())}.values())


@dataclass(frozen=True)
class Status:
    """What the evidence says about a kernel.

    Attributes
    ----------
    word : str
        ``verified``, ``unverified``, ``stale``, ``failed``; ``reference`` for what others are compared with.
    device, date : str
        Of the run that says so; empty where none does.
    """

    word: Word
    device: str = ""
    date: str = ""

    def describe(self) -> str:
        """Say it in one line."""
        where = f" on {self.device}, {self.date[:10]}"
        match self.word:
            case "reference":
                return "by definition: it is the reference"
            case "verified":
                return f"yes:{where}"
            case "stale":
                return f"no: stale, the kernel or its reference has changed since it was run{where}"
            case "failed":
                return f"no: failed{where}"
            case "unverified":
                return "no: nothing on this machine has recorded a comparison with the reference"


def status(sku: KernelSku, op: Op, records: Records, *, reference: bool | None = None) -> Status:
    """Say what the evidence is worth for a kernel as it is today.

    Parameters
    ----------
    sku : KernelSku
        The kernel.
    op : Op
        Its op.
    records : Records
        The evidence.
    reference : bool or None
        Whether it is its op's reference; None for what its backend says.

    Returns
    -------
    Status
        ``failed`` where any device's latest run of this very kernel failed, else ``verified`` where one verified it.
    """
    found = records.of(sku.id)
    try:
        today = (source_hash(sku), reference_hash(op)) if found else None
    except LookupError:
        today = None
    current = [(file, one) for file, one in found if (one.source_hash, one.reference_hash) == today]
    for file, _ in (one for one in current if one[1].verdict == "failed"):
        return Status("failed", file.device.name, file.date)
    if reference if reference is not None else sku.backend in _REFERENCES:
        return Status("reference")
    for file, _ in current:
        return Status("verified", file.device.name, file.date)
    if found:
        file, _ = found[-1]
        return Status("stale", file.device.name, file.date)
    return Status("unverified")


def tally(words: Iterable[Word]) -> str:
    """Count statuses in a few words: ``24 verified, 2 stale``; the one word alone where all are alike.

    Parameters
    ----------
    words : iterable of str
        One per kernel; references are left out unless there is nothing else.
    """
    every = list(words)
    told: list[Word] = [word for word in every if word != "reference"] or every
    order: tuple[Word, ...] = ("verified", "failed", "stale", "unverified", "reference")
    counts = [(word, told.count(word)) for word in order if word in told]
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{number} {word}" for word, number in counts) or "-"


class OpCounts(NamedTuple):
    """What a run did with an op's kernels: how many of them came out how, over how many cases and output elements."""

    op: str
    verified: int
    failed: int
    skipped: int
    cases: int
    outputs: int


def by_op(found: EvidenceFile) -> list[OpCounts]:
    """Count a run's verdicts op by op.

    Parameters
    ----------
    found : EvidenceFile
        The run.
    """
    ops: dict[str, list[SkuEvidence]] = {}
    for sku in found.skus:
        ops.setdefault(sku.sku.split(".")[1], []).append(sku)
    rows = []
    for op, skus in sorted(ops.items()):
        verdicts = [sku.verdict for sku in skus]
        counts = (verdicts.count("verified"), verdicts.count("failed"), verdicts.count("skipped"))
        rows.append(OpCounts(op, *counts, sum(sku.cases for sku in skus), sum(sku.outputs for sku in skus)))
    return rows


def evidence_directory() -> Path | None:
    """Return ``docs/evidence`` of the checkout that this program runs from; None in an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root / "docs" / "evidence" if (root / "pyproject.toml").is_file() else None


def load_records(directory: Path | None = None) -> Records:
    """Read every record in a folder.

    Parameters
    ----------
    directory : Path or None
        The folder; None for the checkout's, which may be absent.

    Raises
    ------
    InvalidRecord
        Where the folder that was named is not there, or a record in it is broken.
    """
    folder = directory if directory is not None else evidence_directory()
    if folder is None or not folder.is_dir():
        if directory is not None:
            raise InvalidRecord("evidence", "--evidence", str(directory), "be a folder")
        return Records()
    found = (EvidenceFile.load(path) for path in sorted(folder.glob("*.json")))
    return Records(tuple(file for file in found if file is not None))
