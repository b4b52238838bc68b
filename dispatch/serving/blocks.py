"""The int8 cache as the blocks of an engine, and attention over it.

An engine allocates, shares and frees blocks of 128 tokens. A layer's memory is cut into four arrays, as the ops want
them: the codes of the keys of all pages, the codes of the values, and the scales of both. So a page is in four places,
and an engine must not take pages for ranges of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skuda.functional import default_dispatcher
from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import PAGE
from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor
from skuda.registry.errors import InvalidProblem
from skuda.torch.ops.dtypes import element_of

_MOST_POSITIONS = 2**31 - 1


class BlockCache(NamedTuple):
    """The arrays of a layer's cache, as the ops take them."""

    k_codes: Tensor
    k_scale: Tensor
    v_codes: Tensor
    v_scale: Tensor


class Shape(NamedTuple):
    """Sizes of a call."""

    tokens: int
    sequences: int
    pages: int
    kv_heads: int
    most_blocks: int
    heads: int
    head_size: int


Fields = tuple[tuple[str, Any], ...]


class Turn(NamedTuple):
    """What an op does to new queries and keys before it quantizes them. `turn` makes one.

    Attributes
    ----------
    fields : tuple
        The fields of the op `rope_quantize_append` that say so.
    table : tensor of shape (positions, rotated), f32
        The cosines and sines of rope.
    norms : dict of str to tensor of shape (head_size,)
        Weights of the norms of heads, ``q_norm`` and ``k_norm``, or nothing.
    """

    fields: Fields
    table: Tensor
    norms: Mapping[str, Tensor] = MappingProxyType({})


def turn(table: Tensor, norms: Mapping[str, Tensor] = MappingProxyType({}), eps: float = 0.0) -> Turn:
    """Return a turn by a table, after norms with this epsilon."""
    fields = {"most_positions": table.shape[0], "rotated": table.shape[1], "eps": eps}
    return Turn(tuple((fields | {f"has_{name}": True for name in norms}).items()), table, norms)


def token_bytes(head_size: int) -> int:
    """Return the bytes of a key and a value of a head: codes, and two scales in f32."""
    return 2 * head_size + 8


def cut(memory: Tensor, heads: int, size: int) -> BlockCache:
    """Return the arrays in a layer's memory.

    Parameters
    ----------
    memory : tensor of shape (pages, heads, 128, bytes of a token), int8
        What the engine has allocated.
    heads, size : int
        Heads of keys, and their elements.

    Raises
    ------
    InvalidProblem
        For memory of another shape, or in several pieces.
    """
    shape = (len(memory), heads, PAGE, token_bytes(size))
    if memory.shape != shape or memory.dtype is not torch.int8 or not memory.is_contiguous():
        had = f"{memory.dtype}, shape {tuple(memory.shape)}, strides {memory.stride()}"
        raise InvalidProblem(
            "int8 cache", "kv_cache", had, f"be int8 of shape {shape} in one piece: the engine has another layout here"
        )
    pages, whole = len(memory), memory.view(-1)
    codes, scales = pages * heads * PAGE * size, pages * heads * PAGE * 4
    k_codes, v_codes, k_scale, v_scale = whole.split((codes, codes, scales, scales))
    return BlockCache(
        k_codes.view(pages, heads, PAGE, size),
        k_scale.view(torch.float32).view(pages, heads, PAGE),
        v_codes.view(pages, heads, size, PAGE),
        v_scale.view(torch.float32).view(pages, heads, PAGE),
    )


@lru_cache(maxsize=4096)
def problems(
    shape: Shape, dtype: torch.dtype, scale: float, window: int | None, turn: Fields
) -> tuple[RopeQuantizeAppendDescriptor, AttentionDescriptor]:
    """Return the problems of a call: what appends, and what attends. `turn` has those of a `Turn`."""
    sizes, element = shape._asdict(), element_of(dtype)
    return (
        RopeQuantizeAppendDescriptor(**sizes, **dict(turn), input_element=element),
        AttentionDescriptor(**sizes, scale=scale, window=window, output_element=element),
    )


@lru_cache(maxsize=16)
def unturned(device: torch.device) -> Turn:
    """Return cosines of no column: keys and queries have been turned."""
    return turn(torch.empty((_MOST_POSITIONS, 0), dtype=torch.float32, device=device))


def append_and_attend(
    cache: BlockCache,
    tables: tuple[Tensor, Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    scale: float,
    window: int | None,
    turned: Turn | None = None,
) -> None:
    """Write new keys and values to the cache, and attention over it to `output`.

    Parameters
    ----------
    cache : BlockCache
    tables : tensors, s32
        `block_table`, `lengths` and `starts`, as `skuda.kernels.attention.cache` says.
    query, output : tensors of shape (tokens, heads, head_size)
        Queries, and what is written: 0 for rows of no sequence.
    key, value : tensors of shape (tokens, kv_heads, head_size)
        New keys and values.
    scale, window
        Fields of the op `attention`.
    turned : Turn, optional
        Norms and rope of queries and keys. Without it, they have been turned.
    """
    (tokens, heads, size), (sequences, most_blocks) = query.shape, tables[0].shape
    pages, kv_heads = cache.k_scale.shape[:2]
    how = turned or unturned(query.device)
    shape = Shape(tokens, sequences, pages, kv_heads, most_blocks, heads, size)
    append, attend = problems(shape, query.dtype, scale, window, how.fields)
    shared = cache._asdict() | dict(zip(("block_table", "lengths", "starts"), tables, strict=True))
    q, k, v = (each.flatten(1) for each in (query, key, value))
    run = default_dispatcher().run
    codes, scales = run(append, q=q, k=k, v=v, cos_sin=how.table, **how.norms, **shared)
    run(attend, q_codes=codes, q_scale=scales, output=output.view(query.shape), **shared)
