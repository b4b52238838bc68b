"""Digests of weights, by which two programs find the first tensor that their models do not share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_DIGITS = 16
_COUNTED = ("weight", "weight_scale", "bias")
"""What codes, scales, biases, norms and embeddings are called."""


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return, by name, the element, the shape without axes of length 1, and a digest of the bits of each weight."""
    found = {}
    for name, tensor in tensors:
        if name.rpartition(".")[2] in _COUNTED:
            made = hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy())
            shape = [size for size in tensor.shape if size != 1]
            found[name] = f"{str(tensor.dtype).removeprefix('torch.')} {shape} {made.hexdigest()[:_DIGITS]}"
    return found


def first_difference(own: Mapping[str, str], other: Mapping[str, str], where: str) -> str:
    """Return in words which tensor differs first between a model and the one elsewhere, in the order of the model."""
    for name, known in own.items():
        if name in other and other[name] != known:
            return f"; first in the weights {name}: {where} has {other[name]}, here {known}"
    for name in (*own, *other):
        if name not in own or name not in other:
            return f"; the weights {name} are {f'only in {where}' if name in other else f'not in {where}'}"
    return f"; all {len(own)} tensors of weights are the same"
