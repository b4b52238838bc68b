"""`exact_`: a whole model of transformers whose results have one meaning on every device and in every batch.

With int8 linear layers and int8 attention, what is left are norms, gates, rope and the head. They become modules with
the values of ops; see `skuda.torch.exact.exact_modules`. Embeddings are copies, and residual sums one rounding, which
torch does alike everywhere. What is none of these is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.torch.attention.rope_attention import FusedRopeAttention, RopeForm, rope_forms
from skuda.torch.exact.exact_modules import (
    ExactAttention,
    ExactFakeQuantHead,
    ExactFakeQuantLinear,
    ExactGatedMLP,
    ExactHead,
    ExactMixedHead,
    ExactNorm,
    ExactNormForm,
)
from skuda.torch.fuse.fuse import LAYER, Fusion, become, fuse_, gated_form, norm_form
from skuda.torch.fuse.fused_modules import Fused, FusedAttention, MLPForm
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear
from skuda.torch.linear.joined import Part, int8_layers, is_joined
from skuda.torch.models.replaceable_layers import check_model, check_no_adapters
from skuda.torch.models.source import Forward, NotProven
from skuda.torch.training.layers import FakeQuantLinear, MixedLinear

try:
    from transformers.modeling_utils import PreTrainedModel
except ImportError as error:
    raise MissingDependency("transformers", "pip install 'skuda[transformers]'") from error

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families of transformers whose models can be exact."""
_HEADS = {DynamicLinear: ExactHead, MixedLinear: ExactMixedHead, FakeQuantLinear: ExactFakeQuantHead}
_KINDS: dict[type, tuple[type[Fused], str]] = {
    RopeForm: (ExactAttention, "one op does norms, rope and the cache"),
    MLPForm: (ExactGatedMLP, "an op computes the activation"),
    ExactNormForm: (ExactNorm, "its rows are those that int8 layers quantize"),
}
"""The exact module of each form, and what changes, in words."""


def exact_(model: nn.Module) -> Fusion:
    """Make all of a model exact, in place: each token's logits have the same bits wherever and however they are made.

    They are the same alone and in any batch, with padding to the left or right, in chunks and step by step, with a
    cache or without, eager or compiled, on a CPU and on a GPU, and in training. Logits are f32. A token that is not
    finite somewhere has logits of NaN, wherever they are made: all layers become those of ``nonfinite="propagate"``.

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
    check_no_adapters("exact_", "model", model)
    kind = str(getattr(getattr(model, "config", None), "model_type", ""))
    home = f"transformers.models.{kind}.modeling_{kind}"
    if not isinstance(model, PreTrainedModel) or kind not in FAMILIES or type(model).__module__ != home:
        rule = f"be a model of transformers itself, of the families {', '.join(FAMILIES)}"
        raise InvalidProblem("exact_", "model", f"a {type(model).__name__}", rule)
    before = model.config._attn_implementation  # noqa: SLF001  of transformers
    model.set_attn_implementation("skuda")
    forms, reasons = rope_forms(model)
    fused = (name for name, module in model.named_modules() if isinstance(module, FusedRopeAttention))
    plan, refused = _planned(model, {*forms, *reasons, *fused})
    refused = reasons | refused
    if refused:
        model.set_attn_implementation(before)
        name, why = next(iter(refused.items()))
        more = f" ({len(refused)} parts are not exact)" if len(refused) > 1 else ""
        raise InvalidProblem("exact_", name or "model", why, f"be a part of an exact model{more}")
    for layer in model.modules():
        if isinstance(layer, Int8Linear):
            layer.propagating()
    changed = dict(fuse_(model).fused)
    for name, form in (forms | plan).items():
        module = model.get_submodule(name)
        if not isinstance(module, Fused):
            made, changed[name] = _KINDS[type(form)]
            become(module, made, form)
    changed |= _linear_made_exact(model)
    for module in model.modules():
        if isinstance(module, Fused):
            module.fused_exact = True
            module.propagate()
    return Fusion(changed, {})


def is_exact(model: nn.Module) -> bool:
    """Whether `exact_` has made a model, or one inside of it, exact."""
    return any(isinstance(module, Fused) and module.fused_exact for module in model.modules())


def exact_inside_(model: nn.Module) -> None:
    """Make the models of transformers with int8 layers inside a module exact; errors as `exact_`."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            if any(True for _ in int8_layers(module)):
                exact_(module)
    if not inside:
        exact_(model)  # which says why not


