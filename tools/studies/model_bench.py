"""The measurement of ``skuda bench-model``: forms of a Llama stack, timed in the same rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from skuda.registry.device import Device
from skuda.tools.bench.clock import Replay
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.rival import Rival
from skuda.tools.bench.rivals import TORCHAO_COMPILED, absence, torchao_linear
from skuda.tools.bench.timing import error_line, rounds_each, time_interleaved
from skuda.tools.output import Report
from skuda.tools.studies.llama import LlamaSizes, LlamaStack, angles_of, drawn, random_caches
from skuda.tools.studies.model import FormResult, Phase, PhaseResult
from skuda.torch import Dynamic, fuse_, quantize_

_BUDGET = 4.0
"""Seconds for the rounds of one form in one phase."""
_COMPARED = 3
"""Inputs for which the forms of ours must agree."""
EXACT = {"fullgraph": True, "dynamic": False, "options": {"emulate_precision_casts": True}}
"""Lets Inductor round where eager execution does, so that the bits are those of eager execution."""


class StackForm(NamedTuple):
    """One form of the stack: the heading of its column, and what it is.

    `make` takes the stack in bf16, which it must not change, and returns a module that is called like it. `compiled`
    are the arguments of `torch.compile`, if it is compiled. Forms of ours have equal bits. `needs` is a module that it
    needs besides torch.
    """

    name: str
    computes: str
    make: Callable[[LlamaStack], Any]
    compiled: Mapping[str, Any] | None = None
    ours: bool = False
    needs: str = ""


def converted(stack: LlamaStack, convert: Callable[[nn.Linear], Any]) -> Any:
    """Return a copy of a stack in which every linear layer is replaced by what `convert` returns for it."""
    linears = (module for module in stack.modules() if type(module) is nn.Linear)
    # A copy does not copy again what is among the copies that were made.
    return copy.deepcopy(stack, {id(linear): convert(linear) for linear in linears})


def fused(module: Any) -> Any:
    """Return a quantized copy, whose norms and gated activations write codes; raise if one does not."""
    made = copy.deepcopy(module)
    quantize_(made, Dynamic())
    left = fuse_(made).left
    if left:
        raise RuntimeError(f"not fused: {left}")
    return made


FORMS = (
    StackForm("bf16", "nothing quantized, eager", lambda stack: stack),
    StackForm("bf16 compiled", "nothing quantized, torch.compile", lambda stack: stack, {"dynamic": False}),
    StackForm("skuda", "DynamicLinear and fuse_, eager", fused, ours=True),
    StackForm("skuda compiled", "DynamicLinear and fuse_, torch.compile", fused, EXACT, ours=True),
    StackForm(
        "torchao",
        "Int8DynamicActivationInt8WeightConfig, torch.compile",
        partial(converted, convert=lambda linear: torchao_linear(copy.deepcopy(linear))),
        TORCHAO_COMPILED,
        needs="torchao",
    ),
)
"""The forms, in the order of their columns; errors are relative to the first."""


def bench(
    device: Device,
    sizes: dict[str, int],
    phases: Sequence[tuple[Phase, int, int]],
    names: Sequence[str],
    repeats: int,
    seed: int,
    watch: Report,
) -> dict[str, Any]:
    """Measure phases, each a name, rows and cache; return the fields of the record.

    Ours and the first form are always measured, and those of some names; all without names.
    """
    lab, found = TorchLab(device), list[PhaseResult]()
    forms = [form for form in FORMS if form.ours or form is FORMS[0] or not names or form.name in names]
    with torch.no_grad():
        stacks = Stacks(lab, LlamaSizes(**sizes), forms, seed)
        for number, (phase, rows, cache) in enumerate(phases):
            found.append(stacks.phase(phase, rows, cache, repeats, partial(watch, number, len(phases))))
            lab.tidy()
    computes = {form.name: form.computes for form in forms}
    fields = {"computes": computes, "absent": stacks.absent, "phases": tuple(found)}
    return {"repeats": repeats, "sizes": sizes, "graph": device.processor == "cuda", **fields}


class Run(NamedTuple):
    """A module's call and its replay, which write `output`."""

    call: Replay
    replay: Replay
    output: Tensor

    @classmethod
    def of(cls, lab: TorchLab, module: Callable[..., Tensor], given: Tensor, *more: Any, careful: bool = True) -> Run:
        """Capture a call of a module, whose output has the shape of the input."""
        output = torch.empty_like(given)
        call = partial(_into, output, module, given, *more)
        return cls(call, lab.capture(call, careful=careful), output)


