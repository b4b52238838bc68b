"""The example kernel plug-in, `example_kernel`: the conformance suite, and its CUDA source on the CPU."""

from __future__ import annotations

import shutil

import pytest
from harness import emulator
from harness.binding import ran
from harness.resources import Job, compiled
from skuda_absmax.row_absmax import CASES, OP, SKUS
from support import assert_same_bits, draw, fresh

from skuda.dispatch import Dispatcher, device_named
from skuda.dispatch.compile import compilers as compiling
from skuda.kernels.catalog import built_in_registry
from skuda.tools.testing import Conformance
from skuda.tools.verify.trial import answer

SOURCES = [sku for sku in SKUS if sku.backend == "cuda_core"]


class TestConformance(Conformance):
    package = "skuda-absmax"

    @classmethod
    def dispatcher(cls):
        return Dispatcher(built_in_registry().register(OP, origin="skuda-absmax 1.0"))


@pytest.mark.skipif(compiling.find_nvrtc() is None, reason="no nvrtc")
def test_it_compiles_without_a_remark_or_local_memory():
    for job in (Job.of(sku, arch) for sku in SOURCES for arch in ("sm_80", "sm_90")):
        result = compiled(job)
        assert (result.remarks, list(result.kernels)) == ("", ["row_absmax"]), job
        assert (result.kernels["row_absmax"].stack, result.kernels["row_absmax"].spills) == (0, 0)


@pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")
@pytest.mark.parametrize("sku", SOURCES, ids=lambda sku: sku.id)
def test_its_source_gives_the_reference_s_bits_on_the_cpu(sku):
    rng, device = fresh(sku.id), device_named("a100").model_copy(update={"sm_count": 1})
    for case in (case for case in CASES if case.problem.key() == sku.key):
        problem, drawn = case.problem, draw(OP, case, rng)
        placed = ran(sku, problem, drawn.inputs, device, rng)
        assert_same_bits(placed["output"].array, answer(OP, problem, drawn.inputs)["output"], repr(problem))
