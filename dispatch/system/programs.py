"""Runs programs while the caller waits. No process that they start outlives the call."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from skuda.dispatch.system.forks import in_child

_FAREWELL = 5.0
_running: set[subprocess.Popen[str]] = set()


def run(
    command: Sequence[str], *, timeout: float, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its exit status and output.

    If the wait is interrupted or takes longer than `timeout` seconds, the program and all that it started are killed.
    Raise `OSError` if the program cannot be started; `subprocess.TimeoutExpired` if it takes too long.
    """
    # A separate process group can be killed as a whole. A Ctrl-C in the terminal reaches this process, not the group.
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        try:
            _running.add(process)
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            _kill(process)
            # Until every process that it started has closed the output, and so has ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_FAREWELL)
            raise
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_all() -> None:
    """Kill the programs for which other threads wait."""
    for process in tuple(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if not hasattr(os, "killpg"):
        process.kill()
        return
    # The group exists as long as any of its processes, even if the first one has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# These programs belong to the parent.
in_child(_running.clear)
