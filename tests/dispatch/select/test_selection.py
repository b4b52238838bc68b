"""Selection and explanation: what is chosen where, why, and what is said of everything else."""

from __future__ import annotations

import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from toy import EXACT, ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.dispatch import (
    KNOWN_DEVICES,
    Backend,
    BackendStatus,
    Decision,
    Device,
    Dispatcher,
    Explanation,
    Plan,
    PlanPreference,
    device_named,
)
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.dispatch.select.explanation import Verdict
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.quantize import FakeQuantizeDescriptor
from skuda.registry import (
    Between,
    FrozenRecord,
    InvalidProblem,
    InvalidRecord,
    NotPrepared,
    Reason,
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
        ("a100", "loose"),
        ("rtx4090", "loose"),
        ("h100", "wgmma"),
        ("h200", "wgmma"),
        ("b200", "blackwell"),
        ("cpu", "reference"),
    ],
)
def test_each_card_gets_the_best_kernel_that_it_can_run(dispatcher, card, variant):
    plan = dispatcher.select(ToyDescriptor(), device=KNOWN_DEVICES[card])
    assert plan.sku.variant == variant


def test_a_card_that_is_not_here_gives_a_plan_to_look_at_but_not_to_run(dispatcher):
    plan = dispatcher.select(ToyDescriptor(), device=device_named("H 200"))
    assert plan.workspace_size == 0
    with pytest.raises(NotPrepared, match="H200"):
        plan.run(x=np.ones(1, np.float32))


def test_an_unknown_card_is_refused_with_the_known_ones():
    with pytest.raises(InvalidRecord, match="a100, h100, h200"):
        device_named("voodoo")


class TestPreference:
    H200 = KNOWN_DEVICES["h200"]
    A100 = KNOWN_DEVICES["a100"]

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
        plan = dispatcher.select(ToyDescriptor(), PlanPreference(**preference), self.H200)
        assert (plan.sku.variant, plan.sku.backend) == (variant, backend)

    @pytest.mark.parametrize(
        ("preference", "code", "field"),
        [
            ({"backend": "numpy"}, "preference", "preference.backend"),
            ({"backend": "unheard_of"}, "preference", "preference.backend"),
            ({"sku": cuda_sku("sm_90a", "wgmma").id}, "preference", "preference.sku"),
            ({"sku": "gemm.toy.f32.plain.cpu.numpy.unheard_of"}, "preference", "preference.sku"),
            ({"require": {"math_precision": "f64"}}, "guarantee", "preference.require.math_precision"),
            ({"require": {"accumulator": "f64"}}, "guarantee", "preference.require.accumulator"),
        ],
    )
    def test_an_explicit_choice_is_refused_rather_than_replaced(self, dispatcher, preference, code, field):
        with pytest.raises(Unsupported) as caught:
            dispatcher.select(ToyDescriptor(), PlanPreference(**preference), self.A100)
        found = {(r.code, r.field) for d in caught.value.explanation.decisions for r in d.reasons}
        assert (code, field) in found
        assert caught.value.explanation.chosen is None

    def test_an_unknown_name_is_pointed_out(self, dispatcher):
        asked = dispatcher.explain(ToyDescriptor(), PlanPreference(backend="unheard_of", sku="x"))
        assert any("'unheard_of'" in note for note in asked.notes)
        assert any("'x'" in note for note in asked.notes)

    def test_a_preference_that_is_none_is_refused(self):
        with pytest.raises(InvalidRecord, match="prefer_backend must be one of backend, sku"):
            PlanPreference(prefer_backend="numpy")


