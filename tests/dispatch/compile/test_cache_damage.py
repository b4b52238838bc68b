"""Damaged, foreign and unreadable entries in the cubin cache: none is used, and no kernel is lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from cubins import CUBIN, KEY, NoCompiler, cannot, entry_of, get
from interrupts import bytecodes, elsewhere, fork, interrupted
from support import fresh

from skuda.dispatch.compile.cache import CubinCache, remove
from skuda.dispatch.compile.member import LARGEST_CUBIN
from skuda.dispatch.system import files
from skuda.tools.cli import main

OURS = ("/compile/cache.py", "/compile/member.py", "/system/")
pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    return CubinCache()


def with_facts(content, facts):
    """Return an entry with other facts and right checksums, which damage cannot make."""
    magic, _, _, cubin = content.split(b"\n", 3)
    return b"\n".join((magic, hashlib.sha256(facts).hexdigest().encode(), facts, cubin))


def damaged(rng, content):
    """Return every kind of damage to a file: some bits, bytes or a block changed, lost, doubled or new."""
    at = int(rng.integers(len(content)))
    length = int(rng.integers(1, 80))
    noise = rng.bytes(length)
    return [
        content[:at],
        content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :],
        content[:at] + content[at + length :],
        content[:at] + noise + content[at:],
        content[:at] + noise + content[at + length :],
        content[:at] + content[at : at + length] * 2 + content[at + length :],
        content[:at] + bytes(length) + content[at + length :],
        content + noise,
        noise,
    ]


def test_no_damage_loses_the_kernel(cache):
    get(cache)
    path = entry_of(cache)
    content = path.read_bytes()
    rng = fresh("damage")
    for spoilt in (each for _ in range(30) for each in damaged(rng, content)):
        if spoilt == content:
            continue
        path.write_bytes(spoilt)
        assert not cache.has_any("pycuda")
        with pytest.raises(NoCompiler):
            get(cache, cannot, compiler=None)
        again = get(cache)
        assert again.cubin == CUBIN
        assert str(path) in again.notes[0]
        assert get(cache, build=cannot) == (CUBIN, ())


FACTS = {
    "an escape sequence": lambda facts: facts | {"sku": "\x1b[31mred"},
    "no key": lambda facts: {name: value for name, value in facts.items() if name != "source"},
    "an unknown field": lambda facts: facts | {"more": 1},
    "brackets": lambda _: b"[" * 100_000,
    "no text": lambda _: b"\xff\xfe",
    "another architecture": lambda facts: facts | {"arch": "sm_80"},
    "another size": lambda facts: facts | {"size": 7},
    "another compiler": lambda facts: facts | {"compiler": "nvcc 13.1"},
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_facts_that_break_a_rule_are_not_believed(cache, capsys, change):
    get(cache)
    path = entry_of(cache)
    content = path.read_bytes()
    facts = change(json.loads(content.split(b"\n")[2]))
    path.write_bytes(with_facts(content, facts if isinstance(facts, bytes) else json.dumps(facts).encode()))
    (entry,) = cache.survey()
    assert entry.facts is None
    assert entry.trouble.isprintable()
    assert not cache.has_any("pycuda")
    assert main(["cache", "verify"]) == 1
    assert "\x1b" not in capsys.readouterr().out
    again = get(cache)
    assert (again.cubin, len(again.notes)) == (CUBIN, 1)
    assert get(cache, build=cannot) == (CUBIN, ())


def device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which has no end
    except PermissionError:
        pytest.skip("device nodes may not be made here")


def foreign(path):
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, 65534, 65534)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


def kept(act):
    """Return a change of the entry that is there, not a replacement for it."""
    return lambda path, content: (path.write_bytes(content), act(path))


def linked(path, content):
    elsewhere = path.parents[2] / "elsewhere"
    elsewhere.write_bytes(content)
    elsewhere.chmod(0o600)
    path.symlink_to(elsewhere)


OBSTACLES = {
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: unix_socket(path),
    "device": lambda path, _: device(path),
    "link out of the cache": linked,
    "link to nothing": lambda path, _: path.symlink_to("nothing"),
    "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "group may write": kept(lambda path: path.chmod(0o660)),
    "all may write": kept(lambda path: path.chmod(0o606)),
    "of another user": kept(foreign),
    "huge": kept(lambda path: os.truncate(path, 2 * LARGEST_CUBIN)),
}


@pytest.fixture
def opened(monkeypatch):
    """Return the paths that are opened for reading."""
    paths = []

    def record(path, *how, **more):
        paths.append(Path(path))
        return open(path, *how, **more)  # noqa: PTH123  what is recorded

    monkeypatch.setattr(files, "open", record, raising=False)
    return paths


@pytest.mark.parametrize("obstacle", OBSTACLES.values(), ids=OBSTACLES)
def test_what_stands_in_the_place_of_an_entry_is_not_used(cache, opened, obstacle, capsys, tmp_path):
    get(cache)
    path = entry_of(cache)
    content = path.read_bytes()
    path.unlink()
    obstacle(path, content)
    opened.clear()
    with pytest.raises(NoCompiler):
        get(cache, cannot, compiler=None)
    assert elsewhere(partial(cache.has_any, "pycuda")) is False
    (entry,) = elsewhere(cache.survey)
    assert (entry.path, entry.facts) == (path, None)
    assert entry.trouble
    if not stat.S_ISREG(path.lstat().st_mode):
        assert opened == []
    assert main(["cache", "verify"]) == 1
    assert entry.trouble in capsys.readouterr().out
    again = elsewhere(partial(get, cache))
    assert again.cubin == CUBIN
    assert str(path) in again.notes[0]
    assert get(cache, build=cannot) == (CUBIN, ())
    assert stat.S_ISREG(path.lstat().st_mode)
    path.unlink()
    obstacle(path, content)
    assert main(["cache", "clear", "--yes"]) == 0
    assert capsys.readouterr().err == ""
    assert [each.name for each in cache.folder.iterdir()] == ["locks"]
    assert not (tmp_path / "cache" / "elsewhere").exists() or (tmp_path / "cache" / "elsewhere").read_bytes() == content


def test_a_name_that_a_terminal_would_interpret_is_shown_without_that(cache, capsys, monkeypatch):
    get(cache)
    odd = entry_of(cache).with_name(f"{KEY.digest}-\x1b[31m\udcff.cubin")
    odd.write_bytes(b"")
    odd.chmod(0o600)
    assert main(["cache", "verify"]) == 1
    assert "?[31m?.cubin" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["cache", "verify"]) == 1
    assert "\x1b[31m" not in capsys.readouterr().out
    found = get(cache, cannot, compiler=None)
    assert (found.cubin, len(found.notes)) == (CUBIN, 1)
    assert found.notes[0].isprintable()


def test_clear_removes_the_folders_of_earlier_formats(cache, capsys):
    old = cache.folder.with_name("cubins-1") / "key"
    old.mkdir(parents=True)
    (old / "entry.cubin").touch()
    assert main(["cache", "gc", "--older-than", "30d"]) == 0
    assert old.exists()
    assert main(["cache", "clear", "--yes"]) == 0
    assert not old.parent.exists()
    assert cache.folder.parent.exists()
    capsys.readouterr()


def test_nothing_fails_while_others_clear(cache):
    stop = threading.Event()

    def again(act):
        while not stop.is_set():
            act()

    def fill():
        for number in range(20):
            assert get(cache, key=KEY._replace(flags=(f"-D{number}",))).cubin == CUBIN

    fill()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(again, act) for act in (lambda: remove(list(cache.folder.glob("*.cubin"))), fill)]
        try:
            for _ in range(300):
                assert not cache.has_any("cuda_core")
                cache.leftovers()
                assert not [entry for entry in cache.survey() if entry.trouble]
        finally:
            stop.set()
        for other in others:
            other.result()


@pytest.mark.parametrize("most", [60, pytest.param(10_000, marks=pytest.mark.full)])
def test_an_interrupt_leaves_no_lock_and_nothing_half_written(cache, most):
    points = bytecodes(partial(get, cache), *OURS)
    assert points > 300
    for at in 1 + fresh("interrupts", most).permutation(points)[:most]:
        shutil.rmtree(cache.folder)
        interrupted(partial(get, cache), at, *OURS)
        assert elsewhere(partial(get, cache)).cubin == CUBIN
        assert elsewhere(partial(get, cache, compiler="nvcc 13.1")).cubin == CUBIN
        assert not [entry for entry in cache.survey() if entry.trouble]


def waiting(cache):
    """Begin to build in another thread; return the event that lets it end, and the thread."""
    begun, go_on = threading.Event(), threading.Event()

    def build():
        begun.set()
        assert go_on.wait(60)
        return CUBIN

    thread = threading.Thread(target=get, args=(cache,), kwargs={"build": build})
    thread.start()
    assert begun.wait(60)
    return go_on, thread


def test_a_child_that_lives_on_does_not_keep_the_lock(cache):
    go_on, thread = waiting(cache)
    hold, release = os.pipe()
    child = fork()
    if child == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    go_on.set()
    thread.join()
    try:
        assert elsewhere(partial(get, cache, compiler="nvcc 13.1")).cubin == CUBIN
    finally:
        os.close(release)
        os.waitpid(child, 0)
