"""The record of ``skuda train-check``: loss curves, step times, and held-out bits per byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from skuda.dispatch.compile.code import code_hash
from skuda.registry.value import Integer, Real, Size, Value
from skuda.tools.record import Record
from skuda.tools.train.corpus import CorpusFacts

BASELINE = "bf16"
"""The way that the others are compared with."""
FIGURES = {
    "loss": "final loss, nats per byte",
    "trained": "held-out bits per byte, as trained",
    "dynamic": "held-out bits per byte, int8 dynamic",
    "static": "held-out bits per byte, int8 static",
    "ms": "milliseconds a step",
}
"""What the figures of a way are, by name."""

Count = Annotated[Integer, Field(ge=1, lt=2**31)]


class Shape(Value):
    """Sizes of the model.

    Attributes
    ----------
    width, hidden : int
        Channels between the layers, and inside of SwiGLU.
    layers, heads : int
        Numbers of blocks, and of attention heads, each of width / heads channels: an even number.
    length : int
        Bytes in a sequence.
    """

    width: Count = 512
    layers: Count = 8
    heads: Count = 8
    hidden: Count = 1408
    length: Count = 512

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % (2 * self.heads):
            self.refuse("width", self.width, f"be a multiple of 2 * heads = {2 * self.heads}")
        return self


class WayResult(Value):
    """One way to train, from the same initial model and on the same batches as the others.

    Attributes
    ----------
    way : str
        ``bf16``, ``fake`` or ``mixed``.
    losses : tuple of float
        Training loss in nats per byte, each the mean of `TrainRecord.every` steps.
    final_loss : float
        Its mean over the last tenth of the steps.
    milliseconds : float
        Median time of a step, forward, backward and update; each interval of `TrainRecord.every` steps gives one mean.
    held_out : dict of str to float
        Held-out bits per byte of the trained model, by how it runs: ``trained``, as it was trained, and converted to
        int8 layers with the input's scale found per row, ``dynamic``, or fixed per tensor from training batches,
        ``static``.
    """

    way: str
    losses: tuple[Real, ...]
    final_loss: Real
    milliseconds: Real
    held_out: dict[str, Real]


class TrainRecord(Record):
    """One run of ``skuda train-check`` on one device.

    Attributes
    ----------
    device : str
        Name of the device, as torch gives it.
    versions, date, skuda, command, seconds
        As in the record of ``skuda bench``.
    measurer_hash : str
        Hash of the code that trains and evaluates; see `train_measurer_hash`.
    seed : int
        Of the initial model and of the batches.
    parameters : int
        Number of parameters.
    steps, batch, every : int
        Steps of the optimizer, sequences in each, and steps in an interval of `WayResult.losses`.
    windows : int
        Sequences of the held-out evaluation.
    learning_rate : float
        The highest one.
    compiled : bool
        Whether the model was compiled with torch.compile.
    tolerance : float
        Per cent by which a way may be worse than bf16.
    """

    kind: Literal["skuda train-check"] = "skuda train-check"
    schema_version: Literal[1] = 1
    device: str
    versions: dict[str, str]
    date: str
    skuda: str
    command: str
    seconds: Real
    measurer_hash: str = ""
    seed: Size
    shape: Shape
    parameters: Size
    steps: Count
    batch: Count
    every: Count
    windows: Count
    learning_rate: Real
    compiled: bool
    tolerance: Real
    corpus: CorpusFacts
    ways: tuple[WayResult, ...]

    @property
    def outdated(self) -> str:
        """Why all of its figures are stale; empty if the code that trains has not changed."""
        return "" if self.measurer_hash == train_measurer_hash() else "trained by other code"

    @property
    def excess(self) -> dict[tuple[str, str], float]:
        """By way and figure, the per cent that it is above bf16's: ``loss``, and each held-out figure.

        Held-out figures are compared with those of the bf16 model as it was trained. Without bf16, there are none.
        """
        base = next((result for result in self.ways if result.way == BASELINE), None)
        if base is None:
            return {}
        held_out = base.held_out["trained"]
        found = {}
        for result in self.ways:
            found[result.way, "loss"] = 100 * (result.final_loss / base.final_loss - 1)
            found |= {(result.way, name): 100 * (bits / held_out - 1) for name, bits in result.held_out.items()}
        return found

    @property
    def misses(self) -> tuple[str, ...]:
        """What is worse than bf16 by more than the tolerance, one line each."""
        return tuple(
            f"{way}: {name} is {excess:.2f} % above {BASELINE}, allowed are {self.tolerance:g} %"
            for (way, name), excess in self.excess.items()
            if not excess <= self.tolerance
        )


def train_measurer_hash() -> str:
    """Return the hash of the code that trains and evaluates, with the model and the text, without this record."""
    within, shown = ("skuda.tools.train",), ("skuda.tools.train.record",)
    return code_hash("skuda.tools.train.training", "", within, shown)


def figures(record: TrainRecord) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield way, figure (see `FIGURES`), value, and the per cent above bf16 or None, of everything in a record."""
    for result in record.ways:
        for name, value in {"loss": result.final_loss, **result.held_out}.items():
            yield result.way, name, value, record.excess.get((result.way, name))
        yield result.way, "ms", result.milliseconds, None
