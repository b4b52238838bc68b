"""`certify`: shows on a whole model that the log-probability of a token does not depend on how it is computed.

Prompts are run in many ways: alone, in chunks, step by step, with padding to the left and right, in batches at any
place, after a shared prefix, compiled, captured, on a CPU, on several ranks, and in training. The log-probabilities of
their tokens are compared, as bit patterns, with those of each prompt alone. Where they differ, both ways are run again,
and the first layer, op and row that differ are named.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.certification.recorder import Recorder, Site
from skuda.torch.certification.ways import ALONE, FIXED, LEFT, Batch, Logprobs, batches, cache_name, cache_of, keep, run
from skuda.torch.models.replaceable_layers import check_count, check_no_adapters
from skuda.torch.ops.tensor_op import refuse_other

LENGTHS = (3, 130, 41, 7, 200)
"""Tokens of the prompts that are drawn: less than a page of the cache, and more."""
_DIGITS = 16
_CALL = 8
"""Tokens that take as long as a call does besides."""
_SMALL, _FEW_LAYERS = 100_000_000, 2
"""Parameters of a model that is compared on the CPU as a whole, and the layers that are compared of others."""
Run = Callable[[], Logprobs]


@dataclass(frozen=True)
class Way:
    """The outcome of one way.

    Attributes
    ----------
    name : str
        The way.
    digest : str
        Of the bits of its log-probabilities.
    same : bool
        Whether all bits are those of the prompts alone.
    note : str
        Where they differ first, or nothing.
    """

    name: str
    digest: str
    same: bool
    note: str = ""


@dataclass(frozen=True)
class Certificate:
    """What `certify` found.

    Attributes
    ----------
    ways : tuple of Way
        The first is each prompt alone.
    tokens : int
        Log-probabilities of that way.
    """

    ways: tuple[Way, ...]
    tokens: int

    @property
    def ok(self) -> bool:
        """Whether all ways have the same bits."""
        return all(way.same for way in self.ways)

    def __str__(self) -> str:
        width = max(len(way.name) for way in self.ways)
        lines = [f"{self.tokens} log-probabilities of f32, bit for bit"]
        for way in self.ways:
            verdict = "same" if way.same else f"DIFFERS: {way.note}"
            lines.append(f"{way.name:{width}}  {way.digest}  {verdict}")
        return "\n".join(lines)


def certify(
    model: Any,
    prompts: Sequence[Tensor] | int | None = None,
    *,
    seed: int = 0,
    batch: int = 16,
    trainer: Any = None,
    cpu_layers: int | None = None,
    compiler: str | None = None,
    others: Mapping[str, Callable[[Sequence[Tensor]], Logprobs]] | None = None,
    report: Callable[[str], None] | None = None,
    done: Callable[[Way, float], None] | None = None,
) -> Certificate:
    """Compare the log-probabilities of tokens, bit for bit, over the ways to compute them.

    Parameters
    ----------
    model : PreTrainedModel
        A language model of transformers in eval mode, after `skuda.torch.exact.exact_`. Any other is shown to differ.
    prompts : sequence of tensors of shape (tokens,), s64, or int, optional
        Ids, two or more of each. By default five are drawn, or as many as the number says.
    seed : int
        Draws prompts, chunks, places and the other sequences of batches.
    batch : int
        Sequences of the largest batch.
    trainer : PreTrainedModel, optional
        The same model in training, as `exact_` leaves one of `Mixed` layers. Its gradients are recorded.
    cpu_layers : int, optional
        If the model is on a GPU, the number of its first layers that are compared with a CPU. By default all, or two if
        it has more than 100 million parameters.
    compiler : str, optional
        The backend of `torch.compile`: by default ``inductor`` on a GPU, and ``aot_eager`` on a CPU. With an
        empty one, nothing is compiled.
    others : mapping, optional
        Further ways by name: functions that return the log-probabilities of prompts. One that differs and has a method
        ``why`` says more with it.
    report : callable, optional
        Called with the name of each way before it is run.
    done : callable, optional
        Called with each way after it was run, and with the share of all work that is done then, an estimate.

    Returns
    -------
    Certificate

    Raises
    ------
    InvalidProblem
        For a prompt of less than two tokens, a batch of less than two, or a model with adapters.
    """
    _check(model, trainer, prompts, seed, batch)
    rng = torch.Generator().manual_seed(seed)
    if prompts is None or isinstance(prompts, int):
        lengths = LENGTHS[:prompts]
        prompts = [torch.randint(model.config.vocab_size, (length,), generator=rng) for length in lengths]
    prompts = [prompt.cpu() for prompt in prompts]
    if any(prompt.dim() != 1 or len(prompt) < 2 for prompt in prompts):
        had = str([list(prompt.shape) for prompt in prompts])
        raise InvalidProblem("certify", "prompts", had, "be ids of two tokens or more each, of one axis")
    ways = batches(prompts, batch, rng)
    on_gpu = model.device.type == "cuda"
    runs: dict[str, Run] = {name: partial(run, model, prompts, several) for name, several in ways.items()}
    backend = compiler if compiler is not None else "inductor" if on_gpu else "aot_eager"
    if backend:
        runs[f"compiled by {backend}"] = partial(_compiled, model, prompts, [*ways[LEFT], *ways[FIXED]], backend)
    if on_gpu:
        runs["captured steps"] = partial(_captured, model, prompts)
    if trainer is not None:
        runs["in training"] = partial(run, trainer, prompts, ways[LEFT], recorded=True)
    why: dict[str, Callable[[], str]] = {
        name: partial(located, model, prompts, ways[ALONE], several) for name, several in ways.items()
    }
    for name, other in (others or {}).items():
        runs[name], why[name] = partial(other, prompts), getattr(other, "why", str)
    found: list[Way] = []
    work = _Work(ways, [*runs, *["on the CPU"] * on_gpu], done)
    want: Logprobs = {}
    for name, each in _told(runs, report):
        got = each()
        want = want or got
        note = difference(want, got)
        if note and name in why:
            note += why[name]()
        found.append(Way(name, digest(got), not note, note))
        work.end(found[-1])
    if on_gpu:
        found += _on_cpu(model, prompts, ways[ALONE], cpu_layers, report)
        work.end(found[-1])
    return Certificate(tuple(found), sum(map(len, want.values())))


def _check(model: Any, trainer: Any, prompts: Any, seed: object, batch: object) -> None:
    """Raise `InvalidProblem` for arguments of `certify` of a wrong kind."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise InvalidProblem("certify", "model", shown(model), "be a language model of transformers")
    for field, each in (("model", model), ("trainer", trainer)):
        if each is not None:
            check_no_adapters("certify", field, each)
    check_count("certify", "batch", batch, least=2)
    check_count("certify", "seed", seed)
    if int(seed) >= 1 << 64:  # type: ignore[call-overload]
        raise InvalidProblem("certify", "seed", shown(seed), "be below 2^64")
    if isinstance(prompts, int) and not isinstance(prompts, bool):
        if not 1 <= prompts <= len(LENGTHS):
            raise InvalidProblem("certify", "prompts", shown(prompts), f"be at least 1 and at most {len(LENGTHS)}")
        return
    if prompts is not None and (not isinstance(prompts, Sequence) or not prompts):
        raise InvalidProblem("certify", "prompts", shown(prompts), "be a list of tensors, at least one, or left out")
    for prompt in prompts or ():
        refuse_other("certify", "prompts", prompt)


