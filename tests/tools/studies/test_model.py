"""`skuda bench-model` on the CPU: what it runs and records, and that a wrong bit stops it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support import fresh

from skuda.dispatch.select.tuning import Timing
from skuda.registry.device import HOST as HOST_DEVICE
from skuda.registry.device import device_named
from skuda.tools.cli import main
from skuda.tools.studies import commands
from skuda.tools.studies.model import OURS, REAL, FormResult, ModelRecord, PhaseResult, sections

torch = pytest.importorskip("torch")

from skuda.tools.bench.lab import TorchLab  # noqa: E402  torch may be absent
from skuda.tools.studies import llama, model_bench  # noqa: E402
from skuda.tools.studies.model_bench import FORMS, StackForm, Stacks  # noqa: E402

TINY = llama.LlamaSizes(hidden=128, intermediate=48, heads=4, kv_heads=2, layers=1)
TYPED = ["bench-model", "--hidden", "128", "--intermediate", "48", "--heads", "4", "--kv-heads", "2", "--layers", "1"]
FAST = tuple(form._replace(compiled={"backend": "eager"} if form.compiled is not None else None) for form in FORMS)
"""The forms without code generation, which takes seconds."""
DECODE, PREFILL = ("decode", 3, 5), ("prefill", 4, 4)


@pytest.fixture
def lab():
    return TorchLab(HOST_DEVICE, flushed=1 << 12)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(model_bench, "FORMS", FAST)


def stacks_of(lab, forms=FAST):
    return Stacks(lab, TINY, forms, int(fresh("bench").integers(1 << 30)))


def measured(stacks, phase=DECODE):
    with torch.no_grad():
        return stacks.phase(*phase, 2, lambda _: None)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("forms", [FAST, pytest.param(FORMS, marks=pytest.mark.full)], ids=["fast", "compiled"])
def test_a_run_is_recorded_and_shown(forms, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(model_bench, "FORMS", forms)
    path = tmp_path / "record.json"
    typed = [*TYPED, "--cpu", "--cache", "6", "--decode", "2", "--repeats", "2", "--seed", "7"]
    assert main([*typed, "--output", str(path), "--json"]) == 0
    assert capsys.readouterr().out == path.read_text()
    record = ModelRecord.load(path)
    assert (record.graph, record.driver, record.outdated) == (False, "", "")
    assert sorted(record.command.split()) == sorted(["skuda", *typed])
    (phase,) = record.phases
    assert (phase.phase, phase.rows, phase.cache, phase.compared, phase.wrong) == ("decode", 2, 6, 3, "")
    ways = {one.name: one for one in phase.ways}
    assert list(ways) == [form.name for form in FORMS]
    for name, one in ways.items():
        assert (one.timing is None) is (name in record.absent) is bool(one.refused)
    assert ways["bf16"].error == 0
    assert 0 < ways["skuda"].error == ways["skuda compiled"].error < 0.1
    assert phase.gain == min(phase.ratios[name] for name in REAL)
    assert main(["bench-model", "--show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert main(["bench-model", "--show", str(path), "--markdown", "phases"]) == 0
    assert capsys.readouterr().out in shown, "a pipe gets every section as Markdown"


def test_both_phases_run_from_the_command_line_and_nothing_else(fast, capsys, tmp_path):
    path = tmp_path / "r.json"
    typed = [*TYPED, "--cpu", "--decode", "1,3", "--prefill", "4", "--repeats", "1", "--ways", "bf16"]
    assert main([*typed, "--output", str(path)]) == 0
    record = ModelRecord.load(path)
    assert [(one.phase, one.rows, one.cache) for one in record.phases] == [
        ("decode", 1, 1024),
        ("decode", 3, 1024),
        ("prefill", 4, 4),
    ]
    assert {one.name for phase in record.phases for one in phase.ways} == {"bf16", *OURS}


class Called:
    """A module of one function."""

    def __init__(self, run):
        self.run = run

    def __call__(self, *arguments):
        return self.run(*arguments)


def flipped(stack):
    """Return a fused stack with one bit of its result changed."""
    module = FAST[2].make(stack)

    def run(*arguments):
        found = module(*arguments)
        found.view(torch.int16)[..., -1] ^= 1
        return found

    return Called(run)


def test_one_wrong_bit_stops_a_phase(lab, monkeypatch, capsys):
    planted = StackForm("planted", "one bit changed", flipped, ours=True)
    stacks = stacks_of(lab, (*FAST[:3], planted))
    for name, rows, cache in (DECODE, PREFILL):
        phase = measured(stacks, (name, rows, cache))
        assert phase.wrong.startswith("planted, called, differs from skuda, called: ")
        assert f"{rows} of {rows * TINY.hidden} elements differ" in phase.wrong
        assert (phase.gain, phase.times, phase.compared) == (None, {}, 0)
    monkeypatch.setattr(model_bench, "FORMS", (*FAST[:3], planted))
    assert main([*TYPED, "--cpu", "--decode", "2", "--repeats", "1"]) == 1
    assert "decode 2: planted, called, differs from skuda" in capsys.readouterr().err


def test_a_replay_that_keeps_an_old_result_is_wrong(lab, monkeypatch):
    def stale(call, **_):
        call()
        kept = call.args[0].clone()
        return lambda: call.args[0].copy_(kept)

    monkeypatch.setattr(lab, "capture", stale)
    assert measured(stacks_of(lab, FAST[:3])).wrong.startswith("skuda, replayed, differs from skuda, called")


def broken(_stack):
    raise ValueError("no such card")


def failing(_stack):
    return Called(lambda *_: broken(None))


def test_what_fails_elsewhere_is_named_and_the_others_are_timed(lab):
    stacks = stacks_of(
        lab, (*FAST[:3], StackForm("made", "cannot be made", broken), StackForm("run", "cannot run", failing))
    )
    assert stacks.absent == {"made": "ValueError: no such card"}
    phase = measured(stacks)
    found = {one.name: one for one in phase.ways}
    assert found["made"].refused == found["run"].refused == "ValueError: no such card"
    assert found["skuda"].timing is not None
    assert phase.wrong == ""


def test_a_failure_of_ours_is_an_error(lab):
    ours = StackForm("ours", "cannot run", failing, ours=True)
    assert measured(stacks_of(lab, (*FAST[:2], ours))).wrong == "ours: ValueError: no such card"
    with pytest.raises(ValueError, match="no such card"):
        stacks_of(lab, (*FAST[:2], ours._replace(make=broken)))


# --- a record --------------------------------------------------------------------------------------------------------


def phase_of(name, rows, cache=0, **times):
    cache = cache or (rows if name == "prefill" else 1024)
    ways = tuple(FormResult(name=form, timing=Timing.of([us])) for form, us in times.items())
    return PhaseResult(phase=name, rows=rows, cache=cache, ways=ways, compared=3)


def record_of(*phases, **changes):
    fields = {"device": device_named("h200"), "date": "2026-02-03T04:05:06+00:00", "skuda": "0", "command": "c"}
    fields |= {"repeats": 1, "sizes": {"hidden": 4096, "layers": 2}, "graph": True}
    fields |= {"computes": dict.fromkeys(("bf16", "bf16 compiled", "skuda", "torchao"), "x"), "phases": phases}
    return ModelRecord(**{**fields, **changes})


GOOD = phase_of("decode", 1, skuda=10.0, bf16=99.0, **{"bf16 compiled": 17.5})


def test_the_table_has_every_time_of_a_layer():
    record = record_of(GOOD, phase_of("prefill", 4, bf16=8.0))
    table, _ = sections(record)["phases"]
    assert table.columns == ("phase", "M", "cache", "gain", "bf16", "bf16 compiled", "skuda", "torchao")
    assert [str(cell) for cell in table.rows[0]] == [
        "decode",
        "1",
        "1024",
        "1.75",
        "49.5 (9.90)",
        "8.8 (1.75)",
        "5.0 (1.00)",
        "-",
    ]
    assert [str(cell) for cell in table.rows[-1]][3:] == ["-"] * 5, "without ours there is no ratio"
    refused = (FormResult(name="skuda", refused="no"),)
    wrong = GOOD.model_copy(update={"ways": refused, "wrong": "a bit"})
    assert [str(cell) for cell in sections(record_of(wrong))["phases"][0].rows[0]][4:] == ["wrong"] * 4
    assert record_of(wrong).wrong == ("decode 1: a bit",)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        (["--heads", "5"], "be a multiple of 10"),
        (["--kv-heads", "3"], "be a multiple of 3"),
        (["--decode", "0"], "be integers from 1"),
        (["--decode", "x"], "be integers from 1"),
        (["--prefill", "1"], "be integers from 2"),
        (["--ways", "other"], "--ways"),
    ],
)
def test_bad_input_is_refused(typed, what, capsys):
    assert main(["bench-model", "--cpu", *typed]) == 2
    assert what in capsys.readouterr().err


def test_without_a_gpu_the_cpu_must_be_named(capsys, monkeypatch):
    monkeypatch.setattr(commands, "Dispatcher", lambda: SimpleNamespace(devices=(HOST_DEVICE,)))
    assert main(TYPED) == 1
    assert "--cpu" in capsys.readouterr().err


# --- the stack -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_decoded_is_the_last_one_of_a_prompt(dtype):
    rng = fresh("decode", dtype)
    sizes = replace(TINY, layers=2)
    stack = llama.drawn(llama.LlamaStack, sizes, seed=int(rng.integers(1 << 30)), dtype=dtype)
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
    stack = llama.drawn(llama.LlamaStack, TINY, seed=int(rng.integers(1 << 30)), dtype=torch.float32)
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
