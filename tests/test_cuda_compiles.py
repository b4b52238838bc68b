"""Every CUDA kernel compiles for every architecture without a remark, and for Hopper without local memory."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from harness.binding import launch_of
from harness.resources import Job, architectures, compiled, configurations, cuda_skus
from support import SEED

import skuda.kernels
from skuda.dispatch import compiling
from skuda.dispatch.device import KNOWN_DEVICES
from skuda.kernels.catalog import built_in_ops

SKUS = cuda_skus()
SOURCES = sorted(Path(path) for root in skuda.kernels.__path__ for path in Path(root).rglob("*.cu"))
_REGISTERS_OF_A_BLOCK = 65_536


def _chosen():
    """Return (SKU, architecture, compiler): all for one architecture, one of each source, by chance, for the others."""
    sampler = np.random.default_rng(SEED)
    shuffled = [SKUS[i] for i in sampler.permutation(len(SKUS))]
    found = {}
    for sku in SKUS:
        own = architectures(sku)
        found[_flags(sku), "sm_90" if "sm_90" in own else own[0], "nvrtc"] = sku
    for _, group in itertools.groupby(sorted(shuffled, key=lambda sku: sku.source), lambda sku: sku.source):
        members = list(group)
        every = sorted({arch for sku in members for arch in architectures(sku)})
        for turn, arch in enumerate(every):
            able = [sku for sku in members if arch in architectures(sku)]
            sku = able[turn % len(able)]
            found.setdefault((_flags(sku), arch, "nvrtc"), sku)
            if arch in ("sm_90", "sm_90a"):
                found.setdefault((_flags(sku), arch, "nvcc"), sku)
    return [(sku, arch, compiler) for (_, arch, compiler), sku in found.items()]


def _flags(sku):
    return (sku.source, *sku.flags, *configurations(sku)[0])


def _name(sku, arch, compiler):
    return f"{compiler}-{arch}-{sku.id.replace(f'.{sku.backend}.', '.')}"


CHOSEN = [pytest.param(*each, id=_name(*each)) for each in _chosen()]


@pytest.fixture(scope="session")
def results(request):
    """Compile at once everything that the chosen tests look at."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    jobs = [Job.of(p["sku"], p["arch"], p["compiler"]) for p in params if "compiler" in p and _present(p["compiler"])]
    return dict(zip(jobs, compiled(jobs), strict=True))


def _present(compiler):
    return compiling.find_nvcc() if compiler == "nvcc" else compiling.find_nvrtc()


@pytest.mark.parametrize(("sku", "arch", "compiler"), CHOSEN)
def test_kernel_compiles_without_a_remark_and_keeps_out_of_local_memory(sku, arch, compiler, results):
    if not _present(compiler):
        pytest.skip(f"no {compiler}")
    result = results[Job.of(sku, arch, compiler)]
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


def _steps(sku):
    device = KNOWN_DEVICES["h200"].model_copy(update={"compute_capability": sku.arch.capability})
    cases = [case for op in built_in_ops() for case in op.cases if case.problem.key() == sku.key]
    fitting = [c for c in cases if not any(constraint.check(c.problem) for constraint in sku.constraints)]
    return [step for case in fitting for step in launch_of(sku, case.problem, device).steps]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_source_begins_with_what_it_computes_and_its_arrays(path):
    text = path.read_text()
    header = [
        line.removeprefix("//") for line in itertools.takewhile(lambda line: line.startswith("//"), text.splitlines())
    ]
    assert header, "no comment at the top"
    indented = [line for line in header if line.startswith("   ")]
    assert any("=" in line for line in indented), "no formula, indented by three"
    explained = set(re.findall(r"\w+", " ".join(indented)))
    arrays = set(
        re.findall(r"\*\s*(\w+)\s*[,)]", "".join(re.findall(r"^KERNEL\(.*?\{", text, re.DOTALL | re.MULTILINE)))
    )
    assert arrays <= explained, f"not explained: {', '.join(sorted(arrays - explained))}"


def test_every_source_belongs_to_a_kernel_on_offer():
    offered = {sku.source.partition(":")[2] for sku in SKUS}
    assert {path.name for path in SOURCES} == offered
