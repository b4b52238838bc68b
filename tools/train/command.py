"""The implementation of ``skuda train-check``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from skuda.dispatch import Dispatcher
from skuda.dispatch.select.environment import skuda_version, versions
from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.tools import plot as drawings
from skuda.tools.output import SavePage, chosen, count, plain_table, progress, records, refuse, stdout, tell
from skuda.tools.requirement import print_judged
from skuda.tools.train import corpus
from skuda.tools.train.judged import judged
from skuda.tools.train.markdown import train_markdown
from skuda.tools.train.plot import plots
from skuda.tools.train.record import BASELINE, FIGURES, Shape, TrainRecord, figures, train_measurer_hash

_PACKAGES = ("numpy", "torch")
_INTERVALS = 100
"""Points of a loss curve."""


@dataclass(frozen=True)
class Request:
    """The options of ``skuda train-check``; `skuda train-check --help` explains each."""

    ways: Sequence[str] = ()
    device: str = "auto"
    steps: int = 2000
    batch: int = 32
    width: int = 512
    layers: int = 8
    heads: int = 8
    hidden: int = 1408
    length: int = 512
    windows: int = 512
    learning_rate: float = 1e-3
    tolerance: float = 1.0
    compiled: bool = False
    seed: int | None = None

    @property
    def shape(self) -> Shape:
        """The sizes of the model; raises `InvalidProblem` for sizes that do not fit."""
        try:
            return Shape(width=self.width, layers=self.layers, heads=self.heads, hidden=self.hidden, length=self.length)
        except InvalidRecord as error:
            raise InvalidProblem("train-check", f"--{error.field}", error.had, error.must) from error


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
    """Train and compare, or show the record of an earlier run.

    Parameters
    ----------
    request : Request
        What is trained, and how.
    output, plot : Path or None
        Where the record and its plots go; see `skuda.tools.plot.save`.
    show : Path or None
        A record to show; nothing is trained.
    page : callable or None
        Writes the report page.
    markdown : str or None
        A section of the record to print as Markdown; see `train_markdown`.
    as_json : bool
        Whether to print the record as JSON instead of a table.

    Returns
    -------
    int
        0; 1 if a way is worse than bf16 by more than the tolerance.

    Raises
    ------
    InvalidProblem
        For sizes that do not fit, an unknown word, a file that cannot be written, or a device that is not here.
    MissingDependency
        If torch, or matplotlib for plots, is not installed.
    InvalidRecord
        For a file that is not a record.
    """
    if plot is not None:
        drawings.check("train-check", plot)
    if show is None:
        record = train_check(request)
        if output is not None:
            record.save(output)
    elif output is not None:
        raise InvalidProblem("train-check", "--output", "--show beside it", "be left out: --show trains nothing")
    else:
        record = TrainRecord.load(show)
    if markdown is not None:
        sys.stdout.write(train_markdown(record, markdown))
    elif as_json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    else:
        _print(record)
    for miss in record.misses:
        tell(miss)
    if plot is not None:
        drawings.save_and_tell(record, plots(record), plot)
    if page is not None:
        page(Dispatcher().registry, measured=(record,))
    return 1 if record.misses else 0


def train_check(request: Request) -> TrainRecord:
    """Train a small model in each way, and return what came of it.

    Raises
    ------
    InvalidProblem, MissingDependency
        As `run` does.
    """
    if find_spec("torch") is None:
        raise MissingDependency("torch, which trains the model,", "pip install torch")
    shape, text = request.shape, corpus.load()
    if min(text.trained.size, text.held_out.size) <= shape.length:
        rule = f"be below {min(text.trained.size, text.held_out.size)}, the bytes of the smaller part of the text"
        raise InvalidProblem("train-check", "--length", str(shape.length), rule)
    import torch

    from skuda.tools.train.training import WAYS, Plan, train

    names = chosen("train-check", "--way", request.ways, WAYS) or tuple(WAYS)
    places = {"cpu": True, "cuda": torch.cuda.is_available()}
    place = request.device if request.device != "auto" else "cuda" if places["cuda"] else "cpu"
    if not places.get(place):
        refuse("train-check", "--device", request.device, ("auto", *(name for name, here in places.items() if here)))
    began, date = perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    plan = Plan(
        shape=shape,
        corpus=text,
        device=torch.device(place),
        seed=int.from_bytes(os.urandom(4), "little") if request.seed is None else request.seed,
        steps=request.steps,
        batch=request.batch,
        every=max(1, request.steps // _INTERVALS),
        windows=request.windows,
        learning_rate=request.learning_rate,
        compiled=request.compiled,
    )
    with progress() as report:

        def told(way: int, done: int) -> None:
            if report is not None:
                report(way * plan.steps + done, len(names) * plan.steps, names[way])

        results = tuple(train(name, plan, partial(told, way)) for way, name in enumerate(names))
    return TrainRecord(
        device=torch.cuda.get_device_name() if place == "cuda" else "cpu",
        versions=versions(_PACKAGES),
        date=date,
        skuda=skuda_version(),
        command=_command_line(request, names, plan.seed),
        seconds=perf_counter() - began,
        measurer_hash=train_measurer_hash(),
        seed=plan.seed,
        shape=shape,
        parameters=sum(parameter.numel() for parameter in plan.initial().parameters()),
        steps=plan.steps,
        batch=plan.batch,
        every=plan.every,
        windows=plan.windows,
        learning_rate=plan.learning_rate,
        compiled=plan.compiled,
        tolerance=request.tolerance,
        corpus=text.facts,
        ways=results,
    )


def _command_line(request: Request, names: Sequence[str], seed: int) -> str:
    """Return the command that repeats a run; options with their default are left out."""
    given = [("--way", ",".join(names))]
    plain = ("device", "steps", "batch", "width", "layers", "heads", "hidden", "length", "windows", "learning_rate")
    for field in (*plain, "tolerance"):
        value = getattr(request, field)
        if value != Request.__dataclass_fields__[field].default:
            given.append((f"--{field.replace('_', '-')}", str(value)))
    words = [word for pair in (*given, ("--seed", str(seed))) for word in pair]
    return shlex.join(["skuda", "train-check", *words, *(["--compile"] if request.compiled else [])])


def _print(record: TrainRecord) -> None:
    """Print a table for a person, or records for a pipe: way, figure, value and per cent above bf16."""
    rows = list(figures(record))
    console = stdout()
    if not console.is_terminal:
        records(rows)
        return
    sizes = f"{record.parameters / 1e6:.1f} M parameters, {count(record.steps, 'step')} of {record.batch} sequences"
    console.print(f"{sizes} on {record.device}", soft_wrap=True)
    table = plain_table("way", "figure", "value", f"above {BASELINE}", numbers=2)
    for way, name, value, above in rows:
        table.add_row(way, FIGURES.get(name, name), f"{value:.4f}", "" if above is None else f"{above:+.2f} %")
    console.print(table)
    if record.outdated:
        console.print(f"stale: {record.outdated}", style="yellow")
    print_judged(console, judged(record))
    again = f"{record.device}, {record.date}; again: {record.command}"
    console.print(again, soft_wrap=True)
