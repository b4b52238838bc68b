"""`quantize_`: replaces the linear layers of a model by int8 layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem, SkudaError
from skuda.registry.text import one_line, shown
from skuda.registry.value import expect
from skuda.torch.convert.budget import Budget, Choice, Spent
from skuda.torch.convert.calibration import Calibration, check_calibration
from skuda.torch.convert.fold import fold_
from skuda.torch.formats import INT8, Quantizer, quantizer
from skuda.torch.formats.feedback import Moments
from skuda.torch.formats.int4 import per_row_text
from skuda.torch.linear.activation import Nonfinite, PerRow, check_nonfinite, per_row
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear, kind_of, propagating
from skuda.torch.linear.joined import Part, int8_layers
from skuda.torch.models.replaceable_layers import (
    ALREADY,
    NOT_SELECTED,
    Filter,
    ReplacementChecks,
    as_linear,
    bytes_of,
    carry,
    changed,
    check_model,
    is_conv1d,
    linears,
    other_matrices,
    selects,
    table,
)

_NOT_CODES = "the checkpoint has no codes of it"


class Config(Protocol):
    """A config of `quantize_`. Any object with this method is one.

    A config whose layers depend on each other also has ``together(model, linears)``. It is called once, with all layers
    to convert by name, and returns the object that converts them. That object may have ``fold(model, converted)``,
    which is called at the end and returns layers by the module that took over their factors, ``not_folded``, reasons by
    module, and ``static_errors``, as in `Report`.
    """

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the replacement of a layer, or the layer itself to keep it.

        Raises
        ------
        SkudaError
            If the layer cannot be converted. The message says why.
        """


_TWICE = 2.0
"""From which on the report warns of the error of a fixed scale."""


@dataclass(frozen=True)
class Dynamic:
    """Config of `quantize_` for `DynamicLinear`: a weight scale per output channel, an input scale per row.

    A layer with a method ``to_int8()``, as layers in training have, becomes the result of that method.

    Parameters
    ----------
    nonfinite : {"ignore", "propagate"}
        What a NaN or an infinity in an input does. By default a NaN counts as 0, so later layers do not see it. With
        ``"propagate"`` its row of the output becomes NaN, at no cost, also in fused models and on several ranks.
    weights : str
        The format, ``"int8"``, ``"int4"`` or ``"int16"``, or another one of `skuda.torch.formats`. With ``"int4"``, a
        weight takes half the memory; see `skuda.torch.int4.int4_weight`. Layers in training stay but for their own.
    group_size : int
        Elements of a row that share 16 levels, for ``"int4"``: 32, 64 or 128; or 0, for whole rows.
    symmetric : bool
        For ``"int4"``, whether levels are -8 to 7 times a scale, with a larger error. `save` then writes the format of
        other projects, if `group_size` divides all K.
    calibration : Calibration, optional
        A calibration of the model. The model is then folded first (see `fold_`), unless it is one of a folded model:
        for 8 bits with alpha 0.6, for 4 bits with 0.5 and without gates. Weights of 4 bits are those of
        `skuda.torch.int4.calibrated_weight`: a third of the divergence, with at least K rows of each layer's inputs.
    activations : {"int8", "int16"}
        The codes of inputs. Those of 16 bits go with weights of any, and those of 8 bits not with weights of 16.

    Raises
    ------
    InvalidProblem
        For an invalid value.
    """

    nonfinite: Nonfinite = "ignore"
    weights: str = "int8"
    group_size: int = 128
    symmetric: bool = False
    calibration: Calibration | None = None
    activations: str = "int8"

    def __post_init__(self) -> None:
        check_nonfinite("Dynamic", self.nonfinite)
        if self.calibration is not None:
            check_calibration("Dynamic", self.calibration)
            if self.symmetric:
                rule = "be False with a calibration, whose levels have offsets"
                raise InvalidProblem("Dynamic", "symmetric", "True", rule)
        _ = self.activation

    @property
    def quantizer(self) -> Quantizer:
        """What quantizes weights."""
        return quantizer("Dynamic", self.weights, self.group_size, symmetric=self.symmetric)

    @property
    def activation(self) -> PerRow:
        """How inputs become codes."""
        return per_row("Dynamic", self.activations, self.quantizer.format)

    def together(self, model: nn.Module, linears: Mapping[str, nn.Linear]) -> Dynamic | Calibrated:  # noqa: ARG002  the protocol's
        """Return what converts the layers of a call of `quantize_`."""
        return self if self.calibration is None else Calibrated(self, model)

    def convert(self, name: str, linear: nn.Linear, moments: Moments | None = None) -> nn.Module:  # noqa: ARG002  the protocol's
        """Return the int8 form of a layer; errors as `WeightFormat.quantize`."""
        trained: Callable[[], nn.Module] | None = getattr(linear, "to_int8", None)
        if trained is None:
            quantize = self.quantizer._replace(moments=moments)
            made: nn.Module = DynamicLinear.from_linear(linear, quantize, self.activation)
        else:
            made = trained()
            own = (made.format, made.activation.element.bits) if isinstance(made, Int8Linear) else (INT8, 8)
            if own != (self.quantizer.format, self.activation.bits):
                field = f"weights={self.weights!r}, activations={self.activations!r}"
                learned = f"weights={own[0].name!r}, activations='int{own[1]}'"
                rule = f"be no layer in training, which learned for others: use {learned}"
                raise InvalidProblem("Dynamic", field, f"a {type(linear).__name__}", rule)
        return propagating(made) if self.nonfinite == "propagate" else made


