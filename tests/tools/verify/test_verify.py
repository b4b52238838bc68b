"""`skuda verify`: right kernels pass, each kind of wrong one is caught, and a record never says more than it knows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import halved
import ml_dtypes
import numpy as np
import pytest
from halved import ALWAYS, CASES, EXACT, LOOSE, OP, OUTPUTS, HalvedDescriptor, dispatcher_of, toy
from paths import ROOT

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry import (
    InvalidRecord,
    KernelSku,
    PrecisionGuarantee,
    Role,
)
from skuda.registry.constraints import Between
from skuda.registry.descriptor import storage_shape
from skuda.registry.device import HOST, device_named
from skuda.tools.cli import main
from skuda.tools.show import list as listing
from skuda.tools.show import show as showing
from skuda.tools.verify import command as verify_page
from skuda.tools.verify import evidence
from skuda.tools.verify.compare import differing
from skuda.tools.verify.edges import always
from skuda.tools.verify.evidence import EvidenceFile, Records, load_records, status, tally
from skuda.tools.verify.placement import LAYOUTS, Geometry, HostPlacement, Image
from skuda.tools.verify.trial import row_arguments, row_field
from skuda.tools.verify.verification import verify


def verified(*skus: KernelSku, **more: Any) -> EvidenceFile:
    ids = [sku.id for sku in skus]
    return verify(dispatcher_of(*skus), HOST, **{"seed": 3, "skus": ids, **more})


def failure_of(entry: str, guarantee: PrecisionGuarantee = EXACT) -> evidence.Failure:
    (found,) = verified(toy(entry, guarantee)).skus
    assert found.verdict == "failed"
    assert found.first_failure is not None
    return found.first_failure


# ------------------------------------------------------------------------------------------------------------ running


@pytest.mark.parametrize("one_in", [pytest.param(1, marks=pytest.mark.full), 10])
def test_every_reference_verifies(one_in):
    rng = np.random.default_rng()
    skus = [sku for sku in built_in_registry() if sku.backend == "numpy"][int(rng.integers(one_in)) :: one_in]
    seed = int(rng.integers(2**31))
    found = verify(Dispatcher(built_in_registry()), HOST, seed=seed, quick=True, skus=[sku.id for sku in skus])
    assert [(sku.sku, sku.first_failure) for sku in found.failed] == [], f"drawn from seed {seed}"
    assert {sku.verdict for sku in found.skus} == {"verified"}
    assert [sku.sku for sku in found.skus] == [sku.id for sku in skus]
    if one_in == 1:
        rows = {sku.sku.split(".")[1] for sku in found.skus if sku.promises.batch_invariant}
        assert {"quantize_per_token", "fake_quantize_per_group", "dynamic_range", "quantized_linear"} <= rows
        assert "quantize_per_tensor" not in rows


def test_a_right_kernel_is_verified_with_its_promises():
    (found,) = verified(toy("reference")).skus
    assert found.verdict == "verified"
    assert found.first_failure is None
    assert found.cases == len(CASES) + len(ALWAYS)
    assert found.outputs == OUTPUTS
    assert set(found.layouts) == set(LAYOUTS)
    assert found.promises == evidence.Promises(bit_exact=True, deterministic=True, batch_invariant=True)


def test_a_wrong_kernel_fails_with_coordinates():
    failure = failure_of("wrong_at_one_place")
    assert (failure.case, failure.check, failure.output, failure.at) == (0, "bits", "y", (2, 1))
    assert failure.got.startswith("1.0000000150474662e+30 (0x7149f2ca)")
    assert "1 of 15 elements" in failure.message
    assert json.loads(failure.problem)["n"] == 5
    assert "y[2, 1]" in failure.describe()


def test_a_promised_distance_is_measured():
    def sku(ulps):
        return toy("within_two", EXACT.model_copy(update={"max_ulp": ulps}), variant=f"ulp_{ulps}")

    found = {one.sku.rpartition(".")[2]: one for one in verified(sku(1), sku(2)).skus}
    assert found["ulp_2"].verdict == "verified"
    assert found["ulp_2"].promises.within_ulp is True
    assert found["ulp_2"].promises.bit_exact is None
    assert found["ulp_1"].first_failure.check == "ulp"


@pytest.mark.parametrize(
    ("entry", "guarantee", "check", "says"),
    [
        ("beside", EXACT, "guard", "byte -1 beside"),
        ("over_its_input", EXACT, "input", "of an input was written"),
        ("another_every_time", LOOSE, "repeat", "other bits"),
        ("unwritten", LOOSE, "repeat", "other bits"),
        ("by_neighbours", LOOSE, "rows", "rows"),
        ("raises", EXACT, "error", "ZeroDivisionError: odd"),
    ],
)
def test_each_kind_of_broken_kernel_is_caught(entry, guarantee, check, says):
    failure = failure_of(entry, guarantee)
    assert failure.check == check
    assert says in failure.message


def test_what_is_not_promised_is_not_held_against_a_kernel():
    nothing = LOOSE.model_copy(
        update={"deterministic": False, "bit_stable_on_same_hardware": False, "batch_invariant": False}
    )
    (found,) = verified(toy("another_every_time", nothing)).skus
    assert found.verdict == "verified"
    assert found.promises == evidence.Promises()


def test_one_failure_stops_nothing_and_the_seed_draws_the_same_again():
    skus = (toy("raises"), toy("wrong_at_one_place"), toy("reference"))
    seen = []
    found = verified(*skus, progress=lambda *told: seen.append(told))
    assert [sku.verdict for sku in found.skus] == ["failed", "failed", "verified"]
    assert [done for done, _, what in seen if what == "halved"] == list(
        range(1, len(skus) * (len(CASES) + len(ALWAYS)) + 1)
    )
    assert verified(*skus).skus == found.skus
    assert verified(*skus, seed=4).skus != found.skus


class Dying(HostPlacement):
    """A device that answers until a kernel kills it."""

    def download(self, buffer: Any) -> Any:
        if halved.DEVICE.dead:
            raise RuntimeError("an illegal memory access was encountered")
        return super().download(buffer)


@pytest.mark.parametrize("entry", ["kills", "wrong_and_then_kills"])
def test_what_comes_behind_a_lost_device_is_skipped(monkeypatch, entry):
    monkeypatch.setattr(halved.DEVICE, "dead", False)
    skus = (toy("reference"), toy(entry), toy("within_two", LOOSE))
    before, lethal, behind = verified(*skus, placement=Dying()).skus
    assert (before.verdict, behind.verdict) == ("skipped", "skipped"), "neither was run over all cases"
    assert before.note == behind.note == f"the device was lost to {lethal.sku}"
    assert lethal.verdict == "failed"
    assert lethal.first_failure.check == ("error" if entry == "kills" else "bits")


def test_a_device_that_answers_wrongly_is_lost(monkeypatch):
    class Garbled(HostPlacement):
        def download(self, buffer: Any) -> Any:
            return super().download(buffer) ^ (buffer.size == 8)

    lethal, behind = verified(toy("raises"), toy("reference"), placement=Garbled()).skus
    assert (lethal.verdict, behind.verdict) == ("failed", "skipped")


def test_a_constraint_that_refuses_a_case_is_told_and_the_rest_is_run():
    sku = toy("raises_when_large", constraints=(Between(field="n", maximum=5),))
    (found,) = verified(sku).skus
    accepted = [case for case in (*CASES, *always(sku, CASES)) if case.problem.n <= 5]
    assert (found.verdict, found.cases) == ("verified", len(accepted))
    assert found.note == "some cases are refused: n: wanted at most 5, had 7"


def test_a_reference_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(halved, "OP", replace(OP, reference=halved.raises))
    found = verified(toy("within_two", LOOSE))
    assert {sku.first_failure.message for sku in found.skus} == {"the reference failed: ZeroDivisionError: odd"}


def test_what_cannot_run_here_is_skipped_and_says_why():
    registry = built_in_registry()
    dispatcher = Dispatcher(registry, backends=(NumpyBackend(),))
    found = verify(dispatcher, device_named("h200"), ops=["fill"], placement=HostPlacement())
    assert {sku.verdict for sku in found.skus} == {"skipped"}
    assert all("no such backend is installed" in sku.note for sku in found.skus)
    old = device_named("a100").model_copy(update={"compute_capability": (7, 5)})
    found = verify(dispatcher, old, ops=["fill"], placement=HostPlacement())
    assert {sku.note for sku in found.skus} == {"needs compute capability 8.0 or later"}


# -------------------------------------------------------------------------------------------------- inputs and layouts


def test_draw_gives_every_argument_its_element_and_shape():
    rng = np.random.default_rng()
    for op in built_in_ops():
        for case in op.cases[:12]:
            drawn = draw(op, case, rng)
            for argument in case.problem.arguments():
                if argument.role in (Role.OUTPUT, Role.SCRATCH):
                    assert argument.name not in drawn.inputs
                elif not argument.is_scalar:
                    value = drawn.inputs[argument.name]
                    assert value.dtype in {storage_dtype(element) for element in argument.elements}
                    assert value.shape == storage_shape(drawn.shapes[argument.name], argument.elements[0])


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_notices_every_byte(dtype, shape, layout):
    geometry = Geometry.of(shape, np.dtype(dtype), layout)
    image = Image(geometry, np.ones(shape, dtype))
    after = image.before.copy()
    geometry.view(after)[...] = 2
    assert image.spilt(after) is None
    assert int(geometry.outside.sum()) == geometry.size - int(np.prod(shape)) * geometry.dtype.itemsize
    if 0 not in shape:
        assert image.changed(after) is not None
    for at in np.flatnonzero(geometry.outside)[:: max(1, geometry.size // 40)]:
        spoilt = after.copy()
        spoilt[at] = 0
        assert image.spilt(spoilt) == at - geometry.start
    assert geometry.start % geometry.dtype.itemsize == 0
    assert geometry.plain is (layout in ("contiguous", "misaligned") or len(shape) < 2 or shape[0] == -1)


def test_differing():
    nan, quiet = np.float32(np.nan), np.array([0xFFC00001], np.uint32).view(np.float32)[0]
    got, want = np.array([1, nan, 0.0, -0.0, 5], np.float32), np.array([1, quiet, -0.0, -0.0, nan], np.float32)
    assert differing(got, want).tolist() == [False, False, True, False, True]
    assert differing(got, want, 1).tolist() == [False, False, False, False, True]
    steps = np.array([1.0, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    assert differing(steps, np.full(2, steps[0]), 1).tolist() == [False, False]
    tiny = np.array([np.nextafter(np.float64(0), 1), -np.nextafter(np.float64(0), 1)])
    assert differing(tiny, tiny[::-1], 1).tolist() == [True, True]
    assert differing(tiny, tiny[::-1], 2).tolist() == [False, False]
    codes = np.array([-128, 127, 3], np.int8)
    assert differing(codes, np.array([127, 127, 4], np.int8), 1).tolist() == [True, False, False]
    assert differing(np.array([np.inf]), np.array([np.nan]), 5).tolist() == [True]


def test_rows_are_known_by_the_problem():
    fields = {op.name: {row_field(case.problem) for case in op.cases} for op in built_in_ops()}
    assert fields["quantized_linear"] == {"m"}
    assert fields["quantize_per_group"] == {"outer_size"}
    assert fields["quantize_per_token"] == {"n"}
    assert fields["dynamic_range"] == {"n", None}
    assert fields["quantize_per_channel"] == fields["fill"] == {None}
    assert row_arguments(HalvedDescriptor(n=3, d=2)) == {"x", "y"}


# ------------------------------------------------------------------------------------------------------------ records


def test_json_round_trip(tmp_path):
    found = verified(toy("wrong_at_one_place"), toy("reference"), quick=True)
    found.save(tmp_path / "deep" / "cpu.json")
    assert EvidenceFile.load(tmp_path / "deep" / "cpu.json") == found
    assert load_records(tmp_path / "deep").files == (found,)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["cpu.json"]
    assert (found.seed, found.quick, found.device) == (3, True, HOST)
    assert found.versions["numpy"] == np.__version__


def test_other_json_is_left_alone_and_a_broken_record_is_named(tmp_path):
    (tmp_path / "resources.json").write_text("[1]")
    (tmp_path / "later.json").write_text('{"kind": "skuda verify", "schema_version": 2}')
    assert load_records(tmp_path) == Records()
    (tmp_path / "bad.json").write_text('{"kind": "skuda verify", "schema_version": 1}')
    with pytest.raises(InvalidRecord, match=r"bad\.json"):
        load_records(tmp_path)
    with pytest.raises(InvalidRecord, match="be a folder"):
        load_records(tmp_path / "absent")


def test_a_record_speaks_for_this_very_kernel_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "halved_kernel.py"
    module.write_text("def halve(problem, *, x, y):\n    y[...] = x / 2\n")
    sku = toy("halve", source="halved_kernel", variant="module")
    assert status(sku, OP, Records()).word == "unverified"
    found = verified(sku, toy("wrong_at_one_place"))
    records = Records((found,))
    assert status(sku, OP, records).word == "verified"
    assert status(toy("wrong_at_one_place"), OP, records).word == "failed"
    assert status(toy("reference", variant="other"), OP, records).word == "unverified"
    assert status(toy("reference", backend="numpy"), OP, records).word == "reference"
    for changed in (
        sku.model_copy(update={"flags": ("-O3",)}),
        sku.model_copy(update={"launch": "toykernels.scaled:scaled"}),
        sku.model_copy(update={"precision_guarantee": LOOSE}),
        sku.model_copy(update={"entry_point": "other"}),
    ):
        assert status(changed, OP, records).word == "stale"
    module.write_text("def halve(problem, *, x, y):\n    y[...] = x * 0.5\n")
    assert status(sku, OP, records).word == "stale"
    module.unlink()
    assert status(sku, OP, records).word == "stale"


def test_the_latest_run_of_each_device_counts_and_a_failure_anywhere_shows():
    sku = toy("reference")
    good = verified(sku)
    bad = good.skus[0].model_copy(update={"verdict": "failed"})

    def run(date, card, one):
        return good.model_copy(update={"date": date, "device": device_named(card), "skus": (one,)})

    first, second = run("2026-01-01", "h200", bad), run("2026-01-02", "h200", good.skus[0])
    assert status(sku, OP, Records((second, first))).word == "verified"
    assert status(sku, OP, Records((second, first, run("2026-01-01", "a100", bad)))).device == "NVIDIA A100-SXM4-80GB"
    old = good.skus[0].model_copy(update={"source_hash": "0"})
    assert status(sku, OP, Records((run("2026-01-03", "h200", old),))).word == "stale"
    skipped = good.skus[0].model_copy(update={"verdict": "skipped"})
    assert status(sku, OP, Records((run("2026-01-03", "h200", skipped),))).word == "unverified"


def test_tally():
    assert tally(["verified", "reference"]) == "verified"
    assert tally(["reference"]) == "reference"
    assert tally(["stale", "verified", "verified"]) == "2 verified, 1 stale"
    assert tally([]) == "-"


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def skuda(capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(dispatcher, *arguments):
        for module in (verify_page, listing, showing):
            monkeypatch.setattr(module, "Dispatcher", lambda **_: dispatcher)
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_verify_list_and_show(skuda, tmp_path):
    right = toy("reference")
    dispatcher = dispatcher_of(right)
    record, count = tmp_path / "cpu.json", 2 * (len(CASES) + len(ALWAYS))
    done, out, err = skuda(dispatcher, "verify", "--device", "cpu", "--seed", "7", "--output", record)
    assert (done, out) == (0, f"halved\t2\t0\t0\t{count}\t{2 * OUTPUTS}\n")
    assert re.fullmatch(rf" +\d+\.\d s  halved: 2 verified, {count} cases\n", err), (
        "an op's line is there without a terminal"
    )
    assert EvidenceFile.load(record).seed == 7
    _, out, _ = skuda(dispatcher, "show", right.id, "--evidence", tmp_path, "--json")
    assert (json.loads(out)["verified"], json.loads(out)["evidence"]["word"]) == (True, "verified")
    _, out, _ = skuda(dispatcher, "list", "--evidence", tmp_path, "--json")
    assert json.loads(out)[0]["evidence"] == {"verified": 1, "reference": 1}
    changed = dispatcher_of(right.model_copy(update={"flags": ("-O3",)}))
    _, out, _ = skuda(changed, "show", right.id, "--evidence", tmp_path)
    assert "verified\tno: stale, the kernel or its reference has changed since it was run on CPU" in out
    _, out, _ = skuda(changed, "list", "--skus", "--evidence", tmp_path, "--json")
    assert {row["evidence"] for row in json.loads(out)} == {"reference", "stale"}


def test_a_failure_exits_with_1_and_is_told(skuda, monkeypatch):
    wrong = toy("wrong_at_one_place")
    done, out, err = skuda(dispatcher_of(wrong), "verify", "--device", "cpu", "--quick", "--backend", "toycpu")
    assert done == 1
    assert f"halved: 1 failed, {len(CASES) + len(ALWAYS)} cases" in err
    assert out.splitlines()[0].split("\t")[:4] == ["halved", "0", "1", "0"]
    assert out.splitlines()[1].startswith(f"failure\t{wrong.id}\tbits: y[2, 1]")
    done, out, _ = skuda(dispatcher_of(wrong), "verify", "--device", "cpu", "--sku", wrong.id, "--json")
    assert done == 1
    assert EvidenceFile.model_validate_json(out).failed[0].sku == wrong.id
    monkeypatch.setenv("FORCE_COLOR", "1")
    done, out, err = skuda(dispatcher_of(wrong), "verify", "--device", "cpu", "--quick")
    assert done == 1
    assert "1 failed" in out
    assert "not recorded" in out
    assert err  # the bar


def test_without_a_cuda_device_it_says_so(skuda):
    done, out, err = skuda(dispatcher_of(), "verify")
    assert (done, out) == (1, "")
    assert "no CUDA device is here" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--op", "halve"], "near: halved"),
        (["--sku", "x"], "the id of a kernel"),
        (["--backend", "opencl"], "toycpu"),
        (["--device", "7"], "be one of cpu"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_words_are_refused(skuda, arguments, says):
    done, out, err = skuda(dispatcher_of(), "verify", *arguments)
    assert (done, out) == (2, "")
    assert says in err


def test_the_record_of_a_full_run_goes_to_the_checkout():
    path = verify_page._default_path(device_named("h200"))
    assert path == ROOT / "docs" / "evidence" / "nvidia-h200.json"
    assert verify_page._default_path(HOST) is None


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("reference", "by definition: it is the reference"),
        ("verified", "yes: on H200, 2026-01-02"),
        ("stale", "no: stale, it has changed on H200, 2026-01-02"),
        ("failed", "no: failed on H200, 2026-01-02"),
        ("unverified", "no: nothing on this machine has recorded a comparison with the reference"),
    ],
)
def test_a_status_says_itself_in_a_line(word, says):
    assert evidence.Status(word, "H200", "2026-01-02T03:04:05+00:00", "it has changed").describe() == says


def test_a_terminal_shows_the_first_failures_and_counts_the_rest(skuda, monkeypatch):
    wrong = [toy("wrong_at_one_place", variant=f"wrong{number}") for number in range(12)]
    monkeypatch.setenv("FORCE_COLOR", "1")
    done, out, _ = skuda(dispatcher_of(*wrong), "verify", "--device", "cpu", "--quick", "--backend", "toycpu")
    assert done == 1
    assert f"and {12 - verify_page._FAILURES_SHOWN} more" in out
