"""`update_`: a served int8 model gets the weights of the same model in training, in the memory that it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.convert.quantize import Calibrated, Dynamic
from skuda.torch.formats import INT8, TO_INT8, Quantizer, WeightFormat
from skuda.torch.linear.int8_linear import Int8Linear
from skuda.torch.linear.joined import Part, int8_layers
from skuda.torch.models.folded import folding_of
from skuda.torch.models.replaceable_layers import as_linear, check_model, is_conv1d, is_linear
from skuda.torch.training.layers import FakeQuantLinear, MixedLinear


@torch.no_grad()
def update_(served: nn.Module, trained: nn.Module, config: Dynamic | None = None) -> None:
    """Quantize the weights of a model in training once, and copy them and all other tensors into a served model.

    The served model keeps its memory, so captured graphs and compiled code stay valid. It then gives the bits of the
    trained one, if both are exact and the served weights have 8 or 16 bits. Weights of 4 bits are those that
    `int4_weight` makes or, with a calibration in `config`, `calibrated_weight`. Both models must be folded by the same
    factors, or neither.

    Parameters
    ----------
    served : Module
        The model with layers of `Dynamic`, fused or not. It must be whole, not split over ranks.
    trained : Module
        The same model with layers of `Mixed`, or of `FakeQuant` without learned scales. Where the served weight has 4
        bits, the layer may also be in floating point.
    config : Dynamic, optional
        The config that made the served weights of 4 bits. By default they get groups of each layer's `group_size`, not
        symmetric. So weights with a scale a row, symmetric or calibrated ones need it to stay so. Its calibration must
        be one of the folded model, as `fold_` returns it.

    Raises
    ------
    InvalidProblem
        If the models have other tensors or are folded otherwise, or a weight is not finite, or `config` makes other
        weights. The served model has not changed then.
    """
    check_model("update_", served, None)
    check_model("update_", trained, None)
    given_config: object = config
    if config is not None and (not isinstance(given_config, Dynamic) or config.quantizer.format == INT8):
        raise InvalidProblem("update_", "config", shown(config), "be a Dynamic with weights='int4'")
    if config and config.calibration and not config.calibration.folded:
        rule = "be that of the folded model, which fold_ returns"
        raise InvalidProblem("update_", "calibration", "one of a model that is not folded", rule)
    if folding_of(served) != folding_of(trained):
        rule = "be folded as the served one: fold_ it with the same calibration, or load a folded checkpoint into both"
        raise InvalidProblem("update_", "trained", "a model that is folded otherwise, or not at all", rule)
    given, held = dict(_tensors(trained, dict(int8_layers(served)), config)), served.state_dict(keep_vars=True)
    for name in given.keys() ^ held.keys():
        had = f"{'no ' if name in held else ''}{name}"
        raise InvalidProblem("update_", "trained", had, "be the same model, with layers of Mixed() or FakeQuant()")
    for name, tensor in given.items():
        if tensor.shape != held[name].shape:
            had = f"shape {list(tensor.shape)}, served {list(held[name].shape)}"
            raise InvalidProblem("update_", name, had, "have the shape of the served one, which must be whole")
    served.load_state_dict(given)


def _quantizer(held: WeightFormat, config: Dynamic | None) -> Quantizer:
    """Return what quantizes the weight of a served layer."""
    if config is not None and type(config.quantizer.format) is type(held):
        return config.quantizer
    return Quantizer(held, held.group_size or 128)


def _check_bits(name: str, layer: MixedLinear | FakeQuantLinear, served: Int8Linear | Part) -> None:
    """Raise for a layer in training if 16 bits are not where the served one has them."""
    learned = (layer.form, layer.activation.bits) if isinstance(layer, MixedLinear) else (INT8, 8)
    held = served.format, served.activation.element.bits
    if learned[1] != held[1] or learned[0].element.is_split is not held[0].element.is_split:
        had, rule = (f"weights={form.name!r}, activations='int{bits}'" for form, bits in (learned, held))
        raise InvalidProblem("update_", name, f"a layer in training with {had}", f"have {rule}, as the served one")


def _tensors(
    model: nn.Module, served: Mapping[str, Int8Linear | Part], config: Dynamic | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the served model has, by name: codes and scales of layers in training."""
    weights = {}
    for name, layer in model.named_modules():
        quantize = _quantizer(served[name].format, config) if name in served else None
        if isinstance(layer, MixedLinear) or (isinstance(layer, FakeQuantLinear) and not layer.learn_scale):
            if name in served:
                _check_bits(name, layer, served[name])
            weights[f"{name}.weight"] = name, layer, quantize or TO_INT8
        elif quantize and quantize.format != INT8 and (is_linear(layer) or is_conv1d(layer)):
            weights[f"{name}.weight"] = name, as_linear(layer), quantize
    calibrated = Calibrated(config, model) if config and config.calibration else None
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in weights:
            yield name, tensor
            continue
        owner, layer, quantize = weights[name]
        if not bool(layer.weight.isfinite().all()):
            raise InvalidProblem("update_", name, "an infinity or NaN", "be finite; nothing was changed")
        if calibrated is not None and quantize.format.calibrated:
            quantize = quantize._replace(moments=calibrated.moments(owner, layer))
        codes, scale = quantize(layer.weight)
        yield name, codes
        yield f"{name}_scale", scale[:, None]
