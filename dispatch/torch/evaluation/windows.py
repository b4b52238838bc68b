"""Windows of tokens, cut from a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skuda.registry.errors import InvalidProblem


def windows(tokenizer: Any, text: str, count: int, length: int, skip: int = 0, name: str = "text") -> list[Tensor]:
    """Return windows of a text, evenly spread, as ids of shape (1, `length`).

    Each begins with what the tokenizer puts before a text.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
    text : str
    count, length : int
        Number of windows, and tokens of each.
    skip : int
        Tokens to leave out at the beginning.
    name : str
        Name of the text, for errors.

    Raises
    ------
    InvalidProblem
        For a text that is too short.
    """
    before, ids = (tokenizer(part)["input_ids"] for part in ("", text))
    ids, size = ids[len(before) + skip :], length - len(before)
    step = len(ids) // count
    if step < size:
        had, rule = f"{name} with {len(ids)} tokens", f"have {count * size}, for {count} windows"
        raise InvalidProblem("windows", "text", had, rule)
    return [torch.tensor([[*before, *ids[at : at + size]]]) for at in range(0, count * step, step)]
