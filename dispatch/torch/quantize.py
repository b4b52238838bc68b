"""`quantize_`: replaces the linear layers of a model by int8 layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import nn

from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import one_line, shown
from skuda.torch.int8_linear import DynamicLinear, Int8Linear
from skuda.torch.nonfinite import Nonfinite, check_nonfinite, propagating
from skuda.torch.replaceable_layers import (
    ALREADY,
    Filter,
    Obstacles,
    adopt_adapters,
    check_model,
    describe_saving,
    linears,
    table,
)


class Config(Protocol):
    """A config of `quantize_`. Any object with this method is one.

    A config whose layers depend on each other also has ``together(model, linears)``. It is called once, with all layers
    to convert by name, and returns the object that converts them. That object may have ``fold(model, converted)``,
    which is called at the end and returns layers by the norm that took over their factors, and ``not_folded``, reasons
    by norm.
    """

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the replacement of a layer, or the layer itself to keep it.

        Raises
        ------
        SkudaError
            If the layer cannot be converted. The message says why.
        """


@dataclass(frozen=True)
class Dynamic:
    """Config of `quantize_` for `DynamicLinear`: a weight scale per output channel, an input scale per row.

    A layer with a method ``to_int8()``, as layers in training have, becomes the result of that method.

    Parameters
    ----------
    nonfinite : {"ignore", "propagate"}
        What a NaN or an infinity in an input does. By default a NaN counts as 0, so later layers do not see it. With
        ``"propagate"`` its row of the output becomes NaN, which takes one more pass over the input. `fuse_` leaves such
        layers, and `parallelize_` refuses them.

    Raises
    ------
    InvalidProblem
        For an invalid value.
    """

    nonfinite: Nonfinite = "ignore"

    def __post_init__(self) -> None:
        check_nonfinite("Dynamic", self.nonfinite)

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:  # noqa: ARG002  the protocol's
        """Return the int8 form of a layer; errors as `DynamicLinear.from_linear`."""
        trained: Callable[[], nn.Module] | None = getattr(linear, "to_int8", None)
        made = DynamicLinear.from_linear(linear) if trained is None else trained()
        return propagating(made) if self.nonfinite == "propagate" else made


@dataclass(frozen=True)
class Report:
    """The report of `quantize_`.

    Attributes
    ----------
    converted : mapping of str to str
        Class of the replacement, by the name of the layer.
    left : mapping of str to str
        Selected layers that were not replaced, and why.
    folded : mapping of str to tuple of str
        Norms that took over smoothing factors, and their layers.
    not_folded : mapping of str to str
        Other norms in front of layers, and why they did not take over factors.
    bytes_before, bytes_after : int
        Memory of the converted layers' weights, scales and biases.
    """

    converted: Mapping[str, str]
    left: Mapping[str, str]
    folded: Mapping[str, tuple[str, ...]]
    not_folded: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        ratio = f" ({self.bytes_after / self.bytes_before:.3f}x)" if self.bytes_before else ""
        lines = [f"{len(self.converted)} converted, {self.bytes_before} -> {self.bytes_after} bytes{ratio}"]
        lines += table("converted to", self.converted)
        lines += table("left:", self.left)
        lines += table("folded into", {name: norm for norm, names in self.folded.items() for name in names})
        return "\n".join(lines + table("not folded:", self.not_folded))


