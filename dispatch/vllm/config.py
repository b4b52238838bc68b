"""``quantization="skuda"`` of vLLM: int8 layers whose bits do not depend on the degree of tensor parallelism.

It serves W8A8 checkpoints of compressed-tensors, skuda's own ones of 4-bit weights, and floating ones, whose linear
layers are quantized while they are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from pydantic import ValidationError
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from skuda.dispatch.system.interrupts import held_back
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import INT8, Quantizer, quantizer
from skuda.torch.hf.scheme import Scheme
from skuda.torch.linear.activation import per_row
from skuda.vllm.status import NAME

if TYPE_CHECKING:
    from vllm.model_executor.models.utils import WeightsMapper

CHECKPOINT = "compressed-tensors"
"""What vLLM calls the checkpoints that are served."""

_INT8 = {"num_bits": (8,), "type": ("int",)}
_WEIGHTS = _INT8 | {"symmetric": (True,), "dynamic": (False,), "strategy": ("channel", "tensor"), "actorder": (None,)}
_STATIC = _INT8 | {"dynamic": (False,), "strategy": ("tensor",)}
_DYNAMIC = _INT8 | {"symmetric": (True,), "dynamic": (True,), "strategy": ("token",)}


class SkudaVllmConfig(QuantizationConfig):
    """What is quantized, and how, of a model that skuda serves.

    Without a checkpoint's description every linear layer is quantized while it is loaded: symmetric, a scale for each
    token and for each output channel. Embeddings stay floating.

    Parameters
    ----------
    described : mapping, optional
        `quantization_config` of a checkpoint of compressed-tensors. With other `weights` than ``"int8"``, its weights
        have that format.
    ignore : tuple of str
        Names of layers that stay floating, or regular expressions after ``re:``, where nothing is described.
    head : bool
        Whether the head is quantized, too, while it is loaded, and returns logits in f32; see `skuda.vllm.head`.
    exact : bool
        Whether everything from the linear layers to the tokens must be exact; includes the head. See
        `skuda.vllm.exact`.
    weights, group_size, activations
        The format of the weights of linear layers, and the codes of their inputs, as in `skuda.torch.Dynamic`.
    formats : mapping of str to Quantizer, optional
        Those of the layers of a checkpoint that has several, by name.

    Raises
    ------
    InvalidProblem
        For a description of anything but int8 weights and int8 activations in one scheme, and for an invalid value.
    """

    def __init__(
        self,
        described: Mapping[str, Any] | None = None,
        ignore: tuple[str, ...] = (),
        *,
        head: bool = False,
        exact: bool = False,
        weights: str = "int8",
        group_size: int = 128,
        activations: str = "int8",
        formats: Mapping[str, Quantizer] = MappingProxyType({}),
    ) -> None:
        # It is not imported with the plug-in: vLLM imports it where it is ready to.
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsConfig,
        )

        super().__init__()
        self.quantize, self.formats = quantizer("quantization_config", weights, group_size), dict(formats)
        self.bits = per_row("quantization_config", activations, self.quantize.format).bits
        self._saved = bool(formats) or (described is not None and self.quantize.format != INT8)
        if described is None:
            described = _coded(("Linear",), ("lm_head", *ignore))
        _check(described)
        self.exact, self.head = exact, head or exact
        self.checkpoint = CompressedTensorsConfig.from_config(copy.deepcopy(dict(described)))

    def get_name(self) -> Any:
        """Return ``skuda``."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of inputs and outputs."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least compute capability. The dispatcher asks the card itself; see `SkudaLinearMethod`."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return nothing: without a description in the model's config, vLLM calls `SkudaVllmConfig()`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SkudaVllmConfig:
        """Read `quantization_config` of a model, or of `hf_overrides`.

        Parameters
        ----------
        config : dict
            That of compressed-tensors, or of a checkpoint of skuda with weights of 4 or 16 bits; or ``{"quant_method":
            "skuda", "ignore": [...], "weights": "int4", "group_size": 128, "activations": "int16"}`` for a floating
            checkpoint. All may have ``"head": True`` or ``"exact": True``.

        Raises
        ------
        InvalidProblem
            For a description of anything else.
        InvalidRecord
            For one of skuda's own checkpoints that this version does not know.
        """
        others = dict(config)
        switches = {name: others.pop(name, False) for name in ("head", "exact")}
        for name, had in switches.items():
            _one_of(name, had, (True, False))
        if config.get("quant_method") != NAME:
            return cls(others, **switches)
        if "config_groups" in config:
            described, formats, activations = _of_skuda(others)
            if len({*formats.values()}) > 1:
                return cls(described, **switches, formats=formats, activations=activations)
            one = next(iter(formats.values()))
            how: Any = {"weights": one.format.name, "group_size": one.group_size, "activations": activations}
            return cls(described, **switches, **how)
        options = {name: others.pop(name) for name in ("weights", "group_size", "activations") if name in others}
        for field in others.keys() - {"quant_method", "ignore"}:
            known = "ignore, weights, group_size, activations, head and exact"
            _refuse(field, config[field], f"be left out: with quant_method skuda there are only {known}")
        return cls(ignore=tuple(config.get("ignore") or ()), **switches, **options)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Return ``skuda`` for a checkpoint of compressed-tensors, if the user or the checkpoint asks for it.

        A checkpoint of an exact model asks for it. Naming another method, such as ``compressed-tensors``, wins.
        """
        del hf_config
        asked = user_quant == NAME or (user_quant is None and hf_quant_cfg.get("exact") is True)
        return NAME if asked and hf_quant_cfg.get("quant_method") == CHECKPOINT else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Turn names of layers into those of vLLM's model."""
        self.checkpoint.apply_vllm_mapper(hf_to_vllm_mapper)
        self.formats = hf_to_vllm_mapper.apply_dict(self.formats)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return what serves a layer. None means that it stays as it is.

        Raises
        ------
        InvalidProblem
            For experts and embeddings that the checkpoint quantizes or does not ignore, and with ``exact`` for layers
            that stay floating.
        """
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        from skuda.vllm.head import SkudaHeadMethod, SkudaTiedMethod, is_tied
        from skuda.vllm.linear_method import SkudaLinearMethod

        checkpoint = self.checkpoint
        checkpoint.packed_modules_mapping = self.packed_modules_mapping
        if isinstance(layer, LinearBase):
            scheme = checkpoint.get_scheme(layer, prefix)
            if scheme is None:
                self._check_exact(layer, prefix)
                return UnquantizedLinearMethod()
            layer.scheme = scheme
            return SkudaLinearMethod(checkpoint, self._quantizer(prefix), self.bits)
        if isinstance(layer, RoutedExperts):
            self._check_exact(layer, prefix)
            self._check_experts(layer, prefix)
        is_head = isinstance(layer, ParallelLMHead)
        if isinstance(layer, VocabParallelEmbedding) and self._quantizes(layer, prefix) and not (is_head and self.head):
            rule = "be ignored by the checkpoint: skuda serves embeddings and heads in floating point"
            raise InvalidProblem("quantization='skuda'", prefix, f"a quantized {type(layer).__name__}", rule)
        if isinstance(layer, VocabParallelEmbedding) and self.head:
            quantize = self.formats.get("lm_head", self.quantize)
            if is_tied():
                return SkudaTiedMethod(quantize, self.bits)
            return SkudaHeadMethod(quantize, self.bits) if is_head else None
        return None

    def _quantizer(self, prefix: str) -> Quantizer:
        """Return what quantizes a layer's weight, and so its format."""
        if not self.formats:
            return self.quantize
        inside, _, last = prefix.rpartition(".")
        names = [f"{inside}.{part}" for part in self.packed_modules_mapping.get(last, [last])]
        found = {self.formats.get(name) for name in names}
        one = found.pop()
        if found or one is None:
            rule = f"be one of the checkpoint's layers, or several with weights of one format: vLLM joins {names}"
            _refuse("config_groups", prefix, rule)
        return one

    def _quantizes(self, layer: nn.Module, prefix: str) -> bool:
        """Whether the checkpoint has codes for an embedding or a head."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if self._saved:  # it names all layers in floating point, some without the prefixes that vLLM has
            floating = {name.rpartition(".")[2] for name in self.checkpoint.ignore}
            return isinstance(layer, ParallelLMHead) and prefix.rpartition(".")[2] not in floating
        try:
            scheme = self.checkpoint.get_scheme_dict(layer, prefix)
        except ValueError:  # vLLM 0.26 found no target that names it
            return False
        return scheme is not None and scheme.get("weights") is not None

    def _check_exact(self, layer: nn.Module, prefix: str) -> None:
        """Refuse a layer that stays floating if everything must be exact."""
        if self.exact:
            rule = 'be quantized, or "exact" left out: only quantized layers are exact'
            raise InvalidProblem("quantization='skuda'", prefix, f"a {type(layer).__name__} in floating point", rule)

    def _check_experts(self, layer: nn.Module, prefix: str) -> None:
        """Refuse experts that are not ignored. Their sums over ranks are rounded, so the bits would depend on them."""
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

        names = (getattr(layer, f"ckpt_{name}_name", name) for name in ("gate_proj", "up_proj", "down_proj"))
        every = [prefix, *(f"{prefix}.0.{name}" for name in names)]
        ignored = [should_ignore_layer(name, ignore=self.checkpoint.ignore) for name in every]
        if not ignored[0] and not all(ignored[1:]):
            rule = f"be in `ignore`, for example as 're:.*{prefix.rpartition('.')[2]}.*': skuda serves no experts"
            raise InvalidProblem("quantization='skuda'", prefix, "experts to quantize", rule)


def register() -> None:
    """Let vLLM know ``quantization="skuda"``."""
    with held_back():  # vLLM notes the name in two places, the second only together with the first
        register_quantization_config(NAME)(SkudaVllmConfig)


def _coded(targets: tuple[str, ...], ignore: tuple[str, ...]) -> dict[str, Any]:
    """Describe layers with dynamic inputs. Packed weights are described as those of 8 bits that they stand for."""
    code = {"num_bits": 8, "type": "int", "symmetric": True}
    weights = {**code, "strategy": "channel", "dynamic": False}
    inputs = {**code, "strategy": "token", "dynamic": True}
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
    groups = {"linear": group}
    return {"quant_method": CHECKPOINT, "format": "int-quantized", "ignore": list(ignore), "config_groups": groups}


def _of_skuda(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Quantizer], str]:
    """Return the description of one of skuda's own checkpoints, the formats of weights by target, and activations."""
    scheme = Scheme.parse("quantization_config", config)
    formats = {
        target: quantizer("quantization_config", group.stored.name, group.stored.group_size or 128)
        for group in scheme.groups
        for target in group.targets
    }
    several = len(scheme.groups) > 1
    how = scheme.groups[0].activation
    dynamic = how.dynamic and all(
        group.activation is how and (group.stored.own or not (group.stored.converts or (how.bits == 8 and not several)))
        for group in scheme.groups
    )
    if "Conv1D" in formats or not dynamic or (several and any(target.startswith("re:") for target in formats)):
        rule = "have linear layers with weights and dynamic activations as skuda.torch saves them, all alike or by name"
        _refuse("config_groups", config["config_groups"], f"{rule}: vLLM has no others")
    return _coded(tuple(formats), scheme.ignore), formats, f"int{how.bits}"


