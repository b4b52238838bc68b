"""The record of ``skuda train-check``, a small model trained in int8 and in bf16, and what is shown of it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from skuda.registry.value import Integer, Real, Size, Value
from skuda.tools.study.record import Record
from skuda.tools.study.view import Sections, Table

BASELINE, FAKE, MIXED = TRAINED = ("bf16", "fake", "mixed")
"""The ways to train; the others are compared with the first."""
FIGURES = {
    "loss": "final loss, nats per byte",
    "trained": "held-out bits per byte, as trained",
    "dynamic": "held-out bits per byte, int8 dynamic",
    "static": "held-out bits per byte, int8 static",
    "ms": "milliseconds a step",
}
"""What the figures of a way are, by name."""

Count = Annotated[Integer, Field(ge=1, lt=2**31)]


class ModelShape(Value):
    """Sizes of the model: channels between the layers and inside the MLP, layers, heads, and bytes in a sequence."""

    width: Count
    layers: Count
    heads: Count
    hidden: Count
    length: Count


class TrainedResult(Value):
    """One way to train, from the same initial model and on the same batches as the others.

    Attributes
    ----------
    losses, final_loss
        Training loss in nats per byte: means of `TrainRecord.every` steps, and the mean of the last tenth.
    milliseconds : float
        Median time of a step, forward, backward and update; each interval of `TrainRecord.every` steps gives one mean.
    held_out : dict of str to float
        Held-out bits per byte by how the model runs: ``trained``, as it was trained, and converted to int8 layers
        whose inputs have a scale per row, ``dynamic``, or one per tensor from training batches, ``static``.
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
    steps, batch, every : int
        Steps of the optimizer, sequences in each, and steps in an interval of `TrainedResult.losses`.
    windows : int
        Most sequences of the held-out evaluation.
    learning_rate : float
        The highest one.
    tolerance : float
        Per cent by which a way may be worse than bf16.
    corpus : dict
        Python's version, ``files`` and ``bytes`` of both parts of the text, and a hash of all names and contents.
    """

    measured_by: ClassVar[tuple[str, ...]] = ("skuda.tools.studies.training:train",)
    kind: Literal["skuda train-check"] = "skuda train-check"
    schema_version: Literal[1] = 1
    shape: ModelShape
    parameters: Size
    steps: Count
    batch: Count
    every: Count
    windows: Count
    learning_rate: Real
    compiled: bool
    tolerance: Real
    corpus: dict[str, str | int]
    ways: Annotated[tuple[TrainedResult, ...], Field(min_length=1)]

    @property
    def excess(self) -> dict[tuple[str, str], float]:
        """By way and figure, the per cent that it is above bf16's: ``loss``, and each held-out figure.

        Held-out figures are compared with those of the bf16 model as it was trained. Without bf16, there are none.
        """
        base = next((result for result in self.ways if result.way == BASELINE), None)
        found = {}
        for result in self.ways if base else ():
            found[result.way, "loss"] = 100 * (result.final_loss / base.final_loss - 1)  # type: ignore[union-attr]
            bits = result.held_out.items()
            found |= {(result.way, name): 100 * (b / base.held_out["trained"] - 1) for name, b in bits}  # type: ignore[union-attr]
        return found

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is worse than bf16 by more than the tolerance."""
        return tuple(
            f"{way}: {name} is {excess:.2f} % above {BASELINE}, allowed are {self.tolerance:g} %"
            for (way, name), excess in self.excess.items()
            if not excess <= self.tolerance
        )


def sections(record: TrainRecord) -> Sections:
    """Return the sections: ``ways`` (the figures of each) and ``facts``."""
    shape, text = record.shape, record.corpus
    rows = []
    for one in record.ways:
        for name, value in {"loss": one.final_loss, **one.held_out, "ms": one.milliseconds}.items():
            above = record.excess.get((one.way, name))
            rows.append((one.way, FIGURES.get(name, name), f"{value:.4f}", "" if above is None else f"{above:+.2f} %"))
    about = {
        "model": f"{record.parameters:,} parameters, {shape.layers} layers of {shape.width} channels",
        "compiled": "yes" if record.compiled else "no",
        "training": f"{record.steps:,} steps of {record.batch} sequences of {shape.length} bytes",
        "text": f"Python {text['python']}'s library: {text['bytes']:,} bytes, {text['held_out_bytes']:,} held out",
    }
    return {
        "ways": (Table(("way", "figure", "value", f"above {BASELINE}"), rows, words=2),),
        "facts": (record.facts(**about),),
    }
