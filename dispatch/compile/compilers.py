"""Compilers from CUDA source to cubin: nvcc from a toolkit, NVRTC from its wheels.

nvcc is not called through `pycuda.compiler`, because that takes flags from the environment, which would change bits
without changing the cache key, wraps the source, and needs a driver to be imported. Both compilers get exactly the
bytes that were hashed: nvcc in a private folder, NVRTC in memory.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from skuda.dispatch.settings import cache_directory, environment
from skuda.dispatch.system import programs
from skuda.dispatch.system.packages import installed
from skuda.dispatch.system.transient import is_transient
from skuda.kernels.sources import Source
from skuda.registry.errors import CompileError

_STANDARD = "-std=c++17"
_TIMEOUT = 1800
_PLACE = "free some space, or set TMPDIR to a folder that has some and can be written"
_BUNDLED_SINCE = (13, 3)


class Job(NamedTuple):
    """One compilation."""

    sku: str  # id of the kernel, for errors
    source: Source  # source and headers
    flags: tuple[str, ...]  # flags of the SKU and its configuration; the same for every compiler
    arch: str  # target architecture, for example ``sm_90``


class Nvcc:
    """The compiler of a CUDA toolkit.

    `path` is that of the program. `version` is for example ``13.0.88``.
    """

    def __init__(self, path: str, version: str) -> None:
        self.path, self.version = path, version

    def identity(self, source: Source) -> str:  # noqa: ARG002  the version determines the headers
        """Return the name, the version and the language standard; the path does not matter."""
        return f"nvcc {self.version} {_STANDARD}"

    def compile(self, job: Job) -> bytes:
        """Return the cubin. Raise `CompileError` with the command and the complete output of nvcc."""
        try:
            # A process that was killed may still be writing, which must not hide the interrupt.
            with tempfile.TemporaryDirectory(prefix="skuda-", ignore_cleanup_errors=True) as name:
                return self._compiled(job, Path(name))
        except OSError as error:
            raise CompileError(job.sku, f"nvcc has no place for its files: {error}; {_PLACE}") from error

    def _compiled(self, job: Job, folder: Path) -> bytes:
        for header, content in (*job.source.headers, (job.source.name, job.source.text)):
            path = folder / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        target = folder / "kernel.cubin"
        command = [self.path, "-cubin", *_target(job.arch), _STANDARD, "-I.", *job.flags]
        command += ["-o", target.name, job.source.name]
        command_line = " ".join(command)
        try:
            # What nvcc leaves behind when it is killed is removed with the folder.
            surroundings = environment(TMPDIR=str(folder))
            done = programs.run(command, timeout=_TIMEOUT, folder=folder, environment=surroundings)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(job.sku, f"nvcc does not run: {error}", command_line) from error
        log = done.stderr + done.stdout
        if done.returncode and os.strerror(errno.ENOSPC) in log:
            raise CompileError(job.sku, f"nvcc has no space left in {folder.parent}; {_PLACE}", command_line, log)
        if done.returncode or not target.exists():
            raise CompileError(
                job.sku, f"nvcc {self.version} fails with exit code {done.returncode}", command_line, log
            )
        return target.read_bytes()


class Nvrtc:
    """The run-time compiler: a library that cuda-bindings finds in wheels or in a toolkit.

    Parameters
    ----------
    api : module
        ``cuda.bindings.nvrtc``.
    version : (int, int)
        Major and minor version.
    """

    def __init__(self, api: Any, version: tuple[int, int]) -> None:
        self._api, self.version = api, version

    def identity(self, source: Source) -> str:
        """Return the version, and that of CUDA's headers if the source includes any."""
        headers = f" headers {_header_version(self._header_options())}" if source.foreign else ""
        return f"nvrtc {self.version[0]}.{self.version[1]} {nvrtc_version()} {_STANDARD}{headers}"

    def compile(self, job: Job) -> bytes:
        """Return the cubin. Raise `CompileError` with the options and the complete output of NVRTC."""
        api = self._api
        options = [f"--gpu-architecture={job.arch}", _STANDARD, *job.flags]
        options += self._header_options() if job.source.foreign else []
        command_line = f"nvrtc {self.version[0]}.{self.version[1]} {' '.join(options)} {job.source.name}"

        def call(name: str, *arguments: Any) -> Any:
            code, *found = getattr(api, name)(*arguments)
            if int(code):
                raise CompileError(job.sku, f"{name}: {code.name}", command_line, log(program) if program else "")
            return found[0] if found else None

        def log(program: Any) -> str:
            code, size = api.nvrtcGetProgramLogSize(program)
            text = b" " * size
            return "" if int(code) or int(api.nvrtcGetProgramLog(program, text)[0]) else text.rstrip(b"\0").decode()

        program = None
        names = [name.encode() for name, _ in job.source.headers]
        contents = [content for _, content in job.source.headers]
        program = call("nvrtcCreateProgram", job.source.text, job.source.name.encode(), len(names), contents, names)
        try:
            call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
            cubin = b" " * int(call("nvrtcGetCUBINSize", program))
            call("nvrtcGetCUBIN", program, cubin)
            return cubin
        finally:
            api.nvrtcDestroyProgram(program)

    def _header_options(self) -> list[str]:
        """Return the options for CUDA's headers: those bundled with NVRTC, else those of wheels or a toolkit."""
        if self.version >= _BUNDLED_SINCE:
            folder = cache_directory() / f"nvrtc-headers-{self.version[0]}.{self.version[1]}"
            return [f"--use-bundled-headers={folder}"]
        return [f"-I{folder}" for folder in _toolkit_headers()]


