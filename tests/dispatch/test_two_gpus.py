"""Two GPUs in one process: the arrays say where a kernel runs, whatever the current device, thread or stream is.

Runs where torch sees two CUDA devices; the last time is written down in docs/evidence/two-gpus.txt.
"""

from __future__ import annotations

import threading

import pytest

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.kernels.quantize import QuantizedLinearDescriptor
from skuda.registry import InvalidProblem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs torch and two CUDA devices")

M, N, K = 256, 512, 1024
PROBLEM = QuantizedLinearDescriptor(m=M, c_out=N, k=K, q_min=-127, q_max=127, activation_element="bf16")


def arrays(device, seed):
    drawn = torch.Generator().manual_seed(seed)
    return {
        "activation": torch.randn(M, K, generator=drawn).bfloat16().to(device),
        "weight_q": torch.randint(-127, 128, (N, K), generator=drawn, dtype=torch.int8).to(device),
        "weight_scale": (torch.rand(N, generator=drawn) * 0.01).to(device),
    }


def bits(result):
    return result.cpu().view(torch.int16)


@pytest.fixture(params=["pycuda", "cuda_core"])
def run(request):
    dispatcher, preference = Dispatcher(), PlanPreference(backend=request.param)
    if not dispatcher.status[request.param].available:
        pytest.skip(dispatcher.status[request.param].detail)
    return lambda device, seed: dispatcher.run(PROBLEM, preference=preference, **arrays(device, seed))


def test_the_arrays_say_where_whatever_is_current(run):
    wanted = bits(run("cuda:0", 1))
    for current in (0, 1):
        torch.cuda.set_device(current)
        for device in ("cuda:0", "cuda:1"):
            result = run(device, 1)
            assert str(result.device) == device
            assert torch.equal(bits(result), wanted)
            stream = torch.cuda.Stream(device=device)
            with torch.cuda.stream(stream):
                result = run(device, 1)
            stream.synchronize()
            assert torch.equal(bits(result), wanted)


def test_threads_on_both_do_not_meet(run):
    wanted = {(device, seed): bits(run(f"cuda:{device}", seed)) for device in (0, 1) for seed in range(4)}
    wrong = []

    def work(device, first):
        try:
            for turn in range(200):
                if turn % 5 == 0:
                    torch.cuda.set_device(turn // 5 % 2)
                seed = (first + turn) % 4
                if not torch.equal(bits(run(f"cuda:{device}", seed)), wanted[device, seed]):
                    wrong.append((device, first, turn))
        except BaseException as error:  # noqa: BLE001  reported by the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(device, first)) for device in (0, 1) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_arrays_on_both_are_refused():
    mixed = arrays("cuda:0", 1)
    mixed["weight_q"] = mixed["weight_q"].to("cuda:1")
    with pytest.raises(InvalidProblem, match="cuda:1"):
        Dispatcher().run(PROBLEM, **mixed)
