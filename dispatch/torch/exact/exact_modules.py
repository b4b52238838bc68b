"""Modules of an exact model: norms, gated MLPs, attentions and heads whose values are those of ops.

Each is a subclass of the module that it replaces, as `skuda.torch.fuse.fused_modules` has them, and has the same bits
as the fused modules. Where gradients are recorded, the values stay the same. The gradient is that of the original
formula, straight through all rounding; that of attention is taken at the dequantized queries, keys and values. The
formula is computed in the backward pass only.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812  torch's name

from skuda.registry.errors import InvalidProblem
from skuda.torch.attention.interface import Mask
from skuda.torch.attention.rope_attention import FusedRopeAttention
from skuda.torch.formats.int8 import CODES
from skuda.torch.fuse.fused_modules import Fused, MLPForm, gated_rows
from skuda.torch.linear.activation import ActivationQuant
from skuda.torch.linear.autograd import recomputed, round_rows, row_codes, valued
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear, autocast
from skuda.torch.ops.registered import linear_dynamic
from skuda.torch.ops.tensor_op import launched, run_module
from skuda.torch.training.layers import FakeQuantLinear, MixedLinear


class ExactNormForm(NamedTuple):
    """How an op computes a norm: the op, its epsilon, and the names of the norm's vectors, weight and bias."""

    op: str
    eps: float
    vectors: tuple[str, ...]


class ExactNorm(Fused):
    """A norm whose rows are those that the fused norms quantize."""

    fused_form: ExactNormForm

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return nothing: it has no children."""
        return {}

    def warm(self, rows: Tensor) -> None:
        """Run the op."""
        self(rows)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized rows, in the shape and dtype of the input.

        Raises
        ------
        InvalidProblem
            For an input of another dtype than the norm's parameters, and under autocast.
        """
        form = self.fused_form
        vectors = [getattr(self, name) for name in form.vectors]
        if torch.is_autocast_enabled(x.device.type) or any(vector.dtype is not x.dtype for vector in vectors):
            had = f"{x.dtype}, its parameters are {[vector.dtype for vector in vectors]}"
            rule = "have their dtype, without autocast: cast the model instead"
            raise InvalidProblem(type(self).__name__, "input", had, rule)
        tensors = (x.detach(), None, *(vector.detach() for vector in vectors))
        key = (form.op, "normalized", form.eps, x.shape, x.dtype)
        found = launched(key, *tensors)
        if found is None:
            found = run_module(form.op, key, tensors, {"eps": form.eps, "has_normalized": True, **CODES})
        rows: Tensor = found[-1]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *vectors)):
            return recomputed(rows, self._formula, x, *vectors)
        return rows

    def _formula(self, x: Tensor, *vectors: Tensor) -> Tensor:
        """Return the original norm of rows, with these vectors in place of its own."""
        norm = copy.copy(self)
        norm._parameters = dict(zip(self.fused_form.vectors, vectors, strict=True))  # type: ignore[assignment]  # noqa: SLF001  the copy's own
        found: Tensor = super(ExactNorm, norm).forward(x)
        return found


class ExactGatedMLP(Fused):
    """A gated feed-forward layer whose activation is that of the fused ones. Its layers stay separate."""

    fused_form: MLPForm

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return the activation, which is not called."""
        return {self.fused_form.act: ("_forward_hooks", "_forward_pre_hooks")} if self.fused_form.act else {}

    def warm(self, rows: Tensor) -> None:
        """Run the layer."""
        self(rows)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output. It has the shape of the input."""
        form = self.fused_form
        if not self.intact():
            self.fall_back()
        gate, up = (getattr(self, name)(x) for name in form.parts)
        op = getattr(torch.ops.skuda, form.op.replace("_quantize", "_amax"))
        rows: Tensor = op.default(gate.detach(), up.detach(), **form.fields)[0]
        if torch.is_grad_enabled() and gate.requires_grad:
            rows = recomputed(rows, partial(gated_rows, form), gate, up)
        found: Tensor = getattr(self, form.down)(rows)
        return found


