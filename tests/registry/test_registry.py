"""The registry: identity, refusals at registration, immutable snapshots, ranking."""

from __future__ import annotations

import itertools

import pytest
from toy import EXACT, ToyDescriptor, cuda_sku, toy_op, toy_sku

from skuda.kernels.catalog import built_in_registry
from skuda.registry import (
    ArchSku,
    BackendSpec,
    Between,
    Case,
    EpilogueKind,
    InvalidRecord,
    KernelSku,
    LayoutSku,
    MultipleOf,
    OneOf,
    PrecisionGuarantee,
    PrecisionRequirement,
    ProductAtMost,
    RegistrationError,
    Registry,
    SkudaError,
    SkuIdentity,
)


def test_ids_parse_back_and_records_survive_json():
    for sku in built_in_registry():
        assert SkuIdentity.parse(sku.id) == sku.identity, sku.id
        assert sku.identity.id == sku.id
        assert KernelSku.model_validate_json(sku.model_dump_json()) == sku, sku.id


def test_every_combination_of_optional_parts_survives_the_id():
    kinds = ((None, "u4"), (None, *LayoutSku), (None, *EpilogueKind), ("cpu", "sm_90a", "sm_100f"))
    for aux, layout, epilogue, arch in itertools.product(*kinds):
        parts = {"aux_element": aux, "layout": layout, "epilogue": epilogue, "arch": arch}
        identity = SkuIdentity(category="gemm", op="toy", element="bf16", backend="b_2", variant="v_1", **parts)
        assert SkuIdentity.parse(identity.id) == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.b.c",
        "gemm.toy.f32.plain.cpu.numpy",
        "gemm.toy.f32.rcr-bias-bias.cpu.numpy.v",
        "gemm.toy.f32.plain.sm_91.numpy.v",
        "gemm.toy.f32.plain.cpu.num-py.v",
    ],
)
def test_what_is_no_id_is_refused(text):
    with pytest.raises(InvalidRecord):
        SkuIdentity.parse(text)


@pytest.mark.parametrize("field", ["variant", "backend", "op"])
@pytest.mark.parametrize("name", ["", "A", "a.b", "a-b", "a b", "1a", "a/b"])
def test_a_name_that_would_break_an_id_is_refused(field, name):
    with pytest.raises(InvalidRecord) as caught:
        toy_sku(**{field: name})
    assert caught.value.field == field


def test_a_bad_record_names_its_class_field_rule_and_value():
    with pytest.raises(InvalidRecord) as caught:
        toy_sku(element="f33")
    error = caught.value
    assert (error.subject, error.field, error.had) == ("KernelSku", "element", "'f33'")
    assert "'f32'" in error.must
    with pytest.raises(InvalidRecord, match="elment must be one of category, op, element"):
        toy_sku(elment="f32")


