"""Loads every kernel that any number of rows can choose, side by side, so that later calls neither compile nor load.

Plans are pure, so all numbers are asked, except where a launch rule says that more of them are alike (`Launch.alike`).
Nothing is guessed in between. A kernel whose arrays turn out to be unaligned has a successor that is not prepared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from skuda.dispatch.plugins.asking import Misbehaved, error_text
from skuda.dispatch.telemetry import KERNELS
from skuda.registry.argument import Role
from skuda.registry.descriptor import Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import SkudaError
from skuda.registry.sku import KernelSku

if TYPE_CHECKING:
    from skuda.dispatch.planner import Planner
    from skuda.dispatch.runtime import Runtime

_MOST_THREADS = 16


class Rows(NamedTuple):
    """A problem with every number of rows from 1 to `most`."""

    problem: Descriptor
    fields: tuple[str, ...]
    """The fields that count rows. Without any, only `problem` itself is meant."""
    most: int

    def at(self, count: int) -> Descriptor:
        """Return the problem with so many rows."""
        found = self.problem.__copy__()  # `model_copy` takes several times as long
        vars(found).update(dict.fromkeys(self.fields, count))
        return found


class Needed(NamedTuple):
    """A kernel to load: a problem that it serves, its configuration if a measurement chose one, and compiler flags."""

    sku: KernelSku
    problem: Descriptor
    choice: str
    flags: tuple[str, ...]


class Prepared(NamedTuple):
    """What a preparation did."""

    kernels: int  # kernels that the problems need
    compiled: int  # those of them that were compiled now; what is neither this nor the next was loaded already
    found: int  # those of them that came from a bundle or the cache
    failed: tuple[tuple[str, str], ...]
    """Ids of kernels that could not be prepared, each with the reason. A call that needs one raises its error."""
    seconds: float

    def __str__(self) -> str:
        loaded = self.kernels - self.compiled - self.found - len(self.failed)
        parts = [f"{self.compiled} compiled", f"{self.found} from the cache or a bundle", f"{loaded} loaded before"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        return f"{self.kernels} kernels are ready after {self.seconds:.1f} s: {', '.join(parts)}"


Progress = Callable[[int, int], object]
"""Called with the number of kernels that are ready, and that of all, whenever there is one more."""


def rows_of(problem: Descriptor, most: int) -> Iterator[Rows]:
    """Yield a problem with every number of rows: the first axis of its first input. `most` is the largest number.

    An input of any shape counts no rows, so such a problem stays as it is. Which kernel of attention runs depends on
    sizes only by the rows for each sequence, rounded up. One sequence, and a token for each, have all that there are.
    """
    first = next((each for each in type(problem).signature if each.role is Role.INPUT), None)
    field = first.shape[0].name if first is not None and first.shape and not first.flat else ""
    if field not in type(problem).model_fields or type(problem).model_fields[field].annotation is not int:
        yield Rows(problem, (), 1)
        return
    most = max(most, getattr(problem, field))
    if "sequences" not in type(problem).model_fields:
        yield Rows(problem.model_copy(update={field: 1}), (field,), most)
        return
    alone = problem.model_copy(update={field: 1, "sequences": 1})
    yield Rows(alone, (field,), most)
    yield Rows(alone, (field, "sequences"), most)


def prepare_rows(
    planner: Planner, runtime: Runtime, rows: Iterable[Rows], device: Device, progress: Progress | None = None
) -> Prepared:
    """Load the kernels that problems can choose on a device; see `Dispatcher.prepare_rows`."""
    start, compiled, found = perf_counter(), 0, 0
    failed: list[tuple[str, str]] = []
    wanted = needed(planner, runtime, rows, device) if device.processor == "cuda" else []
    # Those with the most flags are products, which take the longest to compile.
    wanted.sort(key=lambda each: -len(each.flags))
    with KERNELS.expected(), ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        ready = runtime.make_ready
        running = {pool.submit(ready, each.sku, each.problem, device, each.choice): each for each in wanted}
        for done, future in enumerate(as_completed(running), 1):
            try:
                built = future.result()
            except (SkudaError, Misbehaved) as error:
                failed.append((running[future].sku.id, error_text(error)))
            else:
                compiled, found = compiled + (built is True), found + (built is False)
            if progress is not None:
                progress(done, len(wanted))
    return Prepared(len(wanted), compiled, found, tuple(failed), perf_counter() - start)


def needed(planner: Planner, runtime: Runtime, rows: Iterable[Rows], device: Device) -> list[Needed]:
    """Return the kernels that problems can choose on a device, each once: a kernel is a SKU and its compiler flags."""
    found: dict[Hashable, Needed] = {}
    for each in dict.fromkeys(rows):
        choose, best = planner.chooser(each.problem, device, each.fields)
        last, alike = None, 0
        for count in range(1, each.most + 1):
            problem = each.at(count)
            pick = choose(problem)
            if pick is None or (pick == last and count <= alike):
                continue
            flags, more = runtime.backends[pick.sku.backend].kernel_of(pick.sku, problem, device, pick.choice)
            found.setdefault((pick.sku, flags), Needed(pick.sku, problem, pick.choice, flags))
            last, alike = pick, max(count, more)
            if alike >= each.most and pick.sku is best:
                break
    return list(found.values())
