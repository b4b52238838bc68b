"""``skuda compile`` and ``skuda cache``: kernels compiled without a GPU, and the cache that they lie in."""

from __future__ import annotations

import json

import pytest

from skuda.dispatch import Dispatcher, device_named
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.backends.cuda_core import CudaCoreBackend
from skuda.dispatch.backends.pycuda import PycudaBackend
from skuda.dispatch.compile import cache as cubin_cache
from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.compilers import nvrtc_trouble
from skuda.kernels.catalog import built_in_registry
from skuda.kernels.elementwise.fill import FillDescriptor
from skuda.registry.errors import CompileError

needs_nvrtc = pytest.mark.skipif(nvrtc_trouble() is not None, reason="no NVRTC wheels")
FILL = ["compile", "--op", "fill", "--arch", "sm_90", "--backend", "cuda_core"]
LINEAR = ["compile", "--op", "quantized_linear", "--device", "h200", "--backend", "cuda_core"]
CUBIN = b"\x7fELF" + bytes(range(256)) * 4


def rows(out):
    return [line.split() for line in out.partition("\n\n")[0].splitlines()[1:]]


def lookups(op, device, problems=None):
    """Everything that a device looks for when it runs these problems, or the op's cases: (kernel, launch, device)."""
    registry, device = built_in_registry(), device_named(device)
    return [
        (sku, launch, device)
        for sku in registry.skus_of(op)
        if sku.backend == "cuda_core" and sku.arch.runs_on(device.compute_capability)
        for problem in problems or [case.problem for case in registry.ops[op].cases]
        if problem.key() == sku.key and not any(constraint.check(problem) for constraint in sku.constraints)
        if (launch := CudaCoreBackend.launch_of(sku, problem, device)).steps
    ]


def fake(monkeypatch, backend=CudaCoreBackend, fails=None):
    """Put a compiler in place that compiles nothing; gives the list of its jobs."""
    jobs = []

    class Compiler:
        def identity(self, source):
            return "fake 1.0"

        def compile(self, job):
            jobs.append(job)
            if fails is not None and fails(job):
                raise CompileError(job.sku, "no good", "fake -c", "line one\nline two")
            return CUBIN

    monkeypatch.setattr(backend, "compiler", lambda self: Compiler())
    # What the cubin holds is of no interest here.
    monkeypatch.setattr("skuda.dispatch.compile.provider.read_kernels", lambda _: {})
    return jobs


# ------------------------------------------------------------------------------------------------------------ compile


@needs_nvrtc
def test_a_machine_without_a_compiler_finds_what_was_compiled_here(skuda, monkeypatch):
    status, out, err = skuda(*FILL)
    backend = CudaCoreBackend(CubinCache())
    wanted = lookups("fill", "h200")
    assert (status, err) == (0, "")
    assert rows(out) == [["fill", "cuda_core", "sm_90", str(len(CubinCache().survey())), "0", "0"]]
    assert {sku.element for sku, *_ in wanted} >= {"f32", "s8", "s4"}
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    for item in wanted:
        assert backend.cached(*item)
        assert backend.cubin(*item).cubin.startswith(b"\x7fELF")
    sku, launch, _ = wanted[0]
    assert not backend.cached(sku, launch, device_named("a100"))
    with pytest.raises(CompileError, match="skuda compile"):
        backend.cubin(sku, launch, device_named("a100"))


@needs_nvrtc
def test_what_is_there_is_found_and_what_is_corrupt_is_compiled_again(skuda):
    _, out, _ = skuda(*FILL)
    number = int(rows(out)[0][3])
    spoilt = CubinCache().survey()[0].path
    spoilt.write_bytes(spoilt.read_bytes()[:-1])
    status, out, _ = skuda(*FILL)
    assert (status, rows(out)[0][3:]) == (0, ["1", str(number - 1), "0"])
    assert not any(entry.trouble for entry in CubinCache().survey())


