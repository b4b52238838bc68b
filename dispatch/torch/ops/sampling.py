"""Log-probabilities of tokens, with a gradient, and sampling: the same bits in any batch, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.registry.value import expect_integer, expect_real
from skuda.torch.ops.derivatives import refuse_tangent
from skuda.torch.ops.registered import TAGS
from skuda.torch.ops.registering import NAMESPACE, registering
from skuda.torch.ops.tensor_op import refuse_other

Number: TypeAlias = float | Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_TOKENS = (torch.int64, torch.int32)
_WIDE = (torch.int64, torch.uint32)
"""Dtypes with numbers that s32 does not have."""
_INTEGERS = (*_WIDE, torch.int32, torch.int16, torch.uint16, torch.int8, torch.uint8)
_DTYPES = {
    **dict.fromkeys(("seed", "sequence", "position"), torch.int64),
    **dict.fromkeys(("temperature", "top_p"), torch.float32),
    "top_k": torch.int32,
}
_S32, _S64, _F32 = (torch.iinfo(torch.int32).max, torch.iinfo(torch.int64), torch.finfo(torch.float32))
_LEAST = 2.0**-149
"""The least positive number of f32."""


def _gradients(
    logits: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    found: Tensor,
    entropy: Tensor,
    grad: Tensor,
    of_entropy: Tensor,
    *,
    of_temperature: bool,
) -> list[Tensor]:
    """Return the gradient of the logits and, if it is wanted, that of the temperature.

    With l the log-softmax of z = logits / T, and H the entropy, of a row: dl[t] / dT = -(l[t] + H) / T, and dH / dT is
    the variance of l over T. A log-probability that is NaN makes its row of the gradient NaN where it is used.
    """
    divisor = None if temperature is None else temperature[..., None]  # one for each row, or one for all
    z = logits.contiguous().float()
    logarithms = (z if divisor is None else z / divisor).log_softmax(-1)
    p = logarithms.exp()
    excess = logarithms.clamp(min=_F32.min) + entropy[:, None]
    del z, logarithms
    weighted = p * excess  # 0 for a logit of minus infinity
    unused = entropy.isnan() & (grad == 0) & (of_entropy == 0)
    grad = grad.masked_fill(found.isnan() & (grad != 0), torch.nan)
    results = []
    if temperature is not None and of_temperature:
        heat = of_entropy * (weighted * excess).sum(-1) - grad * (found.nan_to_num(0.0, neginf=_F32.min) + entropy)
        results.append((heat / temperature).masked_fill(unused, 0).sum_to_size(temperature.shape))
    del excess
    is_token = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
    slope = torch.where(is_token, grad[:, None], 0) - p * grad[:, None] - weighted * of_entropy[:, None]
    slope = slope if divisor is None else slope / divisor
    return [slope.masked_fill(unused[:, None], 0).to(logits.dtype), *results]


with registering("log_probs_backward") as _library:
    _library.define(
        "log_probs_backward(Tensor logits, Tensor tokens, Tensor? temperature, Tensor found, Tensor entropy, "
        "Tensor grad, Tensor of_entropy, *, bool of_temperature) -> Tensor[]",
        tags=TAGS,
    )
    for _key in ("CPU", "CUDA"):
        _library.impl("log_probs_backward", _gradients, _key)
    torch.library.register_fake(f"{NAMESPACE}::log_probs_backward", _gradients, lib=_library)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, tokens: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        divisor = None if temperature is None else temperature.expand(tokens.shape).contiguous()
        found, entropy = torch.ops.skuda.log_softmax_at.default(logits, tokens[:, None], divisor)
        return found[:, 0], entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # so that `jvp` sees which argument has a tangent
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # In compiled code torch would compute other bits, elsewhere it can differentiate the formula again.
        run: Any = torch.ops.skuda.log_probs_backward.default if torch.compiler.is_compiling() else _gradients
        of_temperature = ctx.needs_input_grad[2]
        *saved, entropy = ctx.saved_tensors  # once, as checkpointing demands
        given = (torch.zeros_like(entropy) if grad is None else grad for grad in grads)
        slope, *heat = run(*saved, entropy, *given, of_temperature=of_temperature)
        return slope, None, heat[0] if of_temperature else None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        count = info.batch_size
        moved: list[Any] = [
            each if each is None else each.expand(count, *each.shape) if axis is None else each.movedim(axis, 0)
            for each, axis in zip(given, in_dims, strict=True)
        ]
        logits, tokens, temperature = moved
        if temperature is not None:
            temperature = temperature.view(count, *temperature.shape[1:] or (1,)).expand(tokens.shape).flatten()
        found = _apply(logits.flatten(0, 1), tokens.flatten(), temperature)
        return tuple(each.view(tokens.shape) for each in found), (0, 0)


class _Eager(_LogProbs):
    """The function where torch does not compile: its compilers take none with a `jvp`."""

    @staticmethod
    def jvp(_: Any, *tangents: Tensor | None) -> NoReturn:
        names = zip(("logits", "tokens", "temperature"), tangents, strict=True)
        refuse_tangent("log_probs", next(name for name, tangent in names if tangent is not None))


def _apply(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    function = _LogProbs if torch.compiler.is_compiling() else _Eager
    found: tuple[Tensor, Tensor] = function.apply(*tensors)
    return found


def log_probs(logits: Tensor, tokens: Tensor, temperature: Number | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a token for each row of logits, and the entropy of the row.

    The values are those of the op `log_softmax_at`. Torch computes the gradients of the logits and of the temperature,
    with the same bits in compiled code. A row with a result that is NaN has a gradient of NaN, or 0 where the incoming
    gradient is 0. So a token that the loss masks may be out of range, such as -100; the entropy of its row still has a
    gradient.

    `torch.vmap`, `torch.func` and second derivatives work, these outside of compiled code only. There are no
    forward-mode derivatives.

    Parameters
    ----------
    logits : tensor of shape (..., V), f16, bf16 or f32
    tokens : tensor of shape (...), s64 or s32
        Ids below V.
    temperature : float or tensor of shape (...) or (), f16, bf16 or f32, optional
        What logits are divided by; positive. A number is rounded to f32.

    Returns
    -------
    tensor, tensor
        Of shape (...), f32, in nats. NaN for a row with a NaN or an infinity, or whose temperature in a tensor is not
        positive and finite. The log-probability of an id out of range is NaN.

    Raises
    ------
    InvalidProblem
        For another shape, dtype or device, a number out of range, and a tensor with a tangent.
    """
    leading, rows = _rows("log_probs", logits)
    refuse_other("log_probs", "tokens", tokens)
    if tokens.shape != leading:
        raise InvalidProblem("log_probs", "tokens", f"shape {list(tokens.shape)}", f"have shape {list(leading)}")
    _check("log_probs", "tokens", tokens, logits, _TOKENS)
    divisor = None if temperature is None else _rowwise("log_probs", "temperature", temperature, logits)
    found, entropy = _apply(rows, tokens.reshape(len(rows)), divisor)
    return found.view(leading), entropy.view(leading)


