"""`skuda verify`: right kernels pass, each kind of wrong one is caught, and a record never says more than it knows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import halved
import numpy as np
import pytest
from halved import CASES, EXACT, LOOSE, OP, dispatcher_of, toy, trial_of
from paths import ROOT
from support import SEED

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.kernels.catalog import built_in_registry
from skuda.registry import InvalidRecord, KernelSku
from skuda.registry.device import HOST, device_named
from skuda.tools.cli import main
from skuda.tools.show import list as listing
from skuda.tools.show import show as showing
from skuda.tools.verify import command as verify_page
from skuda.tools.verify import evidence
from skuda.tools.verify.checks import CHECKS
from skuda.tools.verify.compare import differing
from skuda.tools.verify.evidence import (
    EvidenceFile,
    Failure,
    KernelStatus,
    Records,
    SkuEvidence,
    load_records,
    status,
    tally,
)
from skuda.tools.verify.placement import LAYOUTS, HostPlacement
from skuda.tools.verify.verification import verify

SPOT = [name for name, check in CHECKS.items() if check.spot and not check.anywhere]


def verified(*skus: KernelSku, **more: Any) -> EvidenceFile:
    return verify(dispatcher_of(*skus), HOST, **{"seed": 3, "skus": [sku.id for sku in skus], **more})


def one(sku: KernelSku, **more: Any) -> SkuEvidence:
    (found,) = verified(sku, **more).skus
    return found


# ------------------------------------------------------------------------------------------------------------ running


@pytest.mark.parametrize("one_in", [pytest.param(1, marks=pytest.mark.full), 15])
def test_every_reference_verifies(one_in):
    skus = [sku for sku in built_in_registry() if sku.backend == "numpy"][SEED % one_in :: one_in]
    ids = [sku.id for sku in skus]
    found = verify(Dispatcher(built_in_registry()), HOST, seed=SEED, quick=one_in > 1, skus=ids)
    assert [(one.sku, one.failures) for one in found.failed] == [], f"drawn from seed {SEED}"
    assert {one.verdict for one in found.skus} == {"verified"}
    assert [one.sku for one in found.skus] == sorted(ids)
    assert all(set(one.checks) >= {*SPOT} - {"deterministic", "batch_invariant"} for one in found.skus)
    if one_in == 1:
        rows = {sku.sku.split(".")[1] for sku in found.skus if "batch_invariant" in sku.checks}
        assert {"quantize_per_token", "fake_quantize_per_group", "dynamic_range", "quantized_linear"} <= rows
        assert "quantize_per_tensor" not in rows


def test_a_record_says_how_much_of_the_battery_ran():
    found = one(toy("reference"))
    trial = trial_of(toy("reference"))
    assert (found.verdict, found.battery, found.failures) == ("verified", "full", ())
    assert found.cases == len(trial.chosen) == len(trial.cases) + 2 * len(CASES)
    assert set(found.layouts) == set(LAYOUTS)
    assert set(found.checks) == {n for n, check in CHECKS.items() if not check.anywhere} - {
        "streams",
        "constraints",
        "large",
    }
    assert found.runs > 512 + found.cases
    assert found.outputs > sum(np.prod([c.numbered.case.problem.n, c.numbered.case.problem.d]) for c in trial.chosen)


def test_the_seed_chooses_which_kernel_has_the_full_battery():
    ids = [sku.id for sku in built_in_registry() if sku.backend == "numpy" and sku.op == "quantize_per_token"]
    seen = set()
    for seed in range(4):
        found = verify(Dispatcher(built_in_registry()), HOST, seed=seed, skus=ids)
        (full,) = [each for each in found.skus if each.battery == "full"]
        spot = [each for each in found.skus if each.battery == "spot"]
        seen.add(full.sku)
        assert set(spot[0].checks) == set(SPOT)
        assert max(each.runs for each in spot) < full.runs / 5
        assert all(each.cases >= 2 for each in spot)
    assert len(seen) > 1
    quick = verify(Dispatcher(built_in_registry()), HOST, seed=1, skus=ids, quick=True)
    assert {each.battery for each in quick.skus} == {"spot"}


def test_a_promised_distance_is_measured():
    def sku(ulps):
        return toy("within_two", EXACT.model_copy(update={"max_ulp": ulps}), variant=f"ulp_{ulps}")

    assert one(sku(2)).verdict == "verified"
    assert one(sku(1)).failures[0].check == "meaning"


def test_what_is_not_promised_is_not_held_against_a_kernel():
    nothing = LOOSE.model_copy(
        update={"deterministic": False, "bit_stable_on_same_hardware": False, "batch_invariant": False}
    )
    found = one(toy("by_neighbours", nothing))
    assert found.verdict == "verified"
    assert not {"deterministic", "batch_invariant"} & set(found.checks)
    assert one(toy("by_neighbours", LOOSE)).failures[0].check == "batch_invariant"


def test_one_failure_stops_nothing_and_the_seed_draws_the_same_again():
    skus = (toy("raises"), toy("wrong_at_one_place"), toy("reference"))
    seen = []
    found = verified(*skus, progress=lambda *step: seen.append(step))
    assert {sku.sku.rpartition(".")[2]: sku.verdict for sku in found.skus} == {
        "raises": "failed",
        "wrong_at_one_place": "failed",
        "reference": "verified",
    }
    assert seen == [(done, 3, "halved") for done in range(3)]
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
    before, lethal, behind = toy("reference"), toy(entry), toy("within_two", LOOSE)
    found = {sku.sku: sku for sku in verified(before, lethal, behind, placement=Dying()).skus}
    assert [found[sku.id].verdict for sku in (before, lethal, behind)] == ["verified", "failed", "skipped"]
    assert found[behind.id].note == f"the device was lost to {lethal.id}"


def test_a_device_that_answers_wrongly_is_lost():
    class Garbled(HostPlacement):
        def download(self, buffer: Any) -> Any:
            return super().download(buffer) ^ (buffer.size == 8)

    lethal, behind = toy("raises"), toy("reference")
    found = {sku.sku: sku.verdict for sku in verified(lethal, behind, placement=Garbled()).skus}
    assert found == {lethal.id: "failed", behind.id: "skipped"}


def test_a_reference_that_fails_is_a_failure_of_the_kernel(monkeypatch):
    monkeypatch.setattr(halved, "OP", replace(OP, reference=halved.raises))
    failure = one(toy("within_two", LOOSE)).failures[0]
    assert failure.message.startswith("the reference fails: ZeroDivisionError: odd")


def test_what_cannot_run_here_is_skipped_and_says_why():
    dispatcher = Dispatcher(built_in_registry(), backends=(NumpyBackend(),))
    found = verify(dispatcher, device_named("h200"), ops=["fill"], placement=HostPlacement())
    assert {sku.verdict for sku in found.skus} == {"skipped"}
    assert all("no such backend is installed" in sku.note for sku in found.skus)


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


# ------------------------------------------------------------------------------------------------------------ records


def test_json_round_trip(tmp_path):
    found = verified(toy("wrong_at_one_place"), toy("reference"), toy("within_two", LOOSE), quick=True)
    found.save(tmp_path / "deep" / "cpu.json")
    assert EvidenceFile.load(tmp_path / "deep" / "cpu.json") == found
    assert load_records(tmp_path / "deep").files == (found,)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["cpu.json"]
    assert (found.seed, found.quick, found.device) == (3, True, HOST)
    assert found.versions["numpy"] == np.__version__


def test_other_json_is_left_alone_and_a_broken_record_is_named(tmp_path):
    (tmp_path / "resources.json").write_text("[1]")
    (tmp_path / "bench.json").write_text('{"kind": "skuda bench", "schema_version": 2}')
    assert load_records(tmp_path).files == ()
    with pytest.raises(InvalidRecord, match="be a folder"):
        load_records(tmp_path / "absent")


def record(**changes: Any) -> dict[str, Any]:
    row = ["a.b.c", "0" * 16, 1, 1, 1, "", ""]
    facts = {
        "kind": "skuda verify",
        "schema_version": 3,
        "device": HOST.model_dump(),
        "date": "",
        "skuda": "",
        "seed": 1,
    }
    return {**facts, "groups": [{"verdict": "verified", "kernels": [row], **changes.pop("group", {})}], **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"schema_version": 1}, "be a record of kind 'skuda verify', schema 3"),
        ({"seed": -1}, "seed must be"),
        ({"groups": []}, "skus must be at least one kernel, each once; had none"),
        ({"groups": "none"}, "groups must be objects with `kernels`"),
        ({"group": {"kernels": [["a.b.c", "0", 1, 1, 1, "", ""]] * 2}}, "each once; had a.b.c twice"),
        ({"group": {"kernels": [["a.b.c", "0", 1, 1]]}}, "groups must be objects with `kernels`"),
        ({"group": {"kernels": [["a.b.c", "0", 0, 0, 0, "", ""]]}}, "cases must be at least 1 if a.b.c is verified"),
        ({"group": {"kernels": [["a.b.c", "0", 2, 1, 0, "", ""]]}}, "with a run each"),
        ({"group": {"kernels": [["a.b.c", "0", 1, -1, 0, "", ""]]}}, "runs must be"),
        ({"group": {"verdict": "failed"}}, "failures must be given if a.b.c failed, and only then"),
        ({"group": {"failures": [{"check": "meaning"}]}}, "failures must be given if a.b.c failed"),
    ],
)
def test_an_impossible_record_is_refused(tmp_path, changes, says):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(record(**changes)))
    if not says:
        assert EvidenceFile.load(path).skus[0].cases == 1
        return
    with pytest.raises(InvalidRecord, match=r"bad\.json") as caught:
        load_records(tmp_path)
    assert says in str(caught.value)


def test_the_records_of_the_checkout_have_every_kernel():
    folder, held = ROOT / "docs" / "evidence", load_records().files
    paths = sorted(folder.glob("h200-verify*.json"))  # several, of different ops
    files = [EvidenceFile.load(path) for path in paths]
    assert all(file in held for file in files)
    assert folder / "h200-verify.json" == evidence.default_path(files[0].device)
    assert sum(path.stat().st_size for path in paths) < 700_000
    assert len({sku.sku for file in files for sku in file.skus}) > 1700
    assert evidence.default_path(HOST) is None


def test_a_record_speaks_for_this_very_kernel_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "halved_kernel.py"
    module.write_text("def halve(problem, *, x, y):\n    y[...] = x / 2\n")
    sku = toy("halve", source="halved_kernel", variant="module")
    assert status(sku, OP, Records()).word == "unverified"
    records = Records((verified(sku, toy("wrong_at_one_place")),))
    assert status(sku, OP, records).word == "verified"
    assert status(toy("wrong_at_one_place"), OP, records).word == "failed"
    assert status(toy("reference", variant="other"), OP, records).word == "unverified"
    assert status(toy("reference", backend="numpy"), OP, records, reference=True).word == "reference"
    module.write_text("def halve(problem, *, x, y):\n    y[...] = x * 0.5\n")
    assert status(sku, OP, records).word == "stale"
    module.unlink()
    assert status(sku, OP, records).word == "stale"


def test_the_latest_run_of_each_device_counts_and_a_failure_anywhere_shows():
    sku = toy("reference")
    good = verified(sku)
    bad = good.skus[0].model_copy(update={"verdict": "failed", "failures": (Failure(check="meaning"),)})

    def run(date, card, one):
        return good.model_copy(update={"date": date, "device": device_named(card), "skus": (one,)})

    first, second = run("2026-01-01", "h200", bad), run("2026-01-02", "h200", good.skus[0])
    assert status(sku, OP, Records((second, first))).words == "verified on H200"
    both = Records((second, run("2026-01-01", "a100", good.skus[0])))
    assert status(sku, OP, both).words == "verified on A100 and H200"
    assert status(sku, OP, Records((second, first, run("2026-01-01", "a100", bad)))).words == "failed on A100"
    old = good.skus[0].model_copy(update={"source_hash": "0"})
    assert status(sku, OP, Records((run("2026-01-03", "h200", old),))).word == "stale"
    skipped = good.skus[0].model_copy(update={"verdict": "skipped"})
    assert status(sku, OP, Records((run("2026-01-03", "h200", skipped),))).word == "unverified"


def test_tally():
    here, there = KernelStatus("verified", cards=("H200",)), KernelStatus("verified", cards=("H100", "H200"))
    stale, reference = KernelStatus("stale", cards=("H200",)), KernelStatus("reference")
    assert tally([here, reference]) == "verified on H200"
    assert tally([reference]) == "reference"
    assert (
        tally([stale, here, here, there])
        == "2 verified on H200, 1 verified on H100 and H200, 1 stale, last run on H200"
    )
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
    dispatcher, path = dispatcher_of(right), tmp_path / "cpu.json"
    done, out, err = skuda(dispatcher, "verify", "--device", "cpu", "--seed", "7", "--output", path)
    found = EvidenceFile.load(path)
    cases, outputs = (sum(getattr(one, name) for one in found.skus) for name in ("cases", "outputs"))
    assert done == 0
    assert f"halved 2 0 0 {cases} {outputs}" in [" ".join(line.split()) for line in out.splitlines()]
    assert re.fullmatch(rf" +\d+\.\d s  halved: 2 verified, {cases} cases\n", err)
    assert found.seed == 7
    _, out, _ = skuda(dispatcher, "show", right.id, "--evidence", tmp_path, "--json")
    assert (json.loads(out)["verified"], json.loads(out)["evidence"]["word"]) == (True, "verified")
    _, out, _ = skuda(dispatcher, "list", "--evidence", tmp_path, "--json")
    assert json.loads(out)[0]["evidence"] == {"verified": 1, "reference": 1}
    changed = dispatcher_of(right.model_copy(update={"flags": ("-O3",)}))
    _, out, _ = skuda(changed, "show", right.id, "--evidence", tmp_path)
    assert "verified no: stale, the kernel or its reference has changed since it was run (CPU, " in " ".join(
        out.split()
    )
    _, out, _ = skuda(changed, "list", "--skus", "--evidence", tmp_path, "--json")
    assert {row["evidence"] for row in json.loads(out)} == {"reference", "stale"}


def test_a_failure_exits_with_1_and_names_the_command_that_repeats_it(skuda, monkeypatch):
    wrong = toy("wrong_at_one_place")
    only = ("verify", "--device", "cpu", "--backend", "toycpu")
    done, out, err = skuda(dispatcher_of(wrong), *only, "--seed", "5")
    assert done == 1
    assert "halved: 1 failed, " in err
    lines = [line.strip() for line in out.splitlines()]
    said = lines[lines.index(wrong.id) + 1]
    assert said.startswith("meaning: y[2, 1] is ")
    repeat = next(line for line in lines if line.startswith("to repeat it: "))
    assert re.fullmatch(f"to repeat it: skuda verify --device cpu --sku {wrong.id}( --case \\d+)* --seed 5", repeat)
    done, again, _ = skuda(dispatcher_of(wrong), *repeat.partition("skuda ")[2].split())
    assert (done, said in again) == (1, True)
    done, out, _ = skuda(dispatcher_of(wrong), *only, "--json")
    assert done == 1
    assert json.loads(out)["groups"][0]["failures"][0]["check"] == "meaning"
    monkeypatch.setenv("FORCE_COLOR", "1")
    done, out, err = skuda(dispatcher_of(wrong), *only, "--quick")
    assert done == 1
    for words in ("1 failed", "not recorded", "to repeat it: skuda verify"):
        assert words in " ".join(out.split()), words


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
        (["--case", "-1"], "--case"),
        (["--device", "cpu", "--backend", "cuda_core"], "leave a kernel for CPU"),
        (["--device", "cpu", "--case", "9999"], "be the number of a case of these kernels"),
    ],
)
def test_bad_words_are_refused(skuda, arguments, says):
    done, out, err = skuda(dispatcher_of(), "verify", *arguments)
    assert (done, out) == (2, "")
    assert says in err