class TestEveryReason:
    """Each kind of refusal once, with the field that would have to change."""

    def reasons(self, dispatcher, problem, device, preference=None, variant="reference"):
        told = dispatcher.explain(problem, preference or PlanPreference(), device)
        decision = next(d for d in told.decisions if d.sku.endswith("." + variant))
        assert not decision.accepted
        assert len(decision.changes) == len(decision.reasons)
        return {(r.code, r.field): r for r in decision.reasons}

    @pytest.mark.parametrize(
        ("fields", "code", "field", "wanted", "had"),
        [
            ({"element": "f64"}, "element", "element", "f32", "f64"),
            ({"weight_element": "u8"}, "aux_element", "weight_element", "s8", "u8"),
            ({"epilogue": "bias"}, "epilogue", "epilogue", "identity", "bias"),
        ],
    )
    def test_functional_key(self, dispatcher, fields, code, field, wanted, had):
        found = self.reasons(dispatcher, ToyDescriptor(**fields), HOST)
        assert list(found) == [(code, field)]
        assert (found[code, field].wanted, found[code, field].had) == (wanted, had)
        assert found[code, field].change == f"set {field} to {wanted}"

    def test_layout(self):
        registry = Registry([toy_op(toy_sku(layout="rrr"))])
        found = self.reasons(Dispatcher(registry, backends=[NumpyBackend()]), ToyDescriptor(), HOST)
        assert found["layout", "layout"].wanted == "rrr"

    def test_arch(self, dispatcher):
        found = self.reasons(dispatcher, ToyDescriptor(), KNOWN_DEVICES["b200"], variant="wgmma")
        assert found["arch", "device"].wanted == "compute capability 9.0 exactly"
        assert "10.0" in found["arch", "device"].had
        assert found["arch", "device"].change == "run on compute capability 9.0 exactly"

    def test_constraint(self, dispatcher):
        found = self.reasons(dispatcher, ToyDescriptor(k=101), KNOWN_DEVICES["a100"], variant="pycuda.plain")
        assert (found["constraint", "k"].wanted, found["constraint", "k"].had) == ("at most 100", "101")

    def test_workspace(self, dispatcher):
        tight = PlanPreference(max_workspace_bytes=47)
        found = self.reasons(dispatcher, ToyDescriptor(m=2, k=5), KNOWN_DEVICES["a100"], tight, "pycuda.plain")
        assert found["workspace", "preference.max_workspace_bytes"].wanted == "at least 48"

    def test_guarantee(self, dispatcher):
        strict = PlanPreference(require={"deterministic": True})
        found = self.reasons(dispatcher, ToyDescriptor(), KNOWN_DEVICES["a100"], strict, "loose")
        reason = found["guarantee", "preference.require.deterministic"]
        assert reason.change == "relax preference.require.deterministic = True: this kernel promises False"

    def test_arch_specific_kernels_can_be_ruled_out(self, dispatcher):
        careful = PlanPreference(allow_arch_specific=False)
        found = self.reasons(dispatcher, ToyDescriptor(), KNOWN_DEVICES["h200"], careful, "wgmma")
        assert ("preference", "preference.allow_arch_specific") in found

    def test_backend(self, dispatcher):
        here = Device(name="card", processor="cuda", ordinal=0, compute_capability=(8, 0))
        found = self.reasons(dispatcher, ToyDescriptor(), here, variant="loose")
        assert found["backend", "backend"].change == "install a package that brings the backend 'pycuda'"

    def test_a_card_of_unknown_capability_runs_nothing(self, dispatcher):
        odd = Device(name="card", processor="cuda", ordinal=0)
        assert dispatcher.explain(ToyDescriptor(), device=odd).accepted == ()


class TestExplanation:
    def test_success_and_failure_give_the_same_object_with_every_kernel_of_the_op(self, dispatcher, registry):
        for device in KNOWN_DEVICES.values():
            told = dispatcher.explain(ToyDescriptor(k=101), PlanPreference(backend="pycuda"), device)
            assert {d.sku for d in told.decisions} == {sku.id for sku in registry}
            assert [d.rank for d in told.accepted] == list(range(len(told.accepted)))
            assert all(d.reasons for d in told.refused)
            assert told.registry == registry.digest

    def test_it_agrees_with_select_and_follows_the_ranking(self, dispatcher):
        for device in KNOWN_DEVICES.values():
            told = dispatcher.explain(ToyDescriptor(), device=device)
            assert told.chosen == dispatcher.select(ToyDescriptor(), device=device).sku.id
            assert [d.sku for d in told.decisions[: len(told.accepted)]] == [d.sku for d in told.accepted]

    def test_the_error_carries_it(self, dispatcher):
        problem = ToyDescriptor(element="f64")
        with pytest.raises(Unsupported) as caught:
            dispatcher.select(problem)
        assert caught.value.explanation == dispatcher.explain(problem)
        assert "wanted f32, had f64" in str(caught.value)
        assert "set element to f32" in str(caught.value)

    def test_the_nearest_refused_kernel_comes_first(self, dispatcher):
        told = dispatcher.explain(ToyDescriptor(element="f64"))
        assert told.decisions[0].sku == toy_sku().id
        assert len(told.decisions[0].reasons) == 1

    def test_it_survives_json(self, dispatcher):
        for device in (HOST, KNOWN_DEVICES["h200"]):
            told = dispatcher.explain(ToyDescriptor(k=101), PlanPreference(require={"max_ulp": 0}), device)
            assert Explanation.model_validate_json(told.model_dump_json()) == told
            assert hash(told) == hash(Explanation.model_validate_json(told.model_dump_json()))

    def test_an_op_that_nobody_registered_is_said_so(self):
        with pytest.raises(Unsupported, match=r"op .toy. is not registered"):
            Dispatcher(built_in_registry()).select(ToyDescriptor())

    def test_it_reads_as_text(self, dispatcher):
        text = str(dispatcher.explain(ToyDescriptor(), device=KNOWN_DEVICES["h200"]))
        assert "* gemm.toy.f32-s8.rcr-identity.sm_90a.pycuda.wgmma: accepted, rank 0" in text
        assert "refused: device: wanted a CPU" in text


