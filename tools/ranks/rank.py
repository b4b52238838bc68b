"""One rank of the demo, or all of them as threads: ``python -m skuda.tools.ranks.rank FOLDER RANK``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from skuda.dispatch import Dispatcher
from skuda.dispatch.shard import Group, GroupBroken, on_ranks
from skuda.registry.device import HOST
from skuda.tools.ranks.carriers import THREADS, as_rank
from skuda.tools.ranks.framework import NUMPY, torch_on
from skuda.tools.ranks.work import Orders, hashes_of, read_orders, tell


def run(folder: Path, rank: int) -> None:
    """Do what the orders in a folder say, with the ranks that were started for the same folder."""
    orders = read_orders(folder)
    if orders.backend == THREADS:
        _as_threads(folder, orders)
    else:
        _as_process(folder, orders, rank)


def _as_threads(folder: Path, orders: Orders) -> None:
    dispatcher = Dispatcher()

    def work(group: Group) -> None:
        tell(folder, group.count, group.rank, hashes_of(orders.task.outputs(group, NUMPY, dispatcher, HOST)))

    for count in orders.counts:
        on_ranks(count, work)


def _as_process(folder: Path, orders: Orders, rank: int) -> None:
    import torch
    from torch import distributed

    from skuda.torch import TorchGroup

    dispatcher = Dispatcher()
    framework, device = NUMPY, HOST
    if orders.backend == "nccl":
        torch.cuda.set_device(rank)
        framework = torch_on(f"cuda:{rank}")
        device = next(one for one in dispatcher.devices if one.place == ("cuda", rank))
    most, patience = max(orders.counts), timedelta(seconds=orders.patience)
    rendezvous = folder.joinpath("rendezvous").as_uri()
    with _others():
        distributed.init_process_group(orders.backend, rendezvous, patience, most, rank)
    for count in orders.counts:
        # Every process takes part in making a group, its members or not.
        with _others():
            members = distributed.new_group(list(range(count)), patience)
        if rank < count:
            group = TorchGroup(members)
            tell(folder, count, rank, hashes_of(orders.task.outputs(group, framework, dispatcher, device)))
    with _others():
        distributed.barrier()
        distributed.destroy_process_group()


@contextmanager
def _others() -> Iterator[None]:
    """Tell what torch.distributed raises where another rank is gone as `GroupBroken`."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken((), str(error)) from error


if __name__ == "__main__":
    as_rank(run)
