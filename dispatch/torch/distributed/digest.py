"""`digest`: a short text that tells tensors of other bits apart."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from skuda.dispatch.host.arrays import tensor_view

_BLOCK = 1 << 20
"""Words of which products are in memory at the same time."""


@torch.no_grad()
def digest(*tensors: Tensor | None) -> str:
    """Return a text that is the same for tensors of the same bits on devices of one kind, and differs for others.

    It is made to find mistakes, not forgeries. The host waits for a GPU.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is None or tensor.is_meta:
            found.update(b"none")
            continue
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        found.update(tensor_view(data).data if data.is_cpu else repr(sums(data)).encode())
    return found.hexdigest()[:16]


def sums(data: Tensor) -> tuple[int, ...]:
    """Return numbers that tell bytes apart, of which there are far fewer, so that a GPU need not send the bytes.

    Each is the sum of a block's words times odd numbers, modulo 2^64, or one of the last bytes.
    """
    whole = data.numel() // 8 * 8
    words, rest = data[:whole], data[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    blocks = words.view(torch.int64).split(_BLOCK)
    odd = 2 * torch.arange(len(blocks[0]), device=data.device) + 1
    return (*torch.stack([(block * odd[: len(block)]).sum() for block in blocks]).tolist(), *rest.tolist())
