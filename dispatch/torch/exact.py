"""`exact_`: a whole model of transformers whose results have one meaning on every device and in every batch.

With int8 linear layers and int8 attention, what is left are norms, gates, rope and the head. They become modules with
the values of ops; see `skuda.torch.exact_modules`. Embeddings are copies, and residual sums one rounding, which torch
does alike everywhere. What is none of these is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.torch.exact_modules import (
    ExactAttention,
    ExactFakeQuantHead,
    ExactFakeQuantLinear,
    ExactGatedMLP,
    ExactHead,
    ExactMixedHead,
    ExactNorm,
    ExactNormForm,
)
from skuda.torch.fuse import LAYER, Fusion, become, fuse_, gated_form, norm_form
from skuda.torch.fused_modules import Fused, FusedAttention
from skuda.torch.int8_linear import DynamicLinear, Int8Linear
from skuda.torch.joined import Part, is_joined
from skuda.torch.replaceable_layers import check_model
from skuda.torch.rope_attention import FusedRopeAttention, RopeForm, rope_forms
from skuda.torch.source import Forward, NotProven
from skuda.torch.training import FakeQuantLinear, MixedLinear

try:
    from transformers.modeling_utils import PreTrainedModel
except ImportError as error:
    raise MissingDependency("transformers", "pip install 'skuda[transformers]'") from error

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families of transformers whose models can be exact."""
_HEADS = {DynamicLinear: ExactHead, MixedLinear: ExactMixedHead, FakeQuantLinear: ExactFakeQuantHead}


def exact_(model: nn.Module) -> Fusion:
    """Make all of a model exact, in place: each token's logits have the same bits wherever and however they are made.

    They are the same alone and in any batch, with padding to the left or right, in chunks and step by step, with a
    cache or without, eager or compiled, on a CPU and on a GPU, and in training. Logits are f32.

    The model gets `attn_implementation="skuda"`. Dynamic int8 layers are fused, see `skuda.torch.fuse_`. With layers of
    `Mixed`, the model can be trained; a call without a cache then has gradients.

    Parameters
    ----------
    model : PreTrainedModel
        A Llama, Mistral, Qwen2 or Qwen3 model of transformers, with a head or without. All of its linear layers must be
        int8: ``quantize_(model, Dynamic(), lambda *_: True)``, or ``Mixed()`` for training.

    Returns
    -------
    Fusion
        The modules that changed; none is left.

    Raises
    ------
    InvalidProblem
        For a part that cannot be exact. Nothing has changed then.
    """
    check_model("exact_", model, None)
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    home = f"transformers.models.{kind}.modeling_{kind}"
    if not isinstance(model, PreTrainedModel) or kind not in FAMILIES or type(model).__module__ != home:
        rule = f"be a model of transformers itself, of the families {', '.join(FAMILIES)}"
        raise InvalidProblem("exact_", "model", f"a {type(model).__name__}", rule)
    before = model.config._attn_implementation  # noqa: SLF001  of transformers
    model.set_attn_implementation("skuda")
    forms, reasons = rope_forms(model)
    fused = (name for name, module in model.named_modules() if isinstance(module, FusedRopeAttention))
    attentions = {*forms, *reasons, *fused}
    refused = reasons | _refused(model, attentions)
    if refused:
        model.set_attn_implementation(before)
        name, why = next(iter(refused.items()))
        more = f" ({len(refused)} parts are not exact)" if len(refused) > 1 else ""
        raise InvalidProblem("exact_", name or "model", why, f"be a part of an exact model{more}")
    changed = dict(fuse_(model).fused)
    for name, module in list(model.named_modules()):
        text = _made_exact(model, name, module, forms, attentions)
        if text:
            changed[name] = text
    return Fusion(changed, {})


