"""What launching costs the host: a tiny kernel, many calls without waiting, all ways in turn."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.compiling import find_nvcc
from skuda.dispatch.device import Device
from skuda.dispatch.timing import Timing
from skuda.kernels.quantize import FakeQuantizeDescriptor
from skuda.tools.bench_record import HostCost
from skuda.tools.bench_rivals import said

Call = Callable[[], object]
_NUMEL = 1024
_NOTHING = 'extern "C" __global__ void nothing(const float *x, float *y, long long n, float scale) {}'


def host_costs(
    calls: Mapping[str, Call | str],
    wait: Call,
    *,
    burst: int = 200,
    rounds: int = 25,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> tuple[HostCost, ...]:
    """Time calls in bursts that do not wait for the device, all ways in every round.

    Parameters
    ----------
    calls : mapping of str to callable or str
        The ways by name; for an absent one the reason.
    wait : callable
        Waits for the device, between bursts.
    burst, rounds : int
        Calls in a burst, and bursts of each way.
    clock : callable
        Nanoseconds.
    """
    able = {name: call for name, call in calls.items() if not isinstance(call, str)}
    samples: dict[str, list[float]] = {name: [] for name in able}
    for call in able.values():
        for _ in range(burst):
            call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in able.items():
                wait()
                start = clock()
                for _ in range(burst):
                    call()
                samples[name].append((clock() - start) / burst / 1e3)
    finally:
        wait()
        if collecting:
            gc.enable()
    return tuple(
        HostCost(name=name, refused=call)
        if isinstance(call, str)
        else HostCost(name=name, timing=Timing.of(samples[name]))
        for name, call in calls.items()
    )


def cuda_calls(dispatcher: Dispatcher, device: Device, backend: str | None = None) -> dict[str, Call | str]:
    """Return the ways to launch something tiny on a CUDA device, on the default stream, by name.

    Parameters
    ----------
    dispatcher : Dispatcher
        Ours.
    device : Device
        A CUDA device that torch sees.
    backend : str or None
        The backend to insist on.
    """
    torch: Any = importlib.import_module("torch")
    x = torch.ones(_NUMEL, device=f"cuda:{device.ordinal or 0}")
    y = torch.empty_like(x)
    problem = FakeQuantizeDescriptor(numel=_NUMEL, q_min=-128, q_max=127, input_element="f32")
    plan = dispatcher.select(problem, PlanPreference(backend=backend), device)
    run = plan.run
    return {
        "plan.run": lambda: run(input=x, scale=0.1, zero_point=0, output=y),
        "bound call": plan.bind(input=x, scale=0.1, zero_point=0, output=y),
        "pycuda prepared_call": _prepared(device, x.data_ptr(), y.data_ptr()),
        "torch mul(out=)": lambda: torch.mul(x, 2.0, out=y),
    }


def _prepared(device: Device, x: int, y: int) -> Call | str:
    """Return PyCUDA's own call of a kernel that does nothing, or why there is none."""
    if find_nvcc() is None:
        return "nvcc is not on PATH"
    try:
        from skuda.dispatch.backends.pycuda import PycudaBackend, pushed

        major, minor = device.compute_capability or (8, 0)
        how = {"no_extern_c": True, "arch": f"sm_{major}{minor}", "cache_dir": False}
        cubin = importlib.import_module("pycuda.compiler").compile(_NOTHING, **how)
        loaded = PycudaBackend().load(cubin, device.ordinal or 0)
        with pushed(device.ordinal or 0):
            function = loaded.module.get_function("nothing")
            function.prepare("PPqf")
    except Exception as error:  # noqa: BLE001  PyCUDA can fail in any way
        return said(error)
    call = function.prepared_call
    return lambda: call((1, 1), (256, 1, 1), x, y, _NUMEL, 0.1)
