"""Bundles: compiled kernels in one file for machines without a compiler, and files that must be refused as bundles."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import stat
import textwrap

import pytest
from cubins import elf
from fakes import fake_compiler
from paths import TESTS
from stub_driver.build import build, run_over_stub

from skuda.dispatch import device_named
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.compile import bundle as bundles
from skuda.dispatch.compile.bundle import open_bundle, write_bundle
from skuda.dispatch.compile.compilers import nvrtc_trouble
from skuda.dispatch.compile.member import LARGEST_CUBIN, SCHEMA, CubinRecord, Key
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.elementwise.fill import FillDescriptor
from skuda.registry.errors import BundleError, CompileError

needs_nvrtc = pytest.mark.skipif(nvrtc_trouble() is not None, reason="no NVRTC wheels")
FILL = ["--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"]
FILE = "skuda.kernels.elementwise:fill.cu"
SOURCE = hashlib.sha256(b"source").hexdigest()
KEY = Key(SOURCE, ("-fmad=false",), "sm_90", "filled rule", "cuda_core")


CUBINS = {name: elf(name * 40) for name in ("one", "two", "three")}


def member(name, key=KEY, compiler="nvrtc 13.0", file=FILE):
    return CubinRecord.of(key._replace(launch=f"{name} rule"), CUBINS[name], sku=name, file=file, compiler=compiler)


def written(path, names=CUBINS, **more):
    return write_bundle(path, "0.1.0", [(member(name, **more), CUBINS[name]) for name in names])


def fake(monkeypatch, fails=None, identity="fake 1.0"):
    return fake_compiler(
        monkeypatch, CudaCoreBackend, identity, fails, lambda job: elf(f"{identity} {job.arch} {job.flags}")
    )


def filled(element="f32", card="h200"):
    """Return what the backends are asked for when an array is filled: (kernel, launch, device)."""
    problem, device = FillDescriptor(numel=8, output_element=element), device_named(card)
    sku = next(s for s in built_in_registry().candidates(problem.key()) if s.backend == "cuda_core")
    return sku, CudaCoreBackend.launch_of(sku, problem, device), device


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


GOOD = raw(fields())
HOSTILE = {
    "empty": (b"", "no bundle"),
    "a zip": (b"PK\x03\x04" + bytes(100), "no bundle"),
    "a later format": (raw(fields(), magic=b"skuda bundle 2\n"), "of format 2"),
    "nothing behind the first line": (b"skuda bundle 1\n", "second line"),
    "no length": (raw(fields(), length="x" * 12), "second line"),
    "a manifest of a terabyte": (raw(fields(), length="1099511627776"[:12]), "may have"),
    "a manifest beyond the end": (raw(fields(), length="000000090000"), "checksum of its manifest"),
    "a manifest that was changed": (GOOD.replace(b'"0.1.0"', b'"0.1.1"'), "checksum of its manifest"),
    "a manifest that is no JSON": (raw(b"{"), "cannot be read"),
    "a list": (raw([]), "cannot be read"),
    "members that are no list": (raw(fields() | {"members": {}}), "breaks a rule"),
    "a word more": (raw(fields() | {"pickle": "gASV"}), "pickle must be one of"),
    "a word that the terminal obeys": (raw(fields(**{"\x1b]0;owned\x07": 1})), "must be one of"),
    "a checksum that is a path": (raw(fields(sha256="../" * 20 + "etc")), "sha256 must match"),
    "an id that the terminal obeys": (raw(fields(sku="\x1b]0;owned\x07")), "sku must match"),
    "a size that is text": (raw(fields(size="9")), "size must be an integer"),
    "a size beyond the limit": (raw(fields(size=LARGEST_CUBIN + 1)), "size must be at most"),
    "a size of many digits": (
        raw(json.dumps(fields(size=99999)).replace("99999", "9" * 5000).encode()),
        "breaks a rule|cannot be read",
    ),
    "one cubin twice": (raw(fields(**fields()["members"][1]), CUBINS["two"] * 2), "twice"),
    "keys of another kind": (raw(fields() | {"cubins": SCHEMA + 1}), "in another way"),
    "one byte short": (GOOD[:-1], "its parts have"),
    "one byte more": (GOOD + b"\0", "its parts have"),
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
def test_a_hostile_file_is_refused_in_one_line(tmp_path, monkeypatch, skuda, content, says):
    path = tmp_path / "hostile"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=says) as caught:
        open_bundle(str(path))
    report = str(caught.value)
    assert report.startswith(f"bundle {path}: ")
    assert report.isprintable()
    assert len(report) < 700
    assert ";" in report, "no remedy"
    assert skuda("bundle", "--show", path)[:2] == (2, "")
    assert sorted(tmp_path.iterdir()) == [path]


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


def test_what_is_no_file_or_too_large_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(GOOD)
    os.truncate(tmp_path / "large", bundles.LARGEST_BUNDLE + 1)  # a hole: no space is taken
    refused = {"pipe": "no regular file", ".": "no regular file", "absent": "No such file", "large": "may have"}
    for name, says in refused.items():
        with pytest.raises(BundleError, match=says):
            open_bundle(str(tmp_path / name))


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


def test_a_file_that_others_can_write_needs_its_checksum(tmp_path, monkeypatch):
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


def test_another_file_than_the_one_that_is_meant_is_refused(tmp_path):
    path = written(tmp_path / "b")
    name = f"{path}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}"
    open_bundle(name)
    written(path, ["one", "two"])
    for bad in (name, f"{path}#sha256="):
        with pytest.raises(BundleError, match="name the file that is meant"):
            open_bundle(bad)


def test_the_same_cubins_give_the_same_bytes(tmp_path):
    one, two = written(tmp_path / "one"), written(tmp_path / "two", reversed(CUBINS))
    assert one.read_bytes() == two.read_bytes()
    assert stat.S_IMODE(one.stat().st_mode) == 0o644
    other = written(tmp_path / "other", compiler="nvrtc 13.1")
    assert other.read_bytes() != one.read_bytes()


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


def test_the_cubin_of_the_compiler_here_goes_first(tmp_path):
    both = [(member("one", compiler=name), CUBINS["one"]) for name in ("nvrtc 13.0", "nvrtc 13.1")]
    made = open_bundle(str(write_bundle(tmp_path / "b", "0.1.0", both)))
    key = KEY._replace(launch="one rule")
    found = {name: made.find(key, name).compiler for name in (None, "nvrtc 13.0", "nvrtc 13.1", "nvcc 1")}
    assert found == {None: "nvrtc 13.0", "nvrtc 13.0": "nvrtc 13.0", "nvrtc 13.1": "nvrtc 13.1", "nvcc 1": "nvrtc 13.0"}


def test_bundles_go_before_the_cache_in_their_order(skuda, monkeypatch, tmp_path):
    for name, arch in (("first", "sm_90"), ("second", "sm_90,sm_80")):
        jobs = fake(monkeypatch, identity=name)
        assert skuda("bundle", tmp_path / name, "--op", "fill", "--arch", arch, "--backend", "cuda_core")[0] == 0
        assert {job.arch for job in jobs} == set(arch.split(","))
    monkeypatch.setenv("SKUDA_BUNDLE", os.pathsep.join(str(tmp_path / name) for name in ("first", "second")))
    jobs = fake(monkeypatch, identity="third")
    backend = CudaCoreBackend()
    for card, name in (("h200", "first"), ("a100", "second")):
        found = backend.shipped(*filled(card=card))
        assert name.encode() in found.cubin
        assert found.notes == (f"from {tmp_path / name}, compiled by {name}",)
    assert backend.shipped(*filled(card="b200")) is None
    assert jobs == []
    # What fills the cache, or a bundle, does so whatever is named.
    status, out, _ = skuda("compile", *FILL)
    assert status == 0
    assert f"{len(jobs)} compiled." in out
    assert jobs
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    with pytest.raises(CompileError, match="skuda bundle") as caught:
        CudaCoreBackend().cubin(*filled(card="b200"))
    for name in ("first", "second"):
        assert f"nor in {tmp_path / name}: it holds nothing for sm_100" in str(caught.value)
    sku, launch, device = filled()
    with pytest.raises(CompileError, match="lacks the configuration"):
        CudaCoreBackend().cubin(sku, launch._replace(flags=("-DNEW",)), device)
    (tmp_path / "second").write_bytes(b"x")
    with pytest.raises(BundleError, match=str(tmp_path / "second")):  # though the first one has the kernel
        CudaCoreBackend().shipped(*filled())
    monkeypatch.delenv("SKUDA_BUNDLE")
    assert CudaCoreBackend().shipped(*filled()) is None


def test_a_cubin_that_is_none_is_refused(tmp_path, monkeypatch, skuda):
    sku, launch, device = filled()
    key = CudaCoreBackend().sought(sku, launch, device).key
    for cubin in (b"#!/bin/sh", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + b"\xff" * 200):
        one = CubinRecord.of(key, cubin, sku=sku.id, file=sku.source, compiler="somebody")
        monkeypatch.setenv("SKUDA_BUNDLE", str(write_bundle(tmp_path / "b", "0.1.0", [(one, cubin)])))
        with pytest.raises(BundleError, match="is no cubin"):
            CudaCoreBackend().shipped(sku, launch, device)
        status, _, err = skuda("bundle", "--show", tmp_path / "b")
        assert (status, "is no cubin" in err) == (1, True), "what loading refuses is shown as wrong"


def test_bundle_holds_exactly_what_was_asked_for(skuda, monkeypatch, tmp_path):
    jobs = fake(monkeypatch)
    skuda("compile", "--op", "dynamic_range", *FILL[2:])
    jobs.clear()
    status, out, err = skuda("bundle", tmp_path / "b", *FILL)
    assert (status, err) == (0, "")
    assert f"\n{len(jobs)} cubins, " in out
    assert "compiled by fake 1.0\n" in out
    assert {job.source.name for job in jobs} == {"fill.cu"}
    content = (tmp_path / "b").read_bytes()
    assert skuda("bundle", tmp_path / "b", *FILL) == (status, out, err)
    assert (tmp_path / "b").read_bytes() == content
    status, out, _ = skuda("bundle", "--show", tmp_path / "b", "--json")
    report = json.loads(out)
    assert (report["troubles"], report["foreign"], len(report["cubins"])) == ([], 0, len(jobs))
    assert report["sha256"] == hashlib.sha256(content).hexdigest()


def test_where_a_kernel_does_not_compile_nothing_is_written(skuda, monkeypatch, tmp_path):
    fake(monkeypatch, fails=lambda job: ".f32." in job.sku)
    status, out, err = skuda("bundle", tmp_path / "b", *FILL)
    assert status == 1
    assert "no good" in out
    assert "was not written" in err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bundle", "--m", "8", "file", "--op", "fill"], "FILE must be named first"),
        (["bundle", str(TESTS / "conftest.py"), *FILL], "something else is there"),
        (["bundle", "--show", "x", "--op", "fill"], "must be left out"),
        (["bundle", "b", *FILL, "--descriptors", "x", "--numel", "8"], "without a problem's fields"),
    ],
)
def test_bad_input_is_reported_in_one_line(skuda, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    jobs = fake(monkeypatch)
    status, out, err = skuda(*arguments)
    assert (status, out, jobs, err.count("\n")) == (2, "", [], 1)
    assert says in err


def test_the_doctor_says_which_bundle_is_used_and_what_is_wrong_with_it(skuda, monkeypatch, tmp_path):
    def found(name):
        monkeypatch.setenv("SKUDA_BUNDLE", str(name))
        status, out, _ = skuda("doctor", "--json")
        (one,) = (f for f in json.loads(out)["findings"] if f["section"] == "Bundles")
        assert (status, one["state"]) in ((0, "ok"), (1, "broken")), "a script can tell a broken bundle by the status"
        return one

    fake(monkeypatch)
    assert skuda("bundle", tmp_path / "b", *FILL)[0] == 0
    assert f"{tmp_path / 'b'}, made by skuda" in found(tmp_path / "b")["detail"]
    content = (tmp_path / "b").read_bytes()
    (tmp_path / "b").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "checksum" in found(tmp_path / "b")["detail"]
    (tmp_path / "b").write_bytes(content[:-1])
    assert "SKUDA_BUNDLE" in found(tmp_path / "b")["fix"]
    assert "3 from other sources" in found(written(tmp_path / "c"))["detail"]
    monkeypatch.delenv("SKUDA_BUNDLE")
    assert "Bundles" not in skuda("doctor")[1]


ELSEWHERE = """
touched = []

