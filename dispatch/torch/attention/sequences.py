"""`Sequences`: where the tokens of a batch lie in a paged int8 cache, which all layers of a model share.

`skuda.kernels.attention.cache` says what pages, tables and lengths are. A batch comes in columns: every call of a model
adds a number of columns, and each sequence has a token or padding in each. Padding to the left takes no position. That
to the right takes the positions that the next tokens get, so these overwrite it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from skuda.kernels.attention.cache import PAGE
from skuda.kernels.attention.rope_table import MOST_POSITIONS
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.ops.tensor_op import refuse_other

_SUBJECT = "Int8Cache"


def check(good: Tensor, field: str, had: str, must: str, *, wait: bool = True) -> None:
    """Check what a tensor holds.

    Parameters
    ----------
    good : tensor of one bool
        Whether it is as it must be.
    field, had, must : str
        As in `InvalidProblem`.
    wait : bool
        Whether to wait for a GPU. Otherwise, and in compiled code or a capture, the GPU itself reports the error.

    Raises
    ------
    InvalidProblem
        If it is not.
    """
    if torch.compiler.is_compiling() or (good.is_cuda and (not wait or torch.cuda.is_current_stream_capturing())):
        torch._assert_async(good, f"{_SUBJECT}: {field} must {must}; had {had}")  # noqa: SLF001  it has no public name
    elif not good:
        raise InvalidProblem(_SUBJECT, field, had, must)


class Sequences:
    """The sequences of a batch: their pages, lengths and padding.

    A page that two sequences share is never written: from the first block that is not full on, each has its own.

    Parameters
    ----------
    most : int, optional
        Columns for which there is room. All pages are then there from the start, so no call depends on what tensors
        hold. By default pages are added as they are needed.

    Attributes
    ----------
    batch, blocks, pages : int
        Sequences, pages of each, and pages of all.
    seen : int or tensor
        Columns so far; on the device if `most` is given.
    lengths, left, tail : tensors of shape (batch,), s32
        Tokens of each sequence, its padding to the left, and its last columns without padding.
    block_table, ends, starts : tensors, s32
        The tables of the present call: `ends` are its lengths.
    new : int
        Columns of the present call.
    started : bool
        Whether the number of sequences is known; before that there are no tensors.
    shared : bool
        Whether sequences share pages.
    cos_sin : tensor or None
        What `place` returned last.
    """

    lengths: Tensor
    left: Tensor
    tail: Tensor
    ends: Tensor
    starts: Tensor
    block_table: Tensor
    shared: bool

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.batch = self.blocks = self.pages = self.new = 0
        self.seen: Any = 0
        self.started = self.shared = self.placed = False
        self.cos_sin: Tensor | None = None

    def start(self, batch: int, device: torch.device) -> None:
        """Make room for a batch, empty."""
        with torch.inference_mode(False):  # noqa: FBT003  dynamo takes no keyword; later calls may run without it
            self._start(batch, device)

    def _start(self, batch: int, device: torch.device) -> None:
        self.batch, self.started = batch, True
        self._number(batch, device)
        self.block_table = self.lengths.new_zeros((batch, 0))
        # Rows of no columns: an op that turns nothing takes the cosines of any position.
        self.unturned = torch.empty((2**31 - 1, 0), dtype=torch.float32, device=device)
        self.seen = 0
        if self.most is not None:
            self._grow(-(-self.most // PAGE))
            self.seen = torch.zeros((), dtype=torch.int64, device=device)
            if not torch.compiler.is_compiling():  # as transformers does it, for CUDA graphs
                for tensor in (self.lengths, self.left, self.tail, self.ends, self.starts, self.block_table, self.seen):
                    torch._dynamo.mark_static_address(tensor)  # noqa: SLF001  it has no public name

    def _number(self, batch: int, device: torch.device) -> None:
        """Make the tensors of a batch of this size."""
        # No views of one tensor: code that writes these is slow to compile.
        found = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(4))
        self.lengths, self.left, self.tail, self.ends = found
        self.order = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.starts = torch.zeros_like(self.order)

    def _grow(self, blocks: int) -> None:
        """Give each sequence pages for this many blocks, at least."""
        if blocks <= self.blocks:
            return
        # So that copies are few; but not to more positions than there are cosines for.
        blocks = max(blocks, min(self.blocks + self.blocks // 2, MOST_POSITIONS // PAGE))
        with torch.inference_mode(False):  # noqa: FBT003  as in `start`
            pages = torch.arange(self.batch * (blocks - self.blocks), dtype=torch.int32, device=self.order.device)
            self.block_table = torch.cat((self.block_table, pages.view(-1, self.batch).t() + self.pages), 1)
        self.pages += self.batch * (blocks - self.blocks)
        self.blocks = blocks

    def begin(self, batch: int, new: int, device: torch.device, rows: Tensor | None = None) -> None:
        """Begin a call of the model.

        Parameters
        ----------
        batch, new : int
            Sequences, and columns that are added.
        device : torch.device
            Where the model is.
        rows : tensor of shape (batch, 2), s32, optional
            For each sequence, the position of the first new column, negative in padding to the left, and how many
            tokens it has after the call. By default there is no padding in the new columns.

        Raises
        ------
        InvalidProblem
            If the batch has another size than before, there is no room, or the mask is not the one of earlier calls.
        """
        if not self.started:
            self.start(batch, device)
        if batch != self.batch:
            rule = f"be {self.batch}, as in the calls before: use reset(), reorder_cache() or batch_select_indices()"
            raise InvalidProblem(_SUBJECT, "sequences", str(batch), rule)
        wait = new > 1
        if self.most is None:
            self._grow(-(-(self.seen + new) // PAGE))
        else:
            room = f"be at most max_cache_len = {self.most}: make a longer cache"
            check(self.seen + new <= self.most, "positions", f"{new} more than there were", room, wait=wait)
        first = self.lengths if rows is None else rows[:, 0]
        after = self.lengths + new if rows is None else rows[:, 1]
        if rows is not None:
            if isinstance(self.seen, Tensor) or self.seen:
                rule = "be that of all tokens so far, with a column of ones or zeros for each call's columns"
                good = (first.clamp(min=0) == self.lengths).all()
                check(good, "attention_mask", "another number of earlier tokens than the cache", rule, wait=wait)
            self.left.add_((-first).clamp(min=0))
        self.ends.copy_(first + new)
        tail = torch.where(first < 0, after, self.tail + new)
        self.tail.copy_(torch.where(after == self.ends, tail, 0))
        self.starts.copy_(self.order * new)
        self.lengths.copy_(after)
        self.seen += new
        self.new, self.placed = new, False

    def place(self, ids: Tensor, table: Callable[[int], Tensor]) -> Tensor:
        """Return cosines and sines for all positions that there is room for.

        Parameters
        ----------
        ids : tensor of shape (1 or batch, new)
            The model's ids of positions. They must be the tokens' positions, which is checked once in a call.
        table : callable
            Returns the cosines and sines of this many positions, at least, f32 of shape (positions, rotated).

        Raises
        ------
        InvalidProblem
            For other ids.
        """
        if not self.placed:
            self.placed = True
            at = (self.ends - self.new)[:, None] + torch.arange(self.new, device=ids.device)
            good = ((ids == at) | (at < 0) | (at >= self.lengths[:, None])).all()
            rule = (
                "count the tokens of each sequence from 0, without padding, after fuse_: pass them, as generate() does"
            )
            check(good, "position_ids", "other numbers", rule, wait=self.new > 1)
            if self.cos_sin is None or len(self.cos_sin) < self.blocks * PAGE:
                self.cos_sin = table(self.blocks * PAGE)
                if self.most is not None and not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.cos_sin)  # noqa: SLF001  as in `start`
        return cast("Tensor", self.cos_sin)

    def select(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Let sequence i be what sequence `index[i]` was. Full pages are then shared.

        Returns
        -------
        tensor, tensor
            Pages to copy from and to, in each layer, before the next call.

        Raises
        ------
        InvalidProblem
            For what is no index of sequences, and for more sequences than there is room for, where `most` is given.
        """
        index = torch.arange(self.batch)[self._checked(index)]
        device, batch = self.lengths.device, len(index)
        if self.most is not None and batch > self.batch:
            rule = f"be at most {self.batch} with max_cache_len: use a cache without it"
            raise InvalidProblem(_SUBJECT, "sequences", str(batch), rule)
        counts = torch.stack((self.lengths, self.left, self.tail)).cpu()[:, index]
        lengths = counts[0].numpy()[:, None]
        table = self.block_table.cpu()[index].numpy()
        full = lengths // PAGE
        block = np.arange(self.blocks)
        own, begun = block >= full, (block == full) & (lengths % PAGE > 0)
        held, wanted = np.unique(table[~own]), table[own]
        keeps = np.zeros(len(wanted), bool)
        keeps[np.unique(wanted, return_index=True)[1]] = True
        self.pages = max(self.pages, batch * self.blocks)
        free = np.setdiff1d(np.arange(self.pages, dtype=np.int32), np.concatenate((held, wanted[keeps])))
        given = wanted.copy()
        given[~keeps] = free[: np.count_nonzero(~keeps)]
        table[own] = given
        copied = begun[own] & ~keeps
        self.shared = bool(len(held) < np.count_nonzero(~own))
        if batch != self.batch:
            self.batch = batch
            with torch.inference_mode(False):  # noqa: FBT003  dynamo takes no keyword; later calls may run without it
                self._number(batch, device)
                self.block_table = torch.empty(table.shape, dtype=torch.int32, device=device)
        for tensor, values in zip((self.lengths, self.left, self.tail), counts, strict=True):
            tensor.copy_(values)
        self.block_table.copy_(torch.from_numpy(table))
        pages = torch.from_numpy(np.stack((wanted[copied], given[copied])).astype(np.int64)).to(device)
        return pages[0], pages[1]

    def _checked(self, index: Tensor) -> Tensor:
        """Return an index or a mask of sequences, on the CPU."""
        refuse_other(_SUBJECT, "indices", index)
        index, mask = index.cpu(), index.dtype is torch.bool
        numbers = not (index.is_floating_point() or index.is_complex())
        good = index.dim() == 1 and (len(index) == self.batch if mask else numbers)
        if not good or (not mask and bool(((index < 0) | (index >= self.batch)).any())):
            had = f"{index.dtype} of shape {list(index.shape)}"
            had += f", {shown(index.tolist())}" if index.dim() == 1 else ""
            raise InvalidProblem(
                _SUBJECT, "indices", had, f"be numbers of sequences in [0, {self.batch - 1}], or a bool for each"
            )
        return index

    def crop(self, columns: int) -> None:
        """Remove the last columns.

        Raises
        ------
        InvalidProblem
            If the columns reach padding between tokens or to the right: how many tokens they hold is not known.
        """
        good = ((self.lengths + self.left == self.seen) | (self.tail >= columns)).all()
        rule = "be tokens, or padding to the left: start again with reset()"
        check(good, "columns to remove", "padding between tokens or to the right", rule)
        columns = min(columns, int(self.seen))
        self.tail.sub_(columns).clamp_(min=0)
        self.seen -= columns
        self.lengths.sub_(columns).clamp_(min=0)
        self.left.clamp_(max=self.seen)

    def reset(self) -> None:
        """Forget all tokens, and keep the pages."""
        if self.started:
            self.lengths.zero_()
            self.left.zero_()
            self.tail.zero_()
            self.seen -= self.seen
