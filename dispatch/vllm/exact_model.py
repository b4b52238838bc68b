"""The model between embedding and head of ``"exact": True``: it computes what `skuda.torch.exact.exact_` defines.

vLLM's decoder layers round elsewhere: in rope, in the norms of heads, in SiLU and its product, and in norms. So when a
model is loaded, and before anything is traced, its layers change their class, in this model alone. Names of modules and
parameters stay, so weights are loaded as before. Norms write codes, the cache's write turns queries and keys, and the
gated activation writes codes, or on several ranks its rows, whose largest magnitudes the ranks exchange.

A layer is changed only if vLLM's own ``forward`` is known to do the same with its parts: both are run with stand-ins
for the parts, which return random numbers, and every part must get the same numbers from both.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.utils import PPMissingLayer

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.serving.blocks import Turn, turn
from skuda.torch.attention.rope_attention import FIXED, RopeTable
from skuda.torch.exact.exact import FAMILIES
from skuda.torch.formats.int8 import CODES
from skuda.torch.fuse.fused_modules import PROPAGATE
from skuda.vllm.attention import ExactAttention
from skuda.vllm.linear_kernel import SkudaInt8ScaledMMLinearKernel

_PROBED, _TOKENS, _CLOSE = 64, 3, 2e-2
"""Positions at which vLLM's rope is compared with the table, rows of the stand-ins, and what bf16 cosines differ by."""
_TABLE = "skuda_table"


class ExactDecoderLayer(nn.Module):
    """A decoder layer of vLLM whose parts are joined by codes. It has the parts of the class that it replaces."""

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the MLP and the residual, as vLLM's layer does.

        Parameters
        ----------
        positions
            Not needed: the cache's write knows them.
        hidden_states, residual : tensors of shape (tokens, hidden)
            What is normalized is their sum. The first layer has no residual.
        """
        del positions
        attention, mlp = self.self_attn, self.mlp
        codes, scale, residual = _coded(self.input_layernorm, attention.qkv_proj, hidden_states, residual)
        qkv = _kernel(attention.qkv_proj).product(attention.qkv_proj, codes, scale, hidden_states.dtype)
        q, k, v = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        hidden_states, _ = attention.o_proj(attention.attn(q, k, v))
        codes, scale, residual = _coded(self.post_attention_layernorm, mlp.gate_up_proj, hidden_states, residual)
        gate_up = _kernel(mlp.gate_up_proj).product(mlp.gate_up_proj, codes, scale, hidden_states.dtype)
        return _kernel(mlp.down_proj).gated(mlp.down_proj, gate_up), residual


class ExactLastNorm(RMSNorm):  # type: ignore[misc]
    """The norm in front of the head. Its rows are those that int8 layers quantize."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return the normalized rows, and with a residual the sum, too."""
        fields = {"eps": self.variance_epsilon, "has_normalized": True, **CODES}
        *_, rows = found = torch.ops.skuda.rms_norm_quantize.default(x, residual, self.weight, **fields)
        return rows if residual is None else (rows, found[2])


def _kernel(layer: Any) -> Any:
    return layer.scheme.kernel


