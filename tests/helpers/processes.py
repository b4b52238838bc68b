"""Several processes that are the ranks of one group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def ran_on_ranks(worker, count, folder, seed, *, seconds, paths=(), **settings):
    """Run a program once for each rank and return what each wrote. All are killed when one fails, or in the end.

    The program takes its rank, the number of ranks, a folder for `RANK.json` and a seed. It imports from `paths` first,
    and then from where this process does.
    """
    imports = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": imports} | settings
    command = [sys.executable, worker]
    started = [
        subprocess.Popen([*command, str(rank), str(count), folder, seed], env=environment) for rank in range(count)
    ]
    try:
        until = time.monotonic() + seconds
        while None in (codes := [process.poll() for process in started]) and not any(codes):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * count, f"seed {seed}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
