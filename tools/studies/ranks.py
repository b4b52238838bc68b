"""The hashes of ``skuda demo --gpus N``: gated MLPs in W8A8 have the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from skuda.registry.value import Size
from skuda.tools.studies.processes import RankJob
from skuda.tools.study.view import Parts, Table

FORMS = ("int8", "sliced int8", "bf16")
BATCHES = {"alone": (0,), "first of 5": (0, 1, 2, 3, 4), "last of 5": (4, 3, 2, 1, 0)}
"""Which sequences stand in a batch; the output of sequence 0 counts."""
POSITIONS = 16
"""Tokens of a sequence."""
SIZES = {"gloo": (512, 1408, 4), "nccl": (8192, 28672, 2)}
"""Hidden and intermediate size and number of the MLPs, on the CPU and on GPUs, where they are those of Llama 3 70B."""
_ABOUT = (
    "int8: layers shared by skuda.torch.parallelize_; ranks add up integers.",
    "sliced int8: as serving engines split them; each rank quantizes its slice of K and rounds its part of the sum.",
    "bf16: nothing quantized; each rank rounds its part of the sum, too.",
)

Hashes = dict[str, dict[str, str]]
"""The hash of each output, by batch and form."""


class HashJob(RankJob):
    """Some gated MLPs, one behind the other, on 1, 2, ... and all of the ranks."""

    hidden: Size
    intermediate: Size
    layers: Size


class HashLine(NamedTuple):
    """One batch on a number of ranks: for each form the different hashes of their outputs, that of rank 0 first.

    0 ranks are one process without a group on the CPU, where NumPy computes what skuda does. The lines without a group
    are the first, and define what the others must give.
    """

    ranks: int
    batch: str
    hashes: dict[str, tuple[str, ...]]


def distinct(lines: Sequence[HashLine]) -> dict[str, int]:
    """Return how many different hashes each form gave."""
    return {form: len({one for line in lines for one in line.hashes[form]}) for form in FORMS}


def lines_of(found: Sequence[Mapping[str, Hashes]]) -> list[HashLine]:
    """Return the lines for every number of ranks, from what the ranks found by that number."""
    made = []
    for count in range(len(found) + 1):
        each = [mine[str(count)] for mine in found[: max(count, 1)]]
        for batch in BATCHES:
            hashes = {form: tuple(dict.fromkeys(one[batch][form] for one in each)) for form in FORMS}
            made.append(HashLine(count, batch, hashes))
    return made


def report(job: HashJob, card: str, lines: Sequence[HashLine]) -> Parts:
    """Return the report; a hash that differs from the first of its column is marked."""
    first, rows = lines[0], []
    for line in lines:
        styles = {form: "" if line.hashes[form] == first.hashes[form] else "yellow" for form in FORMS}
        cells = (Text("\n".join(line.hashes[form]), style=style) for form, style in styles.items())
        rows.append((line.ranks or "none", card if line.ranks else "CPU", line.batch, *cells))
    counts = (f"{count} hash{'es' if count > 1 else ''}" for count in distinct(lines).values())
    table = Table(("ranks", "on", "batch", *FORMS), [*rows, ("different", "", "", *counts)], words=6)
    about = (
        f"{job.layers} gated MLPs of {job.hidden} x {job.intermediate}, with random weights of seed {job.seed}. A hash "
        f"is the first 12 hex digits of the sha256 of the output for the same {POSITIONS} tokens."
    )
    return (about, table, *_ABOUT)
