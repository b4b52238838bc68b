"""Training a model in one way, and its held-out bits per byte in others."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skuda.tools.train.corpus import Corpus
from skuda.tools.train.model import VOCABULARY, ByteLlama
from skuda.tools.train.record import BASELINE, Shape, WayResult
from skuda.torch import DynamicLinear, FakeQuant, FakeQuantLinear, Mixed, observe

_OBSERVED = 8
"""Training batches that fix the static scales."""
_MOST_WARM_UP = 100
_LEAST_RATE = 0.1
"""The learning rate at the end, as a share of the highest."""


class Way(Protocol):
    """Makes the layers of a way to train."""

    def convert(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return what takes the place of a layer."""


WAYS: dict[str, Way | None] = {BASELINE: None, "fake": FakeQuant(), "mixed": Mixed()}
"""The ways by name; None leaves the layers as they are."""


@dataclass(frozen=True)
class Plan:
    """What is trained, on what, and for how long; see `skuda.tools.train.record.TrainRecord`."""

    shape: Shape
    corpus: Corpus
    device: torch.device
    seed: int
    steps: int
    batch: int
    every: int
    windows: int
    learning_rate: float
    compiled: bool = False

    def initial(self) -> ByteLlama:
        """Return the model before its training, the same for every way."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = ByteLlama(self.shape)
        model.to(self.device)
        return model

    def batches(self) -> Iterator[Tensor]:
        """Yield batches without end, the same for every way: (batch, length + 1) bytes as s64."""
        text = torch.from_numpy(self.corpus.trained.copy()).to(self.device)
        random = torch.Generator().manual_seed(self.seed)
        within = torch.arange(self.shape.length + 1, device=self.device)
        while True:
            starts = torch.randint(len(text) - self.shape.length, (self.batch, 1), generator=random)
            # Few bytes, so that the copy does not wait for the steps before.
            yield text[starts.to(self.device, non_blocking=True) + within].long()

    def held_out(self) -> Iterator[Tensor]:
        """Yield the held-out sequences in batches: windows that are spread evenly and do not overlap."""
        text, length = self.corpus.held_out, self.shape.length + 1
        count = min(self.windows, len(text) // length)
        starts = [i * (len(text) // count) for i in range(count)]
        rows = torch.stack([torch.from_numpy(text[start : start + length].copy()) for start in starts])
        yield from rows.to(self.device).long().split(self.batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which every model runs."""
        found: AbstractContextManager[Any] = torch.autocast(self.device.type, torch.bfloat16)
        return found

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, as a share of the highest: a linear rise, then a cosine."""
        warm_up = max(1, min(_MOST_WARM_UP, self.steps // 10))
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def train(name: str, plan: Plan, report: Callable[[int], None] = lambda _: None) -> WayResult:
    """Train a model in a way of `WAYS`, and evaluate it.

    Parameters
    ----------
    name : str
        The way.
    plan : Plan
    report : callable
        Is given the number of finished steps, now and then.
    """
    model, way = plan.initial(), WAYS[name]
    if way is not None:
        replace(model.blocks, way.convert)
    losses, times = _trained(model, plan, report)
    held_out = {
        "trained": bits_per_byte(model, plan),
        "dynamic": bits_per_byte(dynamic(model), plan),
        "static": bits_per_byte(static(model, plan), plan),
    }
    tail = losses[-max(1, plan.steps // 10) :]
    return WayResult(
        way=name,
        losses=tuple(statistics.fmean(losses[at : at + plan.every]) for at in range(0, len(losses), plan.every)),
        final_loss=statistics.fmean(tail),
        milliseconds=1e3 * statistics.median(times),
        held_out=held_out,
    )


def _trained(model: nn.Module, plan: Plan, report: Callable[[int], None]) -> tuple[list[float], list[float]]:
    """Train a model in place; return the loss of each step, and the seconds of a step in each interval."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, plan.rate)
    run = torch.compile(model, fullgraph=True) if plan.compiled else model
    losses: list[float] = []
    times: list[float] = []
    pending: list[Tensor] = []
    began = perf_counter()
    for done, tokens in zip(range(1, plan.steps + 1), plan.batches(), strict=False):
        with plan.autocast():
            loss = _loss(run, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        pending.append(loss.detach())
        if done % plan.every == 0 or done == plan.steps:
            losses += torch.stack(pending).tolist()  # waits for the device
            times.append((perf_counter() - began) / len(pending))
            pending, began = [], perf_counter()
            report(done)
    return losses, times[1:] or times  # the first interval includes compiling


def _loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each byte from those before it, in nats."""
    logits = model(tokens[:, :-1]).float().reshape(-1, VOCABULARY)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))


@torch.no_grad()
def bits_per_byte(model: nn.Module, plan: Plan) -> float:
    """Return the mean bits that a model needs for a held-out byte."""
    total, count = 0.0, 0
    for tokens in plan.held_out():
        with plan.autocast():
            total += float(_loss(model, tokens)) * len(tokens)
        count += len(tokens)
    return total / count / math.log(2)


def dynamic(model: ByteLlama) -> ByteLlama:
    """Return a copy whose layers are `DynamicLinear`."""
    model = copy.deepcopy(model)
    replace(model.blocks, lambda _, layer: DynamicLinear.from_linear(layer))
    return model


@torch.no_grad()
def static(model: ByteLlama, plan: Plan) -> ByteLlama:
    """Return a copy whose layers are `StaticLinear`, with the ranges of some training batches."""
    model = copy.deepcopy(model)
    replace(model.blocks, lambda _, layer: FakeQuantLinear(layer, activation="tensor"))
    with observe(model), plan.autocast():
        for _, tokens in zip(range(_OBSERVED), plan.batches(), strict=False):
            model(tokens[:, :-1])
    replace(model.blocks, lambda _, layer: layer.to_int8())
    return model


def replace(root: nn.Module, make: Callable[[str, Any], nn.Module]) -> None:
    """Replace every linear layer below a module by what `make` returns for its name and it."""
    for name, layer in list(root.named_modules()):
        if isinstance(layer, nn.Linear):
            root.set_submodule(name, make(name, layer))
