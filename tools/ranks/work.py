"""What a rank does: the stack in every way, on a sequence alone and among others; and what it tells."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from skuda.dispatch import Device, Dispatcher
from skuda.dispatch.shard import Group
from skuda.registry.value import Value
from skuda.tools.ranks.framework import BF16, Array, Framework
from skuda.tools.ranks.products import Bf16, Exact, Products, Sliced
from skuda.tools.ranks.stack import Cut, Sizes, forward

WAYS = ("int8", "sliced int8", "bf16")
BATCHES = {"alone": (0,), "first of 5": (0, 1, 2, 3, 4), "last of 5": (4, 3, 2, 1, 0)}
"""Which sequences stand in a batch; the output of sequence 0 counts."""

Outputs = dict[tuple[str, str], Array]
"""The output of sequence 0, of shape (positions, hidden), bf16, by way and batch."""
Hashes = dict[str, dict[str, str]]
"""The hash of each output, by batch and way."""


class Task(Value):
    """What all ranks compute.

    Attributes
    ----------
    sizes : Sizes
        Of the stack.
    seed : int
        Of its weights and inputs.
    """

    sizes: Sizes
    seed: int

    def sequences(self) -> Array:
        """Draw the inputs, of shape (sequences, positions, hidden), bf16."""
        shape = (max(map(len, BATCHES.values())), self.sizes.positions, self.sizes.hidden)
        return np.random.default_rng((self.seed, self.sizes.blocks)).standard_normal(shape, np.float32).astype(BF16)

    def outputs(self, group: Group, framework: Framework, dispatcher: Dispatcher, device: Device) -> Outputs:
        """Run the stack on a rank, in every way and batch."""
        cut = Cut(self.sizes, group.count, group.rank)
        blocks = list(cut.blocks(self.seed, framework))
        ways: tuple[Products, ...] = (Exact(dispatcher, device, group), Sliced(dispatcher, group), Bf16(group))
        drawn, found = self.sequences(), {}
        for way, products in zip(WAYS, ways, strict=True):
            for batch, chosen in BATCHES.items():
                rows = framework.sent(drawn[list(chosen)].reshape(-1, self.sizes.hidden))
                output = framework.fetched(forward(cut, blocks, products, dispatcher, rows))
                found[way, batch] = output.reshape(len(chosen), *drawn.shape[1:])[chosen.index(0)]
        return found


def hash_of(output: Array) -> str:
    """Return the first 12 hex digits of the sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(output).tobytes()).hexdigest()[:12]


def hashes_of(outputs: Outputs) -> Hashes:
    """Return the hashes of a rank's outputs."""
    return {batch: {way: hash_of(outputs[way, batch]) for way in WAYS} for batch in BATCHES}


class Orders(Value):
    """What a rank that is a process reads.

    Attributes
    ----------
    task : Task
        What is computed.
    counts : tuple of int
        On how many of the first ranks, one after the other.
    backend : str
        Of torch.distributed.
    patience : float
        Seconds that a rank waits for the others.
    """

    task: Task
    counts: tuple[int, ...]
    backend: str
    patience: float


def read_orders(folder: Path) -> Orders:
    """Return the orders in a folder."""
    return Orders.model_validate_json(folder.joinpath("orders.json").read_text(encoding="utf-8"))


def tell(folder: Path, count: int, rank: int, hashes: Hashes) -> None:
    """Write what a rank of so many found."""
    folder.joinpath(f"{count}-{rank}.json").write_text(json.dumps(hashes), encoding="utf-8")


def told(folder: Path, count: int, rank: int) -> Hashes:
    """Return what a rank of so many wrote."""
    found: Hashes = json.loads(folder.joinpath(f"{count}-{rank}.json").read_text(encoding="utf-8"))
    return found
