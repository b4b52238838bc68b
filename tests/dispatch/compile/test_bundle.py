"""Bundles: kernels in one file that machines without a compiler run from, and files that pretend to be one."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import HELPERS, TESTS
from stub_driver.build import build

from skuda.dispatch import device_named
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.pycuda import PycudaBackend
from skuda.dispatch.compile import bundle as bundles
from skuda.dispatch.compile.bundle import open_bundle, write_bundle
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.compilers import nvrtc_trouble
from skuda.dispatch.compile.member import LARGEST_CUBIN, SCHEMA, Key, Member
from skuda.dispatch.select.environment import versions
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.elementwise.fill import FillDescriptor
from skuda.registry.errors import BundleError, CompileError
from skuda.tools.cli import main

needs_nvrtc = pytest.mark.skipif(nvrtc_trouble() is not None, reason="no NVRTC wheels")
FILL = ["--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"]
FILE = "skuda.kernels.elementwise:fill.cu"
SOURCE = hashlib.sha256(b"source").hexdigest()
KEY = Key(SOURCE, ("-fmad=false",), "sm_90", "filled rule", "cuda_core")
CUBINS = {name: b"\x7fELF\x02\x01" + name.encode() * 40 for name in ("one", "two", "three")}


def member(name, key=KEY, compiler="nvrtc 13.0", file=FILE):
    return Member.of(key._replace(launch=f"{name} rule"), CUBINS[name], sku=name, file=file, compiler=compiler)


def written(path, names=CUBINS, **more):
    return write_bundle(path, "0.1.0", [(member(name, **more), CUBINS[name]) for name in names])


@pytest.fixture
def skuda(capsys, monkeypatch, tmp_path):
    """Run the command over a cache of its own; gives status, standard output and standard error."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS", "SKUDA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SKUDA_PLUGINS", "0")

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def fake(monkeypatch, backend=CudaCoreBackend, fails=lambda job: False, identity="fake 1.0"):
    """Put a compiler in place that compiles nothing; gives the list of its jobs."""
    jobs = []

    class Compiler:
        def identity(self, source):
            return identity

        def compile(self, job):
            jobs.append(job)
            if fails(job):
                raise CompileError(job.sku, "no good")
            return f"{identity} {job.arch} {job.flags}".encode()

    monkeypatch.setattr(backend, "compiler", lambda self: Compiler())
    # What the cubin holds is of no interest here.
    monkeypatch.setattr("skuda.dispatch.compile.provider.placed", lambda sku, steps, cubin: steps)
    return jobs


def filled(element="f32", card="h200"):
    """Return what the backends are asked for when an array is filled: (kernel, launch, device)."""
    problem, device = FillDescriptor(numel=8, output_element=element), device_named(card)
    sku = next(s for s in built_in_registry().candidates(problem.key()) if s.backend == "cuda_core")
    return sku, CudaCoreBackend.launch_of(sku, problem, device), device


# --- a file made byte by byte ----------------------------------------------------------------------------------------


def fields(**changes):
    """Return a manifest as JSON values: two cubins, the first one changed."""
    names = ("one", "two")
    members = [json.loads(member(name).model_dump_json()) for name in names]
    members[0] |= changes
    return {"skuda": "0.1.0", "cubins": SCHEMA, "members": members}


