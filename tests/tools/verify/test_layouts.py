"""Kernels that serve some layouts only, as those of a GPU do: what they refuse is noted, and the rest is compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from halved import OP, ToyBackend, toy

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import HostRunner, NumpyBackend
from skuda.registry import InvalidProblem, Registry
from skuda.registry.device import HOST
from skuda.registry.errors import Unaligned
from skuda.registry.source import resolve
from skuda.tools.verify.placement import LAYOUTS
from skuda.tools.verify.verification import verify


def has_gaps(x: Any) -> bool:
    return math.prod(x.shape) > 0 and not x.flags.c_contiguous


def is_unaligned(x: Any) -> bool:
    return bool(x.__array_interface__["data"][0] % 16)


class Selective(ToyBackend):
    """A backend whose kernels refuse some arrays `x` when they are asked, before they run."""

    def __init__(self, refuses: Any, error: type[InvalidProblem], field: str = "x") -> None:
        self.refuses, self.error, self.field = refuses, error, field

    def prepare(self, sku: Any, problem: Any, device: Any, choice: str = "") -> Any:
        refuses, error, field = self.refuses, self.error, self.field

        class Runner(HostRunner):
            def run(self, arrays: Any, stream: Any) -> Any:
                if isinstance(arrays.get("x"), np.ndarray) and refuses(arrays["x"]):
                    raise error(problem.op_name(), field, "an array", "lie otherwise")
                return super().run(arrays, stream)

        return Runner(problem, resolve(sku.source, sku.entry_point))


def found_of(backend: Selective, entry: str = "reference") -> Any:
    sku = toy(entry)
    registry = Registry([ToyBackend.spec, OP, sku], origin="toy")
    dispatcher = Dispatcher(registry, backends=(backend, NumpyBackend()))
    (found,) = verify(dispatcher, HOST, seed=3, skus=[sku.id]).skus
    return found


def test_an_argument_that_must_have_no_gaps_is_passed_without():
    found = found_of(Selective(has_gaps, InvalidProblem))
    assert (found.verdict, found.failures) == ("verified", ())
    assert found.note == "refuses gaps in x"
    assert set(found.layouts) == set(LAYOUTS), "the output still has gaps"


def test_a_wrong_kernel_that_refuses_gaps_is_found():
    found = found_of(Selective(has_gaps, InvalidProblem), "wrong_at_one_place")
    assert (found.verdict, found.failures[0].check, found.failures[0].at) == ("failed", "meaning", (2, 1))


@pytest.mark.parametrize("field", ["x", "n"], ids=["an array without gaps", "no array"])
def test_an_argument_that_is_refused_without_gaps_is_a_failure(field):
    found = found_of(Selective(lambda x: True, InvalidProblem, field))
    assert (found.verdict, found.failures[0].check) == ("failed", "meaning")
    assert found.failures[0].message.startswith("InvalidProblem: ")


def test_layouts_that_are_handed_on_are_noted_and_the_others_compared():
    found = found_of(Selective(is_unaligned, Unaligned))
    assert (found.verdict, found.failures) == ("verified", ())
    assert found.note == "arrays that are not aligned to 16 bytes are handed on to the next kernel"
    assert {"contiguous", "wide"} <= set(found.layouts)
    assert not {"misaligned", "crooked"} & set(found.layouts)


def test_a_wrong_kernel_that_hands_arrays_on_is_found():
    found = found_of(Selective(is_unaligned, Unaligned), "wrong_at_one_place")
    assert (found.verdict, found.failures[0].check) == ("failed", "meaning")


def test_a_kernel_that_hands_everything_on_is_not_verified():
    found = found_of(Selective(lambda x: True, Unaligned))
    assert found.verdict == "failed", "a case that no layout serves is an error"