Compiler = Nvcc | Nvrtc


def _target(arch: str) -> list[str]:
    # Written in full, because the shorthand `-arch=sm_90a` makes some releases compile for plain sm_90 as well.
    return [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"]


def find_nvcc() -> Nvcc | None:
    """Return the nvcc on the search path, or None."""
    path = shutil.which("nvcc")
    version = _nvcc_version(path) if path else None
    return Nvcc(path, version) if path and version else None


@cache
def _nvcc_version(path: str) -> str | None:
    try:
        done = programs.run([path, "--version"], timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        if is_transient(error):
            raise
        return None
    found = re.search(r"\bV(\d+\.\d+\.\d+)", done.stdout)
    return found[1] if found and not done.returncode else None


def find_nvrtc() -> Nvrtc | None:
    """Return NVRTC, or None if cuda-bindings or the library itself is missing."""
    return _nvrtc() if nvrtc_trouble() is None else None


@cache
def nvrtc_trouble() -> str | None:
    """Return why NVRTC cannot be used here, or None if it can."""
    if not installed("cuda.bindings"):
        return "cuda-bindings is not installed"
    try:
        _nvrtc()
    except Exception as error:  # a broken installation may raise anything
        if is_transient(error):
            raise
        return f"NVRTC cannot be loaded: {' '.join(str(error).split())}"
    return None


@cache
def _nvrtc() -> Nvrtc:
    from cuda.bindings import nvrtc

    code, major, minor = nvrtc.nvrtcVersion()
    if int(code):
        raise CompileError("nvrtc", f"nvrtcVersion: {code.name}")
    return Nvrtc(nvrtc, (major, minor))


@cache
def version_of(distribution: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvrtc_version() -> str:
    """Return the version of NVRTC's wheel, with the build number; empty if it is not installed."""
    return version_of("nvidia-cuda-nvrtc") or version_of("nvidia-cuda-nvrtc-cu12")


@cache
def _toolkit_headers() -> tuple[str, ...]:
    """Return the folders of CUDA's headers: those that cuda-pathfinder finds, else the one of nvcc's toolkit."""
    found = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = [folder for name in ("cudart", "cccl") if (folder := find_nvidia_header_directory(name))]
    except ImportError:
        pass
    beside = shutil.which("nvcc")
    if not found and beside:
        found = [str(Path(beside).resolve().parent.parent / "include")]
    return tuple(found)


def _header_version(options: list[str]) -> str:
    """Return the CUDART_VERSION of the headers in the options; ``bundled`` for those of NVRTC, ``none`` without."""
    for option in options:
        header = Path(option.removeprefix("-I")) / "cuda_runtime_api.h"
        if option.startswith("-I") and header.exists():
            found = re.search(r"define CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
            return found[1] if found else "unknown"
    return "bundled" if options else "none"
