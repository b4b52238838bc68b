"""One rank of ``skuda bench-parallel``: ``python -m skuda.tools.parallel.worker FOLDER RANK``."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812  torch's name
from torch.profiler import ProfilerActivity, profile, record_function

from skuda.dispatch import Dispatcher
from skuda.dispatch.shard import GroupBroken
from skuda.dispatch.shard.shards import span, split
from skuda.registry.device import HOST
from skuda.tools.bench import llama
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.measurement import error_line, rounds_each
from skuda.tools.parallel.record import INT8_ALL, INT8_ONE, REAL_ALL, REAL_ONE, Orders
from skuda.tools.parallel.trace import MARK, Trace, extents, median_at, replays
from skuda.tools.ranks.carriers import as_rank
from skuda.torch import Dynamic, TorchGroup, fuse_, parallelize_, quantize_

Call = Callable[[], object]
_INPUTS = 3
"""Inputs for which outputs are compared."""
_MOST_WITH_NUMPY = 1
"""Rows up to which all of an output is computed by NumPy too."""
_SECONDS = 3.0
"""For the rounds of one way."""
_TRACED = 5
"""Replays of one way that are traced."""
# Rounds where eager execution does, so that the bits are those of eager execution.
_COMPILED = {"fullgraph": True, "dynamic": False, "options": {"emulate_precision_casts": True}}


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class RealMLP(nn.Module):
    """A rank's part of a gated MLP in bf16; with a group, its partial results are added by an all-reduce in bf16."""

    def __init__(self, mlp: llama.MLP, group: TorchGroup | None, *, compiled: bool) -> None:
        super().__init__()
        self.group, self.gated = group, torch.compile(_gated, dynamic=False) if compiled else _gated
        inner = mlp.down_proj.weight.shape[1]
        part = slice(None) if group is None else span(split(inner, group.count), group.rank)
        self.gate_up = torch.cat([mlp.gate_proj.weight[part], mlp.up_proj.weight[part]])
        self.down = mlp.down_proj.weight[:, part].contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of the input."""
        found = F.linear(self.gated(F.linear(x, self.gate_up)), self.down)
        if self.group is not None:
            distributed.all_reduce(found, group=self.group.process_group)
        return found


class _Ready(NamedTuple):
    """A way that writes `output`, called and replayed."""

    call: Call
    replay: Call
    output: Tensor


class Bench:
    """What a rank measures.

    Parameters
    ----------
    orders : Orders
    rank : int
        Its number.
    """

    def __init__(self, orders: Orders, rank: int) -> None:
        self.orders, cuda = orders, orders.backend == "nccl"
        device = HOST
        if cuda:
            device = next(one for one in Dispatcher().devices if one.place == ("cuda", rank))
        self.lab = TorchLab(device)
        self.place = torch.device(f"cuda:{rank}" if cuda else "cpu")
        self.group = TorchGroup()
        self.token = torch.zeros(1, device=self.place)
        sizes = llama.Sizes(orders.hidden, orders.intermediate, heads=1, kv_heads=1, layers=1)
        whole = llama.random_stack(sizes, orders.seed, str(self.place)).layers[0].mlp
        self.modules: dict[str, tuple[nn.Module, ...]] = {
            REAL_ONE: tuple(RealMLP(whole, None, compiled=compiled) for compiled in (False, True)),
            REAL_ALL: tuple(RealMLP(whole, self.group, compiled=compiled) for compiled in (False, True)),
            INT8_ONE: (_int8(whole),),
        }
        shared = copy.deepcopy(self.modules[INT8_ONE][0])
        parallelize_(shared, self.group)
        self.modules[INT8_ALL] = (shared,)
        self.random = torch.Generator(self.place).manual_seed(orders.seed)
        self.timed: dict[tuple[int, str], Call] = {}

    def measure(self, rows: int) -> dict[str, Any]:
        """Compare and time everything for one number of rows."""
        given = torch.empty(rows, self.orders.hidden, dtype=torch.bfloat16, device=self.place)
        self._renew(given)
        ready = {way: [self._ready(module, given) for module in modules] for way, modules in self.modules.items()}
        wrong, with_numpy = self._compared(ready[INT8_ONE][0], ready[INT8_ALL][0], given)
        unable = ""
        try:
            differs = self._compiled(ready[INT8_ONE][0], given)
            wrong = wrong or differs
        except GroupBroken:
            raise
        except RuntimeError as error:  # of compilers; what was captured can be timed all the same
            unable = f"all ranks, compiled: {error_line(error)}"
        wrong = next(filter(None, self.group.exchange(wrong)), "")
        times = {} if wrong else self._timed(rows, ready)
        self.lab.tidy()
        wrong = wrong or unable
        return {"wrong": wrong, "compared": 0 if wrong else _INPUTS, "with_numpy": with_numpy, "times": times}

    def _renew(self, given: Tensor) -> None:
        """Draw another input, the same on every rank."""
        given.normal_(generator=self.random)
        given *= 3.0 ** torch.randn(len(given), 1, generator=self.random, device=self.place)

    def _ready(self, module: nn.Module, given: Tensor) -> _Ready:
        output = torch.empty_like(given)

        def call() -> None:
            output.copy_(module(given))

        # A graph of NCCL's collectives: warmed up on its stream, and ended on all ranks.
        return _Ready(call, self.lab.clock.capture(call, careful=False), output)

    def _compared(self, one: _Ready, every: _Ready, given: Tensor) -> tuple[str, int]:
        """Return the first difference of ours on all ranks from ours on one, and the rows compared with NumPy.

        A rank that finds one goes on like the others, which wait for it in collectives.
        """
        wrong, with_numpy = "", 0
        for number in range(_INPUTS):
            self._renew(given)
            one.call()
            want = one.output.clone()
            if number == 0 and self.group.rank == 0 and len(given) <= _MOST_WITH_NUMPY:
                host = copy.deepcopy(self.modules[INT8_ONE][0]).cpu()
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

    def _compiled(self, one: _Ready, given: Tensor) -> str:
        """Return how ours, compiled on all ranks, differs from ours on one rank, called."""
        run, wrong = torch.compile(self.modules[INT8_ALL][0], **_COMPILED), ""
        for _ in range(_INPUTS):
            self._renew(given)
            one.call()
            got = run(given)
            wrong = wrong or self._difference("all ranks, compiled", got, one.output)
        return wrong

    def _difference(self, what: str, got: Tensor, want: Tensor) -> str:
        found = self.lab.differences(got, want, 0)
        return found and f"{what}, rank {self.group.rank}, differs from one rank, called: {found}"

    def _timed(self, rows: int, ready: Mapping[str, list[_Ready]]) -> dict[str, list[float]]:
        """Return the microseconds of rounds by way, each that of the slowest rank; of several forms the faster."""
        names = [(way, form) for way, forms in ready.items() for form in range(len(forms))]
        calls = [ready[way][form].replay for way, form in names]
        rough = self._slowest([[self.lab.clock.measure([call], self._align)[0]] for call in calls])
        rounds = rounds_each({str(at): one[0] for at, one in enumerate(rough)}, self.orders.repeats, _SECONDS)
        count = min(rounds.values())
        found: list[list[float]] = [[] for _ in names]
        for _ in range(count):
            for at, us in enumerate(self.lab.clock.measure(calls, self._align)):
                found[at].append(us)
        found = self._slowest(found)
        best: dict[str, list[float]] = {}
        for (way, _), times, call in zip(names, found, calls, strict=True):
            if way not in best or sorted(times)[count // 2] < sorted(best[way])[count // 2]:
                best[way] = times
                if self.orders.trace:
                    self.timed[rows, way] = call
        return best

    def _align(self) -> None:
        """Flush the cache, and let the ranks begin what follows together."""
        self.lab.flush()
        distributed.all_reduce(self.token)

    def traces(self, file: Path) -> dict[tuple[int, str], Trace]:
        """Trace what was timed, in the same way, and return the median replay of each; the file is for the profiler."""
        names = {case: f"{case[0]} {case[1]}" for case in self.timed}
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.place.type == "cuda" else [])]
        with profile(activities=activities) as profiler:
            for case, call in self.timed.items():
                self.lab.clock.measure([_marked(names[case], call)] * _TRACED, self._align)
        profiler.export_chrome_trace(str(file))
        recorded = replays(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])
        found = {case: recorded.get(name, [])[:_TRACED] for case, name in names.items()}
        lost = [float("inf")] * _TRACED
        slowest = self._slowest([(extents(each) + lost)[:_TRACED] for each in found.values()])
        medians = {case: median_at(each) for case, each in zip(found, slowest, strict=True)}
        return {case: Trace.of(found[case][at]) for case, at in medians.items() if at is not None}

    def _slowest(self, times: list[list[float]]) -> list[list[float]]:
        """Return the maxima over the ranks, with which every rank goes on."""
        tensor = torch.tensor(times, device=self.place)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        found: list[list[float]] = tensor.tolist()
        return found


def _marked(name: str, call: Call) -> Call:
    """Return a call that the profiler sees as a range of this name."""

    def marked() -> None:
        with record_function(f"{MARK}{name}"):
            call()

    return marked


def _int8(mlp: llama.MLP) -> nn.Module:
    """Return a gated MLP in int8, fused."""
    made = nn.Sequential(copy.deepcopy(mlp))
    quantize_(made, Dynamic(), strict=True)
    fuse_(made)
    return made


def run(folder: Path, rank: int) -> None:
    """Do what the orders in a folder say; write what was found after each number of rows."""
    orders = Orders.model_validate_json(folder.joinpath("orders.json").read_text(encoding="utf-8"))
    if orders.backend == "nccl":
        torch.cuda.set_device(rank)
    rendezvous = folder.joinpath("rendezvous").as_uri()
    patience = timedelta(seconds=orders.patience)
    distributed.init_process_group(orders.backend, rendezvous, patience, orders.count, rank)
    # Every number of rows is compiled anew.
    torch._dynamo.config.recompile_limit = 8 * max(1, len(orders.rows))  # noqa: SLF001  its public place
    found: list[dict[str, Any]] = []

    def save() -> None:
        folder.joinpath(f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")

    def tell(rows: int, result: Mapping[str, Any]) -> None:
        found.append({"rows": rows, **result})
        save()

    with torch.no_grad():
        bench = Bench(orders, rank)
        for rows in orders.rows:
            try:
                tell(rows, bench.measure(rows))
            except GroupBroken:
                raise
            except Exception as error:
                tell(rows, {"wrong": f"rank {rank}: {error_line(error)}"})
                raise  # the other ranks wait in a collective
        # Traced at the end, so that no profiler is there while anything is timed.
        traces = bench.traces(folder / f"{rank}.trace") if bench.timed else {}
    for result in found:
        result["traces"] = {way: trace.model_dump() for (rows, way), trace in traces.items() if rows == result["rows"]}
    save()
    distributed.barrier()
    # Graphs end before the communicator whose collectives they hold.
    bench.timed.clear()
    gc.collect()
    distributed.destroy_process_group()


if __name__ == "__main__":
    as_rank(run)
