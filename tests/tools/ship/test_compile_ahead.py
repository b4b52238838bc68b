"""``skuda compile`` and ``skuda cache``: kernels compiled without a GPU, and the cache that they lie in."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skuda.dispatch import Dispatcher, device_named
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.pycuda import PycudaBackend
from skuda.dispatch.compile import cache as cubin_cache
from skuda.dispatch.compile.cache import CubinCache, Entry, outdated
from skuda.dispatch.compile.compilers import nvrtc_trouble
from skuda.dispatch.compile.member import Key
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.elementwise.fill import FillDescriptor
from skuda.registry import Registry
from skuda.registry.errors import CompileError
from skuda.tools.cli import main
from skuda.tools.ship import compile as compile_command
from skuda.tools.ship.cache import age_words, size_words

needs_nvrtc = pytest.mark.skipif(nvrtc_trouble() is not None, reason="no NVRTC wheels")
FILL = ["compile", "--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"]
LINEAR = ["compile", "--op", "quantized_linear", "--device", "h200", "--backend", "cuda_core"]
CUBIN = b"\x7fELF" + bytes(range(256)) * 4


@pytest.fixture
def skuda(capsys, monkeypatch, tmp_path):
    """Run the command over a cache of its own; gives status, standard output and standard error."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    def run(*arguments):
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


def rows(out):
    return [line.split("\t") for line in out.splitlines()]


def lookups(op, device, problems=None):
    """Everything that a device looks for when it runs these problems, or the op's cases: (kernel, launch, device)."""
    registry, device = built_in_registry(), device_named(device)
    return [
        (sku, launch, device)
        for sku in registry.skus_of(op)
        if sku.backend == "cuda_core" and sku.arch.runs_on(device.compute_capability)
        for problem in problems or [case.problem for case in registry.ops[op].cases]
        if problem.key() == sku.key and not any(constraint.check(problem) for constraint in sku.constraints)
        if (launch := CudaCoreBackend.launch_of(sku, problem, device)).steps
    ]


def fake(monkeypatch, backend=CudaCoreBackend, fails=None):
    """Put a compiler in place that compiles nothing; gives the list of its jobs."""
    jobs = []

    class Compiler:
        def identity(self, source):
            return "fake 1.0"

        def compile(self, job):
            jobs.append(job)
            if fails is not None and fails(job):
                raise CompileError(job.sku, "no good", "fake -c", "line one\nline two")
            return CUBIN

    monkeypatch.setattr(backend, "compiler", lambda self: Compiler())
    # What the cubin holds is of no interest here.
    monkeypatch.setattr("skuda.dispatch.compile.provider.placed", lambda sku, steps, cubin: steps)
    return jobs


# ------------------------------------------------------------------------------------------------------------ compile


@needs_nvrtc
def test_a_machine_without_a_compiler_finds_what_was_compiled_here(skuda, monkeypatch):
    status, out, err = skuda(*FILL)
    backend = CudaCoreBackend(CubinCache())
    wanted = lookups("fill", "h200")
    assert (status, err) == (0, "")
    assert rows(out) == [["fill", "cuda_core", "sm_90", str(len(CubinCache().survey())), "0", "0"]]
    assert {sku.element for sku, *_ in wanted} >= {"f32", "s8", "s4"}
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    for item in wanted:
        assert backend.cached(*item)
        assert backend.cubin(*item).cubin.startswith(b"\x7fELF")
    sku, launch, _ = wanted[0]
    assert not backend.cached(sku, launch, device_named("a100"))
    with pytest.raises(CompileError, match="skuda compile"):
        backend.cubin(sku, launch, device_named("a100"))


@needs_nvrtc
def test_what_is_there_is_found_and_what_is_corrupt_is_compiled_again(skuda):
    _, out, _ = skuda(*FILL)
    number = int(rows(out)[0][3])
    spoilt = CubinCache().survey()[0].path
    spoilt.write_bytes(spoilt.read_bytes()[:-1])
    status, out, _ = skuda(*FILL)
    assert (status, rows(out)[0][3:]) == (0, ["1", str(number - 1), "0"])
    assert not any(entry.trouble for entry in CubinCache().survey())