class Calibrated:
    """`Dynamic` with a calibration, for one model."""

    def __init__(self, config: Dynamic, model: nn.Module) -> None:
        assert config.calibration is not None
        self._config, self._calibration = config, config.calibration
        self._wants = config.quantizer.format.calibrated
        self._folded: Mapping[str, tuple[str, ...]] = {}
        self.not_folded: Mapping[str, str] = {}
        if not self._calibration.folded:
            how: Any = {"alpha": 0.5, "gates": False} if self._wants else {}
            done = fold_(model, self._calibration, **how, exact=False)
            self._calibration, self._folded, self.not_folded = done.calibration, done.folded, done.not_folded
        self._moments: tuple[Tensor, Moments] | None = None  # of the last rows: layers with one input share theirs

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the int8 form of a layer."""
        return self._config.convert(name, linear, self.moments(name, linear) if self._wants else None)

    def moments(self, name: str, linear: nn.Linear) -> Moments:
        """Return the moments of a layer's inputs."""
        rows, left = self._calibration.rows.get(name), self._calibration.left.get(name)
        if left is not None or rows is None:
            rule = "be of a run of the layer that kept rows"
            raise InvalidProblem("Dynamic", "calibration", left or f"no rows of {name}", rule)
        if self._moments is None or self._moments[0] is not rows:
            self._moments = rows, Moments(rows.to(linear.weight.device))
        return self._moments[1]

    def fold(self, model: nn.Module, converted: Mapping[str, nn.Module]) -> Mapping[str, tuple[str, ...]]:  # noqa: ARG002  the protocol's
        """Return the layers by the module that took over their factors."""
        return self._folded


@dataclass(frozen=True)
class Report:
    """The report of `quantize_`.

    Attributes
    ----------
    converted : mapping of str to str
        Class of the replacement, by the name of the layer.
    left : mapping of str to str
        What stays as it is, and why: other linear layers, by name, and all other parameters of floats with two or more
        axes, by the names of the parameters.
    folded : mapping of str to tuple of str
        Modules that took over smoothing factors, and their layers.
    not_folded : mapping of str to str
        Other modules in front of layers, and why they did not take over factors.
    bytes_before, bytes_after : int
        Memory of the parameters and buffers of the whole model.
    layer_bytes_before, layer_bytes_after : int
        Memory of those of the converted layers.
    per_row : tuple of str
        Converted layers of 4-bit weights with one scale a row, which are far less accurate than groups.
    static_errors : mapping of str to float
        By layer with a fixed scale, the squared error of its outputs for the calibration's rows, over that with a scale
        per row.
    choices : tuple of Choice
        What a budget gave layers with one input, and what that costs.
    """

    converted: Mapping[str, str]
    left: Mapping[str, str]
    folded: Mapping[str, tuple[str, ...]]
    not_folded: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    layer_bytes_before: int
    layer_bytes_after: int
    per_row: tuple[str, ...] = ()
    static_errors: Mapping[str, float] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()

    def __str__(self) -> str:
        layers = _change(self.layer_bytes_before, self.layer_bytes_after)
        lines = [
            f"{len(self.converted)} converted, model {_change(self.bytes_before, self.bytes_after)}, layers {layers}"
        ]
        lines += table("converted to", self.converted)
        lines += table("left:", self.left)
        lines += table("folded into", {name: norm for norm, names in self.folded.items() for name in names})
        lines += table("not folded:", self.not_folded)
        kinds = "DynamicLinear", "SmoothedLinear", "StaticLinear"
        if any(each.split(",")[0] in kinds and not each.endswith("'propagate'") for each in self.converted.values()):
            lines.append('  a NaN in an input counts as 0: with nonfinite="propagate", its row of the output is NaN')
        above = [(error, name) for name, error in self.static_errors.items() if error > _TWICE]
        if above:
            most = f"{max(above)[0]:.3g} times that of a scale per row in {max(above)[1]}"
            lines.append(f"  fixed scales make large errors in {len(above)} layers, {most}: see dynamic_above")
        if self.per_row:
            lines.append(f"  {per_row_text(self.per_row)}")
        lines += [f"  {each}" for each in self.choices if each.saved]
        return "\n".join(lines)


