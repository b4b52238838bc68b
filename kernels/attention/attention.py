"""Attention over a paged int8 cache: the same bits of a row in prefill, decode and any batch or split.

Formula
-------
output = softmax(scale q k^T) v, of codes times their scales, as follows. `skuda.kernels.attention.cache` says where
keys and values lie, and which row has which position. A row at position p sees the keys 0 to p if `causal`, of these
the last `window` if given, else all keys of its sequence; if p is negative, none. Head h has the keys of head
h // (heads / kv_heads).
FMA(a, b, c) = RN(a b + c), rounded once. Numbers are f32, sums of codes exact.

c = RN(RN64(scale l)), where l = 0x1.71547652b82fep+0 is log2(e) in f64: the product is rounded to f64, then to f32.
z = RN(q_scale c). In a block of 128 positions aligned to position 0, over the keys that the row sees:
y = RN(acc k_scale) with acc the sum of products of codes; n = ceil(z max y), of the exact product;
e = E(FMA(z, y, 512 - n)), about 2^(z y - n), by `skuda.kernels.attention.exp2`; 2^m = the least power of two not
below max v_scale; g = RN(65280 2^-m v_scale); w = rne(e g), 0 to 65280; S = RN(sum of w v); L = RN(sum of rne(2^22 e)).
Where max v_scale is below 2^-110, w = 0 and m = -512. So the weights of the values have 16 bits, which kernels
multiply as two bytes: w = 256 h + l, with h = (w + 128) >> 8 of 0 to 255 and l of -128 to 127.

Partial sums (n, m, S, L) are added so: N = max(n1, n2); d = max(n - N, -512) for each; M = max(m1 + d1, m2 + d2);
S = FMA(S1, T(m1 + d1 - M), RN(S2 T(m2 + d2 - M))); L = FMA(L1, T(d1), RN(L2 T(d2))); (N, M, S, L). T(d) = 2^d, and 0
below d = -126. The second of the two is added to the first. A chunk is 4 blocks, aligned to position 0: blocks are
added to their chunk in ascending order, then chunks in ascending order. The first one is copied; a block in which the
row sees nothing is left out.

output = RN_T(RN(RN(S h) T(m))) with h = RN(RN(2^22 / 65280) / L). A row that sees no key, or is of no sequence, is 0. A
row is NaN if it sees a key and z is not in [0, inf), if it sees a key whose `k_scale` or `v_scale` is not in
[0, 2^106), or if |n| is 2^23 or more in any block. So a row's result depends only on the row and on the keys and values
that it sees.
If `quantized`, the op returns codes of that output, as the next product takes them: over all heads of a token exactly
as `dynamic_range` per token, symmetric: m = max |output|, NaN skipped; `output_scale` = RN(m / 127), and if that is 0,
1; `output_codes` = clamp(rne(RN(output / output_scale)), -127, 127), 0 for a NaN.

Elements
--------
codes s8, scales f32, `block_table`, `lengths` and `starts` s32; `output` (T) f16, bf16 or f32.

Units
-----
Scales are real units per code step, `output` has the unit of v; `scale` is 1 / (unit of q times unit of k), often
1 / sqrt(head_size). `window` counts keys.

Errors
------
`InvalidProblem` for sizes outside [0, 2^31-1]; a `head_size` other than 32, 64 and 128; `kv_heads` below 1; `heads`
that are no positive multiple of `kv_heads`; a `scale` that is not positive, or that times log2(e) is 0 or infinite in
f32; a `window` below 1 or without `causal`; an argument that is missing, unknown, of another element or shape, or that
overlaps the output; from the ``numpy`` backend, tables that `check_tables` refuses. Kernels on a device clamp such
tables and stay inside of the arrays; the rows of those sequences, or all if `starts` are wrong, are then not defined.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from skuda.kernels.attention.cache import (
    CHUNK,
    CODE_BOUNDS,
    PAGE,
    TABLES,
    CacheProblem,
    cache_arguments,
    check_tables,
    column_of,
)
from skuda.kernels.attention.drawn import drawn_scales, drawn_tables
from skuda.kernels.attention.exp2 import ONE, power_of_two
from skuda.kernels.blocks import BLOCK
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.fma import fma
from skuda.kernels.offers import cuda_skus, element_flags, numpy_skus
from skuda.kernels.quantize import affine
from skuda.registry.arch import ArchSku
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.constraints import Between, OneOf, ProductAtMost
from skuda.registry.elements import ElementKind
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Extent, Integer, Real

Array = npt.NDArray[Any]
UNUSABLE = np.float32(2.0**106)
"""The least scale that is too large: a sum of products times a smaller one is finite."""
EXPONENTS = 2**23
"""The least |n| that is too large: all whole numbers below it are f32."""
LEAST_VALUES = np.float32(2.0**-110)
"""The least largest v_scale of a block that has weights; 65280 2^-m is finite."""
LARGEST_WEIGHT = 65280
NOTHING = -512
"""m of a block without weights, and the least difference of n."""
WEIGHT = np.float32(2**22 / LARGEST_WEIGHT)
"""Unit of the weights in that of L."""
FEW_ROWS = 64
"""The most rows for each sequence and head of keys that warps spread the keys of: four tiles, which L2 serves."""
OUTPUTS = (ElementKind.F16, ElementKind.BF16, ElementKind.F32)
_ROWS_AT_ONCE = BLOCK // (CHUNK * PAGE)
"""Rows of heads that the reference gives the keys of a chunk at once."""
_ROWS_OF_PRODUCT = 16
_LONGEST = 2048
"""The most pages that sequences are drawn with where a row sees all keys: a reference for more takes too long."""
_POSITIONS = np.argsort(column_of(np.arange(PAGE)))
"""Position of a page that each column of `v_codes` has."""
_ROWS = "tokens, heads, head_size"


class Attended(NamedTuple):
    """The op's result; outputs that a problem does not have are None."""

    output: Any = None
    """[tokens, heads, head_size], unless quantized."""
    output_codes: Any = None
    """Its codes, [tokens, heads, head_size], if quantized."""
    output_scale: Any = None
    """Their scales, f32 [tokens], if quantized."""


