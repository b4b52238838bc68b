"""``skuda cache``: what it lists, and what it removes."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.member import Key
from skuda.tools.ship import cache as commands

HOUR = 3600


@pytest.fixture
def cache(skuda):
    """Three cubins of 1,000 bytes and more, compiled 1, 10 and 100 hours ago."""
    made = CubinCache()
    for hours in (100, 10, 1):
        key = Key(f"{hours:064}", (), "sm_90", "filled rule", "cuda_core")
        made.get(key, "nvrtc 13.0 -std=c++17", lambda: bytes(1000), sku=f"kernel.of.{hours}", file="package:file.cu")
        (path,) = made.folder.glob(f"{key.digest}-*")
        os.utime(path, (time.time() - hours * HOUR,) * 2)
    return made


def left(cache):
    return sorted(int(entry.facts.sku.rpartition(".")[2]) for entry in cache.survey())


def test_the_entries_are_listed(skuda, terminal, cache):
    rows = json.loads(skuda("cache", "ls", "--json")[1])["entries"]
    assert {(row["sku"], row["arch"], row["compiler"], row["trouble"]) for row in rows} == {
        (f"kernel.of.{hours}", "sm_90", "nvrtc 13.0 -std=c++17", "") for hours in (1, 10, 100)
    }
    assert sorted(row["age"] // HOUR for row in rows) == [1, 10, 100]
    assert all(1000 < row["size"] < 2000 for row in rows)
    _, text, _ = terminal("cache", "ls")
    assert re.search(r"^kernel.of.10 +sm_90 +nvrtc 13.0 +1\.\d KiB 10h$", text, re.MULTILINE)
    assert re.search(r"^3 cubins, 4\.\d KiB, all whole\.$", text, re.MULTILINE)


def test_an_entry_that_is_wrong_is_found(skuda, terminal, cache):
    assert json.loads(skuda("cache", "verify", "--json")[1])["entries"] == []
    path = cache.survey()[0].path
    path.write_bytes(path.read_bytes()[:-1])
    status, out, _ = skuda("cache", "verify", "--json")
    (found,) = json.loads(out)["entries"]
    assert (status, found["path"]) == (1, str(path))
    assert "checksum" in found["trouble"]
    status, text, _ = terminal("cache", "ls")
    assert status == 0, "only verify answers whether all is well"
    assert "not used: its checksum is wrong" in " ".join(text.split())
    assert "1 wrong." in text


@pytest.mark.parametrize(
    ("arguments", "stay"),
    [
        (("--older-than", "30h"), [1, 10]),
        (("--older-than", "2h"), [1]),
        (("--older-than", "0.65w"), [1, 10, 100]),
        (("--max-size", "3KiB"), [1, 10]),
        (("--max-size", "2 kB"), [1]),
        (("--max-size", "1MB"), [1, 10, 100]),
        (("--max-size", "0"), []),
        (("--max-size", "3KiB", "--older-than", "9h"), [1]),
    ],
)
def test_what_is_old_or_too_much_goes(skuda, cache, arguments, stay):
    status, out, _ = skuda("cache", "gc", *arguments)
    assert (status, left(cache)) == (0, stay)
    assert out.startswith(f"removed {3 - len(stay)} cubin")


def test_nothing_is_cleared_without_a_yes(skuda, cache, monkeypatch):
    status, out, err = skuda("cache", "clear")
    assert (status, out, left(cache)) == (2, "", [1, 10, 100])
    assert "--yes must be given where nobody can be asked" in err
    monkeypatch.setattr(commands.sys.stdin, "isatty", lambda: True, raising=False)
    asked = []
    for answer, stay in ((False, [1, 10, 100]), (True, [])):
        monkeypatch.setattr("typer.confirm", lambda question, answer=answer: asked.append(question) or answer)
        assert (skuda("cache", "clear")[0], left(cache)) == (0 if answer else 1, stay)
    assert asked[0].startswith("Remove 3 cubins, 4.")


def test_an_absent_cache_is_reported(skuda, tmp_path):
    status, out, err = skuda("cache", "ls")
    assert (status, out) == (0, "")
    assert "nothing was compiled there yet" in err
    assert skuda("cache", "clear", "--yes")[0] == 0
    assert not (tmp_path / "cache").exists()


def test_sizes_in_words():
    assert [commands.size_words(size) for size in (0, 412, 1024, 1536, 5 << 30)] == [
        *("0 B", "412 B", "1.0 KiB", "1.5 KiB", "5.0 GiB"),
    ]
