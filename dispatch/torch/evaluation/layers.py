"""What the codes of one layer cost: the reference with the int8 layer of a model in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.torch.linear.int8_linear import Int8Linear
from skuda.torch.linear.joined import Part, int8_layers
from skuda.torch.models.folded import factors_of, folding_of, loaded_as
from skuda.torch.models.replaceable_layers import as_linear


class Replacement(NamedTuple):
    """An int8 layer, the layer of the reference in whose place it runs, and what divides its input and output."""

    layer: Int8Linear | Part
    original: nn.Module
    input: Tensor | None = None
    output: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:
        """Return what the original returns, by the int8 layer."""
        place = self.layer.weight_scale.device
        rows = input.to(place)
        if self.input is not None:
            rows = (rows / self.input.to(place)).to(input.dtype)
        found = self.layer.forward(rows)  # without hooks: it may stand in the reference itself
        if self.output is not None:
            found = found * self.output.to(place)
        return found.to(input)


def replacements(model: nn.Module, reference: nn.Module) -> dict[str, Replacement]:
    """Return the int8 layers of a model by name, each with its place in a reference.

    Raises
    ------
    InvalidProblem
        If there are none, or one has no place; if the reference is folded otherwise, by factors that are not known.
    """
    layers, other = dict(int8_layers(model)), folding_of(reference)
    factors = {} if folding_of(model) == other else factors_of(model)
    if other not in (folding_of(model), loaded_as(model)):
        rule = "be folded as the model is, or be the model before it was folded in this process, with by_layer=True"
        raise InvalidProblem("compare", "reference", "a model that is folded otherwise, or not at all", rule)
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
        plain = name.removesuffix(".base_layer")  # as peft names it
        found[name] = Replacement(layer, original, factors.get((plain, False)), factors.get((plain, True)))
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
