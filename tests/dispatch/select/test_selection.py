"""Selection and explanation: the chosen kernel, the reasons against all others, and plans."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import FakeCuda, toy_dispatcher
from toy import EXACT, ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import (
    KNOWN_DEVICES,
    Device,
    Dispatcher,
    PlanPreference,
    device_named,
)
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_registry
from skuda.registry import (
    Between,
    InvalidProblem,
    NotPrepared,
    Registry,
    Unsupported,
    WorkspaceTerm,
)
from skuda.registry.device import HOST

WEAK = EXACT.model_copy(update={"deterministic": False, "max_ulp": None, "batch_invariant": False})


@pytest.fixture
def registry():
    """Kernels best first: Hopper only, then anything since Ampere with limits, then the CPU."""
    return Registry(
        [
            toy_op(
                cuda_sku("sm_90a", "wgmma"),
                cuda_sku("sm_100f", "blackwell"),
                cuda_sku("sm_80", "loose", precision_guarantee=WEAK),
                cuda_sku(
                    "sm_80",
                    "plain",
                    constraints=(Between(field="k", maximum=100),),
                    workspace=(
                        WorkspaceTerm(factors=("m", "k"), bytes_each=4),
                        WorkspaceTerm(factors=(), bytes_each=8),
                    ),
                ),
                cuda_sku("sm_80", "plain").on("cuda_core"),
                toy_sku(),
            )
        ]
    )


@pytest.fixture
def dispatcher(registry):
    return Dispatcher(registry, backends=[NumpyBackend()])


@pytest.mark.parametrize(
    ("card", "variant"),
    [
        ("rtx4090", "loose"),
        ("h200", "wgmma"),
        ("b200", "blackwell"),
        ("cpu", "reference"),
    ],
)
def test_each_card_gets_the_best_kernel_that_it_can_run(dispatcher, card, variant):
    plan = dispatcher.select(ToyDescriptor(), device=KNOWN_DEVICES[card])
    assert plan.sku.variant == variant


def test_an_absent_card_gives_plans_that_do_not_run(dispatcher):
    plan = dispatcher.select(ToyDescriptor(), device=device_named("H 200"))
    assert plan.workspace_size == 0
    with pytest.raises(NotPrepared, match="H200"):
        plan.run(x=np.ones(1, np.float32))


class TestPreference:
    @pytest.mark.parametrize(
        ("preference", "variant", "backend"),
        [
            ({}, "wgmma", "pycuda"),
            ({"allow_arch_specific": False}, "loose", "pycuda"),
            ({"allow_arch_specific": False, "require": {"deterministic": True}}, "plain", "pycuda"),
            ({"allow_arch_specific": False, "require": {"max_ulp": 0}}, "plain", "pycuda"),
            ({"backend": "cuda_core"}, "plain", "cuda_core"),
            ({"sku": cuda_sku("sm_80", "plain").id}, "plain", "pycuda"),
            (
                {"allow_arch_specific": False, "require": {"batch_invariant": True}, "max_workspace_bytes": 11},
                "plain",
                "cuda_core",
            ),
            (
                {"allow_arch_specific": False, "require": {"batch_invariant": True}, "max_workspace_bytes": 12},
                "plain",
                "pycuda",
            ),
        ],
    )
    def test_every_field_is_honoured(self, dispatcher, preference, variant, backend):
        plan = dispatcher.select(ToyDescriptor(), PlanPreference(**preference), KNOWN_DEVICES["h200"])
        assert (plan.sku.variant, plan.sku.backend) == (variant, backend)

    @pytest.mark.parametrize(
        ("preference", "code", "field"),
        [
            ({"backend": "numpy"}, "preference", "preference.backend"),
            ({"sku": cuda_sku("sm_90a", "wgmma").id}, "preference", "preference.sku"),
            ({"sku": "gemm.toy.f32.plain.cpu.numpy.unheard_of"}, "preference", "preference.sku"),
            ({"require": {"math_precision": "f64"}}, "guarantee", "preference.require.math_precision"),
        ],
    )
    def test_an_explicit_choice_is_refused_rather_than_replaced(self, dispatcher, preference, code, field):
        with pytest.raises(Unsupported) as caught:
            dispatcher.select(ToyDescriptor(), PlanPreference(**preference), KNOWN_DEVICES["a100"])
        found = {(r.code, r.field) for d in caught.value.explanation.decisions for r in d.reasons}
        assert (code, field) in found
        assert caught.value.explanation.chosen is None

    def test_an_unknown_name_is_pointed_out(self, dispatcher):
        asked = dispatcher.explain(ToyDescriptor(), PlanPreference(backend="unheard_of", sku="x"))
        assert all(any(name in note for note in asked.notes) for name in ("'unheard_of'", "'x'"))


PLAIN = "pycuda.plain"
CAREFUL, STRICT = {"allow_arch_specific": False}, {"require": {"deterministic": True}}


@pytest.mark.parametrize(
    ("fields", "device", "preference", "variant", "reason"),
    [
        ({"element": "f64"}, "cpu", {}, "reference", ("element", "element", "f32", "f64")),
        ({"weight_element": "u8"}, "cpu", {}, "reference", ("aux_element", "weight_element", "s8", "u8")),
        ({"epilogue": "bias"}, "cpu", {}, "reference", ("epilogue", "epilogue", "identity", "bias")),
        ({}, "cpu", {}, "numpy.rows", ("layout", "layout", "rrr", "rcr")),
        ({}, "b200", {}, "wgmma", ("arch", "device", "compute capability 9.0 exactly", "10.0")),
        ({"k": 101}, "a100", {}, PLAIN, ("constraint", "k", "at most 100", "101")),
        (
            {"m": 2, "k": 5},
            "a100",
            {"max_workspace_bytes": 47},
            PLAIN,
            ("workspace", "preference.max_workspace_bytes", "at least 48", "47"),
        ),
        ({}, "a100", STRICT, "loose", ("guarantee", "preference.require.deterministic", "True", "False")),
        ({}, "h200", CAREFUL, "wgmma", ("preference", "preference.allow_arch_specific", "", "")),
    ],
)
def test_every_reason_names_the_field_that_would_have_to_change(registry, fields, device, preference, variant, reason):
    dispatcher = Dispatcher(registry.register(toy_sku(layout="rrr", variant="rows")), backends=[NumpyBackend()])
    explanation = dispatcher.explain(ToyDescriptor(**fields), PlanPreference(**preference), KNOWN_DEVICES[device])
    decision = next(d for d in explanation.decisions if d.sku.endswith(f".{variant}"))
    assert not decision.accepted
    assert len(decision.changes) == len(decision.reasons)
    code, field, wanted, had = reason
    (found,) = (each for each in decision.reasons if (each.code, each.field) == (code, field))
    assert wanted in found.wanted
    assert had in found.had
    if code in {"element", "aux_element", "epilogue"}:
        assert len(decision.reasons) == 1
        assert found.change == f"set {field} to {wanted}"


def test_a_card_without_a_backend_and_one_of_unknown_capability_run_nothing(dispatcher):
    here = Device(name="card", processor="cuda", ordinal=0, compute_capability=(8, 0))
    loose = next(d for d in dispatcher.explain(ToyDescriptor(), device=here).decisions if d.sku.endswith(".loose"))
    assert loose.changes == ("install a package that brings the backend 'pycuda'",)
    odd = Device(name="card", processor="cuda", ordinal=0)
    assert dispatcher.explain(ToyDescriptor(), device=odd).accepted == ()


class TestExplanation:
    def test_success_and_failure_name_every_kernel_of_the_op(self, dispatcher, registry):
        for device in KNOWN_DEVICES.values():
            explanation = dispatcher.explain(ToyDescriptor(k=101), PlanPreference(backend="pycuda"), device)
            assert {d.sku for d in explanation.decisions} == {sku.id for sku in registry}
            assert [d.rank for d in explanation.accepted] == list(range(len(explanation.accepted)))
            assert all(d.reasons for d in explanation.refused)
            assert explanation.registry == registry.digest

    @pytest.mark.parametrize("preference", [{}, {"allow_arch_specific": False, "require": {"deterministic": True}}])
    @pytest.mark.parametrize("problem", [ToyDescriptor(), ToyDescriptor(k=101)])
    def test_it_agrees_with_select_and_follows_the_ranking(self, dispatcher, problem, preference):
        for device in KNOWN_DEVICES.values():
            explanation = dispatcher.explain(problem, PlanPreference(**preference), device)
            if explanation.chosen is None:
                with pytest.raises(Unsupported):
                    dispatcher.select(problem, PlanPreference(**preference), device)
                continue
            assert explanation.chosen == dispatcher.select(problem, PlanPreference(**preference), device).sku.id
            assert [d.sku for d in explanation.decisions[: len(explanation.accepted)]] == [
                d.sku for d in explanation.accepted
            ]

    def test_the_error_carries_it(self, dispatcher):
        problem = ToyDescriptor(element="f64")
        with pytest.raises(Unsupported) as caught:
            dispatcher.select(problem)
        assert caught.value.explanation == dispatcher.explain(problem)
        assert caught.value.explanation.decisions[0].sku == toy_sku().id, "the nearest"
        assert "wanted f32, had f64" in str(caught.value)
        assert "set element to f32" in str(caught.value)

    def test_an_op_that_nobody_registered_is_said_so(self):
        with pytest.raises(Unsupported, match=r"op .toy. is not registered"):
            Dispatcher(built_in_registry()).select(ToyDescriptor())

    def test_it_reads_as_text(self, dispatcher):
        text = str(dispatcher.explain(ToyDescriptor(), device=KNOWN_DEVICES["h200"]))
        assert "* gemm.toy.f32-s8.rcr-identity.sm_90a.pycuda.wgmma: accepted, rank 0" in text
        assert "refused: device: wanted a CPU" in text


class TestPlans:
    def test_preparing_a_plan_whose_kernel_is_gone_is_refused(self, dispatcher):
        plan = dispatcher.select(ToyDescriptor())
        other = toy_dispatcher(toy_sku(variant="other"))
        with pytest.raises(Unsupported, match=r"preference\.sku"):
            other.prepare(plan)

    def test_the_same_question_gets_the_same_plan_and_another_question_another(self, dispatcher):
        plan = dispatcher.select(ToyDescriptor())
        assert dispatcher.select(ToyDescriptor()) is plan
        assert dispatcher.select(ToyDescriptor(m=2)) is not plan
        assert dispatcher.select(ToyDescriptor(), PlanPreference(backend="numpy")) is not plan
        assert dispatcher.select(ToyDescriptor(), device=KNOWN_DEVICES["a100"]) is not plan
        a100, h100 = (dispatcher.select(ToyDescriptor(), device=KNOWN_DEVICES[c]) for c in ("a100", "h100"))
        assert a100.sku != h100.sku

    def test_two_different_cards_in_one_machine_each_get_their_own_plan(self, registry):
        fake = FakeCuda("a100", "h200")
        cards, dispatcher = fake.cards, Dispatcher(registry, backends=[NumpyBackend(), fake])
        assert dispatcher.devices == (*cards, HOST)
        assert [dispatcher.select(ToyDescriptor(), device=card).sku.variant for card in cards] == ["loose", "wgmma"]
        assert dispatcher.select(ToyDescriptor()).device == cards[0]

    def test_the_cache_is_bounded(self, dispatcher, monkeypatch):
        monkeypatch.setattr("skuda.dispatch.planner._MOST_PLANS", 8)
        for m in range(50):
            dispatcher.select(ToyDescriptor(m=m))
        assert len(dispatcher._planner._plans) == 8
        assert dispatcher.select(ToyDescriptor(m=0)).problem.m == 0


@pytest.fixture
def with_fake(registry):
    """Return a dispatcher with a made-up A100, and the backend that drives it."""
    fake = FakeCuda("a100")
    return Dispatcher(registry, backends=[NumpyBackend(), fake]), fake


class OnCard:
    """Something that says it is an array on a CUDA device."""

    def __init__(self, ordinal, kind=2):
        self._device = (kind, ordinal)

    def __dlpack_device__(self):
        return self._device


class TestArraysDecide:
    def test_numpy_arrays_run_on_the_cpu_even_where_a_gpu_is_best(self, with_fake):
        dispatcher, fake = with_fake
        out = dispatcher.run(ToyDescriptor(m=2), x=np.array([1, 2], np.float32))
        np.testing.assert_array_equal(out, [2, 4])
        assert fake.prepared == []

    def test_an_array_with_only_the_cuda_array_interface_is_on_a_gpu(self, dispatcher):
        class Old:
            __cuda_array_interface__ = {"version": 3}  # noqa: RUF012  as exporters have it
            device = 1

        with pytest.raises(Unsupported, match="no backend here drives CUDA devices") as caught:
            dispatcher.run(ToyDescriptor(), x=Old())
        assert caught.value.explanation.device.ordinal == 1

    def test_the_driver_says_where_an_array_without_a_card_is(self, dispatcher, monkeypatch):
        class Silent:
            __cuda_array_interface__ = {"version": 3, "data": (0x1000, False)}  # noqa: RUF012  as exporters have it

        problem = ToyDescriptor()
        driver = type("Driver", (), {"ordinal_of": staticmethod(lambda address: {0x1000: 3}[address])})
        with monkeypatch.context() as patch:
            patch.setattr("skuda.dispatch.runtime.driver", driver)
            assert dispatcher._runtime.device_of("toy", {"x": Silent()}).place == ("cuda", 3)
        assert dispatcher._runtime.device_of("toy", {"x": Silent()}).place == ("cuda", 0)
        with pytest.raises(InvalidProblem, match=r"x must be on the CPU, where this plan runs; had an array on cuda$"):
            dispatcher.select(problem, device=HOST).run(x=Silent())

    def test_the_ordinal_of_the_array_chooses_the_card(self, registry):
        fake = FakeCuda("h200", "h200")
        cards, dispatcher = fake.cards, Dispatcher(registry, backends=[NumpyBackend(), fake])
        assert dispatcher._runtime.device_of("toy", {"x": OnCard(1)}) == cards[1]
        assert dispatcher._runtime.device_of("toy", {"x": OnCard(0, kind=13)}) == cards[0]
        assert dispatcher._runtime.device_of("toy", {"x": OnCard(0, kind=3)}) == HOST

    def test_mixed_devices_are_refused_naming_each_argument(self, dispatcher):
        with pytest.raises(InvalidProblem, match=r"x on cpu:0, y on cuda:1"):
            dispatcher.run(ToyDescriptor(), x=np.ones(1, np.float32), y=OnCard(1))

    def test_a_device_of_an_unknown_kind_and_a_list_are_refused(self, dispatcher):
        with pytest.raises(InvalidProblem, match="DLPack device type 10"):
            dispatcher.run(ToyDescriptor(), x=OnCard(0, kind=10))
        with pytest.raises(InvalidProblem, match="had a list"):
            dispatcher.run(ToyDescriptor(), x=[1.0])


class TestThreads:
    def test_many_threads_get_one_plan_and_one_preparation(self, with_fake):
        dispatcher, fake = with_fake
        barrier = threading.Barrier(16)

        def work(_):
            barrier.wait()
            return [dispatcher.select(ToyDescriptor(m=m)) for m in range(20)]

        with ThreadPoolExecutor(16) as pool:
            plans = [plan for found in pool.map(work, range(16)) for plan in found]
        assert len({id(plan) for plan in plans}) == 20
        assert len(fake.prepared) == 20

    def test_different_problems_are_prepared_side_by_side_and_nobody_else_waits(self, with_fake):
        """Two preparations that each wait for the other to have begun, and a cached selection between them."""
        dispatcher, fake = with_fake
        warm = dispatcher.select(ToyDescriptor(m=3))
        both, finish = threading.Barrier(3), threading.Event()
        prepare = fake.prepare

        def slow(sku, problem, device):
            both.wait(60)
            assert finish.wait(60)
            return prepare(sku, problem, device)

        fake.prepare = slow
        with ThreadPoolExecutor(3) as pool:
            plans = [pool.submit(dispatcher.select, ToyDescriptor(m=m)) for m in (1, 2)]
            both.wait(60)
            same = pool.submit(dispatcher.select, ToyDescriptor(m=2))
            assert dispatcher.select(ToyDescriptor(m=3)) is warm
            assert not any(plan.done() for plan in plans)
            finish.set()
            assert [plan.result(60).problem.m for plan in plans] == [1, 2]
            assert same.result(60) is plans[1].result()
        assert len(fake.prepared) == 3

    def test_whoever_waited_for_a_preparation_that_failed_tries_for_himself(self, with_fake):
        dispatcher, fake = with_fake
        begun, fail = threading.Event(), threading.Event()
        prepare = fake.prepare

        def failing(sku, problem, device):
            fake.prepare = prepare
            begun.set()
            assert fail.wait(60)
            raise NotPrepared("a stream is being captured")

        fake.prepare = failing
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(dispatcher.select, ToyDescriptor())
            assert begun.wait(60)
            second = pool.submit(dispatcher.select, ToyDescriptor())
            fail.set()
            with pytest.raises(NotPrepared):
                first.result(60)
            assert second.result(60).problem == ToyDescriptor()
        assert len(fake.prepared) == 1
        assert len(dispatcher._planner._making) == 0
