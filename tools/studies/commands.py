"""The commands of all studies: their options, and the functions that measure what these say.

What needs torch is imported when a command measures, so that a record can be shown without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from skuda.dispatch import Dispatcher
from skuda.registry.device import HOST
from skuda.registry.errors import InvalidProblem
from skuda.tools.frame.run import Findings, NoDevice, Study, given, need
from skuda.tools.options import Json, Markdown, Number, Output, Repeats, Seed, Show, Words, flag, number, option
from skuda.tools.output import Report, chosen, split
from skuda.tools.studies import model
from skuda.tools.studies.processes import place_of_ranks, run_ranks


def measure_model(
    watch: Report,
    *,
    hidden: int | None = None,
    intermediate: int | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    layers: int = 32,
    cache: int = 1024,
    decode: Sequence[str] = (),
    prefill: Sequence[str] = (),
    ways: Sequence[str] = (),
    ranks: int = 0,
    rows: Sequence[str] = (),
    cpu: bool = False,
    repeats: int = 20,
    seed: int = 0,
) -> Findings:
    """Time a Llama stack in several forms, or an MLP on ranks; `skuda bench-model --help` explains the options."""
    of_stack: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "layers": layers, "cache": cache}
    of_stack |= {"decode": decode, "prefill": prefill, "ways": ways}
    for name in given(measure_model, of_stack if ranks else {"rows": rows}):
        with_or_without = "be left out beside --ranks" if ranks else "stand beside --ranks"
        raise InvalidProblem("bench-model", name, "a value", with_or_without)
    if ranks:
        own = {"hidden": hidden, "intermediate": intermediate}
        sizes = model.LLAMA_3_70B | {name: size for name, size in own.items() if size is not None}
        return _shared(sizes, ranks, rows, repeats, seed, watch, cpu=cpu)
    sizes = {"hidden": hidden or 4096, "intermediate": intermediate or 14336, "heads": heads, "kv_heads": kv_heads}
    sizes["layers"] = layers
    for name, by in (("hidden", 2 * heads), ("heads", kv_heads)):
        if sizes[name] % by:
            raise InvalidProblem("bench-model", f"--{name}", str(sizes[name]), f"be a multiple of {by}")
    both = (decode, prefill) if decode or prefill else (("1,16,64",), ("2048,8192",))
    phases: list[tuple[model.Phase, int, int]] = [("decode", m, cache) for m in _rows("--decode", both[0])]
    phases += [("prefill", m, m) for m in _rows("--prefill", both[1], least=2)]
    need("torch")
    from skuda.tools.studies.model_bench import FORMS, bench

    names = chosen("bench-model", "--ways", ways, [form.name for form in FORMS])
    device = HOST if cpu else next((one for one in Dispatcher().devices if one.processor == "cuda"), None)
    if device is None:
        raise NoDevice("a bench of a model needs a CUDA device, and none is here; --cpu runs small sizes on the CPU")
    return device, bench(device, sizes, phases, names, repeats, seed, watch)


def _shared(
    sizes: dict[str, int], ranks: int, rows: Sequence[str], repeats: int, seed: int, watch: Report, *, cpu: bool
) -> Findings:
    """Compare and time a gated MLP that ranks share."""
    numbers = _rows("--rows", rows or ("1,2,3,16,128,2048,8192",))
    need("torch")
    device, backend = place_of_ranks(ranks, cpu=cpu)
    from skuda.tools.studies import parallel_rank

    job = parallel_rank.MlpJob(backend=backend, count=ranks, seed=seed, rows=numbers, repeats=repeats, **sizes)
    watch(0, 1, f"{ranks} ranks")
    phases = parallel_rank.phases_of(job, *run_ranks(parallel_rank.work, job))
    fields = {"repeats": repeats, "sizes": sizes, "ranks": ranks, "graph": not cpu, "computes": model.RANKED}
    return device, {**fields, "phases": phases}


def _rows(name: str, texts: Sequence[str], least: int = 1) -> tuple[int, ...]:
    """Return numbers of rows; raise `InvalidProblem` for anything else."""
    for text in split(texts):
        if not text.isdecimal() or int(text) < least:
            raise InvalidProblem("bench-model", name, text, f"be integers from {least}, separated by commas")
    return tuple(map(int, split(texts)))


MODEL = Study(model.ModelRecord, measure_model, model.sections)


def run(
    *,
    hidden: Annotated[
        Number, number("Size of the hidden states; 4096 if left out, or 8192 with --ranks.", least=2)
    ] = None,
    intermediate: Annotated[Number, number("Size inside the MLP; 14336 if left out, or 28672 with --ranks.")] = None,
    heads: Annotated[Number, number("Heads of the attention; 32 if left out.")] = None,
    kv_heads: Annotated[Number, number("Heads of keys and values; 8 if left out.")] = None,
    layers: Annotated[Number, number("Layers; 32 if left out.")] = None,
    cache: Annotated[Number, number("Positions of the cache in decoding; 1024 if left out.")] = None,
    decode: Annotated[Words, option("ROWS", "Decode so many sequences; 1,16,64 if no phase is given.")] = None,
    prefill: Annotated[Words, option("ROWS", "Prefill so many positions; 2048,8192 if no phase is given.")] = None,
    ways: Annotated[Words, option("NAME", "Only these ways beside ours and bf16, such as torchao.")] = None,
    ranks: Annotated[
        Number, number("In place of the stack, an MLP that so many ranks share, a GPU each.", most=1024)
    ] = None,
    rows: Annotated[Words, option("M", "With --ranks, numbers of rows; 1,2,3,16,128,2048,8192 if left out.")] = None,
    cpu: Annotated[bool, flag("--cpu", help="On the CPU, without CUDA graphs, for small sizes.")] = False,
    repeats: Repeats = None,
    seed: Seed = None,
    output: Output = None,
    show: Show = None,
    markdown: Markdown = None,
    as_json: Json = False,
) -> int:
    """Time a Llama stack: in bf16, quantized, and by others.

    The weights are random. Needs torch and a CUDA device; each way is a replay of a CUDA graph. The outputs of ours,
    eager, compiled and captured, are compared bit for bit; where they differ, nothing is timed, and the exit status is
    1. Ways whose packages are not installed are named.

    With --ranks, a gated MLP is timed on one GPU and on several, with NCCL's collectives in the graphs; the time of a
    round is that of the slowest rank. Before, the outputs in int8 on all ranks, called, replayed and compiled, are
    compared bit for bit with those on one, and a few rows with NumPy.
    """
    return MODEL.run(**locals())