class TestPlans:
    def test_a_plan_survives_json_and_can_be_made_ready_again(self, dispatcher):
        plan = dispatcher.select(ToyDescriptor(m=3))
        copy = Plan.model_validate_json(plan.model_dump_json())
        assert copy == plan
        assert hash(copy) == hash(plan)
        x = np.arange(3, dtype=np.float32)
        with pytest.raises(NotPrepared, match=r"Dispatcher\.prepare"):
            copy.run(x=x)
        np.testing.assert_array_equal(dispatcher.prepare(copy).run(x=x), x + x)

    def test_preparing_a_plan_whose_kernel_is_gone_is_refused(self, dispatcher):
        plan = dispatcher.select(ToyDescriptor())
        other = Dispatcher(Registry([toy_op(toy_sku(variant="other"))]), backends=[NumpyBackend()])
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
        cards = tuple(
            KNOWN_DEVICES[name].model_copy(update={"ordinal": ordinal}) for ordinal, name in enumerate(("a100", "h200"))
        )
        dispatcher = Dispatcher(registry, backends=[NumpyBackend(), FakeCuda(cards)])
        assert dispatcher.devices == (*cards, HOST)
        assert [dispatcher.select(ToyDescriptor(), device=card).sku.variant for card in cards] == ["loose", "wgmma"]
        assert dispatcher.select(ToyDescriptor()).device == cards[0]

    def test_the_cache_is_bounded(self, dispatcher, monkeypatch):
        monkeypatch.setattr("skuda.dispatch.dispatcher._MOST_PLANS", 8)
        for m in range(50):
            dispatcher.select(ToyDescriptor(m=m))
        assert len(dispatcher._plans) == 8
        assert dispatcher.select(ToyDescriptor(m=0)).problem.m == 0

    def test_guarantee_workspace_and_arguments_are_shown(self, dispatcher):
        plan = dispatcher.select(
            ToyDescriptor(m=2, k=5), PlanPreference(sku=cuda_sku("sm_80", "plain").id), KNOWN_DEVICES["a100"]
        )
        assert plan.precision_guarantee == EXACT
        assert plan.workspace_size == 48
        assert [argument.name for argument in plan.arguments] == ["x", "y"]

    def test_can_implement_checks_without_running(self, dispatcher):
        plan = dispatcher.select(ToyDescriptor(m=3))
        out = np.full(3, 7, np.float32)
        assert plan.can_implement(x=np.ones(3, np.float32), y=out) is True
        assert (out == 7).all()
        with pytest.raises(InvalidProblem):
            plan.can_implement(x=np.ones(4, np.float32))


class FakeCuda(Backend):
    """A backend named pycuda that drives made-up cards and computes on the host."""

    spec = next(spec for spec in built_in_registry().backends.values() if spec.name == "pycuda")

    def __init__(self, cards):
        self._cards = cards
        self.prepared = []

    def status(self):
        return BackendStatus(available=True, detail="made up")

    def devices(self):
        return self._cards

    def prepare(self, sku, problem, device):
        self.prepared.append((sku.id, device.ordinal))
        return HostRunner(problem, lambda _problem, y, **_: y.fill(device.ordinal))


class OnCard:
    """Something that says it is an array on a CUDA device."""

    def __init__(self, ordinal, kind=2):
        self._device = (kind, ordinal)

    def __dlpack_device__(self):
        return self._device


