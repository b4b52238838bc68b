"""`int4_weight`: its definition, the best of every group, what may not change a bit; and `from_grouped`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import fresh

from skuda.kernels.linear.packed import packed, unpacked
from skuda.registry import InvalidProblem
from skuda.torch.formats import levels
from skuda.torch.formats.int8 import quantized_weight
from skuda.torch.formats.weight import Difference
from skuda.torch.int4 import from_grouped, int4_weight

SIZES = (32, 64, 128, 0)


def weight_of(codes):
    """A weight whose s8 codes in `quantized_weight` are these, if a row has a code of 127 or -127."""
    return torch.from_numpy(np.asarray(codes, np.float32))


def rows(rng, n, k):
    """Codes of several kinds: normal, uniform, around a mean, multiples of a number, at the ends; each row has 127."""
    kinds = (
        lambda: rng.standard_normal(k) * rng.uniform(0.1, 60),
        lambda: rng.integers(-127, 128, k),
        lambda: rng.standard_normal(k) * 8 + rng.uniform(-110, 110, -(-k // 32)).repeat(32)[:k],
        lambda: rng.integers(1, 40) * rng.integers(-6, 7, k) + rng.integers(-20, 20),
        lambda: rng.integers(100, 128, k) * rng.choice([-1, 1], k),
        lambda: rng.choice(rng.integers(-127, 128, 3), k),
        lambda: rng.integers(-127, 128, -(-k // 32)).repeat(32)[:k],
    )
    codes = np.rint([kinds[i % len(kinds)]() for i in range(n)]).clip(-127, 127)
    codes[np.arange(n), rng.integers(0, k, n)] = 127
    return codes


def best(codes):
    """The error, scale and offset of a group by trial of all; a divisor of all differences above 17 is the scale."""
    divisor = np.gcd.reduce(codes - codes.min())
    if divisor == 0 or divisor > 17:
        return 0, divisor, codes.min()
    scale, offset = (each.reshape(-1, 1) for each in np.meshgrid(range(1, 18), range(127, -129, -1), indexing="ij"))
    grid = offset[..., None] + scale[..., None] * np.arange(16)
    distance = np.abs(np.where(grid > 127, 1000, grid) - codes[None, :, None]).min(2)
    error = (distance**2).sum(1)
    first = error.argmin()
    return error[first], scale[first, 0], offset[first, 0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 31, 256, 200])
def test_levels_scales_and_offsets_are_the_codes_of_the_packed_weight(size, k):
    """The last group may be shorter than the others."""
    rng = fresh(size, k)
    weight = weight_of(rows(rng, 21, k))
    made = int4_weight(weight, size)
    groups = -(-k // size) if size else 1
    assert [each.shape for each in made] == [(21, k), (21, groups), (21, groups), (21,)]
    assert [each.dtype for each in made] == [torch.uint8, torch.uint8, torch.int8, torch.float32]
    assert int(made.levels.max()) <= 15
    levels, scale, offset = (each.numpy().astype(int) for each in made[:3])
    at = np.arange(k) // (size or k)
    codes = levels * scale[:, at] + offset[:, at]
    assert codes.min() >= -128
    assert codes.max() <= 127
    assert np.array_equal(made.codes(), codes)
    assert np.array_equal(unpacked(packed(*(each.numpy() for each in made[:3]), size), 21, k), codes)
    assert torch.equal(made.channel_scale, quantized_weight(weight)[1])


def reaching(codes):
    """The smallest scale of which a level is 0 and all codes are near to one, and its offset, by trial of all."""
    divisor = np.gcd.reduce(codes - codes.min())
    if divisor == 0 or divisor > 17:
        return divisor, codes.min()
    for scale in range(1, 19):
        for below in range(min(15, 128 // scale) + 1):
            levels = scale * np.arange(-below, 16 - below)
            distance = np.abs(levels[levels <= 127] - codes[:, None]).min(1)
            if (2 * distance <= scale).all():
                return scale, -scale * below
    raise AssertionError("no scale reaches all codes")


@pytest.mark.parametrize("size", [32, 0])
def test_no_scale_and_offset_is_better(size):
    """Of equally good ones it is the smallest scale, then the largest offset."""
    rng = fresh(size)
    weight = weight_of(rows(rng, 28, 75))
    codes = quantized_weight(weight)[0].numpy().astype(int)
    made = int4_weight(weight, size)
    errors = (made.codes().numpy() - codes) ** 2
    for n, g in np.ndindex(made.group_scale.shape):
        group = slice(g * (size or 75), (g + 1) * (size or 75))
        found = errors[n, group].sum(), int(made.group_scale[n, g]), int(made.group_offset[n, g])
        if size:
            assert found == best(codes[n, group])
        else:
            assert found[1:] == reaching(codes[n])
            assert (4 * errors[n] <= found[1] ** 2).all()


def best_symmetric(codes):
    """The error of a group of multiples of a scale by trial of all, and the smallest best scale."""
    divisor = np.gcd.reduce(codes)
    if divisor > 18:
        return 0, divisor
    values = np.arange(-8, 8) * np.arange(1, 19)[:, None, None]
    distance = np.abs(np.where(values != values.astype(np.int8), 1000, values) - codes[:, None]).min(2)
    error = (distance**2).sum(1)
    return error.min(), 1 + error.argmin()


@pytest.mark.parametrize("size", SIZES)
def test_no_scale_of_a_symmetric_weight_is_better(size):
    rng = fresh(size)
    weight = weight_of(rows(rng, 28, 200)) * float(rng.uniform(0.01, 2))
    weight[3], weight[4] = 0, float(rng.standard_normal())
    codes, channel = (each.numpy() for each in quantized_weight(weight))
    made = int4_weight(weight, size, symmetric=True)
    short = (channel.view(np.int32) & -128).view(np.float32)
    common = made.channel_scale.numpy() / short  # a factor that all scales of a row have
    found = made.codes().numpy() * common[:, None]
    values = np.zeros((28, 200), np.int8)
    for n, g in np.ndindex(made.group_scale.shape):
        group = slice(g * (size or 200), (g + 1) * (size or 200))
        scale = int(made.group_scale[n, g] * common[n])
        error, step = best_symmetric(codes[n, group].astype(int))
        assert (((found[n, group] - codes[n, group]) ** 2).sum(), scale) == (error, step if scale else 0)
        assert scale or not found[n, group].any()
        values[n, group] = found[n, group] / max(scale, 1)
    again, difference = from_grouped(torch.from_numpy(values), made.group_scale * made.channel_scale[:, None])
    assert difference == Difference()
    assert all(map(torch.equal, again, made))


def test_a_code_between_two_levels_goes_to_the_lower():
    codes = [*range(0, 32, 2), *range(2, 32, 2), 11]
    made = int4_weight(weight_of([codes + [127] * 32]), 32)
    assert made.codes()[0, :32].tolist() == [*codes[:-1], 10]
    assert made.group_scale[0, 0] == 2


@pytest.mark.parametrize("size", SIZES)
def test_no_rows_around_and_no_batch_change_a_bit(size, monkeypatch):
    rng = fresh(size)
    weight = weight_of(rows(rng, 70, 300))
    made = int4_weight(weight, size)
    some = rng.permutation(70)[:9]
    assert all(torch.equal(one, all_[some]) for one, all_ in zip(int4_weight(weight[some], size), made, strict=True))
    monkeypatch.setattr(levels, "_MOST_GROUPS", int(rng.integers(1, 40)))
    assert all(map(torch.equal, int4_weight(weight, size), made))
    monkeypatch.setattr(levels, "_MOST_ELEMENTS", 1)
    assert all(map(torch.equal, int4_weight(weight, size), made))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_weight_has_the_bits_of_the_same_numbers_in_f32(dtype):
    weight = torch.from_numpy(fresh(dtype).standard_normal((9, 160)).astype(np.float32)).to(dtype)
    weight = torch.nn.Parameter(weight.T.contiguous().T)  # rows that are not contiguous, as of a transposed layer
    assert all(map(torch.equal, int4_weight(weight), int4_weight(weight.detach().float().contiguous())))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (0, 0)])
def test_an_empty_weight(size, shape):
    made = int4_weight(torch.empty(shape), size)
    assert made.codes().shape == shape
    assert made.group_scale.shape == (shape[0], -(-shape[1] // (size or max(shape[1], 1))))


@pytest.mark.parametrize(
    ("weight", "size", "field"),
    [
        (torch.ones(2, 64), 16, "group_size"),
        (torch.ones(2, 64), True, "group_size"),
        (torch.ones(2, 64), None, "group_size"),
        (torch.ones(2, 64, dtype=torch.float64), 64, "weight"),
        (torch.ones(64), 64, "weight"),
        (torch.ones(2, 64, dtype=torch.int8), 64, "weight"),
        (torch.tensor([[1.0, torch.nan]]), 64, "weight"),
        (torch.tensor([[1.0, 2.0], [torch.inf, 1.0]]), 0, "weight"),
    ],
)
def test_what_is_refused(weight, size, field):
    with pytest.raises(InvalidProblem) as caught:
        int4_weight(weight, size)
    assert caught.value.field == field


def grouped(rng, size, *, shifted, multiples=None):
    """Levels, scales and zero points of a random weight, and the weight in f64. The last group is shorter."""
    n, k = 9, 300
    count = -(-k // size) if size else 1
    levels = rng.integers(-8, 8, (n, k)).astype(np.int8)
    zeros = rng.integers(-8, 8, (n, count)).astype(np.int8) if shifted else np.zeros((n, count), np.int8)
    scales = np.exp(rng.standard_normal((n, count))).astype(np.float32) * rng.choice([-1, 1], (n, count))
    if multiples is not None:
        unit = torch.from_numpy(np.exp(rng.standard_normal((n, 1)))).bfloat16().double().numpy()
        scales = unit * rng.integers(*multiples, (n, count)) * rng.choice([-1, 1], (n, count))
    scales = scales.astype(np.float32)
    at = np.arange(k) // (size or k)
    weight = (levels.astype(int) - zeros[:, at]) * scales.astype(float)[:, at]
    zero_points = torch.from_numpy(zeros) if shifted else None
    return torch.from_numpy(levels), torch.from_numpy(scales), zero_points, weight


def value_of(made):
    return made.codes().numpy() * made.channel_scale.double().numpy()[:, None]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_multiples_of_a_channel_scale_are_kept_exactly(size, shifted):
    """There is room in s8 for multiples of 15 at least, and behind a zero point of 8."""
    rng = fresh(size, shifted)
    levels, scales, zero_points, weight = grouped(rng, size, shifted=shifted, multiples=(0, 9 if shifted else 16))
    made, difference = from_grouped(levels, scales, zero_points)
    assert difference == Difference()
    assert np.array_equal(value_of(made), weight)
    assert int(made.levels.max()) <= 15
    stored = (each.numpy() for each in made[:3])
    assert np.array_equal(unpacked(packed(*stored, size), *levels.shape), made.codes())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_other_scales_are_rounded_to_the_best_multiples(size, shifted):
    """No other channel scale that is tried gives a smaller sum of fourth powers of the largest errors of groups."""
    rng = fresh(size, shifted)
    levels, scales, zero_points, weight = grouped(rng, size, shifted=shifted)
    made, difference = from_grouped(levels, scales, zero_points)
    errors, root = value_of(made) - weight, np.sqrt((weight**2).mean())
    assert difference[:2] == pytest.approx((np.abs(errors).max() / root, np.sqrt((errors**2).mean()) / root), rel=1e-9)
    at = np.arange(levels.shape[1]) // size
    for n, row in enumerate(weight):
        wanted = np.abs(scales[n].numpy().astype(float))
        units = np.split(np.rint(row / wanted[at]), range(size, len(row), size))  # levels less their zero point
        ends = np.array([[each.min(), each.max()] for each in units])
        room = np.floor([min(128 / max(-low, 1), 127 / max(high, 1)) for low, high in ends])
        tight = (wanted / room).argmax()
        fractions, between = wanted[tight] / np.arange(1, room[tight] + 1), 1 + np.arange(64) / 64
        tried = np.float32([*fractions, *(wanted[tight] / room[tight] * between)]).astype(float)
        tries = [(np.rint(wanted / one).clip(max=room) * one - wanted) * np.abs(ends).max(1) for one in tried]
        found = [np.abs(each).max() for each in np.split(errors[n], range(size, len(row), size))]
        assert (np.array(found) ** 4).sum() == pytest.approx(min((each**4).sum() for each in tries), rel=1e-9)
        assert made.channel_scale[n] in tried


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("levels", torch.full((2, 64), 8, dtype=torch.int8)),
        ("levels", torch.zeros(2, 64)),
        ("levels", torch.zeros(64, dtype=torch.int8)),
        ("scales", torch.ones(2, 3)),
        ("scales", torch.ones(3, 2)),
        ("scales", torch.ones(2)),
        ("scales", torch.ones(2, 2, dtype=torch.float64)),
        ("scales", torch.full((2, 2), torch.inf)),
        ("zero_points", torch.zeros(2, 1, dtype=torch.int8)),
        ("zero_points", torch.zeros(2, 2)),
        ("zero_points", torch.full((2, 2), -9, dtype=torch.int8)),
    ],
)
def test_groups_that_are_refused(field, value):
    given = {
        "levels": torch.zeros(2, 64, dtype=torch.int8),
        "scales": torch.ones(2, 2),
        "zero_points": torch.zeros(2, 2, dtype=torch.int8),
    }
    with pytest.raises(InvalidProblem) as caught:
        from_grouped(**given | {field: value})
    assert (caught.value.subject, caught.value.field) == ("from_grouped", field)
