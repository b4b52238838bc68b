"""CUDA sources compiled by g++ with `shim.h`, unmodified, and run on this machine one thread at a time.

No library does this well: cuda4cpu is GPL, is on no package index, and its published part dates from 2015; the other
emulators translate PTX or need LLVM builds. The kernels need few enough words that a header defines them all.

``SKUDA_SANITIZE=1`` builds with AddressSanitizer and UBSan; libasan must then be preloaded into Python.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import hashlib
import importlib.resources
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import platformdirs

from skuda.kernels.launch import Dim3
from skuda.kernels.sources import read_source
from skuda.registry.sku import KernelSku

SANITIZED = os.environ.get("SKUDA_SANITIZE") == "1"
COMPILER = os.environ.get("CXX", "g++")
_HERE = Path(__file__).parent
_CACHE = Path(os.environ.get("SKUDA_HOST_CACHE") or platformdirs.user_cache_path("skuda") / "cuda-on-cpu")
_KEPT_DAYS = 2
_CLUSTER = r"(?:__attribute__\(\(skuda_cluster\(([\w* ]+)\)\)\)\s*)?"
_ENTRY = re.compile(rf'^\s*extern "C"\s+void\s+{_CLUSTER}(\w+)\s*\(', re.MULTILINE)  # in preprocessed text
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\([^)]*\)\s*)?([^;]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
_SANITIZE = (
    "-g",
    "-fsanitize=address,undefined,float-cast-overflow",
    # Negative numbers shift as GPUs do it, and as C++20 says.
    "-fno-sanitize=shift-base",
    "-fno-sanitize-recover=all",
    "-fsanitize-sections=skuda_shared",
)


@dataclass(frozen=True)
class Unit:
    """One source with everything that its bits depend on.

    Attributes
    ----------
    name : str
        Path of the source, for messages.
    text : str
        Its text.
    headers : tuple of (str, str)
        Name and text of every header of ours that is included.
    foreign : tuple of str
        Names of the compiler's own headers that are included.
    defines : tuple of str
        ``-D`` flags.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()
    foreign: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()

    @classmethod
    def of(cls, sku: KernelSku) -> Unit:
        """Return what a CUDA SKU is compiled from."""
        package, _, name = sku.source.partition(":")
        source = read_source(sku.source)
        headers = tuple((name, text.decode()) for name, text in source.headers)
        defines = tuple(flag for flag in sku.flags if flag.startswith("-D"))
        path = str(importlib.resources.files(package).joinpath(name))
        return cls(path, source.text.decode(), headers, source.foreign, defines)

    def configured(self, flags: Iterable[str]) -> Unit:
        """Return the same unit in the configuration that a launch rule chose."""
        return replace(self, defines=(*self.defines, *(flag for flag in flags if flag.startswith("-D"))))

    def with_change(self, before: str, after: str) -> Unit:
        """Return the same unit with one piece of its text or headers replaced, which must occur."""
        texts = [self.text, *(text for _, text in self.headers)]
        assert sum(text.count(before) for text in texts) > 0, f"{before!r} does not occur"
        changed = tuple((name, text.replace(before, after)) for name, text in self.headers)
        return replace(self, text=self.text.replace(before, after), headers=changed)


def write_headers(unit: Unit, folder: Path) -> None:
    """Write a unit's headers where ``-I folder`` finds them."""
    for name, text in unit.headers:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# --- building --------------------------------------------------------------------------------------------------------


@lru_cache(50)  # a unit that has run holds 20 MB, and there are thousands
def load(unit: Unit) -> Library:
    """Return the unit, compiled where the same content was not compiled before."""
    return Library(_library_path(unit))


