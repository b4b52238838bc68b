"""`Budget`: the layers whose codes cost a model the most get more bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import shown
from skuda.registry.value import expect_real
from skuda.torch.evaluation.comparison import Places, compared, evaluating, logits_of
from skuda.torch.evaluation.layers import Replacement, replaced
from skuda.torch.models.replaceable_layers import as_linear, bytes_of

Convert = Callable[[str, nn.Linear], nn.Module]


@dataclass(frozen=True, eq=False)
class Budget:
    """How many bits a weight may take in the mean, for `quantize_`.

    Each layer gets the weights of the config, or 8 bits, or stays in floating point. Layers with one input, such as
    those of queries, keys and values, get the same, because kernels and servers join them. What a choice costs is
    measured: the divergence of the model in floating point with only these layers replaced, as `compare` defines it.
    Then the change that saves most for the bits that it adds is made, and again, while the budget holds. So costs are
    taken as independent of each other.

    Parameters
    ----------
    bits : float
        Bits in the mean over the layers that are selected and can be replaced, with their scales and biases.
    inputs : sequence of tensor or mapping
        As in `compare`. The model runs on each of them up to twice for each choice, and their logits are in memory.

    Raises
    ------
    InvalidProblem
        For an invalid value.
    """

    bits: float
    inputs: Sequence[Tensor | Mapping[str, Any]]

    def __post_init__(self) -> None:
        expect_real("Budget", "bits", self.bits, 0, 64)
        if not isinstance(self.inputs, list | tuple) or not self.inputs:
            raise InvalidProblem("Budget", "inputs", shown(self.inputs), "be a list of tensors of ids, or of mappings")


class Choice(NamedTuple):
    """What a budget gives layers with one input.

    Attributes
    ----------
    layers : tuple of str
    bits : float
        Bits of a weight.
    cost : float
        The divergence that they cost alone, in nats.
    saved : float
        What they would cost more with the weights of the config.
    """

    layers: tuple[str, ...]
    bits: float
    cost: float
    saved: float

    def __str__(self) -> str:
        more = f", {self.saved:.3g} less than the config's" if self.saved else ""
        return f"{self.bits:.3g} bits a weight cost {self.cost:.3g} nats{more}: {', '.join(self.layers)}"


class Spent:
    """Converts the layers of a model as a budget allows.

    Parameters
    ----------
    budget : Budget
    model : Module
        In floating point.
    layers : mapping of str to module
        The layers to convert.
    convert, eight : callable
        Return a layer with the weights of the config, and with those of 8 bits.

    Attributes
    ----------
    choices : tuple of Choice
        Those of all layers that the inputs reach.

    Raises
    ------
    InvalidProblem
        If the weights of the config take more bits, and as `compare`.
    """

    def __init__(
        self, budget: Budget, model: nn.Module, layers: Mapping[str, nn.Module], convert: Convert, eight: Convert
    ) -> None:
        self._eight = eight
        self._made: dict[str, nn.Module | SkudaError] = {}
        units: list[_Unit] = []
        with torch.no_grad(), evaluating(model):
            runs, together = _runs(budget, model, layers)
            reached = {name for names in together for name in names}
            for names in (*together, *((name,) for name in layers if name not in reached)):
                self._made |= {name: _made(convert, name, layers[name]) for name in names}
                own = _whole({name: self._made[name] for name in names})
                if not own:
                    continue
                old = {name: layers[name] for name in own}
                ways = [_Way("own", _bits(own), _cost(model, runs, layers, own) if names[0] in reached else 0.0)]
                if names[0] in reached:
                    wide = _whole({name: _made(eight, name, layers[name]) for name in own})
                    if wide.keys() == own.keys() and _bits(wide) > ways[0].bits:
                        ways.append(_Way("eight", _bits(wide), _cost(model, runs, layers, wide)))
                    ways.append(_Way("floating", _bits(old), 0.0))
                units.append(_Unit(tuple(own), sum(as_linear(each).weight.numel() for each in old.values()), ways))
        taken = _taken(budget.bits, units)
        self._ways = {name: way.kind for unit, way in zip(units, taken, strict=True) for name in unit.layers}
        self.choices = tuple(
            Choice(unit.layers, way.bits / unit.weights, way.cost, unit.ways[0].cost - way.cost)
            for unit, way in zip(units, taken, strict=True)
            if len(unit.ways) > 1
        )

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return what the budget gives a layer."""
        made, way = self._made.pop(name), self._ways.get(name)
        if isinstance(made, SkudaError):
            raise made
        return linear if way == "floating" else self._eight(name, linear) if way == "eight" else made


