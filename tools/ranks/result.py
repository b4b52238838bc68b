"""The hashes, as frozen records that `--json` prints."""

from __future__ import annotations

from pydantic import computed_field

from skuda.registry.value import Value
from skuda.tools.ranks.stack import Sizes
from skuda.tools.ranks.work import WAYS


class Line(Value):
    """One batch on one number of ranks.

    Attributes
    ----------
    ranks : int
        Their number.
    carrier : str
        What moves their arrays, or ``none``.
    framework, device : str
        What their arrays are of, and where they are.
    batch : str
        Where the sequence stands whose output is hashed.
    hashes : dict from str to tuple of str
        For each way to compute linear layers the different hashes of the ranks' outputs, that of rank 0 first.
    """

    ranks: int
    carrier: str
    framework: str
    device: str
    batch: str
    hashes: dict[str, tuple[str, ...]]


class HashResult(Value):
    """The whole run.

    Attributes
    ----------
    sizes, seed, sequences : Sizes, int, int
        Of the stack, of its random weights and inputs, and the most sequences of a batch.
    lines : tuple of Line
        All that was run; the first ones are NumPy without ranks, which define what the others must give.
    sqnr_db : dict from str to float
        Signal to noise of each way against bf16, without ranks: that what is hashed is the output of the same stack.
    seconds : float
        Time of the run.
    """

    sizes: Sizes
    seed: int
    sequences: int
    lines: tuple[Line, ...]
    sqnr_db: dict[str, float]
    seconds: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def distinct(self) -> dict[str, int]:
        """How many different hashes each way gave."""
        return {way: len({one for line in self.lines for one in line.hashes[way]}) for way in WAYS}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether int8 gave one hash."""
        return self.distinct["int8"] == 1