class _Work:
    """What is done of all ways, by their tokens and calls. Other ways than those of batches count as one batch."""

    def __init__(
        self, ways: Mapping[str, list[Batch]], names: Sequence[str], done: Callable[[Way, float], None] | None
    ) -> None:
        costs = {
            name: sum(b.ids.numel() + _CALL * (len(b.ends) + 1) for b in several) for name, several in ways.items()
        }
        self._costs = [costs.get(name, costs[LEFT]) for name in names]
        self._done, self._ended = done, 0

    def end(self, way: Way) -> None:
        """Tell that the next way has ended."""
        self._ended += 1
        if self._done is not None:
            self._done(way, sum(self._costs[: self._ended]) / sum(self._costs))


def _told(runs: Mapping[str, Run], report: Callable[[str], None] | None) -> Iterator[tuple[str, Run]]:
    for name, each in runs.items():
        if report is not None:
            report(name)
        yield name, each


def _on_cpu(
    model: Any,
    prompts: Sequence[Tensor],
    alone: Sequence[Batch],
    layers: int | None,
    report: Callable[[str], None] | None,
) -> Iterator[Way]:
    """Yield the way of the CPU, which is compared with the same layers on the GPU."""
    if layers is None and sum(each.numel() for each in model.parameters()) > _SMALL:
        layers = _FEW_LAYERS
    first = first_layers(model, layers)
    runs = {"on the CPU" + (f", {layers} layers" if layers else ""): partial(_moved, first, prompts, alone)}
    for name, each in _told(runs, report):
        got = each()
        note = difference(run(first, prompts, alone), got)
        yield Way(name, digest(got), not note, note)


