"""CUDA sources compiled for real architectures, and what ptxas says that their kernels need.

``python -m harness.resources FILE``, in ``tests``, compiles every kernel for every architecture and writes the table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.binding import launch_of
from harness.emulator import Unit, cache_folder, digest, publish, write_headers

from skuda.dispatch.compile import compilers as compiling
from skuda.kernels.catalog import built_in_ops
from skuda.kernels.launch import Launch
from skuda.registry.arch import ArchSku
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.op import Case
from skuda.registry.sku import KernelSku

ARCHITECTURES = tuple(map(ArchSku, ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")))

_ENTRY = re.compile(r"Compiling entry function '([\w$]+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS, _SHARED = re.compile(r"Used (\d+) registers"), re.compile(r"(\d+) bytes smem")
_EXPECTED = re.compile(r"^(ptxas (info  |     ) |\s*\d+ bytes stack frame|\s*$)")


@dataclass
class Resources:
    """What one kernel needs.

    Attributes
    ----------
    registers, shared : int
        Registers per thread, and bytes of static shared memory per block.
    stack, spills : int
        Bytes of local memory, and of spill loads and stores, with those of functions that it calls.
    """

    registers: int = 0
    shared: int = 0
    stack: int = 0
    spills: int = 0


@dataclass(frozen=True)
class Compiled:
    """What a compilation gave.

    Attributes
    ----------
    kernels : dict
        Needs by entry; empty where it failed.
    remarks : str
        Warnings, and errors where it failed.
    """

    kernels: dict[str, Resources]
    remarks: str


@dataclass(frozen=True)
class Job:
    """One source, compiled with some flags by one compiler for one architecture."""

    unit: Unit
    flags: tuple[str, ...]
    arch: str
    compiler: str = "nvrtc"

    @classmethod
    def of(cls, sku: KernelSku, arch: str, compiler: str = "nvrtc") -> Job:
        """Return the compilation of a SKU, in the configuration of one of its cases where it has several."""
        return cls(Unit.of(sku), (*sku.flags, *configurations(sku)[0]), arch, compiler)


@cache
def _cases() -> dict[Any, list[Case]]:
    """Return the cases of all ops by the key of their problem."""
    found = defaultdict(list)
    for op in built_in_ops():
        for case in op.cases:
            found[case.problem.key()].append(case)
    return found


def cases_of(sku: KernelSku) -> list[Case]:
    """Return the cases that a SKU serves."""
    return [case for case in _cases()[sku.key] if not any(rule.check(case.problem) for rule in sku.constraints)]


@cache
def configurations(sku: KernelSku) -> tuple[tuple[str, ...], ...]:
    """Return the flags of every configuration that the launch rule chooses for the cases that a SKU serves."""
    return tuple(dict.fromkeys(launch.flags for launch in launches(sku) if launch.steps)) or ((),)


@cache
def launches(sku: KernelSku) -> list[Launch]:
    """Return the launches of all cases that a SKU serves, on an H200 that is of its architecture."""
    device = KNOWN_DEVICES["h200"].model_copy(update={"compute_capability": sku.arch.capability})
    return [launch_of(sku, case.problem, device) for case in cases_of(sku)]


def architectures(sku: KernelSku) -> tuple[ArchSku, ...]:
    """Return what a SKU is compiled for: its own architecture alone where it names one chip, else every later one."""
    if sku.arch.is_specific:
        return (sku.arch,)
    return tuple(arch for arch in ARCHITECTURES if not arch.is_specific and sku.arch.runs_on(arch.capability))


class _FailedError(Exception):
    """A compilation failed; what the compiler said is the argument."""


def compiled(job: Job) -> Compiled:
    """Compile; what succeeds is kept, by content, for the next run. A failure may be one of this machine."""
    find, run = (compiling.find_nvcc, _nvcc) if job.compiler == "nvcc" else (compiling.find_nvrtc, _nvrtc)

    def make(_: Path, file: str) -> None:
        succeeded, log = run(job)
        if not succeeded:
            raise _FailedError(log)
        Path(file).write_text(json.dumps(asdict(_read(log))))

    try:
        path = publish(cache_folder() / f"{digest(job, find().version)}.json", make)
    except _FailedError as failed:
        return Compiled({}, str(failed) or "it failed without a word")
    kept = json.loads(path.read_text())
    return Compiled({name: Resources(**needs) for name, needs in kept["kernels"].items()}, kept["remarks"])


def _nvrtc(job: Job) -> tuple[bool, str]:
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture={job.arch}", "-std=c++17", "--ptxas-options=-v", *job.flags]
    options += compiling.find_nvrtc()._header_options() if job.unit.foreign else []
    names, texts = [name.encode() for name, _ in job.unit.headers], [text.encode() for _, text in job.unit.headers]
    _, program = nvrtc.nvrtcCreateProgram(job.unit.text.encode(), job.unit.name.encode(), len(names), texts, names)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.rstrip(b"\0 ").decode()


def _nvcc(job: Job) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_headers(job.unit, folder)
        (folder / "unit.cu").write_text(job.unit.text)
        command = ["nvcc", "-cubin", *job.flags, f"-arch={job.arch}", "-std=c++17", "-Xptxas=-v", "-I.", "unit.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return done.returncode == 0, done.stdout + done.stderr


def _read(log: str) -> Compiled:
    kernels: dict[str, Resources] = {}
    own = Resources()
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            own = kernels.setdefault(entry[1], Resources())
        elif stack := _STACK.search(line):
            own.stack += int(stack[1])
            own.spills += int(stack[2]) + int(stack[3])
        elif used := _REGISTERS.search(line):
            own.registers = int(used[1])
            own.shared = int(shared[1]) if (shared := _SHARED.search(line)) else 0
    return Compiled(kernels, "\n".join(line for line in log.splitlines() if not _EXPECTED.match(line)))


# --- the table -------------------------------------------------------------------------------------------------------


def cuda_skus() -> list[KernelSku]:
    """Return every CUDA SKU, one of those that differ in the backend alone."""
    found = {}
    for op in built_in_ops():
        for sku in op.skus:
            if sku.arch is not ArchSku.CPU:
                found.setdefault((sku.source, sku.flags, sku.arch, sku.launch, sku.key, sku.variant), sku)
    return list(found.values())


def table() -> dict[str, object]:
    """Compile everything for everything and return what it needs, one line per kernel and architecture."""
    skus = {
        (sku.source, (*sku.flags, *configurations(sku)[0]), arch): sku
        for sku in cuda_skus()
        for arch in architectures(sku)
    }
    # NVRTC compiles one program at a time in a process.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(compiled, [Job.of(sku, key[2]) for key, sku in skus.items()], chunksize=4))
    lines = {}
    for (source, flags, arch), result in zip(skus, found, strict=True):
        if result.remarks:
            sys.exit(f"{source} {' '.join(flags)} for {arch}:\n{result.remarks}")
        choices = "-".join(flag.partition("=")[2] for flag in flags if flag.startswith("-DSKUDA_"))
        for entry, needs in result.kernels.items():
            lines[f"{source.partition(':')[2]} {choices} {entry} {arch}"] = asdict(needs)
    version = ".".join(map(str, compiling.find_nvrtc().version))
    return {"compiler": f"nvrtc {version}", "kernels": dict(sorted(lines.items()))}


def main() -> None:
    """Write the table."""
    made = table()
    rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(needs)}" for name, needs in made["kernels"].items())
    text = f'{{\n  "compiler": {json.dumps(made["compiler"])},\n  "kernels": {{\n{rows}\n  }}\n}}\n'
    Path(sys.argv[1]).write_text(text)
    most = max(needs["registers"] for needs in made["kernels"].values())
    spilled = [name for name, needs in made["kernels"].items() if needs["spills"] or needs["stack"]]
    sys.stdout.write(f"{len(made['kernels'])} kernels, at most {most} registers; local memory: {spilled or 'none'}\n")


if __name__ == "__main__":
    main()
