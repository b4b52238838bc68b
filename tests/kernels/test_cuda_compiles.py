"""Every CUDA kernel compiles for every architecture without a remark, and for Hopper without local memory."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from harness.resources import Job, architectures, compiled, configurations, cuda_skus, launches
from support import SEED, sampled

import skuda.kernels
from skuda.dispatch.compile import compilers as compiling

SKUS = cuda_skus()
SOURCES = sorted(Path(path) for root in skuda.kernels.__path__ for path in Path(root).rglob("*.cu"))
HEADERS = sorted(Path(path) for root in skuda.kernels.__path__ for path in Path(root).rglob("*.cuh"))
_REGISTERS_OF_A_BLOCK = 65_536


def _compilations():
    """Return (SKU, architecture, compiler): all for Hopper, and each source for all others, in kernels by chance."""
    sampler = np.random.default_rng(SEED)
    shuffled = [SKUS[i] for i in sampler.permutation(len(SKUS))]
    different = {_flags(sku): sku for sku in shuffled}
    sources, done = Counter(sku.source for sku in different.values()), Counter()
    found = []
    for sku in different.values():
        hopper = [arch for arch in architectures(sku) if arch.startswith("sm_90")]
        others = [arch for arch in architectures(sku) if arch not in hopper]
        share = -(-len(others) // sources[sku.source])
        others = sorted(others, key=lambda arch: done[sku.source, arch])[:share]
        done.update((sku.source, arch) for arch in others)
        found += [(sku, arch, "nvrtc") for arch in (*hopper, *others)]
    one_of_each_source = {sku.source: sku for sku in shuffled}.values()
    return found + [(sku, "sm_90a" if sku.arch.is_specific else "sm_90", "nvcc") for sku in one_of_each_source]


@cache
def _flags(sku):
    return (sku.source, *sku.flags, *configurations(sku)[0])


def _name(sku, arch, compiler):
    return f"{compiler}-{arch}-{sku.id.replace(f'.{sku.backend}.', '.')}"


def _kind(sku, arch, compiler):
    """Return what the fast run compiles one of: each source for Hopper, each other architecture, the other compiler."""
    return sku.source if (arch.startswith("sm_90"), compiler) == (True, "nvrtc") else (arch, compiler)


COMPILATIONS = sampled([pytest.param(*each, id=_name(*each)) for each in _compilations()], each=_kind)


def _present(compiler):
    return compiling.find_nvcc() if compiler == "nvcc" else compiling.find_nvrtc()


@pytest.mark.parametrize(("sku", "arch", "compiler"), COMPILATIONS)
def test_kernel_compiles_without_a_remark_and_keeps_out_of_local_memory(sku, arch, compiler):
    if not _present(compiler):
        pytest.skip(f"no {compiler}")
    result = compiled(Job.of(sku, arch, compiler))
    assert not result.remarks, result.remarks
    assert result.kernels
    # Launch bounds are set on an H200; on cards that nobody here has, compiling is all that is claimed.
    for entry, needs in result.kernels.items() if arch.startswith("sm_90") else ():
        assert needs.spills == 0, f"{entry} spills {needs.spills} bytes"
        assert needs.stack == 0, f"{entry} keeps {needs.stack} bytes in local memory"
    for step in _steps(sku):
        needs = result.kernels.get(step.entry)
        assert needs, f"{step.entry} is launched, and {sku.source} has {', '.join(result.kernels)}"
        threads = step.block[0] * step.block[1] * step.block[2]
        granted = -(-needs.registers // 8) * 8 * threads
        assert granted <= _REGISTERS_OF_A_BLOCK, f"{step.entry}: {threads} threads of {needs.registers} registers"


@pytest.mark.parametrize("op", ["rms_norm_quantize", "layer_norm_quantize", "silu_mul_quantize", "amax"])
def test_what_propagates_compiles_as_well(op):
    compiler = next(filter(_present, ("nvrtc", "nvcc")), None) or pytest.skip("no compiler")
    sku = next(sku for sku in SKUS if sku.op == op and sku.element == "bf16")
    more = next(flags for flags in configurations(sku) if "-DSKUDA_PROPAGATE" in flags)
    result = compiled(Job(Job.of(sku, "sm_90a").unit, (*sku.flags, *more), "sm_90a", compiler))
    assert not result.remarks
    assert all(needs.spills == needs.stack == 0 for needs in result.kernels.values())


def _steps(compiled_as):
    """Return the steps of all SKUs that share a compilation, as the granularities of a direction do."""
    shared = _flags(compiled_as)
    found = [launch for sku in SKUS if _flags(sku) == shared for launch in launches(sku)]
    return [step for launch in found if launch.flags == configurations(compiled_as)[0] for step in launch.steps]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_source_begins_with_what_it_computes_and_its_arrays(path):
    text = path.read_text()
    indented = [line for line in _opening(text) if line.startswith("   ")]
    assert any("=" in line for line in indented), "no formula, indented by three"
    explained = set(re.findall(r"\w+", " ".join(indented)))
    arrays = set(
        re.findall(r"\*\s*(\w+)\s*[,)]", "".join(re.findall(r"^KERNEL\(.*?\{", text, re.DOTALL | re.MULTILINE)))
    )
    assert arrays <= explained, f"not explained: {', '.join(sorted(arrays - explained))}"


def _opening(text):
    """Return the lines of the comment at the top."""
    lines = itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
    return [line.removeprefix("//") for line in lines]


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_header_begins_with_its_formula_the_path_of_its_data_and_its_variants(path):
    opening = _opening(path.read_text())
    assert any("=" in line for line in opening if line.startswith("   ")), "no formula, indented by three"
    _, data, path_of_data = "\n".join(opening).partition("\n Data:")
    assert data, "no paragraph that begins with `Data:`"
    assert "->" in path_of_data.partition("\n\n")[0], "nothing says where data go"
    assert any(line.startswith(" Variants") for line in opening), "no paragraph that begins with `Variants`"


def test_every_source_belongs_to_a_kernel_on_offer():
    offered = {sku.source.partition(":")[2] for sku in SKUS}
    assert {path.name for path in SOURCES} == offered