def test_every_configuration_of_the_cases_is_compiled_once(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    assert skuda("compile", "--op", "quantized_linear", "--arch", "sm_90a", "--backend", "cuda_core")[0] == 0
    asked = [(job.source.name, job.arch, job.flags) for job in jobs]
    assert {arch for _, arch, _ in asked} == {"sm_90", "sm_90a"}
    assert len(CubinCache().survey()) == len(asked)
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    backend = CudaCoreBackend(CubinCache())
    wanted = [*lookups("quantized_linear", "h100"), *lookups("quantized_linear", "h200")]
    assert all(backend.cached(*item) for item in wanted)
    assert {flags for *_, flags in asked} == {(*sku.flags, *launch.flags) for sku, launch, _ in wanted}


def test_each_card_gets_its_own(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    command = ["compile", "--op", "fill", "--arch", "sm_80", "--device", "h200,rtx4090", "--backend", "cuda_core"]
    status, out, _ = skuda(*command)
    assert (status, [row[2] for row in rows(out)]) == (0, ["sm_80", "sm_89", "sm_90"])
    assert {job.arch for job in jobs} == {"sm_80", "sm_89", "sm_90"}
    backend = CudaCoreBackend(CubinCache())
    assert all(backend.cached(*item) for card in ("a100", "h200", "rtx4090") for item in lookups("fill", card))
    assert not any(backend.cached(*item) for item in lookups("fill", "b200"))


def test_one_problem_is_compiled_as_it_would_be_looked_up(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    status, _, err = skuda(*LINEAR, "--m", "8", "--n", "4096", "--k=4096")
    assert status == 0
    assert "assumed" in err
    dispatcher = Dispatcher(built_in_registry())
    names = {"m": 8, "c_out": 4096, "k": 4096, "q_min": -127, "q_max": 127, "activation_element": "f32"}
    problem = dispatcher.registry.ops["quantized_linear"].descriptor(**names)
    accepted = dispatcher.explain(problem, device=device_named("h200")).accepted
    assert {job.sku for job in jobs} == {d.sku for d in accepted if ".cuda_core." in d.sku}
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    backend = CudaCoreBackend(CubinCache())
    wanted = lookups("quantized_linear", "h200", [problem])
    assert len(wanted) == len(jobs)
    assert all(backend.cached(*item) for item in wanted)


def test_a_failure_is_told_and_the_rest_goes_on(skuda, monkeypatch):
    jobs = fake(monkeypatch, fails=lambda job: ".f32." in job.sku)
    status, out, _ = skuda(*FILL)
    first, *failures = rows(out)
    bad = [job for job in jobs if ".f32." in job.sku]
    assert (status, len(bad)) == (1, 1)
    assert first == ["fill", "cuda_core", "sm_90", str(len(jobs) - 1), "0", "1"]
    assert [row[:3] for row in failures] == [["failure", bad[0].sku, "sm_90"]]
    assert failures[0][3].endswith("no good fake -c line one line two")
    status, out, _ = skuda(*FILL, "--json")
    found = json.loads(out)["cubins"]
    assert (status, {item["state"] for item in found}) == (1, {"cached", "failed"})
    monkeypatch.setenv("FORCE_COLOR", "1")
    status, out, _ = skuda(*FILL)
    assert status == 1
    assert "line two" in out


def test_a_launch_rule_that_fails_is_told_and_stops_neither_the_rest_nor_an_explanation(skuda, monkeypatch):
    fake(monkeypatch)

    def launch_of(sku, problem, device, *choice):
        if sku.element == "f32":
            raise RuntimeError("no rule for this")
        return _launch_of(sku, problem, device, *choice)

    _launch_of = CudaCoreBackend.launch_of
    monkeypatch.setattr(CudaBackend, "launch_of", staticmethod(launch_of))
    status, out, _ = skuda(*FILL)
    first, *failures = rows(out)
    assert status == 1
    assert int(first[3]) > 1
    assert first[5] == "1"
    assert failures[0][3] == "its launch rule fails: no rule for this"
    problem = FillDescriptor(numel=8, output_element="f32")
    found = Dispatcher().explain(problem, device=device_named("h200"))
    assert found.chosen
    assert "its launch rule fails: RuntimeError: no rule for this" in found.notes


def test_what_cannot_be_kept_is_not_called_compiled(skuda, monkeypatch):
    fake(monkeypatch)
    monkeypatch.setattr(cubin_cache.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    status, out, _ = skuda(*FILL)
    assert status == 1
    assert rows(out)[0][3:5] == ["0", "0"]
    assert "disk full" in rows(out)[1][3]


def test_without_a_compiler_the_remedy_is_told(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    monkeypatch.setattr(PycudaBackend, "compiler", lambda self: None)
    for name in ("pycuda", "all"):
        status, out, err = skuda("compile", "--op", "fill", "--arch", "sm_90", "--backend", name)
        assert (status, out, jobs) == (2, "", [])
        assert "no compiler here for pycuda: put nvcc on PATH" in err
        assert err.count("\n") == 1
    status, out, err = skuda("compile", "--op", "fill", "--arch", "sm_90")
    assert (status, {row[1] for row in rows(out)}) == (0, {"cuda_core"})
    assert "left out for want of a compiler: pycuda" in err
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    status, _, err = skuda("compile", "--op", "fill", "--arch", "sm_90")
    assert status == 2
    assert "skuda[cuda13]" in err


def test_where_no_kernel_fits_nothing_is_compiled(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    host = [replace(op, skus=tuple(s for s in op.skus if s.arch == "cpu")) for op in built_in_registry().ops.values()]
    registry = Registry(host, origin="a test")
    monkeypatch.setattr(compile_command, "Dispatcher", lambda: Dispatcher(registry))
    status, out, err = skuda(*FILL)
    assert (status, out, jobs) == (1, "", [])
    assert "nothing to compile" in err


def jobs_of(shard, skuda, monkeypatch, cache, *more):
    """Compile a shard, or all for None, into a cache of its own; gives what was compiled, and standard error."""
    with monkeypatch.context() as patch:
        patch.setenv("SKUDA_CACHE_DIR", str(cache))
        jobs = fake(patch)
        part = () if shard is None else ("--shard", shard)
        status, _, err = skuda("compile", *SHARED, *(more or ("--device", "h200,a100")), *part)
    assert status == 0
    return [(job.source.name, job.arch, job.flags, job.sku) for job in jobs], err


SHARED = ("--op", "dynamic_range,fill", "--backend", "cuda_core")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_disjoint_and_together_everything(skuda, monkeypatch, tmp_path, count):
    every, _ = jobs_of(None, skuda, monkeypatch, tmp_path / "all")
    shards = [f"{number}/{count}" for number in range(1, count + 1)]
    found = [jobs_of(shard, skuda, monkeypatch, tmp_path / "of" / shard) for shard in shards]
    assert sorted(job for jobs, _ in found for job in jobs) == sorted(every)
    sizes = [len(jobs) for jobs, _ in found]
    assert max(sizes) - min(sizes) <= 1
    told = [f"skuda: shard {shard}: {size} of {len(every)} cubins" for shard, size in zip(shards, sizes, strict=True)]
    assert [err.splitlines()[-1] for _, err in found] == told


def test_a_shard_depends_neither_on_the_order_of_words_nor_on_what_is_cached(skuda, monkeypatch, tmp_path):
    first, _ = jobs_of("2/3", skuda, monkeypatch, tmp_path / "one")
    jobs_of("1/3", skuda, monkeypatch, tmp_path / "two")
    typed = ("--device", "a100", "--device", "h200", "--op", "fill,dynamic_range")
    other, _ = jobs_of("2/3", skuda, monkeypatch, tmp_path / "two", *typed)
    assert sorted(row[:3] for row in other) == sorted(row[:3] for row in first)
    assert jobs_of("2/3", skuda, monkeypatch, tmp_path / "two")[0] == [], "all are there"


def test_copies_of_the_caches_of_all_shards_are_the_cache_of_one_run(skuda, monkeypatch, tmp_path):
    for number in (1, 2, 3):
        jobs_of(f"{number}/3", skuda, monkeypatch, tmp_path / str(number))
    for number in (2, 3):
        shutil.copytree(tmp_path / str(number), tmp_path / "1", dirs_exist_ok=True)
    assert jobs_of(None, skuda, monkeypatch, tmp_path / "1")[0] == []
    shutil.rmtree(tmp_path / "2" / "cubins-2")
    assert jobs_of(None, skuda, monkeypatch, tmp_path / "2")[0] != [], "one run makes what a missing shard left out"


def test_an_empty_shard_of_cubins_succeeds_and_says_so(skuda, monkeypatch):
    fake(monkeypatch)
    everything = ("compile", "--op", "fill", "--arch", "sm_80", "--backend", "cuda_core")
    total = sum(int(row[3]) for row in rows(skuda(*everything)[1]))
    status, out, err = skuda(*everything, "--shard", "99/99")
    assert (status, out, err) == (0, "", f"skuda: shard 99/99 is empty: there are {total} cubins\n")
    status, out, _ = skuda(*everything, "--shard", "99/99", "--json")
    assert (status, json.loads(out)["cubins"]) == (0, [])


BAD = {
    "unknown op": (["compile", "--op", "fil", "--arch", "sm_90"], "fill"),
    "unknown arch": (["compile", "--arch", "sm_99"], "sm_80, sm_89, sm_90, sm_90a"),
    "the arch of no card": (["compile", "--arch", "cpu"], "sm_80, sm_89"),
    "unknown card": (["compile", "--device", "h300"], "a100, h100, h200"),
    "no card": (["compile", "--device", "cpu"], "a100, h100, h200"),
    "unknown backend": (["compile", "--arch", "sm_90", "--backend", "numpy"], "pycuda, cuda_core, all"),
    "misspelt option": (["compile", "--devcie", "h200"], "near: --device"),
    "fields of two ops": ([*FILL, "--op", "dynamic_range", "--m", "8"], "one op"),
    "unknown field": ([*LINEAR, "--mm", "8"], "perhaps --m"),
    "missing field": ([*LINEAR, "--m", "8"], "must be given"),
    "gc of nothing": (["cache", "gc"], "--max-size or --older-than must be given"),
    "bad size": (["cache", "gc", "--max-size", "much"], "such as 1GiB"),
    "bad age": (["cache", "gc", "--older-than", "30x"], "such as 30d"),
    "unknown verb": (["cache", "lss"], "lss"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_in_one_line(skuda, monkeypatch, arguments, says):
    fake(monkeypatch)
    status, out, err = skuda(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("skuda: ")
    assert err.count("\n") == 1
    assert says in err


def test_without_a_card_here_one_has_to_be_named(skuda, monkeypatch):
    fake(monkeypatch)
    monkeypatch.setattr(Dispatcher, "devices", (device_named("cpu"),))
    status, _, err = skuda("compile", "--op", "fill")
    assert status == 2
    assert "--arch or --device must be given" in err


# -------------------------------------------------------------------------------------------------------------- cache


def fill_cache(number=3, day=86400):
    """Write entries that are 0, 1, 2, ... days old and an hour; gives their paths, youngest first."""
    cache = CubinCache()
    for age in range(number):
        key = Key("5" * 64, (f"-D{age}",), "sm_90", "launch", "cuda_core")
        cache.get(key, "nvcc 13.0", lambda: CUBIN, sku=f"kernel {age}", file="package:file.cu")
        written = time.time() - age * day - 3600
        os.utime(path_of(age), (written, written))
    return [path_of(age) for age in range(number)]


def path_of(age):
    return next(e.path for e in CubinCache().survey() if e.facts is not None and e.facts.sku == f"kernel {age}")


def kept():
    return {entry.facts.sku for entry in CubinCache().survey()}


def test_ls_says_what_is_there(skuda, monkeypatch):
    paths = fill_cache(2)
    status, out, err = skuda("cache", "ls")
    assert (status, err) == (0, "")
    found = {row[0]: row for row in rows(out)}
    for age, path in enumerate(paths):
        _, arch, compiler, size, seconds, trouble, where = found[f"kernel {age}"]
        assert (arch, compiler, int(size), trouble) == ("sm_90", "nvcc 13.0", path.stat().st_size, "")
        assert 0 <= int(seconds) - (age * 86400 + 3600) < 3000
        assert Path(where) == path
    _, out, _ = skuda("cache", "ls", "--json")
    assert {entry["sku"] for entry in json.loads(out)["entries"]} == {"kernel 0", "kernel 1"}
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = skuda("cache", "ls")
    assert "all whole" in out


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda content: content[:-1], "checksum"),
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "checksum"),
        (lambda _: b"", "not a kernel of ours"),
        (lambda content: content.replace(b'"sm_90"', b'"sm_80"'), "checksum of its facts"),
        (lambda content: content.replace(b'"launch"', b'"lauxch"'), "checksum of its facts"),
    ],
    ids=["short", "one bit", "empty", "another value", "another name"],
)
def test_verify_finds_what_is_wrong(skuda, spoil, says):
    paths = fill_cache()
    assert skuda("cache", "verify") == (0, "", "")
    content = paths[1].read_bytes()
    assert spoil(content) != content
    paths[1].write_bytes(spoil(content))
    status, out, _ = skuda("cache", "verify")
    ((*_, trouble, where),) = rows(out)
    assert (status, Path(where)) == (1, paths[1])
    assert says in trouble
    assert skuda("cache", "ls")[0] == 0


def test_gc_removes_what_is_old(skuda):
    paths = fill_cache()
    status, out, _ = skuda("cache", "gc", "--older-than", "36h")
    assert status == 0
    assert "removed 1 cubin" in out
    assert kept() == {"kernel 0", "kernel 1"}
    assert not paths[2].parent.exists()
    skuda("cache", "gc", "--older-than", "1d")
    assert kept() == {"kernel 0"}
    for path in (paths[0], paths[0].parent, CubinCache().folder):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_gc_removes_the_oldest_until_the_rest_fits(skuda):
    paths = fill_cache()
    total = sum(path.stat().st_size for path in paths)
    skuda("cache", "gc", "--max-size", str(total))
    assert len(kept()) == 3
    skuda("cache", "gc", "--max-size", f"{total - 1} B")
    assert kept() == {"kernel 0", "kernel 1"}
    skuda("cache", "gc", "--max-size", "0", "--older-than", "30d")
    assert kept() == set()


def test_gc_spares_what_is_being_written(skuda):
    (path, *_) = fill_cache(1)
    young, old = path.parent / ".new-young", path.parent / ".new-old"
    for file in (young, old):
        file.touch()
    os.utime(old, (0, 0))
    skuda("cache", "gc", "--older-than", "30d")
    assert (young.exists(), old.exists(), path.exists()) == (True, False, True)


def test_age_goes_before_size():
    sizes_and_ages = [(10, 1), (10, 50), (30, 100), (10, 200)]
    entries = [Entry(Path(str(age)), None, "", size, 1000.0 - age) for size, age in sizes_and_ages]

    def going(**limits):
        return [entry.path.name for entry in outdated(entries, 1000.0, **limits)]

    assert going() == []
    assert going(max_age=100) == ["200"]
    assert going(max_age=100, max_size=50) == ["200"]
    assert going(max_age=100, max_size=49) == ["200", "100"]
    assert going(max_size=0) == ["200", "100", "50", "1"]


def test_clear_asks_or_is_told_yes(skuda, monkeypatch):
    (path, *_) = fill_cache()
    (path.parent / ".new-left").touch()
    status, out, err = skuda("cache", "clear")
    assert (status, out) == (2, "")
    assert "--yes must be given" in err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda _: False)
    assert skuda("cache", "clear")[0] == 1
    assert len(kept()) == 3
    status, out, _ = skuda("cache", "clear", "--yes")
    assert status == 0
    assert "removed 3 cubins" in out
    assert list(CubinCache().folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(skuda, monkeypatch):
    fill_cache()

    def refuses(self, **_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuses)
    for arguments in (["clear", "--yes"], ["gc", "--max-size", "0"]):
        status, out, err = skuda("cache", *arguments)
        assert status == 1
        assert "removed 0 cubins" in out
        assert "3 cubins" in out
        assert err.count("Read-only file system") == 3
    monkeypatch.setattr(cubin_cache.tempfile, "TemporaryFile", lambda **_: refuses(None))
    jobs = fake(monkeypatch)
    status, _, err = skuda(*FILL)
    assert (status, jobs) == (2, [])
    assert "cannot be written" in err


def test_a_folder_that_is_absent_or_cannot_be_read_is_told(skuda, monkeypatch):
    for arguments in (["ls"], ["verify"], ["gc", "--max-size", "0"], ["clear", "--yes"]):
        status, out, err = skuda("cache", *arguments)
        assert (status, out) == (0, "")
        assert "there is no cache in" in err
    CubinCache().folder.parent.mkdir(exist_ok=True)
    CubinCache().folder.touch()
    for arguments in (["ls"], ["verify"], ["gc", "--max-size", "0"], ["clear", "--yes"]):
        status, out, err = skuda("cache", *arguments)
        assert (status, out) == (1, "")
        assert "cannot be read" in err


def test_a_folder_that_others_can_write_is_told(skuda):
    fill_cache(1)
    CubinCache().folder.chmod(0o777)
    status, out, err = skuda("cache", "ls")
    assert (status, len(rows(out))) == (0, 1)
    assert "others can write it" in err


def test_sizes_and_ages_in_words():
    assert [size_words(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
    assert [age_words(s) for s in (-5, 42, 5400, 86400 * 3, 86400 * 400)] == ["0s", "42s", "90m", "72h", "57w"]
