"""What each rank of `test_torch_group` does; every function returns a result that can be pickled."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import distributed

from skuda.dispatch import Dispatcher
from skuda.dispatch.shard import Shards, select_shards
from skuda.dispatch.shard.shards import span
from skuda.kernels.linear import QuantizedLinearDescriptor
from skuda.registry import InvalidProblem
from skuda.torch import TorchGroup
from skuda.torch.distributed import group as group_module
from skuda.torch.distributed.peers import Peers

PROBLEM = QuantizedLinearDescriptor(m=3, c_out=4, k=48, q_min=-127, q_max=127, activation_element="f32")
INPUTS = {
    "activation": np.ones((3, 16), np.float32),
    "weight_q": np.ones((4, 16), np.int8),
    "weight_scale": np.ones(4, np.float32),
}


def group_of(ranks=None):
    return TorchGroup(ranks, patience=8)


def bound(group, name, problem=PROBLEM):
    plan = select_shards(Dispatcher(), problem, Shards(axis="k", count=group.count), device="cpu")
    return plan.bind(group, name)


def collectives(cases):
    """Everything that a group can do, on arrays of NumPy and of torch; first, what can be started."""
    group = group_of()
    store = distributed.distributed_c10d._get_default_store()
    if group.rank:
        store.wait(["started"])  # rank 0 starts everything before another rank takes part in anything
    sizes = (2,) * group.count
    waits = [
        group.start_sum_rows(np.ones((2 * group.count, 3), np.int32), sizes),
        group.start_gather(np.full((2, 3), group.rank, np.int8), 0, sizes),
    ]
    store.set("started", "")
    began = [wait() for wait in waits]
    return group.exchange(f"rank {group.rank} says \u00fc"), began, exchanged(group, cases)


def exchanged(group, cases):
    found = []
    for case in cases:
        mine, sizes = case["arrays"][group.rank], case["sizes"]
        for like in (np.array, as_tensor):
            done = {
                "gather 0": group.gather(like(mine[: sizes[group.rank]]), 0, sizes),
                "gather 1": group.gather(like(mine[:, : sizes[group.rank]]), 1, sizes),
            }
            for axis, part in enumerate((mine[: sizes[group.rank]], mine[:, : sizes[group.rank]])):
                into = like(np.zeros((7, 7), mine.dtype))
                waits = [group.start_gather(like(part), axis, sizes), group.start_gather(like(part), axis, sizes, into)]
                done[f"started {axis}"], same = (wait() for wait in waits)
                assert same is into
                done[f"into {axis}"] = into
            if mine.dtype.kind == "f":
                done["max"] = group.max(like(mine))
            if mine.dtype == np.int32:
                done |= {"sum": group.sum(like(mine)), "sum rows": group.sum_rows(like(mine), sizes)}
                done["started rows"] = group.start_sum_rows(like(mine), sizes)()
            found.append({name: as_array(array) for name, array in done.items()})
    return found


class Files:
    """`Memory` of ranks that are processes: a file stands for a GPU's memory, and nothing runs beside anything."""

    def __init__(self, group, folder, waits):
        self.group, self.folder, self.waits, self.made = group, folder, waits, 0

    def rooms(self, size):
        if size > 1 << 26:
            if self.group.rank == 1:
                message = "out of memory"
                raise RuntimeError(message)
            return []
        self.made += 1
        names = [str(self.folder / f"room {self.made} of {rank}") for rank in range(self.group.count)]
        torch.from_file(names[self.group.rank], shared=True, size=size, dtype=torch.uint8)
        distributed.barrier()
        return [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names]

    def barrier(self, _):
        if next(self.waits):
            distributed.barrier()

    def beside(self, _):
        return nullcontext()

    def mark(self, _):
        return lambda: None


