"""The factors of SmoothQuant. The arrays are not checked here.

Source: Xiao et al., SmoothQuant, 2023, equation 4; numerics.md, "SmoothQuant's offline half".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

FLOOR = np.float32(1e-5)
"""Lower bound of a channel's maximum; without it, a zero channel would divide by zero or have an infinite factor."""


def factors(activation_max: F32, weight_max: F32, alpha: float) -> F32:
    """Return ``s_k = max|A_k|^alpha / max|W_k|^(1-alpha)``, shape (K,), f32, both maxima floored at 1e-5.

    Parameters
    ----------
    activation_max, weight_max : array of shape (K,), f32, finite
        Largest magnitudes per input channel.
    alpha : float
        Smoothing strength in 0..1.
    """
    # Powers in f64, rounded once: NumPy's own f32 power differs by an ulp between SIMD paths.
    activation_power = np.power(np.maximum(activation_max, FLOOR), alpha, dtype=np.float64).astype(np.float32)
    weight_power = np.power(np.maximum(weight_max, FLOOR), 1 - alpha, dtype=np.float64).astype(np.float32)
    return activation_power / weight_power
