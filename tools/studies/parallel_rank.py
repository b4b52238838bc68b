"""One rank of ``skuda bench-model --ranks``: a gated MLP in bf16 and in int8, whole and shared."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812  torch's name

from skuda.dispatch import Dispatcher
from skuda.dispatch.select.tuning import Timing
from skuda.dispatch.shard import GroupBroken
from skuda.dispatch.shard.shards import span, split
from skuda.registry.device import HOST
from skuda.registry.value import Size
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.rivals import linear_of
from skuda.tools.bench.timing import error_line, rounds_each
from skuda.tools.output import words
from skuda.tools.studies.llama import LlamaMLP, LlamaSizes, drawn
from skuda.tools.studies.model import INT8_ALL, INT8_ONE, RANKED, FormResult, PhaseResult
from skuda.tools.studies.model_bench import EXACT, Run
from skuda.tools.studies.processes import RankJob, Save
from skuda.torch import Dynamic, TorchGroup, fuse_, parallelize_, quantize_

_INPUTS = 3
"""Inputs for which outputs are compared."""
_MOST_WITH_NUMPY = 1
"""Rows up to which all of an output is computed by NumPy too."""
_SECONDS = 3.0
"""For the rounds of one form."""


class MlpJob(RankJob):
    """What the ranks do: a gated MLP of some sizes, for some numbers of rows, in a number of rounds."""

    hidden: Size
    intermediate: Size
    rows: tuple[Size, ...]
    repeats: Size


def phases_of(job: MlpJob, found: Sequence[Sequence[Mapping[str, Any]] | None], failed: str) -> tuple[PhaseResult, ...]:
    """Return the results for each number of rows, from those of the ranks; where a rank has none, why."""
    phases = []
    for at, rows in enumerate(job.rows):
        each = [mine[at] for mine in found if mine and at < len(mine)]
        wrong, times, counts = next(filter(None, (one["wrong"] for one in each)), ""), {}, {}
        if len(each) < job.count:
            silent = words(rank for rank, mine in enumerate(found) if at >= len(mine or ()))
            wrong = "; ".join(filter(None, (failed, wrong, f"rank {silent} has no result")))
        else:
            times = {form: Timing.of(us) for form, us in each[0].get("times", {}).items()}
            counts = {name: how(one.get(name, 0) for one in each) for name, how in _COUNTS.items()}
        ways = (FormResult(name=n, timing=times.get(n), refused="" if n in times else "not timed") for n in RANKED)
        phases.append(PhaseResult(phase="mlp", rows=rows, cache=0, ways=tuple(ways), wrong=wrong, **counts))
    return tuple(phases)


_COUNTS: dict[str, Any] = {"compared": min, "with_numpy": max}


def gated(gate_up: Tensor) -> Tensor:
    """Return the products of activated gates with ups."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class SlicedMLP(nn.Module):
    """A rank's part of a gated MLP as serving engines split it: each rank rounds its part of the sum to bf16.

    Without a group it is all of `mlp`, which is in bf16. `layer` makes the layers from `nn.Linear`, and `activation`
    is `gated`, or computes the same.
    """

    def __init__(
        self,
        mlp: LlamaMLP,
        group: TorchGroup | None,
        layer: Callable[[nn.Linear], nn.Module] = lambda linear: linear,
        activation: Callable[[Tensor], Tensor] = gated,
    ) -> None:
        super().__init__()
        self.group, self.activation = group, activation
        inner = mlp.down_proj.weight.shape[1]
        part = slice(None) if group is None else span(split(inner, group.count), group.rank)
        gate_up = torch.cat([mlp.gate_proj.weight[part], mlp.up_proj.weight[part]])
        self.gate_up, self.down = (
            layer(linear_of(one)) for one in (gate_up, mlp.down_proj.weight[:, part].contiguous())
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of the input."""
        found: Tensor = self.down(self.activation(self.gate_up(x)))
        if self.group is not None:
            distributed.all_reduce(found, group=self.group.process_group)
        return found


def exact(*mlps: LlamaMLP, group: TorchGroup | None = None) -> nn.Sequential:
    """Return gated MLPs in int8 as users of `skuda.torch` make them, fused, and shared by the ranks of a group."""
    made = nn.Sequential(*copy.deepcopy(mlps))
    quantize_(made, Dynamic(), strict=True)
    fuse_(made)
    if group is not None:
        parallelize_(made, group)
    return made


class MlpBench:
    """What a rank measures."""

    def __init__(self, job: MlpJob, rank: int) -> None:
        self.job, cuda = job, job.backend == "nccl"
        device = next(one for one in Dispatcher().devices if one.place == ("cuda", rank)) if cuda else HOST
        self.lab = TorchLab(device)
        self.place = torch.device(f"cuda:{rank}" if cuda else "cpu")
        self.group = TorchGroup()
        self.token = torch.zeros(1, device=self.place)
        sizes = LlamaSizes(job.hidden, job.intermediate)
        whole = drawn(LlamaMLP, sizes, seed=job.seed, device=str(self.place))
        compiled = torch.compile(gated, dynamic=False)
        real = (SlicedMLP(whole, group, activation=compiled) for group in (None, self.group))
        self.modules = dict(zip(RANKED, (*real, exact(whole), exact(whole, group=self.group)), strict=True))
        self.random = torch.Generator(self.place).manual_seed(job.seed)

    def measure(self, rows: int) -> dict[str, Any]:
        """Compare and time everything for one number of rows."""
        given = torch.empty(rows, self.job.hidden, dtype=torch.bfloat16, device=self.place)
        self._renew(given)
        ready = {form: Run.of(self.lab, module, given, careful=False) for form, module in self.modules.items()}
        wrong, with_numpy = self._compared(ready[INT8_ONE], ready[INT8_ALL], given)
        unable = ""
        try:
            differs = self._compiled(ready[INT8_ONE], given)
            wrong = wrong or differs
        except GroupBroken:
            raise
        except RuntimeError as error:  # of compilers; what was captured can be timed all the same
            unable = f"all ranks, compiled: {error_line(error)}"
        wrong = next(filter(None, self.group.exchange(wrong)), "")
        times = {} if wrong else self._timed(ready)
        ready.clear()  # before `tidy`, which gives back their memory
        self.lab.tidy()
        wrong = wrong or unable
        return {"wrong": wrong, "compared": 0 if wrong else _INPUTS, "with_numpy": with_numpy, "times": times}

    def _renew(self, given: Tensor) -> None:
        """Draw another input, the same on every rank."""
        given.normal_(generator=self.random)
        given *= 3.0 ** torch.randn(len(given), 1, generator=self.random, device=self.place)

    def _compared(self, one: Run, every: Run, given: Tensor) -> tuple[str, int]:
        """Return the first difference of ours on all ranks from ours on one, and the rows compared with NumPy.

        A rank that finds one goes on like the others, which wait for it in collectives.
        """
        wrong, with_numpy = "", 0
        for number in range(_INPUTS):
            self._renew(given)
            one.call()
            want = one.output.clone()
            if number == 0 and self.group.rank == 0 and len(given) <= _MOST_WITH_NUMPY:
                host = copy.deepcopy(self.modules[INT8_ONE]).cpu()
                found = self.lab.differences(want, host(given.cpu()).to(self.place), 0)
                wrong = wrong or (found and f"one rank, called, differs from NumPy: {found}")
                with_numpy = len(given)
            for what, ready, how in (
                ("one rank, replayed", one, one.replay),
                ("all ranks, called", every, every.call),
                ("all ranks, replayed", every, every.replay),
            ):
                self.lab.poison({"output": ready.output})
                how()
                wrong = wrong or self._difference(what, ready.output, want)
        return wrong, with_numpy

    def _compiled(self, one: Run, given: Tensor) -> str:
        """Return how ours, compiled on all ranks, differs from ours on one rank, called."""
        run, wrong = torch.compile(self.modules[INT8_ALL], **EXACT), ""
        for _ in range(_INPUTS):
            self._renew(given)
            one.call()
            got = run(given)
            wrong = wrong or self._difference("all ranks, compiled", got, one.output)
        return wrong

    def _difference(self, what: str, got: Tensor, want: Tensor) -> str:
        found = self.lab.differences(got, want, 0)
        return found and f"{what}, rank {self.group.rank}, differs from one rank, called: {found}"

    def _timed(self, ready: Mapping[str, Run]) -> dict[str, list[float]]:
        """Return the microseconds of rounds by form, each that of the slowest rank."""
        calls = [one.replay for one in ready.values()]
        rough = self._slowest([[self.lab.clock.measure([call], self._align)[0]] for call in calls])
        rounds = rounds_each({at: one[0] for at, one in enumerate(rough)}, self.job.repeats, _SECONDS)
        each = [self.lab.clock.measure(calls, self._align) for _ in range(min(rounds.values()))]
        return dict(zip(ready, self._slowest([list(times) for times in zip(*each, strict=True)]), strict=True))

    def _align(self) -> None:
        """Flush the cache, and let the ranks begin what follows together."""
        self.lab.flush()
        distributed.all_reduce(self.token)

    def _slowest(self, times: list[list[float]]) -> list[list[float]]:
        """Return the maxima over the ranks, with which every rank goes on."""
        tensor = torch.tensor(times, device=self.place)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        found: list[list[float]] = tensor.tolist()
        return found


def work(job: MlpJob, rank: int, save: Save) -> None:
    """Measure every number of rows, and save the results after each."""
    # Every number of rows is compiled anew.
    torch._dynamo.config.recompile_limit = 8 * max(1, len(job.rows))  # noqa: SLF001  its public place
    bench, found = MlpBench(job, rank), []
    for rows in job.rows:
        try:
            found.append(bench.measure(rows))
        except GroupBroken:
            raise
        except Exception as error:
            found.append({"wrong": f"rank {rank}: {error_line(error)}"})
            save(found)
            raise  # the other ranks wait in a collective
        save(found)
        distributed.barrier()  # a rank that fails later leaves the results of all
    # Graphs end before the communicator whose collectives they hold.
    del bench
    gc.collect()
