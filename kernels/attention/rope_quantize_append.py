"""Rotary embedding and quantize: new q, k and v as int8, keys and values written into a paged cache.

Formula
-------
Rows, positions and slots are those of `skuda.kernels.attention.cache`. For each head of a new token at position p:
h = q, k or v. With a norm weight, q and k are normalized over the head, exactly as `rms_norm_quantize` does it:
r = RN_C(1 / RN_C(sqrt(RN_C(RN_C(fold(RN_C(h h)) / C(head_size)) + eps)))); y = RN_T(RN_C(RN_C(h r) weight)). Without
one, and for v, y = h.
The first `rotated` elements of q and k turn in pairs (a, b): elements i and i + rotated / 2 (`half`), or 2 i and
2 i + 1 (`interleaved`). c = cos_sin[p, i] and s = cos_sin[p, rotated / 2 + i]:
a' = RN_C(RN_C(a c) - RN_C(b s)); b' = RN_C(RN_C(b c) + RN_C(a s)). All other elements stay: x = y. x is not rounded
to T. With `k_offset`, x = RN_C(x - k_offset) for every element of k.
Then x is quantized as by `dynamic_range` per token, symmetric, but a NaN counts as an infinity: m = max |x| over the
head; scale = RN_C(m / 127), and if that is 0, 1; codes = clamp(rne(RN_C(x / scale)), -127, 127), 0 for a NaN.
In the cache the scale is 0 where RN_C(m / 127) is 0, as for a head of zeros, so that a 1 decides nothing.
So a head with a NaN or an infinity has an infinite scale and codes of 0, and `attention` makes every row NaN that sees
such a key or value, or has such a query.

`k_codes`, `k_scale`, `v_codes` and `v_scale` are written in place, at the slots of the new tokens alone. A row of
padding, and one that belongs to no sequence, writes nothing there; its `q_codes` are 0 and its `q_scale` is 1.
A token's result depends only on its own row, its position, and the weights.

Elements
--------
q, k, v and the norm weights f16, bf16, f32, all the same (T); `cos_sin` and `k_offset` f32. C is f32. Codes are s8,
scales f32, tables s32.

Units
-----
Scales are real units of x per code step; `eps` has the unit of h squared; positions count tokens of a sequence from 0.

Errors
------
`InvalidProblem` for a size outside [0, 2^31-1]; `head_size` that is not 32, 64 or 128; `kv_heads` below 1; `heads`
below 1 or no multiple of `kv_heads`; `rotated` that is odd or above `head_size`; an `eps` that is negative or not
finite in C; 2^31 or more heads of all rows; an argument that is missing, unknown, of another element or shape, or that
overlaps one that is written.
Kernels trust what tables hold, and write nothing outside of the arrays. The reference refuses with `InvalidProblem`:
`starts` that do not begin at 0, decrease, or end beyond the rows; `lengths` below 0, beyond `block_table`, or beyond
`cos_sin`; pages out of range; new tokens that share a slot.
`Unsupported` for an element outside the list above.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from skuda.kernels.attention.cache import (
    CODE_BOUNDS,
    PAGE,
    TABLES,
    CacheProblem,
    cache_arguments,
    check_tables,
    column_of,
)
from skuda.kernels.blocks import BLOCK
from skuda.kernels.dtypes import storage_dtype
from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import affine, norm
from skuda.kernels.values import finfo_of, floats, rounded, specials
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Case, Op, Values
from skuda.registry.value import Extent, Real
from skuda.registry.vocabulary import RotaryLayout

Array = npt.NDArray[Any]
ELEMENTS = (ElementKind.F16, ElementKind.BF16, ElementKind.F32)
_CODES = (ElementKind.F32, ElementKind.S8)


class RopeQuantizedQueries(NamedTuple):
    """The op's result."""

    q_codes: Any
    """Codes of the queries, [tokens, heads, head_size]."""
    q_scale: Any
    """Their scales, f32 [tokens, heads]."""


