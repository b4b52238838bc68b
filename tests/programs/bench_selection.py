"""Benchmarks of selection; `make bench` runs them. Ratios are what counts: machines differ."""

from __future__ import annotations

import itertools

import pytest
from toy import ToyDescriptor, toy_op, toy_sku

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.registry import ElementKind, EpilogueKind, Registry


def dispatcher_with(count):
    keys = itertools.product(range(10), ElementKind, ElementKind, EpilogueKind)
    # Turning element fastest keeps the number of kernels under one key small and the same for every size.
    skus = [
        toy_sku(element=element, aux_element=aux, epilogue=epilogue, variant=f"v{turn}")
        for turn, element, aux, epilogue in keys
    ]
    first = toy_sku(variant="first")
    return Dispatcher(Registry([toy_op(first, *skus[: count - 1])]), backends=[NumpyBackend()])


@pytest.mark.parametrize("count", [100, 10_000])
def test_first_selection(benchmark, count):
    dispatcher = dispatcher_with(count)
    sizes = itertools.count()
    benchmark(lambda: dispatcher.select(ToyDescriptor(m=next(sizes))))


def test_cached_selection(benchmark):
    dispatcher = Dispatcher(Registry([toy_op()]), backends=[NumpyBackend()])
    problem = ToyDescriptor()
    dispatcher.select(problem)
    benchmark(dispatcher.select, problem)


def test_cached_selection_compared_with_its_dict_lookup(benchmark):
    dispatcher = Dispatcher(Registry([toy_op()]), backends=[NumpyBackend()])
    problem = ToyDescriptor()
    dispatcher.select(problem)
    (key,) = dispatcher._plans
    benchmark(dispatcher._plans.get, key)


def test_explain_500(benchmark):
    dispatcher = dispatcher_with(500)
    problem = ToyDescriptor()
    told = benchmark(dispatcher.explain, problem)
    assert len(told.decisions) == 500
