"""The rivals of the ops on a paged cache: torch's attention in bf16, and a copy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from skuda.kernels.attention.attention import AttentionDescriptor
from skuda.kernels.attention.cache import PAGE, CacheProblem, column_of
from skuda.kernels.attention.rope_quantize_append import RopeQuantizeAppendDescriptor
from skuda.tools.bench.formulas import Inputs, torch_module
from skuda.tools.bench.record import least_work
from skuda.tools.bench.rival import Alternatives, Call, Rival


def cache_rivals(problem: CacheProblem, compiled: Callable[..., Call]) -> tuple[Rival, ...]:
    """Return the rivals of an op on a paged cache; `compiled` compiles a function for some tensors."""
    if isinstance(problem, RopeQuantizeAppendDescriptor):
        return (Rival("copy of its bytes", "torch's copy that reads and writes as many bytes", _copy),)
    what = "in bf16 over contiguous keys and values, nothing quantized"
    named = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
    flex = Rival("flex", f"FlexAttention by torch.compile, {what}", partial(_flex, compiled))
    return (*(Rival(name, f"torch's {own} {what}", partial(_by, own)) for name, own in named.items()), flex)


def _copy(problem: Any, inputs: Inputs) -> Call:
    torch = torch_module()
    source = torch.ones(least_work(problem)[0] // 2, dtype=torch.uint8, device=inputs["q"].device)
    return partial(torch.empty_like(source).copy_, source)


def operands(problem: AttentionDescriptor, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Return q, k and v in bf16, [sequences, heads, tokens, head_size]; raise for what torch has no mask for."""
    torch, keys = torch_module(), problem.most_blocks * PAGE
    new = problem.tokens // problem.sequences
    if not problem.causal or problem.window is not None or new not in (1, keys):
        raise NotImplementedError("torch's attention has a mask for one new token, or for all, of every sequence")

    def real(codes: str, scale: str) -> Any:
        return inputs[codes].to(torch.bfloat16) * inputs[scale][..., None].to(torch.bfloat16)

    def gathered(pages: Any) -> Any:
        """Return pages [pages, kv_heads, 128, head_size] in the order of the table."""
        split = pages[inputs["block_table"].reshape(-1).long()].unflatten(0, (problem.sequences, -1))
        shape = (problem.sequences, problem.kv_heads, keys, problem.head_size)
        return split.transpose(1, 2).reshape(shape).contiguous()

    q = real("q_codes", "q_scale").unflatten(0, (problem.sequences, new)).transpose(1, 2).contiguous()
    k = gathered(real("k_codes", "k_scale"))
    columns = column_of(torch.arange(PAGE, device=q.device))
    v = inputs["v_codes"][..., columns].transpose(2, 3).to(torch.bfloat16)
    return q, k, gathered(v * inputs["v_scale"][..., None].to(torch.bfloat16))


def _by(name: str, problem: AttentionDescriptor, inputs: Inputs) -> Alternatives:
    """Return torch's attention by one of its backends: heads share keys, or are rows of one query where they can be."""
    torch = torch_module()
    attention, (q, k, v) = torch.nn.functional.scaled_dot_product_attention, operands(problem, inputs)
    sdpa_kernel, backend = torch.nn.attention.sdpa_kernel, getattr(torch.nn.attention.SDPBackend, name)

    def call(query: Any, *, causal: bool, **how: Any) -> Any:
        with sdpa_kernel(backend):
            return attention(query, k, v, is_causal=causal, scale=problem.scale, **how)

    one = q.shape[2] == 1
    calls = {"shared heads": partial(call, q, causal=not one, enable_gqa=problem.group > 1)}
    if one:
        calls["heads as rows"] = partial(call, q.reshape(*k.shape[:2], problem.group, -1), causal=False)
    return Alternatives(calls, ())


def _flex(compiled: Callable[..., Call], problem: AttentionDescriptor, inputs: Inputs) -> Call:
    q, k, v = operands(problem, inputs)
    flex, rows, keys = importlib.import_module("torch.nn.attention.flex_attention"), q.shape[2], k.shape[2]
    mask = None
    if rows > 1:
        mask = flex.create_block_mask(lambda _b, _h, row, key: row >= key, None, None, rows, keys, device=q.device)
    how = {"block_mask": mask, "scale": problem.scale, "enable_gqa": problem.group > 1}
    return compiled(partial(flex.flex_attention, **how), q, k, v)
