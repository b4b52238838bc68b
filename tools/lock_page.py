"""``skuda lock``: what is registered and what it would select, as a file to keep under version control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from skuda.dispatch import KNOWN_DEVICES, Device, Dispatcher, device_named
from skuda.registry.errors import InvalidProblem, InvalidRecord
from skuda.tools.locking import default_problems, make_lock, write_lock
from skuda.tools.output import count, refuse, split, stderr, stdout
from skuda.tools.problem_list import read_problems


def run(*, descriptors: Path | None = None, devices: Sequence[str] = (), output: Path | None = None) -> int:
    """Write a lock.

    Parameters
    ----------
    descriptors : Path or None
        List of problems; None for the cases of every op and what `skuda bench` measures.
    devices : sequence of str
        For these; empty for every known one.
    output : Path or None
        Where to; None for standard output.

    Returns
    -------
    int
        0.

    Raises
    ------
    InvalidProblem
        For an unknown device, or a file that cannot be read or written.
    """
    chosen = dict(map(_known, split(devices))) or KNOWN_DEVICES
    dispatcher = Dispatcher()
    problems = (
        default_problems(dispatcher.registry)
        if descriptors is None
        else read_problems("lock", dispatcher.registry, descriptors)
    )
    text = write_lock(make_lock(dispatcher, problems, chosen))
    if output is None:
        stdout().file.write(text)
        return 0
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"be a file that can be written: {error.strerror or error}"
        raise InvalidProblem("lock", "--output", str(output), rule) from error
    asked = f"{count(len(problems), 'problem')} on {count(len(chosen), 'device')}"
    told = f"{output}: {count(len(dispatcher.registry), 'kernel')}, {asked}"
    stderr().print(f"skuda: {told}", style="dim", soft_wrap=True)
    return 0


def _known(name: str) -> tuple[str, Device]:
    try:
        device = device_named(name)
    except InvalidRecord:
        refuse("lock", "--device", name, KNOWN_DEVICES)
    return next(item for item in KNOWN_DEVICES.items() if item[1] == device)
