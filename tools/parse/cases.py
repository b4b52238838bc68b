"""The cases of ``skuda bench`` and ``skuda lock``: problems by op, shape and element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skuda.kernels.attention.cache import PAGE, CacheProblem
from skuda.kernels.linear.problem import LinearProblem
from skuda.kernels.linear.rescale import RescaleDescriptor
from skuda.kernels.quantize.granularity import AffineProblem
from skuda.kernels.sampling.sample import SampleDescriptor
from skuda.kernels.sampling.weights import LogitsProblem
from skuda.registry.descriptor import Descriptor
from skuda.registry.elements import FLOATS, ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.registry import Registry
from skuda.tools.output import chosen, words
from skuda.tools.parse.shapes import ROWS, Shape, random_products

_F16, _BF16, _F32, _F64 = ElementKind.F16, ElementKind.BF16, ElementKind.F32, ElementKind.F64
_S32 = ElementKind.S32

GROUP_SIZE = 128
"""Elements that share a scale in the per-group cases."""

_Cases = tuple[tuple[tuple[Shape, ...], tuple[ElementKind, ...]], ...]
"""Shapes, each to be measured in each of some elements."""

_TOKENS = ((1, 4096), (16, 4096), (256, 4096), (4096, 4096), (4096, 14336), (16384, 8192), (65536, 8192))
_NORMS = ((1, 4096), (16, 4096), (64, 8192), (4096, 4096), (16384, 8192))
_GATED = ((1, 14336), (16, 14336), (64, 14336), (4096, 4096), (4096, 14336), (16384, 8192))
_PARTS, _GATED_PARTS = ((16, 8192), (2048, 8192)), ((16, 14336), (2048, 14336))
_SQUARES = tuple((m, 4096, 4096) for m in ROWS)
_PRODUCTS = (
    *((m, 4096, 4096) for m in (1, 16, 64, 128, 256, 512, 1024, 4096)),
    *((4096, 6144, 4096), (4096, 14336, 4096), (4096, 4096, 14336), (8192, 8192, 8192)),
    *((m, 28672, 8192) for m in (1, 16, 64, 128, 2048)),
    *((2048, 8192, 28672), (384, 384, 384), (4096, 384, 1536)),
)
_DECODE = tuple((sequences, 1, keys, 128) for sequences in (1, 16, 64) for keys in (1024, 8192, 32768))
_PREFILL = tuple((1, keys, keys, 128) for keys in (2048, 8192, 16384))
_APPENDED = ((64, 1, 1024, 128), (1, 128, 1024, 128), (1, 2048, 2048, 128))
_LOGITS = tuple((rows, words) for words in (128256, 151936) for rows in (1, 16, 64, 256))
"""Rows, and the vocabularies of Llama 3 and of Qwen."""
_WIDE: _Cases = ((((16384, 8192),), (_BF16, _F32)), (((8192, 8192),), (_F64,)))
_DEFAULTS: dict[str, _Cases] = {
    "attention": (((*_DECODE, *_PREFILL), (_BF16,)),),
    "rope_quantize_append": ((_APPENDED, (_BF16,)),),
    "dynamic_range": ((_TOKENS, (_BF16, _F16)),),
    **dict.fromkeys(("argmax", "log_softmax_at", "sample"), ((_LOGITS, (_F32,)),)),
    "fake_quantize": ((((1024, 1024), (4096, 4096)), (_F32,)), *_WIDE),
    "scaled_linear": ((_SQUARES, (_BF16,)), (_SQUARES[-1:], (_S32,))),
    **dict.fromkeys(("quantized_linear", "smoothquant_linear"), ((_PRODUCTS, (_BF16,)),)),
    **dict.fromkeys(("amax", "amax_quantize", "rescale"), ((_PARTS, (_BF16,)),)),
    **dict.fromkeys(("gelu_mul_amax", "silu_mul_amax"), ((_GATED_PARTS, (_BF16,)),)),
    **dict.fromkeys(("gelu_mul_quantize", "silu_mul_quantize"), ((_GATED, (_BF16,)),)),
    **dict.fromkeys(("layer_norm_quantize", "rms_norm_quantize"), ((_NORMS, (_BF16,)),)),
}
"""Cases by op; `_WIDE` for all others, in the elements that they have, or in all they have."""


@dataclass(frozen=True)
class BenchCase:
    """One problem to measure.

    Its shape is rows and columns of the data; or M, N and K of a product; or, on a paged cache, sequences, new tokens
    and keys of each, and the size of a head. Its element is that of the data, or of a product's activation or output.
    """

    problem: Descriptor
    shape: Shape
    element: ElementKind

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.problem.op_name()

    @property
    def label(self) -> str:
        """Op, shape and element; for samples of fewer tokens than all, that too."""
        more = ", top-k and top-p" if getattr(self.problem, "has_top_k", False) else ""
        return f"{self.op}{more} {'x'.join(map(str, self.shape))} {self.element}"


def groups(registry: Registry) -> dict[str, tuple[str, ...]]:
    """Return the ops of a registry by the names that stand for several of them; ``all`` are those that are measured."""

    def of(*kinds: type[Descriptor]) -> tuple[str, ...]:
        return tuple(sorted(op.name for op in registry.ops.values() if issubclass(op.descriptor, kinds)))

    found = {"quantize": of(AffineProblem, RescaleDescriptor), "linear": of(LinearProblem)}
    found |= {"cache": of(CacheProblem), "logits": of(LogitsProblem)}
    return found | {"all": sum(found.values(), ())}


def select_cases(
    registry: Registry,
    names: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    elements: Sequence[str] = (),
    *,
    command: str = "bench",
) -> tuple[BenchCase, ...]:
    """Return the cases to measure.

    `names` are ops and groups of ops; empty for all. `shapes` and `elements` replace the ops' defaults; an op takes the
    shapes that have as many sizes as its problem. Raise `InvalidProblem` for an unknown word, and for a shape that fits
    none of the ops.
    """
    ops = select_ops(registry, names, command=command)
    kinds = tuple(map(ElementKind, chosen(command, "--element", elements, FLOATS)))
    ranks = {rank_of(registry.ops[op]) for op in ops}
    for shape in shapes:
        if len(shape) not in ranks:
            forms = words(_form(rank) for rank in sorted(ranks))
            raise InvalidProblem(command, "--shapes", "x".join(map(str, shape)), f"be {forms} for {words(ops)}")
    return tuple(case for op in ops for case in _cases(registry, registry.ops[op], shapes, kinds))


def select_ops(registry: Registry, names: Sequence[str] = (), *, command: str = "bench") -> tuple[str, ...]:
    """Return the ops that names stand for, each once; see `select_cases`."""
    known = groups(registry)
    kind = "an op that can be measured, or a group"
    names = chosen(command, "OPS", names, (*known, *known["all"]), kind=kind) or ("all",)
    return tuple(dict.fromkeys(op for name in names for op in known.get(name, (name,))))


def random_shapes(
    registry: Registry, names: Sequence[str], count: int | None, seed: int, *, command: str = "bench"
) -> tuple[Shape, ...]:
    """Return the shapes of ``--random COUNT``; raise `InvalidProblem` if none of the named ops is a product."""
    if count is None:
        return ()
    ops = select_ops(registry, names, command=command)
    if 3 not in {rank_of(registry.ops[op]) for op in ops}:
        raise InvalidProblem(command, "--random", words(ops), "stand beside a product, such as linear")
    return random_products(count, seed)


def rank_of(op: Op) -> int:
    """Return the number of sizes in a shape of an op: 3 for a product, 4 on a paged cache, else 2."""
    return 3 if issubclass(op.descriptor, LinearProblem) else 4 if issubclass(op.descriptor, CacheProblem) else 2


def _form(rank: int) -> str:
    forms = {3: "MxNxK (rows, output channels, inner size)", 4: "SEQUENCESxNEWxKEYSxHEAD_SIZE"}
    return forms.get(rank, "ROWSxCOLUMNS")


def _cases(
    registry: Registry, op: Op, shapes: Sequence[Shape], elements: Sequence[ElementKind]
) -> tuple[BenchCase, ...]:
    rows = _DEFAULTS.get(op.name, _WIDE)
    fitting = [shape for shape in shapes if len(shape) == rank_of(op)]
    served = dict.fromkeys(sku.element for sku in registry.skus_of(op.name))
    usual = dict.fromkeys(kind for _, kinds in rows for kind in kinds)
    pairs: dict[tuple[Shape, ElementKind], None] = {}
    for kind in elements or ([kind for kind in usual if kind in served] or served):
        # An element without default shapes is measured at the default shapes of all other elements.
        own = [mine for mine, kinds in rows if kind in kinds] or [mine for mine, _ in rows]
        pairs |= dict.fromkeys((shape, kind) for shape in (fitting if shapes else sum(own, ())) if kind in served)
    cases = [BenchCase(problem_of(op.descriptor, shape, kind), shape, kind) for shape, kind in pairs]
    if op.descriptor is SampleDescriptor:
        some = {"has_top_k": True, "has_top_p": True}
        cases += [replace(case, problem=case.problem.model_copy(update=some)) for case in cases]
    return tuple(cases)


def problem_of(descriptor: type[Descriptor], shape: Shape, element: ElementKind) -> Descriptor:
    """Return an op's problem of a shape and an element, with s8 codes, symmetric if the op supports it.

    Per channel, the channels are the columns; per group, `GROUP_SIZE` elements share a scale; a dynamic range is per
    token. A norm adds a residual, and has a weight and a bias. The shape of a gated activation is that of its output,
    and that of a rescale too, of sums over as many products as it has columns. Logits have one token a row to look up,
    and samples are of all tokens. On a paged cache, 32 heads share 8 of
    keys, and the keys of a sequence fill its pages; the last ones are its new tokens.
    Raise `InvalidProblem` for a shape that the op refuses, such as columns that are not whole groups.
    """
    known = descriptor.model_fields
    if issubclass(descriptor, CacheProblem):
        return _on_a_cache(descriptor, shape, element)
    symmetric = issubclass(descriptor, LinearProblem) or not known.keys().isdisjoint({"scope", "scaling"})
    fields: dict[str, Any] = {"q_min": -127 if symmetric else -128, "q_max": 127, "act_scale": 0.0131}
    fields[descriptor.element_field] = element
    if descriptor.aux_field:
        fields[descriptor.aux_field] = ElementKind.S8
    if issubclass(descriptor, LinearProblem):
        fields |= zip(("m", "c_out" if "c_out" in known else "n", "k"), shape, strict=True)
    else:
        rows, columns = shape
        fields |= {"numel": rows * columns, "shape": shape, "n": rows, "d": columns}
        fields |= {"outer_size": rows, "axis_size": columns, "v": columns, "t": 1}
        fields |= {"m": rows, "n": columns, "k": columns} if "m" in known else {}
        fields |= {"eps": 1e-6, "has_residual": True, "has_weight": True, "has_bias": True}
        fields |= {"axis": 1} if "shape" in known else {}
        fields |= {"group_size": GROUP_SIZE} if "axis_size" in known else {}
    return descriptor(**{name: value for name, value in fields.items() if name in known})


def _on_a_cache(descriptor: type[CacheProblem], shape: Shape, element: ElementKind) -> Descriptor:
    sequences, new, keys, size = shape
    if keys % PAGE or new > keys:
        rule = f"be a multiple of {PAGE}, and at least the new tokens, {new}"
        raise InvalidProblem(descriptor.__name__, "keys", str(keys), rule)
    blocks = keys // PAGE
    fields: dict[str, Any] = {"tokens": sequences * new, "sequences": sequences, "head_size": size}
    fields |= {"heads": 32, "kv_heads": 8, "pages": sequences * blocks, "most_blocks": blocks}
    fields |= {"scale": size**-0.5, "rotated": size, "most_positions": keys, descriptor.element_field: element}
    return descriptor(**{name: value for name, value in fields.items() if name in descriptor.model_fields})
