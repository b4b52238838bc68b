"""One rank of a group: `group_worker.py RANK COUNT FOLDER WORK` does its work, and writes down what came of it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import distributed

from skuda.dispatch import Dispatcher
from skuda.dispatch.shard import Shards
from skuda.kernels.linear import QuantizedLinearDescriptor
from skuda.torch import TorchGroup

PROBLEM = QuantizedLinearDescriptor(m=3, c_out=4, k=48, q_min=-127, q_max=127, activation_element="f32")
INPUTS = {
    "activation": np.ones((3, 16), np.float32),
    "weight_q": np.ones((4, 16), np.int8),
    "weight_scale": np.ones(4, np.float32),
}


def given(folder):
    return pickle.loads((folder / "given").read_bytes())  # noqa: S301  of the test


def bound(group, name, problem=PROBLEM):
    return Dispatcher().select_shards(problem, Shards(axis="k", count=group.count), device="cpu").bind(group, name)


def collectives(group, folder):
    """Everything that a group can do, on arrays of NumPy and of torch; first, what can be started."""
    store = distributed.distributed_c10d._get_default_store()
    if group.rank:
        store.wait(["started"])  # rank 0 starts everything before another rank takes part in anything
    sizes = (2,) * group.count
    waits = [
        group.start_sum_rows(np.ones((2 * group.count, 3), np.int32), sizes),
        group.start_gather(np.full((2, 3), group.rank, np.int8), 0, sizes),
    ]
    store.set("started", "")
    began, found = [wait() for wait in waits], []
    for case in given(folder):
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
    return group.exchange(f"rank {group.rank} says \u00fc"), began, found


def layers(group, folder):
    """Split layers, with arrays of NumPy and of torch."""
    found = []
    for problem, shards, parts in given(folder):
        layer = Dispatcher().select_shards(problem, shards, device="cpu").bind(group)
        found.append(layer.run(**parts[group.rank]))
        tensors = {name: as_tensor(array) for name, array in parts[group.rank].items()}
        found.append(as_array(layer.run(**tensors)))
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


def another_problem(group, _):
    problem = PROBLEM.model_copy(update={"c_out": 5}) if group.rank == 1 else PROBLEM
    bound(group, "down", problem)


def another_order(group, _):
    both = [bound(group, name) for name in ("first", "second")]
    for layer in reversed(both) if group.rank == 1 else both:
        layer.run(**INPUTS)


def killed(group, _):
    layer = bound(group, "down")
    layer.run(**INPUTS)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer.run(**INPUTS)


def killed_in_chunks(_, folder):
    """A rank is killed, and others find out where they wait for what they have started."""
    group = TorchGroup(check_calls=False, patience=8)
    shards = Shards(axis="k", count=group.count, chunks=3)
    layer = Dispatcher().select_shards(PROBLEM, shards, device="cpu").bind(group)
    layer.run(**INPUTS)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    layer.run(**INPUTS)


def silent(group, folder):
    """One rank goes on without the others, and comes to no collective until they have given up."""
    layer = bound(group, "down")
    if group.rank == 1:
        others = [folder / f"{rank}.out" for rank in range(group.count) if rank != 1]
        while not all(map(Path.exists, others)):
            time.sleep(0.05)
        return
    layer.run(**INPUTS)


if __name__ == "__main__":
    rank, count, folder, work = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    distributed.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=100), count, rank)
    short = distributed.new_group(range(count), timedelta(seconds=5))
    try:
        result = globals()[work](TorchGroup(short if work == "silent" else None, patience=8), folder)
    except Exception as error:  # noqa: BLE001  the test looks at it
        result = error
    (folder / f"{rank}.new").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.new").rename(folder / f"{rank}.out")
    if not isinstance(result, Exception) and work != "silent":
        distributed.destroy_process_group()
    os._exit(0)  # what is left of a broken group must not wait
