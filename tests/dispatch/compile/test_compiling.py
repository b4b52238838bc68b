"""Compilation: source and headers, the cache key, compiler errors, and the check of kernel parameters."""

from __future__ import annotations

import importlib
import shutil
import struct
import sys
import textwrap

import pytest
from fakes import fake_compiler
from toykernels import scaled as toy

from skuda.dispatch import device_named
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.pycuda import PycudaBackend
from skuda.dispatch.compile import compilers as compiling
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.compilers import Job, Nvcc, Nvrtc, find_nvcc, find_nvrtc, nvrtc_trouble
from skuda.dispatch.compile.cubin import read_kernels
from skuda.dispatch.compile.provider import agreeing
from skuda.dispatch.cuda.packing import packable, packer, parameter_layout
from skuda.kernels.launch import Constant, Launch, Pointer, Step
from skuda.kernels.sources import read_source
from skuda.registry import CompileError, ElementKind

SOURCE = "toykernels:scaled.cu"
H200 = device_named("h200")
COMPILERS = [
    pytest.param(
        find_nvrtc, id="nvrtc", marks=pytest.mark.skipif(nvrtc_trouble() is not None, reason="no NVRTC wheels")
    ),
    pytest.param(
        find_nvcc, id="nvcc", marks=pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
    ),
]
every_compiler = pytest.mark.parametrize("find", COMPILERS)


def job(text=None, flags=("-fmad=false",), arch="sm_90"):
    source = read_source(SOURCE)
    return Job("the id", source if text is None else source._replace(text=text.encode()), flags, arch)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that makes an importable package of files."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, **files):
        (tmp_path / name / "include").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
        for file, text in files.items():
            folder = tmp_path / name / ("" if file.endswith("_cu") else "include")
            (folder / file.replace("_cu", ".cu")).write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return f"{name}:kernel.cu"

    yield make
    for name in [name for name in sys.modules if name.startswith("made_")]:
        del sys.modules[name]


def test_headers_of_headers_are_found_and_foreign_ones_named(package):
    source = read_source(SOURCE)
    assert [name for name, _ in source.headers] == ["deeper.cuh", "toy.cuh"]
    assert source.foreign == ()
    made = package(
        "made_a", kernel_cu='#include <cuda_fp16.h>\n  #  include "elements.cuh"\n#include "../secret.cuh"\n'
    )
    source = read_source(made)
    assert [name for name, _ in source.headers] == ["elements.cuh"], "the shared headers are found from any package"
    assert source.foreign == ("../secret.cuh", "cuda_fp16.h")


def test_every_byte_of_source_and_headers_counts(package):
    digests = set()
    for number, (kernel, one, two) in enumerate([(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]):
        headers = {"a.cuh": f'#include "b.cuh"\n// {one}\n', "b.cuh": f"// {two}\n"}
        name = package(f"made_{number}", kernel_cu=f'#include "a.cuh"\n// {kernel}\n', **headers)
        digests.add(read_source(name).digest)
    assert len(digests) == 4


@pytest.mark.parametrize("source", ["toykernels:absent.cu", "no_such_package:kernel.cu"])
def test_a_source_that_is_not_there_is_a_lookup_error(source):
    with pytest.raises(LookupError, match=r"absent\.cu|no_such_package"):
        read_source(source)


@every_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_a_cubin_says_the_parameters_that_the_launch_packs(find, arch):
    cubin = find().compile(job(arch=arch))
    kernels = read_kernels(cubin)
    assert set(kernels) == {"scaled", "partial_sums", "total"}
    steps = toy.scaled(toy.ScaledDescriptor(numel=1), H200).steps + toy.summed(toy.SummedDescriptor(n=1), H200).steps
    for step in steps:
        assert kernels[step.entry].parameters == parameter_layout(step)
        assert 0 < kernels[step.entry].registers <= 255
        assert kernels[step.entry].frame == 0
        agreeing(toy.sku("scaled", "cuda_core"), (step,), read_kernels(cubin))


@every_compiler
def test_flags_reach_the_compiler(find):
    text = 'extern "C" __global__ void k(float* a, float b) { a[0] = a[1] * b + a[2]; }'
    assert find().compile(job(text)) != find().compile(job(text, flags=("-fmad=true",)))
    picky = '#if SKUDA_X != 7\n#error not 7\n#endif\nextern "C" __global__ void k() {}'
    assert "k" in read_kernels(find().compile(job(picky, flags=("-DSKUDA_X=7",))))


@every_compiler
def test_an_error_carries_the_log_the_options_and_the_kernel(find):
    with pytest.raises(CompileError) as caught:
        find().compile(job('#include "toy.cuh"\nthis is no C++;\n'))
    error = caught.value
    assert error.sku == "the id"
    assert "scaled.cu(2)" in error.log
    assert "sm_90" in error.command
    assert "-fmad=false" in error.command
    assert all(part in str(error) for part in ("the id", "scaled.cu(2)", "-fmad=false"))


@every_compiler
def test_headers_of_cuda_are_found(find, tmp_path, monkeypatch, package):
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path))
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half* p) { *p = __float2half(1.f); }'
    source = read_source(package("made_half", kernel_cu=text))
    compiler = find()
    if isinstance(compiler, Nvrtc):
        if not compiler._header_options():
            pytest.skip("an NVRTC without bundled headers, and no toolkit")
        assert compiler.identity(source) != compiler.identity(source._replace(foreign=()))
    assert "k" in read_kernels(compiler.compile(Job("the id", source, (), "sm_80")))


