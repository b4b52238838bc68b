"""A file is replaced only by a complete one, and only if it is a regular file."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from skuda.dispatch.system.writing import check_folder, check_place, replacing, write_whole


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "old ü")

    def fails():
        with replacing(path) as fresh:
            fresh.write_text("half")
            assert path.read_text(encoding="utf-8") == "old ü"
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fails()
    assert path.read_text(encoding="utf-8") == "old ü"
    write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


def there(folder):
    """What each file is, by its path."""
    return {path: (at.st_mode, at.st_ino, at.st_size) for path in folder.rglob("*") for at in (path.lstat(),)}


def fifo(folder):
    os.mkfifo(folder / "it")


def device(folder):
    try:
        os.mknod(folder / "it", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except OSError:
        pytest.skip("nobody but root makes devices")


def bound(folder):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "it"))


REFUSED = {
    "a folder": (lambda folder: (folder / "it").mkdir(), "it", "it is a folder"),
    "a pipe": (fifo, "it", "it is a named pipe"),
    "a device": (device, "it", "it is a device"),
    "a socket": (bound, "it", "it is a socket"),
    "a link to a pipe": (lambda folder: (fifo(folder), (folder / "link").symlink_to("it")), "link", "named pipe"),
    "a link to itself": (lambda folder: (folder / "it").symlink_to("it"), "it", "symbolic links"),
    "a link into nothing": (lambda folder: (folder / "it").symlink_to("no/file"), "it", "no such folder"),
    "no folder": (lambda _: None, "no/it", "no such folder"),
    "a file as a folder": (lambda folder: (folder / "it").touch(), "it/x", "Not a directory"),
    "a name too long": (lambda _: None, "n" * 300, "File name too long"),
    "a NUL": (lambda _: None, "a\0b", "no name of a file"),
}


@pytest.mark.parametrize(("make", "name", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, monkeypatch, make, name, says):
    monkeypatch.chdir(tmp_path)  # the address of a socket must be short
    make(Path())
    before = there(tmp_path)
    path = tmp_path / name
    for write in (check_place, lambda path: write_whole(path, "x")):
        with pytest.raises(OSError, match=says) as caught:
            write(path)
        assert caught.value.filename == str(path)
    assert there(tmp_path) == before


@pytest.mark.parametrize("name", ["", "-", "."])
def test_what_names_no_file_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="names no file"):
        check_place(Path(name))
    assert list(tmp_path.iterdir()) == []


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "link").symlink_to("chain")
    (tmp_path / "chain").symlink_to("file")
    for text in ("made", "replaced"):  # the first time it leads nowhere
        check_place(tmp_path / "link")
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "chain").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chain", "file", "link"]


def test_permissions_are_those_of_the_old_file_or_of_any_new_one(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    if os.geteuid() == 0:
        os.chown(tmp_path / "new", 12345, 54321)
    old = (tmp_path / "new").stat()
    write_whole(tmp_path / "new", "y")
    new = (tmp_path / "new").stat()
    assert (new.st_mode, new.st_uid, new.st_gid) == (old.st_mode, old.st_uid, old.st_gid)


@pytest.mark.parametrize("check", [check_place, lambda path: check_folder(path / "deep")])
def test_a_folder_in_which_nothing_can_be_made_is_refused(tmp_path, monkeypatch, check):
    def refused(path, *_):
        raise PermissionError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "open", refused)  # root may write everywhere
    with pytest.raises(OSError, match="Read-only file system") as caught:
        check(tmp_path / "file")
    assert str(tmp_path / "file") in caught.value.filename


@pytest.mark.parametrize("name", ["fsync", "chmod", "replace"])
def test_a_failure_at_the_end_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name):
    path = tmp_path / "file"
    write_whole(path, "old")

    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(OSError, match="No space left") as caught:
            write_whole(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_check_leaves_nothing_behind_and_changes_nothing(tmp_path):
    check_place(tmp_path / "new")
    check_folder(tmp_path / "some" / "folder")
    check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_whole(tmp_path / "old", "x")
    before = there(tmp_path)
    check_place(tmp_path / "old")
    assert there(tmp_path) == before
    for folder in (tmp_path / "old", tmp_path / "old" / "deep", tmp_path / ("n" * 300), tmp_path / "a\0b"):
        with pytest.raises(OSError, match=r"directory|too long|no name"):
            check_folder(folder)


def test_two_writers_with_the_same_number_do_not_meet(tmp_path):
    # Two machines that share a folder can have processes with the same number.
    with replacing(tmp_path / "file") as one, replacing(tmp_path / "file") as other:
        assert one != other
        one.write_text("one")
        other.write_text("other")
    assert (tmp_path / "file").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_where_standard_output_goes_is_no_place_for_a_file(tmp_path):
    code = "from pathlib import Path; from skuda.dispatch.system.writing import check_place; check_place(Path('out'))"
    with (tmp_path / "out").open("wb") as out:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert "standard output or standard error goes there" in done.stderr