class RopeQuantizeAppendDescriptor(CacheProblem):
    """Problem of `rope_quantize_append`; for the other fields see `CacheProblem`.

    Attributes
    ----------
    heads : int
        Heads of the queries, a multiple of `kv_heads`.
    most_positions, rotated : int
        Rows and columns of `cos_sin`: half of the columns are cosines, the others sines. `rotated` elements of a head
        turn: an even number, at most `head_size`.
    rotary_layout : RotaryLayout
        Which elements turn together: ``half`` (i and i + rotated / 2) or ``interleaved`` (2 i and 2 i + 1).
    eps : float
        Added to the mean square by the norms, in f32; finite and not negative.
    has_q_norm, has_k_norm : bool
        Whether queries, and keys, are normalized first.
    has_k_offset : bool
        Whether `k_offset` is subtracted from the keys after they turned.
    input_element : ElementKind
        Element of q, k, v and the norm weights.
    """

    op: Literal["rope_quantize_append"] = "rope_quantize_append"
    heads: Extent
    most_positions: Extent
    rotated: Extent
    rotary_layout: RotaryLayout = RotaryLayout.HALF
    eps: Annotated[Real, Field(ge=0)] = 0.0
    has_q_norm: bool = False
    has_k_norm: bool = False
    has_k_offset: bool = False
    input_element: ElementKind
    element_field: ClassVar[str] = "input_element"
    result = RopeQuantizedQueries
    signature = (
        ArgumentSpec("q", Role.INPUT, "input_element", "tokens, q_columns"),
        ArgumentSpec("k", Role.INPUT, "input_element", "tokens, kv_columns"),
        ArgumentSpec("v", Role.INPUT, "input_element", "tokens, kv_columns"),
        ArgumentSpec("q_norm", Role.INPUT, "input_element", "head_size", when={"has_q_norm": (True,)}),
        ArgumentSpec("k_norm", Role.INPUT, "input_element", "head_size", when={"has_k_norm": (True,)}),
        ArgumentSpec("cos_sin", Role.INPUT, ElementKind.F32, "most_positions, rotated"),
        ArgumentSpec("k_offset", Role.INPUT, ElementKind.F32, "kv_heads, head_size", when={"has_k_offset": (True,)}),
        *TABLES,
        *cache_arguments(Role.STATE),
        ArgumentSpec("q_codes", Role.OUTPUT, ElementKind.S8, "tokens, heads, head_size"),
        ArgumentSpec("q_scale", Role.OUTPUT, ElementKind.F32, "tokens, heads"),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.heads < 1 or self.heads % self.kv_heads:
            self.refuse("heads", self.heads, f"be a multiple of kv_heads = {self.kv_heads}, and at least 1")
        if self.rotated % 2 or self.rotated > self.head_size:
            self.refuse("rotated", self.rotated, f"be even, and at most head_size = {self.head_size}")
        with np.errstate(over="ignore"):
            if not np.isfinite(np.float32(self.eps)):
                self.refuse("eps", self.eps, "be finite in f32")
        if self.tokens * (self.heads + 2 * self.kv_heads) >= 2**31:
            self.refuse("tokens", self.tokens, f"be less than {-(-(2**31) // (self.heads + 2 * self.kv_heads))}")
        return self

    @property
    def q_columns(self) -> int:
        """Columns of `q`."""
        return self.heads * self.head_size

    @property
    def kv_columns(self) -> int:
        """Columns of `k` and of `v`."""
        return self.kv_heads * self.head_size


@np.errstate(all="ignore")  # infinities and NaN are valid results here
def reference(problem: RopeQuantizeAppendDescriptor, **arrays: Any) -> None:
    """Write the cache at the slots of the new tokens, `q_codes` and `q_scale`."""
    live, positions, pages = _places(problem, arrays)
    arrays["q_codes"][:], arrays["q_scale"][:] = 0, 1
    step = max(1, BLOCK // problem.q_columns)
    for start in range(0, len(live), step):
        some = slice(start, start + step)
        rows, table = live[some], arrays["cos_sin"][positions[some]][:, None]
        q = _turned(problem, _normalized(problem, arrays["q"][rows], arrays.get("q_norm")), table)
        arrays["q_codes"][rows], arrays["q_scale"][rows] = _quantized(q)
        k = _turned(problem, _normalized(problem, arrays["k"][rows], arrays.get("k_norm")), table)
        if arrays.get("k_offset") is not None:
            k = k - arrays["k_offset"]
        v = _normalized(problem, arrays["v"][rows], None)
        page, slot, head = pages[some, None], positions[some, None] % PAGE, np.arange(problem.kv_heads)
        arrays["k_codes"][page, head, slot], arrays["k_scale"][page, head, slot] = _in_cache(k)
        codes, arrays["v_scale"][page, head, slot] = _in_cache(v)
        element = np.arange(problem.head_size)
        arrays["v_codes"][page[..., None], head[:, None], element, column_of(slot)[..., None]] = codes


def _places(problem: RopeQuantizeAppendDescriptor, arrays: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Return the rows that have a slot, their positions and their pages, once the tables are checked."""
    block_table, lengths, starts = (arrays[each.name].astype(np.int64) for each in TABLES)
    check_tables(problem, block_table, lengths, starts)
    new = np.diff(starts)
    subject = type(problem).__name__
    long = np.flatnonzero((lengths > problem.most_positions) & (new > 0))
    if len(long):
        rule = f"be at most most_positions = {problem.most_positions}, the rows of cos_sin"
        raise InvalidProblem(subject, f"lengths[{long[0]}]", str(lengths[long[0]]), rule)
    sequence = np.repeat(np.arange(problem.sequences), new)
    positions = np.arange(len(sequence)) - starts[sequence] + (lengths - new)[sequence]
    rows = np.flatnonzero(positions >= 0)
    sequence, positions = sequence[rows], positions[rows]
    pages = block_table[sequence, positions // PAGE] if len(rows) else positions
    slots = pages * PAGE + positions % PAGE
    _, first, same = np.unique(slots, return_index=True, return_inverse=True)
    twice = np.flatnonzero(first[same] != np.arange(len(slots)))
    if len(twice):
        one, other = first[same][twice[0]], twice[0]
        had = f"page {pages[one]} for new tokens of sequences {sequence[one]} and {sequence[other]}"
        raise InvalidProblem(subject, "block_table", had, "have pages of their own for blocks that new tokens are in")
    return rows, positions, pages


def _normalized(problem: RopeQuantizeAppendDescriptor, rows: Array, weight: Array | None) -> Array:
    """Return rows as f32 [rows, heads, head_size], normalized if there is a weight, and rounded to T."""
    d = problem.head_size
    heads: Array = rows.astype(np.float32).reshape(-1, d)
    if weight is not None:
        sums = norm.fold(lambda columns: np.square(heads[:, columns]), len(heads), d, np.dtype(np.float32))
        factor = np.float32(1) / np.sqrt(sums / np.float32(d) + np.float32(problem.eps))
        heads = heads * factor[:, None] * weight.astype(np.float32)
        heads = heads.astype(storage_dtype(problem.input_element)).astype(np.float32)
    return np.asarray(heads.reshape(len(rows), -1, d))


def _turned(problem: RopeQuantizeAppendDescriptor, x: Array, table: Array) -> Array:
    """Turn the pairs of heads [rows, heads, head_size] by `table`, [rows, 1, rotated]."""
    r, half = problem.rotated, problem.rotated // 2
    is_half = problem.rotary_layout is RotaryLayout.HALF
    first, second = (slice(half), slice(half, r)) if is_half else (slice(0, r, 2), slice(1, r, 2))
    a, b, c, s = x[..., first], x[..., second], table[..., :half], table[..., half:]
    turned = x.copy()
    turned[..., first] = a * c - b * s
    turned[..., second] = b * c + a * s
    return turned


def _quantized(x: Array) -> tuple[Array, Array]:
    """Return codes and scales of heads [rows, heads, head_size]."""
    scales, codes = affine.coded_rows(_CODES, CODE_BOUNDS, x.reshape(-1, x.shape[-1]), nan=np.inf)
    return codes.reshape(x.shape), scales.reshape(x.shape[:2])


def _in_cache(x: Array) -> tuple[Array, Array]:
    """Return codes and scales as the cache has them."""
    codes, scales = _quantized(x)
    scales[~codes.any(-1) & (scales == 1)] = 0  # a scale that is 1 by itself belongs to a code of 127
    return codes, scales


def draw(problem: RopeQuantizeAppendDescriptor, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """Draw inputs: the new tokens of a few sequences, in pages of any order, and a cache that holds anything."""
    p, element = problem, problem.input_element

    def data(*shape: int) -> Array:
        found: Array = floats(shape, element, rng)
        if values == "zero":
            found = np.zeros(shape)
        elif values != "normal":
            share = rng.choice([0, 0.01, 0.2], (*shape[:1], *(1,) * (len(shape) - 1)))
            tiny = rng.random(share.shape) < 0.2  # a row whose scale vanishes or is extreme
            found = np.where(tiny, found * float(finfo_of(element).smallest_subnormal), found)
            found = np.where(rng.random(shape) < share, rng.choice(specials(element), shape), found)
        return rounded(found, element)

    inputs: dict[str, Any] = {"q": data(p.tokens, p.q_columns)}
    inputs |= {name: data(p.tokens, p.kv_columns) for name in ("k", "v")}
    inputs |= {name: data(p.head_size) for name in ("q_norm", "k_norm") if getattr(p, f"has_{name}")}
    angles = rng.uniform(0, 7, (p.most_positions, p.rotated // 2))
    inputs["cos_sin"] = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    if p.has_k_offset:
        inputs["k_offset"] = rng.standard_normal((p.kv_heads, p.head_size)).astype(np.float32)
    inputs |= _drawn_tables(p, rng)
    for argument in cache_arguments(Role.STATE):
        shape = argument.of(p).shape
        codes = argument.element is ElementKind.S8
        inputs[argument.name] = rng.integers(-128, 128, shape, np.int8) if codes else np.full(shape, np.nan, np.float32)
    return inputs


def _drawn_tables(p: RopeQuantizeAppendDescriptor, rng: np.random.Generator) -> dict[str, Array]:
    """Draw tables: a number of new tokens for each sequence, and pages; nothing else in the table is a page.

    Some sequences begin with rows of padding.
    """
    table = rng.choice(np.array([-1, p.pages, 2**31 - 1, -(2**31)], np.int32), (p.sequences, p.most_blocks))
    lengths, starts = np.zeros(p.sequences, np.int32), np.zeros(p.sequences + 1, np.int32)
    free, most = list(rng.permutation(p.pages)), min(p.most_blocks * PAGE, p.most_positions)
    left = p.tokens - int(rng.integers(0, 3)) * (p.tokens > 2)
    for s in range(p.sequences):
        room = min(left, most, len(free) * PAGE)
        new = room if s == p.sequences - 1 else int(rng.integers(min(room, 2 * left // (p.sequences - s)) + 1))
        padded = new and rng.random() < 0.2
        length = int(rng.integers(new) if padded else rng.integers(new, most + 1)) if p.pages else 0
        first, end = max(length - new, 0) // PAGE, -(-length // PAGE)
        if new and end - first > len(free):  # whole pages have more room
            length, first, end = new, 0, -(-new // PAGE)
        left, lengths[s], starts[s + 1] = left - new, length, starts[s] + new
        for block in range(end):
            # What is only read may be shared; it is never looked at here.
            table[s, block] = free.pop() if block >= first and new else rng.integers(p.pages)
    return {"block_table": table, "lengths": lengths, "starts": starts}


def _cases() -> tuple[Case, ...]:
    """Return cases of every element: few and many tokens, every head size, switch, layout and part that turns."""
    plan = [
        # tokens, sequences, heads, kv_heads, head_size, rotated
        (4, 1, 2, 1, 32, 32),
        (5, 5, 4, 2, 128, 128),
        (7, 3, 8, 1, 64, 64),
        (90, 2, 2, 2, 128, 64),
        (150, 3, 3, 1, 32, 32),
        (40, 1, 6, 3, 64, 20),
        (33, 4, 1, 1, 32, 0),
        (70, 1, 2, 1, 128, 96),
        (1, 1, 40, 8, 128, 128),
        (0, 2, 4, 2, 64, 64),
        (3, 0, 4, 2, 64, 64),
    ]
    made = []
    for number, (size, element) in enumerate((size, element) for size in plan for element in ELEMENTS):
        tokens, sequences, heads, kv_heads, head_size, rotated = size
        turns = number * 5 + number // 3
        problem = RopeQuantizeAppendDescriptor(
            tokens=tokens,
            sequences=sequences,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            rotated=rotated,
            pages=tokens // PAGE + 2 * sequences + 1,
            most_blocks=tokens // PAGE + 2,
            most_positions=PAGE * (tokens // PAGE + 2) - 50,
            rotary_layout=tuple(RotaryLayout)[number // 3 % 2],
            eps=(1e-6, 0.0)[turns & 1],
            has_q_norm=bool(turns >> 1 & 1),
            has_k_norm=bool(turns >> 2 & 1) or number < len(ELEMENTS),
            has_k_offset=bool(turns & 1),
            input_element=element,
        )
        # The first case of each element is small and of normal values, as many checks of the verifier want it.
        values: Values = ("normal", "special", "infinite", "special", "zero")[max(number - len(ELEMENTS) + 1, 0) % 5]
        made.append(Case(problem, values))
    return tuple(made)


CASES = _cases()
SKUS = (
    *cuda_skus(
        RopeQuantizeAppendDescriptor,
        __name__,
        ELEMENTS,
        launch="skuda.kernels.attention.rope_quantize_append_launch:append",
        flags=lambda data, _: ("-fmad=false", f"-DSKUDA_INPUT={data}"),
        entry_point="rope_quantize_append_rows",
        summary="one read of every head",
    ),
    *numpy_skus(RopeQuantizeAppendDescriptor, __name__, ELEMENTS),
)
OP = Op(RopeQuantizeAppendDescriptor, reference, CASES, SKUS, source="Su et al., RoFormer, 2021", draw=draw)