class TestRefusals:
    @pytest.mark.parametrize(
        ("sku", "field", "words"),
        [
            (toy_sku(op="unheard_of"), "op", "unknown op"),
            (toy_sku(category="loss"), "category", "must be gemm"),
            (toy_sku(backend="unheard_of"), "backend", "unknown backend"),
            (toy_sku(arch="sm_80"), "arch", "drives cpu"),
            (toy_sku(entry_point="no_such_function"), "entry_point", "no_such_function"),
            (toy_sku(source="skuda.registry:no_such.cu"), "source", "no_such.cu"),
            (toy_sku(source="skuda:py.typed", entry_point="kernel"), "entry_point", "does not occur"),
            (toy_sku(launch="toy:no_such_rule"), "launch", "no_such_rule"),
            (toy_sku(constraints=(OneOf(field="width", allowed=(1,)),)), "constraints", "width"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_dangling_or_impossible_record_is_refused_by_field(self, toy_registry, sku, field, words):
        with pytest.raises(RegistrationError, match=words) as caught:
            toy_registry.register(sku.model_copy(update={"variant": "other"}), origin="newcomer 1.0")
        assert caught.value.field == field
        assert "newcomer 1.0" in caught.value.origins

    @pytest.mark.parametrize(
        ("record", "field", "first"),
        [
            (toy_sku(), "id", "toy"),
            (toy_op(), "op", "toy"),
            (BackendSpec(name="numpy", processor="cpu"), "name", "skuda"),
        ],
        ids=["kernel", "op", "backend"],
    )
    def test_a_duplicate_names_both_origins(self, toy_registry, record, field, first):
        with pytest.raises(RegistrationError, match=f"by {first} and by newcomer 1.0") as caught:
            toy_registry.register(record, origin="newcomer 1.0")
        assert (caught.value.field, caught.value.origins) == (field, (first, "newcomer 1.0"))

    def test_a_second_element_without_a_field_is_refused(self, toy_registry):
        fill = next(sku for sku in built_in_registry() if sku.op == "fill")
        with pytest.raises(RegistrationError) as caught:
            built_in_registry().register(fill.model_copy(update={"aux_element": "s8"}))
        assert caught.value.field == "aux_element"
        with pytest.raises(RegistrationError):
            toy_registry.register("a string")

    @pytest.mark.parametrize(
        ("weak", "field"),
        [
            ({"deterministic": False}, "deterministic"),
            ({"bit_stable_on_same_hardware": False}, "bit_stable_on_same_hardware"),
            ({"batch_invariant": False}, "batch_invariant"),
            ({"max_ulp": 2}, "max_ulp"),
            ({"max_ulp": None}, "max_ulp"),
        ],
    )
    def test_a_guarantee_that_the_backend_cannot_give_is_refused(self, toy_registry, weak, field):
        ceiling = PrecisionGuarantee(math_precision="int8", accumulator="s32", **weak)
        registry = toy_registry.register(BackendSpec(name="shaky", processor="cpu", ceiling=ceiling))
        with pytest.raises(RegistrationError) as caught:
            registry.register(toy_sku(backend="shaky"))
        assert caught.value.field == f"precision_guarantee.{field}"
        honest = toy_sku(backend="shaky", precision_guarantee=ceiling)
        assert honest.id in registry.register(honest)

    def test_a_refused_batch_leaves_the_snapshot_as_it_was(self, toy_registry):
        before = (len(toy_registry), toy_registry.digest)
        with pytest.raises(RegistrationError):
            toy_registry.register(toy_sku(variant="good"), toy_sku(op="unheard_of"))
        assert (len(toy_registry), toy_registry.digest) == before


def test_registering_gives_a_new_snapshot_and_keeps_the_old_one(toy_registry):
    newer = toy_registry.register(toy_sku(variant="other"))
    assert len(newer) == len(toy_registry) + 1
    assert newer.digest != toy_registry.digest
    assert newer.register(BackendSpec(name="other", processor="cpu")).digest != newer.digest
    with pytest.raises(TypeError):
        newer.ops["x"] = None
    with pytest.raises(TypeError):
        newer.backends["x"] = None


def test_list_order_is_the_ranking_and_references_stand_last():
    registry = Registry([toy_op(toy_sku(), cuda_sku("sm_90a", "fast"), cuda_sku("sm_80", "plain"))])
    late = registry.register(cuda_sku("sm_80", "late"))
    variants = [sku.variant for sku in late.candidates(ToyDescriptor().key())]
    assert variants == ["fast", "plain", "late", "reference"]
    assert [sku.variant for sku in late.skus_of("toy")] == variants


def test_one_declaration_gives_one_kernel_per_backend_differing_in_that_field_only():
    one = cuda_sku("sm_80", "plain")
    other = one.on("cuda_core")
    different = {name for name in KernelSku.model_fields if getattr(one, name) != getattr(other, name)}
    assert different == {"backend"}
    assert one.id != other.id


class TestArch:
    CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))

    @pytest.mark.parametrize(
        ("arch", "runs"),
        [
            ("sm_80", CAPABILITIES[1:]),
            ("sm_89", CAPABILITIES[3:]),
            ("sm_90", CAPABILITIES[4:]),
            ("sm_90a", ((9, 0),)),
            ("sm_100a", ((10, 0),)),
            ("sm_100f", ((10, 0), (10, 3))),
            ("cpu", ()),
        ],
    )
    def test_which_cards_run_what(self, arch, runs):
        assert tuple(c for c in self.CAPABILITIES if ArchSku(arch).runs_on(c)) == runs
        assert ArchSku(arch).runs_on(None) is (arch == "cpu")


class TestConstraints:
    @pytest.mark.parametrize(
        ("constraint", "good", "bad", "words"),
        [
            (OneOf(field="m", allowed=(1, 2)), {"m": 2}, {"m": 3}, "m one of 1, 2"),
            (OneOf(field="weight_element", allowed=("s8",)), {}, {"weight_element": "u8"}, "weight_element s8"),
            (Between(field="k", minimum=2, maximum=8), {"k": 8}, {"k": 9}, "k at least 2 and at most 8"),
            (Between(field="k", minimum=2), {"k": 2}, {"k": 1}, "k at least 2"),
            (MultipleOf(field="n", divisor=16), {"n": 32}, {"n": 33}, "n a multiple of 16"),
            (ProductAtMost(factors=("m", "n"), maximum=6), {"m": 2, "n": 3}, {"m": 7}, "m * n at most 6"),
        ],
    )
    def test_each_checks_describes_and_survives_json(self, constraint, good, bad, words):
        assert constraint.check(ToyDescriptor(**good)) is None
        reason = constraint.check(ToyDescriptor(**bad))
        assert reason.code == "constraint"
        assert reason.had in {str(value) for value in bad.values()}
        assert constraint.describe() == words
        sku = toy_sku(constraints=(constraint,))
        assert KernelSku.model_validate_json(sku.model_dump_json()).constraints == (constraint,)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(InvalidRecord):
            toy_sku(constraints=({"kind": "moon_phase", "field": "m"},))


class TestGuarantee:
    @pytest.mark.parametrize(
        ("wanted", "short"),
        [
            ({}, []),
            ({"math_precision": "int8", "accumulator": "s32", "max_ulp": 0, "deterministic": True}, []),
            ({"math_precision": "f64"}, ["math_precision"]),
            ({"accumulator": "f32"}, ["accumulator"]),
            ({"deterministic": False}, []),
        ],
    )
    def test_a_requirement_is_met_or_names_the_field(self, wanted, short):
        reasons = PrecisionRequirement(**wanted).check(EXACT)
        assert [reason.field.rpartition(".")[2] for reason in reasons] == short

    def test_a_weak_guarantee_fails_every_flag(self):
        weak = PrecisionGuarantee(
            math_precision="int8",
            accumulator="s32",
            deterministic=False,
            bit_stable_on_same_hardware=False,
            batch_invariant=False,
            max_ulp=None,
        )
        asked = PrecisionRequirement(
            deterministic=True, bit_stable_on_same_hardware=True, batch_invariant=True, max_ulp=4
        )
        assert len(asked.check(weak)) == 4
        assert PrecisionRequirement(max_ulp=4).check(weak.model_copy(update={"max_ulp": 4})) == ()
        assert len(PrecisionRequirement(max_ulp=3).check(weak.model_copy(update={"max_ulp": 4}))) == 1


def test_a_changed_copy_has_an_identity_of_its_own_and_is_validated():
    sku = toy_sku()
    assert sku.id.endswith(".reference")  # cached by now
    assert sku.model_copy(update={"variant": "other"}).id.endswith(".other")
    with pytest.raises(SkudaError):
        sku.model_copy(update={"unheard_of": 1})
    with pytest.raises(InvalidRecord):
        sku.model_copy(update={"variant": "not a name"})


def test_every_built_in_op_is_complete():
    for op in built_in_registry().ops.values():
        assert op.skus, op.name
        assert op.cases, op.name
        assert all(isinstance(case, Case) and type(case.problem) is op.descriptor for case in op.cases)
        for heading in ("Formula", "Elements", "Units", "Errors"):
            assert f"\n{heading}\n---" in op.documentation, (op.name, heading)
        assert op.source
        served = {sku.key for sku in op.skus}
        assert {case.problem.key() for case in op.cases} <= served
