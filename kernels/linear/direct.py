"""Configurations of the linear kernel whose weights go straight to registers (``direct.cuh``). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TOKENS = (8, 16, 32)
_SHAPES = ((1, 8), (1, 16), (2, 8), (2, 16), (4, 8))
_UNIT = 64
_REGISTERS, _MOST_DEEP = 100, 8
_WARPS_HELD = 16

_LAUNCH, _MORE_WARPS, _SECOND_BLOCK, _NARROW = 1.251, 0.239, 0.306, 0.307
_WAVE, _ROUND = 0.484, 0.536
_L2_BANDWIDTH, _MEMORY, _CODE = 0.571, 1.033, 2.51
"""Times in us, a bandwidth of L2 in TB/s for one multiprocessor, and a share of the memory's: fitted.

See `Direct.predicted`. A byte of codes, which all blocks read at the same time, takes L2 `_CODE` times as long as one
of the weight. The share is above 1, since what it stands beside overlaps with it.
"""


@dataclass(frozen=True, slots=True)
class Direct:
    """One configuration.

    Attributes
    ----------
    tokens, wide, warps : int
        Compile-time flags of the same names: tokens of a block; its rows of the weight, divided by 8; warps that share
        k.
    """

    tokens: int
    wide: int
    warps: int

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags of the configuration."""
        return (f"-DTOKENS={self.tokens}", f"-DWIDE={self.wide}", f"-DWARPS={self.warps}")

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block."""
        return (32 * self.warps, 1, 1)

    @property
    def deep(self) -> int:
        """Units of the weight that a thread requests at once where there are no zero points: DEEP of the kernel."""
        eights, sets = self.tokens // 8, -(-self.tokens // 16)
        return min(_MOST_DEEP, (_REGISTERS - 4 * sets * self.wide) // (4 * (2 * self.wide + eights)))

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Return the blocks that compute m x n results, m being at most `tokens`."""
        return (-(-n // (8 * self.wide)) if m else 0, 1, 1)

    def shared(self, zero_points: Sequence[bool] = (False, False)) -> int:
        """Return the bytes of shared memory of a block: the sums of its warps.

        `zero_points` says of activation and weight whether they have any.
        """
        activation, weight = zero_points
        pitch = 8 * self.wide + (8 if self.wide % 2 == 0 or weight else 0)
        return 4 * self.warps * (self.tokens + activation) * pitch

    def predicted(self, m: int, n: int, k: int, sm_count: int, bandwidth: float) -> float:
        """Return the predicted time in us, as one of many layers, as in `Streamed.predicted`.

        It is the launch, with more warps on a multiprocessor, of one block or of two, or of blocks of 8 rows of the
        weight; the rounds of loads of all waves; and the bytes from L2 and from memory, of `bandwidth` in TB/s.
        """
        (blocks, _, _), slots = self.grid(m, n), sm_count * _WARPS_HELD // self.warps
        rounds = -(-k // (_UNIT * self.warps * self.deep))
        own = -(-blocks // slots) * (_WAVE + rounds * _ROUND)
        loaded = -(-blocks // sm_count) * (8 * self.wide + _CODE * self.tokens) * k / (_L2_BANDWIDTH * 1e6)
        beside = min(-(-blocks // sm_count), _WARPS_HELD // self.warps) - 1
        launch = _LAUNCH + (_MORE_WARPS if self.warps == _WARPS_HELD else _SECOND_BLOCK * beside)
        return launch + (_NARROW if self.wide == 1 else 0.0) + own + loaded + (m + n) * k / (_MEMORY * bandwidth * 1e6)

    def __str__(self) -> str:
        return f"{8 * self.wide} x {self.tokens} through registers, {self.warps} warps"


def configurations(m: int) -> tuple[Direct, ...]:
    """Return the configurations for m tokens, none if they are too many."""
    tokens = next((each for each in _TOKENS if each >= m), 0)
    return tuple(Direct(tokens, *shape) for shape in _SHAPES if tokens and tokens * shape[0] <= 64)