def test_an_nvcc_that_does_not_run_is_a_compile_error_and_one_without_a_version_is_none(tmp_path, monkeypatch):
    with pytest.raises(CompileError, match="does not run"):
        Nvcc(str(tmp_path / "nvcc"), "13.0").compile(job())
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho something else\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiling._nvcc_version.cache_clear()
    assert find_nvcc() is None


@pytest.fixture(scope="module")
def cubin():
    for compiler in (find_nvrtc(), find_nvcc()):
        if compiler is not None:
            return compiler.compile(job())
    pytest.skip("neither NVRTC nor nvcc is here")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Step("no_such", (1, 1, 1), (1, 1, 1), ()), "there is no kernel no_such in it; it has partial_sums, scaled"),
        (Step("total", (1, 1, 1), (1, 1, 1), (Pointer("p"), Pointer("y"))), "total takes parameters"),
        (
            Step("total", (1, 1, 1), (1, 1, 1), (Pointer("p"), Pointer("y"), Constant(ElementKind.S64, 4))),
            r"\(16, 4\)\), the launch gives .*\(16, 8\)\)",
        ),
    ],
    ids=["no such kernel", "too few", "too wide"],
)
def test_a_launch_that_gives_other_parameters_is_refused(cubin, step, words):
    with pytest.raises(CompileError, match=words):
        agreeing(toy.sku("summed", "pycuda"), (step,), read_kernels(cubin))


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\0" * 58, b"PTX" * 100])
def test_what_is_no_cubin_is_a_value_error(content):
    with pytest.raises(ValueError, match="not a cubin"):
        read_kernels(content)


@every_compiler
def test_one_compilation_serves_every_problem_and_a_machine_without_a_compiler(find, tmp_path, monkeypatch):
    backend = CudaCoreBackend if find is find_nvrtc else PycudaBackend
    made = backend(CubinCache(tmp_path))
    sku = toy.sku("scaled", made.spec.name)
    compiled = []
    compiler = type(find())
    real = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda self, job: compiled.append(job.arch) or real(self, job))
    for numel in (1, 1000):
        launch = made.launch_of(sku, toy.ScaledDescriptor(numel=numel), H200)
        assert read_kernels(made.cubin(sku, launch, H200).cubin)
    assert compiled == ["sm_90"]
    made.cubin(sku, launch, device_named("a100"))
    assert compiled == ["sm_90", "sm_80"]
    monkeypatch.setattr(backend, "compiler", lambda self: None)
    assert made.cubin(sku, launch, H200).notes == ()
    assert compiled == ["sm_90", "sm_80"]


def test_a_kernel_for_one_chip_is_compiled_for_exactly_that(monkeypatch, tmp_path):
    made = CudaCoreBackend(CubinCache(tmp_path))
    asked = fake_compiler(monkeypatch, CudaCoreBackend, fails=lambda job: True)
    for arch in ("sm_90a", "sm_80"):
        with pytest.raises(CompileError, match="no good"):
            made.cubin(toy.sku("scaled", "cuda_core", arch=arch), Launch(()), H200)
    assert [job.arch for job in asked] == ["sm_90a", "sm_90"]


def test_parameters_are_aligned_as_the_compiler_aligns_them():
    kinds = [ElementKind.S8, ElementKind.F64, ElementKind.F16, ElementKind.S32, ElementKind.BF16, ElementKind.S64]
    step = Step("k", (1, 1, 1), (1, 1, 1), tuple(Constant(kind, 0) for kind in kinds))
    assert parameter_layout(step) == ((0, 1), (8, 8), (16, 2), (20, 4), (24, 2), (32, 8))
    packed = packer(step, "op").pack(-1, 0.5, 1.5, -2, 0x3F80, 7)
    assert packed[20:24] == struct.pack("<i", -2)
    assert packed[24:26] == b"\x80\x3f"
    assert len(packed) == 40


@pytest.mark.parametrize(("number", "bits"), [(1.0, 0x3F80), (-2.5, 0xC020), (0.0, 0), (float("inf"), 0x7F80)])
def test_a_bf16_number_is_packed_as_its_bits(number, bits):
    step = Step("k", (1, 1, 1), (1, 1, 1), (Constant(ElementKind.BF16, 0),))
    assert packer(step, "op").pack(packable(number, ElementKind.BF16)) == struct.pack("<H", bits)