def watch(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        touched.append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.chmod", "os.truncate"):
        touched.append(event + " " + str(arguments[0]))

sys.modules["cuda.bindings.nvrtc"] = None
from concurrent.futures import ThreadPoolExecutor
from skuda.kernels.elementwise.fill import FillDescriptor

report["touched"] = touched
d = Dispatcher()
prefer = PlanPreference(backend="cuda_core")
sys.addaudithook(watch)


def fill(element, dtype):
    problem = FillDescriptor(numel=32, output_element=element)
    plan = d.select(problem, prefer, d.devices[0])
    plan.run(output=FakeArray((32,), dtype, address=X), value=1)
    return plan.notes
"""


@pytest.fixture
def elsewhere(tmp_path_factory, tmp_path):
    """Return a function that runs code where there is a driver, but neither nvcc nor NVRTC; gives values, launches."""
    stub = build(tmp_path_factory.mktemp("stub"))

    def run(code, **environment):
        environment["SKUDA_CACHE_DIR"] = str(tmp_path / "untouched")
        report = run_over_stub(ELSEWHERE + textwrap.dedent(code), stub, tmp_path, **environment)
        assert report.error == ""
        assert not (tmp_path / "untouched").exists()
        return report.values, [name for _, name, _ in report.calls if name.startswith("cuLaunchKernel")]

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
    report, launches = elsewhere(
        """
        report["status"] = d.status["cuda_core"].model_dump()
        report["notes"] = fill("f32", "f4")
        with ThreadPoolExecutor(8) as pool:
            kinds = [("f16", "f2"), ("f64", "f8"), ("s8", "i1"), ("u8", "u1")] * 4
            list(pool.map(lambda kind: fill(*kind), kinds))
        """,
        SKUDA_BUNDLE=name,
    )
    assert report["status"]["available"]
    assert f"no compiler: only kernels from {folder / 'b'} run" in report["status"]["detail"]
    assert [note for note in report["notes"] if note.startswith(f"from {folder / 'b'}, compiled by nvrtc")]
    assert report["touched"] == []
    assert len(launches) == 17
    folder.chmod(0o755)
    assert sorted(folder.iterdir()) == [folder / "b"]
    assert (folder / "b").read_bytes() == content


@stubbed
def test_without_a_bundle_that_serves_it_the_machine_says_why(elsewhere, tmp_path):
    code = """
        status = d.status["cuda_core"]
        report["status"] = [status.available, status.detail, status.remedy]
        try:
            fill("f32", "f4")
        except SkudaError as error:
            report["error"] = str(error)
    """
    (tmp_path / "bad").write_bytes(GOOD[:-1])
    report, launches = elsewhere(code, SKUDA_BUNDLE=str(tmp_path / "bad"))
    available, detail, remedy = report["status"]
    assert (available, launches) == (False, [])
    assert f"bundle {tmp_path / 'bad'}: it has {len(GOOD) - 1} bytes" in detail
    assert "unset SKUDA_BUNDLE" in remedy
    report, launches = elsewhere(code, SKUDA_BUNDLE=str(written(tmp_path / "old")))
    assert report["status"][0]
    assert f"nor in {tmp_path / 'old'}: it was made by skuda 0.1.0 from other sources of {FILE}" in report["error"]
    report, _ = elsewhere(code)
    assert not report["status"][0]
    assert "SKUDA_BUNDLE" in report["status"][2]
    assert report["touched"] == []
