"""The implementation of ``skuda bench-model``."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skuda.dispatch import Dispatcher
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem
from skuda.tools import plot as drawings
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.model import ModelBench
from skuda.tools.bench.model_markdown import model_markdown
from skuda.tools.bench.model_plot import plots
from skuda.tools.bench.model_record import ModelRecord, Phase
from skuda.tools.bench.model_terminal import print_record, rows
from skuda.tools.bench.ways import WAYS
from skuda.tools.output import SavePage, chosen, progress, records, refuse, split, stderr, stdout

_ATTENTION = {name: f"{name.upper()}_ATTENTION" for name in ("cudnn", "efficient", "flash")}
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
    attention: str | None = None
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
        given |= {"--attention": self.attention} if self.attention else {}
        many = {"--decode": self.decode, "--prefill": self.prefill, "--ways": self.ways}
        given |= {option: ",".join(split(values)) for option, values in many.items() if values}
        words = [str(word) for pair in given.items() for word in pair]
        return shlex.join(["skuda", "bench-model", *words, *(["--cpu"] if self.cpu else [])])


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
        A section of the record to print as Markdown; see `model_markdown`.
    as_json : bool
        Whether to print the record as JSON instead of a table.

    Returns
    -------
    int
        0; 1 if outputs differ that must not, or if there is no CUDA device.

    Raises
    ------
    InvalidProblem
        For sizes that do not fit, an unknown word, a file that cannot be written, or torch without CUDA.
    MissingDependency
        If torch, or matplotlib for plots, is not installed.
    InvalidRecord
        For a file that is not a record.
    """
    if show is not None and (request != Request() or output is not None):
        raise InvalidProblem("bench-model", "--show", "other options beside it", "stand alone: it measures nothing")
    if plot is not None:
        drawings.check("bench-model", plot)
    record = _measured(request, output) if show is None else ModelRecord.load(show)
    if record is None:
        return 1
    if markdown is not None:
        sys.stdout.write(model_markdown(record, markdown))
    elif as_json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    elif stdout().is_terminal:
        print_record(stdout(), record)
    else:
        records(rows(record))
    for phase in record.wrong:
        stderr().print(f"skuda: {phase.phase} {phase.rows}: {phase.wrong}", style="red", soft_wrap=True)
    if plot is not None:
        drawings.save_and_tell(record, plots(record), plot)
    if page is not None:
        page(Dispatcher().registry, measured=(record,))
    return 1 if record.wrong else 0


def _measured(request: Request, output: Path | None) -> ModelRecord | None:
    """Measure the request and save the record; without a CUDA device, print a line about it and return None."""
    sizes, phases, known = request.sizes, request.phases, {way.name: way for way in WAYS}
    _check(sizes)
    if request.attention is not None and request.attention not in _ATTENTION:
        refuse("bench-model", "--attention", request.attention, _ATTENTION)
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
    with _attention(request.attention), progress() as report:
        record = bench.run(phases, request.command(seed), report)
    if output is not None:
        record.save(output)
    return record


def _attention(name: str | None) -> AbstractContextManager[object]:
    """Return the context in which torch's attention has only these kernels; None for all, of which torch chooses."""
    if name is None:
        return nullcontext()
    kernels: Any = importlib.import_module("torch.nn.attention")
    found: AbstractContextManager[object] = kernels.sdpa_kernel(getattr(kernels.SDPBackend, _ATTENTION[name]))
    return found


def _check(sizes: dict[str, int]) -> None:
    for name, by in (("hidden", 2 * sizes["heads"]), ("heads", sizes["kv_heads"])):
        if sizes[name] % by:
            raise InvalidProblem("bench-model", f"--{name}", str(sizes[name]), f"be a multiple of {by}")


def _number(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise InvalidProblem("bench-model", option, text, f"be integers from {least}, separated by commas")
    return int(text)