class TestArraysDecide:
    def test_numpy_arrays_run_on_the_cpu_even_where_a_gpu_is_best(self, registry):
        fake = FakeCuda((KNOWN_DEVICES["a100"].model_copy(update={"ordinal": 0}),))
        dispatcher = Dispatcher(registry, backends=[NumpyBackend(), fake])
        out = dispatcher.run(ToyDescriptor(m=2), x=np.array([1, 2], np.float32))
        np.testing.assert_array_equal(out, [2, 4])
        assert fake.prepared == []

    def test_an_array_on_a_gpu_without_a_backend_is_refused_with_the_reason(self, dispatcher):
        with pytest.raises(Unsupported, match="no backend here drives CUDA devices"):
            dispatcher.run(ToyDescriptor(), x=OnCard(0))

    def test_an_array_with_only_the_cuda_array_interface_is_on_a_gpu(self, dispatcher):
        class Old:
            __cuda_array_interface__ = {"version": 3}  # noqa: RUF012  as exporters have it
            device = 1

        with pytest.raises(Unsupported) as caught:
            dispatcher.run(ToyDescriptor(), x=Old())
        assert caught.value.explanation.device.ordinal == 1

    def test_an_array_that_does_not_name_its_card_is_on_the_one_that_the_driver_says(self, dispatcher, monkeypatch):
        class Silent:
            __cuda_array_interface__ = {"version": 3, "data": (0x1000, False)}  # noqa: RUF012  as exporters have it

        problem = ToyDescriptor()
        driver = type("Driver", (), {"ordinal_of": staticmethod(lambda address: {0x1000: 3}[address])})
        with monkeypatch.context() as patch:
            patch.setattr("skuda.dispatch.select.place.driver", driver)
            assert dispatcher._device_of(problem, {"x": Silent()}).place == ("cuda", 3)
        assert dispatcher._device_of(problem, {"x": Silent()}).place == ("cuda", 0)
        with pytest.raises(InvalidProblem, match=r"x must be on the CPU, where this plan runs; had an array on cuda$"):
            dispatcher.select(problem, device=HOST).run(x=Silent())

    def test_the_ordinal_of_the_array_chooses_the_card(self, registry):
        cards = tuple(KNOWN_DEVICES["h200"].model_copy(update={"ordinal": n}) for n in range(2))
        dispatcher = Dispatcher(registry, backends=[NumpyBackend(), FakeCuda(cards)])
        assert dispatcher._device_of(ToyDescriptor(), {"x": OnCard(1)}) == cards[1]
        assert dispatcher._device_of(ToyDescriptor(), {"x": OnCard(0, kind=13)}) == cards[0]
        assert dispatcher._device_of(ToyDescriptor(), {"x": OnCard(0, kind=3)}) == HOST

    def test_mixed_devices_are_refused_naming_each_argument(self, dispatcher):
        with pytest.raises(InvalidProblem, match=r"x on cpu:0, y on cuda:1"):
            dispatcher.run(ToyDescriptor(), x=np.ones(1, np.float32), y=OnCard(1))

    def test_a_device_of_an_unknown_kind_and_a_list_are_refused(self, dispatcher):
        with pytest.raises(InvalidProblem, match="DLPack device type 10"):
            dispatcher.run(ToyDescriptor(), x=OnCard(0, kind=10))
        with pytest.raises(InvalidProblem, match="had a list"):
            dispatcher.run(ToyDescriptor(), x=[1.0])


def test_a_decision_that_was_not_validated_is_like_one_that_was(dispatcher):
    told = dispatcher.explain(ToyDescriptor())
    assert {decision.accepted for decision in told.decisions} == {True, False}
    for decision in told.decisions:
        again = Decision(sku=decision.sku, rank=decision.rank, reasons=decision.reasons)
        assert decision == again
        assert hash(decision) == hash(again)
        assert repr(decision) == repr(again)
        assert decision.model_dump_json() == again.model_dump_json()
        assert decision.model_fields_set == again.model_fields_set
        assert decision.model_copy(update={"rank": 7}) == again.model_copy(update={"rank": 7})
        assert pickle.loads(pickle.dumps(decision)) == again  # noqa: S301  our own
        with pytest.raises(FrozenRecord):
            decision.rank = 3


