"""Int8 layers that pass on what is not finite: a row with a NaN or an infinity gives a row of NaN."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.autograd import spread
from skuda.torch.int8_linear import DynamicLinear, Int8Linear, SmoothedLinear, StaticLinear, autocast

Nonfinite = Literal["ignore", "propagate"]
"""What an int8 layer does with a NaN or an infinity in its input."""

Layer = TypeVar("Layer")


class _Propagating(Int8Linear):
    """What layers that propagate have in common."""

    def like(self, whole: Int8Linear) -> Int8Linear:
        """Return another layer that propagates likewise."""
        return propagating(whole)


class _Spreading(_Propagating):
    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K)."""
        return super().forward(spread(input))  # type: ignore[no-any-return]


class PropagatingDynamicLinear(_Spreading, DynamicLinear):
    """A `DynamicLinear` that turns a row with a NaN or an infinity into a row of NaN."""

    whole_kind = DynamicLinear


class PropagatingSmoothedLinear(_Spreading, SmoothedLinear):
    """A `SmoothedLinear` that turns a row with a NaN or an infinity into a row of NaN."""

    whole_kind = SmoothedLinear

    def take_smooth(self) -> None:
        """Become a `PropagatingDynamicLinear`."""
        super().take_smooth()
        propagating(self)


class PropagatingStaticLinear(_Propagating, StaticLinear):
    """A `StaticLinear` that turns a row with a NaN or an infinity into a row of NaN."""

    whole_kind = StaticLinear

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K)."""
        found, input = super().forward(input), autocast(input)
        # The difference is NaN for a NaN and an infinity, and otherwise 0.
        return found.masked_fill((input - input).sum(-1, keepdim=True).isnan(), torch.nan)


_KINDS: dict[type, type] = {
    DynamicLinear: PropagatingDynamicLinear,
    SmoothedLinear: PropagatingSmoothedLinear,
    StaticLinear: PropagatingStaticLinear,
}


def propagates(layer: object) -> bool:
    """Whether a layer's output shows what is not finite in its input."""
    return isinstance(layer, tuple(_KINDS.values()))


def propagating(layer: Layer) -> Layer:
    """Make an int8 layer show in its output what is not finite in its input. Return the layer.

    Raises
    ------
    InvalidProblem
        For a layer that is no `DynamicLinear`, `SmoothedLinear` or `StaticLinear`.
    """
    kind = _KINDS.get(type(layer))
    if kind is None:
        rule = "be a DynamicLinear or a StaticLinear"
        raise InvalidProblem("nonfinite='propagate'", "layer", f"a {type(layer).__name__}", rule)
    layer.__class__ = kind  # type: ignore[assignment]
    return layer


def check_nonfinite(subject: str, given: Any) -> None:
    """Raise for a value that is no `Nonfinite`."""
    if given not in ("ignore", "propagate"):
        raise InvalidProblem(subject, "nonfinite", shown(given), "be 'ignore' or 'propagate'")
