"""What an int8 layer does with a NaN or an infinity in its input."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.linear.int8_linear import DynamicLinear, SmoothedLinear, StaticLinear

Nonfinite = Literal["ignore", "propagate"]
"""What an int8 layer does with a NaN or an infinity in its input."""

Layer = TypeVar("Layer")


def propagates(layer: object) -> bool:
    """Whether a layer's output shows what is not finite in its input."""
    return getattr(layer, "nonfinite", None) == "propagate"


def propagating(layer: Layer) -> Layer:
    """Make an int8 layer show in its output what is not finite in its input. Return the layer.

    A row with a NaN or an infinity then gives a row of NaN. Dynamic layers have an infinite scale for it; static ones
    take one more pass over the input, and one over the output.

    Raises
    ------
    InvalidProblem
        For a layer that is no `DynamicLinear`, `SmoothedLinear` or `StaticLinear`.
    """
    if not isinstance(layer, DynamicLinear | SmoothedLinear | StaticLinear):
        rule = "be a DynamicLinear or a StaticLinear"
        raise InvalidProblem("nonfinite='propagate'", "layer", f"a {type(layer).__name__}", rule)
    layer.propagating()
    return layer


def check_nonfinite(subject: str, given: Any) -> None:
    """Raise for a value that is no `Nonfinite`."""
    if given not in ("ignore", "propagate"):
        raise InvalidProblem(subject, "nonfinite", shown(given), "be 'ignore' or 'propagate'")


def kind_of(layer: object) -> str:
    """Return the class of a layer, and whether it propagates, in words."""
    return type(layer).__name__ + (", nonfinite='propagate'" if propagates(layer) else "")
