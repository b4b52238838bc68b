"""`TorchGroup`: ranks that torch.distributed joins, over NCCL on GPUs and gloo on CPUs."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from skuda.dispatch.shard.group import GroupBroken, GroupMismatch, differing
from skuda.dispatch.shard.shards import span
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.peers import SPARE_MULTIPROCESSORS, Peers, SymmetricMemory

Result = TypeVar("Result")

_LOOK = 0.05
"""Seconds between two looks for what other ranks report."""
_LEAST_COPIED = 1 << 21
"""Bytes from one rank to another from which on copy engines are used: they take longer to start than a kernel."""


class TorchGroup:
    """A `skuda.dispatch.shard.Group` over a process group of torch.distributed.

    Arrays are tensors on the devices of the group's backend; on gloo, arrays of NumPy as well. Collectives can be
    captured in CUDA graphs; those that are not merely started are traced by ``torch.compile``, too. On NCCL, what is
    started runs on a stream of the process group, and waiting makes the current stream wait, not the host.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh of one dimension, or None
        The ranks; None for the default group. All of them make the `TorchGroup`.
    check_calls : bool or None
        Whether ranks compare, before every layer, that they run the same one. None for yes on CPUs and no on GPUs,
        where it would make the host wait; asked for there, it goes through a group of its own on the CPU. Nothing is
        compared while a CUDA graph is captured or ``torch.compile`` traces.
    copies : bool or None
        Whether GPUs copy large rows straight into each other's memory, beside kernels that compute, rather than through
        NCCL, whose kernels take multiprocessors. None for yes where all ranks are on one host, and torch's symmetric
        memory can be had there. As NCCL's, exchanges must not run at the same time: layers of a group run on one
        stream, or on streams that wait for each other.
    patience : float
        Seconds that a rank whose collective failed waits for the others to report the same, before it names those that
        have not. Collectives themselves wait as long as the process group's timeout.

    Raises
    ------
    InvalidProblem
        For another kind of group, one that this process is not in, and `copies` where there are no GPUs of one host.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        check_calls: bool | None = None,
        copies: bool | None = None,
        patience: float = 10.0,
    ) -> None:
        self.process_group = _process_group(group)
        self._rank: int = distributed.get_rank(self.process_group)
        self._count: int = distributed.get_world_size(self.process_group)
        on_gpu = distributed.get_backend(self.process_group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._patience = patience
        self._checks = self.process_group if check_calls or (check_calls is None and not on_gpu) else None
        if self._checks is not None and on_gpu:
            members = distributed.get_process_group_ranks(self.process_group)
            self._checks = distributed.new_group(members, backend="gloo", use_local_synchronization=True)
        self._where: tuple[str, ...] = ("",) * self._count
        self._where = self.exchange(f"{socket.gethostname()} {os.getpid()}")
        self._peers: Peers | None = None
        reach = on_gpu and self._reach_each_other(wanted=copies is not False)
        if copies and not reach:
            rule = "be left out: only GPUs of one host that reach each other's memory, with NCCL, can copy into it"
            raise InvalidProblem("TorchGroup", "copies", shown(copies), rule)
        if reach and self._count > 1:
            memory = SymmetricMemory(self.process_group, self._device, _timeout_of(self.process_group))
            self._peers = Peers(memory, self._rank, self._count, self.exchange, _captures)

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._rank

    @property
    def count(self) -> int:
        """Ranks."""
        return self._count

    @property
    def spare_multiprocessors(self) -> int:
        """Multiprocessors that a product leaves free for what it hides; 0 where that would need too many."""
        return 0 if self._peers is None else SPARE_MULTIPROCESSORS

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks, in their order."""
        return self._exchanged(text, self.process_group, self._device)

    def agree(self, what: str) -> None:
        """Refuse to go on where another rank is about to do something else; see `check_calls`."""
        if self._checks is None or torch.compiler.is_compiling() or _captures():
            return
        digest = torch.frombuffer(bytearray(hashlib.sha256(what.encode()).digest()), dtype=torch.uint8)
        every = torch.empty(self._count * len(digest), dtype=torch.uint8)
        self._told(lambda: distributed.all_gather_into_tensor(every, digest, group=self._checks))
        if bool((every.view(self._count, -1) != digest).any()):
            texts = self._exchanged(what, self._checks, torch.device("cpu"))
            raise GroupMismatch("call", differing(texts))

    def max(self, array: Any) -> Any:
        """Return the maximum over the ranks, element by element; the array may be overwritten."""
        return self._reduced(array, distributed.ReduceOp.MAX)

    def sum(self, array: Any) -> Any:
        """Return the sum over the ranks, s32, element by element; the array may be overwritten."""
        return self._reduced(array, distributed.ReduceOp.SUM)

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        """Return this rank's rows of the sum over the ranks, s32; `sizes` are the rows of each."""
        return self._summed_rows(array, sizes, later=False)()

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        """Return the arrays of all ranks one after the other along axis 0 or 1; `sizes` are theirs along it."""
        return self._gathered(array, axis, sizes, None, later=False)()

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        """Start `sum_rows`, and return a function that waits for its result and returns it."""
        return self._summed_rows(array, sizes, later=True)

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        """Start `gather`, likewise; where an array is given, the result is written into it and it is returned."""
        return self._gathered(array, axis, sizes, into, later=True)

    def _reach_each_other(self, *, wanted: bool) -> bool:
        """Whether all ranks want to, and are GPUs of one host that can write into the memory of those that they see."""
        others = [number for number in range(torch.cuda.device_count()) if number != self._device.index]
        reaches = wanted and all(torch.cuda.can_device_access_peer(self._device, number) for number in others)
        hosts = {place.rpartition(" ")[0] for place in self._where}
        return set(self.exchange(f"{reaches}")) == {"True"} and len(hosts) == 1

    def _summed_rows(self, array: Any, sizes: tuple[int, ...], *, later: bool) -> Callable[[], Any]:
        tensor, back = _tensor(array)
        most = max(sizes)
        peers = self._peers_for(tensor, most)
        copied = None if peers is None else peers.start_sum_rows(tensor.contiguous(), sizes)
        if copied is not None:
            return lambda: back(copied())
        if min(sizes) != most:  # every rank gets equally many
            padded = tensor.new_zeros(self._count, most, *tensor.shape[1:])
            for rank, rows in enumerate(sizes):
                padded[rank, :rows] = tensor[span(sizes, rank)]
            tensor = padded.flatten(0, 1)
        tensor = tensor.contiguous()
        mine = tensor.new_empty(most, *tensor.shape[1:])
        wait = self._begun(distributed.reduce_scatter_tensor, mine, tensor, later=later)

        def finish() -> Any:
            wait()
            return back(mine[: sizes[self._rank]])

        return finish

    def _gathered(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any, *, later: bool) -> Callable[[], Any]:
        tensor, back = _tensor(array)
        if tensor.shape[axis] != sizes[self._rank]:
            rule = f"have {sizes[self._rank]} elements along axis {axis}, as the sizes say"
            raise InvalidProblem("Group.gather", "array", f"shape {list(tensor.shape)}", rule)
        most = max(sizes)
        target = None if into is None else _tensor(into)[0]
        peers = self._peers_for(tensor, most) if axis == 0 else None
        copied = None if peers is None else peers.start_gather(tensor.contiguous(), sizes, target)
        if copied is not None:

            def arrive() -> Any:
                whole = copied()
                return back(whole) if into is None else into

            return arrive
        if tensor.shape[axis] != most:
            padded = tensor.new_zeros(*tensor.shape[:axis], most, *tensor.shape[axis + 1 :])
            padded.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
            tensor = padded
        tensor = tensor.contiguous()
        joined = axis == 0 and min(sizes) == most
        every = target if joined else None
        if every is None:
            every = tensor.new_empty(self._count * tensor.shape[0], *tensor.shape[1:])
        wait = self._begun(distributed.all_gather_into_tensor, every, tensor, later=later)

        def finish() -> Any:
            wait()
            found = every
            if not joined:
                parts = every.view(self._count, *tensor.shape)
                pieces = [parts[rank].narrow(axis, 0, size) for rank, size in enumerate(sizes)]
                found = torch.cat(pieces, axis, out=target)
            return back(found) if into is None else into

        return finish

    def _peers_for(self, tensor: Tensor, most_rows: int) -> Peers | None:
        """Return what copies so many rows of a tensor to each rank; None where NCCL is to, on all ranks alike."""
        size = most_rows * tensor.shape[1:].numel() * tensor.dtype.itemsize
        return None if size < _LEAST_COPIED or torch.compiler.is_compiling() else self._peers

    def _begun(
        self, collective: Callable[..., Any], result: Tensor, given: Tensor, *, later: bool
    ) -> Callable[[], object]:
        """Begin a collective; return what waits for it. Until then torch holds its tensors."""
        work = self._told(lambda: collective(result, given, group=self.process_group, async_op=later))
        # What compilers make of a collective may return its tensor.
        return (lambda: self._told(work.wait)) if later and work is not None else lambda: None

    def _reduced(self, array: Any, how: Any) -> Any:
        tensor, back = _tensor(array)
        tensor = tensor.contiguous()
        self._told(lambda: distributed.all_reduce(tensor, op=how, group=self.process_group))
        return back(tensor)

    def _exchanged(self, text: str, group: ProcessGroup, device: torch.device) -> tuple[str, ...]:
        mine = text.encode()
        sizes = torch.empty(self._count, dtype=torch.int64, device=device)
        size = torch.tensor([len(mine)], device=device)
        self._told(lambda: distributed.all_gather_into_tensor(sizes, size, group=group))
        most = max(1, int(sizes.max()))
        padded = torch.frombuffer(bytearray(mine.ljust(most, b"\0")), dtype=torch.uint8).to(device)
        every = torch.empty(self._count * most, dtype=torch.uint8, device=device)
        self._told(lambda: distributed.all_gather_into_tensor(every, padded, group=group))
        rows = every.view(self._count, most).cpu().numpy()
        return tuple(row[:length].tobytes().decode() for row, length in zip(rows, sizes.tolist(), strict=True))

    def _told(self, collective: Callable[[], Result]) -> Result:
        """Return a collective's result; where it fails, say who is missing."""
        if torch.compiler.is_compiling():
            return collective()
        try:
            return collective()
        except RuntimeError as error:  # what torch.distributed raises
            missing, why = self._missing()
            if missing == () and not why:
                raise  # all ranks are there: it is no question of who
            raise GroupBroken(missing, f"{why}; torch.distributed said: {error}") from error

    def _missing(self) -> tuple[tuple[int, ...], str]:
        """Report that a collective failed; return the ranks that do not report it, and what is known of them."""
        name = f"skuda/{self.process_group.group_name}/{{}}"
        silent = set(range(self._count)) - {self._rank}
        gone: set[int] = set()
        try:
            store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  no public way to it
            store.set(name.format(self._rank), "failed")
            until = time.monotonic() + self._patience
            while silent > gone and time.monotonic() < until:
                # Asked in this order: a rank may report and then end.
                gone = {rank for rank in silent if _has_ended(self._where[rank])}
                silent = {rank for rank in silent if not store.check([name.format(rank)])}
                gone &= silent
                time.sleep(_LOOK)
        except RuntimeError:
            return (), "the group's store is gone, perhaps with the rank that held it"
        if gone:
            return tuple(sorted(gone)), "the process has ended"
        return tuple(sorted(silent)), f"nothing was heard for {self._patience:g} s" if silent else ""


def _process_group(group: object) -> ProcessGroup:
    if not distributed.is_initialized():
        rule = "be joined by torch.distributed first: call init_process_group, or use torchrun"
        raise InvalidProblem("TorchGroup", "group", shown(group), rule)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            rule = "have one dimension: take one of a mesh by its name, such as mesh['tp']"
            raise InvalidProblem("TorchGroup", "group", f"a mesh of {group.ndim} dimensions", rule)
        group = group.get_group()
    if group is None:
        group = distributed.group.WORLD
    if not isinstance(group, ProcessGroup):
        rule = "be a ProcessGroup that this process is in, a DeviceMesh of one dimension, or None"
        raise InvalidProblem("TorchGroup", "group", shown(group), rule)
    return group


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long collectives on GPUs wait for a rank."""
    options = group._get_backend(torch.device("cuda")).options  # noqa: SLF001  no public way to it
    found: timedelta = options._timeout  # noqa: SLF001
    return found


def _captures() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _tensor(array: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return an array as a tensor, and what makes an array of its kind of a tensor."""
    if isinstance(array, Tensor):
        return array, lambda tensor: tensor
    kind = array.dtype
    if kind.name == "bfloat16":  # torch does not read ml_dtypes, nor does gloo move integers of its size
        bits = torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return bits, lambda tensor: tensor.view(torch.int16).numpy().view(kind)
    return torch.from_numpy(np.ascontiguousarray(array)), lambda tensor: tensor.numpy()


def _has_ended(place: str) -> bool:
    """Whether a process of this host has ended; one of another host, or where that cannot be known, has not."""
    host, _, process = place.rpartition(" ")
    if host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return False
    try:
        told = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return told.rpartition(")")[2].split()[0] in "ZX"
