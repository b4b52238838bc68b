"""An interrupted program leaves no process and no file behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interrupts import fork

from skuda.dispatch.compile.compilers import Job, Nvcc
from skuda.dispatch.settings import environment
from skuda.dispatch.system import programs
from skuda.kernels.sources import Source
from skuda.registry.errors import CompileError

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to ask about processes")
JOB = Job("a kernel", Source("kernel.cu", b"text", (("include.cuh", b""),), ()), (), "sm_90")
PARENT = """#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit; fi
/bin/sleep 600 &
echo half > "$TMPDIR/half a file"
echo "$! $TMPDIR" > "$STARTED.$$.new"
/bin/mv "$STARTED.$$.new" "$STARTED.$$"
wait
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """A program, like nvcc, that starts another one and waits for it."""
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(PARENT)
    program.chmod(0o755)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return program


def started(parent, number=1):
    """Wait until so many have started; return the process that each started, and its temporary folder."""
    for _ in range(6000):
        found = [p for p in parent.parent.parent.glob("started.*") if p.suffix != ".new"]
        if len(found) >= number:
            lines = [path.read_text().split(" ", 1) for path in found]
            return [(int(pid), Path(folder.strip())) for pid, folder in lines]
        time.sleep(0.01)
    raise AssertionError("it did not start")


def runs(pid):
    """Whether a process runs; one that has ended may still be listed."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def ended(pid):
    """Whether a process has ended, or does so now: it closes its output shortly before."""
    for _ in range(500):
        if not runs(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(parent):
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run([str(parent)], timeout=2)
    ((pid, _),) = started(parent)
    assert ended(pid)


def test_an_interrupted_compilation_leaves_no_process_and_no_file(parent):
    def press():
        started(parent)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Nvcc(str(parent), "13.0").compile(JOB)
    thread.join()
    ((pid, folder),) = started(parent)
    assert ended(pid)
    assert folder != parent.parent.parent
    assert not folder.exists()


def test_an_interrupted_command_ends_the_compilers_of_all_threads(parent, tmp_path):
    command = [sys.executable, "-m", "skuda", "compile", "--op", "fill", "--arch", "sm_90", "--backend", "pycuda"]
    settings = environment(PATH=str(parent.parent), SKUDA_CACHE_DIR=str(tmp_path / "cache"), SKUDA_PLUGINS="0")
    with subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, process_group=0, text=True) as process:
        found = started(parent, min(os.cpu_count(), 2))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    for pid, folder in (*found, *started(parent)):
        assert ended(pid)
        assert not folder.exists()


def test_a_forked_child_ends_only_programs_of_its_own(parent):
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(programs.run, [str(parent)], timeout=600)
        ((pid, _),) = started(parent)
        child = fork()
        if child == 0:
            programs.kill_all()
            os._exit(0)
        os.waitpid(child, 0)
        try:
            assert runs(pid)
        finally:
            programs.kill_all()
        assert running.result().returncode == -signal.SIGKILL
    assert ended(pid)


def fails(code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("at", ["tempfile.mkdtemp", "pathlib.Path.write_bytes", "pathlib.Path.mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_without_a_place_for_its_files_the_remedy_is_reported(monkeypatch, at, code):
    monkeypatch.setattr(at, fails(code))
    with pytest.raises(CompileError, match="set TMPDIR") as caught:
        Nvcc("/bin/false", "13.0").compile(JOB)
    assert os.strerror(code) in caught.value.reason
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_under_nvcc_is_reported(tmp_path):
    program = tmp_path / "nvcc"
    program.write_text(f"#!/bin/sh\necho 'nvFatbin error: {os.strerror(errno.ENOSPC)}' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(CompileError, match="set TMPDIR") as caught:
        Nvcc(str(program), "13.0").compile(JOB)
    assert "no space left" in caught.value.reason
    assert "nvFatbin error" in caught.value.log