class AttentionDescriptor(CacheProblem):
    """Problem of `attention`; for the other fields see `CacheProblem`.

    Attributes
    ----------
    heads : int
        Heads of q and of the output, a multiple of `kv_heads`.
    scale : float
        What scores are multiplied by before the softmax; positive.
    causal : bool
        Whether a row sees only keys up to its own position.
    window : int or None
        How many keys a row sees at most, its own included; only where `causal`.
    output_element : ElementKind
        Element of the output, also where it is then quantized.
    quantized : bool
        Whether the op returns codes of the output and a scale for each token.
    """

    op: Literal["attention"] = "attention"
    heads: Extent
    scale: Annotated[Real, Field(gt=0)]
    causal: bool = True
    window: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None
    output_element: ElementKind
    quantized: bool = False
    element_field: ClassVar[str] = "output_element"
    result = Attended
    signature = (
        ArgumentSpec("q_codes", Role.INPUT, ElementKind.S8, _ROWS),
        ArgumentSpec("q_scale", Role.INPUT, ElementKind.F32, "tokens, heads"),
        *cache_arguments(Role.INPUT),
        *TABLES,
        ArgumentSpec("output", Role.OUTPUT, "output_element", _ROWS, when={"quantized": (False,)}),
        ArgumentSpec("output_codes", Role.OUTPUT, ElementKind.S8, _ROWS, when={"quantized": (True,)}),
        ArgumentSpec("output_scale", Role.OUTPUT, ElementKind.F32, "tokens", when={"quantized": (True,)}),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.heads < 1 or self.heads % self.kv_heads:
            self.refuse("heads", self.heads, f"be a positive multiple of kv_heads = {self.kv_heads}")
        if not 0 < self.exponent < math.inf:
            self.refuse("scale", self.scale, "be neither 0 nor infinite in f32 when it is multiplied by log2(e)")
        if self.window is not None and not self.causal:
            self.refuse("window", self.window, "be left out unless causal is true")
        return self

    @property
    def group(self) -> int:
        """Heads of q for each head of keys."""
        return self.heads // self.kv_heads

    @property
    def rows_per_sequence(self) -> int:
        """Rows that share the keys of a sequence and head: new tokens times heads, on average, rounded up."""
        return -(-self.tokens * self.group // max(1, self.sequences))

    @property
    def exponent(self) -> float:
        """c, the scale of exponents of two: rounded to f64, then to f32."""
        with np.errstate(all="ignore"):
            return float(np.float32(self.scale * math.log2(math.e)))

    @property
    def builder(self) -> Callable[..., Attended]:
        """Builds the result from this problem's outputs, in their order."""
        return partial(Attended, None) if self.quantized else Attended


class _Partial(NamedTuple):
    """A part of the sums of some rows, as the module defines it; rows are [kv_heads, rows], of blocks [blocks, ...]."""

    n: Array
    m: Array
    total: Array
    """S, [kv_heads, rows, head_size]."""
    weight: Array
    """L; NaN where the row's result is."""
    some: Array
    """Whether the row has seen a key; bool."""


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: AttentionDescriptor, **arrays: Any) -> None:
    """Write `output`, or `output_codes` and `output_scale`, by the formula of the module."""
    lengths, starts = arrays["lengths"], arrays["starts"].astype(np.int64)
    check_tables(problem, arrays["block_table"], lengths, arrays["starts"])
    _write(problem, arrays, slice(starts[-1], None), 0)
    step = max(1, _ROWS_AT_ONCE // problem.heads)
    for s in range(problem.sequences):
        for start in range(starts[s], starts[s + 1], step):
            rows = slice(start, min(start + step, starts[s + 1]))
            at = np.arange(rows.start, rows.stop)
            values = _attended(problem, arrays, s, at, int(lengths[s]) - int(starts[s + 1]) + at)
            _write(problem, arrays, rows, values)


def _write(problem: AttentionDescriptor, arrays: dict[str, Any], rows: slice, values: Any) -> None:
    """Write the results of some tokens, [tokens, heads, head_size] in f32."""
    if not problem.quantized:
        arrays["output"][rows] = values
        return
    codes = arrays["output_codes"][rows]
    made = np.empty((len(codes), problem.heads * problem.head_size), storage_dtype(problem.output_element))
    made.reshape(codes.shape)[...] = values
    scales, found = affine.coded_rows((problem.output_element, ElementKind.S8), CODE_BOUNDS, made)
    arrays["output_scale"][rows], codes[...] = scales, found.reshape(codes.shape)


def _attended(problem: AttentionDescriptor, arrays: dict[str, Any], s: int, rows: Array, position: Array) -> Array:
    """Return the results of some tokens of sequence `s`, which have the given positions."""
    last = np.minimum(position, arrays["lengths"][s] - 1) if problem.causal else arrays["lengths"][s] - 1 + 0 * position
    last = np.where(position < 0, -1, last)
    first = np.maximum(position - problem.window + 1, 0) if problem.window else 0 * position
    z = arrays["q_scale"][rows] * np.float32(problem.exponent)
    query = _by_kv_head(problem, arrays["q_codes"][rows]).astype(np.float32)
    factor = _by_kv_head(problem, z[..., None])[..., 0]
    first, last = (np.repeat(each, problem.group) for each in (first, last))
    result = np.zeros(query.shape, np.float32)
    step = max(1, _ROWS_AT_ONCE // problem.kv_heads)
    for start in range(0, len(first), step):
        some = slice(start, start + step)
        whole = _summed(arrays, arrays["block_table"][s], query[:, some], factor[:, some], first[some], last[some])
        if whole is not None:
            found = whole.total * (WEIGHT / whole.weight)[..., None] * _power(whole.m)[..., None]
            result[:, some] = np.where(whole.some[..., None], found, np.float32(0))
    spread = result.reshape(problem.kv_heads, len(rows), problem.group, problem.head_size).swapaxes(0, 1)
    return np.asarray(spread.reshape(len(rows), problem.heads, problem.head_size))


def _summed(arrays: dict[str, Any], table: Array, query: Array, z: Array, first: Array, last: Array) -> _Partial | None:
    """Return the sums of rows that see the keys `first` to `last`, of the pages in `table`; None if they see none.

    Several chunks are computed at once. Blocks that no row sees fill the first and the last one.
    """
    whole, step = None, CHUNK * max(1, _ROWS_AT_ONCE // z.size)
    low, high = int(first.min()) // PAGE, int(last.max()) // PAGE + 1
    for start in range(low // CHUNK * CHUNK, high, step):
        blocks = np.arange(start, min(start + step, -(-high // CHUNK) * CHUNK))
        at = (blocks[:, None] * PAGE + np.arange(PAGE))[:, None, None]
        seen = (at >= first[:, None]) & (at <= last[:, None])
        pages = table[np.clip(blocks, low, high - 1)]
        kv = tuple(arrays[name][pages] for name in ("k_codes", "k_scale", "v_codes", "v_scale"))
        parts = _blocks(query, z, kv, seen)
        chunks = _Partial(*(each[::CHUNK] for each in parts))
        for i in range(1, CHUNK):
            chunks = _added(chunks, _Partial(*(each[i::CHUNK] for each in parts)))
        for chunk in map(_Partial._make, zip(*chunks, strict=True)):
            whole = chunk if whole is None else _added(whole, chunk)
    return whole


def _by_kv_head(problem: AttentionDescriptor, values: Array) -> Array:
    """Return [tokens, heads, x] as [kv_heads, tokens * group, x]."""
    split = values.reshape(len(values), problem.kv_heads, problem.group, values.shape[-1])
    return split.swapaxes(0, 1).reshape(problem.kv_heads, -1, values.shape[-1])


def _blocks(query: Array, z: Array, kv: tuple[Array, ...], seen: Array) -> _Partial:
    """Return the parts of some blocks, which are the first axis of each array in them.

    Parameters
    ----------
    query : array
        Codes of q, [kv_heads, rows, head_size].
    z : array
        Factors of the rows, [kv_heads, rows].
    kv : tuple of array
        Codes and scales of keys and values, as the cache has them: a page for each block.
    seen : array
        Which keys each row sees, [blocks, 1, rows, 128].
    """
    k, k_scale, v, v_scale = kv
    usable = (k_scale >= 0) & (k_scale < UNUSABLE) & (v_scale >= 0) & (v_scale < UNUSABLE)
    k_scale, v_scale = (np.where(usable, each, np.float32(0))[..., None, :] for each in (k_scale, v_scale))
    counts = seen & usable[..., None, :]
    y = _product(query, k.astype(np.float32).swapaxes(2, 3)) * k_scale
    n = np.ceil(z.astype(np.float64) * np.where(counts, y, np.float32(-np.inf)).max(axis=3))
    some = np.broadcast_to(seen.any(axis=3), n.shape)
    good = (np.abs(n) < EXPONENTS) & (z >= 0) & (counts == seen).all(axis=3) & some
    n, z = np.where(good, n, 0).astype(np.float32), np.where(good, z, np.float32(0))
    counts &= good[..., None]
    # What a key has that does not count is anything, and left out.
    e = np.where(counts, power_of_two(fma(z[..., None], y, (ONE - n)[..., None])), np.float32(0))
    largest = np.where(counts, v_scale, np.float32(0)).max(axis=3)
    fraction, m = np.frexp(largest)
    m = np.where(largest < LEAST_VALUES, NOTHING, m - (fraction == 0.5))
    unit = np.where(m == NOTHING, 0.0, np.ldexp(float(LARGEST_WEIGHT), -m)).astype(np.float32)
    g = np.where(counts, v_scale * unit[..., None], np.float32(0))
    w = np.rint(e.astype(np.float64) * g)  # of the exact product, so it is rounded once
    high = np.floor((w + 128) / 256)
    values = v.astype(np.float32).swapaxes(2, 3)
    bytes_of_w = (high, w - 256 * high)
    of_high, of_low = (_product(each[..., _POSITIONS].astype(np.float32), values) for each in bytes_of_w)
    total = (256 * of_high.astype(np.float64) + of_low).astype(np.float32)
    weight = np.rint(e.astype(np.float64) * 2**22).sum(axis=3).astype(np.float32)
    return _Partial(n, m, total, np.where(good, weight, np.float32(np.nan)), some)


def _product(rows: Array, columns: Array) -> Array:
    """Return a product of whole numbers, which is exact in any order: its sums are below 2^24.

    So few rows at once that BLAS starts no threads, which wait for each other on a busy host, and gain nothing.
    """
    parts = [rows[..., i : i + _ROWS_OF_PRODUCT, :] @ columns for i in range(0, rows.shape[-2], _ROWS_OF_PRODUCT)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)


def _power(d: Array) -> Array:
    """Return T(d)."""
    return np.where(d < -126, np.float32(0), np.ldexp(np.float32(1), np.maximum(d, -126)))


def _added(one: _Partial, two: _Partial) -> _Partial:
    """Return the sum of two parts, of which each row may lack either."""
    n = np.maximum(one.n, two.n)
    d = [np.maximum(part.n - n, NOTHING).astype(np.int32) for part in (one, two)]
    exponents = [part.m + shift for part, shift in zip((one, two), d, strict=True)]
    m = np.maximum(*exponents)
    f = [_power(exponent - m)[..., None] for exponent in exponents]
    total = fma(one.total, f[0], two.total * f[1])
    weight = fma(one.weight, _power(d[0]), two.weight * _power(d[1]))
    both = _Partial(n, m, total, weight, one.some | two.some)
    return _Partial(*map(_chosen, [one.some & two.some] * 5, [one.some] * 5, both, one, two))


def _chosen(both: Array, first: Array, summed: Array, one: Array, two: Array) -> Array:
    """Return the sum where a row has both parts, else the part that it has."""
    masks = (both, first) if summed.ndim == both.ndim else (both[..., None], first[..., None])
    return np.where(masks[0], summed, np.where(masks[1], one, two))


def draw(problem: AttentionDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the inputs; slots of the cache that no sequence names hold anything."""
    tables, live = drawn_tables(problem, problem.most_blocks if problem.window else _LONGEST, rng)
    cache = (problem.pages, problem.kv_heads, PAGE)
    codes = {
        "q_codes": (problem.tokens, problem.heads, problem.head_size),
        "k_codes": (*cache, problem.head_size),
        "v_codes": (problem.pages, problem.kv_heads, problem.head_size, PAGE),
    }
    low, high = (0, 0) if values == "zero" else (-127, 127)
    inputs: dict[str, Any] = {
        name: rng.integers(low, high, shape, np.int8, endpoint=True) for name, shape in codes.items()
    }
    # Scores of all sizes: from rows whose weights are alike to rows that see one key.
    unit = rng.choice([0.01, 1, 30]) / problem.exponent / 5000 / math.sqrt(problem.head_size)
    inputs["q_scale"] = drawn_scales((problem.tokens, problem.heads), unit, values, rng)
    for name in ("k_scale", "v_scale"):
        scales = drawn_scales(cache, 1, values, rng)
        inputs[name] = np.where(live[:, None, :], scales, rng.choice(np.array([np.nan, np.inf, -1], np.float32), cache))
    return inputs | tables


def _cases() -> tuple[Case, ...]:
    made = []
    # tokens, heads, kv_heads, head_size, sequences, pages, most_blocks
    sizes = (
        (5, 4, 2, 64, 2, 7, 6),
        (9, 3, 3, 32, 3, 4, 3),
        (3, 8, 1, 128, 3, 8, 10),
        (130, 2, 1, 32, 2, 3, 2),
        (0, 2, 2, 64, 1, 1, 1),
        (1, 1, 1, 128, 1, 1, 1),
        (4, 2, 1, 64, 0, 0, 0),
    )
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": False}, {"window": 1}, {"window": 200})
    names = ("tokens", "heads", "kv_heads", "head_size", "sequences", "pages", "most_blocks")
    kinds: tuple[Values, ...] = ("normal", "special", "normal", "zero")
    for number, (size, mask) in enumerate((size, mask) for size in sizes for mask in masks):
        fields = {"output_element": OUTPUTS[number % 3], "quantized": number % 5 < 2}
        problem = AttentionDescriptor(**dict(zip(names, size, strict=True)), **mask, scale=0.1, **fields)
        made.append(Case(problem, kinds[number // 3 % 4]))
    many = dict(zip(names, (2, 40, 8, 128, 2, 2, 1), strict=True))  # a block of threads for the codes of a token
    made += [Case(AttentionDescriptor(**many, scale=0.1, output_element=each, quantized=True)) for each in OUTPUTS]
    far = dict(zip(names, (3, 8, 1, 128, 3, 9, 70_000), strict=True))  # blocks beyond 2^16, of which rows see few
    made += [Case(AttentionDescriptor(**far, window=200, scale=0.1, output_element=each)) for each in OUTPUTS]
    return tuple(made)


CASES = _cases()
SKUS = (
    *cuda_skus(
        AttentionDescriptor,
        __name__,
        OUTPUTS,
        launch="skuda.kernels.attention.attention_launch:split",
        suffix="_split",
        flags=lambda data, _: element_flags(data, ElementKind.S8),
        variant="split",
        entry_point="attention_split_128_8_1",
        constraints=(
            Between(field="rows_per_sequence", maximum=FEW_ROWS),
            # A grid has fewer than 2^31 tiles.
            ProductAtMost(factors=("tokens", "heads"), maximum=2**31 - 1),
            ProductAtMost(factors=("boundaries", "kv_heads"), maximum=2**30),
        ),
        summary="few new tokens: four warps for each chunk of keys, and many blocks for a row",
    ),
    *cuda_skus(
        AttentionDescriptor,
        __name__,
        OUTPUTS,
        suffix="_warpgroup",
        arch=ArchSku.SM_90A,
        launch="skuda.kernels.attention.attention_launch:warpgroup",
        flags=lambda data, _: element_flags(data, ElementKind.S8),
        constraints=(
            OneOf(field="head_size", allowed=(128,)),
            Between(field="pages", minimum=1),
            ProductAtMost(factors=("pages", "kv_heads"), maximum=2**31 // PAGE - 1),
        ),
        variant="warpgroup",
        summary="wgmma, 128 rows of a head",
    ),
    *cuda_skus(
        AttentionDescriptor,
        __name__,
        OUTPUTS,
        launch="skuda.kernels.attention.attention_launch:attention",
        flags=lambda data, _: element_flags(data, ElementKind.S8),
        variant="plain",
        entry_point="attention_128",
        summary="16 rows of a head for each warp",
    ),
    *numpy_skus(AttentionDescriptor, __name__, OUTPUTS),
)
OP = Op(
    AttentionDescriptor,
    reference,
    CASES,
    SKUS,
    source="Vaswani et al., Attention Is All You Need, NeurIPS 2017",
    draw=draw,
)
