"""`int4_weight`: its definition, the best scale and offset of every group, and what may not change a bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import fresh

from skuda.kernels.linear.packed import packed, unpacked
from skuda.registry import InvalidProblem
from skuda.torch import int4
from skuda.torch.int4 import int4_weight
from skuda.torch.int8_linear import quantized_weight

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


@pytest.mark.parametrize("size", [32, 0])
def test_no_scale_and_offset_is_better(size):
    """Of equally good ones it is the smallest scale, then the largest offset."""
    rng = fresh(size)
    weight = weight_of(rows(rng, 56, 75))
    codes = quantized_weight(weight)[0].numpy().astype(int)
    made = int4_weight(weight, size)
    errors = (made.codes().numpy() - codes) ** 2
    for n, g in np.ndindex(made.group_scale.shape):
        group = slice(g * (size or 75), (g + 1) * (size or 75))
        found = errors[n, group].sum(), int(made.group_scale[n, g]), int(made.group_offset[n, g])
        assert found == best(codes[n, group])


def test_a_code_between_two_levels_goes_to_the_lower():
    codes = [*range(0, 32, 2), *range(2, 32, 2), 11]
    made = int4_weight(weight_of([codes + [127] * 32]), 32)
    assert made.codes()[0, :32].tolist() == [*codes[:-1], 10]
    assert made.group_scale[0, 0] == 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("values", [(-127, 0, 127), (-127, 127), (127,), (-113, -53, 67, 127)])
def test_a_weight_of_few_values_is_exact(size, values):
    """Such as one of -1, 0 and 1, and one whose elements are all equal."""
    rng = fresh(size, values)
    weight = weight_of(rng.choice(values, (5, 256))) * float(rng.uniform(0.01, 2))
    codes, scale = quantized_weight(weight)
    made = int4_weight(weight, size)
    assert torch.equal(made.codes(), codes)
    assert torch.equal(made.channel_scale, scale)
    if len(values) == 1:
        assert not made.group_scale.any()


def test_a_row_of_zeros_has_codes_of_zero():
    made = int4_weight(torch.zeros(3, 130))
    assert not made.codes().any()
    assert not made.group_scale.any()
    assert made.channel_scale.tolist() == [1, 1, 1]


def test_an_outlier_costs_only_its_group():
    rng = fresh()
    weight = torch.from_numpy(rng.standard_normal((8, 512)).astype(np.float32))
    weight[:, 5] = 30
    made = int4_weight(weight, 64)
    errors = (made.codes() * made.channel_scale[:, None] - weight).abs()
    half = made.group_scale.float().mul(made.channel_scale[:, None] / 2).repeat_interleave(64, 1)
    inside = made.levels.ne(0) & made.levels.ne(15)
    assert (errors <= half + made.channel_scale[:, None]).logical_or(~inside).all()
    assert made.group_scale[:, 1:].max() < made.group_scale[:, 0].min()


@pytest.mark.parametrize("size", SIZES)
def test_neither_the_rows_around_nor_the_size_of_a_batch_changes_a_bit(size, monkeypatch):
    rng = fresh(size)
    weight = weight_of(rows(rng, 70, 300))
    made = int4_weight(weight, size)
    some = rng.permutation(70)[:9]
    assert all(torch.equal(one, all_[some]) for one, all_ in zip(int4_weight(weight[some], size), made, strict=True))
    monkeypatch.setattr(int4, "_MOST_GROUPS", int(rng.integers(1, 40)))
    assert all(map(torch.equal, int4_weight(weight, size), made))
    monkeypatch.setattr(int4, "_MOST_ELEMENTS", 1)
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
