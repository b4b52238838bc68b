"""`plan.bind` on the CPU checks the arguments once, and what it returns only runs the kernel."""

from __future__ import annotations

import numpy as np
import pytest
from support import dispatcher

from skuda.dispatch.host import binding as bind
from skuda.kernels.quantize import DynamicRangeQuantizeDescriptor, FakeQuantizeDescriptor
from skuda.registry import InvalidProblem

PROBLEM = FakeQuantizeDescriptor(numel=6, q_min=-128, q_max=127, input_element="f32")


@pytest.fixture
def plan():
    return dispatcher().select(PROBLEM, device=dispatcher().devices[-1])


def test_a_bound_call_reads_and_writes_the_same_arrays_every_time(plan, monkeypatch):
    x, y = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    bound = plan.bind(input=x, scale=0.5, zero_point=0, output=y)
    assert not y.any(), "nothing ran yet"
    monkeypatch.setattr(bind, "Binding", None)
    assert bound() is y
    np.testing.assert_array_equal(y, np.arange(6))
    x += 1
    assert bound() is y
    np.testing.assert_array_equal(y, np.arange(6) + 1)


def test_outputs_left_out_are_made_once():
    problem = DynamicRangeQuantizeDescriptor(n=2, d=4, q_min=-127, q_max=127, input_element="f32", output_element="s8")
    x = np.ones((2, 4), np.float32)
    bound = dispatcher().select(problem, device=dispatcher().devices[-1]).bind(input=x)
    first, second = bound(), bound()
    assert all(one is two for one, two in zip(first, second, strict=True))
    np.testing.assert_array_equal(first.output, 127)


def test_what_run_refuses_bind_refuses(plan):
    x = np.arange(6, dtype=np.float32)
    for bad in ({"scale": 0.0}, {"input": x[:5]}, {"stream": 1}):
        with pytest.raises(InvalidProblem):
            plan.bind(**{"input": x, "scale": 0.5, "zero_point": 0} | bad)


@pytest.mark.parametrize("reverse", ["input", "output", "both"])
def test_an_output_that_overlaps_an_input_is_refused_whatever_its_strides(plan, reverse):
    memory = np.arange(12, dtype=np.float32)
    before = memory.copy()
    given = {"input": memory[:6], "output": memory[5:11]}
    given |= {name: array[::-1] for name, array in given.items() if reverse in (name, "both")}
    with pytest.raises(InvalidProblem, match="overlaps input"):
        plan.run(**given, scale=0.5, zero_point=0)
    np.testing.assert_array_equal(memory, before)
    given["output"] = memory[6:][::-1] if reverse != "input" else memory[6:]
    assert plan.run(**given, scale=0.5, zero_point=0) is given["output"]


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 10**400, 0.5, np.int64(2**40)])
def test_a_number_that_its_element_cannot_hold_is_refused(plan, wrong):
    with pytest.raises(InvalidProblem, match=r"zero_point must be an integer in \[-2147483648, 2147483647\]"):
        plan.run(input=np.zeros(6, np.float32), scale=0.5, zero_point=wrong)
