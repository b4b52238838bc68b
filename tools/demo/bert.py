"""The demo's encoder as a model of transformers, quantized by `skuda.torch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from skuda.dispatch import Dispatcher
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import MissingDependency
from skuda.tools.demo.encoder import F32, Encoder, Layers, Linear

try:
    import torch
    from torch import nn
    from transformers import BertConfig, BertModel
except ImportError as error:
    absent = str(error.name).partition(".")[0]
    raise MissingDependency(absent, f"pip install {absent}") from error

from skuda.torch.calibration import Calibration
from skuda.torch.linear import Int8Linear
from skuda.torch.ops import OPS
from skuda.torch.quantize import Dynamic, quantize_
from skuda.torch.smoothing import SmoothStatic

_SIZES = {
    "vocab_size": "embeddings.word_embeddings.weight",
    "type_vocab_size": "embeddings.token_type_embeddings.weight",
    "intermediate_size": "encoder.layer.0.intermediate.dense.weight",
}
"""Sizes that only the shapes of the weights tell."""


class _Called(nn.Module):  # type: ignore[misc]  # untyped where torch is absent
    """Stands for a linear layer, and calls a function with the rows of all real tokens, as NumPy arrays."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear: Linear = lambda _name, x: x
        self.mask = torch.ones(0, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the function returns, and zeros for what is no token."""
        found = torch.from_numpy(self.linear(self.name, x[self.mask].cpu().numpy()))
        y = x.new_zeros(*x.shape[:-1], found.shape[-1])
        y[self.mask] = found.to(x.device)
        return y


@dataclass(frozen=True, eq=False)
class BertEncoder(Encoder):
    """An encoder that runs a `BertModel`.

    A linear function that is a `BertModel` itself, as `BertLayers.linear` returns it, runs in the place of this one.
    Any other function is called in the place of every linear layer.

    Attributes, beside those of `Encoder`
    -------------------------------------
    bert : BertModel
        The model in f32.
    probe : BertModel
        The same with functions for linear layers.
    """

    framework: ClassVar[str] = "torch"
    bert: Any = field(kw_only=True)
    probe: Any = field(kw_only=True)

    @classmethod
    def of(cls, encoder: Encoder, device: Device) -> BertEncoder:
        """Return the encoder with the same weights, on the host or a GPU."""
        sizes = {name: len(encoder.tensors[tensor]) for name, tensor in _SIZES.items()}
        bert = BertModel(BertConfig(**encoder.config.model_dump(), **sizes), add_pooling_layer=False).eval()
        bert.load_state_dict({name: torch.from_numpy(np.array(encoder.tensors[name])) for name in bert.state_dict()})
        probe = deepcopy(bert)
        for name in encoder.linear_names:
            probe.set_submodule(name, _Called(name))
        place = torch.device("cpu") if device.processor == "cpu" else torch.device("cuda", device.ordinal or 0)
        return cls(encoder.config, encoder.tensors, bert=bert.to(place), probe=probe.to(place))

    def linear(self, name: str, x: F32) -> F32:
        """Apply a linear layer in f32 to x of shape (T, K); return an array of shape (T, N)."""
        return _on_rows(self.bert.get_submodule(name), x)

    def int8(self, dispatcher: Dispatcher, maxima: Mapping[str, F32] | None, alpha: float | None) -> Layers:  # noqa: ARG002  modules have the default one
        """Quantize all linear layers with `quantize_`; arguments as `Encoder.int8`."""
        config: Any = Dynamic()
        if maxima is not None:
            seen = {name: torch.from_numpy(maximum) for name, maximum in maxima.items()}
            config = SmoothStatic(Calibration(maxima=seen, complete=True), alpha=alpha)
        model = deepcopy(self.bert)
        quantize_(model, config, lambda _layer, name: name in self.linear_names, strict=True)
        return BertLayers(model, self.linear_names)

    def embed(self, sentences: Sequence[Sequence[int]], linear: Linear) -> F32:
        """Return one unit vector per sentence, as `Encoder.embed` does."""
        lengths = torch.tensor([len(tokens) for tokens in sentences])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for tokens in sentences for token in tokens])
        ids, mask = ids.to(self.bert.device), mask.to(self.bert.device)
        model = linear if isinstance(linear, BertModel) else self.probe
        if model is self.probe:
            for called in model.modules():
                if isinstance(called, _Called):
                    called.linear, called.mask = linear, mask
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        unit: F32 = nn.functional.normalize(pooled).cpu().numpy()
        return unit


class BertLayers(Layers):
    """The int8 layers of a `BertModel`."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__({name: BertLayer(model.get_submodule(name)) for name in names})
        self._model = model

    def linear(self, dispatcher: Dispatcher) -> Linear:  # noqa: ARG002  modules have the default one
        """Return the model, which the encoder runs in the place of its own."""
        found: Linear = self._model
        return found


@dataclass(frozen=True, eq=False)
class BertLayer:
    """A module of `skuda.torch`, as a `Layer`."""

    module: Int8Linear

    def run(self, dispatcher: Dispatcher, x: F32) -> F32:  # noqa: ARG002  modules have the default one
        """Apply the layer to rows of shape (T, K); return (T, N)."""
        return _on_rows(self.module, x)

    def descriptor(self, m: int) -> Descriptor:
        """Describe the product for `m` rows."""
        name, arguments = self.module.call(torch.empty(m, self.module.in_features, device="meta"))
        return OPS[name].problem(**arguments)


def _on_rows(module: Any, x: F32) -> F32:
    with torch.no_grad():
        found: F32 = module(torch.from_numpy(x).to(module.weight.device)).cpu().numpy()
    return found
