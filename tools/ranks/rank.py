"""One rank of the demo: ``python -m skuda.tools.ranks.rank FOLDER RANK``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from skuda.dispatch import Dispatcher
from skuda.dispatch.device import HOST
from skuda.dispatch.shard import GroupBroken
from skuda.tools.ranks.carriers import BROKEN
from skuda.tools.ranks.framework import NUMPY, torch_on
from skuda.tools.ranks.work import hashes_of, read_orders, tell
from skuda.torch import TorchGroup


@contextmanager
def others() -> Iterator[None]:
    """Tell what torch.distributed raises where another rank is gone as `GroupBroken`."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken((), str(error)) from error


def run(folder: Path, rank: int) -> None:
    """Do what the orders in a folder say, with the ranks that were started for the same folder."""
    orders = read_orders(folder)
    dispatcher = Dispatcher()
    framework, device = NUMPY, HOST
    if orders.backend == "nccl":
        torch.cuda.set_device(rank)
        framework = torch_on(f"cuda:{rank}")
        device = next(one for one in dispatcher.devices if one.place == ("cuda", rank))
    most, patience = max(orders.counts), timedelta(seconds=orders.patience)
    rendezvous = folder.joinpath("rendezvous").as_uri()
    with others():
        distributed.init_process_group(orders.backend, rendezvous, patience, most, rank)
    for count in orders.counts:
        # Every process takes part in making a group, its members or not.
        with others():
            members = distributed.new_group(list(range(count)), patience)
        if rank < count:
            group = TorchGroup(members)
            tell(folder, count, rank, hashes_of(orders.task.outputs(group, framework, dispatcher, device)))
    with others():
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), int(sys.argv[2]))
    except GroupBroken as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BROKEN)
