"""Stamps records again after sources have changed, without a GPU: ``make stamps``, or ``restamp.py --help``.

A kernel whose sources are not those of its record keeps its evidence if the compiler of the record makes the same
machine code of today's sources, and launch rules give the same launches for the same problems. With --base, both trees
are compiled by what is here, so that another compiler can show it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

from skuda.dispatch import Device, Dispatcher
from skuda.dispatch.select.environment import versions
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.sources import read_source, source_hash
from skuda.tools.bench.record import BenchRecord, CaseResult
from skuda.tools.verify.evidence import EvidenceFile, SkuEvidence
from skuda.tools.verify.fingerprint import reference_hash
from skuda.tools.verify.stamps import DIGITS, meaning, stamp

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("tools/verify/stamps.py", "dispatch/compile/cubin.py")
"""The code that makes stamps. Another tree gets it, so that both are made alike."""
COMPILERS = {"pycuda": "nvcc", "cuda_core": "nvrtc"}
"""What compiles for a backend, by the name that it has in the versions of a record."""
Fate = Literal["unchanged", "stamped", "stale", "compiled by another compiler", "wrong"]


class Question(NamedTuple):
    """What a tree of sources is asked: the stamp of a kernel on a card, for a problem or for the cases of its op."""

    sku: str
    device: dict[str, Any]
    problem: dict[str, Any] | None = None
    compiles: bool = True


class Answer(NamedTuple):
    """The hashes of all sources of a kernel and of its CUDA code with flags, and its stamp with the compiler.

    All are empty if the tree has no such kernel.
    """

    source_hash: str = ""
    text: str = ""
    compiler: str = ""
    machine_code: str = ""
    launches: str = ""


Tree = Callable[[Sequence[Question]], list[Answer]]


def this_tree(questions: Sequence[Question]) -> list[Answer]:
    """Answer from the sources that this process runs."""
    dispatcher, here = Dispatcher(), versions()

    def answered(question: Question) -> Answer:
        sku = dispatcher.registry.sku(question.sku)
        if sku is None:
            return Answer()
        op, given = dispatcher.registry.ops[sku.op], question.problem
        problems = [case.problem for case in op.cases] if given is None else [op.descriptor.model_validate(given)]
        compiler, device = COMPILERS[sku.backend], Device.model_validate(question.device)
        made = stamp(sku, problems, device, dispatcher.backends[sku.backend], compiles=question.compiles)
        text = repr((read_source(sku.source).meaning, sku.entry_point, sku.flags, sku.arch.value))
        return Answer(source_hash(sku)[:DIGITS], text, f"{compiler} {here.get(compiler, '')}", *made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(answered, questions))


@contextmanager
def other_tree(commit: str) -> Iterator[Tree]:
    """Check a commit out, and yield what answers from its sources, in a process of its own.

    Raises
    ------
    subprocess.CalledProcessError
        If git does not know the commit, or the tree cannot answer.
    """
    with tempfile.TemporaryDirectory() as name:
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", name, commit], check=True)
        try:
            for path in SHARED:
                shutil.copy(ROOT / path, Path(name) / path)

            def asked(questions: Sequence[Question]) -> list[Answer]:
                surroundings = {**os.environ, "PYTHONPATH": str(Path(name) / ".typing")}
                done = subprocess.run(
                    [sys.executable, __file__, "--answer"],
                    input=json.dumps(questions),
                    env=surroundings,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                return [Answer(*each) for each in json.loads(done.stdout)]

            yield asked
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", name], check=True)


class Entry(NamedTuple):
    """One kernel of a record: what is asked of a tree about it, and what the record has."""

    question: Question
    had: Answer


def fate_of(had: Answer, now: Answer, base: Answer | None = None) -> Fate:
    """Return what has become of a kernel since it was recorded.

    Parameters
    ----------
    had, now : Answer
        What the record has, and what this tree gives.
    base : Answer, optional
        What another tree gives by the compiler that is here; it counts if its sources are those of the record.

    Returns
    -------
    str
        ``unchanged`` with the same sources, ``stamped`` with the same machine code and launches, or with sources whose
        stamp is still missing, and ``wrong`` where the record has another stamp than its own sources.
    """
    if not now.source_hash:
        return "stale"
    same = now.source_hash == had.source_hash
    if same and not had.launches:
        return "stamped" if now.compiler == had.compiler else "compiled by another compiler"
    found = [_compared(had, now)]
    if base is not None and base.source_hash == had.source_hash:
        found.append(_compared(base, now))
    if "stamped" in found:
        return "unchanged" if same else "stamped"
    if "stale" in found:
        return "wrong" if same else "stale"
    return "unchanged" if same else "compiled by another compiler"


def _compared(had: Answer, now: Answer) -> Fate:
    if had.launches != now.launches:
        return "stale"
    if had.text == now.text != "":
        return "stamped"
    if not had.machine_code or not now.machine_code or had.compiler != now.compiler:
        return "compiled by another compiler"
    return "stamped" if had.machine_code == now.machine_code else "stale"


def fates(
    entries: Sequence[Entry], sample: int = 0, base: Tree | None = None, *, fill: bool = False
) -> list[tuple[Fate, Answer]]:
    """Return what has become of kernels, with the answers of this tree.

    Kernels whose sources have changed are compared, and of the others a random sample; with `fill`, those without a
    stamp get one.
    """
    registry = built_in_registry()
    today = [_source(registry, entry.question.sku) for entry in entries]
    equal = [at for at, (entry, now) in enumerate(zip(entries, today, strict=True)) if now == entry.had.source_hash]
    stamped = [at for at in equal if entries[at].had.launches]
    kept = {at for at in equal if not fill or entries[at].had.launches}
    kept -= set(random.sample(stamped, min(sample, len(stamped))))
    asked = [at for at in range(len(entries)) if at not in kept]
    questions = [entries[at].question for at in asked]
    answers, before = this_tree(_without_code(questions)), base(_without_code(questions)) if base else []
    thens = before or [None] * len(asked)
    triples = zip(asked, answers, thens, strict=True)
    needed = [turn for turn, (at, now, then) in enumerate(triples) if _code_tells(entries[at].had, now, then)]
    again = [questions[at] for at in needed]
    for tree, known in ((this_tree, answers), (base, before)):
        if tree is not None and again:
            for at, answer in zip(needed, tree(again), strict=True):
                known[at] = answer
    found: list[tuple[Fate, Answer]] = [("unchanged", entry.had) for entry in entries]
    for turn, at in enumerate(asked):
        found[at] = fate_of(entries[at].had, answers[turn], before[turn] if before else None), answers[turn]
    return found


def _code_tells(had: Answer, now: Answer, then: Answer | None) -> bool:
    """Return whether the fate of a kernel, or its new stamp, depends on machine code, which takes long to compile."""
    if now.source_hash == had.source_hash and not had.launches:
        return now.compiler == had.compiler
    recorded = had.launches == now.launches and bool(had.machine_code) and had.compiler == now.compiler
    of_sources = then is not None and then.source_hash == had.source_hash
    return recorded or (of_sources and then.launches == now.launches and then.text != now.text)


def _without_code(questions: Sequence[Question]) -> list[Question]:
    return [question._replace(compiles=False) for question in questions]


def _source(registry: Any, name: str) -> str:
    sku = registry.sku(name)
    return source_hash(sku)[:DIGITS] if sku is not None else ""


Record = EvidenceFile | BenchRecord


def restamped(
    record: Record, sample: int = 0, base: Tree | None = None, *, fill: bool = False
) -> tuple[Record, list[tuple[str, Fate]]]:
    """Return a record with the hashes of today's sources where they give the same, and the fate of each kernel.

    Parameters
    ----------
    record : EvidenceFile or BenchRecord
    sample : int
        How many kernels with unchanged sources are stamped again, to find a wrong stamp.
    fill : bool
        Whether kernels without a stamp get one.
    base : callable, optional
        See `fate_of`.
    """
    registry, meanings = built_in_registry(), {}
    kernels = record.skus if isinstance(record, EvidenceFile) else record.cases
    ours = [at for at, each in enumerate(kernels) if _backend(each.sku) in COMPILERS and each.source_hash]
    found = fates([_entry(record, kernels[at]) for at in ours], sample, base, fill=fill)
    told, changed = [], list(kernels)
    for at, (found_fate, now) in zip(ours, found, strict=True):
        one, fate = kernels[at], found_fate
        update = {"source_hash": now.source_hash} if fate == "stamped" else {}
        if (
            fate == "stamped"
            and now.machine_code
            and not one.launches
            and now.compiler == _entry(record, one).had.compiler
        ):
            update |= {"machine_code": now.machine_code, "launches": now.launches}
        if isinstance(one, SkuEvidence) and fate in {"unchanged", "stamped"}:
            op = registry.ops[one.sku.split(".")[1]]
            had, today = one.reference_hash, reference_hash(op)[:DIGITS]
            if had != today or (fill and not one.meaning):
                meant = meanings[op.name] = meanings.get(op.name) or meaning(op)
                means_it = one.meaning == meant if one.meaning else had == today
                update = {**update, "reference_hash": today, "meaning": meant} if means_it else {}
                fate = fate if means_it else "stale"
        changed[at] = one.model_copy(update=update)
        told.append((one.sku, fate))
    field = "skus" if isinstance(record, EvidenceFile) else "cases"
    return record.model_copy(update={field: tuple(changed)}), told


def _entry(record: Record, one: SkuEvidence | CaseResult) -> Entry:
    device = record.device if isinstance(record.device, str) else record.device.model_dump(mode="json")
    compiler = COMPILERS[_backend(one.sku)]
    problem = one.problem if isinstance(one, CaseResult) else None
    had = Answer(one.source_hash, "", f"{compiler} {record.versions.get(compiler, '')}", one.machine_code, one.launches)
    return Entry(Question(one.sku, device, problem), had)


def _backend(sku: str) -> str:
    return sku.split(".")[-2] if sku else ""


def without_repeated(record: EvidenceFile, others: Iterable[EvidenceFile]) -> EvidenceFile:
    """Return a record without the kernels that a later record of the same card has."""
    later = [other for other in others if other.device.name == record.device.name and other.date > record.date]
    repeated = {one.sku for other in later for one in other.skus if one.verdict != "skipped"}
    return record.model_copy(update={"skus": tuple(one for one in record.skus if one.sku not in repeated)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Stamp the records of some files again; return 1 if one has a wrong stamp."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="records; those of docs/evidence if left out")
    parser.add_argument("--base", metavar="COMMIT", help="compare with this tree, by the compilers that are here")
    parser.add_argument(
        "--check", metavar="N", type=int, help="stamp N unchanged kernels of each record, write nothing"
    )
    parser.add_argument(
        "--fill", action="store_true", help="stamp kernels without a stamp, whose sources are unchanged"
    )
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.answer:
        sys.stdout.write(json.dumps(this_tree([Question(*each) for each in json.load(sys.stdin)])))
        return 0
    paths = given.files or sorted((ROOT / "docs" / "evidence").glob("*.json"))
    folders = {path.parent for path in paths}
    records: dict[Path, Record] = {}
    for folder in folders:
        records |= {**EvidenceFile.files(folder), **BenchRecord.files(folder)}
    verified = [one for one in records.values() if isinstance(one, EvidenceFile)]
    wrong = 0
    with other_tree(given.base) if given.base else nullcontext() as base:
        for path in paths:
            found = records.get(path)
            if found is None or isinstance(found.device, str):
                continue
            record = without_repeated(found, verified) if isinstance(found, EvidenceFile) else found
            made, told = restamped(record, given.check or 0, base, fill=given.fill)
            counts = Counter(fate for _, fate in told)
            sys.stdout.write(f"{path.name}: {', '.join(f'{number} {fate}' for fate, number in counts.items())}\n")
            for sku in [sku for sku, fate in told if fate == "wrong"]:
                sys.stdout.write(f"  {sku} has another stamp than its own sources\n")
            wrong += counts["wrong"]
            if made != found and given.check is None:
                made.save(path)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
