"""What launching costs the host: many calls of a tiny kernel without waiting, those compared interleaved."""

from __future__ import annotations

import gc
import importlib
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.compile.compilers import find_nvcc
from skuda.dispatch.select.tuning import Timing
from skuda.kernels.quantize import FakeQuantizeDescriptor, QuantizedLinearDescriptor, SmoothQuantLinearDescriptor
from skuda.registry.device import Device
from skuda.tools.bench.measurement import error_line
from skuda.tools.bench.record import HostCost

Call = Callable[[], object]
_NUMEL = 1024
_ROWS, _WIDTH = 16, 256
_MANY = 6000
"""More sizes than are timed."""
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
    """Time what launching tiny kernels costs on a device that torch sees: our calls, PyCUDA's own, and two of torch.

    A linear runs once with codes given and once with an activation that it quantizes, which takes a launch more. A plan
    for a new size is one of the former for a number of rows that was never asked for, once kernels for such are loaded.
    """
    torch: Any = importlib.import_module("torch")
    on_gpu = device.processor == "cuda"
    place = f"cuda:{device.ordinal or 0}" if on_gpu else "cpu"
    preference = PlanPreference(backend=backend)
    x = torch.ones(_NUMEL, device=place)
    y = torch.empty_like(x)
    fields: dict[str, Any] = {"numel": _NUMEL, "q_min": -128, "q_max": 127, "input_element": "f32"}
    problem = FakeQuantizeDescriptor(**fields)
    plan = dispatcher.select(problem, preference, device)
    run, given = plan.run, {"input": x, "scale": 0.1, "zero_point": 0}
    weight = {
        "weight_q": torch.ones(_WIDTH, _WIDTH, dtype=torch.int8, device=place),
        "weight_scale": torch.ones(_WIDTH, device=place),
        "output": torch.empty(_ROWS, _WIDTH, device=place),
    }
    codes = torch.ones(_ROWS, _WIDTH, dtype=torch.int8, device=place)
    dense = torch.ones(_ROWS, _WIDTH, device=place)
    square = torch.ones(_WIDTH, _WIDTH, device=place)
    static = dispatcher.select(_static(_ROWS), preference, device).run
    dynamic = dispatcher.select(_dynamic(_ROWS), preference, device).run
    calls: dict[str, Call | str] = {
        "torch mul(out=)": lambda: torch.mul(x, 2.0, out=y),
        "torch linear": lambda: torch.nn.functional.linear(dense, square),
        "plan.run": lambda: run(input=x, scale=0.1, zero_point=0, output=y),
        "plan.run, new output": lambda: run(input=x, scale=0.1, zero_point=0),
        "bound call": plan.bind(**given, output=y),
        "dispatcher.run": lambda: dispatcher.run(problem, preference, input=x, scale=0.1, zero_point=0, output=y),
        "dispatcher.run, new descriptor": lambda: dispatcher.run(
            FakeQuantizeDescriptor(**fields), preference, input=x, scale=0.1, zero_point=0, output=y
        ),
        "static linear": lambda: static(act_q=codes, **weight),
        "dynamic linear": lambda: dynamic(activation=dense, **weight),
        "plan for a new size": _new_sizes(dispatcher, preference, device),
        "pycuda prepared_call": _prepared(device, x.data_ptr(), y.data_ptr()),
    }
    # On a CPU a call is the whole computation, which other tables have; a few of them show that all calls work.
    how: dict[str, Any] = {} if on_gpu else {"burst": 4, "rounds": 3}
    return host_costs(calls, torch.cuda.synchronize if on_gpu else lambda: None, **how)


def _static(rows: int) -> SmoothQuantLinearDescriptor:
    return SmoothQuantLinearDescriptor(m=rows, n=_WIDTH, k=_WIDTH, act_scale=0.1, output_element="f32")


def _dynamic(rows: int) -> QuantizedLinearDescriptor:
    return QuantizedLinearDescriptor(m=rows, c_out=_WIDTH, k=_WIDTH, q_min=-127, q_max=127, activation_element="f32")


def _new_sizes(dispatcher: Dispatcher, preference: PlanPreference, device: Device) -> Call:
    """Return a call that plans for more rows every time; a sample of such plans has loaded the kernels."""
    for rows in range(_MANY, 2 * _MANY, 61):
        dispatcher.select(_static(rows), preference, device)
    new = map(_static, (rows for rows in itertools.count(_MANY) if (rows - _MANY) % 61))
    made: list[Any] = list(itertools.islice(new, _MANY))

    def select() -> object:
        # Describing the problem is another cost.
        return dispatcher.select(made.pop() if made else next(new), preference, device)

    return select


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
