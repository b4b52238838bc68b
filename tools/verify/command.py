"""``skuda verify``: checks the options, runs `verify`, and prints and saves the record."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.device import Device
from skuda.registry.registry import Registry
from skuda.tools.files import check
from skuda.tools.output import (
    SavePage,
    count,
    folded,
    indented,
    plain_table,
    progress,
    records,
    refuse,
    split,
    stderr,
    stdout,
    words,
)
from skuda.tools.verify.evidence import EvidenceFile, Records, SkuEvidence, by_op, evidence_directory, load_records
from skuda.tools.verify.verification import verify

_FAILURES_SHOWN = 10
_VERDICTS = ("verified", "failed", "skipped")


def run(
    *,
    ops: Sequence[str] = (),
    skus: Sequence[str] = (),
    backends: Sequence[str] = (),
    device: str | None = None,
    quick: bool = False,
    seed: int | None = None,
    output: Path | None = None,
    page: SavePage | None = None,
    as_json: bool = False,
) -> int:
    """Verify kernels and print the results.

    Parameters
    ----------
    ops, skus, backends : sequence of str
        Names to verify; empty for all.
    device : str or None
        An ordinal, or ``cpu``; None for the first CUDA device.
    quick : bool
        Whether to use fewer layouts and no large problems.
    seed : int or None
        Seed of the inputs; None for a fresh one.
    output : Path or None
        File for the record; None for the checkout's ``docs/evidence`` after a full run on a CUDA device.
    page : callable or None
        Writes the report page from this run and the checkout's records.
    as_json : bool
        Whether to print the record on standard output instead of a table.

    Returns
    -------
    int
        0; 1 if a kernel failed, or if no device was named and there is no CUDA device.

    Raises
    ------
    InvalidProblem
        If an op, kernel, backend or device is unknown.
    """
    # An empty tuning path: the record must not depend on this machine's measurements.
    dispatcher = Dispatcher(tuning="")
    ops, skus, backends = split(ops), split(skus), split(backends)
    _refuse_unknown(dispatcher.registry, ops, skus, backends)
    # Read the old records before this run adds its own.
    recorded = load_records() if page is not None else Records()
    place = _device(dispatcher, device)
    if place is None:
        line = "no CUDA device is here: `skuda doctor` says what is missing, --device cpu verifies the CPU's kernels"
        stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)
        return 1
    everything = not (ops or skus or backends or quick)
    path = output or (_default_path(place) if everything else None)
    if path is not None and output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        check("verify", "--output", path)
    with progress() as report:
        found = verify(
            dispatcher,
            place,
            ops=ops,
            skus=skus,
            backends=backends,
            seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
            quick=quick,
            progress=report,
            finished=partial(_print_op, perf_counter()),
        )
    if path is not None:
        found.save(path)
    if page is not None:
        page(dispatcher.registry, records=Records((*recorded.files, found)))
    if as_json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        _print(stdout(), found, path)
    else:
        records(by_op(found.skus))
        records(("failure", sku.sku, failure.describe()) for sku in found.failed if (failure := sku.first_failure))
    return 1 if found.failed else 0


def _print_op(start: float, found: Sequence[SkuEvidence]) -> None:
    """Print one line about a finished op to standard error; logs show it where no progress bar is visible."""
    (counts,) = by_op(found)
    told = words(f"{number} {word}" for word, number in counts._asdict().items() if number and word in _VERDICTS)
    line = f"{perf_counter() - start:6.1f} s  {counts.op}: {told}, {count(counts.cases, 'case')}"
    stderr().print(line, style="bold red" if counts.failed else "dim", soft_wrap=True)


def _refuse_unknown(registry: Registry, ops: Sequence[str], skus: Sequence[str], backends: Sequence[str]) -> None:
    for name in ops:
        if name not in registry.ops:
            refuse("verify", "--op", name, registry.ops, kind="a registered op", more="`skuda list` names all")
    for name in skus:
        if name not in registry:
            known = tuple(sku.id for sku in registry)
            refuse("verify", "--sku", name, known, kind="the id of a kernel", more="see `skuda list --skus`")
    for name in backends:
        if name not in registry.backends:
            refuse("verify", "--backend", name, tuple(registry.backends))


def _device(dispatcher: Dispatcher, name: str | None) -> Device | None:
    """Return the named device, or the first CUDA device; None if no name is given and there is no CUDA device."""
    here = dispatcher.devices
    cuda = {str(found.ordinal): found for found in here if found.processor == "cuda"}
    if name is None:
        return next(iter(cuda.values()), None)
    known = {**cuda, "cpu": next(found for found in here if found.processor == "cpu")}
    if name not in known:
        refuse("verify", "--device", name, known)
    return known[name]


def _default_path(device: Device) -> Path | None:
    folder = evidence_directory()
    if folder is None or device.processor == "cpu":
        return None
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}.json"


def _print(console: Console, found: EvidenceFile, path: Path | None) -> None:
    table = plain_table("op", "verified", "failed", "skipped", "cases", "outputs")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for op, verified, failed, skipped, cases, outputs in by_op(found.skus):
        table.add_row(
            Text(op, style="cyan"),
            Text(str(verified), style="green" if verified else "dim"),
            Text(str(failed), style="bold red" if failed else "dim"),
            Text(str(skipped), style="yellow" if skipped else "dim"),
            str(cases),
            str(outputs),
        )
    console.print(table)
    for sku in found.failed[:_FAILURES_SHOWN]:
        console.print()
        console.print(folded(sku.sku, console.width), style="bold red")
        if sku.first_failure is not None:
            console.print(indented(sku.first_failure.describe(), 2))
    if len(found.failed) > _FAILURES_SHOWN:
        console.print(f"\nand {len(found.failed) - _FAILURES_SHOWN} more", style="dim")
    for note in dict.fromkeys(sku.note for sku in found.skus if sku.note and sku.verdict == "skipped"):
        console.print(indented(Text(f"skipped: {note}", style="yellow"), 0))
    verdicts = [sku.verdict for sku in found.skus]
    said = words(f"{verdicts.count(word)} {word}" for word in _VERDICTS if word in verdicts)
    console.print()
    console.print(
        f"{count(len(verdicts), 'kernel')} on {found.device.describe()}: {said or 'none'}; seed {found.seed}."
    )
    console.print(
        f"recorded in {path}" if path else "not recorded: --output FILE does that", style="dim", soft_wrap=True
    )
