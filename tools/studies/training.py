"""Training a small Llama over bytes in one way, and its held-out bits per byte in others."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from skuda.tools.studies.corpus import Corpus
from skuda.tools.studies.llama import LlamaSizes, LlamaStack, angles_of
from skuda.tools.studies.train import TRAINED, ModelShape, TrainedResult
from skuda.torch import DynamicLinear, FakeQuant, FakeQuantLinear, Mixed, observe

LEARNING_RATE = 1e-3
"""The highest one."""
WINDOWS = 512
"""Most held-out sequences."""
_VOCABULARY = 256
_OBSERVED = 8
"""Training batches that fix the static scales."""
_MOST_WARM_UP = 100
_LEAST_RATE = 0.1
"""The learning rate at the end, as a share of the highest."""
_LAYERS: dict[str, Any] = dict(zip(TRAINED, (None, FakeQuant(), Mixed()), strict=True))
"""What makes the layers of each way to train; None leaves them as they are."""


class ByteLlama(nn.Module):
    """The model; `stack` holds the layers that run in int8, while embedding and head stay as they are."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.sizes = LlamaSizes(shape.width, shape.hidden, shape.heads, shape.heads, shape.layers)
        self.embedding = nn.Embedding(_VOCABULARY, shape.width)
        self.stack = LlamaStack(self.sizes)
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, _VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.split(".")[-2] in ("o_proj", "down_proj")
                nn.init.normal_(parameter, std=0.02 * ((2 * shape.layers) ** -0.5 if added else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (B, T, 256) for tokens of shape (B, T)."""
        angles = angles_of(self.sizes, torch.arange(tokens.shape[1], device=tokens.device), torch.float32)
        found: Tensor = self.head(self.norm(self.stack(self.embedding(tokens), angles)))
        return found


@dataclass(frozen=True)
class Training:
    """What is trained, on what, and for how long; see `skuda.tools.studies.train.TrainRecord`."""

    shape: ModelShape
    corpus: Corpus
    device: torch.device
    seed: int
    steps: int
    batch: int
    every: int
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
        count = min(WINDOWS, len(text) // length)
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


def train(name: str, training: Training, report: Callable[[int], None] = lambda _: None) -> TrainedResult:
    """Train a model in a way of `TRAINED`, and evaluate it; `report` is given the number of finished steps."""
    model, layers = training.initial(), _LAYERS[name]
    if layers is not None:
        replace(model.stack, layers.convert)
    losses, times = _trained(model, training, report)
    held_out = {
        "trained": bits_per_byte(model, training),
        "dynamic": bits_per_byte(dynamic(model), training),
        "static": bits_per_byte(static(model, training), training),
    }
    every, tail = training.every, losses[-max(1, training.steps // 10) :]
    return TrainedResult(
        way=name,
        losses=tuple(statistics.fmean(losses[at : at + every]) for at in range(0, len(losses), every)),
        final_loss=statistics.fmean(tail),
        milliseconds=1e3 * statistics.median(times),
        held_out=held_out,
    )


def _trained(model: nn.Module, training: Training, report: Callable[[int], None]) -> tuple[list[float], list[float]]:
    """Train a model in place; return the loss of each step, and the seconds of a step in each interval."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, training.rate)
    run = torch.compile(model, fullgraph=True) if training.compiled else model
    losses: list[float] = []
    times: list[float] = []
    pending: list[Tensor] = []
    began = perf_counter()
    for done, tokens in zip(range(1, training.steps + 1), training.batches(), strict=False):
        with training.autocast():
            loss = _loss(run, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        pending.append(loss.detach())
        if done % training.every == 0 or done == training.steps:
            losses += torch.stack(pending).tolist()  # waits for the device
            times.append((perf_counter() - began) / len(pending))
            pending, began = [], perf_counter()
            report(done)
    return losses, times[1:] or times  # the first interval includes compiling


def _loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each byte from those before it, in nats."""
    logits = model(tokens[:, :-1]).float().reshape(-1, _VOCABULARY)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))


@torch.no_grad()
def bits_per_byte(model: nn.Module, training: Training) -> float:
    """Return the mean bits that a model needs for a held-out byte."""
    total, count = 0.0, 0
    for tokens in training.held_out():
        with training.autocast():
            total += float(_loss(model, tokens)) * len(tokens)
        count += len(tokens)
    return total / count / math.log(2)


def dynamic(model: ByteLlama) -> ByteLlama:
    """Return a copy whose layers are `DynamicLinear`."""
    model = copy.deepcopy(model)
    replace(model.stack, lambda _, layer: DynamicLinear.from_linear(layer))
    return model


@torch.no_grad()
def static(model: ByteLlama, training: Training) -> ByteLlama:
    """Return a copy whose layers are `StaticLinear`, with the ranges of some training batches."""
    model = copy.deepcopy(model)
    replace(model.stack, lambda _, layer: FakeQuantLinear(layer, activation="tensor"))
    with observe(model), training.autocast():
        for _, tokens in zip(range(_OBSERVED), training.batches(), strict=False):
            model(tokens[:, :-1])
    replace(model.stack, lambda _, layer: layer.to_int8())
    return model


def replace(root: nn.Module, make: Callable[[str, Any], nn.Module]) -> None:
    """Replace every linear layer below a module by what `make` returns for its name and it."""
    for name, layer in list(root.named_modules()):
        if isinstance(layer, nn.Linear):
            root.set_submodule(name, make(name, layer))