def raw(manifest, body=CUBINS["one"] + CUBINS["two"], *, magic=b"skuda bundle 1\n", length=None, digest=None):
    """Put a bundle together from its parts, each of which may be a lie."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    length = f"{len(text):012d}" if length is None else length
    return magic + f"{length} {digest or hashlib.sha256(text).hexdigest()}\n".encode() + text + body


def without(name):
    made = fields()
    del made["members"][0][name]
    return made


GOOD = raw(fields())
HOSTILE = {
    "empty": (b"", "no bundle"),
    "a zip": (b"PK\x03\x04" + bytes(100), "no bundle"),
    "a cubin": (CUBINS["one"], "no bundle"),
    "an entry of the cache": (b"skuda cubin 2\n{}\n", "no bundle"),
    "a later format": (raw(fields(), magic=b"skuda bundle 2\n"), "of format 2"),
    "a much later format": (raw(fields(), magic=b"skuda bundle 10\n"), "of format 10"),
    "nothing behind the first line": (b"skuda bundle 1\n", "second line"),
    "no length": (raw(fields(), length="x" * 12), "second line"),
    "a negative length": (raw(fields(), length="-00000000001"), "second line"),
    "a manifest of a terabyte": (raw(fields(), length="1099511627776"[:12]), "may have"),
    "a manifest beyond the end": (raw(fields(), length="000000090000"), "checksum of its manifest"),
    "a manifest cut short": (GOOD[:200], "checksum of its manifest"),
    "a manifest that was changed": (GOOD.replace(b'"0.1.0"', b'"0.1.1"'), "checksum of its manifest"),
    "a manifest that is no JSON": (raw(b"{"), "cannot be read"),
    "a manifest that is no text": (raw(b"\xff\xfe{}"), "cannot be read"),
    "a manifest of brackets": (raw(b"[" * 100_000), "cannot be read"),
    "a list": (raw([]), "cannot be read"),
    "no members": (raw({"skuda": "0.1.0", "cubins": SCHEMA}), "members must be given"),
    "members that are no list": (raw(fields() | {"members": {}}), "breaks a rule"),
    "a word more": (raw(fields() | {"pickle": "gASV"}), "pickle must be one of"),
    "a word that Python knows": (raw(fields(self=1)), "self must be one of"),
    "a word more in a member": (raw(fields(path="/etc/passwd")), "path must be one of"),
    "a word that the terminal obeys": (raw(fields(**{"\x1b]0;owned\x07": 1})), "must be one of"),
    "no checksum": (raw(without("sha256")), "sha256 must be given"),
    "a checksum that is a path": (raw(fields(sha256="../" * 20 + "etc")), "sha256 must match"),
    "a source that is a path": (raw(fields(source="/etc/passwd")), "source must match"),
    "an id that the terminal obeys": (raw(fields(sku="\x1b]0;owned\x07")), "sku must match"),
    "an id of two lines": (raw(fields(sku="one\ntwo")), "sku must match"),
    "an id without end": (raw(fields(sku="x" * 5000)), "sku must match"),
    "flags that are no list": (raw(fields(flags="-fmad=false")), "breaks a rule"),
    "a size that is text": (raw(fields(size="9")), "size must be an integer"),
    "a size that is true": (raw(fields(size=True)), "size must be an integer"),
    "a size that is a fraction": (raw(fields(size=1.5)), "size must be an integer"),
    "a size below zero": (raw(fields(size=-5)), "size must be at least 1"),
    "no size": (raw(fields(size=0)), "size must be at least 1"),
    "a size beyond the limit": (raw(fields(size=LARGEST_CUBIN + 1)), "size must be at most"),
    "a size of many digits": (
        raw(json.dumps(fields(size=99999)).replace("99999", "9" * 5000).encode()),
        "breaks a rule|cannot be read",
    ),
    "more flags than anybody has": (raw(fields(flags=["-D"] * 2000)), "breaks a rule"),
    "one cubin twice": (raw(fields(**fields()["members"][1]), CUBINS["two"] * 2), "twice"),
    "keys of another kind": (raw(fields() | {"cubins": SCHEMA + 1}), "in another way"),
    "one byte short": (GOOD[:-1], "its parts have"),
    "one byte more": (GOOD + b"\0", "its parts have"),
    "another bundle behind it": (GOOD + GOOD, "its parts have"),
    "a size that reaches beyond the end": (raw(fields(size=len(CUBINS["one"]) + 1)), "its parts have"),
}


def test_a_bundle_made_by_hand_is_one(tmp_path):
    path = tmp_path / "b"
    path.write_bytes(GOOD)
    made = open_bundle(str(path))
    assert [made.read(m) for m in made.manifest.members] == [CUBINS["one"], CUBINS["two"]]
    assert made.troubles() == []
    assert path.read_bytes() == GOOD


@pytest.mark.parametrize(("content", "says"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused_in_one_line_and_nothing_comes_of_it(tmp_path, monkeypatch, skuda, content, says):
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=says) as caught:
        open_bundle(str(path))
    told = str(caught.value)
    assert told.startswith(f"bundle {path}: ")
    assert told.isprintable()
    assert len(told) < 700
    assert ";" in told, "no remedy"
    assert skuda("bundle", "--show", path)[:2] == (2, "")
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_count_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "many"
    one = json.dumps(fields()["members"][0])
    path.write_bytes(
        raw(f'{{"skuda":"1","cubins":1,"members":[{",".join([one] * (bundles.MOST_CUBINS + 1))}]}}'.encode())
    )
    with pytest.raises(BundleError, match="members must satisfy"):
        open_bundle(str(path))


def test_a_size_beyond_the_limit_is_refused_before_anything_is_read(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(GOOD)
    os.truncate(path, bundles.LARGEST_BUNDLE + 1)  # a hole: no space is taken
    with pytest.raises(BundleError, match="may have"):
        open_bundle(str(path))


@pytest.mark.parametrize("swap", [False, True], ids=["one bit", "moved boundary"])
def test_a_cubin_that_was_changed_is_refused_when_it_is_read(tmp_path, skuda, swap):
    first, second = CUBINS["one"], CUBINS["two"]
    changed = fields(size=len(first) + 1)
    changed["members"][1]["size"] -= 1
    content = raw(changed) if swap else raw(fields(), first[:-1] + bytes([first[-1] ^ 1]) + second)
    path = tmp_path / "b"
    path.write_bytes(content)
    made = open_bundle(str(path))
    one, two = made.manifest.members
    with pytest.raises(BundleError, match="checksum of the cubin of one"):
        made.read(one)
    if not swap:
        assert made.read(two) == second
    status, _, err = skuda("bundle", "--show", path)
    assert (status, err.count("checksum")) == (1, 2 if swap else 1)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(BundleError, match="no regular file"):
            open_bundle(str(tmp_path / name))
    with pytest.raises(BundleError, match="No such file"):
        open_bundle(str(tmp_path / "absent"))


def test_a_file_that_changes_after_it_was_opened_gives_nothing_else(tmp_path):
    path = written(tmp_path / "b")
    made = open_bundle(str(path))
    (wanted,) = (m for m in made.manifest.members if m.sku == "two")
    assert made.read(wanted) == CUBINS["two"]
    written(path, ["one"])
    with pytest.raises(BundleError, match="checksum"):
        made.read(wanted)
    path.unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        made.read(wanted)


def test_a_file_that_others_can_write_is_refused_unless_it_is_named_with_its_checksum(tmp_path, monkeypatch):
    path = written(tmp_path / "b")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert open_bundle(f"{path}#sha256={digest}").path == path
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(BundleError, match="others can write it") as caught:
            open_bundle(str(path))
        assert f"{path}#sha256=" in str(caught.value)
        assert open_bundle(f"{path}#sha256={digest.upper()}").path == path
    path.chmod(0o644)
    open_bundle(str(path))
    # Of somebody who is neither we nor root.
    owner = os.fstat

    def anothers(handle):
        return os.stat_result([*owner(handle)[:4], os.geteuid() + 1, *owner(handle)[5:]])

    monkeypatch.setattr(os, "fstat", anothers)
    with pytest.raises(BundleError, match="others can write it"):
        open_bundle(str(path))
    open_bundle(f"{path}#sha256={digest}")


@pytest.mark.parametrize("at", [20, 300, -1], ids=["head", "manifest", "cubin"])
def test_another_file_than_the_one_that_is_meant_is_refused(tmp_path, at):
    path = written(tmp_path / "b")
    content = path.read_bytes()
    name = f"{path}#sha256={hashlib.sha256(content).hexdigest()}"
    open_bundle(name)
    spoilt = bytearray(content)
    spoilt[at] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(BundleError):
        open_bundle(name)
    # Whole in itself, and another one.
    written(path, ["one", "two"])
    for bad in (name, f"{path}#sha256="):
        with pytest.raises(BundleError, match="name the file that is meant"):
            open_bundle(bad)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_the_same_cubins_give_the_same_bytes(tmp_path):
    one, two = written(tmp_path / "one"), written(tmp_path / "two", reversed(CUBINS))
    assert one.read_bytes() == two.read_bytes()
    assert stat.S_IMODE(one.stat().st_mode) == 0o644
    other = written(tmp_path / "other", compiler="nvrtc 13.1")
    assert other.read_bytes() != one.read_bytes()


@pytest.mark.parametrize("name", ["fsync", "chmod", "replace"])
def test_a_bundle_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, name):
    path = written(tmp_path / "b")
    content = path.read_bytes()

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(BundleError, match="No space left"):
        written(path, ["one"])
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_but_a_bundle_is_replaced(tmp_path):
    path = written(tmp_path / "b", ["one"])
    written(path, ["two"])
    assert [m.sku for m in open_bundle(str(path)).manifest.members] == ["two"]
    path.write_text("a letter")
    with pytest.raises(BundleError, match="something else is there"):
        written(path)
    assert path.read_text() == "a letter"
    with pytest.raises(BundleError, match="it is a folder"):
        written(tmp_path)
    with pytest.raises(BundleError, match="no such folder"):
        written(tmp_path / "no" / "such" / "folder")


def test_what_would_not_be_read_is_not_written(tmp_path, monkeypatch):
    with pytest.raises(BundleError, match="twice"):
        open_bundle(str(written(tmp_path / "b", ["one", "one"])))
    monkeypatch.setattr(bundles, "LARGEST_BUNDLE", 100)
    with pytest.raises(BundleError, match="several bundles"):
        written(tmp_path / "c")
    assert not (tmp_path / "c").exists()


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_kernel_is_found_by_its_whole_key(tmp_path):
    made = open_bundle(str(written(tmp_path / "b")))
    key = KEY._replace(launch="one rule")
    assert made.find(key).sku == "one"
    for name, value, says in (
        ("backend", "pycuda", "nothing for the backend pycuda"),
        ("arch", "sm_80", "nothing for sm_80"),
        ("source", "0" * 64, "by skuda 0.1.0 from other sources of skuda.kernels.elementwise:fill.cu"),
        ("launch", "four rule", "lacks the kernel four"),
        ("flags", ("-DX",), "lacks the configuration -DX"),
    ):
        other = key._replace(**{name: value})
        assert made.find(other) is None
        assert says in made.lacks(other, FILE)
    assert "no kernel of else:where.cu" in made.lacks(key, "else:where.cu")


def test_the_cubin_of_the_compiler_that_is_here_goes_before_those_of_others(tmp_path):
    both = [(member("one", compiler=name), CUBINS["one"]) for name in ("nvrtc 13.0", "nvrtc 13.1")]
    made = open_bundle(str(write_bundle(tmp_path / "b", "0.1.0", both)))
    key = KEY._replace(launch="one rule")
    found = {name: made.find(key, name).compiler for name in (None, "nvrtc 13.0", "nvrtc 13.1", "nvcc 1")}
    assert found == {None: "nvrtc 13.0", "nvrtc 13.0": "nvrtc 13.0", "nvrtc 13.1": "nvrtc 13.1", "nvcc 1": "nvrtc 13.0"}


def test_threads_read_side_by_side(tmp_path, monkeypatch):
    path = written(tmp_path / "b")
    monkeypatch.setenv("SKUDA_BUNDLE", str(path))
    backend = CudaCoreBackend()

    def read(turn):
        (made,) = backend.bundles
        wanted = made.manifest.members[turn % 3]
        return made.read(wanted) == CUBINS[wanted.sku]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(600)))


# --- which one is used -----------------------------------------------------------------------------------------------


def test_bundles_go_before_the_cache_in_their_order_and_whoever_compiles_here(skuda, monkeypatch, tmp_path):
    for name, arch in (("first", "sm_90"), ("second", "sm_90,sm_80")):
        jobs = fake(monkeypatch, identity=name)
        assert skuda("bundle", tmp_path / name, "--op", "fill", "--arch", arch, "--backend", "cuda_core")[0] == 0
        assert {job.arch for job in jobs} == set(arch.split(","))
    monkeypatch.setenv("SKUDA_BUNDLE", os.pathsep.join(str(tmp_path / name) for name in ("first", "second")))
    jobs = fake(monkeypatch, identity="third")
    backend = CudaCoreBackend()
    for card, name in (("h200", "first"), ("a100", "second")):
        found = backend.shipped(*filled(card=card))
        assert found.cubin.startswith(name.encode())
        assert found.notes == (f"from {tmp_path / name}, compiled by {name}",)
    assert backend.shipped(*filled(card="b200")) is None
    assert jobs == []
    # What fills the cache, or a bundle, does so whatever is named.
    status, out, _ = skuda("compile", *FILL)
    assert (status, out.split("\t")[3]) == (0, str(len(jobs)))
    assert jobs
    monkeypatch.delenv("SKUDA_BUNDLE")
    assert CudaCoreBackend().shipped(*filled()) is None


def test_a_bundle_that_is_refused_is_refused_though_another_one_has_the_kernel(skuda, monkeypatch, tmp_path):
    fake(monkeypatch)
    assert skuda("bundle", tmp_path / "good", *FILL)[0] == 0
    (tmp_path / "bad").write_bytes(b"x")
    monkeypatch.setenv("SKUDA_BUNDLE", os.pathsep.join(str(tmp_path / name) for name in ("good", "bad")))
    with pytest.raises(BundleError, match=str(tmp_path / "bad")):
        CudaCoreBackend().shipped(*filled())


def test_a_cubin_that_is_none_is_refused(tmp_path, monkeypatch):
    sku, launch, device = filled()
    key = CudaCoreBackend().sought(sku, launch, device).key
    for cubin in (b"#!/bin/sh", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 200):
        one = Member.of(key, cubin, sku=sku.id, file=sku.source, compiler="somebody")
        monkeypatch.setenv("SKUDA_BUNDLE", str(write_bundle(tmp_path / "b", "0.1.0", [(one, cubin)])))
        with pytest.raises(BundleError, match="is no cubin"):
            CudaCoreBackend().shipped(sku, launch, device)


def test_what_is_missing_is_told_with_every_bundle(skuda, monkeypatch, tmp_path):
    fake(monkeypatch)
    fake(monkeypatch, PycudaBackend)
    assert skuda("bundle", tmp_path / "hopper", *FILL)[0] == 0
    assert skuda("bundle", tmp_path / "other", *FILL[:-1], "pycuda")[0] == 0
    monkeypatch.setenv("SKUDA_BUNDLE", os.pathsep.join(str(tmp_path / name) for name in ("hopper", "other")))
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    with pytest.raises(CompileError) as caught:
        CudaCoreBackend().cubin(*filled(card="a100"))
    told = str(caught.value)
    assert f"nor in {tmp_path / 'hopper'}: it holds nothing for sm_80" in told
    assert f"nor in {tmp_path / 'other'}: it holds nothing for the backend cuda_core" in told
    assert "skuda bundle" in told
    sku, launch, device = filled()
    with pytest.raises(CompileError, match="lacks the configuration"):
        CudaCoreBackend().cubin(sku, launch._replace(flags=("-DNEW",)), device)


# --- the command -----------------------------------------------------------------------------------------------------


def test_bundle_holds_exactly_what_was_asked_for(skuda, monkeypatch, tmp_path):
    jobs = fake(monkeypatch)
    skuda("compile", "--op", "dynamic_range", *FILL[2:])
    jobs.clear()
    status, out, err = skuda("bundle", tmp_path / "b", *FILL)
    assert (status, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert {(line[1], line[2], line[3]) for line in lines} == {("sm_90", "cuda_core", "fake 1.0")}
    assert len(lines) == len(jobs)
    assert {job.source.name for job in jobs} == {"fill.cu"}
    content = (tmp_path / "b").read_bytes()
    assert skuda("bundle", tmp_path / "b", *FILL) == (status, out, err)
    assert len(lines) == len(jobs), "it was compiled again"
    assert (tmp_path / "b").read_bytes() == content
    status, out, _ = skuda("bundle", "--show", tmp_path / "b", "--json")
    told = json.loads(out)
    assert (told["troubles"], told["foreign"], len(told["cubins"])) == ([], 0, len(jobs))
    assert told["sha256"] == hashlib.sha256(content).hexdigest()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = skuda("bundle", "--show", tmp_path / "b")
    assert status == 0
    assert told["sha256"] in out
    assert f"{len(jobs)} cubins" in out


def test_one_problem_is_bundled(skuda, monkeypatch, tmp_path):
    jobs = fake(monkeypatch)
    sizes = ["--m", "8", "--n", "4096", "--k=4096"]
    command = ["--op", "quantized_linear", "--device", "h200", "--backend", "cuda_core"]
    assert skuda("bundle", tmp_path / "b", *command, *sizes)[0] == 0
    made = open_bundle(str(tmp_path / "b"))
    assert {m.key.flags for m in made.manifest.members} == {job.flags for job in jobs}
    assert len(made.manifest.members) == len(jobs) > 1


def test_a_list_of_problems_is_bundled(skuda, monkeypatch, tmp_path):
    jobs = fake(monkeypatch)
    linear = {"op": "quantized_linear", "q_min": -127, "q_max": 127, "activation_element": "bf16"}
    problems = [linear | {"m": m, "c_out": 4096, "k": 4096} for m in (1, 4096)]
    problems.append({"op": "fill", "numel": 8, "output_element": "f32"})
    (tmp_path / "list").write_text(json.dumps(problems))
    given = ["--descriptors", tmp_path / "list", "--device", "h200", "--backend", "cuda_core"]
    assert skuda("bundle", tmp_path / "b", *given)[0] == 0
    listed = {m.file.partition(":")[2] for m in open_bundle(str(tmp_path / "b")).manifest.members}
    assert listed == {f"quantized_linear{name}.cu" for name in ("", "_mma", "_streamed", "_warpgroup")} | {"fill.cu"}
    # Each of the two sizes leads to configurations of its own.
    both = len(jobs)
    (tmp_path / "list").write_text(json.dumps(problems[:1]))
    jobs.clear()
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "another"))
    assert skuda("compile", *given)[0] == 0
    assert len(jobs) < both - 1
    jobs.clear()
    assert skuda("compile", *given, "--op", "fill")[:2] == (1, "")
    assert jobs == []


def test_where_a_kernel_does_not_compile_nothing_is_written(skuda, monkeypatch, tmp_path):
    fake(monkeypatch, fails=lambda job: ".f32." in job.sku)
    status, out, err = skuda("bundle", tmp_path / "b", *FILL)
    assert status == 1
    assert "no good" in out
    assert "was not written" in err
    assert not (tmp_path / "b").exists()


def test_it_is_told_what_a_bundle_was_made_from_and_that_kernels_come_from_it(skuda, monkeypatch, tmp_path):
    path = written(tmp_path / "b", file="os:path.py")
    status, out, err = skuda("bundle", "--show", path)
    assert (status, len(out.splitlines())) == (0, 3)
    assert "3 of 3 cubins" in err
    assert "bundle" not in versions()
    monkeypatch.setenv("SKUDA_BUNDLE", str(path))
    assert versions()["bundle"] == str(path)


BAD = {
    "no file": (["bundle"], "FILE must be named first"),
    "fields in front": (["bundle", "--m", "8", "file", "--op", "fill"], "FILE must be named first"),
    "something else": (["bundle", str(TESTS / "conftest.py"), *FILL], "something else is there"),
    "show and compile": (["bundle", "--show", "x", "--op", "fill"], "must be left out"),
    "show nothing": (["bundle", "--show", "/nonexistent/b"], "No such file"),
    "a list and a problem": (
        ["bundle", "b", *FILL, "--descriptors", "x", "--numel", "8"],
        "without a problem's fields",
    ),
    "no list": (["bundle", "b", *FILL, "--descriptors", "/nonexistent/list"], "be a file that can be read"),
    "unknown op": (["bundle", "b", "--op", "fil", "--arch", "sm_90"], "bundle: --op"),
    "unknown card": (["bundle", "b", "--device", "h300"], "bundle: --device"),
    "unknown field": (["bundle", "b", *FILL, "--mm", "8"], "--mm"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_in_one_line(skuda, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    jobs = fake(monkeypatch)
    status, out, err = skuda(*arguments)
    assert (status, out, jobs) == (2, "", [])
    assert err.startswith("skuda: ")
    assert err.count("\n") == 1
    assert says in err


def test_the_doctor_says_which_bundle_is_used_and_what_is_wrong_with_it(skuda, monkeypatch, tmp_path):
    def found(name):
        monkeypatch.setenv("SKUDA_BUNDLE", str(name))
        status, out, _ = skuda("doctor", "--json")
        assert status == 0  # nothing here needs a bundle
        (one,) = (f for f in json.loads(out)["findings"] if f["section"] == "Bundles")
        return one

    fake(monkeypatch)
    assert skuda("bundle", tmp_path / "b", *FILL)[0] == 0
    good = found(tmp_path / "b")
    assert good["state"] == "ok"
    assert f"{tmp_path / 'b'}, made by skuda" in good["detail"]
    content = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "checksum" in found(tmp_path / "b")["detail"]
    (tmp_path / "b").write_bytes(content[:-1])
    broken = found(tmp_path / "b")
    assert broken["state"] == "broken"
    assert "SKUDA_BUNDLE" in broken["fix"]
    foreign = found(written(tmp_path / "c"))
    assert foreign["state"] == "broken"
    assert "3 from other sources" in foreign["detail"]
    monkeypatch.delenv("SKUDA_BUNDLE")
    assert "Bundles" not in skuda("doctor")[1]


# --- a machine with a driver and nothing else ------------------------------------------------------------------------

ELSEWHERE = """
import json, sys
touched = []

