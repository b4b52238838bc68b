"""The cubin cache: content keys, atomic publication, checksums, sharing between processes, and failing disks."""

from __future__ import annotations

import errno
import io
import os
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from cubins import CUBIN, KEY, entry_of, get

from skuda.dispatch.compile import member
from skuda.dispatch.compile.cache import CubinCache


@pytest.fixture
def cache(tmp_path):
    return CubinCache(tmp_path / "cache")


def leftovers(cache):
    return list(cache.folder.glob(".*"))


def test_the_second_time_nothing_is_compiled(cache):
    build = Mock(return_value=CUBIN)
    assert [get(cache, build), get(cache, build)] == [(CUBIN, ()), (CUBIN, ())]
    assert build.call_count == 1
    assert get(CubinCache(cache.folder.parent), build).cubin == CUBIN
    assert build.call_count == 1


@pytest.mark.parametrize(
    "change",
    [
        {"source": "6" * 64},
        {"flags": ()},
        {"flags": ("-fmad=false", "-DX")},
        {"arch": "sm_90a"},
        {"launch": "scaled other"},
        {"backend": "cuda_core"},
    ],
)
def test_every_part_of_the_key_counts(cache, change):
    get(cache)
    build = Mock(return_value=b"another")
    assert get(cache, build, KEY._replace(**change)).cubin == b"another"
    assert get(cache).cubin == CUBIN


def test_another_compiler_or_schema_compiles_anew(cache, monkeypatch):
    get(cache)
    assert get(cache, Mock(return_value=b"another"), compiler="nvcc 13.1").cubin == b"another"
    monkeypatch.setattr(member, "SCHEMA", 999)
    assert get(CubinCache(cache.folder.parent), Mock(return_value=b"new schema")).cubin == b"new schema"


def test_only_the_owner_may_read_or_write(cache):
    previous = os.umask(0)
    try:
        get(cache)
    finally:
        os.umask(previous)
    path = entry_of(cache)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (cache.folder, cache.folder / "locks"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("at", ["pathlib.Path.mkdir", "tempfile.mkstemp", "os.fdopen", "os.replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_costs_the_cache_not_the_kernel(cache, monkeypatch, at, code):
    def fails(*_, **__):
        raise OSError(code, os.strerror(code))

    class Full(io.BytesIO):
        write = staticmethod(fails)

    with monkeypatch.context() as broken:
        broken.setattr(at, (lambda *_: Full()) if at == "os.fdopen" else fails)
        found = get(cache)
    assert found.cubin == CUBIN
    assert os.strerror(code) in found.notes[-1]
    assert not list(cache.folder.glob("*.cubin"))
    assert not leftovers(cache)
    build = Mock(return_value=CUBIN)
    assert get(cache, build) == (CUBIN, ())
    assert build.call_count == 1


def test_a_failed_compilation_leaves_nothing_and_is_tried_again(cache):
    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        get(cache, fails)
    assert not list(cache.folder.glob("*.cubin"))
    assert get(cache).cubin == CUBIN


def test_a_folder_that_others_can_write_is_neither_read_nor_written(cache):
    get(cache)
    cache.folder.chmod(0o777)
    build = Mock(return_value=b"fresh")
    found = get(cache, build)
    assert found.cubin == b"fresh"
    assert "others can write it" in found.notes[0]
    cache.folder.chmod(0o700)
    assert get(cache, build) == (CUBIN, ())


def test_without_a_compiler_any_compilers_work_will_do(cache):
    get(cache, Mock(return_value=b"first"), compiler="nvcc 13.0")
    get(cache, Mock(return_value=b"second"), compiler="nvcc 13.1")
    build = Mock(return_value=CUBIN)
    found = get(cache, build, compiler=None)
    assert found.cubin in {b"first", b"second"}
    assert get(cache, build, compiler=None) == found
    spoilt = next(p for p in cache.folder.glob("*.cubin") if p.read_bytes().endswith(found.cubin))
    spoilt.write_bytes(b"torn")
    again = get(cache, build, compiler=None)
    assert {found.cubin, again.cubin} == {b"first", b"second"}
    assert build.call_count == 0
    assert str(spoilt) in again.notes[0]


def test_entries_say_what_they_are(cache):
    get(cache)
    ((path, facts, trouble, *_),) = cache.survey()
    assert (facts.sku, facts.arch, facts.compiler, trouble) == ("an id", "sm_90", "nvcc 13.0", "")
    assert cache.has_any("pycuda")
    assert not cache.has_any("cuda_core")
    path.write_bytes(path.read_bytes()[:-1])
    assert "checksum" in next(iter(cache.survey())).trouble


def test_where_no_file_can_be_locked_kernels_are_compiled_all_the_same(cache, monkeypatch):
    monkeypatch.setattr("filelock.FileLock.acquire", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    assert get(cache) == get(cache, build=None) == (CUBIN, ())


def test_threads_that_want_the_same_kernel_compile_it_once(cache):
    ready = threading.Barrier(8)
    build = Mock(return_value=CUBIN)

    def slow():
        threading.Event().wait(0.05)
        return build()

    def one(_):
        ready.wait()
        return get(cache, slow)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {(CUBIN, ())}
    assert build.call_count == 1


def test_processes_that_want_the_same_kernel_compile_it_once(tmp_path):
    code = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from skuda.dispatch.compile.cache import CubinCache
        from skuda.dispatch.compile.member import Key
        folder, log = map(Path, sys.argv[1:])

        def build():
            with log.open("a") as file:
                file.write("built\\n")
            time.sleep(0.3)
            return b"cubin" * 1000

        print("ready", flush=True)
        sys.stdin.readline()
        key = Key("5" * 64, (), "sm_90", "launch", "pycuda")
        found = CubinCache(folder).get(key, "nvcc", build, sku="an id", file="package:file.cu")
        assert found[:2] == (b"cubin" * 1000, ()), found
        """
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(log)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        process.communicate()
        assert process.returncode == 0
    assert log.read_text() == "built\n"