def _change(before: int, after: int) -> str:
    return f"{before} -> {after} bytes" + (f" ({after / before:.3f}x)" if before else "")


def quantize_(
    model: nn.Module,
    config: Config,
    filter_fn: Filter | None = None,
    *,
    strict: bool = False,
    budget: Budget | None = None,
) -> Report:
    """Replace the linear layers of a model, in place.

    It replaces `nn.Linear`, the `Conv1D` of transformers, and subclasses of `nn.Linear` only if they have a method
    ``to_int8()``. The report says why it could not replace other layers, and lists every other matrix that stays in
    floating point. The weight of a `Conv1D` has the shape (K, N), and that of its replacement (N, K). A layer whose
    weight shares memory with another module, such as an embedding, is replaced only if `filter_fn` selects it, which
    ends the tie. A layer with several names is replaced under all of them. The replacement gets the attributes that
    users have set on the layer. Code that reads the weight of a layer instead of calling the layer gets the dequantized
    weight. Adapters of peft stay.

    Parameters
    ----------
    model : torch.nn.Module
        The model. Wrap it for data parallelism afterwards.
    config : Config
        `Dynamic`, `SmoothDynamic`, `SmoothStatic`, `FakeQuant`, `Mixed`, or any object with a method
        ``convert(name, linear)``.
    filter_fn : callable, optional
        Selects layers. It takes the layer and its qualified name, and returns True or False. By default all layers are
        selected.
    strict : bool
        Whether to raise, before any change, if a selected layer cannot be replaced, or if another parameter stays in
        floating point by which inputs may be multiplied. Tables of embeddings and weights of norms do not count. With
        `strict`, the filter is asked about the modules of such parameters, too, and excludes them by returning False. A
        layer that its calibration does not serve is found after the model was folded, which then stays so.
    budget : Budget, optional
        With it, layers whose codes cost the most get 8 bits or stay in floating point, for `Dynamic`. The report says
        which, what they cost and what that saves. It needs the memory of the model in both forms for a while.

    Returns
    -------
    Report

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type and, with `strict`, for a layer that cannot be replaced; for a budget that the
        config exceeds, and as `compare`.
    """
    _check_arguments(model, config, filter_fn, strict=strict, budget=budget)
    total = bytes_of(model)
    fit, left = _sorted(model, filter_fn)
    others = tuple(other_matrices(model))
    missed = {
        each.name: each.reason
        for each in others
        if strict and each.multiplies and selects("quantize_", filter_fn, each.module, each.owner)
    }
    if strict:
        _check_none_left(left | missed)
    joint: Any = config
    if hasattr(config, "together"):
        joint = config.together(model, {name: as_linear(layer) for name, layer in fit.items()})
    spent = None
    if budget is not None:
        asked = cast("Dynamic", config)
        eight = Dynamic(nonfinite=asked.nonfinite, activations=asked.activations)
        spent = Spent(budget, model, fit, joint.convert, eight.convert)
    slots = _slots(model, fit)
    converted: dict[str, nn.Module] = {}
    before = 0
    for name, layer, new in _conversions(spent or joint, fit, left):
        converted[name] = new.train(layer.training)
        before += bytes_of(layer)
        if not strict:
            _replace(slots[name], new)
    if strict:
        _check_none_left(left)
        for name, new in converted.items():
            _replace(slots[name], new)
    changed(model, int8=True)
    folded = joint.fold(model, converted) if hasattr(joint, "fold") else {}
    return Report(
        converted={name: kind_of(new) for name, new in converted.items()},
        left=left | {each.name: each.reason for each in others},
        folded=folded,
        not_folded=dict(getattr(joint, "not_folded", {})),
        bytes_before=total,
        bytes_after=bytes_of(model),
        layer_bytes_before=before,
        layer_bytes_after=sum(map(bytes_of, converted.values())),
        per_row=_per_row(converted, getattr(config, "group_size", None)),
        static_errors=dict(getattr(joint, "static_errors", {})),
        choices=spent.choices if spent else (),
    )


