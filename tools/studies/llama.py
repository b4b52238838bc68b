"""The decoder stack of Llama in plain torch, with random weights.

It has the structure and the names of the public Llama 3 models: RMS norm, grouped attention with rotary positions, over
a static cache or over a whole prompt, and a gated MLP. The angles of the positions are an input, so that no bit depends
on how a compiler computes a cosine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's name

Cache = tuple[Tensor, Tensor]
"""Keys and values, of shape (sequences, key and value heads, positions, head size)."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the positions, of shape (positions, head size)."""

_EPS, _THETA = 1e-5, 500_000.0
_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes of a stack; the defaults are those of Llama 3 8B."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 32

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


class LlamaAttention(nn.Module):
    """Grouped attention; see `LlamaStack` for what it sees."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head
        self.q_proj = nn.Linear(sizes.hidden, sizes.heads * sizes.head, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head, sizes.hidden, bias=False)

    def forward(
        self, hidden_states: Tensor, angles: Angles, cache: Cache | None, positions: Tensor | None
    ) -> tuple[Tensor, None]:
        """Return the output, of the shape of the input, and nothing in the place of the attention's weights."""
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = _rotated(self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2), angles)
        key = _rotated(self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2), angles)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        keys, values = _stored(key, value, cache, positions)
        attended = F.scaled_dot_product_attention(query, keys, values, is_causal=input_shape[1] > 1, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).reshape(*input_shape, -1)), None


class LlamaMLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of the input."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind a norm, each added to its input."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=_EPS)
        self.self_attn: nn.Module = LlamaAttention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=_EPS)
        self.mlp = LlamaMLP(sizes)

    def forward(
        self,
        hidden_states: Tensor,
        angles: Angles | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the output, of the shape of the input."""
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), angles=angles, cache=cache, positions=positions
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LlamaStack(nn.Module):
    """All layers, without embeddings, the last norm and the output head.

    Several positions are a prompt from position 0; each sees those before it. A cache for it has as many positions. A
    single position is the last of its cache, and sees all of it.
    """

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))

    def forward(
        self,
        hidden_states: Tensor,
        angles: Angles,
        caches: tuple[Cache, ...] = (),
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the output, of the shape of the input.

        Parameters
        ----------
        hidden_states : tensor of shape (sequences, positions, hidden)
        angles : Angles
            Of these positions; see `angles_of`.
        caches : tuple of Cache
            One for each layer, written at `positions`; none for a prompt without a cache.
        positions : tensor of shape (positions,), s64
        """
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            hidden_states = layer(hidden_states, angles=angles, cache=cache, positions=positions)
        return hidden_states


@torch.no_grad()
def drawn(
    kind: type[_Module], *given: Any, seed: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> _Module:
    """Return a module whose matrices are Gaussian with a deviation of 1 / sqrt(K), and whose vectors are 1."""
    with torch.device("meta"):
        made: _Module = kind(*given)
    made.to(dtype).to_empty(device=device).eval().requires_grad_(requires_grad=False)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1.0)
    return made


def angles_of(sizes: LlamaSizes, positions: Tensor, dtype: torch.dtype = torch.bfloat16) -> Angles:
    """Return cosines and sines of some positions, rounded to a dtype."""
    exponents = torch.arange(0, sizes.head, 2, device=positions.device, dtype=torch.float32) / sizes.head
    angle = positions[:, None] * _THETA**-exponents
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def random_caches(sizes: LlamaSizes, sequences: int, positions: int, like: Tensor, seed: int) -> tuple[Cache, ...]:
    """Return a Gaussian cache for each layer, with the dtype and device of `like`."""
    generator = torch.Generator(like.device).manual_seed(seed)
    shape = (sequences, sizes.kv_heads, positions, sizes.head)

    def drawn() -> Tensor:
        return like.new_empty(shape).normal_(generator=generator)

    return tuple((drawn(), drawn()) for _ in range(sizes.layers))


def _rotated(heads: Tensor, angles: Angles) -> Tensor:
    """Turn each pair of a head's elements by the angle of its position."""
    cosine, sine = angles
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosine + torch.cat((-second, first), dim=-1) * sine).to(heads.dtype)


def _stored(key: Tensor, value: Tensor, cache: Cache | None, positions: Tensor | None) -> Cache:
    """Write keys and values into a cache, and return all of it; without a cache, return them."""
    if cache is None or positions is None:
        return key, value
    for held, new in zip(cache, (key, value), strict=True):
        held.index_copy_(2, positions, new)
    return cache