@cache
def _flags() -> tuple[str, ...]:
    machine = ("-mfma", "-mf16c") if platform.machine() == "x86_64" else ()
    checked = _SANITIZE if SANITIZED else ()
    # Most kernels are compiled for a few small launches, so that optimizing takes longer than it saves.
    # Without -fno-weak, shared variables of inline functions could not lie in one section with those of kernels.
    plain = ("-std=c++17", "-O0", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-weak", "-w")
    return (*plain, *machine, *checked)


@cache
def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def _compile(arguments: Sequence[str], folder: Path) -> None:
    command = [COMPILER, *_flags(), *arguments]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 0, "\n".join(errors[:5] or [done.stderr])


def digest(*parts: object) -> str:
    """Return a name that is the same for the same parts, compiled here in the same way."""
    return hashlib.sha256(repr((parts, _flags(), _compiler())).encode()).hexdigest()[:24]


@cache
def _compiler() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout.partition("\n")[0]


@cache
def _own(name: str) -> str:
    return (_HERE / name).read_text()


@cache
def _switching() -> Path:
    """Build the part that is the same for all units."""
    path = cache_folder() / f"{digest(_own('shim.h'), _own('hopper.h'), _own('block.cpp'))}.o"
    return publish(path, lambda folder, out: _compile(["-O2", "-c", str(_HERE / "block.cpp"), "-o", out], folder))


@cache
def cache_folder() -> Path:
    """Return the folder of compiled things, without those that were not used lately."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    for old in _CACHE.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another worker was faster
            if time.time() - old.stat().st_mtime > _KEPT_DAYS * 86400:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    return _CACHE


def publish(path: Path, make: Callable[[Path, str], object]) -> Path:
    """Return `path`, made by `make(folder, file)` if it is not there; a half-written file is never seen."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "out"
        make(Path(folder), str(made))
        made.replace(path)
    return path


def _library_path(unit: Unit) -> Path:
    path = cache_folder() / f"{digest(unit, _own('shim.h'), _own('hopper.h'), _own('block.cpp'), _ENTRY.pattern)}.so"

    def make(folder: Path, out: str) -> None:
        write_headers(replace(unit, headers=tuple((name, _rewritten(text)) for name, text in unit.headers)), folder)
        whole = folder / "unit.cpp"
        whole.write_text(f'#line 1 "{unit.name}"\n{_rewritten(unit.text)}\n')
        options = ["-DSKUDA_HOST", *unit.defines, "-include", str(_HERE / "shim.h"), "-I."]
        _compile([*options, "-E", "-P", "unit.cpp", "-o", "entries"], folder)
        names = _ENTRY.findall((folder / "entries").read_text())
        with whole.open("a") as file:
            file.writelines(f"SKUDA_ENTRY({name}, {cluster or 1})\n" for cluster, name in names)
        _compile([*options, "-shared", "-Wl,-Bsymbolic", "unit.cpp", str(_switching()), "-o", out], folder)

    return publish(path, make)


def _rewritten(text: str) -> str:
    """Name dynamic shared memory the way the shim can define it; everything else is compiled as it stands."""
    return _DYNAMIC.sub(r"SKUDA_DYNAMIC_SHARED(\1, \2);", text)


# --- launching -------------------------------------------------------------------------------------------------------


Value = tuple[str, int | float | tuple[int, ...]]


class _Geometry(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("overlaps", ctypes.c_uint),
    )


_LETTERS = {
    "m": ctypes.c_uint64 * 16,
    "p": ctypes.c_uint64,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


class Library:
    """A compiled unit.

    Parameters
    ----------
    path : Path
        The shared object.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        weakref.finalize(self, _ctypes.dlclose, self._library._handle)

    def signature(self, entry: str) -> str:
        """Return one letter per parameter: p pointer, i and l integers, f and d floating, m tensor map."""
        return self._call(f"signature_{entry}")().decode()

    def launch(
        self, entry: str, grid: Dim3, block: Dim3, shared: int, values: Sequence[Value], *, overlaps: bool = False
    ) -> None:
        """Run one launch to its end.

        Parameters
        ----------
        entry : str
            The ``extern "C"`` kernel.
        grid, block, shared
            Geometry and bytes of dynamic shared memory.
        values : sequence of (str, number)
            The arguments, each with its letter, which must be the kernel's own.
        overlaps : bool
            Whether the kernel may start before the previous one has ended, so that it has to wait for that.
        """
        own = self.signature(entry)
        # A constant 0 of 64 bits stands for a pointer that there is not.
        given = "".join(
            "p" if o == "p" and v == ("l", 0) else v[0] for o, v in zip(own.ljust(len(values)), values, strict=False)
        )
        assert given == own, f"{entry} takes ({own}) and is launched with ({given})"
        whole = [value if isinstance(value, tuple) else (value,) for _, value in values]
        boxes = [_LETTERS[letter](*parts) for (letter, _), parts in zip(values, whole, strict=True)]
        pointers = (ctypes.c_void_p * len(boxes))(*(ctypes.addressof(box) for box in boxes))
        geometry = _Geometry((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared, overlaps)
        fault = self._call(f"launch_{entry}")(ctypes.byref(geometry), pointers)
        assert not fault, f"{entry}: {fault.decode()}"

    def _call(self, name: str):
        found = getattr(self._library, name, None)
        assert found is not None, f"the source has no kernel behind {name}"
        found.restype = ctypes.c_char_p
        return found
