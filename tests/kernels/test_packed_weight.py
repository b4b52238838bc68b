"""Packed 4-bit weights: the codes come back, what does not fit is counted, and slices are weights of their own."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
from harness import emulator
from harness.binding import launch_of, run_steps
from support import Guarded, assert_same_bits, dispatcher, fresh, run

from skuda.kernels.linear import pack_weight, packed, unpack_weight
from skuda.kernels.linear.pack_weight import PackWeightDescriptor
from skuda.kernels.linear.unpack_weight import UnpackWeightDescriptor
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.errors import InvalidProblem

LOWEST = {"s8": -8, "u8": 0}
EACH = pytest.mark.parametrize(("element", "group_size"), [(e, g) for e in LOWEST for g in (0, *packed.GROUP_SIZES)])
plainly = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")


def problem_of(rng, element, group_size, n=None, k=None):
    """Return a problem of any size."""
    n, k = n or int(rng.integers(1, 60)), k or int(rng.integers(1, 700))
    return PackWeightDescriptor(n=n, k=k, code_element=element, group_size=group_size)


def meant(problem, inputs):
    """Return w of every code, by the formula."""
    of = np.arange(problem.k) // (problem.group_size or problem.k)
    scale, offset = (inputs[name].astype(np.int64)[:, of] for name in ("group_scale", "group_offset"))
    return inputs["codes"] * scale + offset


def unpacked(weight, n, k):
    """Return the codes of a packed weight, by the op."""
    problem = UnpackWeightDescriptor(n=n, k=k, group_size=packed.group_of(weight.shape[2]))
    return run(problem, {"packed": weight})["output"]


@EACH
def test_codes_that_fit_come_back(element, group_size):
    rng = fresh(element, group_size)
    problem = problem_of(rng, element, group_size)
    inputs = pack_weight.draw(problem, "normal", rng)
    assert (inputs["group_scale"] < 0).any() or inputs["group_scale"].size < 9
    found = run(problem, inputs)
    assert found["misfits"].tolist() == [0]
    assert_same_bits(unpacked(found["output"], problem.n, problem.k), meant(problem, inputs).astype(np.int8))


LARGE = 2**31 - 1


@pytest.mark.parametrize(
    ("scale", "offset", "others", "code", "misfits"),
    [
        *((255, -128, 0, 1, 0), (255, -128, 0, 2, 1), (256, -128, 0, 0, 128), (17, -128, 0, 15, 0)),
        *((17, -127, 0, 15, 1), (-17, 127, 0, 15, 0), (-17, 126, 0, 0, 128), (-255, 3697, 15, 14, 0)),
        *((-255, 3697, 15, 13, 1), (-256, 3712, 15, 15, 128), (0, 127, 0, 15, 0), (0, 128, 0, 0, 128)),
        *((0, -128, 0, 9, 0), (0, -129, 0, 0, 128), (1, 0, 0, 16, 1), (1, 127, 0, 1, 1), (LARGE, 0, 0, 0, 128)),
        *((-LARGE - 1, 0, 0, 0, 128), (1, LARGE, 0, 0, 128), (1, -LARGE - 1, 0, 15, 128), (-1, LARGE, 0, 0, 128)),
    ],
)
def test_ends_of_what_fits(scale, offset, others, code, misfits):
    codes = np.full((1, 128), others, np.uint8)
    codes[0, 77] = code
    of_group = [np.array([[number]], np.int32) for number in (scale, offset)]
    inputs = {"codes": codes, "group_scale": of_group[0], "group_offset": of_group[1]}
    found = run(PackWeightDescriptor(n=1, k=128, code_element="u8"), inputs)
    assert found["misfits"].tolist() == [misfits]
    if not misfits:
        assert unpacked(found["output"], 1, 128)[0, [0, 77]].tolist() == [
            others * scale + offset,
            code * scale + offset,
        ]


@pytest.mark.parametrize("axis", ["n", "k"])
def test_a_cut_has_the_codes_of_its_rows_or_elements(axis):
    """Parts may be empty, and the last one ends where the weight does."""
    rng = fresh(axis)
    unit, (n, k) = {"n": 16, "k": 128}[axis], (int(rng.integers(33, 90)), int(rng.integers(257, 700)))
    problem = PackWeightDescriptor(n=n, k=k, code_element="u8", group_size=64)
    weight = run(problem, pack_weight.draw(problem, "normal", rng))["output"]
    total, codes = {"n": n, "k": k}[axis], unpacked(weight, n, k)
    ends = [0, *sorted(unit * rng.integers(0, total // unit + 1, 4)), total, total]
    assert packed.fits(axis, np.diff(ends).tolist())
    for start, stop in itertools.pairwise(map(int, ends)):
        part = packed.cut(weight, axis, start, stop)
        assert part.base is not None
        want = codes[start:stop] if axis == "n" else codes[:, start:stop]
        assert part.shape == packed.shape_of(*want.shape, 64) if want.size else part.size == 0
        assert_same_bits(unpacked(part, *want.shape), want)


@pytest.mark.parametrize(
    ("axis", "start", "stop"),
    [
        ("n", 8, 16),
        ("n", 0, 8),
        ("n", -16, 16),
        ("n", 32, 16),
        ("n", 0, 65),
        ("k", 64, 128),
        ("k", 0, 64),
        ("k", 0, 257),
    ],
)
def test_a_cut_within_a_unit_is_refused(axis, start, stop):
    with pytest.raises(InvalidProblem) as caught:
        packed.cut(np.zeros(packed.shape_of(60, 200, 32), np.uint8), axis, start, stop)
    assert caught.value.field == axis


def test_what_is_behind_the_weight_is_zero():
    ones = np.ones((1, 1), np.int32)
    inputs = {"codes": np.ones((1, 1), np.int8), "group_scale": ones, "group_offset": ones}
    problem = PackWeightDescriptor(n=1, k=1, code_element="s8", group_size=32)
    found = run(problem, inputs)["output"]
    assert np.flatnonzero(found).tolist() == [0, 1024, 1025]
    assert found[0, 0, [0, 1024, 1025]].tolist() == [9, 1, 128 + 1 - 8]


@pytest.mark.parametrize("group_size", [-32, 1, 16, 33, 256, 32.0, "32", True, None])
def test_other_sizes_of_groups_are_refused(group_size):
    for op, more in (("pack_weight", {"code_element": "s8"}), ("unpack_weight", {})):
        with pytest.raises(InvalidProblem) as caught:
            dispatcher().describe(op, n=1, k=1, group_size=group_size, **more)
        assert caught.value.field == "group_size"
    with pytest.raises(InvalidProblem, match="group_size must be 32, 64 or 128, which also stands for whole rows"):
        UnpackWeightDescriptor(n=1, k=1, group_size=0)


@plainly
@pytest.mark.parametrize("count", [0, 7, LARGE, LARGE + 1, 2**40])
def test_more_misfits_than_an_s32_holds_are_its_largest_number(count):
    problem = PackWeightDescriptor(n=0, k=0, code_element="s8")
    sku = next(sku for sku in pack_weight.OP.skus if sku.arch != "cpu")
    launch = launch_of(sku, problem, KNOWN_DEVICES["h200"])
    assert [step.entry for step in launch.steps] == ["pack_weight_misfits"], "also where there is no code"
    zeros, misfits = np.array([count], np.uint64), np.full(1, -1, np.int32)
    given = [("p", array.ctypes.data) for array in (zeros, misfits)]
    emulator.load(emulator.Unit.of(sku)).launch("pack_weight_misfits", (1, 1, 1), (1, 1, 1), 0, given)
    assert (misfits.tolist(), zeros.tolist()) == ([min(count, LARGE)], [0])
    assert run(problem, pack_weight.draw(problem, "normal", fresh()))["misfits"].tolist() == [0]


@plainly
@pytest.mark.parametrize("op", [pack_weight.OP, unpack_weight.OP], ids=lambda op: op.name)
def test_bytes_may_begin_anywhere(op):
    rng = fresh(op.name)
    case = next(case for case in op.cases if case.problem.k == 420)
    inputs = op.draw(case.problem, "special", rng)
    sku, want = next(sku for sku in op.skus if sku.arch != "cpu"), run(case.problem, inputs)
    launch = launch_of(sku, case.problem, KNOWN_DEVICES["h200"])
    shapes = {argument.name: argument.shape for argument in case.problem.arguments()}
    for begin in (0, 1, 4, 8, 15):
        placed = {
            name: Guarded(array.shape, array.dtype, offset=begin * array.itemsize) for name, array in want.items()
        }
        placed |= {n: Guarded(a.shape, a.dtype, offset=begin * a.itemsize).fill(a) for n, a in inputs.items()}
        run_steps(emulator.load(emulator.Unit.of(sku)), launch, case.problem, placed, shapes)
        for name, array in want.items():
            assert_same_bits(placed[name].array, array, f"{name} from {begin} on")
            placed[name].assert_only_elements_written()