def _refused(model: nn.Module, attentions: Collection[str]) -> dict[str, str]:
    """Return the modules whose computation is not known, and why. Attentions and what is in them are not looked at."""
    refused: dict[str, str] = {}
    for name, module in model.named_modules():
        try:
            why = "" if _inside(name, attentions) else _unknown(model, name, module, attentions)
        except NotProven as reason:
            why = str(reason)
        if isinstance(module, (nn.Linear, Int8Linear)):
            why = _unknown_linear(module)
        if why:
            refused[name] = why
    return refused


def _inside(name: str, attentions: Collection[str]) -> bool:
    return name in attentions or name.rpartition(".")[0] in attentions


def _unknown_linear(layer: nn.Module) -> str:
    made = (ExactFakeQuantLinear, *_HEADS.values())
    if type(layer) not in (*_HEADS, *made) and not is_joined(layer):
        wanted = "Dynamic(), Mixed() or FakeQuant(), as quantize_(model, Dynamic(), lambda *_: True) makes them"
        return f"a {type(layer).__name__}, no layer of {wanted}"
    if isinstance(layer, FakeQuantLinear) and (layer.activation != "token" or layer.learn_scale):
        return f"a FakeQuantLinear with activation={layer.activation!r}, learn_scale={layer.learn_scale}"
    return ""


def _unknown(model: nn.Module, name: str, module: nn.Module, attentions: Collection[str]) -> str:
    """Return why the computation of a module is not known, or nothing; or raise `NotProven`."""
    parent, _, own = name.rpartition(".")
    if isinstance(module, FusedAttention) and not isinstance(module, FusedRopeAttention):
        return "it was fused with another attention: call exact_ before fuse_"
    known = (PreTrainedModel, nn.ModuleList, nn.Linear, Int8Linear, Part, Fused)
    if isinstance(module, known) or own == "rotary_emb":  # an attention's form proves the rope
        return ""
    if isinstance(module, nn.Embedding):
        return "" if module.max_norm is None else "an embedding with max_norm"
    if isinstance(module, nn.Dropout):
        return f"dropout of {module.p}" if module.p else ""
    if any(f"{name}.{child}" in attentions for child, _ in module.named_children()):
        known_layer = LAYER.fullmatch(Forward(module).expression()) is not None
        return "" if known_layer else "its forward is not a known form of a decoder layer"
    if any(True for _ in module.children()):
        gated_form(module)
    elif any(True for _ in module.parameters()):
        norm_form(model.get_submodule(parent), own)
    return ""


def _made_exact(
    model: nn.Module, name: str, module: nn.Module, forms: Mapping[str, RopeForm], attentions: Collection[str]
) -> str:
    """Make a module exact that `fuse_` did not make so, and return what changed, in words."""
    parent, _, own = name.rpartition(".")
    text = ""
    if name in forms and not isinstance(module, FusedAttention):
        become(module, ExactAttention, forms[name])
        text = "one op does norms, rope and the cache"
    elif type(module) in _HEADS:
        is_head = module is model.get_output_embeddings()
        if is_head or type(module) is FakeQuantLinear:
            module.__class__ = _HEADS[type(module)] if is_head else ExactFakeQuantLinear
            text = "its logits are f32" if is_head else "its values are those of the int8 product"
        return text
    elif isinstance(module, (Fused, PreTrainedModel, nn.ModuleList, nn.Embedding, nn.Linear, Int8Linear, Part)):
        pass
    elif any(isinstance(child, tuple(_HEADS)) for child in module.children()):
        become(module, ExactGatedMLP, gated_form(module))
        text = "an op computes the activation"
    elif (
        parent not in attentions and any(True for _ in module.parameters()) and not any(True for _ in module.children())
    ):
        form = norm_form(model.get_submodule(parent), own)
        become(module, ExactNorm, ExactNormForm(form.op, float(getattr(module, form.eps)), form.vectors))
        text = "its rows are those that int8 layers quantize"
    if isinstance(module, Fused):
        module.fused_exact = True
    return text