def _moved(model: Any, prompts: Sequence[Tensor], several: Sequence[Batch]) -> Logprobs:
    return run(copy.deepcopy(model).cpu(), prompts, several)


def _compiled(model: Any, prompts: Sequence[Tensor], several: Sequence[Batch], backend: str) -> Logprobs:
    torch._dynamo.reset()  # noqa: SLF001  it has no public name; graphs of earlier shapes would count
    return run(model, prompts, several, call=torch.compile(model, backend=backend))


def _captured(model: Any, prompts: Sequence[Tensor]) -> Logprobs:
    """Return what a captured step gives that is replayed for all tokens but the first two."""
    found: Logprobs = {}
    device = model.device
    for number, prompt in enumerate(prompts):
        ids = prompt.to(device)
        cache = cache_of(model, Batch(prompt, prompt, (), most=len(prompt)))
        token, at = ids[:1, None].clone(), torch.zeros(1, 1, dtype=torch.int64, device=device)
        given = {"position_ids": at, cache_name(model): cache, "use_cache": True}
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        logits: Any = None
        with torch.no_grad():
            for position in range(len(prompt)):
                token.copy_(ids[position].view(1, 1))
                at.fill_(position)
                if position < 2:  # a capture wants kernels that have run
                    side.wait_stream(torch.cuda.current_stream(device))
                    with torch.cuda.stream(side):
                        logits = model(token, **given).logits
                    torch.cuda.current_stream(device).wait_stream(side)
                else:
                    if position == 2:
                        with torch.cuda.graph(graph):
                            logits = model(token, **given).logits
                    graph.replay()
                keep(found, prompts, logits, [[(number, position)]])
    return found


def first_layers(model: Any, layers: int | None) -> Any:
    """Return the model with its first layers only, which it shares."""
    if layers is None:
        return model
    found = copy.copy(model)
    found._modules = dict(model._modules)  # noqa: SLF001  torch has no public way to copy a module without its tensors
    name = next(name for name, child in model.named_children() if child is model.base_model)
    base = copy.copy(model.base_model)
    base._modules = dict(base._modules) | {"layers": nn.ModuleList(list(base.layers)[:layers])}  # noqa: SLF001
    found.config = base.config = copy.copy(base.config)
    base.config.num_hidden_layers = layers
    found._modules[name] = base  # noqa: SLF001
    return found


def digest(found: Logprobs) -> str:
    """Return a digest of the bits."""
    made = hashlib.sha256()
    for _, values in sorted(found.items()):
        made.update(values.numpy().tobytes())
    return made.hexdigest()[:_DIGITS]


def difference(want: Logprobs, got: Logprobs) -> str:
    """Return where log-probabilities differ first, and how many do, or nothing."""
    for number, values in sorted(want.items()):
        other = got.get(number)
        if other is None or other.shape != values.shape:
            return f"prompt {number} has no result"
        unequal = values.view(torch.int32) != other.view(torch.int32)
        if unequal.any():
            at = int(unequal.nonzero()[0])
            return f"prompt {number}, token {at + 1} has {other[at]:.9g}, alone {values[at]:.9g}"
    return ""


def located(model: Any, prompts: Sequence[Tensor], alone: Sequence[Batch], other: Sequence[Batch]) -> str:
    """Return the first layer, op and row in which a way differs from the prompts alone, in words."""
    seen: list[Mapping[Site, Mapping[tuple[int, int], Tensor]]] = []
    for several in (alone, other):
        recorder = Recorder(model)
        run(model, prompts, several, recorder=recorder)
        seen.append(recorder.rows)
    want, got = seen
    for site, rows in want.items():
        for token, row in sorted(rows.items()):
            found = got.get(site, {}).get(token)
            if found is not None and found.shape == row.shape and not torch.equal(_bits(found), _bits(row)):
                at = int((_bits(found) != _bits(row)).nonzero()[0])
                values = f"{found[at].item():.9g}, alone {row[at].item():.9g}"
                return f"; first in {site}, prompt {token[0]}, token {token[1]}, element {at}: {values}"
    return ""


def _bits(row: Tensor) -> Tensor:
    return row.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[row.element_size()])
