"""Log-probabilities of tokens, with a gradient, and sampling: the same bits in any batch, on a CPU and on a GPU."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skuda.registry.errors import InvalidProblem

Number: TypeAlias = float | Tensor


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, tokens: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        found, entropy = torch.ops.skuda.log_softmax_at.default(logits, tokens[:, None], temperature)
        return found[:, 0], entropy

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, entropy = output
        ctx.save_for_backward(*inputs, entropy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, temperature, entropy = ctx.saved_tensors
        z = logits.float() if temperature is None else logits.float() / temperature[:, None]
        logarithms = z.log_softmax(-1)
        p = logarithms.exp()
        slope = -p * grad[:, None]
        slope.scatter_add_(1, tokens[:, None].long(), grad[:, None])
        slope -= p * (logarithms.clamp(min=torch.finfo(z.dtype).min) + entropy[:, None]) * of_entropy[:, None]
        return (slope if temperature is None else slope / temperature[:, None]).to(logits.dtype), None, None


def log_probs(logits: Tensor, tokens: Tensor, temperature: Number | None = None) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a token for each row of logits, and the entropy of the row.

    The values are those of the op `log_softmax_at`. The gradient of the logits is computed by torch.

    Parameters
    ----------
    logits : tensor of shape (..., V), f16, bf16 or f32
    tokens : tensor of shape (...), s64 or s32
        Ids below V.
    temperature : float or tensor of shape (...), optional
        What logits are divided by; positive.

    Returns
    -------
    tensor, tensor
        Of shape (...), f32, in nats. NaN for a row with a NaN or an infinity, and for an id out of range.

    Raises
    ------
    InvalidProblem
        For another shape or dtype.
    """
    leading, rows = logits.shape[:-1], logits.reshape(-1, logits.shape[-1])
    if tokens.shape != leading:
        raise InvalidProblem("log_probs", "tokens", f"shape {list(tokens.shape)}", f"have shape {list(leading)}")
    divisor = None if temperature is None else _of_rows("log_probs", "temperature", temperature, logits, torch.float32)
    found, entropy = _LogProbs.apply(rows, tokens.reshape(-1), divisor)
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
    seed, sequence, position : int or tensor of shape (...), s64
        The key of the random number: equal keys draw alike. Number the sequences, and use a token's position in it.
    temperature : float or tensor of shape (...)
        What logits are divided by; 0 takes the largest logit, the lowest id among equals.
    top_k : int or tensor of shape (...), optional
        Only so many of the largest; 0 means all.
    top_p : float or tensor of shape (...), optional
        Only the largest that together have this probability.

    Returns
    -------
    tensor of shape (...), s64
        Ids; -1 for a row without a distribution, such as one with a NaN.

    Raises
    ------
    InvalidProblem
        For another shape or dtype.
    """
    named: dict[str, tuple[Number | None, torch.dtype]] = {
        "temperature": (temperature, torch.float32),
        "seed": (seed, torch.int64),
        "sequence": (sequence, torch.int64),
        "position": (position, torch.int64),
        "top_k": (top_k, torch.int32),
        "top_p": (top_p, torch.float32),
    }
    given = (None if each is None else _of_rows("sample", n, each, logits, kind) for n, (each, kind) in named.items())
    found: Tensor = torch.ops.skuda.sample.default(logits.detach().reshape(-1, logits.shape[-1]), *given)
    return found.view(logits.shape[:-1])


def _of_rows(subject: str, name: str, given: Number, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one number per row of the logits."""
    leading = logits.shape[:-1]
    if not isinstance(given, Tensor):
        return torch.full((leading.numel(),), given, dtype=dtype, device=logits.device)
    if given.shape != leading:
        had = f"shape {list(given.shape)}"
        raise InvalidProblem(subject, name, had, f"be a number, or have shape {list(leading)}")
    return given.to(dtype).reshape(-1)