def watch(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        touched.append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.chmod", "os.truncate"):
        touched.append(event + " " + str(arguments[0]))

sys.modules["cuda.bindings.nvrtc"] = None
sys.path.insert(0, {here!r})
from concurrent.futures import ThreadPoolExecutor
from fakes import FakeArray
from skuda.dispatch import Dispatcher, PlanPreference
from skuda.kernels.elementwise.fill import FillDescriptor
from skuda.registry import SkudaError

told = {{}}
d = Dispatcher()
prefer = PlanPreference(backend="cuda_core")
sys.addaudithook(watch)


def fill(element, dtype):
    problem = FillDescriptor(numel=32, output_element=element)
    plan = d.select(problem, prefer, d.devices[0])
    plan.run(output=FakeArray((32,), dtype, address=0x1000000000010000), value=1)
    return plan.notes
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    return build(tmp_path_factory.mktemp("stub")).parent


@pytest.fixture
def elsewhere(stub, tmp_path):
    """Return a function that runs code where there is a driver, but neither nvcc nor NVRTC."""

    def run(code, **environment):
        log = tmp_path / "log"
        fixed = {
            "LD_LIBRARY_PATH": str(stub),
            "SKUDA_CACHE_DIR": str(tmp_path / "untouched"),
            "SKUDA_STUB_LOG": str(log),
            "SKUDA_PLUGINS": "0",
            "PATH": "/nonexistent",
            "PYTHONWARNINGS": "error",
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SKUDA_", "CUDA_", "PYTHONWARN"))}
        script = ELSEWHERE.format(here=str(HELPERS)) + textwrap.dedent(code)
        script += '\ntold["touched"] = touched\nprint(json.dumps(told))\n'
        command, settings = [sys.executable, "-c", script], clean | fixed | environment
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        launches = [line for line in log.read_text().splitlines() if " cuLaunchKernel" in line]
        assert not (tmp_path / "untouched").exists()
        return json.loads(done.stdout.splitlines()[-1]), launches

    return run


stubbed = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("nm") is None or importlib.util.find_spec("cuda") is None,
    reason="no C compiler to build the stub driver with, or no cuda-bindings",
)


@needs_nvrtc
@stubbed
def test_a_machine_without_compilers_runs_from_a_bundle_and_writes_nothing(skuda, elsewhere, tmp_path):
    path = tmp_path / "kernels.skuda"
    assert skuda("bundle", path, *FILL)[0] == 0
    content, folder = path.read_bytes(), tmp_path / "read-only"
    folder.mkdir()
    shutil.move(path, folder / "b")
    (folder / "b").chmod(0o444)
    folder.chmod(0o555)
    name = f"{folder / 'b'}#sha256={hashlib.sha256(content).hexdigest()}"
    told, launches = elsewhere(
        """
        told["status"] = d.status["cuda_core"].model_dump()
        told["notes"] = fill("f32", "f4")
        with ThreadPoolExecutor(8) as pool:
            kinds = [("f16", "f2"), ("f64", "f8"), ("s8", "i1"), ("u8", "u1")] * 4
            list(pool.map(lambda kind: fill(*kind), kinds))
        """,
        SKUDA_BUNDLE=name,
    )
    assert told["status"]["available"]
    assert f"no compiler: only kernels from {folder / 'b'} run" in told["status"]["detail"]
    assert [note for note in told["notes"] if note.startswith(f"from {folder / 'b'}, compiled by nvrtc")]
    assert told["touched"] == []
    assert len(launches) == 17
    folder.chmod(0o755)
    assert sorted(folder.iterdir()) == [folder / "b"]
    assert (folder / "b").read_bytes() == content


@stubbed
def test_without_a_bundle_that_serves_it_the_machine_says_why(elsewhere, tmp_path):
    code = """
        status = d.status["cuda_core"]
        told["status"] = [status.available, status.detail, status.remedy]
        try:
            fill("f32", "f4")
        except SkudaError as error:
            told["error"] = str(error)
    """
    (tmp_path / "bad").write_bytes(GOOD[:-1])
    told, launches = elsewhere(code, SKUDA_BUNDLE=str(tmp_path / "bad"))
    available, detail, remedy = told["status"]
    assert (available, launches) == (False, [])
    assert f"bundle {tmp_path / 'bad'}: it has {len(GOOD) - 1} bytes" in detail
    assert "unset SKUDA_BUNDLE" in remedy
    told, launches = elsewhere(code, SKUDA_BUNDLE=str(written(tmp_path / "old")))
    assert told["status"][0]
    assert f"nor in {tmp_path / 'old'}: it was made by skuda 0.1.0 from other sources of {FILE}" in told["error"]
    told, _ = elsewhere(code)
    assert not told["status"][0]
    assert "SKUDA_BUNDLE" in told["status"][2]
    assert told["touched"] == []


def test_the_cache_is_not_asked_where_the_bundle_has_the_kernel(skuda, monkeypatch, tmp_path):
    fake(monkeypatch)
    assert skuda("bundle", tmp_path / "b", *FILL)[0] == 0
    monkeypatch.setenv("SKUDA_BUNDLE", str(tmp_path / "b"))

    class Untouched(CubinCache):
        def get(self, *_):
            raise AssertionError("the cache was asked")

    assert CudaCoreBackend(Untouched()).shipped(*filled()).cubin
