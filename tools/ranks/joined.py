"""The group of the demo's processes: collectives of torch.distributed, of NumPy's arrays or torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed

from skuda.dispatch.shard import GroupBroken, GroupMismatch
from skuda.dispatch.shard.group import differing
from skuda.dispatch.shard.shards import own
from skuda.tools.ranks.framework import Framework


@contextmanager
def others() -> Iterator[None]:
    """Tell what torch.distributed raises where another rank is gone as `GroupBroken`."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken((), str(error)) from error


class Joined:
    """A `Group` of processes.

    Parameters
    ----------
    members : ProcessGroup
        Over gloo for NumPy's arrays, over NCCL for those of torch.
    framework : Framework
        What arrays are of.
    """

    def __init__(self, members: Any, framework: Framework) -> None:
        self._members, self._framework = members, framework
        self.rank: int = distributed.get_rank(members)
        self.count: int = distributed.get_world_size(members)

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks."""
        found: list[Any] = [None] * self.count
        with others():
            distributed.all_gather_object(found, text, group=self._members)
        return tuple(found)

    def agree(self, what: str) -> None:
        """Refuse to go on where another rank is about to do something else."""
        found = differing(self.exchange(what))
        if found:
            raise GroupMismatch("call", found)

    def max(self, array: Any) -> Any:
        """Return the maximum over the ranks, element by element."""
        return self._reduced(array, distributed.ReduceOp.MAX)

    def sum(self, array: Any) -> Any:
        """Return the sum over the ranks, s32."""
        return self._reduced(array, distributed.ReduceOp.SUM)

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        """Return this rank's rows of the sum over the ranks."""
        return own(self.sum(array), 0, sizes, self.rank)

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        """Return the arrays of all ranks one after the other."""
        module = self._framework.module
        rows = module.moveaxis(array, axis, 0)
        mine = self._tensor(rows).reshape(-1).view(torch.uint8)
        row = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
        parts = [mine.new_empty(max(sizes) * row) for _ in sizes]
        padded = torch.nn.functional.pad(mine, (0, len(parts[0]) - len(mine)))
        with others():
            distributed.all_gather(parts, padded, group=self._members)
        whole = torch.cat([part[: size * row] for part, size in zip(parts, sizes, strict=True)])
        shape = (sum(sizes), *rows.shape[1:])
        found = whole.numpy().view(rows.dtype) if self._framework.place is None else whole.view(rows.dtype)
        return module.moveaxis(found.reshape(shape), 0, axis)

    def _reduced(self, array: Any, how: Any) -> Any:
        tensor = torch.from_numpy(np.array(array)) if self._framework.place is None else array.clone()
        with others():
            distributed.all_reduce(tensor, how, group=self._members)
        return tensor.numpy() if self._framework.place is None else tensor

    def _tensor(self, array: Any) -> Any:
        """Return an array's bytes, or the array if it is a tensor; contiguous."""
        if self._framework.place is None:
            return torch.from_numpy(np.array(array, order="C").view(np.uint8))
        return array.contiguous()
