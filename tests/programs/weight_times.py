"""Time a linear layer with weights of 4, 8 and 16 bits beside other layers, and write the times as JSON.

    python tests/programs/weight_times.py --vllm LIBRARY --output docs/evidence/h200-weights.json

Times are medians in us of replays of a CUDA graph with one call, each after a flush of the cache. Codes of the
activation are given, and outputs are bf16. The kernels are those that plans choose. Of ours, all
results are compared with the definition, bit for bit; others must be within 1 % of theirs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from skuda.dispatch import Dispatcher
from skuda.kernels.linear import ScaledLinearDescriptor
from skuda.registry.device import HOST, Device
from skuda.tools.bench.lab import TorchLab
from skuda.tools.bench.timing import Measurement, Ready, WrongResult, prepared
from skuda.tools.bench.vllm import Vllm

Call = Callable[[], Tensor]
GROUP = 128
WEIGHTS = (
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
)
"""Rows and columns of layers of Llama 3 8B and 70B."""
ROWS = (1, 16, 64, 256, 1024, 4096)
_FOUR_BITS = 1125899907892224
"""The number that vLLM gives its element of 4 bits from -8 to 7, ``uint4b8``."""
_NEAR = 0.01
_WORDS = 1024
"""Words of Marlin's workspace: at least one for each multiprocessor."""


def _tinygemm(x: Tensor, levels: Tensor) -> Call:
    """Return torch's product of bf16 with 4-bit weights, (level - 8) / 64."""
    n, k = levels.shape
    pairs = levels[:, ::2] << 4 | levels[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.to(torch.uint8), 8)
    scales = torch.full((k // GROUP, n, 2), 1 / 64, dtype=x.dtype, device=x.device)
    scales[..., 1] = 0
    return partial(torch.ops.aten._weight_int4pack_mm, x, packed, GROUP, scales)


def _marlin(x: Tensor, levels: Tensor) -> Call:
    """Return vLLM's product of bf16 with 4-bit weights, (level - 8) / 64."""
    n, k = levels.shape
    words = torch.zeros(k // 8, n, dtype=torch.int32, device=x.device)
    for i in range(8):
        words |= levels.T[i::8].to(torch.int32) << 4 * i
    none, ops = torch.empty(0, dtype=torch.int32, device=x.device), torch.ops._C
    weight = ops.gptq_marlin_repack(words, none, k, n, 4, False)  # noqa: FBT003  vLLM's have no names
    scales = torch.full((k // GROUP, n), 1 / 64, dtype=x.dtype, device=x.device)
    space = torch.zeros(_WORDS, dtype=torch.int32, device=x.device)
    given = (x, None, weight, None, scales, None, None, None, None, None, space, _FOUR_BITS, len(x), n, k)
    return partial(ops.marlin_gemm, *given, True, False, True, False)  # noqa: FBT003  as above


def _rival(make: Callable[[], Call], want: Callable[[], Tensor], lab: TorchLab) -> Ready:
    """Capture a rival; its result must be within 1 % of what it stands for, in the norm of L2."""
    call, wanted = make(), want().double()
    error = float((call().double() - wanted).norm() / wanted.norm())
    if not error < _NEAR:
        raise WrongResult(f"its error is {error:.3f}")
    replay = lab.capture(call, careful=False)
    return Ready(replay, lab.measure([replay])[0])


def _ours(measured: Measurement, problem: ScaledLinearDescriptor) -> Ready:
    """Capture a plan, and compare what it writes."""
    inputs, outputs = measured.draw(problem)
    plan = measured.dispatcher.select(problem, device=measured.device)
    run = partial(plan.run, **inputs, **outputs)
    wrong = partial(measured.mismatch, problem, inputs, outputs)
    return measured.checked(run, partial(measured.lab.poison, outputs), wrong)


def _contestants(measured: Measurement, m: int, weight: Tensor, levels: Tensor, *, marlin: bool) -> dict[str, Any]:
    """Return what prepares each way for m rows."""
    (n, k), lab = weight.shape, measured.lab
    x = torch.randn(m, k, dtype=weight.dtype, device=weight.device)
    fields = {"m": m, "n": n, "k": k, "output_element": "bf16"}
    four, wide = {"weight_element": "s4", "group_size": GROUP}, {"activation_element": "s16"}
    ours = {"W4A8": four, "W8A8": {}, "W4A16": four | wide, "W8A16": wide, "W16A16": wide | {"weight_element": "s16"}}
    found: dict[str, Any] = {
        name: partial(_ours, measured, ScaledLinearDescriptor(**fields | how)) for name, how in ours.items()
    }
    found["bf16"] = partial(_rival, lambda: partial(functional.linear, x, weight), lambda: x @ weight.T, lab)
    rivals = {"torch, int4 x bf16": _tinygemm} | ({"Marlin, int4 x bf16": _marlin} if marlin else {})

    def want() -> Tensor:
        return x @ ((levels - 8.0) / 64).T.to(x.dtype)

    return found | {name: partial(_rival, partial(rival, x, levels), want, lab) for name, rival in rivals.items()}


def times(
    device: Device, weights: Iterable[tuple[int, int]], rows: Sequence[int], lab: TorchLab, vllm: Vllm, repeats: int
) -> list[dict[str, Any]]:
    """Return, for each weight and number of rows, the times by way, and why others have none."""
    measured, found = Measurement(Dispatcher(), device, lab, seed=1, repeats=repeats), []
    for n, k in weights:
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=lab.place)
        levels = torch.randint(16, (n, k), dtype=torch.uint8, device=lab.place)
        for m in rows:
            ready, refused = prepared(_contestants(measured, m, weight, levels, marlin=not vllm.away))
            us = {name: round(timing.median, 3) for name, timing in measured.timed(ready).items()}
            found.append({"n": n, "k": k, "m": m, "us": us, "refused": refused})
            sys.stderr.write(f"{found[-1]}\n")
            ready.clear()
            measured.tidy()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the first GPU, and write the record; without one, tiny weights on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="the library of vLLM, or the folder of its package")
    parser.add_argument("--repeats", type=int, default=20, help="rounds of each way")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(argv)
    if torch.cuda.is_available():
        device = Dispatcher().devices[0]
        lab, weights, rows = TorchLab(device), WEIGHTS, ROWS
    else:
        device, weights, rows = HOST, ((48, 256),), (1, 3)
        lab = TorchLab(device, 1 << 20, 1 << 20, 64)
    found = times(device, weights, rows, lab, Vllm.load(given.vllm), given.repeats)
    record = {"card": device.name, "group_size": GROUP, "times": found}
    given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if any(name[0] == "W" for each in found for name in each["refused"]) else 0


if __name__ == "__main__":
    sys.exit(main())