def test_every_configuration_of_the_cases_is_compiled_once(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    assert skuda("compile", "--op", "quantized_linear", "--arch", "sm_90a", "--backend", "cuda_core")[0] == 0
    asked = [(job.source.name, job.arch, job.flags) for job in jobs]
    assert {arch for _, arch, _ in asked} == {"sm_90", "sm_90a"}
    assert len(CubinCache().survey()) == len(asked)
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    backend = CudaCoreBackend(CubinCache())
    wanted = [*lookups("quantized_linear", "h100"), *lookups("quantized_linear", "h200")]
    assert all(backend.cached(*item) for item in wanted)
    assert {flags for *_, flags in asked} == {(*sku.flags, *launch.flags) for sku, launch, _ in wanted}


def test_each_card_gets_its_own(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    command = ["compile", "--op", "fill", "--arch", "sm_80", "--device", "h200,RTX 4090", "--backend", "cuda_core"]
    status, out, _ = skuda(*command)
    assert (status, [row[2] for row in rows(out)]) == (0, ["sm_80", "sm_89", "sm_90"])
    assert {job.arch for job in jobs} == {"sm_80", "sm_89", "sm_90"}
    backend = CudaCoreBackend(CubinCache())
    assert all(backend.cached(*item) for card in ("a100", "h200", "rtx4090") for item in lookups("fill", card))
    assert not any(backend.cached(*item) for item in lookups("fill", "b200"))


def test_one_problem_is_compiled_as_it_would_be_looked_up(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    status, _, err = skuda(*LINEAR, "--m", "8", "--n", "4096", "--k=4096")
    assert status == 0
    assert "assumed" in err
    dispatcher = Dispatcher(built_in_registry())
    names = {"m": 8, "c_out": 4096, "k": 4096, "q_min": -127, "q_max": 127, "activation_element": "f32"}
    problem = dispatcher.registry.ops["quantized_linear"].descriptor(**names)
    accepted = dispatcher.explain(problem, device=device_named("h200")).accepted
    assert {job.sku for job in jobs} == {d.sku for d in accepted if ".cuda_core." in d.sku}
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    backend = CudaCoreBackend(CubinCache())
    wanted = lookups("quantized_linear", "h200", [problem])
    assert len(wanted) == len(jobs)
    assert all(backend.cached(*item) for item in wanted)


def test_a_failure_is_reported_and_the_rest_goes_on(skuda, monkeypatch):
    jobs = fake(monkeypatch, fails=lambda job: ".f32." in job.sku)
    status, out, _ = skuda(*FILL)
    (first,) = rows(out)
    bad = [job for job in jobs if ".f32." in job.sku]
    assert (status, len(bad)) == (1, 1)
    assert first == ["fill", "cuda_core", "sm_90", str(len(jobs) - 1), "0", "1"]
    assert f"\n{bad[0].sku}\n  for sm_90: " in out
    assert "no good fake -c line one line two" in " ".join(out.split())
    status, out, _ = skuda(*FILL, "--json")
    found = json.loads(out)["cubins"]
    assert (status, {item["state"] for item in found}) == (1, {"cached", "failed"})


def test_a_launch_rule_that_fails_is_reported_and_stops_nothing(skuda, monkeypatch):
    fake(monkeypatch)

    def launch_of(sku, problem, device, *choice):
        if sku.element == "f32":
            raise RuntimeError("no rule for this")
        return _launch_of(sku, problem, device, *choice)

    _launch_of = CudaCoreBackend.launch_of
    monkeypatch.setattr(CudaBackend, "launch_of", staticmethod(launch_of))
    status, out, _ = skuda(*FILL)
    (first,) = rows(out)
    assert status == 1
    assert int(first[3]) > 1
    assert first[5] == "1"
    assert "its launch rule fails: no rule for this" in out
    problem = FillDescriptor(numel=8, output_element="f32")
    found = Dispatcher().explain(problem, device=device_named("h200"))
    assert found.chosen
    assert "its launch rule fails: RuntimeError: no rule for this" in found.notes


def test_what_cannot_be_kept_is_not_called_compiled(skuda, monkeypatch):
    fake(monkeypatch)
    monkeypatch.setattr(cubin_cache.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    status, out, _ = skuda(*FILL)
    assert status == 1
    assert rows(out)[0][3:5] == ["0", "0"]
    assert "disk full" in out


def test_without_a_compiler_the_remedy_is_reported(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    monkeypatch.setattr(PycudaBackend, "compiler", lambda self: None)
    for name in ("pycuda", "all"):
        status, out, err = skuda("compile", "--op", "fill", "--arch", "sm_90", "--backend", name)
        assert (status, out, jobs) == (2, "", [])
        assert "no compiler here for pycuda: put nvcc on PATH" in err
        assert err.count("\n") == 1
    status, out, err = skuda("compile", "--op", "fill", "--arch", "sm_90")
    assert (status, {row[1] for row in rows(out)}) == (0, {"cuda_core"})
    assert "left out for want of a compiler: pycuda" in err
    monkeypatch.setattr(CudaCoreBackend, "compiler", lambda self: None)
    status, _, err = skuda("compile", "--op", "fill", "--arch", "sm_90")
    assert status == 2
    assert "skuda[cuda13]" in err


def test_a_card_that_is_too_old_gets_nothing(skuda, monkeypatch):
    jobs = fake(monkeypatch)
    status, out, err = skuda("compile", "--op", "fill", "--device", "t4", "--backend", "cuda_core")
    assert (status, out, jobs) == (1, "", [])
    assert "no kernel of cuda_core serves these ops on Tesla T4 (compute capability 7.5)" in err
