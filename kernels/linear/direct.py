"""Configurations of the product whose weights go straight to registers (``direct.cuh``). Pure: needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_TOKENS = (8, 16, 32)
_SHAPES = ((1, 8), (1, 16), (2, 8), (2, 16), (4, 8))
_REGISTERS, _MAX_AHEAD = 100, 8


class Direct(NamedTuple):
    """One configuration.

    Attributes
    ----------
    tokens, mmas_n, warps : int
        Compile-time flags of the same names: tokens of a block; its rows of the weight, divided by 8; warps that divide
        K.
    """

    tokens: int
    mmas_n: int
    warps: int

    @property
    def rows(self) -> int:
        """Rows of the weight in a block."""
        return 8 * self.mmas_n

    @property
    def unit(self) -> int:
        """Bytes of K that a warp loads at once: UNIT of the kernel."""
        return 64

    @property
    def ahead(self) -> int:
        """Units that a thread requests at once: AHEAD of the kernel without zero points."""
        used = 4 * -(-self.tokens // 16) * self.mmas_n
        return min(_MAX_AHEAD, (_REGISTERS - used) // (4 * (2 * self.mmas_n + self.tokens // 8)))

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        return (f"-DTOKENS={self.tokens}", f"-DMMAS_N={self.mmas_n}", f"-DWARPS={self.warps}")

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return (32 * self.warps, 1, 1)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Return the blocks that compute m x n results, m being at most `tokens`."""
        return (-(-n // self.rows) if m else 0, 1, 1)

    def shared(self, zero_points: Sequence[bool] = (False, False)) -> int:
        """Return the bytes of shared memory of a block, for the sums of its warps.

        `zero_points`: whether activation and weight have any.
        """
        activation, weight = zero_points
        pitch = self.rows + (8 if self.mmas_n % 2 == 0 or weight else 0)
        return 4 * self.warps * (self.tokens + activation) * pitch

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens} through registers, {self.warps} warps"


def configurations(m: int) -> tuple[Direct, ...]:
    """Return the configurations for m tokens; none if m is too large."""
    tokens = next((each for each in _TOKENS if each >= m), 0)
    return tuple(Direct(tokens, *shape) for shape in _SHAPES if tokens and tokens * shape[0] <= 64)
