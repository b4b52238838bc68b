"""`skuda verify --shard` and `skuda merge`: all parts make the record of one run, and anything less is refused."""

from __future__ import annotations

import json

import pytest
from halved import EXACT, LOOSE, dispatcher_of, toy
from support import fresh

from skuda.dispatch import Dispatcher
from skuda.dispatch.select.work import WorkShard
from skuda.kernels.catalog import built_in_registry
from skuda.tools.cli import main
from skuda.tools.verify import command as verify_page
from skuda.tools.verify import evidence
from skuda.tools.verify.evidence import EvidenceFile, load_records

SKUS = (
    toy("reference"),
    toy("wrong_at_one_place"),
    toy("within_two", LOOSE),
    toy("raises"),
    toy("within_two", EXACT.model_copy(update={"max_ulp": 2}), variant="ulp_2"),
    toy("beside"),
)
KERNELS = len(SKUS) + 1
"""With the reference."""


def prepared(monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verify_page, "Dispatcher", lambda **_: dispatcher_of(*SKUS))


@pytest.fixture
def skuda(capsys, monkeypatch, tmp_path):
    prepared(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def verify_shards(count, *more, folder):
    """Verify all shards of a run; gives their files."""
    files = []
    for index in range(1, count + 1):
        files.append(folder / f"{index}-of-{count}.json")
        typed = ("--device", "cpu", "--seed", "7", "--shard", f"{index}/{count}", *more)
        assert main(["verify", *typed, "--output", str(files[-1])]) in (0, 1)
    return files


def dated(path):
    """A record without its time."""
    return EvidenceFile.load(path).model_copy(update={"date": ""})


# ---------------------------------------------------------------------------------------------------------- the merge


@pytest.mark.parametrize("count", [1, 2, 3, KERNELS, KERNELS + 2])
def test_the_merged_record_is_that_of_one_run(skuda, verified, tmp_path, count):
    files = verify_shards(count, folder=tmp_path)
    fresh("order").shuffle(files)
    status, out, err = skuda("merge", *files, "--output", "all.json")
    shards = "1 shard" if count == 1 else f"{count} shards"
    assert (status, err) == (1, ""), "kernels failed"
    assert out == f"{shards}: {KERNELS} kernels, 4 verified, 3 failed; written to all.json\n"
    assert dated(tmp_path / "all.json") == dated(verified[-1])
    assert EvidenceFile.load(tmp_path / "all.json").date == max(EvidenceFile.load(file).date for file in files)
    texts = [file.read_text().splitlines() for file in (tmp_path / "all.json", verified[-1])]
    merged, one = ([line for line in text if '"date"' not in line] for text in texts)
    assert merged == one


@pytest.mark.parametrize("of", ["one op", "several ops"])
def test_the_merged_record_of_real_kernels_is_that_of_one_run(skuda, monkeypatch, tmp_path, of):
    rng = fresh("kernels", of)
    monkeypatch.setattr(verify_page, "Dispatcher", lambda **_: Dispatcher(built_in_registry(), tuning=""))
    ids: dict[str, list[str]] = {}
    for sku in built_in_registry():
        if sku.backend == "numpy" and "linear" not in sku.op:
            ids.setdefault(sku.op, []).append(sku.id)
    if of == "one op":
        chosen = rng.choice(ids[rng.choice([op for op in ids if len(ids[op]) > 4])], 5, replace=False)
    else:
        chosen = [rng.choice(ids[op]) for op in rng.choice(list(ids), 5, replace=False)]
    files = verify_shards(3, "--sku", ",".join(chosen), folder=tmp_path)
    assert skuda("merge", *files, "--output", "all.json")[0] == 0
    typed = ("verify", "--device", "cpu", "--seed", "7", "--sku", ",".join(chosen))
    assert skuda(*typed, "--output", "one.json")[0] == 0
    merged, one = (dated(tmp_path / name) for name in ("all.json", "one.json"))
    if of == "one op":  # which layout an added case gets depends on the op's other kernels
        merged, one = (
            found.model_copy(update={"skus": tuple(sku.model_copy(update={"layouts": ()}) for sku in found.skus)})
            for found in (merged, one)
        )
    assert merged == one
    assert {sku.sku for sku in merged.skus} == {*chosen}


def test_an_empty_shard_succeeds_and_says_so(skuda, tmp_path):
    typed = ("verify", "--device", "cpu", "--sku", SKUS[0].id, "--seed", "7", "--shard", "2/2")
    status, out, err = skuda(*typed, "--output", "empty.json")
    assert (status, out, err) == (0, "", "skuda: shard 2/2 is empty: there is 1 kernel\n")
    found = EvidenceFile.load(tmp_path / "empty.json")
    assert (found.skus, found.shard.label, found.shard.total) == ((), "2/2", 1)
    status, out, _ = skuda(*typed, "--json")
    assert (status, json.loads(out)["shard"]["index"]) == (0, 2)
    assert evidence.status(SKUS[0], dispatcher_of().registry.ops["halved"], load_records(tmp_path)).word == "unverified"


def test_a_record_without_a_shard_looks_as_before(verified):
    assert "shard" not in json.loads(verified[-1].read_text())
    assert verified[-1].read_text().startswith('{\n "kind": "skuda verify",\n "schema_version": 1,')


def test_a_shard_of_everything_does_not_replace_the_record_of_the_card(skuda, monkeypatch):

    def never(device):
        raise AssertionError(device)

    monkeypatch.setattr(verify_page, "_default_path", never)
    assert skuda("verify", "--device", "cpu", "--seed", "7", "--shard", "1/7", "--json")[0] == 0


@pytest.mark.parametrize(
    "text", ["0/4", "5/4", "4", "1/0", "-1/2", "a/b", "1/2/3", " 1/2", "1.0/2", "", "٢/٤", "1/2\n"]
)
@pytest.mark.parametrize(
    "command",
    [
        ("verify", "--device", "cpu", "--seed", "7", "--json"),
        ("tune", "fill", "--numel", "3", "--seed", "7"),
        ("compile", "--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"),
    ],
    ids=["verify", "tune", "compile"],
)
def test_what_is_no_shard_is_refused(skuda, command, text):
    status, out, err = skuda(*command, f"--shard={text}")
    assert (status, out) == (2, "")
    assert f"{command[0]}: --shard must be I/N with I from 1 to N, such as 2/4" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "--json"], "stand beside --seed, equal for all shards; had 1/2 without --seed"),
        (["verify", "--seed", "7"], "stand beside --output or --json; had 1/2 without a record"),
        (["tune", "fill", "--numel", "3"], "stand beside --seed, equal for all shards; had 1/2 without --seed"),
        (["compile", "--arch", "sm_90"], "stand beside --backend, and --arch or --device"),
        (["compile", "--backend", "cuda_core"], "stand beside --backend, and --arch or --device"),
    ],
)
def test_what_may_differ_between_machines_must_be_given(skuda, arguments, says):
    status, out, err = skuda(*arguments, "--shard", "1/2")
    assert (status, out) == (2, "")
    assert says in err


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """The files of three shards of one run, and that of the whole run."""
    folder = tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patch:
        prepared(patch)
        main(["verify", "--device", "cpu", "--seed", "7", "--output", str(folder / "one.json")])
        return (*verify_shards(3, folder=folder), folder / "one.json")


