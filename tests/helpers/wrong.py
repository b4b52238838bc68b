"""Values that somebody passes by mistake."""

from __future__ import annotations

import decimal
import enum
import fractions
import math
import pathlib

import ml_dtypes
import numpy as np

from skuda.dispatch import PlanPreference, device_named
from skuda.kernels.elementwise import FillDescriptor


class Colour(enum.StrEnum):
    """An enumeration of somebody else."""

    RED = "red"


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


WRONG = {
    "none": lambda: None,
    "true": lambda: True,
    "zero": lambda: 0,
    "three": lambda: 3,
    "minus one": lambda: -1,
    "a huge integer": lambda: 10**5000,
    "2^62": lambda: 2**62,
    "a float": lambda: 1.5,
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "complex": lambda: 1j,
    "a decimal": lambda: decimal.Decimal("1.5"),
    "a fraction": lambda: fractions.Fraction(1, 3),
    "empty text": str,
    "text": lambda: "text",
    "a number in text": lambda: "3",
    "a null character": lambda: "x\0y",
    "an escape": lambda: "\x1b[31m\r\n",
    "a surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 100_000,
    "bytes": lambda: b"f32",
    "a list": lambda: [1, 2],
    "an empty list": list,
    "a list in a tuple": lambda: ([1], 2),
    "a nested list": lambda: nested(2000),
    "a long list": lambda: list(range(3000)),
    "a tuple": lambda: (1, 2),
    "a dict": lambda: {"backend": "numpy"},
    "an empty dict": dict,
    "a set": lambda: {1, 2},
    "a generator": lambda: iter([1, 2]),
    "a range": lambda: range(3),
    "an object": object,
    "a class": lambda: FillDescriptor,
    "a function": lambda: print,
    "a module": lambda: np,
    "an enum": lambda: Colour.RED,
    "a path": lambda: pathlib.Path("/no/such/folder/file"),
    "a descriptor": lambda: FillDescriptor(numel=2, output_element="f32"),
    "a preference": PlanPreference,
    "a device": lambda: device_named("h200"),
    "an array": lambda: np.ones(3, np.float32),
    "an array of one": lambda: np.ones(1, np.int64),
    "an array without axes": lambda: np.array(1.5),
    "an empty array": lambda: np.empty((0, 3), np.float32),
    "a matrix of f64": lambda: np.ones((2, 3)),
    "an array of objects": lambda: np.array([None, "x"], object),
    "an array of text": lambda: np.array(["x", "y"]),
    "a record array": lambda: np.zeros(2, [("a", "f4")]),
    "a complex array": lambda: np.ones(2, np.complex64),
    "an array of dates": lambda: np.array(["2020-01-01"], "M8[D]"),
    "a big-endian array": lambda: np.ones(2, ">f4"),
    "a bool of numpy": lambda: np.True_,
    "a float of numpy": lambda: np.float32(1.5),
    "an integer of numpy": lambda: np.int64(3),
    "a bfloat16": lambda: ml_dtypes.bfloat16(1.5),
    "a date of numpy": lambda: np.datetime64("2020-01-01"),
    "a dtype": lambda: np.dtype("f4"),
    "an error": lambda: ValueError("x"),
}
"""Values that somebody passes by mistake."""
try:
    import torch
except ImportError:
    pass
else:
    WRONG |= {
        "a tensor": lambda: torch.ones(3),
        "a tensor of f64": lambda: torch.ones(2, 3, dtype=torch.float64),
        "a tensor with a gradient": lambda: torch.ones(3, requires_grad=True),
        "a tensor without memory": lambda: torch.ones(3, device="meta"),
        "a sparse tensor": lambda: torch.ones(3).to_sparse(),
        "a complex tensor": lambda: torch.ones(3, dtype=torch.complex64).conj(),
        "a tensor of bfloat16": lambda: torch.ones((2, 3), dtype=torch.bfloat16),
        "a tensor of bool": lambda: torch.ones(3, dtype=torch.bool),
        "a dtype of torch": lambda: torch.float32,
        "a device of torch": lambda: torch.device("cpu"),
    }
