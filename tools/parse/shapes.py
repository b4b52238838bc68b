"""Shapes for ``skuda bench`` and ``skuda tune``: typed, from a file, of a well-known model, or drawn from a seed.

The models' sizes are those of the published ``config.json`` files (``hidden_size``, ``intermediate_size``,
``num_attention_heads``, ``num_key_value_heads``) of meta-llama/Meta-Llama-3-8B, meta-llama/Meta-Llama-3-70B and
sentence-transformers/all-MiniLM-L6-v2. Embeddings and the output head are left out, because they are not quantized.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from skuda.registry.errors import InvalidProblem
from skuda.tools.files import read_text
from skuda.tools.output import words

Shape = tuple[int, ...]

_SIZE = re.compile(r"0*[1-9][0-9]{0,17}")
_LARGEST = 1 << 42
"""Multiplications of the largest product that is drawn: some 6 ms on an H200."""

ROWS = (1, 16, 128, 1024, 4096)
"""Default numbers of rows (tokens) for the shapes of a model."""


MODELS = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "minilm": ((384, 384), (1536, 384), (384, 1536)),
}
"""Models by the names that ``--shapes`` takes: output channels and inner size of the linear layers of one block.

For Llama these are qkv, o, gate and up, and down, as engines run them. In MiniLM q, k, v and o have one shape.
"""


def read_shapes(
    texts: Sequence[str], ranks: Collection[int] = (2, 3), rows: Sequence[int] = (), *, command: str = "bench"
) -> tuple[Shape, ...]:
    """Read typed shapes (``4096x4096``), models by name, and files with one shape per line and comments after ``#``.

    Models are taken at `rows`, or `ROWS`, and give products if 3 is among `ranks`, activations if 2 is. Raise
    `InvalidProblem` for any other text, a file with other content, and `rows` without a model.
    """
    if rows and not any(text.lower() in MODELS for text in texts):
        raise InvalidProblem(command, "--m", words(rows), f"stand beside --shapes with a model: {words(MODELS)}")
    found: list[Shape] = []
    for text in texts:
        model = MODELS.get(text.lower())
        if model is not None:
            found += [(m, n, k) for n, k in model for m in rows or ROWS if 3 in ranks]
            found += [(m, k) for k in dict.fromkeys(k for _, k in model) for m in rows or ROWS if 2 in ranks]
        elif _sizes(text) is None and os.path.exists(text):  # noqa: PTH110  Path raises an error for a long name
            found += _read_file(Path(text), command)
        else:
            found.append(_read(text, repr(text), command))
    return tuple(dict.fromkeys(found))


def read_rows(texts: Sequence[str]) -> tuple[int, ...]:
    """Read typed numbers of rows; raise `InvalidProblem` for a text that is not a whole number above 0."""
    for text in texts:
        if not _SIZE.fullmatch(text):
            raise InvalidProblem("bench", "--m", repr(text), "be whole numbers above 0, of up to 18 digits")
    return tuple(dict.fromkeys(map(int, texts)))


def random_products(count: int, seed: int) -> tuple[Shape, ...]:
    """Draw M, N and K of products: M in 1..16384, N and K multiples of 16 in 512..32768, all uniform in the logarithm.

    Shapes with M * N * K above `_LARGEST` are drawn again, because they take too long. Equal arguments give equal
    shapes.
    """
    draw = random.Random(f"products {seed}")  # noqa: S311  nothing secret

    def one(low: int, high: int, unit: int) -> int:
        return unit * round(math.exp(draw.uniform(math.log(low / unit), math.log(high / unit))))

    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = (one(1, 16384, 1), one(512, 32768, 16), one(512, 32768, 16))
        if math.prod(shape) <= _LARGEST:
            found[shape] = None
    return tuple(found)


def _read_file(path: Path, command: str) -> list[Shape]:
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise InvalidProblem(command, "--shapes", str(path), f"be a file of text that can be read ({error})") from error
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    shapes = [_read(line, f"{line!r} in line {number} of {path}", command) for number, line in lines if line]
    if not shapes:
        raise InvalidProblem(command, "--shapes", str(path), "hold a shape, one a line")
    return shapes


def _read(text: str, where: str, command: str) -> Shape:
    sizes = _sizes(text)
    if sizes is None:
        rule = (
            "be ROWSxCOLUMNS, MxNxK or SEQUENCESxNEWxKEYSxHEAD_SIZE, of sizes above 0, a file of those, or a model: "
            f"{words(MODELS)}"
        )
        raise InvalidProblem(command, "--shapes", where, rule)
    return sizes


def _sizes(text: str) -> Shape | None:
    """Parse a text as a shape; return None if it is not one."""
    parts = text.lower().split("x")
    return tuple(map(int, parts)) if len(parts) in (2, 3, 4) and all(map(_SIZE.fullmatch, parts)) else None
