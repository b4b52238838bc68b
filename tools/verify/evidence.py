"""Records of ``skuda verify``, and what they say about today's kernels.

A record is valid only while the recorded hashes of the kernel, its reference and the verifying code are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from skuda.registry.backend import BUILT_IN
from skuda.registry.device import Device
from skuda.registry.errors import InvalidRecord
from skuda.registry.op import Op
from skuda.registry.sku import KernelSku
from skuda.registry.value import Size, Value
from skuda.tools.files import read_json, read_text, write_whole
from skuda.tools.verify.fingerprint import reference_hash, source_hash, verifier_hash

Verdict = Literal["verified", "failed", "skipped"]
_REFERENCES = frozenset(spec.name for spec in BUILT_IN if spec.reference)
Word = Literal["verified", "unverified", "stale", "failed", "reference"]


class Failure(Value):
    """A broken promise of a kernel, or an error.

    Attributes
    ----------
    case : int
        Number of the op's case; -1 for one of the large problems.
    problem : str
        The problem, as JSON.
    values : str
        How its inputs were drawn.
    layout : str
        Memory layout of its arrays.
    check : str
        What failed: ``bits``, ``ulp``, ``guard``, ``input``, ``repeat``, ``rows``, ``outputs`` (returned, or newly
        made), ``bind``, ``calls`` (many in a row), ``process`` (its state, or printed text) or ``error``.
    output : str
        Name of the argument; empty where the failure concerns none.
    at : tuple of int
        The first bad coordinate, in stored elements.
    got, want : str
        The value there and the expected one, each with its bits.
    message : str
        Further details.
    """

    case: int
    problem: str
    values: str
    layout: str
    check: Literal["bits", "ulp", "guard", "input", "repeat", "rows", "outputs", "bind", "calls", "process", "error"]
    output: str = ""
    at: tuple[int, ...] = ()
    got: str = ""
    want: str = ""
    message: str = ""

    def describe(self) -> str:
        """Return a description in one line."""
        where = f"{self.output}{list(self.at)}" if self.at else self.output
        told = f": got {self.got}, want {self.want}" if self.got else ""
        parts = (where + told, self.message, f"case {self.case} ({self.values}, {self.layout})")
        return f"{self.check}: " + "; ".join(part for part in parts if part)


class Promises(Value):
    """The tested promises: True where one held, False where it was broken, None where it was not tested.

    Attributes
    ----------
    bit_exact : bool or None
        Every output has the reference's bits.
    within_ulp : bool or None
        Every output is within the promised distance of the reference.
    deterministic : bool or None
        A repeated run gives the same bits.
    batch_invariant : bool or None
        Permuted rows, and a subset of the rows, give the same rows.
    """

    bit_exact: bool | None = None
    within_ulp: bool | None = None
    deterministic: bool | None = None
    batch_invariant: bool | None = None


class SkuEvidence(Value):
    """The record of one kernel.

    Attributes
    ----------
    sku : str
        Its id.
    source_hash, reference_hash : str
        Hashes of the kernel and of its reference; see `skuda.tools.verify.fingerprint`. Records without the second one
        are stale.
    verdict : str
        ``verified``, ``failed``, or ``skipped`` if it could not be run.
    cases : int
        Number of problems that were run.
    outputs : int
        Number of output elements that were compared.
    layouts : tuple of str
        Memory layouts that it accepted and was run with.
    first_failure : Failure or None
        The first failure.
    promises : Promises
        The tested promises.
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
        Distinguishes these files from other JSON in the same folder.
    schema_version : int
        Version of the record's schema.
    device : Device
        Properties of the device.
    driver : str
        Version of its driver; empty on a CPU.
    versions : dict
        Versions by name, of those that are installed: python, numpy, torch, pycuda, cuda-bindings, nvcc, nvrtc; and the
        bundles that kernels came from.
    date : str
        Time of the run, UTC.
    skuda : str
        Version of skuda.
    verifier_hash : str
        Hash of the verifying code; see `skuda.tools.verify.fingerprint`. Records without it are stale.
    seed : int
        Seed of the inputs.
    quick : bool
        Whether the large problems and some layouts were left out.
    skus : tuple of SkuEvidence
        Records of the kernels.
    """

    kind: Literal["skuda verify"] = "skuda verify"
    schema_version: Literal[1] = 1
    device: Device
    driver: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    date: str
    skuda: str
    verifier_hash: str = ""
    seed: Size
    quick: bool = False
    skus: tuple[SkuEvidence, ...]

    @property
    def failed(self) -> tuple[SkuEvidence, ...]:
        """The kernels that failed."""
        return tuple(sku for sku in self.skus if sku.verdict == "failed")

    def save(self, path: Path) -> None:
        """Write the file atomically, and create its folder if needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json(indent=1, exclude_defaults=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> EvidenceFile | None:
        """Read a file; return None if it is other JSON or has another schema version.

        Raises
        ------
        InvalidRecord
            If the file cannot be read, or is an invalid record.
        """
        try:
            found = read_json(read_text(path))
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
    """All loaded runs."""

    files: tuple[EvidenceFile, ...] = ()
    _by_sku: dict[str, list[tuple[EvidenceFile, SkuEvidence]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._by_sku = {}
        for file in sorted(self.files, key=lambda file: file.date):
            for found in file.skus:
                if found.verdict != "skipped":
                    self._by_sku.setdefault(found.sku, []).append((file, found))

    def of(self, sku_id: str) -> list[tuple[EvidenceFile, SkuEvidence]]:
        """Return a kernel's latest record from every device, without skipped ones."""
        return list({file.device.name: (file, found) for file, found in self._by_sku.get(sku_id, ())}.values())


@dataclass(frozen=True)
class Status:
    """What the evidence says about a kernel.

    Attributes
    ----------
    word : str
        ``verified``, ``unverified``, ``stale``, ``failed``, or ``reference`` for the reference itself.
    device, date : str
        Device and date of the run that the status comes from; empty if there is none.
    reason : str
        Why it is stale; empty otherwise.
    """

    word: Word
    device: str = ""
    date: str = ""
    reason: str = ""

    def describe(self) -> str:
        """Return a description in one line."""
        where = f" on {self.device}, {self.date[:10]}"
        match self.word:
            case "reference":
                return "by definition: it is the reference"
            case "verified":
                return f"yes:{where}"
            case "stale":
                return f"no: stale, {self.reason}{where}"
            case "failed":
                return f"no: failed{where}"
            case "unverified":
                return "no: nothing on this machine has recorded a comparison with the reference"


def status(sku: KernelSku, op: Op, records: Records, *, reference: bool | None = None) -> Status:
    """Return a kernel's status according to the evidence.

    Parameters
    ----------
    sku : KernelSku
        The kernel.
    op : Op
        Its op.
    records : Records
        The evidence.
    reference : bool or None
        Whether it is its op's reference; None derives that from its backend.

    Returns
    -------
    Status
        ``failed`` if the latest run of the unchanged kernel failed on any device, else ``verified`` if one verified it.
    """
    found = records.of(sku.id)
    try:
        today = (source_hash(sku), reference_hash(op)) if found else None
    except LookupError:
        today = None
    unchanged = [(file, one) for file, one in found if (one.source_hash, one.reference_hash) == today]
    current = [(file, one) for file, one in unchanged if file.verifier_hash == verifier_hash()]
    for file, _ in (one for one in current if one[1].verdict == "failed"):
        return Status("failed", file.device.name, file.date)
    if reference if reference is not None else sku.backend in _REFERENCES:
        return Status("reference")
    for file, _ in current:
        return Status("verified", file.device.name, file.date)
    for file, _ in reversed(unchanged):
        return Status("stale", file.device.name, file.date, "verified by other verifying code")
    for file, _ in reversed(found):
        return Status("stale", file.device.name, file.date, "the kernel or its reference has changed since it was run")
    return Status("unverified")


def tally(words: Iterable[Word]) -> str:
    """Count statuses: ``24 verified, 2 stale``, or the word alone if all are equal.

    Parameters
    ----------
    words : iterable of str
        One status per kernel; references are left out unless there is nothing else.
    """
    every = list(words)
    told: list[Word] = [word for word in every if word != "reference"] or every
    order: tuple[Word, ...] = ("verified", "failed", "stale", "unverified", "reference")
    counts = [(word, told.count(word)) for word in order if word in told]
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{number} {word}" for word, number in counts) or "-"


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
        verdicts = [sku.verdict for sku in found]
        counts = (verdicts.count("verified"), verdicts.count("failed"), verdicts.count("skipped"))
        rows.append(OpCounts(op, *counts, sum(sku.cases for sku in found), sum(sku.outputs for sku in found)))
    return rows


def evidence_directory() -> Path | None:
    """Return ``docs/evidence`` of the checkout that this program runs from; None in an installed wheel."""
    root = Path(__file__).resolve().parents[2]
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
        If the named folder does not exist, or a record in it is invalid.
    """
    folder = directory if directory is not None else evidence_directory()
    if folder is None or not folder.is_dir():
        if directory is not None:
            raise InvalidRecord("evidence", "--evidence", str(directory), "be a folder")
        return Records()
    found = (EvidenceFile.load(path) for path in sorted(folder.glob("*.json")) if path.is_file())
    return Records(tuple(file for file in found if file is not None))