def quantize_(model: nn.Module, config: Config, filter_fn: Filter | None = None, *, strict: bool = False) -> Report:
    """Replace the linear layers of a model, in place.

    It replaces `nn.Linear`, and subclasses of it only if they have a method ``to_int8()``. The report says why it could
    not replace other layers. A layer whose weight is tied to another module, such as an embedding, is replaced only if
    `filter_fn` selects it, which ends the tie. A layer with several names is replaced under all of them. Code that
    reads the weight of a layer instead of calling the layer gets the dequantized weight. Adapters of peft stay.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Wrap it for data parallelism afterwards.
    config : Config
        `Dynamic`, `SmoothStatic`, `FakeQuant`, `Mixed`, or any object with a method ``convert(name, linear)``.
    filter_fn : callable, optional
        Selects layers. It takes the layer and its qualified name. By default all layers are selected.
    strict : bool
        Whether to raise, before any change, if a selected layer cannot be replaced.

    Returns
    -------
    Report

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type and, with `strict`, for a layer that cannot be replaced.
    """
    check_model("quantize_", model, filter_fn)
    if isinstance(model, nn.Linear):
        rule = "contain the layer, as nn.Sequential(linear) does; or use DynamicLinear.from_linear(linear)"
        raise InvalidProblem("quantize_", "model", f"a {type(model).__name__} itself", rule)
    if isinstance(config, type) or not callable(getattr(config, "convert", None)):
        raise InvalidProblem("quantize_", "config", shown(config), "be a config, such as Dynamic()")
    fit, left = _sorted(model, filter_fn)
    if strict:
        _check_none_left(left)
    joint = config.together(model, fit) if hasattr(config, "together") else config
    slots = _slots(model, fit)
    converted: dict[str, nn.Module] = {}
    before = after = 0
    for name, layer, new in _conversions(joint, fit, left):
        converted[name] = new.train(layer.training)
        before, after = before + _bytes(layer), after + _bytes(new)
        if not strict:
            _replace(slots[name], new)
    if strict:
        _check_none_left(left)
        for name, new in converted.items():
            _replace(slots[name], new)
    describe_saving(model)
    adopt_adapters(model)
    return Report(
        converted=MappingProxyType({name: type(new).__name__ for name, new in converted.items()}),
        left=MappingProxyType(left),
        folded=MappingProxyType(joint.fold(model, converted) if hasattr(joint, "fold") else {}),
        not_folded=MappingProxyType(getattr(joint, "not_folded", {})),
        bytes_before=before,
        bytes_after=after,
    )


def _sorted(model: nn.Module, filter_fn: Filter | None) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the selected layers that can be replaced, and why others cannot."""
    obstacles = Obstacles(model, break_ties=filter_fn is not None)
    fit, left = {}, {}
    for name, layer in linears(model, filter_fn):
        reason = obstacles.of(layer)
        if reason is None:
            fit[name] = layer
        else:
            left[name] = reason
    return fit, left


def _check_none_left(left: Mapping[str, str]) -> None:
    found = {name: reason for name, reason in left.items() if reason != ALREADY}
    for name, reason in found.items():
        rule = f"be convertible with strict=True, as {len(found)} selected layers are not; nothing was replaced"
        raise InvalidProblem("quantize_", name or "model", reason, rule)


def _slots(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return the parents and keys under which each layer is registered, by its name."""
    names = {id(layer): name for name, layer in layers.items()}
    slots: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in layers}
    for parent in model.modules():
        for key, child in parent._modules.items():  # noqa: SLF001  named_children() leaves out what is there twice
            if id(child) in names:
                slots[names[id(child)]].append((parent, key))
    return slots


def _replace(slots: list[tuple[nn.Module, str]], new: nn.Module) -> None:
    for parent, key in slots:
        setattr(parent, key, new)


def _conversions(
    config: Config, layers: dict[str, nn.Linear], left: dict[str, str]
) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
    """Yield the replacement of each layer. Layers are dropped, so that their memory is free after replacement."""
    for name in tuple(layers):
        layer = layers.pop(name)
        try:
            new = config.convert(name, layer)
            _check_converted(config, layer, new)
        except SkudaError as error:
            left[name] = one_line(str(error), 200)
            continue
        if new is layer:
            left[name] = "the config leaves it as it is"
        else:
            yield name, layer, new


def _check_converted(config: Config, layer: nn.Linear, new: object) -> None:
    if not isinstance(new, nn.Module):
        raise InvalidProblem(type(config).__name__, "convert", shown(new), "return a torch.nn.Module")
    if isinstance(new, Int8Linear):
        found = new.explain(torch.empty(1, new.in_features, dtype=layer.weight.dtype, device="meta"))
        if found.chosen is None:
            raise InvalidProblem(type(config).__name__, "layer", found.why_not(), "have a kernel")


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
