"""`skuda demo --gpus N`: a transformer stack in W8A8 has the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from time import perf_counter
from types import MappingProxyType

import numpy as np
from rich.console import Console

from skuda.dispatch import Dispatcher
from skuda.dispatch.shard import on_ranks
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem, MissingDependency, SkudaError
from skuda.tools.demo.metrics import powers, sqnr_db
from skuda.tools.demo.placed import WHERE
from skuda.tools.output import one_line, refuse
from skuda.tools.ranks.carriers import THREADS, Carrier, Processes, lines
from skuda.tools.ranks.framework import NUMPY
from skuda.tools.ranks.render import render, verdict
from skuda.tools.ranks.result import HashResult
from skuda.tools.ranks.stack import LARGE, SMALL, Sizes
from skuda.tools.ranks.work import BATCHES, WAYS, Task, hashes_of

SEED = 14


def run_demo(task: Task, ranks: int, carrier: Carrier, dispatcher: Dispatcher) -> HashResult:
    """Run a task without ranks in NumPy, and on 1 to `ranks` ranks; nothing is printed."""
    started = perf_counter()
    (outputs,) = on_ranks(1, lambda group: task.outputs(group, NUMPY, dispatcher, HOST))
    reference = lines(1, "none", NUMPY.name, HOST.name, [hashes_of(outputs)])
    batch = next(iter(BATCHES))
    wide = {way: outputs[way, batch].astype(np.float32) for way in WAYS}
    return HashResult(
        sizes=task.sizes,
        seed=task.seed,
        sequences=max(map(len, BATCHES.values())),
        lines=(*reference, *carrier.run(task, range(1, ranks + 1))),
        sqnr_db={way: sqnr_db(*powers(wide["bf16"], wide[way])) for way in WAYS if way != "bf16"},
        seconds=perf_counter() - started,
    )


def chosen(
    ranks: int, where: str, dispatcher: Dispatcher, installed: Callable[[str], object] = find_spec
) -> tuple[Carrier, Sizes, str]:
    """Return what runs the ranks, the sizes that suit it, and what a user should know about the choice.

    Raises
    ------
    InvalidProblem
        For another word than ``auto``, ``gpu`` or ``host``, and for more ranks than there are heads or GPUs.
    MissingDependency
        If the ranks are to run on GPUs, and torch is absent.
    """
    if where not in WHERE:
        refuse("demo", "--device", where, WHERE)
    if not 1 <= ranks <= SMALL.kv_heads:
        rule = f"be at least 1 and at most {SMALL.kv_heads}, the heads that the stack has for keys and values"
        raise InvalidProblem("demo", "--gpus", str(ranks), rule)
    cards = [device for device in dispatcher.devices if device.processor == "cuda"]
    if where == "gpu" and not cards:
        rule = "be host or auto: no backend here drives a GPU; `skuda doctor` says what is missing"
        raise InvalidProblem("demo", "--device", "gpu", rule)
    if where != "host" and cards:
        if ranks > len(cards):
            rule = f"be at most {len(cards)}, the GPUs here; --device host runs the ranks on the CPU"
            raise InvalidProblem("demo", "--gpus", str(ranks), rule)
        if installed("torch") is None:
            raise MissingDependency("torch, which moves arrays between GPUs,", "pip install torch")
        return Processes("nccl", cards[0].name), LARGE, ""
    if installed("torch") is None:
        return Processes(THREADS, HOST.name), SMALL, "torch is not installed, so the ranks are threads, not processes"
    return Processes("gloo", HOST.name), SMALL, ""


def demo(
    ranks: int,
    *,
    as_json: bool,
    console: Console,
    errors: Console | None = None,
    dispatcher: Dispatcher | None = None,
    device: str = "auto",
    others: Mapping[str, object] = MappingProxyType({}),
) -> int:
    """Run the demo and print its table or its JSON.

    `ranks` is the largest number of ranks, and `others` are options that only the other demo has, which must be None.
    The rest is as in `skuda.tools.demo.command.demo`. Return the exit status: 0; 1 if int8 gave more than one hash;
    2 if the demo could not run.
    """
    errors = errors or Console(stderr=True)

    def say(text: str, style: str) -> None:
        errors.print(f"skuda demo: {one_line(text)}", style=style, markup=False, highlight=False, soft_wrap=True)

    try:
        for option, given in others.items():
            if given is not None:
                raise InvalidProblem("demo", option, str(given), "be left out where --gpus is given")
        dispatcher = dispatcher or Dispatcher()
        carrier, sizes, note = chosen(ranks, device, dispatcher)
        if note:
            say(note, "yellow")
        result = run_demo(Task(sizes=sizes, seed=SEED), ranks, carrier, dispatcher)
    except (SkudaError, OSError) as error:
        say(str(error), "red")
        return 2
    if as_json:
        console.out(result.model_dump_json(indent=2), highlight=False)
        if not result.passed:
            errors.print(verdict(result))
    else:
        render(result, console)
    return 0 if result.passed else 1
