"""Every run that measured something, on the report page."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from skuda.registry.registry import Registry
from skuda.tools.bench.model_record import ModelRecord
from skuda.tools.bench.record import BenchRecord
from skuda.tools.parallel.record import ParallelRecord
from skuda.tools.report.markup import el
from skuda.tools.report.models import model, training
from skuda.tools.report.parallel import parallel
from skuda.tools.report.records import bench
from skuda.tools.train.record import TrainRecord
from skuda.tools.verify.evidence import evidence_directory

Measured = BenchRecord | ModelRecord | ParallelRecord | TrainRecord
KINDS: tuple[type[Measured], ...] = (BenchRecord, ModelRecord, ParallelRecord, TrainRecord)


def load_measured(directory: Path | None = None) -> tuple[Measured, ...]:
    """Read every record of the commands that measure, by kind and date; None is the checkout's ``docs/evidence``.

    Raise `InvalidRecord` if a file cannot be read, or if a file of these kinds is not a valid record.
    """
    folder = directory if directory is not None else evidence_directory()
    runs: list[Measured] = []
    for kind in KINDS:
        runs += sorted(kind.files(folder).values(), key=lambda run: run.date)
    return tuple(runs)


def measured_of(runs: Sequence[Measured], ops: Container[str]) -> tuple[Measured, ...]:
    """Return the runs that timed kernels of some ops, each with the cases of these ops alone."""
    timed = ((run, tuple(case for case in run.cases if case.op in ops)) for run in runs if isinstance(run, BenchRecord))
    return tuple(run.model_copy(update={"cases": cases, "host": ()}) for run, cases in timed if cases)


def measured(records: Sequence[Measured], registry: Registry) -> Element:
    """Return the runs with their tables and, if matplotlib is installed, their plots.

    A case whose kernel differs from the registry's is marked.
    """
    parts = [part for at, record in enumerate(records) for part in _run(record, registry, f"run{at}")]
    if not parts:
        parts = [el("p", "No run is recorded here: ", el("code", "skuda bench --output FILE"), " makes one.")]
    return el("section", el("h2", "Measured", id="measured"), *parts)


def _run(record: Measured, registry: Registry, name: str) -> Iterator[Element]:
    if isinstance(record, BenchRecord):
        return bench(record, registry, name)
    if isinstance(record, ModelRecord):
        return model(record, name)
    return parallel(record, name) if isinstance(record, ParallelRecord) else training(record, name)