class TestThreads:
    def test_many_threads_get_one_plan_and_one_preparation(self, registry):
        fake = FakeCuda((KNOWN_DEVICES["a100"].model_copy(update={"ordinal": 0}),))
        dispatcher = Dispatcher(registry, backends=[NumpyBackend(), fake])
        barrier = threading.Barrier(16)
        plans, failures = [], []

        def work():
            try:
                barrier.wait()
                plans.extend(dispatcher.select(ToyDescriptor(m=m)) for m in range(20))
            except Exception as error:  # noqa: BLE001  shown below
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len({id(plan) for plan in plans}) == 20
        assert len(fake.prepared) == 20

    def test_different_problems_are_prepared_side_by_side_and_nobody_else_waits(self, registry):
        """Two preparations that each wait for the other to have begun, and a cached selection between them."""
        fake = FakeCuda((KNOWN_DEVICES["a100"].model_copy(update={"ordinal": 0}),))
        dispatcher = Dispatcher(registry, backends=[NumpyBackend(), fake])
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

    def test_whoever_waited_for_a_preparation_that_failed_tries_for_himself(self, registry):
        fake = FakeCuda((KNOWN_DEVICES["a100"].model_copy(update={"ordinal": 0}),))
        dispatcher = Dispatcher(registry, backends=[NumpyBackend(), fake])
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
        assert len(dispatcher._answering) == 0

    def test_one_plan_serves_many_threads_at_once(self):
        dispatcher = Dispatcher()
        problem = FakeQuantizeDescriptor(numel=50_000, q_min=-128, q_max=127, input_element="f32")
        plan = dispatcher.select(problem)
        rng = np.random.default_rng()
        inputs = [rng.normal(size=50_000).astype(np.float32) for _ in range(8)]
        wanted = [plan.run(input=x, scale=0.03, zero_point=3) for x in inputs]
        got = [None] * len(inputs)

        def work(i):
            for _ in range(5):
                got[i] = plan.run(input=inputs[i], scale=0.03, zero_point=3)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_selection_looks_only_at_kernels_under_the_exact_key(dispatcher, monkeypatch):
    looked = []
    original = type(dispatcher.registry).candidates
    monkeypatch.setattr(type(dispatcher.registry), "candidates", lambda r, key: looked.append(key) or original(r, key))
    monkeypatch.setattr(type(dispatcher.registry), "skus_of", None)
    dispatcher.select(ToyDescriptor())
    assert looked == [ToyDescriptor().key()]


def test_describe_builds_a_descriptor_by_name_and_refuses_unknown_ones(dispatcher):
    assert dispatcher.describe("toy", m=4) == ToyDescriptor(m=4)
    with pytest.raises(InvalidProblem, match="one of toy"):
        dispatcher.describe("tow", m=4)
    with pytest.raises(InvalidProblem, match="m must be at least 0"):
        dispatcher.describe("toy", m=-1)


def test_decisions_and_devices_survive_json():
    decision = Decision(sku="x", reasons=())
    assert Decision.model_validate_json(decision.model_dump_json()) == decision
    for device in KNOWN_DEVICES.values():
        assert Device.model_validate_json(device.model_dump_json()) == device
    preference = PlanPreference(backend="numpy", require={"max_ulp": 0})
    assert PlanPreference.model_validate_json(preference.model_dump_json()) == preference


def test_a_notebook_shows_the_chosen_kernel_and_why_others_were_refused(dispatcher):
    explanation = dispatcher.explain(ToyDescriptor(k=101), device=device_named("h100"))
    shown = explanation._repr_html_()
    assert shown.startswith(f"<table><caption>{explanation.question()}</caption>")
    assert f"<th>{explanation.chosen}</th><td>chosen</td>" in shown
    refused = explanation.refused[0]
    assert f"<th>{refused.sku}</th><td>{refused.reasons[0]}" in shown
    plan = dispatcher.select(ToyDescriptor(m=2, k=3), device=device_named("h100"))
    assert f"<caption>plan: {plan.sku.id}</caption>" in plan._repr_html_()
    assert "m=2, n=1, k=3" in plan._repr_html_()


def test_a_notebook_shows_the_nearest_refusals_and_counts_the_others(dispatcher):
    reasons = (Reason(code="element", field="element", wanted="f16", had="f32"),)
    decisions = tuple(Decision(sku=f"k{i}", reasons=reasons) for i in range(11))
    explanation = dispatcher.explain(ToyDescriptor()).model_copy(update={"decisions": decisions})
    assert "<th>k7</th>" in explanation._repr_html_()
    assert "k8" not in explanation._repr_html_()
    assert "<th>and 3 more</th>" in explanation._repr_html_()


def test_no_text_becomes_markup_in_a_notebook(dispatcher):
    evil = "<script src='//x'>alert(1)</script>&\""
    device = device_named("h100").model_copy(update={"name": evil})
    plan = dispatcher.select(ToyDescriptor(), device=device)
    explanation = dispatcher.explain(ToyDescriptor(), device=device).model_copy(
        update={"notes": (evil,), "verdict": Verdict(origin=evil, chosen=False, reason=evil)}
    )
    for shown in (plan._repr_html_(), explanation._repr_html_()):
        assert "<script" not in shown
        assert "&lt;script src=&#x27;//x&#x27;&gt;" in shown
        assert set(re.findall(r"<(\w+)", shown)) == {"table", "caption", "tr", "th", "td"}
