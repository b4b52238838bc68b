"""A format of weights, in one file: codes of 8 bits, in runs of 32 along K that are stored backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skuda.registry.elements import ElementKind
from skuda.torch.formats import FORMATS, ConfigFields, StoredWeight, Tensors, WeightFormat, register_format
from skuda.torch.formats.int8 import channel_scales, quantized_weight, tensor_fields
from skuda.torch.formats.weight import Difference

RUN = 32


@dataclass(frozen=True)
class StoredBackwards(StoredWeight):
    """The tensors of a layer, as they are."""

    own = True
    name = "backwards"
    file_formats = ("toy-backwards",)

    def fields(self) -> dict[str, Any]:
        return tensor_fields("channel", dynamic=False)

    @classmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> StoredBackwards | None:
        if file_format not in cls.file_formats:
            return None
        for name, value in tensor_fields("channel", dynamic=False).items():
            weights.one_of(name, [value])
        weights.finish()
        return cls()

    def read(
        self, found: Tensors, shape: tuple[int, int], approximate: str | None = None
    ) -> tuple[Tensor, Tensor, Difference]:
        codes = found.take("weight", torch.int8, Backwards().shape(*shape))
        return codes, channel_scales(found, shape[0]), Difference()


@dataclass(frozen=True)
class Backwards(WeightFormat):
    """Codes s8 of shape (N, runs, 32)."""

    name = "backwards"
    dtype = torch.int8
    element = ElementKind.S8
    units: ClassVar[dict[str, int]] = {"n": 1, "k": RUN}
    even = RUN
    files = (StoredBackwards,)

    @classmethod
    def of(cls, codes: Tensor, n: int, k: int | None) -> Backwards | None:
        return cls() if codes.dtype is torch.int8 and codes.dim() == 3 and k is not None else None

    @classmethod
    def wanted(cls, n: int, k: int | None) -> str:
        return f"backwards, int8 of shape [N, runs, {RUN}], with in_features"

    @classmethod
    def layout(cls, subject: str, group_size: object, *, symmetric: bool) -> Backwards:
        return cls()

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int = 128, *, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        codes, scale = quantized_weight(weight)
        n, k = codes.shape
        filled = codes.new_zeros(n, -(-k // RUN) * RUN)
        filled[:, :k] = codes
        return filled.view(n, -1, RUN).flip(2), scale

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        return n, -(-k // RUN), RUN

    def integers(self, codes: Tensor, n: int, k: int) -> Tensor:
        return codes.flip(2).reshape(n, codes.shape[1] * RUN)[:, :k].contiguous()

    operand = integers

    def stored(self) -> StoredBackwards:
        return StoredBackwards()


def added():
    """Add the format while a `with` block, or a fixture, runs."""
    register_format(Backwards)
    yield Backwards
    del FORMATS[Backwards.name]
