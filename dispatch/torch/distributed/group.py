"""`TorchGroup`: a group over torch.distributed, with NCCL on GPUs and gloo on CPUs."""

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

from skuda.dispatch.shard.group import GroupBroken, GroupMismatch, check_array, check_sizes, check_text, differing
from skuda.dispatch.shard.shards import span
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import expect, expect_real
from skuda.torch.distributed.peers import SPARE_MULTIPROCESSORS, Peers, SymmetricMemory

Result = TypeVar("Result")

_SUMS = torch.int32, torch.int64
_LOOK = 0.05
"""Seconds between two looks at the reports of other ranks."""
_LEAST_COPIED = 1 << 21
"""Least bytes from one rank to another for copy engines, which take longer to start than a kernel."""


class TorchGroup:
    """A `skuda.dispatch.shard.Group` over a process group of torch.distributed.

    Arrays are tensors on the devices of the group's backend, or NumPy arrays on gloo. Collectives can be captured in
    CUDA graphs. ``torch.compile`` can trace all but ``start_sum_rows`` and ``start_gather``. On NCCL, a started
    collective runs on a stream of the process group. Waiting for it makes the current stream wait, not the host.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh of one dimension, or None
        The ranks. None means the default group. Every rank makes the `TorchGroup`.
    check_calls : bool or None
        Whether the ranks check before every layer that all of them run the same layer, and with the same input if each
        has the whole of it. None means yes on CPUs and no on GPUs, where the host would have to wait; the check then
        uses a separate group on the CPU. There is no check while a CUDA graph is captured or ``torch.compile`` traces.
    copies : bool or None
        Whether copy engines write large rows straight into the memory of other GPUs, instead of NCCL, whose kernels
        occupy multiprocessors. None means yes if all ranks are on one host with torch's symmetric memory. As with NCCL,
        exchanges must not run at the same time: the layers of a group run on one stream, or on streams that wait for
        each other.
    patience : float
        Seconds that a rank whose collective failed waits for the reports of the others, before it names the ranks that
        did not report. Collectives have the timeout of the process group.

    Raises
    ------
    InvalidProblem
        For an invalid group, a group without this process, or `copies=True` if not all ranks are GPUs of one host. Also
        for another argument of the wrong type, or a `patience` that is not in [0, 10^6].
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        check_calls: bool | None = None,
        copies: bool | None = None,
        patience: float = 10.0,
    ) -> None:
        for name, given in (("check_calls", check_calls), ("copies", copies)):
            expect("TorchGroup", name, given, bool | None, "be True, False or None")
        patience = expect_real("TorchGroup", "patience", patience, 0, 1e6)
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
        """The number of this rank, counted from 0."""
        return self._rank

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self._count

    @property
    def spare_multiprocessors(self) -> int:
        """Multiprocessors that a product leaves free for the exchange beside it. 0 if the exchange needs too many."""
        return 0 if self._peers is None else SPARE_MULTIPROCESSORS

    @property
    def checks_calls(self) -> bool:
        """Whether the ranks check their calls now."""
        return self._checks is not None and not torch.compiler.is_compiling() and not _captures()

    def exchange(self, text: str) -> tuple[str, ...]:
        """Return the texts of all ranks, in rank order."""
        check_text("exchange", "text", text)
        return self._exchanged(text, self.process_group, self._device)

    def agree(self, what: str) -> None:
        """Check that all ranks are about to do the same; see `check_calls`."""
        check_text("agree", "what", what)
        if self._checks is None or not self.checks_calls:
            return
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(what.encode(errors="surrogatepass")).digest()), dtype=torch.uint8
        )
        every = torch.empty(self._count * len(digest), dtype=torch.uint8)
        self._naming_missing_ranks(lambda: distributed.all_gather_into_tensor(every, digest, group=self._checks))
        if bool((every.view(self._count, -1) != digest).any()):
            texts = self._exchanged(what, self._checks, torch.device("cpu"))
            raise GroupMismatch("call", differing(texts))

    def max(self, array: Any) -> Any:
        """Return the maximum over the ranks, element by element, as `Group.max`. The array may be overwritten."""
        tensor, back = _tensor("max", array)
        if tensor.dtype is torch.bool or tensor.is_complex():
            raise InvalidProblem("Group.max", "array", f"elements {tensor.dtype}", "be floating numbers or integers")
        if tensor.is_cpu and not torch.compiler.is_compiling() and bool(tensor.isnan().any()):
            raise InvalidProblem("Group.max", "array", "a NaN", "have none, because a NaN has no place in an order")
        return back(self._reduced(tensor, distributed.ReduceOp.MAX))

    def sum(self, array: Any) -> Any:
        """Return the sum of s32 or s64 over the ranks, element by element. The array may be overwritten."""
        tensor, back = _tensor("sum", array)
        if not torch.compiler.is_compiling():  # whose sizes may be symbolic
            check_array("sum", tensor, (Tensor,), *_SUMS)
        return back(self._reduced(tensor, distributed.ReduceOp.SUM))

    def sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Any:
        """Return this rank's rows of what `sum` returns. `sizes` has the number of rows of each rank."""
        return self._summed_rows(array, sizes, later=False)()

    def gather(self, array: Any, axis: int, sizes: tuple[int, ...]) -> Any:
        """Concatenate the arrays of all ranks along axis 0 or 1. `sizes` has the length of each array."""
        return self._gathered(array, axis, sizes, None, later=False)()

    def start_sum_rows(self, array: Any, sizes: tuple[int, ...]) -> Callable[[], Any]:
        """Start `sum_rows`. Return a function that waits for the result and returns it."""
        return self._summed_rows(array, sizes, later=True)

    def start_gather(self, array: Any, axis: int, sizes: tuple[int, ...], into: Any = None) -> Callable[[], Any]:
        """Start `gather` likewise. The result is written into the array `into` if there is one."""
        return self._gathered(array, axis, sizes, into, later=True)

    def _reach_each_other(self, *, wanted: bool) -> bool:
        """Whether all ranks want copies, and are GPUs of one host that can write into each other's memory."""
        others = [number for number in range(torch.cuda.device_count()) if number != self._device.index]
        reaches = wanted and all(torch.cuda.can_device_access_peer(self._device, number) for number in others)
        hosts = {place.rpartition(" ")[0] for place in self._where}
        return set(self.exchange(f"{reaches}")) == {"True"} and len(hosts) == 1

    def _summed_rows(self, array: Any, sizes: tuple[int, ...], *, later: bool) -> Callable[[], Any]:
        tensor, back = _tensor("sum_rows", array)
        if not torch.compiler.is_compiling():
            check_array("sum_rows", tensor, (Tensor,), *_SUMS)
            check_sizes("sum_rows", tensor, 0, sizes, self, whole=True)
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
        tensor, back = _tensor("gather", array)
        if not torch.compiler.is_compiling():
            check_sizes("gather", array, axis, sizes, self, into=into)
        most = max(sizes)
        target = None if into is None else _tensor("gather", into)[0]
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
        """Return the `Peers` for up to so many rows a rank, or None for NCCL. All ranks get the same answer."""
        size = most_rows * tensor.shape[1:].numel() * tensor.dtype.itemsize
        return None if size < _LEAST_COPIED or torch.compiler.is_compiling() else self._peers

    def _begun(
        self, collective: Callable[..., Any], result: Tensor, given: Tensor, *, later: bool
    ) -> Callable[[], object]:
        """Begin a collective; return what waits for it. Until then torch holds its tensors."""
        work = self._naming_missing_ranks(lambda: collective(result, given, group=self.process_group, async_op=later))
        # What compilers make of a collective may return its tensor.
        return (lambda: self._naming_missing_ranks(work.wait)) if later and work is not None else lambda: None

    def _reduced(self, tensor: Tensor, how: Any) -> Tensor:
        tensor = tensor.contiguous()
        self._naming_missing_ranks(lambda: distributed.all_reduce(tensor, op=how, group=self.process_group))
        return tensor

    def _exchanged(self, text: str, group: ProcessGroup, device: torch.device) -> tuple[str, ...]:
        mine = text.encode(errors="surrogatepass")
        sizes = torch.empty(self._count, dtype=torch.int64, device=device)
        size = torch.tensor([len(mine)], device=device)
        self._naming_missing_ranks(lambda: distributed.all_gather_into_tensor(sizes, size, group=group))
        most = max(1, int(sizes.max()))
        padded = torch.frombuffer(bytearray(mine.ljust(most, b"\0")), dtype=torch.uint8).to(device)
        every = torch.empty(self._count * most, dtype=torch.uint8, device=device)
        self._naming_missing_ranks(lambda: distributed.all_gather_into_tensor(every, padded, group=group))
        rows = every.view(self._count, most).cpu().numpy()
        return tuple(
            row[:length].tobytes().decode(errors="surrogatepass")
            for row, length in zip(rows, sizes.tolist(), strict=True)
        )

    def _naming_missing_ranks(self, collective: Callable[[], Result]) -> Result:
        """Return a collective's result. If it fails, name the missing ranks."""
        if torch.compiler.is_compiling():
            return collective()
        try:
            return collective()
        except RuntimeError as error:  # the error of torch.distributed
            missing, why = self._missing()
            if missing == () and not why:
                raise  # all ranks are there, so no rank is to blame
            raise GroupBroken(missing, f"{why}; torch.distributed said: {error}") from error

    def _missing(self) -> tuple[tuple[int, ...], str]:
        """Report a failed collective. Return the ranks that do not report it, and the reason."""
        name = f"skuda/{self.process_group.group_name}/{{}}"
        silent = set(range(self._count)) - {self._rank}
        gone: set[int] = set()
        try:
            store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  no public way to it
            store.set(name.format(self._rank), "failed")
            until = time.monotonic() + self._patience
            while silent > gone and time.monotonic() < until:
                # In this order, because a rank may report and then end.
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
    """Return the timeout of collectives on GPUs."""
    options = group._get_backend(torch.device("cuda")).options  # noqa: SLF001  no public way to it
    found: timedelta = options._timeout  # noqa: SLF001
    return found


def _captures() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _tensor(method: str, array: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return an array as a tensor, and a function that converts a tensor back."""
    check_array(method, array, (Tensor, np.ndarray))
    if isinstance(array, Tensor):
        return array, lambda tensor: tensor
    kind = array.dtype
    if kind.name == "bfloat16":  # torch does not read ml_dtypes, and gloo does not move integers of this size
        bits = torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
        return bits, lambda tensor: tensor.view(torch.int16).numpy().view(kind)
    try:
        return torch.from_numpy(np.ascontiguousarray(array)), lambda tensor: tensor.numpy()
    except (TypeError, ValueError) as error:
        raise InvalidProblem(f"Group.{method}", "array", f"elements {kind}", "have elements of torch") from error


def _has_ended(place: str) -> bool:
    """Whether a process of this host has ended. False for another host, and if it cannot be known."""
    host, _, process = place.rpartition(" ")
    if host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return False
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"
