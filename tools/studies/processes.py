"""Ranks: processes that torch.distributed joins, one for each GPU, or several on the CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Literal

from skuda.dispatch import Dispatcher
from skuda.dispatch.settings import environment
from skuda.registry.device import HOST, Device
from skuda.registry.value import Size, Value
from skuda.tools.frame.run import NoDevice

PATIENCE = 900.0
"""Seconds for all of the work."""
_GRACE = 2.0
"""Seconds in which ranks can still save results when another has failed."""
_LINE = 500


class RankJob(Value):
    """What every rank does.

    Attributes
    ----------
    backend : str
        Of torch.distributed: ``nccl`` with a GPU for each rank, or ``gloo`` on the CPU.
    count : int
        Ranks.
    seed : int
        Of weights and inputs.
    """

    backend: Literal["nccl", "gloo"]
    count: Size
    seed: Size


Save = Callable[[Any], None]
"""Saves the results of a rank, which are JSON values; later results replace earlier ones."""
Work = Callable[[Any, int, Save], None]
"""What one rank runs: takes a job, the number of the rank, and `Save`."""


def place_of_ranks(count: int, *, cpu: bool) -> tuple[Device, Literal["nccl", "gloo"]]:
    """Return the device of the first rank, and the backend; raise `NoDevice` if there are fewer GPUs than ranks."""
    cards = [device for device in Dispatcher().devices if device.processor == "cuda"]
    if not cpu and len(cards) < count:
        raise NoDevice(
            f"{count} GPUs are needed, and {len(cards)} are here; ranks can also run on the CPU (see --help)"
        )
    return (HOST, "gloo") if cpu else (cards[0], "nccl")


def run_ranks(work: Work, job: RankJob) -> tuple[list[Any], str]:
    """Run some work in one process for each rank, and wait for all.

    Return the last results of each rank, None if it has none; and which rank failed and why, empty if none did. If one
    fails or takes too long, the others are ended.
    """
    from torch import multiprocessing

    with TemporaryDirectory(prefix="skuda-ranks-") as folder:
        ranks = multiprocessing.start_processes(_rank, (work, job, folder), job.count, join=False)
        try:
            failed = _wait(ranks)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        files = [Path(folder, f"{rank}.json") for rank in range(job.count)]
        return [json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files], failed


def _wait(ranks: Any) -> str:
    """Wait for processes of torch; return which failed and why, empty if none did."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    until = monotonic() + PATIENCE
    try:
        while not ranks.join(timeout=1.0, grace_period=_GRACE):
            if monotonic() > until:
                alive = [str(rank) for rank, process in enumerate(ranks.processes) if process.is_alive()]
                return f"rank {', '.join(alive)} failed: nothing was heard for {PATIENCE:g} s"
    except ProcessExitedException as error:
        why = f"killed by {error.signal_name}" if error.signal_name else f"it exited with {error.exit_code}"
        return f"rank {error.error_index} failed: {why}"
    except ProcessRaisedException as error:
        return f"rank {error.error_index} failed: {error.msg.strip().rpartition(chr(10))[2][-_LINE:]}"
    return ""


def _rank(rank: int, work: Work, job: RankJob, folder: str) -> None:
    """Be one rank, whose output would disturb that of the command."""
    import torch
    from torch import distributed

    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    if "OMP_NUM_THREADS" not in environment():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.count))
    if job.backend == "nccl":
        torch.cuda.set_device(rank)

    def save(found: Any) -> None:
        fresh = Path(folder, f"{rank}.part")
        fresh.write_text(json.dumps(found), encoding="utf-8")
        fresh.replace(Path(folder, f"{rank}.json"))

    rendezvous = Path(folder, "rendezvous").as_uri()
    distributed.init_process_group(job.backend, rendezvous, timedelta(seconds=PATIENCE), job.count, rank)
    with torch.no_grad():
        work(job, rank, save)
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # threads that torch leaves behind may abort the process at its end, on a busy host