def sample(
    logits: Tensor,
    *,
    seed: Number,
    sequence: Number,
    position: Number,
    temperature: Number = 1.0,
    top_k: Number | None = None,
    top_p: Number | None = None,
) -> Tensor:
    """Draw a token for each row of logits. What is drawn depends on the row and its own numbers alone.

    The values are those of the op `sample`, which describes how it draws.

    Parameters
    ----------
    logits : tensor of shape (..., V), f16, bf16 or f32
    seed, sequence, position : int or tensor of shape (...) or (), of integers that s64 has
        The key of the random number: equal keys draw alike. Number the sequences, and use a token's position in it.
    temperature : float or tensor of shape (...) or (), f16, bf16 or f32
        What logits are divided by; 0 takes the largest logit, the lowest id among equals. A number is rounded to f32.
    top_k : int or tensor of shape (...) or (), of integers, optional
        Only so many of the largest. All for one below 1, or of at least V, however large.
    top_p : float or tensor of shape (...) or (), f16, bf16 or f32, optional
        Only the largest that together have this probability; a number from 0 to 1, rounded to f32.

    Returns
    -------
    tensor of shape (...), s64
        Ids; -1 for a row without a distribution, such as one with a NaN. For what a tensor has outside of these ranges,
        see the op.

    Raises
    ------
    InvalidProblem
        For another shape, dtype or device, a number out of range, and a parameter that requires grad.
    """
    leading, rows = _rows("sample", logits)
    named = {"temperature": temperature, "seed": seed, "sequence": sequence, "position": position}
    named |= {name: each for name, each in (("top_k", top_k), ("top_p", top_p)) if each is not None}
    given = {
        name: _rowwise("sample", name, each, logits).expand(len(rows)).contiguous() for name, each in named.items()
    }
    found: Tensor = torch.ops.skuda.sample.default(rows.detach(), **given)
    return found.view(leading)


