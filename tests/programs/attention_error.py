"""Measure the error of int8 attention, and print it as a table.

    python tests/programs/attention_error.py
    python tests/programs/attention_error.py --model FOLDER --text FILE --from 600 4000

The first compares the op with attention in f64, for 64 queries of 128 elements. The error is the norm of what differs,
over the norm of the result. The second compares a causal model of transformers in f32, with int8 attention alone, with
itself, on windows of 512 tokens of a text. Divergences are those of the next token's distribution, in nats.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import skuda
from skuda.kernels.attention.cache import PAGE, column_of
from skuda.tools.frame.view import markdown_table

F64 = npt.NDArray[np.float64]
KEYS = (128, 2048, 16384)
_WINDOW = 512


def softmax(scores: F64) -> F64:
    """Return the weights of keys, for scores of shape (queries, keys)."""
    e = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def codes(x: F64) -> tuple[Any, Any]:
    """Return int8 codes of rows, and their scales."""
    scale = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / scale).astype(np.int8), scale.astype(np.float32)


def attended(q: F64, k: F64, v: F64, scale: float) -> tuple[F64, F64, F64]:
    """Return int8 attention of one head, the same codes with an exact softmax, and with values that are all positive.

    Each has the shape (queries, elements).
    """
    (q_codes, q_scale), (k_codes, k_scale), (v_codes, v_scale) = (codes(x) for x in (q, k, v))
    pages = len(k) // PAGE
    order = np.argsort(column_of(np.arange(PAGE)))
    found = skuda.ops.attention(
        q_codes=q_codes[:, None],
        q_scale=q_scale,
        k_codes=k_codes.reshape(pages, 1, PAGE, -1),
        k_scale=k_scale.reshape(pages, 1, PAGE),
        v_codes=np.ascontiguousarray(v_codes.reshape(pages, 1, PAGE, -1).swapaxes(2, 3)[..., order]),
        v_scale=v_scale.reshape(pages, 1, PAGE),
        block_table=np.arange(pages, dtype=np.int32)[None],
        lengths=np.array([len(k)], np.int32),
        starts=np.array([0, len(q)], np.int32),
        scale=scale,
        causal=False,
        output_element="f32",
    ).output[:, 0]
    q, k, v = (c * s.astype(np.float64) for c, s in ((q_codes, q_scale), (k_codes, k_scale), (v_codes, v_scale)))
    weights = softmax(scale * q @ k.T)
    return found.astype(np.float64), weights @ v, weights @ np.abs(v)


def drawn(keys: int, size: int = 128, seed: int | None = None) -> dict[str, tuple[F64, F64, F64, float]]:
    """Return queries, keys, values and a scale of every kind, by name."""
    first = keys if seed is None else seed
    q, k, v = (np.random.default_rng(first + i).standard_normal((n, size)) for i, n in enumerate((64, keys, keys)))
    far, sink, usual = k.copy(), k.copy(), 1 / math.sqrt(size)
    far[:, 3] += 8
    far[:, 17] *= 6
    sink[0] = 60 * (np.arange(size) == 0)
    leaning = np.concatenate((np.abs(q[:, :1]) + 2, q[:, 1:]), 1)
    heavy = v * np.exp(np.random.default_rng(first + 3).standard_normal((keys, 1)))
    return {
        "normal": (q, k, v, usual),
        "scores three times as large": (q, k, v, 3 * usual),
        "two elements of keys far from others": (q, far, v, usual),
        "values of very different size": (q, k, heavy, usual),
        "a first key that takes nearly all": (leaning, sink, v, usual),
    }


def errors(keys: int) -> dict[str, tuple[float, float]]:
    """Return the errors of int8 attention, and of its codes alone, by kind of input."""
    found = {}
    for kind, (q, k, v, scale) in drawn(keys).items():
        want = softmax(scale * q @ k.T) @ v
        got = (np.linalg.norm(each - want) / np.linalg.norm(want) for each in attended(q, k, v, scale)[:2])
        found[kind] = tuple(map(float, got))
    return found  # type: ignore[return-value]  two of each


def of_small_weights(size: int = 32) -> float:
    """Return the largest error, over the largest value, where 127 keys have little weight each.

    The weight is 1/230 to 1/530 of that of the first key of their block, whose value is the opposite of theirs.
    """
    worst = 0.0
    for ratio in range(230, 530, 3):
        q, k = np.zeros((1, size)), np.zeros((PAGE, size))
        q[0, 0] = k[0, 0] = 1
        k[:, 1] = 1  # so that no row is zeros
        v = np.ones((PAGE, size))
        v[0] = -1
        scale = math.log(ratio)
        got, want, _ = attended(q, k, v, scale)
        worst = max(worst, float(np.abs(got - want).max()))
    return worst


def table() -> str:
    """Return the errors as Markdown."""
    found = {keys: errors(keys) for keys in KEYS}
    rows = [(kind, *("{:.4f} ({:.4f})".format(*found[keys][kind]) for keys in KEYS)) for kind in found[KEYS[0]]]
    table = markdown_table(("queries, keys and values", *(f"{keys:,} keys" for keys in KEYS)), rows)
    return f"{table}\nLargest error with many keys of little weight: {of_small_weights():.4f} of the largest value.\n"


def of_model(folder: Path, text: str, starts: Sequence[int]) -> dict[str, float]:
    """Return perplexities of a model without and with int8 attention, divergence, and share of equal choices."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skuda.torch.attention.interface import NAME

    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    windows = [ids[None, start : start + _WINDOW] for start in starts]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for name in ("sdpa", NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append([model(window, use_cache=False).logits[0, :-1].log_softmax(-1) for window in windows])
    floats, ints = (torch.cat(each) for each in found)
    targets = torch.cat([window[0, 1:] for window in windows])[:, None]
    perplexities = (float((-each.gather(1, targets)).mean().exp()) for each in (floats, ints))
    divergence = float((floats.exp() * (floats - ints)).sum(-1).mean())
    same = float((floats.argmax(-1) == ints.argmax(-1)).float().mean())
    names = ("perplexity in f32", "perplexity", "divergence", "same first choice")
    return dict(zip(names, (*perplexities, divergence, same), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="a checkpoint of a causal model")
    parser.add_argument("--text", metavar="FILE", type=Path)
    parser.add_argument("--from", metavar="TOKEN", dest="starts", type=int, nargs="+", default=[0])
    given = parser.parse_args(arguments)
    if given.model is None:
        sys.stdout.write(table())
        return
    for name, value in of_model(given.model, given.text.read_text(encoding="utf-8"), given.starts).items():
        sys.stdout.write(f"{name}: {value:.4f}\n")


if __name__ == "__main__":
    main()
