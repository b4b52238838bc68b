"""The stack: transformer blocks of random weights, cut for the ranks of a group.

The weights are s8 codes times powers of two, so bf16 holds the same weights exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from skuda import ops
from skuda.dispatch import Dispatcher
from skuda.dispatch.shard.shards import span, split
from skuda.registry.value import Extent, Value
from skuda.tools.ranks.framework import BF16, Array, Framework, attend
from skuda.tools.ranks.products import Layer, Products

Q_MIN = -127
_EPS = 1e-5
_UNIT = 16


class Sizes(Value):
    """Sizes of the stack.

    Attributes
    ----------
    hidden, intermediate, heads, kv_heads, blocks : int
        Elements of a row, and of one inside the MLP; heads of queries, and of keys and values; blocks.
    positions : int
        Tokens of a sequence. It and the size of a head are powers of two.
    """

    hidden: Extent = 512
    intermediate: Extent = 1408
    heads: Extent = 16
    kv_heads: Extent = 8
    blocks: Extent = 4
    positions: Extent = 16

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


SMALL = Sizes()
LARGE = Sizes(hidden=8192, intermediate=28672, heads=64, kv_heads=8, blocks=1)
"""One block of Llama 3 70B."""


@dataclass(frozen=True)
class Block:
    """A rank's part of a block, on its device.

    Attributes
    ----------
    norms : tuple of array of shape (hidden,), bf16
        Weights of the two norms.
    qkv, o, gate_up, down : Layer
        Queries, keys and values of the rank's heads; what they are joined by; gates and ups; what these are joined by.
    """

    norms: tuple[Any, Any]
    qkv: Layer
    o: Layer
    gate_up: Layer
    down: Layer


@dataclass(frozen=True)
class Cut:
    """What a rank has of every block.

    Attributes
    ----------
    sizes : Sizes
        Of the stack.
    count, rank : int
        Ranks, and the number of this one.
    """

    sizes: Sizes
    count: int
    rank: int

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Heads of keys and values, by rank; their queries go with them."""
        return split(self.sizes.kv_heads, self.count)

    @property
    def joined(self) -> tuple[int, ...]:
        """Elements of the heads, by rank."""
        return tuple(kv * self.sizes.hidden // self.sizes.kv_heads for kv in self.kv_heads)

    @property
    def inner(self) -> tuple[int, ...]:
        """Elements inside the MLP, by rank."""
        return split(self.sizes.intermediate, self.count, _UNIT)

    def blocks(self, seed: int, framework: Framework) -> Iterator[Block]:
        """Draw all weights, and yield the rank's part of each block."""
        sizes, head = self.sizes, self.sizes.head
        kv, inner = sizes.kv_heads * head, sizes.intermediate
        of_kv = tuple(part * head for part in self.kv_heads)
        of_qkv = tuple(joined + 2 * part for joined, part in zip(self.joined, of_kv, strict=True))
        of_gate_up = tuple(2 * part for part in self.inner)
        for number in range(sizes.blocks):
            rng = np.random.default_rng((seed, number))
            norms = tuple(framework.sent(rng.uniform(0.5, 1.5, sizes.hidden).astype(BF16)) for _ in range(2))
            q, k, v, o = (self._drawn(rng, *shape) for shape in _attention(sizes.hidden, kv))
            gate, up, down = (self._drawn(rng, *shape) for shape in _mlp(sizes.hidden, inner))
            heads, keys, mine = (span(parts, self.rank) for parts in (self.joined, of_kv, self.inner))
            yield Block(
                (norms[0], norms[1]),
                self._column(framework, of_qkv, (q, heads), (k, keys), (v, keys)),
                self._row(framework, self.joined, o, heads),
                self._column(framework, of_gate_up, (gate, mine), (up, mine)),
                self._row(framework, self.inner, down, mine),
            )

    @staticmethod
    def _drawn(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array]:
        """Draw codes, and scales with which products keep about the size of their inputs."""
        codes = rng.integers(Q_MIN, 128, (n, k), np.int8)
        scales = np.ldexp(1.0, round(-np.log2(73 * k**0.5)) - rng.integers(0, 2, n))
        return codes, scales.astype(np.float32)

    def _column(self, framework: Framework, sizes: tuple[int, ...], *parts: tuple[tuple[Array, Array], slice]) -> Layer:
        codes = np.concatenate([codes[mine] for (codes, _), mine in parts])
        scales = np.concatenate([scales[mine] for (_, scales), mine in parts])
        return Layer(framework, sum(sizes), codes.shape[1], sizes, framework.sent(codes), framework.sent(scales))

    def _row(self, framework: Framework, sizes: tuple[int, ...], drawn: tuple[Array, Array], mine: slice) -> Layer:
        codes, scales = drawn
        return Layer(
            framework, len(codes), codes.shape[1], sizes, framework.sent(codes[:, mine]), framework.sent(scales)
        )


def _attention(hidden: int, kv: int) -> tuple[tuple[int, int], ...]:
    return (hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)


def _mlp(hidden: int, inner: int) -> tuple[tuple[int, int], ...]:
    return (inner, hidden), (inner, hidden), (hidden, inner)


def forward(cut: Cut, blocks: Iterable[Block], products: Products, dispatcher: Dispatcher, rows: Any) -> Any:
    """Return the output of the stack, the same on every rank.

    Parameters
    ----------
    cut : Cut
        What the rank has.
    blocks : iterable of Block
        It.
    products : Products
        How the linear layers are computed.
    dispatcher : Dispatcher
        Runs all else but attention.
    rows : array of shape (sequences * positions, hidden), bf16
        The input.

    Returns
    -------
    array of shape (sequences * positions, hidden), bf16
    """
    added = None
    for block in blocks:
        normed, rows = _norm(dispatcher, rows, added, block.norms[0])
        added = products.row(block.o, _attended(cut, products.column(block.qkv, normed), block.qkv.framework))
        normed, rows = _norm(dispatcher, rows, added, block.norms[1])
        gated = ops.silu_mul_quantize(
            gate_up=products.column(block.gate_up, normed),
            has_product=True,
            q_min=Q_MIN,
            output_element="s8",
            dispatcher=dispatcher,
        )
        added = products.row(block.down, gated.product)
    return rows if added is None else rows + added


def _norm(dispatcher: Dispatcher, rows: Any, added: Any, weight: Any) -> tuple[Any, Any]:
    """Return the norm of the rows with what is added to them, and the rows with it."""
    found = ops.rms_norm_quantize(
        input=rows,
        residual=added,
        weight=weight,
        eps=_EPS,
        has_normalized=True,
        q_min=Q_MIN,
        output_element="s8",
        dispatcher=dispatcher,
    )
    return found, rows if added is None else found.residual_out


def _attended(cut: Cut, qkv: Any, framework: Framework) -> Any:
    sizes, kv = cut.sizes, cut.kv_heads[cut.rank]
    joined, head = cut.joined[cut.rank], sizes.head
    sequences = qkv.shape[0] // sizes.positions
    shape = (sequences, sizes.positions, kv)
    q = qkv[:, :joined].reshape(*shape, sizes.heads // sizes.kv_heads, head)
    k, v = (qkv[:, start : start + kv * head].reshape(*shape, head) for start in (joined, joined + kv * head))
    return attend(framework, q, k, v).reshape(qkv.shape[0], joined)