def as_top_k(top_k: Tensor) -> Tensor:
    """Return a top-k of integers as s32. What s32 does not have means all, as its largest number and 0 do."""
    return (top_k.long().clamp(0, _S32) if top_k.dtype in _WIDE else top_k).to(torch.int32)


def _rows(subject: str, logits: Tensor) -> tuple[torch.Size, Tensor]:
    """Return the leading axes of logits, and the logits as rows."""
    refuse_other(subject, "logits", logits)
    if not logits.dim():
        raise InvalidProblem(subject, "logits", "shape []", "have a last axis: the tokens of the vocabulary")
    _check(subject, "logits", logits, logits, _FLOATS)
    leading = logits.shape[:-1]
    return leading, logits.reshape(leading.numel(), logits.shape[-1])


def _rowwise(subject: str, name: str, given: Number, logits: Tensor) -> Tensor:
    """Return a number for each row of the logits, or a tensor with one for all."""
    leading, dtype = logits.shape[:-1], _DTYPES[name]
    if not isinstance(given, Tensor):
        return torch.full((leading.numel(),), _number(subject, name, given), dtype=dtype, device=logits.device)
    refuse_other(subject, name, given)
    if given.shape not in (leading, ()):
        rule = f"be a number, or have shape {list(leading)} or []"
        raise InvalidProblem(subject, name, f"shape {list(given.shape)}", rule)
    _check(subject, name, given, logits, _FLOATS if dtype.is_floating_point else _INTEGERS)
    found = as_top_k(given) if name == "top_k" else given.to(dtype)
    return found.reshape(leading.numel()) if given.shape == leading else found


def _number(subject: str, name: str, given: float) -> float:
    """Return a number that is given for all rows."""
    if name == "top_p":
        return expect_real(subject, name, given, 0, 1)
    if name != "temperature":
        whole = expect_integer(subject, name, given, _S64.min, _S64.max)
        return max(0, min(whole, _S32)) if name == "top_k" else whole
    real = expect_real(subject, name, given, 0, _F32.max)
    if real < _LEAST and (real or subject != "sample"):
        rule = f"be {'0, or ' if subject == 'sample' else ''}at least {_LEAST:g}, the least positive number of f32"
        raise InvalidProblem(subject, name, shown(given), rule)
    return real


def _check(subject: str, name: str, given: Tensor, logits: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise `InvalidProblem` for another dtype, or another device than that of the logits."""
    if given.dtype not in dtypes:
        names = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
        had = f"a tensor of {str(given.dtype).removeprefix('torch.')}"
        raise InvalidProblem(subject, name, had, f"be of one of {names}: convert it, which may change its values")
    if given.device != logits.device:
        raise InvalidProblem(subject, name, f"on {given.device}", f"be on {logits.device}, as the logits")
