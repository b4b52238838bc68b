"""The commands of all studies: their options, and the functions that measure what these say.

What needs torch is imported when a command measures, so that a record can be shown without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skuda.dispatch import Dispatcher
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.tools.bench.bench import STUDY as BENCH
from skuda.tools.output import Report, chosen, split
from skuda.tools.studies import model, parallel
from skuda.tools.studies.processes import place_of_ranks, run_ranks
from skuda.tools.study.record import Record
from skuda.tools.study.run import Findings, NoDevice, Study


def measure_model(
    watch: Report,
    *,
    hidden: int = 4096,
    intermediate: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    layers: int = 32,
    cache: int = 1024,
    decode: Sequence[str] = (),
    prefill: Sequence[str] = (),
    ways: Sequence[str] = (),
    only: Sequence[str] = (),
    cpu: bool = False,
    repeats: int = 20,
    seed: int = 0,
) -> Findings:
    """Time a Llama stack in several forms; `skuda bench-model --help` explains the options."""
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": heads, "kv_heads": kv_heads, "layers": layers}
    for name, by in (("hidden", 2 * heads), ("heads", kv_heads)):
        if sizes[name] % by:
            raise InvalidProblem("bench-model", f"--{name}", str(sizes[name]), f"be a multiple of {by}")
    both = (decode, prefill) if decode or prefill else (("1,16,64",), ("2048,8192",))
    phases: list[tuple[model.Phase, int, int]] = [
        ("decode", m, cache) for m in _rows("bench-model", "--decode", both[0])
    ]
    phases += [("prefill", m, m) for m in _rows("bench-model", "--prefill", both[1], least=2)]
    _need_torch()
    from skuda.tools.studies.model_bench import FORMS, PARTS, bench

    names = chosen("bench-model", "--ways", ways, [form.name for form in FORMS])
    parts = chosen("bench-model", "--only", only, PARTS) or PARTS
    device = HOST if cpu else next((one for one in Dispatcher().devices if one.processor == "cuda"), None)
    if device is None:
        raise NoDevice("a bench of a model needs a CUDA device, and none is here; --cpu runs small sizes on the CPU")
    return device, bench(device, sizes, phases, names, parts, repeats, seed, watch)


def measure_parallel(
    watch: Report,
    *,
    gpus: int = 2,
    rows: Sequence[str] = (),
    hidden: int = parallel.LLAMA_3_70B[0],
    intermediate: int = parallel.LLAMA_3_70B[1],
    cpu: bool = False,
    repeats: int = 20,
    seed: int = 0,
) -> Findings:
    """Compare and time a gated MLP on the ranks; `skuda bench-parallel --help` explains the options."""
    numbers = _rows("bench-parallel", "--rows", rows or ("1,2,3,16,128,2048,8192",))
    _need_torch()
    device, backend = place_of_ranks(gpus, cpu=cpu)
    from skuda.tools.studies.parallel_rank import work

    sizes = {"hidden": hidden, "intermediate": intermediate}
    job = parallel.MlpJob(backend=backend, count=gpus, seed=seed, rows=numbers, repeats=repeats, **sizes)
    watch(0, 1, f"{job.count} ranks")
    results = parallel.results_of(job, *run_ranks(work, job))
    return device, {"orders": job, "graph": not cpu, "results": results}


def _rows(command: str, option: str, given: Sequence[str], least: int = 1) -> tuple[int, ...]:
    """Return numbers of rows; raise `InvalidProblem` for anything else."""
    for text in split(given):
        if not text.isdecimal() or int(text) < least:
            raise InvalidProblem(command, option, text, f"be integers from {least}, separated by commas")
    return tuple(map(int, split(given)))


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise MissingDependency("torch, with which this measures,", "pip install torch")


MODEL = Study(model.ModelRecord, measure_model, model.sections)
PARALLEL = Study(parallel.ParallelRecord, measure_parallel, parallel.sections)
STUDIES: tuple[Study[Any], ...] = (BENCH, MODEL, PARALLEL)
"""The studies whose records are kept."""
run_model, run_parallel = MODEL.run, PARALLEL.run


def records(folder: Path | None) -> dict[Path, tuple[Study[Any], Record]]:
    """Return every record of a study in a folder, with its study, by study and the files' names.

    Raise `InvalidRecord` if a file cannot be read, or if a file of one of these kinds is not a valid record.
    """
    return {path: (study, record) for study in STUDIES for path, record in study.record.files(folder).items()}
