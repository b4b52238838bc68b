"""The implementation of ``skuda bench-parallel``."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from skuda.dispatch import Dispatcher
from skuda.dispatch.select.environment import skuda_version, versions
from skuda.dispatch.select.tuning import Timing
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools import plot as drawings
from skuda.tools.output import SavePage, records, split, stderr, stdout, words
from skuda.tools.parallel.markdown import parallel_markdown
from skuda.tools.parallel.plot import plots
from skuda.tools.parallel.record import LLAMA_3_70B, Orders, ParallelRecord, RowsResult, parallel_measurer_hash
from skuda.tools.parallel.terminal import print_record, rows_of
from skuda.tools.parallel.trace import Trace
from skuda.tools.ranks.carriers import RankFailed, run_ranks

_ROWS = ("1", "2", "3", "16", "128", "2048", "8192")
_PROGRAM = ("-m", "skuda.tools.parallel.worker")


@dataclass(frozen=True)
class Request:
    """The options of ``skuda bench-parallel``; `skuda bench-parallel --help` explains each."""

    gpus: int = 2
    rows: Sequence[str] = ()
    hidden: int = LLAMA_3_70B["hidden"]
    intermediate: int = LLAMA_3_70B["intermediate"]
    cpu: bool = False
    repeats: int = 20
    seed: int | None = None
    patience: float = 900.0
    trace: bool = True

    def orders(self) -> Orders:
        """Return what the ranks do; raises `InvalidProblem` for a number of rows that is none."""
        rows = split(self.rows) or _ROWS
        for text in rows:
            if not text.isdecimal() or not int(text):
                raise InvalidProblem("bench-parallel", "--rows", text, "be integers from 1, separated by commas")
        return Orders(
            backend="gloo" if self.cpu else "nccl",
            count=self.gpus,
            hidden=self.hidden,
            intermediate=self.intermediate,
            rows=tuple(map(int, rows)),
            repeats=self.repeats,
            seed=int.from_bytes(os.urandom(4), "little") if self.seed is None else self.seed,
            patience=self.patience,
            trace=self.trace,
        )

    def command(self, orders: Orders) -> str:
        """Return the command line that repeats the run."""
        given = {"--gpus": self.gpus, "--rows": ",".join(map(str, orders.rows)), "--hidden": self.hidden}
        given |= {"--intermediate": self.intermediate, "--repeats": self.repeats, "--seed": orders.seed}
        words = [str(word) for pair in given.items() for word in pair]
        words += [word for word, given in (("--cpu", self.cpu), ("--no-trace", not self.trace)) if given]
        return shlex.join(["skuda", "bench-parallel", *words])


def run(
    request: Request,
    *,
    output: Path | None = None,
    show: Path | None = None,
    plot: Path | None = None,
    page: SavePage | None = None,
    markdown: str | None = None,
    as_json: bool = False,
) -> int:
    """Measure, or show the record of an earlier run.

    Parameters
    ----------
    request : Request
        What to measure.
    output, plot : Path or None
        Where the record and its plots go; see `skuda.tools.plot.save`.
    show : Path or None
        A record to show; nothing is measured.
    page : callable or None
        Writes the report page.
    markdown : str or None
        A section of the record to print as Markdown; see `parallel_markdown`.
    as_json : bool
        Whether to print the record as JSON instead of a table.

    Returns
    -------
    int
        0; 1 if outputs differ that must not, or if a rank failed or there are too few GPUs.

    Raises
    ------
    InvalidProblem
        For a bad option.
    MissingDependency
        If torch, or matplotlib for plots, is not installed.
    InvalidRecord
        For a file that is not a record.
    """
    if show is not None and (request != Request() or output is not None):
        raise InvalidProblem("bench-parallel", "--show", "other options beside it", "stand alone: it measures nothing")
    if plot is not None:
        drawings.check("bench-parallel", plot)
    record = _measured(request) if show is None else ParallelRecord.load(show)
    if record is None:
        return 1
    if output is not None:
        record.save(output)
    if markdown is not None:
        sys.stdout.write(parallel_markdown(record, markdown))
    else:
        _print(record, kernels=show is not None, as_json=as_json)
    if record.untraced:
        stderr().print(f"skuda: not traced: {record.untraced}", style="yellow", soft_wrap=True)
    for result in record.wrong:
        stderr().print(f"skuda: {result.rows} rows: {result.wrong}", style="red", soft_wrap=True)
    if plot is not None:
        drawings.save_and_tell(record, plots(record), plot)
    if page is not None:
        page(Dispatcher().registry, measured=(record,))
    return 1 if record.wrong else 0


def _print(record: ParallelRecord, *, kernels: bool, as_json: bool) -> None:
    if as_json:
        stdout().out(record.model_dump_json(indent=2), highlight=False)
    elif stdout().is_terminal:
        print_record(stdout(), record, kernels=kernels)
    else:
        records(rows_of(record))


def _measured(request: Request) -> ParallelRecord | None:
    """Run the ranks; without enough GPUs, print a line about it and return None."""
    if find_spec("torch") is None:
        raise MissingDependency("torch, which moves arrays between ranks,", "pip install torch")
    orders = request.orders()
    cards = [device for device in Dispatcher().devices if device.processor == "cuda"]
    if not request.cpu and len(cards) < request.gpus:
        line = (
            f"{request.gpus} GPUs are needed, and {len(cards)} are here; --cpu runs ranks on the CPU, for small sizes"
        )
        stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)
        return None
    began, date = perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    told, failed = _told(orders)
    results = tuple(_results(orders, told, failed))
    return ParallelRecord(
        device="cpu" if request.cpu else cards[0].name,
        versions=versions(("numpy", "torch", "triton")),
        date=date,
        skuda=skuda_version(),
        command=request.command(orders),
        orders=orders,
        graph=not request.cpu,
        results=results,
        untraced=_untraced(results, failed) if orders.trace else "",
        seconds=round(perf_counter() - began, 1),
        measurer_hash=parallel_measurer_hash(),
    )


def _told(orders: Orders) -> tuple[list[list[dict[str, Any]]], str]:
    """Run the ranks; return what each found, as far as it came, and why one failed, if one did."""
    failed = ""
    with TemporaryDirectory(prefix="skuda-parallel-") as name:
        folder = Path(name)
        folder.joinpath("orders.json").write_text(orders.model_dump_json(), encoding="utf-8")
        try:
            run_ranks(folder, orders.count, _PROGRAM, orders.patience)
        except RankFailed as error:
            failed = str(error)
        files = [folder / f"{rank}.json" for rank in range(orders.count)]
        return [json.loads(file.read_text(encoding="utf-8")) if file.exists() else [] for file in files], failed


def _results(orders: Orders, told: Sequence[Sequence[Mapping[str, Any]]], failed: str) -> Iterator[RowsResult]:
    for at, rows in enumerate(orders.rows):
        found = [each[at] for each in told if at < len(each)]
        wrong = next(filter(None, (each["wrong"] for each in found)), "")
        if len(found) < orders.count:
            silent = words(rank for rank, each in enumerate(told) if at >= len(each))
            yield RowsResult(rows=rows, wrong="; ".join(filter(None, (failed, wrong, f"rank {silent} told nothing"))))
            continue
        yield RowsResult(
            rows=rows,
            timings={way: Timing.of(times) for way, times in found[0].get("times", {}).items()},
            traces=_traces([each.get("traces", {}) for each in found]),
            compared=min(each.get("compared", 0) for each in found),
            with_numpy=max(each.get("with_numpy", 0) for each in found),
            wrong=wrong,
        )


def _traces(ranks: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Trace, ...]]:
    """Return the traces by way, of all ranks; what not every rank has is left out."""
    return {
        way: tuple(Trace.model_validate(each[way]) for each in ranks)
        for way in ranks[0]
        if all(way in each for each in ranks)
    }


def _untraced(results: Sequence[RowsResult], failed: str) -> str:
    missing = words(f"{one.rows} rows {way}" for one in results for way in one.timings if way not in one.traces)
    return missing and f"{missing}; {failed or 'the profiler recorded no whole replay'}"
