"""`prepare`: every int8 layer runs once for each number of rows, and names its kernel."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from decoders import small
from support import fresh
from tensors import calibrated
from torch import nn

from skuda.functional import default_dispatcher
from skuda.registry import InvalidProblem
from skuda.registry.device import KNOWN_DEVICES
from skuda.torch import (
    Dynamic,
    SmoothStatic,
    fuse_,
    preparation,
    prepare,
    quantize_,
)


def static(dtype):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)
    quantize_(model, SmoothStatic(calibrated(model, torch.ones(2, 4, dtype=dtype))), strict=True)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_that_serve_are_named(dtype):
    model = nn.Sequential(static(dtype), nn.Linear(3, 5, dtype=dtype))
    quantize_(model, Dynamic())
    found = prepare(model, (1, 4))
    x = {"0.1": torch.ones(4, 4, dtype=dtype), "1": torch.ones(4, 3, dtype=dtype)}
    assert found.keys() == x.keys()
    for name, layer_input in x.items():
        assert set(found[name]) == {1, 4}
        assert found[name][4] == model.get_submodule(name).explain(layer_input).chosen


def test_each_layer_runs_with_each_number_of_rows():
    model, seen = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False)), []
    quantize_(model, Dynamic(), strict=True)
    for name in ("0", "2"):

        def note(_, args, name=name):
            seen.append((name, args[0].shape, args[0].dtype, bool(args[0].any()), torch.is_grad_enabled()))

        model.get_submodule(name).register_forward_pre_hook(note)
    prepare(model, iter((1, 3)), torch.float16)
    assert seen == [
        (name, (rows, size), torch.float16, False, False) for name, size in (("0", 4), ("2", 3)) for rows in (1, 3)
    ]


class OnGpu:
    """A dispatcher that runs on the CPU, says that it was a GPU, and keeps what shall be prepared there."""

    def __init__(self):
        self.rows = []

    @contextmanager
    def recorded(self):
        seen = set()
        with default_dispatcher().recorded() as found:
            yield seen
        seen.update((problem, KNOWN_DEVICES["h200"]) for problem, _ in found)

    def prepare_rows(self, rows, device, progress):
        self.rows += rows
        progress(1, 2)
        return f"all for {device.name}"


@pytest.mark.parametrize("fuses", [True, False])
def test_all_numbers_of_tokens_are_prepared_also_for_attention(fuses, monkeypatch, caplog):
    model, gpu, steps = small("Qwen3", fresh()), OnGpu(), []
    quantize_(model, Dynamic())
    if fuses:
        assert fuse_(model).fused
    monkeypatch.setattr(preparation, "default_dispatcher", lambda: gpu)
    monkeypatch.setattr(preparation.KERNELS, "watch", steps.append)
    with caplog.at_level("INFO"):
        prepare(model, (2,), tokens=70, progress=lambda *step: steps.append(step))
    assert steps == [(1, 2), preparation._log.warning]
    assert "all for NVIDIA H200" in caplog.text
    fused = {"rms_norm_quantize", "silu_mul_quantize", "scaled_linear", "attention", "rope_quantize_append"}
    ops = {each.problem.op for each in gpu.rows}
    assert fused <= ops if fuses else ops == {"quantized_linear"}
    assert {each.most for each in gpu.rows if each.fields} == {70}
    gpu.rows.clear()
    prepare(model, (2,))
    assert not gpu.rows


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((None,), "model"), ((5,), "rows"), (([1, -1],), "rows"), (([True],), "rows"), (((1,), "bf16"), "dtype")],
)
def test_bad_arguments(arguments, field):
    model = () if field == "model" else (nn.Sequential(),)
    with pytest.raises(InvalidProblem) as refused:
        prepare(*model, *arguments)
    assert refused.value.field == field
    with pytest.raises(InvalidProblem, match="floating"):
        prepare(nn.Sequential(), (1,), torch.int8)
    with pytest.raises(InvalidProblem, match="tokens"):
        prepare(nn.Sequential(), tokens=0)
