"""The implementation of ``skuda bench``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from skuda.dispatch import Dispatcher
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import InvalidProblem
from skuda.registry.registry import Registry
from skuda.tools import plot as drawings
from skuda.tools.bench.bench import Bench
from skuda.tools.bench.chain import Chain, chained
from skuda.tools.bench.cutlass.rival import CAPABILITY, Cutlass
from skuda.tools.bench.host import launch_costs
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.markdown import bench_markdown
from skuda.tools.bench.plot import plots
from skuda.tools.bench.record import BenchRecord
from skuda.tools.bench.rivals import Rival, rivals_of
from skuda.tools.bench.terminal import print_record, rows
from skuda.tools.output import SavePage, chosen, progress, records, refuse, split, stderr, stdout
from skuda.tools.words.cases import random_shapes, rank_of, select_cases, select_ops
from skuda.tools.words.shapes import read_rows, read_shapes

_FEW = ("cutlass", "bf16")
"""Rivals at random shapes, where compiling and tuning the others would take most of the time."""


@dataclass(frozen=True)
class Request:
    """The options of ``skuda bench``; `skuda bench --help` explains each.

    Without names, shapes or elements, the ops' defaults are used; without a seed, a random one.
    """

    names: Sequence[str] = ()
    ops: Sequence[str] = ()
    shapes: Sequence[str] = ()
    m: Sequence[str] = ()
    random: int | None = None
    chain: int | None = None
    rivals: Sequence[str] = ()
    elements: Sequence[str] = ()
    backend: str | None = None
    seed: int | None = None
    repeats: int = 20
    cutlass: Path | None = None

    @property
    def options(self) -> dict[str, Sequence[str]]:
        """Values by option, as they are typed; empty for an option that was left out."""
        many: dict[str, Sequence[str]] = {
            "--shapes": split(self.shapes),
            "--m": split(self.m),
            "--element": split(self.elements),
            "--rivals": split(self.rivals),
        }
        one = {
            "--random": self.random,
            "--chain": self.chain,
            "--backend": self.backend,
            "--seed": self.seed,
            "--repeats": self.repeats,
            "--cutlass": self.cutlass,
        }
        return many | {name: () if value is None else (str(value),) for name, value in one.items()}


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
        The cases to measure and how.
    output, plot : Path or None
        Where the record and its plots go; see `skuda.tools.plot.save`.
    show : Path or None
        A record to show; nothing is measured.
    page : callable or None
        Writes the report page.
    markdown : str or None
        A section of the record to print as Markdown tables; see `bench_markdown`.
    as_json : bool
        Whether to print the record as JSON instead of tables.

    Returns
    -------
    int
        0; 1 if a case was refused, for example for a wrong result, or if there is no CUDA device.

    Raises
    ------
    InvalidProblem
        For an unknown word, a file that cannot be written, or torch without CUDA.
    MissingDependency
        If torch, or matplotlib for plots, is not installed.
    InvalidRecord
        For a file that is not a record.
    """
    if plot is not None:
        drawings.check("bench", plot)
    dispatcher = Dispatcher()
    record = _measured(dispatcher, request, output) if show is None else _shown(show, request, output)
    if record is None:
        return 1
    _print(record, dispatcher.registry, markdown=markdown, as_json=as_json)
    if plot is not None:
        drawings.save_and_tell(record, plots(record), plot)
    if page is not None:
        page(dispatcher.registry, measured=(record,))
    if show is None and stdout().is_terminal and not as_json:
        line = f"recorded in {output}" if output else "not recorded: --output FILE does that"
        stdout().print(line, style="dim", soft_wrap=True)
    return 1 if record.refused else 0


def _shown(show: Path, request: Request, output: Path | None) -> BenchRecord:
    given = {"OPS": (*request.names, *request.ops), **request.options, "--output": output}
    other = next((name for name, value in given.items() if value and name not in ("--seed", "--repeats")), None)
    if other is not None:
        raise InvalidProblem("bench", other, "--show beside it", "be left out: --show measures nothing")
    return BenchRecord.load(show)


def _measured(dispatcher: Dispatcher, request: Request, output: Path | None) -> BenchRecord | None:
    """Measure the request and save the record; without a CUDA device, print a line about it and return None."""
    names, options, registry = split((*request.names, *request.ops)), request.options, dispatcher.registry
    ranks = {rank_of(registry.ops[op]) for op in select_ops(registry, names)}
    sizes = read_shapes(options["--shapes"], ranks, read_rows(options["--m"]))
    seed = int.from_bytes(os.urandom(4), "little") if request.seed is None else request.seed
    sizes += random_shapes(registry, names, request.random, seed)
    cases = select_cases(registry, names, sizes, options["--element"])
    if request.chain is not None:
        cases = tuple(map(chained, cases))
    if request.backend is not None and request.backend not in registry.backends:
        refuse("bench", "--backend", request.backend, tuple(registry.backends))
    known = dict.fromkeys(rival.name for case in cases for rival in rivals_of(case.problem))
    rivals = chosen("bench", "--rivals", options["--rivals"], known) or (_FEW if request.random else known)
    products = Cutlass.load(request.cutlass) if request.cutlass is not None else ""
    device = next((found for found in dispatcher.devices if found.processor == "cuda"), None)
    if device is None:
        line = "a bench needs a CUDA device, and none is here: `skuda doctor` says what is missing"
        stderr().print(f"skuda: {line}", style="yellow", soft_wrap=True)
        return None
    kind = Bench if request.chain is None else partial(Chain, layers=request.chain)
    bench = kind(
        dispatcher,
        device,
        TorchLab(device),
        seed=seed,
        repeats=request.repeats,
        backend=request.backend,
        rivals=partial(_named_rivals, tuple(rivals), cutlass=_able(products, device)),
    )
    again = command_line(names, replace(request, seed=seed).options)
    host = partial(launch_costs, dispatcher, device, request.backend)
    with progress() as report:
        record = bench.run(cases, command=again, host=host, progress=report)
    if output is not None:
        record.save(output)
    return record


def _named_rivals(names: Collection[str], problem: Descriptor, cutlass: Cutlass | str) -> tuple[Rival, ...]:
    """Return the rivals of a problem that are named."""
    return tuple(rival for rival in rivals_of(problem, cutlass) if rival.name in names)


def _able(products: Cutlass | str, device: Device) -> Cutlass | str:
    """Return CUTLASS, or the reason why the device cannot run it."""
    if isinstance(products, Cutlass) and device.compute_capability != CAPABILITY:
        has = ".".join(map(str, device.compute_capability or ("unknown",)))
        return f"its objects run on compute capability 9.0 only, and the device's is {has}"
    return products


def command_line(names: Sequence[str], options: dict[str, Sequence[str]]) -> str:
    """Return the command that repeats a run; options without values are left out."""
    given = [part for name, values in options.items() if values for part in (name, ",".join(values))]
    return shlex.join(["skuda", "bench", *names, *given])


def _print(record: BenchRecord, registry: Registry, *, markdown: str | None, as_json: bool) -> None:
    if markdown is not None:
        sys.stdout.write(bench_markdown(record, registry, markdown))
    elif as_json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        print_record(stdout(), record, registry)
    else:
        records(rows(record))
