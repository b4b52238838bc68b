"""The table of cosines and sines: the f32 next to the exact values, on every machine."""

import numpy as np
import pytest
from support import fresh

from skuda.kernels.attention.rope_table import MOST_POSITIONS, cos_sin


@pytest.mark.parametrize("scaling", [1.0, 1.2079441785812378])
def test_cosines_and_sines_are_the_nearest_numbers(scaling):
    rng = fresh(scaling)
    frequencies = rng.uniform(0, 1, 9).astype(np.float32)
    frequencies[:2] = 1, 0
    for positions in (0, 1, 5000):
        angles = (np.arange(positions, dtype=np.float32)[:, None] * frequencies).astype(np.longdouble)
        want = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32) * np.float32(scaling)
        assert np.array_equal(cos_sin(frequencies, positions, scaling).view(np.int32), want.view(np.int32))


def test_the_last_positions_are_as_good():
    at = np.arange(MOST_POSITIONS)[-3:]
    angles = at.astype(np.longdouble)
    want = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    assert np.array_equal(cos_sin(np.ones(1, np.float32), MOST_POSITIONS)[-3:], want)
