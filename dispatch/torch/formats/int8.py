"""Weights of 8 bits: symmetric codes -127..127, s8 of shape (N, K)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats.reading import ONE, SCALES, ConfigFields, Tensors
from skuda.torch.formats.weight import Difference, Quantizer, StoredWeight, WeightFormat, register_format
from skuda.torch.ops.tensor_op import check_tensors

Q_MAX = 127
"""Bound of the symmetric range -127..127. Without -128, every code has a negative."""
BOUNDS = {"q_min": -Q_MAX, "q_max": Q_MAX}
CODES: dict[str, Any] = {**BOUNDS, "output_element": "s8"}
"""Fields of the ops that write codes of this range."""
INT_QUANTIZED = "int-quantized"
"""The format of files with a code in each element."""


def quantized_weight(weight: Tensor, fields: Mapping[str, Any] = CODES) -> tuple[Tensor, Tensor]:
    """Quantize a weight of shape (N, K) symmetrically. Return codes, and an f32 scale per output channel, (N,).

    `fields` say which codes the op `dynamic_range` writes, by default s8.

    Raises
    ------
    InvalidProblem
        If the weight is not a finite matrix of f16, bf16 or f32.
    """
    check_tensors("quantized_weight", weight=weight)
    matrix = weight.detach()
    if matrix.dtype not in (torch.float16, torch.bfloat16, torch.float32) or matrix.dim() != 2:
        had = f"{matrix.dtype} of shape {list(matrix.shape)}"
        raise InvalidProblem("quantized_weight", "weight", had, "be float16, bfloat16 or float32 of shape [N, K]")
    if not bool(matrix.isfinite().all()):
        raise InvalidProblem("quantized_weight", "weight", "an infinity or NaN", "be finite")
    codes, scale, _ = torch.ops.skuda.dynamic_range(matrix, **fields)
    return codes, scale


@dataclass(frozen=True)
class StoredInt8(StoredWeight):
    """How a file holds weights of 8 bits: `weight`, s8 of shape (N, K), and `weight_scale`.

    Attributes
    ----------
    per_tensor : bool
        Whether a weight has a single scale instead of one per output channel.
    """

    per_tensor: bool = False

    name = "int8"
    file_formats = (INT_QUANTIZED,)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a config's ``weights``."""
        return tensor_fields("tensor" if self.per_tensor else "channel", dynamic=False)

    @classmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> Self | None:
        """Take the fields of a config's ``weights``, unless they are of another kind."""
        if file_format != INT_QUANTIZED or weights.fields.get("num_bits") == 4:
            return None
        per_tensor = weights.one_of("strategy", ["channel", "tensor"]) == "tensor"
        weights.one_of("dynamic", [False], default=False)
        weights.one_of("symmetric", [True], default=True)
        weights.common()
        return cls(per_tensor)

    def read(
        self, found: Tensors, shape: tuple[int, int], approximate: str | None = None
    ) -> tuple[Tensor, Tensor, Difference]:
        """Read the weight of a layer; see `StoredWeight.read`."""
        del approximate
        weight = found.take("weight", torch.int8, shape)
        return weight, channel_scales(found, shape[0], *(ONE if self.per_tensor else ())), Difference()


def channel_scales(found: Tensors, n: int, *shapes: tuple[int, ...]) -> Tensor:
    """Take a weight's scales, one of each output channel or of these shapes. Return them as (N, 1)."""
    scale = found.take("weight_scale", SCALES, *(shapes or ((n, 1), (n,))))
    found.take_zeros("weight_zero_point")
    return scale.reshape(-1, 1).expand(n, 1).contiguous()


def tensor_fields(
    strategy: str, *, dynamic: bool, symmetric: bool = True, group_size: int | None = None, bits: int = 8
) -> dict[str, Any]:
    """Return the fields that describe one quantized tensor in a config."""
    return {
        "dynamic": dynamic,
        "group_size": group_size,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": symmetric,
        "type": "int",
    }


@dataclass(frozen=True)
class Int8(WeightFormat):
    """Codes of 8 bits, s8 of shape (N, K)."""

    name = "int8"
    dtype = torch.int8
    element = ElementKind.S8
    files = (StoredInt8,)

    @classmethod
    def of(cls, codes: Tensor, n: int, k: int | None) -> Int8 | None:
        """Return the format of a matrix of s8."""
        del n, k
        return INT8 if codes.dtype is torch.int8 and codes.dim() == 2 else None

    @classmethod
    def wanted(cls, n: int, k: int | None) -> str:
        """Say what `of` takes."""
        del n, k
        return "int8 of shape [N, K]"

    @classmethod
    def layout(cls, subject: str, group_size: object, *, symmetric: bool) -> Self:
        """Return the format; it has no options."""
        if group_size != 128:
            raise InvalidProblem(subject, "group_size", shown(group_size), "be left out, or weights be 'int4'")
        if symmetric:
            raise InvalidProblem(subject, "symmetric", shown(symmetric), "be False, or True with weights='int4'")
        return cls()

    @classmethod
    def quantize(cls, weight: Tensor, group_size: int = 128, *, symmetric: bool = False) -> tuple[Tensor, Tensor]:
        """Quantize a weight symmetrically; see `quantized_weight`."""
        cls.layout("Int8.quantize", group_size, symmetric=symmetric)
        return quantized_weight(weight)

    def shape(self, n: int, k: int) -> tuple[int, ...]:
        """Return (N, K)."""
        return n, k

    def integers(self, codes: Tensor, n: int, k: int) -> Tensor:  # noqa: ARG002  their shape tells
        """Return the codes."""
        return codes

    def shape_of_weight(self, codes: Tensor, n: int, k: int | None) -> tuple[int, int]:
        """Return the shape of the codes."""
        del n, k
        return codes.shape[0], codes.shape[1]

    def stored(self) -> StoredInt8:
        """Return how a file holds such a weight."""
        return StoredInt8()


INT8 = Int8()
TO_INT8 = Quantizer(INT8)
"""Quantizes weights to 8 bits."""
register_format(Int8)