class Stacks:
    """The forms of one stack of random weights; `absent` says why a form of others cannot be made."""

    def __init__(self, lab: TorchLab, sizes: LlamaSizes, forms: Sequence[StackForm], seed: int) -> None:
        self.lab, self.sizes, self.forms, self.seed = lab, sizes, forms, seed
        self.absent: dict[str, str] = {}
        self.modules: dict[str, Any] = {}
        stack = drawn(LlamaStack, sizes, seed=seed, device=str(lab.place))
        made: dict[Any, Any] = {}
        for form in forms:
            if why := absence(Rival(form.name, form.computes, lambda *_: lambda: None, form.needs)):
                self.absent[form.name] = why
                continue
            try:
                # Forms that differ in how they are compiled share a module.
                self.modules[form.name] = made[form.make] = made.get(form.make) or form.make(stack)
            except Exception as error:
                if form.ours:
                    raise
                self.absent[form.name] = error_line(error)

    def phase(self, phase: Phase, rows: int, cache: int, repeats: int, tell: Callable[[str], None]) -> PhaseResult:
        """Measure one phase; a failure of ours is recorded like a wrong result."""
        shape = (rows, 1) if phase == "decode" else (1, rows)
        given = torch.empty(*shape, self.sizes.hidden, dtype=torch.bfloat16, device=self.lab.place)
        renew = partial(given.normal_, generator=torch.Generator(self.lab.place).manual_seed(self.seed))
        runs, failed = self._runs(given, cache, lambda name: tell(f"{phase} {rows}: {name}"), renew)
        wrong = next(
            (f"{form.name}: {failed[form.name]}" for form in self.forms if form.ours and form.name in failed), ""
        )
        wrong = wrong or self._differences({form.name: runs[form.name] for form in self.forms if form.ours}, renew)
        results = {name: FormResult(name=name, refused=why) for name, why in (self.absent | failed).items()}
        if not wrong:
            results |= self._timed(runs, repeats)
        ways = (results.get(one.name, FormResult(name=one.name, refused="not timed")) for one in self.forms)
        compared = 0 if wrong else _COMPARED
        return PhaseResult(phase=phase, rows=rows, cache=cache, ways=tuple(ways), compared=compared, wrong=wrong)

    def _runs(
        self, given: Tensor, cache: int, tell: Callable[[str], None], renew: Replay
    ) -> tuple[dict[str, Run], dict[str, str]]:
        """Prepare every form for the same inputs; return them, and why others fail."""
        sequences, new = given.shape[:2]
        positions = torch.arange(cache - new, cache, device=given.device)
        caches = random_caches(self.sizes, sequences, cache, given, self.seed)
        angles = angles_of(self.sizes, positions)
        renew()
        runs, failed = {}, {}
        for form in self.forms:
            if form.name in self.absent:
                continue
            tell(form.name)
            module = self.modules[form.name]
            if form.compiled is not None:
                module = torch.compile(module, **form.compiled)
            try:
                if form.ours and given.is_cuda and new == 1:
                    # For one query, cuDNN, torch's own choice, gives other bits from call to call.
                    module = partial(_with_flash, module)
                runs[form.name] = Run.of(self.lab, module, given, angles, caches, positions)
            except Exception as error:  # noqa: BLE001  foreign code, and too little memory; it is recorded
                failed[form.name] = error_line(error)
        return runs, failed

    def _differences(self, runs: Mapping[str, Run], renew: Replay) -> str:
        """Run forms on new inputs, called and replayed; describe the first difference from the first form, called."""
        for _ in range(_COMPARED):
            renew()
            want = None
            for name, run in runs.items():
                for what, how in (("called", run.call), ("replayed", run.replay)):
                    self.lab.poison({"output": run.output})
                    how()
                    want = run.output.clone() if want is None else want
                    difference = self.lab.differences(run.output, want, 0)
                    if difference:
                        return f"{name}, {what}, differs from {next(iter(runs))}, called: {difference}"
        return ""

    def _timed(self, runs: Mapping[str, Run], repeats: int) -> dict[str, FormResult]:
        estimates = dict(zip(runs, self.lab.measure([run.replay for run in runs.values()]), strict=True))
        first = next(iter(runs.values())).output.double()
        errors = {name: float((run.output.double() - first).norm() / first.norm()) for name, run in runs.items()}
        rounds = rounds_each(estimates, repeats, _BUDGET)
        timings = time_interleaved(self.lab.measure, {name: run.replay for name, run in runs.items()}, rounds)
        return {name: FormResult(name=name, timing=one, error=errors[name]) for name, one in timings.items()}


def _with_flash(module: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return module(*arguments)


def _into(output: Tensor, module: Callable[..., Tensor], *arguments: Any) -> None:
    output.copy_(module(*arguments))
