"""A launch rule names kernels that its source has, in blocks and grids that a GPU takes, whatever the sizes are."""

from __future__ import annotations

import re

import pytest
from harness.binding import launch_of
from harness.resources import cases_of
from support import built_in_ops, fresh

from skuda.kernels.linear.problem import longest_k
from skuda.kernels.sources import read_source
from skuda.registry.arch import ArchSku
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem

# The last parenthesis of a macro's arguments, or none, and the name in front of the parameters.
_KERNEL = re.compile(r"^(?:KERNEL\(.*\)|[A-Z]+_KERNEL) (\w+)\(", re.MULTILINE)
_MOST = ((1 << 31) - 1, 65_535, 65_535)
_AXES = {"numel": 2, "m": 1, "n": 1, "c_out": 1, "k": 1, "d": 1, "outer_size": 1, "axis_size": 1}

EVERY = [
    pytest.param(sku, id=sku.id)
    for op in built_in_ops()
    for sku in {(sku.source, sku.element, sku.variant): sku for sku in op.skus if sku.launch}.values()
    if sku.arch is not ArchSku.CPU
    and not sku.arch.is_specific  # a warpgroup's launch is a tile's: see test_warpgroup.py
]


def _resized(problem, rng):
    """Return the problem with sizes of any magnitude, many of them a power of two or close to one."""

    def size(power):
        base = int(2 ** (rng.integers(0, 18) if rng.random() < 0.5 else rng.uniform(0, 17)))
        return max(1, (base + int(rng.integers(-2, 3)) * (rng.random() < 0.3)) ** power)

    fields = type(problem).model_fields
    change = {name: size(power) for name, power in _AXES.items() if name in fields}
    if "k" in change:  # no sum of u8 codes leaves s32
        change["k"] = min(change["k"], longest_k(ElementKind.U8, ElementKind.U8))
    if "shape" in fields:
        change["shape"] = tuple(size(1) for _ in problem.shape)
    along = next((name for name in ("axis_size", "d") if name in fields), None)
    if along and getattr(problem, "group_size", None):
        change["group_size"] = int(rng.integers(1, 300))
        change[along] = change["group_size"] * int(rng.integers(1, 300))
    try:
        return type(problem)(**problem.model_dump() | change)
    except InvalidProblem:  # more elements than there can be
        return problem


@pytest.mark.parametrize("sku", EVERY)
def test_a_launch_names_kernels_of_its_source_and_fits_a_gpu(sku):
    rng, cases = fresh(sku.id), cases_of(sku)
    source = read_source(sku.source)
    known = {
        name for text in (source.text, *(text for _, text in source.headers)) for name in _KERNEL.findall(text.decode())
    }
    devices = [KNOWN_DEVICES[name] for name in ("h200", "a100")] + [
        KNOWN_DEVICES["h200"].model_copy(update={"sm_count": 3})
    ]
    for _ in range(100):
        problem, device = _resized(cases[rng.integers(len(cases))].problem, rng), devices[rng.integers(len(devices))]
        for step in launch_of(sku, problem, device).steps:
            assert device.overlaps_launches or not step.overlaps, (step.entry, device.name)
            assert step.entry in known, f"{step.entry} for {problem!r}; {sku.source} has {sorted(known)}"
            assert all(1 <= extent <= most for extent, most in zip(step.grid, _MOST, strict=True)), (step.grid, problem)
            threads = step.block[0] * step.block[1] * step.block[2]
            assert 1 <= threads <= 1024, (step.block, problem)
