"""Benchmarks of what Python adds to a launch, with real PyCUDA and torch tensors over a driver that does nothing.

`make bench` runs them where torch and PyCUDA are installed. Tensors on the CPU stand in for those on a GPU: the same
attributes are read at the same cost. What counts is how `plan.run` compares with PyCUDA's own prepared call.
"""

from __future__ import annotations

import ctypes
import importlib.util

import pytest
from stub_driver.build import build
from toykernels import scaled as toy

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.cuda.arrays import Torch
from skuda.registry import Registry

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("pycuda") is None,
    reason="torch and PyCUDA are needed",
)


@pytest.fixture(scope="module")
def dispatcher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stub")
    # Loaded first, it is what everybody finds under its name.
    ctypes.CDLL(str(build(folder)), ctypes.RTLD_GLOBAL)
    real, guard = Torch.facts, Torch.guard
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKUDA_CACHE_DIR", str(folder))
        patch.setattr(Torch, "facts", lambda s, x: real(s, x)._replace(address=x.data_ptr(), ordinal=0))
        patch.setattr(Torch, "guard", lambda s, x, facts: guard(s, x, facts._replace(ordinal=-1)))
        patch.setattr(Torch, "current_stream", lambda *_: int)
        yield Dispatcher(Registry(toy.ops(), origin="toy"))


@pytest.fixture
def arrays():
    import torch

    return {"x": torch.zeros(64, 64), "scale": 0.5, "y": torch.empty(64, 64)}


@pytest.mark.parametrize("backend", ["pycuda", "cuda_core"])
@pytest.mark.parametrize("how", ["run", "run, scale on the device", "bound"])
def test_warm(benchmark, dispatcher, arrays, backend, how):
    import torch

    plan = dispatcher.select(toy.ScaledDescriptor(numel=64 * 64), PlanPreference(backend=backend))
    if how == "bound":
        benchmark(plan.bind(**arrays))
        return
    x, y, scale = arrays["x"], arrays["y"], 0.5 if how == "run" else torch.ones(1)
    benchmark(lambda: plan.run(x=x, scale=scale, y=y))


def test_pycuda_prepared_call(benchmark, dispatcher, arrays):
    from skuda.dispatch.backends import cuda
    from skuda.dispatch.cuda.pycuda_context import pushed

    dispatcher.select(toy.ScaledDescriptor(numel=64 * 64), PlanPreference(backend="pycuda"))
    module = next(loaded.module for key, loaded in cuda._modules.items() if key[0] == "pycuda")
    with pushed(0):
        function = module.get_function("scaled")
        function.prepare("PqPifPqqq")
        call, grid, block = function.prepared_call, (132, 1, 1), (256, 1, 1)
        x, y = arrays["x"].data_ptr(), arrays["y"].data_ptr()
        benchmark(lambda: call(grid, block, x, 64, 0, 0, 0.5, y, 64, 1, 4096))
