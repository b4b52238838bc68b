"""What launching costs the host: many calls of a tiny kernel without waiting, those compared interleaved."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.compile.compilers import find_nvcc
from skuda.dispatch.device import Device
from skuda.dispatch.select.tuning import Timing
from skuda.kernels.quantize import FakeQuantizeDescriptor
from skuda.tools.bench.measurement import error_line
from skuda.tools.bench.record import HostCost

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
    """Time named calls in interleaved bursts that do not wait for the device; a text is the reason of an absent call.

    `wait` waits for the device between bursts; `clock` returns nanoseconds.
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


def launch_costs(dispatcher: Dispatcher, device: Device, backend: str | None = None) -> tuple[HostCost, ...]:
    """Time launches of a tiny kernel on a device that torch sees: our calls, PyCUDA's own, and one of torch."""
    torch: Any = importlib.import_module("torch")
    on_gpu = device.processor == "cuda"
    x = torch.ones(_NUMEL, device=f"cuda:{device.ordinal or 0}" if on_gpu else "cpu")
    y = torch.empty_like(x)
    problem = FakeQuantizeDescriptor(numel=_NUMEL, q_min=-128, q_max=127, input_element="f32")
    plan = dispatcher.select(problem, PlanPreference(backend=backend), device)
    run = plan.run
    calls: dict[str, Call | str] = {
        "plan.run": lambda: run(input=x, scale=0.1, zero_point=0, output=y),
        "bound call": plan.bind(input=x, scale=0.1, zero_point=0, output=y),
        "pycuda prepared_call": _prepared(device, x.data_ptr(), y.data_ptr()),
        "torch mul(out=)": lambda: torch.mul(x, 2.0, out=y),
    }
    return host_costs(calls, torch.cuda.synchronize if on_gpu else lambda: None)


def _prepared(device: Device, x: int, y: int) -> Call | str:
    """Return PyCUDA's own call of an empty kernel, or the reason why there is none."""
    if find_nvcc() is None:
        return "nvcc is not on PATH"
    try:
        from skuda.dispatch.backends.pycuda import PycudaBackend
        from skuda.dispatch.cuda.pycuda_context import pushed

        major, minor = device.compute_capability or (8, 0)
        compiler = importlib.import_module("pycuda.compiler")
        cubin = compiler.compile(_NOTHING, no_extern_c=True, arch=f"sm_{major}{minor}", cache_dir=False)
        loaded = PycudaBackend().load(cubin, device.ordinal or 0)
        with pushed(device.ordinal or 0):
            function = loaded.module.get_function("nothing")
            function.prepare("PPqf")
    except Exception as error:  # noqa: BLE001  PyCUDA can fail in any way
        return error_line(error)
    call = function.prepared_call
    return lambda: call((1, 1), (256, 1, 1), x, y, _NUMEL, 0.1)
