"""Modules of a transformer block that need fewer launches. They are subclasses of the modules that they replace.

`skuda.torch.fuse_` changes the class of a module in place, so hooks, attributes, the names of parameters and
``isinstance`` stay as they are. The results:

- A product of joined weights has the bits of the separate products.
- Norms and gated activations are those of `rms_norm_quantize`, `layer_norm_quantize`, `silu_mul_quantize` and
  `gelu_mul_quantize`, which round once where torch's modules round several times.

The fused ops have no gradient and do not follow autocast. The original ``forward`` therefore runs if gradients are
recorded, under autocast, if a norm's weight and input differ in dtype, and if a layer gets an argument by its former
name.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skuda.dispatch.shard.group import Group
from skuda.torch.autograd import Q_MAX
from skuda.torch.joined import Quantized, projected
from skuda.torch.tensor_op import launched, refuse_other, run_module

_VECTORS = {"rms_norm_quantize": ("weight",), "layer_norm_quantize": ("weight", "bias")}
"""The vectors of a norm's op, in the order of its schema, after the input and the residual."""

_CODES = {"q_min": -Q_MAX, "q_max": Q_MAX, "output_element": "s8"}


class Fused(nn.Module):
    """The base of the modules that `skuda.torch.fuse_` makes.

    Attributes
    ----------
    fused_form : AttentionForm, MLPForm or LayerForm
        The parts of the original.
    """

    fused_form: Any

    @property
    def width(self) -> int:
        """Columns of the input."""
        return int(getattr(self, self.fused_form.joined).in_features)

    @abstractmethod
    def warm(self, rows: Tensor) -> None:
        """Run the ops that the original lacks on a tensor of shape (rows, width), so their kernels are ready."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, type(self).__bases__, vars(self).copy()


_CLASSES: dict[tuple[type, type], type[Fused]] = {}


def fused_class(kind: type[Fused], original: type[nn.Module]) -> type[Fused]:
    """Return the subclass of `original` that runs as `kind`. The same arguments give the same class."""
    made = type(f"Fused{original.__name__}", (kind, original), {"__module__": kind.__module__})
    return _CLASSES.setdefault((kind, original), made)


def _empty(kind: type[Fused], original: type[nn.Module]) -> Fused:
    """Return a module without state, for a copy or a pickle."""
    made = fused_class(kind, original)
    return made.__new__(made)


class AttentionForm(NamedTuple):
    """An attention: the name of its first parameter, and of the child with the first product."""

    input: str
    joined: str


class FusedAttention(Fused):
    """An attention with one quantization and one product for queries, keys and values. The rest is the original."""

    fused_form: AttentionForm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the original. The first argument may be `Quantized`."""
        form = self.fused_form
        joined = getattr(self, form.joined)
        if args:
            return super().forward(projected(joined, args[0]), *args[1:], **kwargs)
        return super().forward(**{**kwargs, form.input: projected(joined, kwargs[form.input])})

    def warm(self, rows: Tensor) -> None:
        """Run the joined product."""
        projected(getattr(self, self.fused_form.joined), rows)


class MLPForm(NamedTuple):
    """A gated feed-forward layer.

    Attributes
    ----------
    joined, down : str
        Names of the layers of the first and of the last product.
    op : str
        The op of the activation.
    fields : dict
        Further fields of the op.
    split : bool
        Whether gates and ups are separate layers in the original.
    group : Group, optional
        The ranks that share the layer. Each has some columns of the gated product; scales are those of whole rows.
    """

    joined: str
    down: str
    op: str
    fields: dict[str, str]
    split: bool
    group: Group | None = None


class FusedGatedMLP(Fused):
    """A gated feed-forward layer: one product for gates and ups, a gated activation that writes codes, a product."""

    fused_form: MLPForm

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """Return the layer's output. It has the shape of the input."""
        form = self.fused_form
        joined = getattr(self, form.joined)
        if not isinstance(x, Quantized) and torch.is_grad_enabled() and getattr(x, "requires_grad", False) is True:
            original: Tensor = super().forward(joined(x) if form.split else x)
            return original
        gate_up, down = projected(joined, x), getattr(self, form.down)
        if form.group is None:
            key = form.op, *form.fields.values(), gate_up.shape
            found = launched(key, None, None, gate_up)
            if found is None:
                found = run_module(form.op, key, (None, None, gate_up), {**form.fields, **_CODES})
            codes, scale = found
        else:
            op = getattr(torch.ops.skuda, form.op.replace("_quantize", "_amax"))
            rows, amax = op.default(gate_up=gate_up, **form.fields)
            codes, scale = torch.ops.skuda.amax_quantize.default(rows, form.group.max(amax), **_CODES)
        return projected(down, Quantized(codes, scale, gate_up.dtype))

    def warm(self, rows: Tensor) -> None:
        """Run the whole layer."""
        self(rows)


