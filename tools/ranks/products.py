"""The linear layers of the stack over the ranks: exact, as `Shards` splits them, and two ways with rounded parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any, Protocol

from skuda import ops
from skuda.dispatch import Device, Dispatcher
from skuda.dispatch.shard import BoundShards, Group, Shards
from skuda.kernels.linear import QuantizedLinearDescriptor, ScaledLinearDescriptor
from skuda.kernels.quantize import NormQuantized
from skuda.registry.descriptor import Descriptor
from skuda.tools.ranks.framework import Framework


@dataclass(frozen=True)
class Layer:
    """A rank's part of a linear layer.

    Attributes
    ----------
    framework : Framework
        What the arrays are of.
    n, k : int
        Sizes of the whole layer.
    sizes : tuple of int
        The parts of the split axis, by rank.
    codes : array of shape (n, k) or a part of it, s8
        The weight.
    scales : array of shape (n,) or a part of it, f32
        Powers of two.
    """

    framework: Framework
    n: int
    k: int
    sizes: tuple[int, ...]
    codes: Any
    scales: Any

    @cached_property
    def real(self) -> Any:
        """The weight in bf16, exactly."""
        wide = self.framework.wide
        return self.framework.narrow(wide(self.codes) * self.scales[:, None])


class Products(Protocol):
    """How linear layers are computed; every rank calls the same in the same order."""

    def column(self, layer: Layer, normed: NormQuantized) -> Any:
        """Return the rank's columns of the output, for whole rows; bf16."""

    def row(self, layer: Layer, x: Any) -> Any:
        """Return the whole output, for the rank's columns of the input; bf16."""


class Exact:
    """W8A8 by `Shards`: the largest magnitude of whole rows, and integer sums. On one rank, the plain ops.

    Parameters
    ----------
    dispatcher : Dispatcher
        Selects and runs.
    device : Device
        Where.
    group : Group
        The ranks.
    """

    def __init__(self, dispatcher: Dispatcher, device: Device, group: Group) -> None:
        self._dispatcher, self._device, self._group = dispatcher, device, group
        self._bound: dict[tuple[Descriptor, Shards], BoundShards] = {}

    def column(self, layer: Layer, normed: NormQuantized) -> Any:
        """Multiply codes with the rank's output channels; nothing is exchanged."""
        m = normed.output.shape[0]
        problem = ScaledLinearDescriptor(m=m, n=layer.n, k=layer.k, output_element="bf16")
        arrays = {"act_q": normed.output, "act_scale": normed.scale_out}
        return self._run(problem, Shards(axis="n", count=self._group.count, sizes=layer.sizes), layer, arrays)

    def row(self, layer: Layer, x: Any) -> Any:
        """Quantize with the scales of whole rows, and add up exact sums."""
        sizes = {"m": x.shape[0], "c_out": layer.n, "k": layer.k}
        problem = QuantizedLinearDescriptor(**sizes, q_min=-127, q_max=127, activation_element="bf16")
        return self._run(
            problem, Shards(axis="k", count=self._group.count, sizes=layer.sizes), layer, {"activation": x}
        )

    def _run(self, problem: Descriptor, shards: Shards, layer: Layer, arrays: dict[str, Any]) -> Any:
        arrays |= {"weight_q": layer.codes, "weight_scale": layer.scales}
        if shards.count == 1:
            return self._dispatcher.run(problem, **arrays)
        bound = self._bound.get((problem, shards))
        if bound is None:
            plan = self._dispatcher.select_shards(problem, shards, device=self._device)
            bound = self._bound[problem, shards] = plan.bind(self._group)
        return bound.run(**arrays)


class Sliced:
    """W8A8 as serving engines split it: each rank quantizes its columns by themselves, and rounds its part to bf16."""

    def __init__(self, dispatcher: Dispatcher, group: Group) -> None:
        self._dispatcher, self._group = dispatcher, group

    def column(self, layer: Layer, normed: NormQuantized) -> Any:
        """Multiply codes with the rank's output channels."""
        return ops.scaled_linear(
            act_q=normed.output,
            act_scale=normed.scale_out,
            weight_q=layer.codes,
            weight_scale=layer.scales,
            output_element="bf16",
            dispatcher=self._dispatcher,
        )

    def row(self, layer: Layer, x: Any) -> Any:
        """Add up the rounded parts."""
        part = ops.quantized_linear(
            activation=x,
            weight_q=layer.codes,
            weight_scale=layer.scales,
            q_min=-127,
            dispatcher=self._dispatcher,
        )
        return summed(layer.framework, self._group, part)


class Bf16:
    """The same weights in bf16, by the framework's product; each rank rounds its part to bf16."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def column(self, layer: Layer, normed: NormQuantized) -> Any:
        """Multiply with the rank's output channels."""
        return _product(layer, normed.normalized_out)

    def row(self, layer: Layer, x: Any) -> Any:
        """Add up the rounded parts."""
        return summed(layer.framework, self._group, _product(layer, x))


def _product(layer: Layer, x: Any) -> Any:
    framework = layer.framework
    if framework.place is None:  # NumPy multiplies bf16 one by one
        return framework.narrow(framework.wide(x) @ framework.wide(layer.real).T)
    return x @ layer.real.T


def summed(framework: Framework, group: Group, part: Any) -> Any:
    """Return the sum of the ranks' parts, bf16, added in the order of the ranks and rounded after each."""
    rows = (part.shape[0],) * group.count
    gathered = framework.bf16(group.gather(framework.octets(part), 0, rows))
    return reduce(add, (gathered[rank * rows[0] : (rank + 1) * rows[0]] for rank in range(group.count)))