def _coded(norm: Any, layer: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of normalized rows that a layer takes, their scales, and the sum that was normalized."""
    fields = {"eps": norm.variance_epsilon, **PROPAGATE, **_kernel(layer).activation.codes}
    codes, scale, *total = torch.ops.skuda.rms_norm_quantize.default(x, residual, norm.weight, **fields)
    return codes, scale, total[0] if total else x


def make_exact(model: nn.Module, config: Any) -> None:
    """Let a model of vLLM compute what the exact model of `skuda.torch` computes.

    Parameters
    ----------
    model : Module
        It is loaded and has not run.
    config : VllmConfig

    Raises
    ------
    InvalidProblem
        For a model of another family, and for a part that the definition does not have. Nothing has changed then.
    """
    of_model = config.model_config
    _check_model(model, of_model)
    base = model.model
    layers = {
        f"model.layers.{n}": layer for n, layer in enumerate(base.layers) if not isinstance(layer, PPMissingLayer)
    }
    last = [] if isinstance(base.norm, PPMissingLayer) else [base.norm]
    for number, (name, layer) in enumerate(layers.items(), base.start_layer):
        _check_layer(name, layer, of_model.dtype, _window(of_model.hf_text_config, number))
    for norm in last:
        _check_norm("model.norm", norm, of_model.dtype)
    ropes = {id(layer.self_attn.rotary_emb): layer.self_attn for layer in layers.values()}
    for rotary, table in [(each.rotary_emb, _table(of_model, each)) for each in ropes.values()]:
        rotary.register_buffer(_TABLE, table, persistent=False)  # an engine that sleeps keeps buffers
    for layer in layers.values():
        layer.self_attn.attn.impl.turn = _turn(layer.self_attn)
        layer.__class__ = _exact(type(layer))
    for norm in last:
        norm.__class__ = ExactLastNorm


_CLASSES: dict[type[nn.Module], Any] = {}


def _exact(kind: type[nn.Module]) -> Any:
    made = type(f"Exact{kind.__name__}", (ExactDecoderLayer, kind), {"__module__": __name__})
    return _CLASSES.setdefault(kind, made)


def _turn(attention: Any) -> Callable[[], Turn]:
    """Return what gives the present tensors of an attention: the engine may load others."""
    rotary = attention.rotary_emb
    norms = {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    eps = float(norms["q_norm"].variance_epsilon) if norms else 0.0
    fields = turn(getattr(rotary, _TABLE), {name: norm.weight.data for name, norm in norms.items()}, eps).fields
    return lambda: Turn(fields, getattr(rotary, _TABLE), {name: norm.weight.data for name, norm in norms.items()})


def _table(of_model: Any, attention: Any) -> Tensor:
    """Return the cosines of the trainer's rope, which come from transformers, for all positions."""
    rotary, name = attention.rotary_emb, f"{attention.attn.layer_name.removesuffix('.attn')}.rotary_emb"
    config, kind = of_model.hf_text_config, of_model.hf_text_config.model_type
    home = import_module(f"transformers.models.{kind}.modeling_{kind}")
    theirs = getattr(home, f"{kind.capitalize()}RotaryEmbedding")(config)
    if theirs.rope_type not in FIXED:
        _refuse(name, theirs.rope_type, f"have a rope of {', '.join(FIXED)}")
    like = torch.empty(0, dtype=of_model.dtype, device=attention.qkv_proj.weight.device)
    table = RopeTable(theirs).of(like, of_model.max_model_len)
    probed, known = table[:_PROBED], getattr(rotary, "cos_sin_cache", table.new_zeros(_PROBED, 0))[:_PROBED].float()
    same = getattr(rotary, "is_neox_style", False) and known.shape == probed.shape
    if not same or not torch.allclose(known, probed, rtol=0, atol=_CLOSE):
        _refuse(name, f"a {type(rotary).__name__}", "have the rope of transformers")
    return table


def _check_model(model: nn.Module, of_model: Any) -> None:
    """Refuse a model that is not vLLM's own of a family whose models can be exact."""
    kind = getattr(of_model.hf_text_config, "model_type", "")
    home = f"vllm.model_executor.models.{kind}"
    if kind not in FAMILIES or type(model) is not getattr(import_module(home), f"{kind.capitalize()}ForCausalLM"):
        rule = f"be one of the families {', '.join(FAMILIES)}, by vLLM's own classes"
        _refuse("model", f"a {type(model).__name__} for the type {kind or 'unknown'}", rule)
    if of_model.uses_mrope:
        _refuse("rope_parameters", "M-RoPE", "be left out: positions are counted")
    logits = getattr(model, "logits_processor", None)  # only on the last stage of a pipeline
    if logits is not None and (logits.scale != 1 or logits.soft_cap is not None):
        _refuse("logits_processor", f"scale={logits.scale}, soft_cap={logits.soft_cap}", "leave logits as they are")


def _window(config: Any, number: int) -> int | None:
    """Return the window of a layer in transformers."""
    types = dict(enumerate(getattr(config, "layer_types", None) or ()))
    slides = config.model_type == "mistral"
    if config.model_type.startswith("qwen") and types:
        slides = types[number] == "sliding_attention"
    return config.sliding_window if slides else None


def _check_layer(name: str, layer: Any, dtype: torch.dtype, window: int | None) -> None:
    """Refuse a decoder layer that does not compute what the definition says."""
    attention, impl = layer.self_attn, layer.self_attn.attn.impl
    if not isinstance(impl, ExactAttention) or impl.window != window:
        had = f"a {type(impl).__name__} with the window {getattr(impl, 'window', None)}"
        _refuse(f"{name}.self_attn.attn", had, f"be skuda's attention with the window {window}, as in transformers")
    _check_linear(attention.qkv_proj, attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    names = {"input_layernorm": layer, "post_attention_layernorm": layer, "q_norm": attention, "k_norm": attention}
    for norm, parent in names.items():
        if hasattr(parent, norm):
            _check_norm(f"{name}.{norm}", getattr(parent, norm), dtype)
    if type(layer.mlp.act_fn) is not SiluAndMul:
        _refuse(f"{name}.mlp.act_fn", f"a {type(layer.mlp.act_fn).__name__}", "be a SiluAndMul")
    heads = [getattr(attention, norm).variance_epsilon for norm in ("q_norm", "k_norm") if hasattr(attention, norm)]
    if len(set(heads)) > 1:
        _refuse(f"{name}.self_attn", f"norms of heads with eps {heads}", "have one eps")
    x, other = torch.randn(2, _TOKENS, layer.hidden_size, generator=torch.Generator().manual_seed(0), device="cpu")
    for residual in (None, other):
        own, wanted = (
            _seen(layer, run, (torch.arange(_TOKENS), x, residual)) for run in (type(layer).forward, _defined)
        )
        if not own or len(own) != len(wanted) or not all(map(_alike, own, wanted)):
            _refuse(name, f"a {type(layer).__name__} of this version of vLLM", "compute what exact_ defines")


def _check_linear(*layers: Any) -> None:
    """Refuse linear layers of another scheme than that of `skuda.torch.Dynamic`."""
    for layer in layers:
        kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
        if not isinstance(kernel, SkudaInt8ScaledMMLinearKernel) or kernel.config.is_static_input_scheme:
            _refuse(layer.prefix, "another scheme", "be int8 with inputs that are quantized per token")
        if not kernel.config.input_symmetric or layer.skip_bias_add:
            _refuse(layer.prefix, "inputs with zero points, or a bias that the model adds", "have neither")


def _check_norm(name: str, norm: Any, dtype: torch.dtype) -> None:
    """Refuse a norm that the ops do not compute."""
    weight = getattr(norm, "weight", None)
    if type(norm) is not RMSNorm or weight is None or weight.dtype is not dtype or norm.variance_size_override:
        had = f"a {type(norm).__name__} with a weight of {getattr(weight, 'dtype', None)}"
        _refuse(name, had, f"be an RMSNorm over all of its row, with a weight of {dtype}")


def _defined(layer: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the parts of a decoder layer as the definition has them."""
    attention, mlp = layer.self_attn, layer.mlp
    x = layer.input_layernorm(*(each for each in (hidden_states, residual) if each is not None))
    x, residual = (x, hidden_states) if residual is None else x
    q, k, v = attention.qkv_proj(x)[0].split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    x, _ = attention.o_proj(attention.attn(*attention.rotary_emb(positions, q, k), v))
    x, residual = layer.post_attention_layernorm(x, residual)
    return mlp.down_proj(mlp.act_fn(mlp.gate_up_proj(x)[0]))[0], residual


class _StandIn(nn.Module):
    """Notes what a part gets, and returns random numbers that follow from its name and the width of its output."""

    def __init__(self, name: str, width: int | None, calls: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.name, self.width, self.calls = name, width, calls

    def forward(self, *given: Tensor) -> Any:
        rows = [each.reshape(_TOKENS, -1) if each.dim() > 1 else each for each in given]
        self.calls.append((self.name, *rows))
        drawn = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        if self.width is not None and self.name.endswith("_proj"):
            return torch.randn(_TOKENS, self.width, generator=drawn), None
        if self.name == "act_fn":
            return torch.randn(_TOKENS, rows[0].shape[1] // 2, generator=drawn)
        several = given[1:] if self.name == "rotary_emb" else given[:1] if self.name == "attn" else given
        made = tuple(torch.randn(each.shape, generator=drawn) for each in several)
        return made if len(made) > 1 else made[0]


@contextmanager
def _stood_in(layer: Any, calls: list[tuple[Any, ...]]) -> Iterator[None]:
    """Put stand-ins in the place of a layer's parts for a while."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = attention.q_size + 2 * attention.kv_size
    widths = {"qkv_proj": qkv, "o_proj": layer.hidden_size, "down_proj": layer.hidden_size}
    widths["gate_up_proj"] = 4 * _TOKENS
    held = {id(module): dict(module._modules) for module in (layer, attention, mlp)}  # noqa: SLF001  to put them back
    try:
        for module in (layer, attention, mlp):
            for name in held[id(module)]:
                if name not in ("self_attn", "mlp"):
                    module._modules[name] = _StandIn(name, widths.get(name), calls)  # noqa: SLF001
        yield
    finally:
        for module in (layer, attention, mlp):
            module._modules.update(held[id(module)])  # noqa: SLF001


def _seen(layer: Any, run: Callable[..., Any], given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return what the parts of a layer get from a way to run it, and what it returns; nothing if it raises an error."""
    calls: list[tuple[Any, ...]] = []
    with _stood_in(layer, calls), torch.no_grad(), torch.device("cpu"):
        try:
            calls.append(("result", *run(layer, *given)))
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
            return []
    return calls


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a call of a part is the same: the part, and the bits of what it gets."""
    return one[0] == other[0] and len(one) == len(other) and all(map(torch.equal, one[1:], other[1:]))


def _refuse(field: str, had: str, rule: str) -> NoReturn:
    raise InvalidProblem('"exact": True of quantization="skuda"', field, shown(had), rule)