class ExactAttention(FusedRopeAttention):
    """An attention of separate layers for queries, keys and values, which can be trained without a cache."""

    trains = True

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return the norms of heads, which are not called."""
        return dict.fromkeys(self.fused_form.norms, ("_forward_hooks", "_forward_pre_hooks"))

    def heads(self, rows: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values, of shape (batch, columns, heads * head_size)."""
        return self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)

    def with_gradient(
        self, found: Tensor, heads: tuple[Tensor, ...], cos_sin: Any, mask: Mask | None, window: int | None
    ) -> Tensor:
        """Return the same values, with the gradient of torch's attention at the dequantized heads."""
        weights = [getattr(self, name).weight for name in self.fused_form.norms]
        return recomputed(found, partial(self._formula, cos_sin, mask, window), *heads, *weights)

    def _formula(
        self, cos_sin: Any, mask: Mask | None, window: int | None, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor
    ) -> Tensor:
        """Return torch's attention at the dequantized heads, with these weights of the norms of q and k."""
        batch, new, _ = shape = q.shape
        q, k, v = (each.view(batch, new, -1, self.head_dim) for each in (q, k, v))
        if weights:
            norms = zip(self.fused_form.norms, weights, (q, k), strict=True)
            q, k = (functional_call(getattr(self, name), {"weight": weight}, (x,)) for name, weight, x in norms)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        cos, sin = (part[:, None] for part in cos_sin)
        q, k = (each * cos + _half_turned(each) * sin for each in (q, k))
        q, k, v = (round_rows(each) for each in (q, k, v))
        given: dict[str, Any] = {"is_causal": True}
        if (mask is not None and mask.rows is not None) or window is not None:
            given = {"attn_mask": _seen(mask, batch, new, window, q.device)}
        floats = F.scaled_dot_product_attention(q, k, v, scale=self.scaling, enable_gqa=True, **given)
        return floats.transpose(1, 2).reshape(shape)


class ExactHead(DynamicLinear):
    """An int8 layer whose outputs are f32: logits."""

    stored_as = DynamicLinear
    """The class of the layer without what makes it exact, which checkpoints describe."""

    def act(self, activation: ActivationQuant) -> None:
        """Take an activation, with outputs in f32."""
        super().act(replace(activation, output_element="f32"))

    @classmethod
    def of(cls, layer: Int8Linear) -> Self:
        """Make a layer a head. Return it."""
        layer.__class__ = cls  # type: ignore[assignment]
        layer.act(layer.activation)
        return cast("Self", layer)

    def like(self, whole: Int8Linear) -> Self:
        """Return another layer of these sizes as a head."""
        if type(whole) is not DynamicLinear:
            raise InvalidProblem(type(self).__name__, "the loaded layer", f"a {type(whole).__name__}", "be dynamic")
        return super().like(self.of(whole))  # type: ignore[return-value]


class ExactFakeQuantLinear(FakeQuantLinear):
    """A layer of `FakeQuant` with the values of the int8 product, and its own gradients."""

    output_element: str | None = None
    stored_as = FakeQuantLinear

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for an input of shape (..., K)."""
        floats = super().forward(input)
        given = (autocast(input), *row_codes(self.weight), self.bias)
        how = {"output_element": self.output_element, "nonfinite": "propagate"}
        values = linear_dynamic(*(None if t is None else t.detach() for t in given), **how)
        return valued(values, floats)


class ExactFakeQuantHead(ExactFakeQuantLinear):
    """A layer of `FakeQuant` whose outputs are f32: logits."""

    output_element = "f32"


class ExactMixedHead(MixedLinear):
    """A layer of `Mixed` whose outputs are f32: logits."""

    output_element = "f32"
    stored_as = MixedLinear


def _half_turned(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _seen(mask: Mask | None, batch: int, new: int, window: int | None, device: torch.device) -> Tensor:
    """Return which columns each column sees, bool of shape (batch, 1, columns, columns); padding sees itself.

    `mask` is what `skuda.torch.attention.mask_of_call` returned for causal attention.
    """
    column = torch.arange(new, device=device)
    rows = mask.rows if mask is not None and mask.rows is not None else torch.tensor([[0, new]] * batch, device=device)
    at = rows[:, :1] + column  # positions; negative ones are padding to the left
    ahead = at[:, :, None] - at[:, None, :]
    token = (at >= 0) & (at < rows[:, 1:])
    seen = token[:, None, :] & (ahead >= 0)
    if window is not None:
        seen &= ahead < window
    return (seen | (ahead == 0))[:, None]
