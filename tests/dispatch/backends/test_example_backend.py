"""The example of a backend plug-in, `example_backend`, over real torch on the CPU: with arrays and with tensors."""

from __future__ import annotations

import numpy as np
import pytest
from skuda_torch.backend import TorchBackend, TorchCudaBackend
from skuda_torch.skus import SKUS

from skuda.dispatch import Dispatcher, PlanPreference, device_named
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_registry
from skuda.registry import FloatModeError, InvalidProblem
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


def test_masks_are_refused_and_subnormals_kept():
    x = np.float32([1e-40, 1])
    problem = built_in_registry().ops["fake_quantize"].descriptor(numel=2, q_min=-8, q_max=7, input_element="f32")
    plan = example().select(problem, device=example().devices[-1])
    assert plan.sku.backend == "torch"
    given = {"input": x, "scale": 1e-40, "zero_point": 0}
    with pytest.raises(InvalidProblem, match="input must have no mask"):
        plan.run(**given | {"input": np.ma.array(x, mask=[True, False])})
    want = plan.run(**given)
    torch = pytest.importorskip("torch")
    if torch.set_flush_denormal(True):
        try:
            with pytest.raises(FloatModeError):
                plan.run(**given)
        finally:
            torch.set_flush_denormal(False)
    assert plan.run(**given).tobytes() == want.tobytes()


def test_a_weaker_promise_is_not_given_to_who_asks_for_the_stronger_one():
    dispatcher = example()
    fields = {"m": 40, "n": 24, "k": 96, "act_scale": 0.02, "output_element": "f32", "epilogue": "bias_gelu"}
    problem = dispatcher.describe("smoothquant_linear", **fields)
    assert dispatcher.select(problem).sku.backend == "torch"
    careful = PlanPreference(require={"batch_invariant": True})
    assert dispatcher.select(problem, careful).sku.backend == "numpy"


def test_on_a_card_int_mm_refuses_few_rows_and_odd_sizes():
    dispatcher = example()
    only = PlanPreference(backend="torch_cuda")
    fields = {"n": 24, "k": 96, "act_scale": 0.02, "output_element": "f32"}

    def refusals(**changes):
        problem = dispatcher.describe("smoothquant_linear", **{"m": 17, **fields, **changes})
        found = dispatcher.explain(problem, only, device_named("h200"))
        (sku,) = [d for d in found.decisions if ".torch_cuda." in d.sku and ".f32-s8.rcr-identity." in d.sku]
        return {reason.field for reason in sku.reasons}

    assert refusals() == set()
    assert refusals(m=16) == {"m"}
    assert refusals(n=25, k=97) == {"n", "k"}


def test_the_constraint_on_k_is_still_needed():
    """torch's own product for k = 1, its operands in the middle of larger buffers: it reads beside them."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng()
    codes = torch.from_numpy(rng.integers(-128, 128, (2, 4096), np.int8))
    a, w = codes[0, 1024 : 1024 + 17].view(17, 1), codes[1, 1024 : 1024 + 33].view(33, 1)
    right = a.int() @ w.int().t()
    assert not torch.equal(torch._int_mm(a, w.t()), right), "torch is right now: let EXACT_SUM begin at k = 1"
