"""Timing for all studies: calls are checked, then timed in rounds that they share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping
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
from skuda.tools.bench.lab import HostLab
from skuda.tools.verify.compare import allowed_ulps

Name = TypeVar("Name", bound=Hashable)
Arrays = Mapping[str, Any]
_FEWEST = 3
"""Least number of rounds where the budget allows fewer, unless one run takes the whole budget."""


class Ready(NamedTuple):
    """A call that can be timed: its repetition, the microseconds of one run, and which of several it is."""

    replay: Replay
    us: float
    chosen: str = ""


class WrongResult(Exception):
    """A kernel or a rival wrote something wrong; the text says where."""


@dataclass(frozen=True)
class Measurement:
    """How to measure kernels on a device, with the arrays and the clock of a lab.

    A contestant has `repeats` rounds, or fewer where they would take more than `budget` seconds. Only kernels of
    `backend` are used, if it is given.
    """

    dispatcher: Dispatcher
    device: Device
    lab: HostLab
    seed: int
    repeats: int = 20
    backend: str | None = None
    budget: float = 0.4

    @property
    def preference(self) -> PlanPreference:
        """The preference for the backend."""
        return PlanPreference(backend=self.backend)

    def draw(self, problem: Descriptor) -> tuple[Arrays, Arrays]:
        """Return the inputs of a problem for the seed, and arrays for its outputs."""
        seed = zlib.crc32(f"{self.seed} {as_json(problem)}".encode())
        return self.lab.draw(problem, seed), self.lab.outputs(problem)

    def mismatch(self, problem: Descriptor, inputs: Arrays, outputs: Arrays, ulps: int | None = 0) -> str:
        """Describe the first output that is farther than `ulps` from the expected one, if there is any."""
        return self.lab.mismatch(self.dispatcher.registry.ops[problem.op_name()], problem, inputs, outputs, ulps)

    def checked(self, call: Replay, fresh: Replay, wrong: Callable[[], str]) -> Ready:
        """Capture a call and check what it writes; raise `WrongResult` with what `wrong` returns after one run.

        Before that run, `fresh` overwrites the outputs.
        """
        replay = self.lab.capture(call, careful=False)
        # The timed replay itself is checked: it runs once into overwritten outputs.
        fresh()
        us = self.lab.measure([replay])[0]
        if difference := wrong():
            raise WrongResult(difference)
        return Ready(replay, us)

    def timed(self, ready: Mapping[Name, Ready]) -> dict[Name, Timing]:
        """Time contestants in interleaved rounds, as many as the budget allows."""
        rounds = rounds_each({name: one.us for name, one in ready.items()}, self.repeats, self.budget)
        return time_interleaved(self.lab.measure, {name: one.replay for name, one in ready.items()}, rounds)

    def tidy(self) -> None:
        """Free the memory of the last problem; the failure of a lost device is recorded with the next problem."""
        with suppress(Exception):
            self.lab.tidy()


def prepared(makers: Mapping[Name, Callable[[], Ready]]) -> tuple[dict[Name, Ready], dict[Name, str]]:
    """Return the contestants that can be timed, and why the others cannot."""
    ready, refused = {}, {}
    for name, make in makers.items():
        try:
            ready[name] = make()
        except WrongResult as error:
            refused[name] = str(error)
        except Exception as error:  # noqa: BLE001  foreign code, too little memory, a lost device; it is recorded
            refused[name] = error_line(error)
    return ready, refused


def time_interleaved(
    measure: Callable[[list[Replay]], list[float]], replays: Mapping[Name, Replay], rounds: Mapping[Name, int]
) -> dict[Name, Timing]:
    """Time each contestant in as many of the shared rounds as `rounds` gives, at least one."""
    order = schedule(rounds)
    samples: dict[Name, list[float]] = {name: [] for name in replays}
    for name, us in zip(order, measure([replays[name] for name in order]), strict=True):
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
