"""The implementation of ``skuda bench-model``."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from skuda.dispatch import Dispatcher
from skuda.dispatch.device import HOST
from skuda.registry.errors import InvalidProblem
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.model import ModelBench
from skuda.tools.bench.model_record import ModelRecord, Phase, PhaseResult
from skuda.tools.bench.ways import WAYS
from skuda.tools.output import chosen, heading, indented, plain_table, progress, records, split, stderr, stdout

_DECODE, _PREFILL = ("1", "16", "64"), ("2048", "8192")


@dataclass(frozen=True)
class Request:
    """The options of ``skuda bench-model``; `skuda bench-model --help` explains each.

    Without a seed, a random one is used; without phases and ways, all.
    """

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32
    cache: int = 1024
    decode: Sequence[str] = ()
    prefill: Sequence[str] = ()
    ways: Sequence[str] = ()
    cpu: bool = False
    repeats: int = 20
    seed: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the stack by name."""
        names = ("hidden", "intermediate", "heads", "kv_heads", "layers")
        return {name: getattr(self, name) for name in names}

    @property
    def phases(self) -> tuple[tuple[Phase, int, int], ...]:
        """Phase, rows and cache of everything to measure."""
        decode, prefill = split(self.decode), split(self.prefill)
        if not decode and not prefill:
            decode, prefill = _DECODE, _PREFILL
        found: list[tuple[Phase, int, int]] = [("decode", _number("--decode", n, 1), self.cache) for n in decode]
        rows = (_number("--prefill", n, 2) for n in prefill)
        return (*found, *(("prefill", n, n) for n in rows))

    def command(self, seed: int) -> str:
        """Return the command line that repeats the run."""
        given: dict[str, object] = {f"--{name.replace('_', '-')}": size for name, size in self.sizes.items()}
        given |= {"--cache": self.cache, "--repeats": self.repeats, "--seed": seed}
        many = {"--decode": self.decode, "--prefill": self.prefill, "--ways": self.ways}
        given |= {option: ",".join(split(values)) for option, values in many.items() if values}
        words = [str(word) for pair in given.items() for word in pair]
        return shlex.join(["skuda", "bench-model", *words, *(["--cpu"] if self.cpu else [])])


def run(request: Request, *, output: Path | None = None, show: Path | None = None, as_json: bool = False) -> int:
    """Measure, or show the record of an earlier run.

    Parameters
    ----------
    request : Request
        What to measure.
    output : Path or None
        Where the record goes.
    show : Path or None
        A record to show; nothing is measured.
    as_json : bool
        Whether to print the record as JSON instead of a table.

    Returns
    -------
    int
        0; 1 if outputs differ that must not, or if there is no CUDA device.

    Raises
    ------
    InvalidProblem
        For sizes that do not fit, an unknown way, or torch without CUDA.
    MissingDependency
        If torch is not installed.
    InvalidRecord
        For a file that is not a record.
    """
    if show is not None and (request != Request() or output is not None):
        raise InvalidProblem("bench-model", "--show", "other options beside it", "stand alone: it measures nothing")
    record = _measured(request, output) if show is None else ModelRecord.load(show)
    if record is None:
        return 1
    if as_json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        print_record(stdout(), record)
    else:
        records(rows(record))
    for phase in record.wrong:
        stderr().print(f"skuda: {phase.phase} {phase.rows}: {phase.wrong}", style="red", soft_wrap=True)
    return 1 if record.wrong else 0


