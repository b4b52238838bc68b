"""Times of what Python adds: importing, selecting and launching. `make bench` runs it; nothing is asserted.

A launch goes through real backends to a stub driver that does nothing, with torch tensors on the CPU that pose as those
on a GPU, where torch is installed; with PyCUDA, too, beside its own prepared call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from fakes import toy_dispatcher
from stub_driver.build import build
from toy import ToyDescriptor, toy_sku
from toykernels import scaled

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.cuda.arrays import Torch
from skuda.registry import ElementKind, EpilogueKind, Registry

# pydantic loads most of itself when the first model is defined.
BASELINE = "import numpy, ml_dtypes, pydantic\nclass Model(pydantic.BaseModel):\n    x: int"


def show(name: str, call: Callable[[], object], count: int = 0) -> None:
    """Write the median time of a call, and the tenth and ninetieth of a hundred."""
    timer = timeit.Timer(call)
    count = count or max(1, timer.autorange()[0] // 10)
    times = sorted(seconds / count * 1e6 for seconds in timer.repeat(11, count))
    sys.stdout.write(f"{name:48} {statistics.median(times):12.2f} us ({times[1]:.2f} to {times[-2]:.2f})\n")


def dispatcher_with(count: int) -> Dispatcher:
    """Return a dispatcher over `count` kernels, of which few are under one key."""
    keys = itertools.product(range(10), ElementKind, ElementKind, EpilogueKind)
    skus = (toy_sku(element=e, aux_element=a, epilogue=ep, variant=f"v{turn}") for turn, e, a, ep in keys)
    return toy_dispatcher(toy_sku(variant="first"), *itertools.islice(skus, count - 1))


def importing() -> None:
    """Time programs that import."""
    for name, code in (
        ("import numpy and pydantic", BASELINE),
        ("import skuda.dispatch", "import skuda.dispatch"),
        ("the first Dispatcher()", "from skuda.dispatch import Dispatcher; Dispatcher()"),
    ):
        show(name, lambda code=code: subprocess.run([sys.executable, "-c", code], check=True), 1)


def selecting() -> None:
    """Time selections that are new, and one that is cached."""
    sizes = itertools.count()
    for kernels in (100, 10_000):
        select = dispatcher_with(kernels).select
        show(f"a new size among {kernels} kernels", lambda select=select: select(ToyDescriptor(m=next(sizes))))
    problem, some = ToyDescriptor(), dispatcher_with(500)
    show("a cached selection", lambda: some.select(problem))
    show("explain with 500 kernels", lambda: some.explain(problem))


def launching(folder: Path) -> None:
    """Time launches over the stub driver."""
    import torch

    # Loaded first, it is what everybody finds under its name.
    ctypes.CDLL(str(build(folder)), ctypes.RTLD_GLOBAL)
    os.environ["SKUDA_CACHE_DIR"] = str(folder)
    facts, guard = Torch.facts, Torch.guard
    Torch.facts = lambda s, x: facts(s, x)._replace(address=x.data_ptr(), ordinal=0)
    Torch.guard = lambda s, x, found: guard(s, x, found._replace(ordinal=-1))
    Torch.current_stream = lambda *_: int
    dispatcher = Dispatcher(Registry(scaled.ops(), origin="toy"))
    x, y = torch.zeros(64, 64), torch.empty(64, 64)
    for backend in ("pycuda", "cuda_core"):
        if dispatcher.status[backend].available:
            plan = dispatcher.select(scaled.ScaledDescriptor(numel=64 * 64), PlanPreference(backend=backend))
            show(f"{backend}: run", lambda plan=plan: plan.run(x=x, scale=0.5, y=y))
            show(f"{backend}: what bind returned", plan.bind(x=x, scale=0.5, y=y))
    if dispatcher.status["pycuda"].available:
        from skuda.dispatch.backends import cuda
        from skuda.dispatch.cuda.pycuda_context import pushed

        module = next(loaded.module for key, loaded in cuda._modules.items() if key[0] == "pycuda")
        with pushed(0):
            function = module.get_function("scaled")
            function.prepare("PqPifPqqq")
            given = ((132, 1, 1), (256, 1, 1), x.data_ptr(), 64, 0, 0, 0.5, y.data_ptr(), 64, 1, 4096)
            show("pycuda: its own prepared call", lambda: function.prepared_call(*given))


if __name__ == "__main__":
    importing()
    selecting()
    if importlib.util.find_spec("torch"):
        with tempfile.TemporaryDirectory() as place:
            launching(Path(place))
