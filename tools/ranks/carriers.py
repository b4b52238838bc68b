"""Who the ranks are: processes that torch.distributed joins, or threads of one process with NumPy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

from skuda.dispatch.settings import environment
from skuda.dispatch.shard.group import GroupBroken
from skuda.registry.errors import SkudaError
from skuda.tools.ranks.framework import NUMPY
from skuda.tools.ranks.result import Line
from skuda.tools.ranks.work import BATCHES, WAYS, Hashes, Orders, Task, told

THREADS = "threads"
BROKEN = 3
"""Exit status of a rank that was left alone by another."""

_LOOK = 0.05
_LINE = 500
_GRACE = 2.0
"""Seconds in which ranks can still write what they found when another has failed."""


class RankFailed(SkudaError):
    """Ranks that failed or took too long; the others were ended.

    Attributes
    ----------
    ranks : tuple of int
        Their numbers.
    reason : str
        What happened.
    """

    def __init__(self, ranks: tuple[int, ...], reason: str) -> None:
        super().__init__(ranks, reason)
        self.ranks, self.reason = ranks, reason

    def __str__(self) -> str:
        return f"rank {', '.join(map(str, self.ranks))} failed: {self.reason}"


class Carrier(Protocol):
    """What runs a task on groups of ranks."""

    def run(self, task: Task, counts: Sequence[int]) -> Iterator[Line]:
        """Yield the hashes for every number of ranks.

        Raises
        ------
        SkudaError
            Of a rank that failed; `RankFailed` if it was a process.
        """


class Processes(NamedTuple):
    """Ranks that are processes, or threads of one.

    Attributes
    ----------
    backend : str
        Of torch.distributed: ``gloo``, with arrays of NumPy on the CPU, or ``nccl``, with torch, a GPU for each rank.
        ``threads`` for one process, with arrays of NumPy: its environment keeps NumPy from starting threads of its own,
        for which those of the ranks would wait.
    device : str
        What a rank has, for people.
    patience : float
        Seconds for all of the work.
    program : tuple of str
        Arguments of Python that start a rank.
    """

    backend: str
    device: str
    patience: float = 600.0
    program: tuple[str, ...] = ("-m", "skuda.tools.ranks.rank")

    def run(self, task: Task, counts: Sequence[int]) -> Iterator[Line]:
        """Start the largest number of ranks, once, and yield the hashes for every number of the first of them."""
        if not counts:
            return
        most = max(counts)
        orders = Orders(task=task, counts=tuple(counts), backend=self.backend, patience=self.patience)
        with TemporaryDirectory(prefix="skuda-ranks-") as name:
            folder = Path(name)
            folder.joinpath("orders.json").write_text(orders.model_dump_json(), encoding="utf-8")
            run_ranks(folder, most, self.program, self.patience, together=self.backend == THREADS)
            framework = "torch" if self.backend == "nccl" else NUMPY.name
            for count in counts:
                ranks = [told(folder, count, rank) for rank in range(count)]
                yield from lines(count, self.backend, framework, self.device, ranks)


def run_ranks(folder: Path, count: int, program: Sequence[str], patience: float, *, together: bool = False) -> None:
    """Run Python with a program's arguments, the folder and a rank, once for each rank, and wait for all.

    Parameters
    ----------
    folder : Path
        Where ranks read their orders and write what they found; what they print goes to files there.
    count : int
        Ranks.
    program : sequence of str
        Arguments of Python.
    patience : float
        Seconds for all of the work.
    together : bool
        Whether one process has all ranks.

    Raises
    ------
    RankFailed
        For the first ranks that fail by themselves, and for those that take too long. The others are ended, after two
        seconds in which they can write what they have found.
    """
    shares = [tuple(range(count))] if together else [(rank,) for rank in range(count)]
    with ExitStack() as ends:
        _wait(folder, [(ranks, _start(folder, ranks[0], count, program, ends)) for ranks in shares], patience)


def as_rank(run: Callable[[Path, int], None]) -> None:
    """Run what is one rank of `run_ranks`, with the folder and the number of the command line."""
    try:
        run(Path(sys.argv[1]), int(sys.argv[2]))
    except GroupBroken as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BROKEN)


def _start(folder: Path, rank: int, count: int, program: Sequence[str], ends: ExitStack) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // count))
    errors = ends.enter_context(folder.joinpath(f"{rank}.err").open("wb"))
    process = subprocess.Popen(
        [sys.executable, *program, str(folder), str(rank)],
        # Profilers leave CUPTI attached, as torch does where Inductor makes CUDA graphs.
        env=environment({"OMP_NUM_THREADS": threads, "TEARDOWN_CUPTI": "0"}),
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
    )
    ends.callback(_end, process)
    return process


def _wait(folder: Path, started: Sequence[tuple[tuple[int, ...], subprocess.Popen[bytes]]], patience: float) -> None:
    until = time.monotonic() + patience
    while True:
        states = [(ranks, process.poll()) for ranks, process in started]
        for ranks, state in states:
            if state is not None and state not in (0, BROKEN):
                _let_end([process for _, process in started], min(until, time.monotonic() + _GRACE))
                raise RankFailed(ranks, _reason(folder, ranks[0], state))
        running = [ranks for ranks, state in states if state is None]
        if not running:
            break
        if time.monotonic() > until:
            raise RankFailed(tuple(chain(*running)), f"nothing was heard for {patience:g} s")
        time.sleep(_LOOK)
    left = [ranks for ranks, state in states if state == BROKEN]
    if left:
        raise RankFailed(tuple(chain(*left)), _last_line(folder, left[0][0]))


def _let_end(processes: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    """Wait for processes, at most until a time of the monotonic clock."""
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(_LOOK)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _reason(folder: Path, rank: int, state: int) -> str:
    if state < 0:
        return f"killed by {signal.Signals(-state).name}"
    line = _last_line(folder, rank)
    if state == 1 and line:  # of an exception
        return line
    return f"it exited with {state}" + (f", and last wrote: {line}" if line else "")


def _last_line(folder: Path, rank: int) -> str:
    """Return the last line that a rank wrote."""
    text = folder.joinpath(f"{rank}.err").read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("\n")[2][-_LINE:]


def lines(count: int, carrier: str, framework: str, device: str, ranks: Sequence[Hashes]) -> Iterator[Line]:
    """Yield a line for every batch, with the different hashes of the ranks."""
    for batch in BATCHES:
        hashes: Mapping[str, dict[str, None]] = {way: dict.fromkeys(one[batch][way] for one in ranks) for way in WAYS}
        yield Line(
            ranks=count,
            carrier=carrier,
            framework=framework,
            device=device,
            batch=batch,
            hashes={way: tuple(found) for way, found in hashes.items()},
        )
