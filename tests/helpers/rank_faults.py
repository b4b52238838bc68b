"""What ranks run in tests: each function is the work of a rank, most of them with a fault.

They stand in a module of their own, because a process of a rank imports what it runs by name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import torch

from skuda.tools.studies import certify_rank, parallel_rank
from skuda.torch import RowLinear, TorchGroup

LONG = 1000.0


def found(job, rank, save):
    """Save twice; the second result counts."""
    save(None)
    threads = int(torch.get_num_threads())
    save({"rank": rank, "count": job.count, "seed": job.seed, "threads": threads, "pid": os.getpid()})
    print("nobody reads this")  # noqa: T201  a test of what happens to it


def raises(job, rank, save):
    save({"rank": rank, "pid": os.getpid()})
    if rank == 1:
        raise ValueError("what happened")
    time.sleep(LONG)


def is_killed(job, rank, save):
    save({"rank": rank, "pid": os.getpid()})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG)


def exits(job, rank, save):
    """End rank 1; the others still save when it is gone."""
    if rank == 1:
        save({"pid": os.getpid()})
        sys.exit(7)
    time.sleep(0.3)
    save({"rank": rank, "pid": os.getpid()})
    time.sleep(LONG)


def hangs(job, rank, save):
    save({"rank": rank, "pid": os.getpid()})
    time.sleep(LONG)


def parallel(job, rank, save):
    """Do the work of a rank without code generation, which takes seconds."""
    torch.compile = lambda module, **_: module
    parallel_rank.work(job, rank, save)


def parallel_with_a_wrong_bit(job, rank, save):
    right = RowLinear.forward

    def wrong(self, input):
        made = right(self, input)
        if rank == 1:
            made.view(torch.int16)[..., -1] ^= 1
        return made

    RowLinear.forward = wrong
    parallel(job, rank, save)


def parallel_that_dies(job, rank, save):
    right = parallel_rank.MlpBench.measure

    def measure(self, rows):
        if rank == 1 and rows == 3:
            os._exit(7)
        return right(self, rows)

    parallel_rank.MlpBench.measure = measure
    parallel(job, rank, save)


def parallel_unlike_numpy(job, rank, save):
    """Turn the sign of the weights of the copy that NumPy computes; rounding may hide a single one."""
    right = parallel_rank.copy.deepcopy

    def changed(given):
        made = right(given)
        if isinstance(made, torch.nn.Module):
            codes = next(one for one in made.state_dict().values() if one.dtype is torch.int8)
            codes.copy_(-codes.clamp(min=-127))
        return made

    parallel_rank.copy = SimpleNamespace(deepcopy=changed)
    parallel(job, rank, save)


def certified(job, rank, save):
    certify_rank.work(job, rank, save)


def _with_sums(job, rank, save, change):
    """Change what a rank gets as the sum of all ranks."""
    for name in ("sum", "sum_rows"):
        right = getattr(TorchGroup, name)
        setattr(TorchGroup, name, lambda self, array, *sizes, right=right: change(self, right, array, sizes))
    certified(job, rank, save)


def rounds_sums(job, rank, save):
    def change(group, right, array, sizes):
        return right(group, array.to(torch.bfloat16).to(torch.int32), *sizes)

    _with_sums(job, rank, save, change)


def local_maxima(job, rank, save):
    right = TorchGroup.max

    def local(self, array):
        kept = array.clone()
        right(self, array)
        return kept

    TorchGroup.max = local
    certified(job, rank, save)