def _measured(request: Request, output: Path | None) -> ModelRecord | None:
    """Measure the request and save the record; without a CUDA device, print a line about it and return None."""
    sizes, phases, known = request.sizes, request.phases, {way.name: way for way in WAYS}
    _check(sizes)
    names = chosen("bench-model", "--ways", split(request.ways), tuple(known)) or tuple(known)
    needed = {way.base or way.name for way in WAYS if way.name in names or way.ours}
    ways = tuple(way for way in WAYS if way.name in names or way.ours or way.name in needed)
    devices = Dispatcher().devices
    device = HOST if request.cpu else next((found for found in devices if found.processor == "cuda"), None)
    if device is None:
        line = "a bench of a model needs a CUDA device, and none is here; --cpu runs it on the CPU, for small sizes"
        stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)
        return None
    seed = int.from_bytes(os.urandom(4), "little") if request.seed is None else request.seed
    lab = TorchLab(device)
    llama: Any = importlib.import_module("skuda.tools.bench.llama")
    bench = ModelBench(device, lab, llama.Sizes(**sizes), ways, seed, request.repeats)
    with progress() as report:
        record = bench.run(phases, request.command(seed), report)
    if output is not None:
        record.save(output)
    return record


def _check(sizes: dict[str, int]) -> None:
    for name, by in (("hidden", 2 * sizes["heads"]), ("heads", sizes["kv_heads"])):
        if sizes[name] % by:
            raise InvalidProblem("bench-model", f"--{name}", str(sizes[name]), f"be a multiple of {by}")


def _number(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InvalidProblem("bench-model", option, text, f"be integers from {least}, separated by commas")
    return int(text)


def rows(record: ModelRecord) -> Iterator[tuple[object, ...]]:
    """Yield phase, rows, cache, way, median, p10 and p90 in us, ratio, error, rounds, and what went wrong."""
    for phase in record.phases:
        for way in phase.ways:
            timing = way.timing
            times = (timing.median, timing.p10, timing.p90) if timing else (None, None, None)
            rounds = timing.rounds if timing else None
            shape = (phase.phase, phase.rows, phase.cache)
            yield (*shape, way.name, *times, way.ratio, way.error, rounds, way.refused or phase.wrong)
    for cost in record.host:
        times = (cost.timing.median, cost.timing.p10, cost.timing.p90) if cost.timing else (None, None, None)
        yield ("host", None, None, cost.name, *times, None, None, None, cost.refused)


def print_record(console: Console, record: ModelRecord) -> None:
    """Print a record for a person."""
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in record.sizes.items())
    console.print(heading(f"Llama stack: {sizes}"))
    console.print(indented(Text(record.weights, style="dim"), 2))
    names = list(record.computes)
    table = plain_table("phase", *(f"{name} us" for name in names), "gain", indent=2, numbers=1)
    for phase in record.phases:
        table.add_row("", Text(f"{phase.phase} {phase.rows}", style="cyan"), *_cells(phase))
    table.add_row("", "weights MiB", *(f"{record.bytes[n] / 2**20:.1f}" if n in record.bytes else "" for n in names))
    console.print(table)
    timed = "replays of a CUDA graph" if record.graph else "calls on the CPU, without a graph"
    notes = [
        f"{timed}; times are those of all layers; (NAME: x) is its time over the fastest of ours",
        "gain: the faster of the bf16 ways over the fastest of ours",
        *(f"{name}: {what}" for name, what in record.computes.items()),
    ]
    for line in notes:
        console.print(indented(Text(line, style="dim"), 2))
    warnings = [f"stale: {record.outdated}"] if record.outdated else []
    warnings += [f"{name} is absent: {reason}" for name, reason in record.absent.items()]
    for line in warnings:
        console.print(indented(Text(line, style="yellow"), 2))
    for cost in record.host:
        text = f"{cost.timing.median:.1f} us a call" if cost.timing else cost.refused
        console.print(indented(Text(f"host, {cost.name}: {text}"), 2))
    again = f"{record.device.describe()}, driver {record.driver or 'unknown'}, {record.date}; again: {record.command}"
    console.print(again, soft_wrap=True)


def _cells(phase: PhaseResult) -> list[Text]:
    cells = []
    for way in phase.ways:
        if way.timing is None:
            cells.append(Text("wrong" if phase.wrong else "-", style="bold red" if phase.wrong else "dim"))
        else:
            cells.append(Text(f"{way.timing.median:.1f} ({way.ratio:.2f}x)"))
    return [*cells, Text("" if phase.gain is None else f"{phase.gain:.2f}x", style="bold")]