def _planned(
    model: nn.Module, attentions: Collection[str]
) -> tuple[dict[str, MLPForm | ExactNormForm], dict[str, str]]:
    """Return the forms of MLPs and norms, and why the computation of other modules is not known.

    Attentions and what is in them are not looked at, except for linear layers.
    """
    plan: dict[str, MLPForm | ExactNormForm] = {}
    refused: dict[str, str] = {}
    for name, module in model.named_modules():
        try:
            if isinstance(module, (nn.Linear, Int8Linear)):
                _check_linear(module)
            elif not _inside(name, attentions):
                form = _form(model, name, module, attentions)
                plan |= {} if form is None else {name: form}
        except NotProven as reason:
            refused[name] = str(reason)
    return plan, refused


def _inside(name: str, attentions: Collection[str]) -> bool:
    return name in attentions or name.rpartition(".")[0] in attentions


def _check_linear(layer: nn.Module) -> None:
    """Raise `NotProven` for a layer whose product is not exact."""
    made = (ExactFakeQuantLinear, *_HEADS.values())
    if type(layer) not in (*_HEADS, *made) and not is_joined(layer):
        wanted = "Dynamic(), Mixed() or FakeQuant(), as quantize_(model, Dynamic(), lambda *_: True) makes them"
        raise NotProven(f"a {type(layer).__name__}, no layer of {wanted}")
    if isinstance(layer, FakeQuantLinear) and (layer.activation != "token" or layer.learn_scale):
        raise NotProven(f"a FakeQuantLinear with activation={layer.activation!r}, learn_scale={layer.learn_scale}")


def _form(
    model: nn.Module, name: str, module: nn.Module, attentions: Collection[str]
) -> MLPForm | ExactNormForm | None:
    """Return the form of an MLP or a norm, or None for a module that needs none.

    Raises
    ------
    NotProven
        If the computation of the module is not known.
    """
    parent, _, own = name.rpartition(".")
    if isinstance(module, FusedAttention) and not isinstance(module, FusedRopeAttention):
        raise NotProven("it was fused with another attention: call exact_ before fuse_")
    if isinstance(module, (PreTrainedModel, nn.ModuleList, Part, Fused)) or own == "rotary_emb":
        return None  # an attention's form proves the rope
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        raise NotProven("an embedding with max_norm")
    if isinstance(module, nn.Dropout) and module.p:
        raise NotProven(f"dropout of {module.p}")
    if any(f"{name}.{child}" in attentions for child, _ in module.named_children()):
        if LAYER.fullmatch(Forward(module).expression()) is None:
            raise NotProven("its forward is not a known form of a decoder layer")
        return None
    if any(True for _ in module.children()):
        return gated_form(module)
    if isinstance(module, nn.Embedding) or not any(True for _ in module.parameters()):
        return None
    form = norm_form(model.get_submodule(parent), own)
    return ExactNormForm(form.op, float(getattr(module, form.eps)), form.vectors)


def _linear_made_exact(model: PreTrainedModel) -> dict[str, str]:
    """Make the head, and layers of `FakeQuant`, exact; return what changed, in words, by name."""
    changed, head = {}, model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head and type(module) in _HEADS:
            made = _HEADS[type(module)]
            if issubclass(made, ExactHead):
                made.of(module)
            else:
                module.__class__ = made
            changed[name] = "its logits are f32"
        elif type(module) is FakeQuantLinear:
            module.__class__ = ExactFakeQuantLinear
            changed[name] = "its values are those of the int8 product"
    return changed