class NormForm(NamedTuple):
    """How an op computes a norm.

    Attributes
    ----------
    name : str
        The norm's name in its layer.
    op : str
        ``rms_norm_quantize`` or ``layer_norm_quantize``.
    eps : str
        Name of the norm's attribute that holds epsilon.
    vectors : tuple of str
        The norm's parameters, of ``weight`` and ``bias``.
    """

    name: str
    op: str
    eps: str
    vectors: tuple[str, ...]

    def held(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the norm's parameters by name."""
        norm = getattr(layer, self.name)
        return {name: getattr(norm, name) for name in self.vectors}


class LayerForm(NamedTuple):
    """A decoder layer: h = x + attention(norm(x)), then h + mlp(norm(h)).

    Attributes
    ----------
    attention, mlp : str
        Names of the children.
    norms : tuple of NormForm
        The norms of the attention and of the MLP.
    defaults : dict
        The original's other parameters in order, which go to the attention.
    renamed : frozenset of str
        Former names of these parameters.
    """

    attention: str
    mlp: str
    norms: tuple[NormForm, NormForm]
    defaults: dict[str, Any]
    renamed: frozenset[str] = frozenset()


class FusedDecoderLayer(Fused):
    """A decoder layer whose norms write codes. The second norm first adds the residual."""

    fused_form: LayerForm

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output. It has the shape of the input."""
        form = self.fused_form
        renamed = any(name in kwargs for name in form.renamed)
        try:
            first = None if renamed else self._launched(form.norms[0], hidden_states)
        except AttributeError:
            refuse_other(type(self).__name__, "hidden_states", hidden_states)
            raise
        if first is None:
            if renamed or not self._serves(hidden_states):
                return super().forward(hidden_states, *args, **kwargs)
            first = self._norm(form.norms[0], hidden_states)
        given = {**form.defaults, **dict(zip(form.defaults, args, strict=False)), **kwargs}
        attended = getattr(self, form.attention)(hidden_states=first[0], **given)[0]
        rows, total = self._norm(form.norms[1], attended, hidden_states)
        return total + getattr(self, form.mlp)(rows)

    @property
    def width(self) -> int:
        """Columns of the input."""
        return int(getattr(self, self.fused_form.attention).width)

    def warm(self, rows: Tensor) -> None:
        """Run everything except the attention between its products."""
        form = self.fused_form
        first, _ = self._norm(form.norms[0], rows)
        attention = getattr(self, form.attention)
        projected(getattr(attention, attention.fused_form.joined), first)
        second, _ = self._norm(form.norms[1], rows, rows)
        getattr(self, form.mlp)(second)

    def _serves(self, x: Tensor) -> bool:
        refuse_other(type(self).__name__, "hidden_states", x)
        vectors = [vector for norm in self.fused_form.norms for vector in norm.held(self).values()]
        if torch.is_autocast_enabled(x.device.type) or any(vector.dtype is not x.dtype for vector in vectors):
            return False
        return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (x, *vectors))

    def _launched(self, form: NormForm, x: Tensor, residual: Tensor | None = None) -> tuple[Quantized, Tensor] | None:
        """Run a known launch of a norm, or do nothing and return None. The result is that of `_norm`."""
        key, tensors, _ = self._call(form, x, residual)
        found = launched(key, *tensors)
        return None if found is None else _normed(x, found)

    def _norm(self, form: NormForm, x: Tensor, residual: Tensor | None = None) -> tuple[Quantized, Tensor]:
        """Return the codes of a norm, and the sum of input and residual, which the norm normalizes."""
        key, tensors, eps = self._call(form, x, residual)
        found = launched(key, *tensors)
        if found is None:
            found = run_module(form.op, key, tensors, {"eps": eps, **_CODES})
        return _normed(x, found)

    def _call(self, form: NormForm, x: Tensor, residual: Tensor | None) -> tuple[Any, tuple[Tensor | None, ...], float]:
        """Return the key, the tensors and epsilon of a call of a norm's op."""
        norm: Any = self._modules[form.name]
        eps, held = float(getattr(norm, form.eps)), norm._parameters  # noqa: SLF001  reading an attribute is slow in torch
        vectors = [held[name] if name in held else getattr(norm, name, None) for name in _VECTORS[form.op]]
        return (form.op, eps, x.shape), (x, residual, *vectors), eps


def _normed(x: Tensor, found: list[Tensor]) -> tuple[Quantized, Tensor]:
    codes, scale, *total = found
    return Quantized(codes, scale, x.dtype), total[0] if total else x