def copied(seed, folder, waits=None):
    """Exchanges of random sizes, several begun before the first is finished; what each rank found to be wrong."""
    group = group_of()
    rng, own = np.random.default_rng(seed), np.random.default_rng([seed, group.rank])
    memory = Files(group, folder, waits or itertools.repeat(1))
    peers = Peers(memory, group.rank, group.count, group.exchange, lambda: False)
    wrong, begun = [], []

    def finish():
        kind, wait, want = begun.pop(0)
        time.sleep(own.random() * 0.02)
        if not torch.equal(wait(), want):
            wrong.append(kind)

    for _ in range(40):
        sizes = tuple(rng.integers(0, 5, group.count).tolist())
        kind = ("sum", "gather", "into")[rng.integers(3)]
        dtype = torch.int32 if kind == "sum" else (torch.int8, torch.bfloat16, torch.float64)[rng.integers(3)]
        width = int(rng.integers(1, 9))
        if kind == "sum":
            every = [torch.from_numpy(rng.integers(-(2**31), 2**31, (sum(sizes), width), np.int32)) for _ in sizes]
            wait = peers.start_sum_rows(every[group.rank], sizes)
            want = torch.stack(every).sum(0, dtype=torch.int32)[span(sizes, group.rank)]
        else:
            want = torch.from_numpy(rng.integers(-100, 100, (sum(sizes), width))).to(dtype)
            into = torch.zeros_like(want) if kind == "into" else None
            wait = peers.start_gather(want[span(sizes, group.rank)].contiguous(), sizes, into)
        begun.append((kind, wait, want))
        if rng.random() < 0.6:
            finish()
    while begun:
        finish()
    made = memory.made
    refused = peers.start_gather(torch.zeros(1 << 26, dtype=torch.int8), (1 << 26,) * group.count)
    assert refused is None, "what one rank cannot have, none may use"
    assert peers.start_gather(torch.zeros(1 << 25, dtype=torch.int8), (1 << 25,) * group.count) is None
    assert peers.start_gather(torch.zeros(2, dtype=torch.int8), (2,) * group.count) is not None
    return wrong, made


def copied_without_waiting(seed, folder):
    """The same, where ranks do not wait before they write: the test must see it."""
    return copied(seed, folder, itertools.cycle([0, 1]))


def collectives_copied(cases, folder):
    """The same, where ranks copy all rows into each other's memory."""
    group_module._LEAST_COPIED = 0
    group = group_of()
    group._peers = Peers(Files(group, folder, itertools.repeat(1)), group.rank, group.count, group.exchange, bool)
    found = exchanged(group, cases)
    group_module._LEAST_COPIED = 1 << 21
    assert group._peers._memory.made, "nothing was copied"
    return found


def as_tensor(array):
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def as_array(found):
    if isinstance(found, np.ndarray):
        return found
    if found.dtype is torch.bfloat16:
        return found.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return found.numpy()


def another_problem():
    group = group_of()
    problem = PROBLEM.model_copy(update={"c_out": 5}) if group.rank == 1 else PROBLEM
    bound(group, "down", problem)


def another_order():
    group = group_of()
    both = [bound(group, name) for name in ("first", "second")]
    for layer in reversed(both) if group.rank == 1 else both:
        layer.run(**INPUTS)


def wrong_arrays():
    """What every method says to arrays that it must refuse, before it asks another rank."""
    group = group_of()
    sizes, said = (1,) * group.count, []
    for like, s32, s16 in ((np.array, np.int32, np.int16), (torch.tensor, torch.int32, torch.int16)):
        floats = like([[1.5, 2.0]] * group.count)
        shorts = like([[7]] * group.count, dtype=s16)
        for call in (
            lambda floats=floats: group.sum(floats),
            lambda shorts=shorts: group.sum(shorts),
            lambda floats=floats: group.sum_rows(floats, sizes),
            lambda shorts=shorts: group.start_sum_rows(shorts, sizes),
            lambda like=like, s32=s32: group.sum_rows(like([[1], [2]], dtype=s32), sizes),
            lambda like=like: group.max(like([1.0, float("nan")])),
            lambda like=like: group.max(like([True])),
            lambda floats=floats: group.gather(floats, 0, sizes),
            lambda floats=floats: group.gather(floats, 2, sizes),
            lambda floats=floats: group.gather(floats[:1], 0, (1, 2)),
            lambda floats=floats: group.start_gather(floats[:1], 0, sizes, floats[:, :1]),
        ):
            try:
                said.append(f"no error, but {call()}")
            except InvalidProblem as error:
                said.append(str(error))
    for call in (group.exchange, group.agree, group.max, group.sum):
        try:
            said.append(f"no error, but {call(5)}")
        except InvalidProblem as error:
            said.append(str(error))
    return said


def copies_asked_for():
    TorchGroup(copies=True)


def killed():
    group = group_of()
    layer = bound(group, "down")
    layer.run(**INPUTS)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer.run(**INPUTS)


def killed_in_chunks():
    """A rank is killed, and others find out where they wait for what they have started."""
    group = TorchGroup(check_calls=False, patience=8)
    shards = Shards(axis="k", count=group.count, chunks=3)
    layer = select_shards(Dispatcher(), PROBLEM, shards, device="cpu").bind(group)
    layer.run(**INPUTS)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer.run(**INPUTS)


def silent(folder):
    """One rank goes on without the others, and comes to no collective until they have given up."""
    group = group_of(distributed.new_group(timeout=timedelta(seconds=5)))
    layer = bound(group, "down")
    if group.rank == 1:
        others = [folder / f"silent {rank}" for rank in range(group.count) if rank != 1]
        while not all(map(Path.exists, others)):
            time.sleep(0.05)
        return
    layer.run(**INPUTS)