def _check_arguments(
    model: nn.Module, config: Config, filter_fn: Filter | None, *, strict: bool, budget: Budget | None
) -> None:
    check_model("quantize_", model, filter_fn)
    if not isinstance(strict, bool):
        raise InvalidProblem("quantize_", "strict", shown(strict), "be True or False")
    if isinstance(model, nn.Linear) or is_conv1d(model):
        rule = "contain the layer, as nn.Sequential(linear) does; or use DynamicLinear.from_linear(linear)"
        raise InvalidProblem("quantize_", "model", f"a {type(model).__name__} itself", rule)
    if isinstance(config, type) or not callable(getattr(config, "convert", None)):
        raise InvalidProblem("quantize_", "config", shown(config), "be a config, such as Dynamic()")
    expect("quantize_", "budget", budget, Budget | None, "be a Budget, or None")
    if budget is not None:
        expect("quantize_", "config", config, Dynamic, "be a Dynamic with a budget")
        if strict:
            rule = "be False with a budget, which leaves layers as they are"
            raise InvalidProblem("quantize_", "strict", "True", rule)


def report_of_loaded(model: nn.Module) -> Report:
    """Return the report of a model whose int8 layers were loaded. What was before are the same layers of floats."""
    layers = dict(int8_layers(model))
    after = sum(map(bytes_of, layers.values()))
    floats = (each for layer in layers.values() for each in (layer.weight, layer.bias) if each is not None)
    before, total = sum(each.numel() * each.dtype.itemsize for each in floats), bytes_of(model)
    left = {name: _NOT_CODES for name, layer in linears(model) if not isinstance(layer, Int8Linear)}
    return Report(
        converted={name: kind_of(layer) for name, layer in layers.items()},
        left=left | {each.name: each.reason for each in other_matrices(model)},
        folded={},
        not_folded={},
        bytes_before=total - after + before,
        bytes_after=total,
        layer_bytes_before=before,
        layer_bytes_after=after,
        per_row=_per_row(layers, None),
    )


def _per_row(layers: Mapping[str, nn.Module], group_size: int | None) -> tuple[str, ...]:
    int8 = {name: layer for name, layer in layers.items() if isinstance(layer, Int8Linear | Part)}
    return tuple(
        name
        for name, layer in int8.items()
        if (group_size == 0 and layer.group_size) or layer.format.per_row(layer.weight_q)
    )


def _sorted(model: nn.Module, filter_fn: Filter | None) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the selected layers that can be replaced, and why other layers of floats stay."""
    obstacles = ReplacementChecks(model, break_ties=filter_fn is not None)
    fit, left = {}, {}
    for name, layer in linears(model):
        selected = selects("quantize_", filter_fn, layer, name)
        reason = obstacles.of(layer) if selected else NOT_SELECTED
        if reason is None:
            fit[name] = layer
        elif selected or not isinstance(layer, Int8Linear):
            left[name] = reason
    return fit, left


def _check_none_left(left: Mapping[str, str]) -> None:
    found = {name: reason for name, reason in left.items() if reason not in (ALREADY, NOT_SELECTED)}
    for name, reason in found.items():
        rule = f"be convertible with strict=True, as {len(found)} matrices are not; nothing was replaced"
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
    config: Config, layers: dict[str, nn.Module], left: dict[str, str]
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the replacement of each layer. Layers are dropped, so that their memory is free after replacement."""
    for name in tuple(layers):
        layer = layers.pop(name)
        linear = as_linear(layer)
        try:
            new = config.convert(name, linear)
            _check_converted(config, linear, new)
            if new is not linear:
                carry(linear, new)
        except SkudaError as error:
            left[name] = one_line(str(error), 200)
            continue
        if new is linear:
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