def _check(config: Mapping[str, Any]) -> None:
    """Refuse a description of anything that skuda does not serve."""
    from compressed_tensors.quantization import QuantizationArgs

    for field in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(field):
            _refuse(field, config[field], "be left out: skuda serves none")
    _check_bits(config)
    _one_of("format", config.get("format"), ("int-quantized",))
    found = []
    for name, group in (config.get("config_groups") or {}).items():
        place = f"config_groups.{name}"
        if group.get("output_activations"):
            _refuse(f"{place}.output_activations", group["output_activations"], "be left out")
        _one_of(f"{place}.format", group.get("format"), (None, "int-quantized"))
        scheme = []
        for part in ("weights", "input_activations"):
            if not group.get(part):
                _refuse(f"{place}.{part}", group.get(part), "describe int8 codes")
            try:
                arguments = QuantizationArgs.model_validate(group[part])
            except ValidationError as error:
                _refuse(f"{place}.{part}", group[part], f"be valid ({error.errors()[0]['msg']})")
            rules = _WEIGHTS if part == "weights" else _DYNAMIC if arguments.dynamic else _STATIC
            for field, allowed in rules.items():
                _one_of(f"{place}.{part}.{field}", getattr(arguments, field), allowed)
            scheme.append([getattr(arguments, field) for field in ("symmetric", "dynamic", "strategy")])
        found.append(scheme)
    if not found or any(scheme != found[0] for scheme in found):
        _refuse("config_groups", config.get("config_groups"), "have groups of one scheme, and at least one group")


def _check_bits(config: Mapping[str, Any]) -> None:
    """Say what to do with a checkpoint of 4-bit weights. vLLM cuts its floating group scales, and skuda needs rows."""
    for name, group in (config.get("config_groups") or {}).items():
        if (group.get("weights") or {}).get("num_bits") == 4:
            rule = "be 8: skuda.torch.load_ reads 4-bit weights, and skuda.torch.save writes them as served here"
            _refuse(f"config_groups.{name}.weights.num_bits", 4, rule)


def _one_of(field: str, had: Any, allowed: tuple[Any, ...]) -> None:
    if had not in allowed:
        _refuse(field, getattr(had, "value", had), f"be {' or '.join(shown(value) for value in allowed)}")


def _refuse(field: str, had: Any, rule: str) -> NoReturn:
    raise InvalidProblem("quantization_config", field, shown(had), f"{rule}, for quantization='skuda'")