@pytest.fixture
def shards(verified):
    """Three shards of one run, as JSON, by number."""
    return {number: json.loads(file.read_text()) for number, file in enumerate(verified[:3], 1)}


@pytest.fixture
def refused(skuda, tmp_path):
    """Merge records; gives the message of the refusal."""

    def merge(records):
        names = []
        for number, record in records.items():
            names.append(f"{number}.json")
            (tmp_path / names[-1]).write_text(record if isinstance(record, str) else json.dumps(record))
        status, out, err = skuda("merge", *names, "--output", "all.json")
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert not (tmp_path / "all.json").exists()
        return err

    return merge


def test_the_same_shards_without_a_fault_are_not_refused(skuda, tmp_path, shards):
    for number, record in shards.items():
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    assert skuda("merge", "1.json", "2.json", "3.json", "--output", "all.json")[0] == 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("device.name", "another", "device.name must be that of 1.json, CPU; had another"),
        ("device.memory", 5, "device.memory must be"),
        ("driver", "580.1", "driver must be that of 1.json, nothing; had 580.1"),
        ("versions.numpy", "0.1", "the version of numpy must be"),
        ("versions.torch2", "2.0", "the version of torch2 must be that of 1.json, nothing; had 2.0"),
        ("skuda", "0.0.0", "skuda must be"),
        ("verifier_hash", "0" * 64, "verifier_hash must be"),
        ("seed", 8, "seed must be that of 1.json, 7; had 8"),
        ("quick", True, "quick must be that of 1.json, False; had True"),
        ("shard.count", 4, "shard.count must be that of 1.json, 3; had 4"),
        ("shard.total", 70, "shard.total must be"),
        ("shard.list_hash", "0" * 64, "shard.list_hash must be"),
    ],
)
def test_runs_under_other_conditions_are_refused(shards, refused, field, value, says):
    *path, last = field.split(".")
    record = shards[2]
    for name in path:
        record = record[name]
    record[last] = value
    assert f"2.json: {says}" in refused(shards)


