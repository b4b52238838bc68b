"""The example backend plug-in, `example_backend`, with real torch on the CPU: NumPy arrays and torch tensors."""

from __future__ import annotations

import numpy as np
import pytest
from skuda_torch.backend import TorchBackend, TorchCudaBackend
from skuda_torch.skus import SKUS

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_registry
from skuda.registry import InvalidProblem
from skuda.tools.testing import Conformance
from skuda.tools.verify.placement import TorchPlacement

pytest.importorskip("torch")


def example():
    backends = (TorchBackend(), TorchCudaBackend())
    registry = built_in_registry().register(*(backend.spec for backend in backends), *SKUS, origin="skuda-torch 1.0")
    return Dispatcher(registry, backends=[*backends, NumpyBackend()])


class TestWithArrays(Conformance):
    package = "skuda-torch"
    dispatcher = staticmethod(example)


class TestWithTensors(Conformance):
    package = "skuda-torch"

    @classmethod
    def dispatcher(cls):
        # Of the layers, one element and epilogue are enough: what is checked here is how arrays are taken.
        some = [sku for sku in SKUS if sku.arch == "cpu" and (sku.layout is None or ".bf16-s8.rcr-bias." in sku.id)]
        registry = built_in_registry().register(TorchBackend.spec, *some, origin="skuda-torch 1.0")
        return Dispatcher(registry, backends=[TorchBackend(), NumpyBackend()])

    @classmethod
    def placement(cls, device):
        return TorchPlacement("cpu" if device.processor == "cpu" else f"cuda:{device.ordinal}")


def test_it_is_chosen_before_numpy_and_gives_the_same_bits():
    dispatcher = example()
    problem = dispatcher.describe("smoothquant_linear", m=40, n=24, k=100, act_scale=0.02, output_element="f32")
    rng = np.random.default_rng()
    act, weight = (rng.integers(-128, 128, shape, np.int8) for shape in ((40, 100), (24, 100)))
    arrays = {"act_q": act, "weight_q": weight, "weight_scale": rng.random(24, np.float32)}
    assert dispatcher.select(problem).sku.backend == "torch"
    want = dispatcher.run(problem, preference=PlanPreference(backend="numpy"), **arrays)
    np.testing.assert_array_equal(dispatcher.run(problem, **arrays), want)


def test_what_torch_cannot_share_is_handed_on_to_numpy():
    dispatcher = example()
    problem = dispatcher.describe("fake_quantize", numel=6, q_min=-8, q_max=7, input_element="f32")
    x = np.arange(6, dtype=np.float32)
    want = dispatcher.run(problem, input=x, scale=0.5, zero_point=0)
    locked = x.copy()
    locked.flags.writeable = False
    for odd, back in ((x[::-1], -1), (locked, 1)):
        np.testing.assert_array_equal(dispatcher.run(problem, input=odd, scale=0.5, zero_point=0)[::back], want)
        with pytest.raises(InvalidProblem, match="torch can share"):
            dispatcher.run(problem, preference=PlanPreference(backend="torch"), input=odd, scale=0.5, zero_point=0)
