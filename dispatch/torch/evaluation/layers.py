"""What the codes of one layer cost: the reference with the int8 layer of a model in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.torch.linear.autograd import frozen_linear
from skuda.torch.linear.int8_linear import Int8Linear, autocast
from skuda.torch.linear.joined import Part, int8_layers
from skuda.torch.models.replaceable_layers import as_linear

_MOST = 0.1
"""How far logarithms of the columns' factors may be from known ones, in the median; 4-bit codes move them by .03."""
_EXPLAINED = 0.25
"""The largest part of a weight's squares that rounding to 4 bits makes."""
_ROWS = 1024
"""Rows of a weight that are looked at."""


class Replacement(NamedTuple):
    """An int8 layer, the layer of the reference in whose place it runs, and what divides its input, of shape (K,)."""

    layer: Int8Linear | Part
    original: nn.Module
    factors: Tensor | None

    def __call__(self, input: Tensor) -> Tensor:
        """Return the int8 layer's output for the input of the original."""
        layer, rows = self.layer, input.to(self.layer.weight_scale.device)
        if self.factors is not None:
            rows = (rows / self.factors).to(input.dtype)
        if not isinstance(layer, Part):
            found: Tensor = layer.forward(rows)  # without hooks: it may stand in the reference itself
        else:  # its own call also takes the joined output, which may be as wide
            held = layer.operand, layer.weight_scale.view(-1), layer.bias
            found = frozen_linear(autocast(rows), *held, nonfinite=layer.joined.nonfinite)
        return found.to(input)


def replacements(model: nn.Module, reference: nn.Module) -> dict[str, Replacement]:
    """Return the int8 layers of a model by name, each with its place in a reference.

    Raises
    ------
    InvalidProblem
        If there are none, or one has no place; if the factors that one needs are not known.
    """
    layers, norms = dict(int8_layers(model)), _norm_factors(model, reference)
    if not layers:
        raise InvalidProblem("compare", "model", "no int8 layer", "have some with by_layer=True: call quantize_ first")
    originals = dict(reference.named_modules())
    found = {}
    for name, layer in layers.items():
        original: Any = originals.get(name)
        if (layer.joined if isinstance(layer, Part) else layer).split is not None:
            rule = "be whole with by_layer=True: compare before parallelize_"
            raise InvalidProblem("compare", name, "a rank's part of a layer", rule)
        if getattr(original, "weight", None) is None or as_linear(original).weight.shape != layer.weight.shape:
            had = f"an int8 layer of shape {list(layer.weight.shape)}, which the reference lacks"
            raise InvalidProblem("compare", name, had, "be a layer of the reference, too, with by_layer=True")
        found[name] = Replacement(layer, original, _factors(name, layer, as_linear(original).weight, norms))
    return found


def results_with(layers: Mapping[str, Replacement], call: Callable[[], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield what a call of the reference returns with one layer replaced, for each layer that it reaches."""
    for name, replacement in layers.items():
        with replaced(replacement) as calls:
            result = call()
        if calls:
            yield name, result


@contextmanager
def replaced(replacement: Replacement) -> Iterator[list[None]]:
    """Let a layer run in the place of the original in a block; yield a list with an element for each call."""
    calls = list[None]()

    def instead(_: Any, args: Any, named: Any, __: Any) -> Tensor:
        calls.append(None)
        return replacement(next(iter((*args, *named.values()))))

    handle = replacement.original.register_forward_hook(instead, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def _norm_factors(model: nn.Module, reference: nn.Module) -> list[Tensor]:
    """Return the quotients of norms' weights in the reference and in the model, where they differ."""
    mine = dict(model.named_parameters())
    found = []
    for name, other in reference.named_parameters():
        own = mine.get(name)
        if own is not None and own.dim() == 1 and own.shape == other.shape and name.endswith("weight"):
            own = own.detach().double()
            quotient = other.detach().double().to(own.device) / own
            quotient[own == 0] = 1.0
            if not bool((quotient == 1).all()) and bool((quotient > 0).all()):
                found.append(quotient)
    return found


def _factors(name: str, layer: Int8Linear | Part, original: Tensor, norms: list[Tensor]) -> Tensor | None:
    """Return by which factors the columns of a layer's weight were multiplied: none, or those of a norm.

    The weight tells which: the codes stand for the original values times the factors, but for their rounding. Weights
    that are no multiples of the original ones are just wrong, and cost what they cost.
    """
    codes, weight = layer.weight[:_ROWS].double(), original[:_ROWS].detach().to(layer.weight_scale.device).double()
    known: list[Tensor | None] = [None, *(each.to(codes.device) for each in norms if len(each) == codes.shape[1])]
    best = min(known, key=lambda each: _distance(codes, weight, each, 0)[0])
    for axis in (0, 1):
        distance, unexplained = _distance(codes, weight, best, axis)
        if distance > _MOST and unexplained < _EXPLAINED:
            rule = "be multiplied by factors that a norm of the model took over, or by none, with by_layer=True"
            raise InvalidProblem("compare", f"weight of {name}", "one with other factors than the reference's", rule)
    return None if best is None else best.float()


def _distance(codes: Tensor, weight: Tensor, factors: Tensor | None, axis: int) -> tuple[float, float]:
    """Return how far multiples of each column or row are from 1 in the median, and what part of it is none of them."""
    expected = weight if factors is None else weight * factors
    power = (expected * expected).sum(axis, keepdim=True)
    multiples = (codes * expected).sum(axis, keepdim=True) / torch.where(power > 0, power, 1.0)
    unexplained = (codes - multiples * expected).square().sum() / codes.square().sum().clamp(min=1e-30)
    found = multiples[power > 0].clamp(min=1e-30).log().abs()
    return (float(found.median()) if len(found) else 0.0), float(unexplained)