class _Way(NamedTuple):
    """What layers may become, their bits, and the divergence that it costs."""

    kind: str
    bits: int
    cost: float


class _Unit(NamedTuple):
    """Layers with one input, how many weights they have, and their ways, that of the config first."""

    layers: tuple[str, ...]
    weights: int
    ways: list[_Way]


def _taken(most: float, units: Sequence[_Unit]) -> list[_Way]:
    """Return the way that each unit takes."""
    taken = [unit.ways[0] for unit in units]
    weights, used = sum(unit.weights for unit in units), sum(way.bits for way in taken)
    if used > most * weights:
        rule = f"be at least {used / weights:.4g}, which the weights of the config take"
        raise InvalidProblem("Budget", "bits", shown(most), rule)
    while True:
        best, change = 0.0, None
        for which, (unit, now) in enumerate(zip(units, taken, strict=True)):
            for way in unit.ways:
                added, saved = way.bits - now.bits, now.cost - way.cost
                if added > 0 and used + added <= most * weights and saved > best * added:
                    best, change = saved / added, (which, way)
        if change is None:
            return taken
        used += change[1].bits - taken[change[0]].bits
        taken[change[0]] = change[1]


def _whole(made: Mapping[str, nn.Module | SkudaError]) -> dict[str, nn.Module]:
    return {name: new for name, new in made.items() if not isinstance(new, SkudaError)}


def _bits(layers: Mapping[str, nn.Module]) -> int:
    return 8 * sum(map(bytes_of, layers.values()))


def _made(convert: Convert, name: str, layer: nn.Module) -> nn.Module | SkudaError:
    try:
        return convert(name, as_linear(layer))
    except SkudaError as error:
        return error


_Run = tuple[Any, Tensor, Places]
"""An input, the logits of the model in floating point, and the places that count."""


def _runs(
    budget: Budget, model: nn.Module, layers: Mapping[str, nn.Module]
) -> tuple[list[_Run], list[tuple[str, ...]]]:
    """Return the runs of a model, and the names of layers that first take one input, one after the other."""
    runs: list[_Run] = []
    together: list[tuple[str, ...]] = []
    last: list[object] = [None]
    with ExitStack() as stack:
        for name, layer in layers.items():

            def called(_: nn.Module, args: Any, named: Any, name: str = name) -> None:
                given = next(iter((*args, *named.values())), None)
                if any(name in each for each in together):
                    return
                if given is last[0] and given is not None:
                    together[-1] += (name,)
                else:
                    together.append((name,))
                last[0] = given

            stack.callback(layer.register_forward_pre_hook(called, with_kwargs=True).remove)
        for given in budget.inputs:
            logits = logits_of(model, "model", given)
            runs.append((given, logits, Places.of(given, logits)))
    return runs, together


def _cost(
    model: nn.Module, runs: Iterable[_Run], layers: Mapping[str, nn.Module], new: Mapping[str, nn.Module]
) -> float:
    """Return the mean divergence of a model with new layers in the place of some of its own."""
    total, count = 0.0, 0
    with ExitStack() as stack:
        for name, layer in new.items():
            stack.enter_context(replaced(Replacement(layer, layers[name])))
        for given, logits, places in runs:
            found = compared(logits_of(model, "model", given), logits, places).divergence
            total, count = total + float(found.sum()), count + len(found)
    return total / max(count, 1)
