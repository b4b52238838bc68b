"""`skuda bench-model` on the CPU: what it runs, what it records, and that a wrong bit stops it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from support import fresh

from skuda.registry import InvalidRecord
from skuda.registry.device import HOST
from skuda.tools.bench import model_command
from skuda.tools.bench.lab import Sizes as LabSizes
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.model_record import REAL, ModelRecord
from skuda.tools.bench.ways import WAYS, Way
from skuda.tools.cli import main

torch = pytest.importorskip("torch")

from skuda.tools.bench import llama  # noqa: E402  torch may be absent
from skuda.tools.bench.model import ModelBench, weight_bytes  # noqa: E402

TINY = llama.Sizes(hidden=32, intermediate=48, heads=4, kv_heads=2, layers=1)
TYPED = ["bench-model", "--hidden", "32", "--intermediate", "48", "--heads", "4", "--kv-heads", "2", "--layers", "1"]
FAST = tuple(replace(way, compiled={"backend": "eager"} if way.compiled is not None else None) for way in WAYS)
"""The ways without code generation, which takes seconds."""
PHASES = (("decode", 3, 5), ("prefill", 4, 4))


@pytest.fixture
def lab():
    return TorchLab(HOST, LabSizes(flushed=1 << 12))


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(model_command, "WAYS", FAST)


def bench(lab, ways=FAST):
    return ModelBench(HOST, lab, TINY, ways, seed=int(fresh("bench").integers(1 << 30)), repeats=2)


def flipped(stack):
    """A fused stack, and one bit of its result changed."""
    module = FAST[2].make(stack)

    def run(*arguments):
        found = module(*arguments)
        found.view(torch.int16)[..., -1] ^= 1
        return found

    return Called(run)


class Called:
    """A module of one function."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *arguments):
        return self.run(*arguments)

    def state_dict(self):
        return {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("ways", [FAST, pytest.param(WAYS, marks=pytest.mark.full)], ids=["fast", "compiled"])
def test_a_run_is_recorded_and_shown(ways, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(model_command, "WAYS", ways)
    path = tmp_path / "record.json"
    typed = [*TYPED, "--cpu", "--cache", "6", "--decode", "2", "--repeats", "2", "--seed", "7"]
    assert main([*typed, "--output", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(path.read_text())
    assert record["graph"] is False
    assert record["driver"] == ""
    assert "Gaussian" in record["weights"]
    assert record["command"].split()[1:3] == ["bench-model", "--hidden"]
    assert {"--cpu", "--seed", "7", "--cache", "6", "--decode", "2"} <= set(record["command"].split())
    (phase,) = record["phases"]
    assert (phase["phase"], phase["rows"], phase["cache"], phase["compared"], phase["wrong"]) == ("decode", 2, 6, 3, "")
    ways = {way["name"]: way for way in phase["ways"]}
    assert list(ways) == [way.name for way in WAYS]
    for way in WAYS:
        assert (ways[way.name]["timing"] is None) is (way.name in record["absent"]) is bool(ways[way.name]["refused"])
    assert ways["bf16"]["error"] == 0
    assert 0 < ways["skuda"]["error"] == ways["skuda compiled"]["error"] < 0.1
    assert min(ways[name]["ratio"] for name in ("skuda", "skuda compiled")) == 1
    assert {cost["name"] for cost in record["host"]} == {"F.linear", "nn.Linear", "DynamicLinear"}
    assert all(cost["timing"]["median"] > 0 for cost in record["host"])
    assert record["bytes"]["skuda"] < 0.6 * record["bytes"]["bf16"]
    shown = ModelRecord.load(path)
    assert not shown.outdated
    assert shown.phases[0].gain == min(ways[name]["ratio"] for name in REAL)
    assert main(["bench-model", "--show", str(path)]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[3] for line in lines] == [*ways, "F.linear", "nn.Linear", "DynamicLinear"]
    assert {len(line) for line in lines} == {11}


def test_both_phases_run_from_the_command_line(fast, capsys):
    assert main([*TYPED, "--cpu", "--decode", "1,3", "--prefill", "4", "--repeats", "1", "--ways", "bf16"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [tuple(line[:4]) for line in lines if line[3] == "skuda"] == [
        ("decode", "1", "1024", "skuda"),
        ("decode", "3", "1024", "skuda"),
        ("prefill", "4", "4", "skuda"),
    ]
    assert {line[3] for line in lines if line[0] != "host"} == {"bf16", "skuda", "skuda compiled"}


def test_a_terminal_shows_a_table(lab):
    from rich.console import Console

    record = bench(lab, FAST[:4]).run(PHASES, "skuda bench-model ...")
    console = Console(record=True, width=140, file=sys.stderr)
    model_command.print_record(console, record)
    text = console.export_text()
    for part in (
        "decode 3",
        "prefill 4",
        "without a graph",
        "weights MiB",
        "DynamicLinear: ",
        f"{record.phases[0].gain:.2f}x",
    ):
        assert part in text


def test_one_wrong_bit_stops_a_phase(lab, fast, monkeypatch, capsys):
    planted = Way("planted", "one bit changed", flipped, ours=True)
    record = bench(lab, (*FAST[:3], planted)).run(PHASES, "")
    assert len(record.wrong) == 2
    for phase in record.phases:
        assert phase.wrong.startswith("planted, called, differs from skuda, called: ")
        rows = 3 if phase.phase == "decode" else 4
        assert f"{rows} of {rows * TINY.hidden} elements differ" in phase.wrong
        assert phase.gain is None
        assert not any(way.timing for way in phase.ways)
        assert phase.compared == 0
    monkeypatch.setattr(model_command, "WAYS", (*FAST[:3], planted))
    assert main([*TYPED, "--cpu", "--decode", "2", "--repeats", "1"]) == 1
    assert "planted, called, differs from skuda" in capsys.readouterr().err


def test_a_replay_that_keeps_an_old_result_is_wrong(lab, monkeypatch):
    def stale(call, **_):
        call()
        kept = call.args[0].clone()
        return lambda: call.args[0].copy_(kept)

    monkeypatch.setattr(lab, "capture", stale)
    (phase,) = bench(lab, FAST[:3]).run(PHASES[:1], "").phases
    assert phase.wrong.startswith("skuda, replayed, differs from skuda, called")


def broken(_stack):
    raise ValueError("no such card")


def failing(_stack):
    return Called(lambda *_: broken(None))


def test_what_fails_elsewhere_is_named_and_the_others_are_timed(lab):
    ways = (*FAST[:3], Way("made", "cannot be made", broken), Way("run", "cannot run", failing))
    record = bench(lab, ways).run(PHASES[:1], "")
    assert record.absent == {"made": "ValueError: no such card"}
    found = {way.name: way for way in record.phases[0].ways}
    assert found["made"].refused == found["run"].refused == "ValueError: no such card"
    assert found["skuda"].timing is not None
    assert not record.wrong


def test_a_failure_of_ours_is_an_error(lab):
    record = bench(lab, (*FAST[:2], Way("ours", "cannot run", failing, ours=True))).run(PHASES[:1], "")
    assert record.phases[0].wrong == "ours: ValueError: no such card"
    with pytest.raises(ValueError, match="no such card"):
        bench(lab, (*FAST[:2], Way("ours", "cannot be made", broken, ours=True))).run(PHASES[:1], "")


@pytest.fixture
def stubs(monkeypatch):
    """Stand-ins for the rivals' packages, whose layers count how often they are called."""
    calls = []

    class Counted(torch.nn.Module):
        def __init__(self, linear, name):
            super().__init__()
            self.weight, self.name = linear.weight, name

        def forward(self, x):
            calls.append(self.name)
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    class Linear8bitLt(torch.nn.Module):
        def __init__(self, k, n, *, bias, has_fp16_weights, threshold):
            assert not bias
            assert not has_fp16_weights
            assert threshold == 0
            super().__init__()
            self.shape = (n, k)

        def forward(self, x):
            assert self.weight.shape == self.shape
            calls.append("bitsandbytes")
            return torch.nn.functional.linear(x, self.weight.to(x.dtype))

    def int8_params(weight, *, requires_grad, has_fp16_weights):
        assert weight.dtype is torch.float16
        assert not has_fp16_weights
        return torch.nn.Parameter(weight, requires_grad=requires_grad)

    def quantize_(holder, config):
        assert config == "the config"
        for name, child in list(holder.items()):
            holder[name] = Counted(child, "torchao")

    made = {
        "torchao": {},
        "torchao.quantization": {
            "quantize_": quantize_,
            # It must not change Inductor for the other ways.
            "Int8DynamicActivationInt8WeightConfig": lambda set_inductor_config: (
                "tuned for all" if set_inductor_config else "the config"
            ),
        },
        "bitsandbytes": {"nn": SimpleNamespace(Linear8bitLt=Linear8bitLt, Int8Params=int8_params)},
    }
    for name, members in made.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_rivals_take_part_where_they_are_installed(lab, stubs):
    record = bench(lab, FAST).run(PHASES[:1], "")
    assert not record.absent
    assert all(way.timing and way.ratio and not way.refused for way in record.phases[0].ways)
    per_call = 7 * TINY.layers
    assert stubs.count("bitsandbytes") % per_call == 0
    assert stubs.count("bitsandbytes") >= 3 * per_call
    assert stubs.count("torchao") >= per_call


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        (["--heads", "5"], "be a multiple of 10"),
        (["--kv-heads", "3"], "be a multiple of 3"),
        (["--decode", "0"], "be integers from 1"),
        (["--decode", "x"], "be integers from 1"),
        (["--prefill", "1"], "be integers from 2"),
        (["--ways", "other"], "--ways"),
        (["--show", "none.json", "--decode", "1"], "stand alone"),
        (["--show", "none.json"], "be readable JSON"),
    ],
)
def test_bad_input_is_refused(typed, what, capsys):
    assert main(["bench-model", "--cpu", *typed] if "--show" not in typed else ["bench-model", *typed]) == 2
    assert what in capsys.readouterr().err


def test_another_record_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"kind": "skuda bench", "schema_version": 1}')
    with pytest.raises(InvalidRecord, match="skuda bench-model --output FILE"):
        ModelRecord.load(path)


def test_without_a_gpu_the_cpu_must_be_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(model_command, "Dispatcher", lambda: SimpleNamespace(devices=(HOST,)))
    assert main(TYPED) == 1
    assert "--cpu" in capsys.readouterr().err


def test_bytes_are_those_of_codes_and_scales():
    stack = llama.random_stack(TINY, 1)
    weights = sum(p.numel() for name, p in stack.named_parameters() if "norm" not in name)
    assert weight_bytes(stack) == 2 * weights
    fused = FAST[2].make(stack)
    channels = sum(p.shape[0] for p in stack.parameters() if p.dim() == 2)
    assert weight_bytes(fused) == weights + 4 * channels
    assert type(stack.layers[0].mlp) is llama.MLP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_decoded_is_the_last_one_of_a_prompt(dtype):
    rng = fresh("decode", dtype)
    sizes = replace(TINY, layers=2)
    stack = llama.random_stack(sizes, int(rng.integers(1 << 30)), dtype=dtype)
    x = torch.from_numpy(rng.standard_normal((1, 6, TINY.hidden))).to(dtype)
    caches = llama.random_caches(sizes, 1, 6, x, 3)
    positions = torch.arange(6)
    cosine, sine = llama.angles_of(sizes, positions, dtype)
    with torch.no_grad():
        whole = stack(x, (cosine, sine), caches, positions)
        caches[0][0][:, :, 5] = torch.nan  # is written before it is read
        last = stack(x[:, 5:], (cosine[5:], sine[5:]), caches, positions[5:])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(last[:, 0], whole[:, 5], rtol=tolerance, atol=tolerance)


def test_the_stack_is_that_of_llama():
    transformers = pytest.importorskip("transformers")
    rng = fresh("llama")
    stack = llama.random_stack(TINY, int(rng.integers(1 << 30)), dtype=torch.float32)
    config = transformers.LlamaConfig(
        hidden_size=TINY.hidden,
        intermediate_size=TINY.intermediate,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        vocab_size=8,
    )
    theirs = transformers.LlamaModel(config).eval()
    missing, unexpected = theirs.load_state_dict(stack.state_dict(), strict=False)
    assert missing == ["embed_tokens.weight", "norm.weight"]
    assert not unexpected
    x = torch.from_numpy(rng.standard_normal((1, 7, TINY.hidden))).float()
    with torch.no_grad():
        want = theirs(inputs_embeds=x).last_hidden_state
        at = torch.arange(7)
        angles = llama.angles_of(TINY, at, torch.float32)
        got = theirs.norm(stack(x, angles, llama.random_caches(TINY, 1, 7, x, 3), at))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
