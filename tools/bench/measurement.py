"""Measuring for `skuda bench` and `skuda tune`: a call is checked, then timed in interleaved rounds."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.select.explanation import as_json
from skuda.dispatch.select.tuning import Timing
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.device import Device
from skuda.registry.sku import KernelSku
from skuda.tools.bench.clock import Replay
from skuda.tools.bench.lab import Lab
from skuda.tools.output import Report
from skuda.tools.ship.cubins import Wanted, build_cubins, cubins_of
from skuda.tools.verify.compare import allowed_ulps

Name = TypeVar("Name", bound=Hashable)
Arrays = Mapping[str, Any]
_FEWEST = 3
"""Least number of rounds where the budget allows fewer, unless one run takes the whole budget."""


class Offer(NamedTuple):
    """One kernel in one configuration, for one problem.

    `choice` is the configuration's name; empty for the only one, or for the first one of the launch rule.
    """

    sku: KernelSku
    problem: Descriptor
    choice: str


@dataclass(frozen=True)
class Measurement:
    """How to measure on a device, with the arrays and the clock of a lab.

    Attributes
    ----------
    dispatcher, device, lab
        The kernels, the device, and its arrays and clock.
    seed : int
        Seed of the inputs.
    repeats : int
        Rounds of a contestant whose runs fit the budget.
    budget : float
        Seconds for the rounds of one contestant.
    backend : str or None
        Use only kernels of this backend.
    """

    dispatcher: Dispatcher
    device: Device
    lab: Lab
    seed: int
    repeats: int = 20
    budget: float = 0.4
    backend: str | None = None

    @property
    def preference(self) -> PlanPreference:
        """The preference for the backend."""
        return PlanPreference(backend=self.backend)

    def draw(self, problem: Descriptor, layer: int = 0) -> tuple[Arrays, Arrays]:
        """Return the inputs of a problem for the seed, others for every layer, and arrays for its outputs."""
        seed = zlib.crc32(f"{self.seed} {as_json(problem)}".encode()) + layer
        return self.lab.draw(problem, seed), self.lab.outputs(problem)

    def checked(
        self, call: Replay, sku: KernelSku, problem: Descriptor, inputs: Arrays, outputs: Arrays
    ) -> tuple[Replay, float, str]:
        """Capture a call of a kernel and check its result.

        Return a function that repeats the call, the microseconds of one run, and a description of any error.
        """
        replay = self.lab.capture(call, careful=False)
        # The timed replay itself is checked: it runs once into overwritten outputs.
        self.lab.poison(outputs)
        us = self.lab.measure([replay])[0]
        op = self.dispatcher.registry.ops[problem.op_name()]
        return replay, us, self.lab.mismatch(op, problem, inputs, outputs, max_ulps(sku, problem))

    def timed(self, replays: Mapping[Name, Replay], estimates: Mapping[Name, float]) -> dict[Name, Timing]:
        """Time contestants in interleaved rounds, as many as the budget allows by the estimated microseconds."""
        rounds = rounds_each({name: estimates[name] for name in replays}, self.repeats, self.budget)
        return time_interleaved(self.lab, replays, rounds)

    def compile(self, offers: Iterable[Offer], report: Report | None = None) -> None:
        """Fill the cubin cache in parallel, because compiling in sequence takes minutes.

        A failure occurs again when the kernel is prepared, and is recorded there.
        """
        jobs: dict[tuple[object, ...], Wanted] = {}
        for sku, problem, choice in offers:
            found = cubins_of(
                (sku,), {sku.op: (problem,)}, self.dispatcher.backends, self.device, choices=lambda *_, c=choice: (c,)
            )
            jobs |= {job.identity: job for job in found}
        build_cubins(list(jobs.values()), report)

    def tidy(self) -> None:
        """Free the memory of the last problem; the failure of a lost device is recorded with the next problem."""
        with suppress(Exception):
            self.lab.tidy()


def time_interleaved(lab: Lab, replays: Mapping[Name, Replay], rounds: Mapping[Name, int]) -> dict[Name, Timing]:
    """Time each contestant in as many of the shared rounds as `rounds` gives, at least one."""
    order = schedule(rounds)
    samples: dict[Name, list[float]] = {name: [] for name in replays}
    for name, us in zip(order, lab.measure([replays[name] for name in order]), strict=True):
        samples[name].append(us)
    return {name: Timing.of(found) for name, found in samples.items()}


def rounds_each(estimates: Mapping[Name, float], repeats: int, budget: float) -> dict[Name, int]:
    """Return the number of runs of each contestant, by the estimated microseconds of one run.

    The number is `repeats`, or what a budget of seconds allows but at least three; one if a run takes the whole budget.
    """
    found = {}
    for name, us in estimates.items():
        seconds = us / 1e6
        fewest = min(repeats, _FEWEST if seconds < budget else 1)
        found[name] = repeats if seconds * repeats <= budget else max(fewest, int(budget / seconds))
    return found


def schedule(rounds: Mapping[Name, int]) -> list[Name]:
    """Return contestants in the order of their runs: round by round, each round rotated by one place.

    Contestants with fewer runs are spread over the rounds, so that a drifting clock affects all equally.
    """
    names, most = list(rounds), max(rounds.values(), default=0)
    order: list[Name] = []
    for number in range(most):
        start = number % len(names)
        rotated = names[start:] + names[:start]
        order += [n for n in rotated if (number + 1) * rounds[n] // most > number * rounds[n] // most]
    return order


def max_ulps(sku: KernelSku, problem: Descriptor) -> int | None:
    """Return the largest distance in ulps that a kernel's guarantee allows for any output; None for any distance."""
    made = [argument.elements[0] for argument in problem.arguments() if argument.role is Role.OUTPUT]
    each = [allowed_ulps(sku, problem, element) for element in made]
    distances = [ulps for ulps in each if ulps is not None]
    return None if len(distances) < len(each) else max(distances, default=0)


def error_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    return text if len(text) <= 240 else f"{text[:239]}…"
