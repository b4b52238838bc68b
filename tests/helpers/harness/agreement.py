"""Whether a kernel's output is the reference's, within what its SKU promises."""

from __future__ import annotations

import numpy as np
from support import assert_same_bits

from skuda.registry.sku import KernelSku


def assert_agrees(got: np.ndarray, want: np.ndarray, sku: KernelSku, what: str) -> None:
    """Compare with the reference as closely as the SKU promises."""
    if sku.precision_guarantee.bit_exact:
        assert_same_bits(got, want, what)
        return
    # Within so many units of the compute type before the last rounding, which may turn the least of them into one.
    most = sku.precision_guarantee.max_ulp if got.dtype in (np.float32, np.float64) else 1
    if got.dtype.kind in "iu":
        distance = np.abs(got.astype(np.int64) - want)
    else:
        both = np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64))
        ordered = [_ordered(np.where(both, 0, array).astype(got.dtype)) for array in (got, want)]
        distance = np.abs(ordered[0] - ordered[1])
    assert (distance <= most).all(), f"{what}: {distance.max()} units apart, {most} allowed"


def _ordered(values: np.ndarray) -> np.ndarray:
    """Return integers that count floating numbers from zero."""
    width = values.dtype.itemsize
    signed = np.ascontiguousarray(values).view(f"i{width}").astype(np.int64)
    return np.where(signed < 0, -(signed & ((1 << 8 * width - 1) - 1)), signed)
