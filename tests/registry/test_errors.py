"""Errors are one printable line for any value, and frozen records say what to do instead."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from skuda.registry import (
    FloatModeError,
    FrozenRecord,
    InvalidProblem,
    InvalidRecord,
    OutOfMemory,
    PrecisionGuarantee,
    PrecisionRequirement,
    SkudaError,
)
from skuda.registry.text import shown


class Rude:
    """A value whose `repr` fails."""

    def __repr__(self):
        raise RuntimeError("no")


class Loud:
    """A value whose `repr` would move the cursor."""

    def __repr__(self):
        return "\x1b[2Jred\nsecond line\u202e"


VALUES = [
    "\x1b[31m\n\r\0\x7f\u2028\udc80",
    b"y" * 100_000,
    10**5000,
    [10**5000],
    {n: [n] for n in range(1000)},
    [[[[[[["deep"]]]]]]],
    np.zeros((1000, 1000)),
    [Rude()],
    Loud(),
    int,
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_any_value_is_shown_in_one_short_line(value):
    for error in (
        InvalidProblem("subject", "field", shown(value), "be another"),
        InvalidProblem("subject", shown(value) * 100, shown(value) * 100, "be another"),
        InvalidRecord("subject", "field", "value", shown(value) * 100_000),
    ):
        assert str(error).isprintable()
        assert len(str(error)) < 2500
        again = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
        assert (str(again), again.args) == (str(error), error.args)
    with pytest.raises(InvalidRecord) as caught:
        PrecisionGuarantee(math_precision=value, accumulator="f32")
    assert caught.value.field == "math_precision"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_what_is_short_is_shown_whole():
    for value in ("f32", 3, (1, 2, 3), [1.5], {"a": 1}, None, True, -0.0, range(3), int):
        assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "error",
    [
        FrozenRecord("Plan", "sku"),
        FloatModeError("rounds upward", "call fesetround(FE_TONEAREST)"),
        OutOfMemory("fill", "output", 1 << 62),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_data_when_it_is_pickled(error):
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    assert isinstance(again, SkudaError)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_record_never_changes():
    record = PrecisionGuarantee(math_precision="f32", accumulator="f32")
    before = copy.deepcopy(record)
    with pytest.raises(
        FrozenRecord, match=r"PrecisionGuarantee is frozen: .* model_copy\(update={'deterministic': ...}"
    ):
        record.deterministic = False
    with pytest.raises(AttributeError, match="frozen"):
        record.unknown = 1
    with pytest.raises(FrozenRecord, match="model_copy"):
        del record.deterministic
    assert record == before
    assert record.model_copy(update={"deterministic": False}).deterministic is False


@pytest.mark.parametrize("wrong", [1, 0.0, "true", [True], np.array(1)])
def test_a_flag_is_true_or_false(wrong):
    for make in (
        lambda: PrecisionGuarantee(math_precision="f32", accumulator="f32", deterministic=wrong),
        lambda: PrecisionRequirement(deterministic=wrong),
    ):
        with pytest.raises(InvalidRecord, match="deterministic must be true or false"):
            make()
    assert PrecisionRequirement(deterministic=np.True_).deterministic is True
    assert PrecisionRequirement(deterministic=None).deterministic is None
