"""A small Llama over bytes: RMSNorm, rotary positions, causal attention and SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from skuda.tools.train.record import Shape

VOCABULARY = 256
_ROTARY_BASE = 10000.0


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return what the block adds for x of shape (B, T, width); cos and sin have shape (T, width / heads / 2)."""
        q, k, v = (made(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(
            rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype), v, is_causal=True
        )
        found: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return found


class Block(nn.Module):
    """One layer: attention, then SwiGLU, each after a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(shape.width, eps=1e-5) for _ in range(2))
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output for x of shape (B, T, width)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        found: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return found


class ByteLlama(nn.Module):
    """The model; `blocks` holds the layers that run in int8, while embedding and head stay as they are."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.arange(shape.length)[:, None] * _ROTARY_BASE ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        residual = {"o", "down"}
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                narrower = (2 * shape.layers) ** -0.5 if name.split(".")[-2] in residual else 1.0
                nn.init.normal_(parameter, std=0.02 * narrower)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (B, T, 256) for tokens of shape (B, T), T at most `Shape.length`."""
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        found: Tensor = self.head(self.norm(x))
        return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels by their angle at each position; x has shape (B, heads, T, 2 * half)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
