"""The arrays of the stack: NumPy's or torch's, and the arithmetic that has the same bits in both.

Elementwise sums and products are rounded to nearest by both, on every device. Sums over an axis are made of them in an
order that is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)

_SQUARINGS = 6
_TERMS = 8


@dataclass(frozen=True)
class Framework:
    """Where arrays live.

    Attributes
    ----------
    name : str
        The framework's name.
    module : module
        ``numpy`` or ``torch``; what is called here has the same name in both.
    place : str or None
        Torch's name of a device; None for NumPy.
    """

    name: str
    module: Any
    place: str | None = None

    def sent(self, array: Array) -> Any:
        """Return a NumPy array as one of this framework."""
        array = np.ascontiguousarray(array)
        if self.place is None:
            return array
        if array.dtype == BF16:
            return self.module.from_numpy(array.view(np.int16)).to(self.place).view(self.module.bfloat16)
        return self.module.from_numpy(array).to(self.place)

    def fetched(self, array: Any) -> Array:
        """Return an array of this framework as one of NumPy."""
        if self.place is None:
            return np.asarray(array)
        if array.dtype == self.module.bfloat16:
            bits: Array = array.view(self.module.int16).cpu().numpy()
            return bits.view(BF16)
        found: Array = array.cpu().numpy()
        return found

    def wide(self, array: Any) -> Any:
        """Return an array in f32."""
        return array.astype(np.float32) if self.place is None else array.float()

    def narrow(self, array: Any) -> Any:
        """Return an array rounded to bf16, contiguous."""
        if self.place is None:
            return np.ascontiguousarray(array.astype(BF16))
        return array.to(self.module.bfloat16).contiguous()

    def octets(self, array: Any) -> Any:
        """Return the bytes of a contiguous array, as s8."""
        return array.view(np.int8 if self.place is None else self.module.int8)

    def bf16(self, octets: Any) -> Any:
        """Return the bf16 array that has these bytes."""
        return octets.view(BF16 if self.place is None else self.module.bfloat16)


NUMPY = Framework("numpy", np)


def torch_on(place: str) -> Framework:
    """Return torch with the arrays on a device."""
    import torch

    return Framework("torch", torch, place)


def total(x: Any) -> Any:
    """Return the sums over the last axis, whose size is a power of two: the upper half is added to the lower one."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def exponential(framework: Framework, x: Any) -> Any:
    """Return e to the power of x, which is 0 or less: a polynomial of x / 64, squared six times.

    Its relative error is about 1e-5 down to x = -20; below -80, x counts as -80.
    """
    y = framework.module.clip(x, -80.0, 0.0) * 2.0**-_SQUARINGS
    found = y * (1.0 / _TERMS) + 1.0
    for term in range(_TERMS - 1, 0, -1):
        found = found * y * (1.0 / term) + 1.0
    for _ in range(_SQUARINGS):
        found = found * found
    return found


def attend(framework: Framework, q: Any, k: Any, v: Any) -> Any:
    """Return causal attention with grouped heads in f32: every head by itself, every sum in the order of `total`.

    Parameters
    ----------
    framework : Framework
        What the arrays are of.
    q : array of shape (sequences, positions, kv_heads, queries, head), bf16
        Queries of the heads, and the number of them that share keys and values.
    k, v : array of shape (sequences, positions, kv_heads, head), bf16
        Keys and values. Positions and head are powers of two.

    Returns
    -------
    array of shape (sequences, positions, kv_heads, queries, head), bf16
    """
    positions, head = q.shape[1], q.shape[-1]
    q, k, v = (framework.wide(part) for part in (q, k, v))
    # Axes: sequence, query's position, key and value head, query of it, key's position, element.
    k = k.swapaxes(1, 2)[:, None, :, None]
    v = v.swapaxes(1, 2)[:, None, :, None].swapaxes(-1, -2)
    scores = total(q[..., None, :] * k) * head**-0.5
    sees = framework.sent(np.tril(np.ones((positions, positions), bool)))[:, None, None]
    # The largest score is found among those that a query sees.
    scores = framework.module.where(sees, scores, -1e30)
    weights = exponential(framework, scores - framework.module.amax(scores, -1)[..., None]) * framework.wide(sees)
    return framework.narrow(total(weights[..., None, :] * v) / total(weights)[..., None])