def test_another_gpu_of_the_same_kind_is_no_other_condition(skuda, tmp_path, shards):
    shards[2]["device"]["ordinal"] = 1
    for number, record in shards.items():
        (tmp_path / f"{number}.json").write_text(json.dumps(record))
    assert skuda("merge", "2.json", "3.json", "1.json", "--output", "all.json")[0] == 1
    assert dated(tmp_path / "all.json").device.ordinal == 0, "that of the first shard"


def test_missing_shards_are_named(shards, refused):
    assert "shards must be all of the run; missing: 2; had 1, 3 of 3" in refused({n: shards[n] for n in (1, 3)})
    assert "missing: 1, 2; had 3 of 3" in refused({3: shards[3]})
    shards[1]["shard"]["count"] = 2**31 - 1
    assert "missing: 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...; had 1 of 2147483647" in refused({1: shards[1]})


def test_a_shard_that_is_there_twice_is_refused(shards, refused):
    assert "4.json: shard.index must be that of another shard; had 2, as 2.json" in refused({**shards, 4: shards[2]})


def test_a_kernel_in_two_shards_is_refused(shards, refused):
    stray = shards[1]["skus"][0]
    shards[3]["skus"].append(stray)
    told = refused(shards)
    assert f"3.json: skus must be there once; 1.json holds it too, with the same outcome; had {stray['sku']}" in told
    shards[3]["skus"][-1] = {**stray, "verdict": "failed"}
    assert "1.json holds it too, with another outcome" in refused(shards)


def test_a_kernel_with_two_outcomes_in_one_file_is_refused(shards, refused):
    twice = shards[2]["skus"][-1]
    shards[2]["skus"].append({**twice, "verdict": "skipped"})
    told = refused(shards)
    assert "2.json: skus must be there once; 2.json holds it too, with another outcome" in told


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_shard_that_lacks_a_kernel_is_refused(shards, refused, number):
    size = len(shards[number]["skus"])
    shards[number]["skus"].pop(0)
    told = refused(shards)
    assert f"{number}.json: skus must be the {size} of shard {number}/3 of a list of {KERNELS}; had {size - 1}" in told


@pytest.mark.parametrize("fault", ["another kernel", "another order"])
def test_a_shard_of_another_list_is_refused(shards, refused, fault):
    mine = shards[1]["skus"]
    if fault == "another order":
        mine.reverse()
    else:
        mine[0]["sku"] = mine[0]["sku"].replace(".cpu.", ".sm_90.")
    assert "merge: skus must be those of the list that all files are shards of" in refused(shards)


@pytest.mark.parametrize("fault", ["skips", "overlaps"])
def test_a_command_that_splits_wrongly_is_found_out(skuda, monkeypatch, tmp_path, fault):
    def places(shard):
        if shard.index == 2:
            return right(shard)[1:] if fault == "skips" else right(shard.model_copy(update={"index": 1}))
        return right(shard)

    right = WorkShard.places
    with monkeypatch.context() as patch:
        patch.setattr(WorkShard, "places", places)
        files = verify_shards(2, folder=tmp_path)
    status, _, err = skuda("merge", *files, "--output", "all.json")
    assert status == 2
    assert {"skips": "skus must be the 4 of shard 2/2", "overlaps": "skus must be there once"}[fault] in err


BAD = {
    "no JSON": ("{", "be readable JSON"),
    "other JSON": ("[1]", "kind must be 'skuda verify' or 'skuda tuning'"),
    "another record": ('{"kind": "skuda bench"}', "had 'skuda bench'"),
    "a list as its kind": ('{"kind": []}', "kind must be 'skuda verify' or 'skuda tuning'"),
    "a later schema": ('{"kind": "skuda verify", "schema_version": 2}', "had 'skuda verify', schema 2"),
    "an invalid record": ('{"kind": "skuda verify", "schema_version": 1}', "device must be given"),
    "nested too deep": ("[" * 100_000, "be readable JSON"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD.keys())
def test_other_files_are_refused(shards, refused, text, says):
    told = refused({**shards, 2: text})
    assert "2.json" in told
    assert says in told


def test_a_shard_that_is_none_is_refused(shards, refused):
    shards[2]["shard"]["index"] = 4
    assert "index must be at most the count, 3; had 4" in refused(shards)


def test_the_record_of_a_whole_run_is_refused(verified, shards, refused):
    told = refused({**shards, 2: verified[-1].read_text()})
    assert "2.json: shard must be there: `--shard I/N` makes records that can be merged; had none" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent.json", "--output", "x.json"], "absent.json must be readable JSON"),
        (["a.json", "--output", "./a.json"], "--output must be another file than those that are merged"),
        (["a.json", "--output", "absent/x.json"], "--output must be a file in a folder that exists"),
        (["a.json"], "--output"),
        (["--output", "x.json"], "FILES"),
    ],
)
def test_bad_words_are_refused(skuda, arguments, says):
    status, out, err = skuda("merge", *arguments)
    assert (status, out) == (2, "")
    assert says in err
