"""``skuda verify``: checks the options, runs `verify`, and prints and saves the record."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.registry.device import Device
from skuda.tools.files import check
from skuda.tools.frame.run import fresh_seed
from skuda.tools.options import Json, Ops, Output, Seed, Word, Words, flag, option
from skuda.tools.output import (
    OP_WORDS,
    chosen,
    count,
    folded,
    indented,
    new_console,
    one_of,
    progress,
    table_of,
    tell,
    words,
)
from skuda.tools.verify.evidence import EvidenceFile, OpCounts, SkuEvidence, by_op, default_path
from skuda.tools.verify.verification import verify

_FAILURES_SHOWN = 10


def run(
    *,
    ops: Ops = None,
    skus: Annotated[Words, option("ID", "Only these kernels.", "--sku")] = None,
    backends: Annotated[Words, option("NAME", "Only these backends.", "--backend")] = None,
    cases: Annotated[
        list[int] | None, option("N", "Only these cases, as failures number them.", "--case", min=0)
    ] = None,
    device: Annotated[Word, option("WHERE", "A CUDA device by its number, or cpu; else the first one.")] = None,
    quick: Annotated[bool, flag("--quick", help="A spot check of every kernel.")] = False,
    seed: Seed = None,
    output: Output = None,
    as_json: Json = False,
) -> int:
    """Run every kernel against its reference.

    Runs one kernel of each source over many problems, in several memory layouts between guard zones, again, with its
    rows permuted, and in every way to call it. The other kernels run over the cases of their op and a sample of the
    rest. Without filters, on a CUDA device and in a checkout, the record goes to docs/evidence. Exits with 1 where a
    kernel fails.

    A failure names the command that repeats it, such as `skuda verify --device 0 --sku ID --case 3 --seed 7`.
    """
    # An empty tuning path: the record must not depend on this machine's measurements.
    dispatcher = Dispatcher(tuning="")
    registry = dispatcher.registry
    ids = [sku.id for sku in registry]
    filters: dict[str, Any] = {
        "ops": chosen("verify", "--op", ops, registry.ops, **OP_WORDS),
        "skus": chosen("verify", "--sku", skus, ids, kind="the id of a kernel", more="see `skuda list --skus`"),
        "backends": chosen("verify", "--backend", backends, registry.backends),
        "cases": cases or (),
    }
    place = _device(dispatcher, device)
    if place is None:
        tell("no CUDA device is here: `skuda doctor` says what is missing, --device cpu verifies the CPU's kernels")
        return 1
    path = output or (None if any(filters.values()) or quick else default_path(place))
    if path is not None:
        check("verify", "--output", path)
    with progress() as report:
        found = verify(
            dispatcher,
            place,
            **filters,
            seed=fresh_seed() if seed is None else seed,
            quick=quick,
            progress=report,
            finished=partial(_print_op, perf_counter()),
        )
    if path is not None:
        found.save(path)
    if as_json:
        sys.stdout.write(found.text())
    else:
        new_console().print(table_of(by_op(found.skus), *OpCounts._fields, numbers=1))
        _print(found, path)
    return 1 if found.failed else 0


def _failures(found: EvidenceFile, one: SkuEvidence) -> Iterator[tuple[str, ...]]:
    """Yield the failures of a kernel as lines; the last one is the command that runs what failed again."""
    place = "cpu" if found.device.processor == "cpu" else str(found.device.ordinal)
    cases = {failure.case for failure in one.failures}
    only = "" if -1 in cases else "".join(f" --case {number}" for number in sorted(cases))
    repeat = f"skuda verify --device {place} --sku {one.sku}{only} --seed {found.seed}"
    return ((*failure.lines(), f"to repeat it: {repeat}") for failure in one.failures)


def _print_op(start: float, found: Sequence[SkuEvidence]) -> None:
    """Print one line about a finished op to standard error; logs show it where no progress bar is visible."""
    (counts,) = by_op(found)
    line = f"{perf_counter() - start:6.1f} s  {counts.op}: {_counted(found)}, {count(counts.cases, 'case')}"
    new_console(stderr=True).print(line, style="bold red" if counts.failed else "dim", soft_wrap=True)


def _counted(found: Iterable[SkuEvidence]) -> str:
    verdicts = Counter(one.verdict for one in found)
    return words(f"{verdicts[word]} {word}" for word in ("verified", "failed", "skipped") if word in verdicts)


def _device(dispatcher: Dispatcher, name: str | None) -> Device | None:
    """Return the named device, or the first CUDA device; None if no name is given and there is no CUDA device."""
    here = dispatcher.devices
    cuda = {str(found.ordinal): found for found in here if found.processor == "cuda"}
    if name is None:
        return next(iter(cuda.values()), None)
    known = {**cuda, "cpu": next(found for found in here if found.processor == "cpu")}
    one_of("verify", "--device", name, known)
    return known[name]


def _print(found: EvidenceFile, path: Path | None) -> None:
    console = new_console()
    for one in found.failed[:_FAILURES_SHOWN]:
        console.print()
        console.print(folded(one.sku, console.width), style="bold red")
        for lines in _failures(found, one):
            console.print(indented("\n".join(lines), 2))
    if len(found.failed) > _FAILURES_SHOWN:
        console.print(f"\nand {len(found.failed) - _FAILURES_SHOWN} more", style="dim")
    for note in dict.fromkeys(sku.note for sku in found.skus if sku.note and sku.verdict == "skipped"):
        console.print(indented(Text(f"skipped: {note}", style="yellow"), 0))
    counted = _counted(found.skus)
    whole = sum(sku.battery == "full" and sku.verdict != "skipped" for sku in found.skus)
    console.print(f"\n{count(len(found.skus), 'kernel')} on {found.device.describe()}: {counted}; seed {found.seed}.")
    console.print(f"{whole} had the full battery, the others a spot check.", style="dim")
    saved = f"recorded in {path}" if path else "not recorded: --output FILE does that"
    console.print(saved, style="dim", soft_wrap=True)
