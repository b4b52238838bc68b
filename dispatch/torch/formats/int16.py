"""Weights of 16 bits: symmetric codes -32639..32639, as s8 of shape (N, 2, K): the high halves of a row, then the low.

They multiply activations of 16 bits. A code is 256 high + low; see `skuda.registry.elements.ElementKind.S16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from skuda.registry.elements import ElementKind
from skuda.torch.formats.int8 import CODES, INT8, channel_scales, quantized_weight, tensor_fields
from skuda.torch.formats.reading import ConfigFields, Tensors
from skuda.torch.formats.weight import Axis, Difference, StoredWeight, WeightFormat, register_format

CODES_OF: Mapping[int, Mapping[str, Any]] = {
    8: CODES,
    16: {"q_min": -32_639, "q_max": 32_639, "output_element": "s16"},
}
"""Fields of the ops that write symmetric codes, by their bits."""
SPLIT = "skuda-int16"
"""The format of files with codes in two halves."""


@dataclass(frozen=True)
class StoredInt16(StoredWeight):
    """How a file holds weights of 16 bits: `weight`, s8 of shape (N, 2, K), and `weight_scale`, one a channel."""

    own = True
    dynamic = True
    beside = (16,)
    name = "int16"
    file_formats = (SPLIT,)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a config's ``weights``."""
        return tensor_fields("channel", dynamic=False, bits=16)

    @classmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> Self | None:
        """Take the fields of a config's ``weights``, unless they are of another kind."""
        if file_format != SPLIT:
            return None
        weights.one_of("strategy", ["channel"])
        weights.one_of("dynamic", [False], default=False)
        weights.one_of("symmetric", [True], default=True)
        weights.common(16)
        return cls()

    def read(
        self, found: Tensors, shape: tuple[int, int], approximate: str | None = None
    ) -> tuple[Tensor, Tensor, Difference]:
        """Read the weight of a layer; see `StoredWeight.read`."""
        del approximate
        weight = found.take("weight", torch.int8, Int16().shape(*shape))
        return weight, channel_scales(found, shape[0]), Difference()


@dataclass(frozen=True)
class Int16(WeightFormat):
    """Codes of 16 bits in two halves, s8 of shape (N, 2, K)."""

    name = "int16"
    dtype = torch.int8
    element = ElementKind.S16
    fields: ClassVar[Mapping[str, str]] = {"weight_element": "s16"}
    k_axis = 2
    files = (StoredInt16,)

    @classmethod
    def of(cls, codes: Tensor, n: int, k: int | None) -> Self | None:
        """Return the format of s8 with two halves of K."""
        return cls() if codes.dtype is torch.int8 and tuple(codes.shape) == (n, 2, k) else None

    @classmethod
    def wanted(cls, n: int, k: int | None) -> str:
        """Say what `of` takes."""
        del n, k
        return "int8 of shape [N, 2, K], with in_features"

    @classmethod
    def layout(cls, subject: str, group_size: object, *, symmetric: bool) -> Self:
        """Return the format; it has no options."""
        INT8.layout(subject, group_size, symmetric=symmetric)
        return cls()

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int = 128, *, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        """Quantize a weight symmetrically; see `quantized_weight`."""
        made = cls.layout("Int16.quantize", group_size, symmetric=symmetric)
        codes, scale = quantized_weight(weight, CODES_OF[16])
        return codes.view(made.shape(*weight.shape)), scale

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return (N, 2, K)."""
        return n, 2, k

    def integers(self, codes: Tensor, n: int, k: int) -> Tensor:  # noqa: ARG002  their shape tells
        """Return the codes, s16 of shape (N, K)."""
        high, low = codes.to(torch.int16).unbind(1)
        return high * 256 + low

    def operand(self, codes: Tensor, n: int, k: int) -> Tensor:
        """Return the halves of a row one after the other, (N, 2 K): a view, unless K was cut."""
        return codes.reshape(n, 2 * k)

    def cut(self, codes: Tensor, axis: Axis, start: int, stop: int) -> Tensor:
        """Return the codes of some output channels, or elements of K; see `WeightFormat.cut`."""
        return super().cut(codes.transpose(1, 2), axis, start, stop).transpose(1, 2)

    def text(self) -> str:
        """Return the bits."""
        return ", weights=int16"

    def stored(self) -> StoredInt16:
        """Return how a file holds such a weight."""
        return StoredInt16()


register_format(Int16)
