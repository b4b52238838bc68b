"""The table of cosines and sines: the f32 next to the exact values, on every machine."""

import numpy as np
import pytest
from support import fresh

from skuda.kernels.attention.rope_table import MOST_POSITIONS, cos_sin
from skuda.registry.errors import InvalidProblem


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


@pytest.mark.parametrize(
    ("frequency", "positions", "match"),
    [
        (1, MOST_POSITIONS + 1, "positions must be in"),
        (1, -1, "positions must be in"),
        (2, MOST_POSITIONS, "frequencies must turn the last position by at most 1048576 quarter turns"),
        (np.nan, 2, "frequencies must turn"),
        (np.inf, 2, "frequencies must turn"),
    ],
)
def test_angles_beyond_its_reduction_are_refused(frequency, positions, match):
    with pytest.raises(InvalidProblem, match=match):
        cos_sin(np.full(1, frequency, np.float32), positions)
