"""A chain of equal layers in one graph, each reading what the one before wrote, as a model runs them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skuda.dispatch.plan import Plan
from skuda.dispatch.select.tuning import Timing
from skuda.kernels.linear.problem import LinearProblem
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.errors import InvalidProblem
from skuda.tools.bench.bench import Bench
from skuda.tools.bench.measurement import Arrays, max_ulps
from skuda.tools.bench.record import CaseResult
from skuda.tools.bench.rivals import Rival, bf16_operands
from skuda.tools.words.cases import BenchCase


def chained(case: BenchCase) -> BenchCase:
    """Return a product whose output is the next layer's input: codes, if the input is codes.

    Raise `InvalidProblem` for another op, and unless there are as many output channels as inner elements.
    """
    problem = case.problem
    if not isinstance(problem, LinearProblem) or problem.sizes[1] != problem.sizes[2]:
        raise InvalidProblem("bench", "--chain", case.label, "stand beside products with N = K only")
    source = problem.arguments()[0].elements[0]
    return replace(case, problem=type(problem).model_validate({**dict(problem), "output_element": source}))


@dataclass(frozen=True)
class Chain(Bench):
    """Measures problems that `chained` made, as `layers` layers with weights of their own; times are those of a layer.

    The only rival is a chain of `F.linear` in bf16.
    """

    layers: int = 4

    def described(self, case: BenchCase) -> CaseResult:
        """Return a case's result without times."""
        label = f"{case.label}, {self.layers} layers"
        return super().described(case).model_copy(update={"label": label, "layers": self.layers})

    def _timed(self, plan: Plan) -> dict[str, Any]:
        problem = plan.problem
        source = problem.arguments()[0].name
        (target,) = (argument.name for argument in problem.arguments() if argument.role is Role.OUTPUT)
        layers: list[tuple[Arrays, Arrays]] = []
        for number in range(self.layers):
            inputs, outputs = self.draw(problem, number)
            layers.append(({**inputs, source: layers[-1][1][target]} if layers else inputs, outputs))
        calls = [plan.bind(**inputs, **outputs) for inputs, outputs in layers]

        def run() -> None:
            for call in calls:
                call()

        replay = self.lab.capture(run, careful=False)
        for _, outputs in layers:
            self.lab.poison(outputs)
        us = self.lab.measure([replay])[0]
        op = self.dispatcher.registry.ops[problem.op_name()]
        for number, (inputs, outputs) in enumerate(layers):
            wrong = self.lab.mismatch(op, problem, inputs, outputs, max_ulps(plan.sku, problem))
            if wrong:
                return {"refused": f"layer {number}: {wrong}"}
        rival = Rival("bf16", "as many layers of F.linear in bf16", lambda problem, _: _bf16(problem, layers))
        found = self.compared(replay, us, (rival,), problem, layers[0][0])
        rivals = (one.model_copy(update={"timing": self._each(one.timing)}) for one in found["rivals"])
        return found | {"timing": self._each(found["timing"]), "rivals": tuple(rivals)}

    def _each(self, timing: Timing | None) -> Timing | None:
        """Return the times of one layer."""
        if timing is None:
            return None
        names = ("median", "p10", "p90", "best")
        return timing.model_copy(update={name: getattr(timing, name) / self.layers for name in names})


def _bf16(problem: Descriptor, layers: Sequence[tuple[Arrays, Arrays]]) -> Any:
    """Return a call of one `F.linear` after the other, each on what the one before returned."""
    linear: Any = importlib.import_module("torch").nn.functional.linear
    first, _ = bf16_operands(problem, layers[0][0])
    weights = [bf16_operands(problem, inputs)[1] for inputs, _ in layers]

    def call() -> Any:
        x = first
        for weight in weights:
            x = linear(x, weight)
        return x

    return call
