"""The measurement of ``skuda bench-model``: a Llama stack in several ways, in the same rounds, and its record."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from skuda.dispatch.select.environment import driver_version, skuda_version, versions
from skuda.registry.device import Device
from skuda.tools.bench.host import host_costs
from skuda.tools.bench.lab import Lab
from skuda.tools.bench.measurement import error_line, rounds_each, time_interleaved
from skuda.tools.bench.model_record import ModelRecord, Phase, PhaseResult, WayResult, model_measurer_hash
from skuda.tools.bench.record import HostCost
from skuda.tools.bench.ways import Way
from skuda.tools.output import Report

Call = Callable[[], object]
_PACKAGES = ("torch", "triton", "torchao", "bitsandbytes")
_BUDGET = 4.0
"""Seconds for the rounds of one way in one phase."""
_COMPARED = 3
"""Inputs for which the ways of ours must agree."""
_HOST_ROWS, _HOST_WIDTH = 16, 256


class _Run(NamedTuple):
    """A way that is ready: a call and its replay, which write `output`, and the microseconds of one replay.

    `renew` draws another input, the same for all ways.
    """

    renew: Call
    call: Call
    replay: Call
    output: Any
    us: float


@dataclass(frozen=True)
class ModelBench:
    """Measures a stack in several ways.

    Attributes
    ----------
    device, lab
        Where; the lab is one of torch.
    sizes : llama.Sizes
        Sizes of the stack.
    ways : sequence of Way
        The first is what errors are relative to.
    seed, repeats : int
        Of weights and inputs; rounds.
    """

    device: Device
    lab: Lab
    sizes: Any
    ways: Sequence[Way]
    seed: int
    repeats: int = 20
    modules: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def run(self, shapes: Sequence[tuple[Phase, int, int]], command: str, report: Report | None = None) -> ModelRecord:
        """Measure phases, each of a name, rows and cache; see `PhaseResult`."""
        torch, start = _torch(), time.perf_counter()
        report = report or (lambda done, total, what: None)  # noqa: ARG005  nobody watches
        with torch.no_grad():
            self._make()
            phases = []
            for number, (phase, rows, cache) in enumerate(shapes):
                watch = partial(report, number, len(shapes))
                phases.append(self._phase(phase, rows, cache, watch))
                self.lab.tidy()
            report(len(shapes), len(shapes), "host")
            host = self._host()
        cuda = self.device.processor == "cuda"
        return ModelRecord(
            device=self.device,
            driver=driver_version() if cuda else "",
            versions=versions(_PACKAGES),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            skuda=skuda_version(),
            seed=self.seed,
            repeats=self.repeats,
            command=command,
            seconds=round(time.perf_counter() - start, 1),
            measurer_hash=model_measurer_hash(),
            sizes=asdict(self.sizes),
            graph=cuda,
            computes={way.name: way.computes for way in self.ways},
            bytes={way.name: weight_bytes(self.modules[way.name]) for way in self.ways if way.name in self.modules},
            absent=dict(self.absent),
            phases=tuple(phases),
            host=host,
        )

    def _make(self) -> None:
        llama = importlib.import_module("skuda.tools.bench.llama")
        stack = llama.random_stack(self.sizes, self.seed, str(self._place()))
        for way in self.ways:
            if way.absence:
                self.absent[way.name] = way.absence
                continue
            try:
                self.modules[way.name] = self.modules[way.base] if way.base else way.make(stack)
            except Exception as error:
                if way.ours:
                    raise
                self.absent[way.name] = error_line(error)

    def _place(self) -> Any:
        cuda = self.device.processor == "cuda"
        return _torch().device(f"cuda:{self.device.ordinal or 0}" if cuda else "cpu")

    def _phase(self, phase: Phase, rows: int, cache: int, watch: Callable[[str], None]) -> PhaseResult:
        """Measure one phase; a failure of ours is recorded like a wrong result."""
        runs, failed = self._runs(phase, rows, cache, watch)
        watch(f"{phase} {rows}")
        wrong = next((f"{way.name}: {failed[way.name]}" for way in self.ways if way.ours and way.name in failed), "")
        if not wrong:
            wrong = self._differences({way.name: runs[way.name] for way in self.ways if way.ours})
        results = {name: WayResult(name=name, refused=reason) for name, reason in (self.absent | failed).items()}
        if not wrong:
            results |= self._timed(runs)
        ways = (results.get(way.name, WayResult(name=way.name, refused="not timed")) for way in self.ways)
        return PhaseResult(
            phase=phase, rows=rows, cache=cache, ways=tuple(ways), compared=0 if wrong else _COMPARED, wrong=wrong
        )

    def _runs(
        self, phase: Phase, rows: int, cache: int, watch: Callable[[str], None]
    ) -> tuple[dict[str, _Run], dict[str, str]]:
        """Prepare every way for inputs of one shape; return them, and why others fail."""
        torch, llama, place = _torch(), importlib.import_module("skuda.tools.bench.llama"), self._place()
        shape = (rows, 1) if phase == "decode" else (1, rows)
        given = torch.empty(*shape, self.sizes.hidden, dtype=torch.bfloat16, device=place)
        generator = torch.Generator(place).manual_seed(self.seed)
        caches = llama.random_caches(self.sizes, shape[0], cache, given, self.seed)
        positions = torch.arange(cache - shape[1], cache, device=place)
        angles = llama.angles_of(self.sizes, positions)

        def renew() -> None:
            given.normal_(generator=generator)

        renew()
        runs, failed = {}, {}
        for way in self.ways:
            if way.name in self.absent:
                continue
            watch(f"{phase} {rows}: {way.name}")
            module = self.modules[way.name]
            if way.compiled is not None:
                module = torch.compile(module, **way.compiled)
            # Every way has an output at a place of its own.
            output = torch.empty_like(given)
            call = partial(_into, output, module, given, angles, caches, positions)
            try:
                replay = self.lab.capture(call)
                runs[way.name] = _Run(renew, call, replay, output, self.lab.measure([replay])[0])
            except Exception as error:  # noqa: BLE001  foreign code, and too little memory; it is recorded
                failed[way.name] = error_line(error)
        return runs, failed

    def _timed(self, runs: Mapping[str, _Run]) -> dict[str, WayResult]:
        first = next(iter(runs.values()))
        for run in runs.values():
            run.replay()
        errors = {name: _distance(run.output, first.output) for name, run in runs.items()}
        rounds = rounds_each({name: run.us for name, run in runs.items()}, self.repeats, _BUDGET)
        timings = time_interleaved(self.lab, {name: run.replay for name, run in runs.items()}, rounds)
        ours = min(timings[way.name].median for way in self.ways if way.ours)
        return {
            name: WayResult(name=name, timing=timing, ratio=timing.median / ours, error=errors[name])
            for name, timing in timings.items()
        }

    def _differences(self, runs: Mapping[str, _Run]) -> str:
        """Run ways on new inputs, called and replayed; describe the first difference from the first way, called."""
        for _ in range(_COMPARED):
            want = None
            for name, run in runs.items():
                if want is None:
                    run.renew()
                for what, how in (("called", run.call), ("replayed", run.replay)):
                    self.lab.poison({"output": run.output})
                    how()
                    want = run.output.clone() if want is None else want
                    difference = self.lab.differences(run.output, want, 0)
                    if difference:
                        return f"{name}, {what}, differs from {next(iter(runs))}, called: {difference}"
        return ""

    def _host(self) -> tuple[HostCost, ...]:
        """Time calls of small layers: `F.linear` in bf16, and a dynamic int8 layer."""
        torch, place, cuda = _torch(), self._place(), self.device.processor == "cuda"
        linear = torch.nn.Linear(_HOST_WIDTH, _HOST_WIDTH, bias=False, device=place, dtype=torch.bfloat16)
        ours = importlib.import_module("skuda.torch").DynamicLinear.from_linear(linear)
        x = torch.ones(_HOST_ROWS, _HOST_WIDTH, device=place, dtype=torch.bfloat16)
        calls: dict[str, Call | str] = {
            "F.linear": lambda: torch.nn.functional.linear(x, linear.weight),
            "nn.Linear": lambda: linear(x),
            "DynamicLinear": lambda: ours(x),
        }
        # On a CPU a call is the whole computation; a few of them show that all calls work.
        how: dict[str, Any] = {} if cuda else {"burst": 4, "rounds": 3}
        return host_costs(calls, torch.cuda.synchronize if cuda else lambda: None, **how)


def weight_bytes(module: Any) -> int:
    """Return the bytes of the weights and scales of a module's layers, without norms."""
    return sum(_bytes(tensor) for name, tensor in module.state_dict().items() if "norm" not in name)


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, of one made of others the bytes of these."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return math.prod(tensor.shape) * tensor.element_size() if hasattr(tensor, "element_size") else 0


def _into(output: Any, module: Callable[..., Any], *arguments: Any) -> None:
    output.copy_(module(*arguments))


def _distance(got: Any, want: Any) -> float:
    wanted = want.double()
    return float((got.double() - wanted).norm() / wanted.norm())


def _torch() -> Any:
    return importlib.import_module("torch")
