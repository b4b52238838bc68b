"""Ranks: processes of one group of torch.distributed that run the same functions. As a program, this is one of them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path


def ran_on_ranks(module, works, count, folder, *, backend="gloo", seconds=300, **settings):
    """Return what each rank returned of each work: by the name of the work, a list with one result a rank.

    `works` are functions of a module by name, with their arguments. An error takes the place of a result, and None that
    of a rank that was killed. A backend of "" leaves it to the module to form the group; RANK says which rank it is.
    """
    (folder / "works").write_bytes(pickle.dumps(works))
    environment = (
        os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | settings
    )
    command, until = [sys.executable, __file__, module, backend, folder, str(count)], time.monotonic() + seconds
    logs = [(folder / f"{rank}.log").open("w") for rank in range(count)]
    started = [
        subprocess.Popen([*command, str(rank)], env=environment | {"RANK": str(rank)}, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        while None in [process.poll() for process in started]:
            assert time.monotonic() < until, "the ranks took too long"
            time.sleep(0.05)
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    found = {}
    for work in works:
        results = [folder / f"{work} {rank}" for rank in range(count)]
        for rank, result in enumerate(results):
            assert result.exists() or started[rank].returncode, (folder / f"{rank}.log").read_text()[-2000:]
        found[work] = [pickle.loads(each.read_bytes()) if each.exists() else None for each in results]  # noqa: S301  ours
    return found


def returned(results):
    """Return results of all ranks, none of which may be an error."""
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} was killed"
        assert not isinstance(result, Exception), f"rank {rank}: {result!r}"
    return results


def one_rank(module, backend, folder, count, rank):
    """Do all works, one after another, and leave their results in the folder."""
    from torch import cuda, distributed

    if backend == "nccl":
        cuda.set_device(rank)
    if backend:
        distributed.init_process_group(backend, f"file://{folder}/store", timedelta(seconds=100), count, rank)
    functions, works = import_module(module), pickle.loads((folder / "works").read_bytes())  # noqa: S301  ours
    for work, given in works.items():
        try:
            result = getattr(functions, work)(*given)
        except Exception as error:  # noqa: BLE001  the test looks at it
            traceback.print_exc()
            result = error
        (folder / f"{work} {rank}.new").write_bytes(pickle.dumps(result))
        (folder / f"{work} {rank}.new").rename(folder / f"{work} {rank}")
    if len(works) > 1:
        distributed.barrier()
    os._exit(0)  # threads, graphs and broken groups that torch leaves behind must not wait


if __name__ == "__main__":
    one_rank(*sys.argv[1:3], Path(sys.argv[3]), *map(int, sys.argv[4:]))
