"""Rows in other batches: what is picked, that it is a problem of its own, and that a kernel that looks is caught."""

from __future__ import annotations

import numpy as np
import planted
import pytest
from planted import Fault, dispatcher_of, sku_of
from support import SEED, assert_same_bits, draw, fresh, run

from skuda.kernels.attention import attention, rope_quantize_append
from skuda.registry.device import HOST
from skuda.registry.op import Case
from skuda.tools.verify.batches import alone, batches_of, poisoned
from skuda.tools.verify.checks import perform
from skuda.tools.verify.placement import HostPlacement
from skuda.tools.verify.trial import Examples, Trial

OPS = {"attention": attention.OP, "append": rope_quantize_append.OP}
MORE = {"attention": {"quantized": False}, "append": {"most_positions": 380}}
BASES = {"attention": "attention.f32.plain", "append": "rope_quantize_append.f32.plain"}


def several(op):
    """The cases of an op that have several sequences with some rows."""
    return [case for case in op.cases if case.problem.sequences > 1 and case.problem.tokens > 4]


@pytest.mark.parametrize("name", OPS)
def test_sequences_in_any_order_and_pages_have_the_same_bits(name):
    op = OPS[name]
    for case in several(op):
        rng = fresh(name, case)
        inputs = draw(op, case, rng).inputs
        first = run(case.problem, inputs)
        batches = list(batches_of(case.problem, inputs, rng))
        assert [batch.problem.sequences < case.problem.sequences for batch in batches] == [False, True]
        for batch in batches:
            found = run(batch.problem, poisoned(batch.problem, batch.inputs(inputs), rng))
            want = batch.wanted(inputs, first)
            assert want.keys() == found.keys()
            for output, array in found.items():
                assert_same_bits(array, want[output], f"{output}, {batch.how}")


@pytest.mark.parametrize("case", several(attention.OP), ids=str)
def test_rows_alone_have_the_same_bits_as_beside_others(case):
    rng = fresh("alone", case)
    inputs = draw(attention.OP, case, rng).inputs
    rows = rng.permutation(case.problem.tokens)[:9]
    batch = alone(case.problem, inputs, rows)
    assert batch.problem.pages <= case.problem.pages
    found = run(batch.problem, poisoned(batch.problem, batch.inputs(inputs), rng))
    for name, array in run(case.problem, inputs).items():
        assert_same_bits(found[name], array[rows], name)


def of_the_first(p, arrays, named):
    """Change what belongs to the first sequence of a batch, whichever it is."""
    end = int(arrays["starts"][1])
    arrays[named][:end] = -arrays[named][:end]


def of_a_page(p, arrays, named):
    """Let rows depend on where pages lie."""
    arrays[named][: p.tokens] *= np.float32(1 + int(arrays["block_table"][0, 0]))


def of_a_slot(p, arrays, named):
    """Read the slot behind the last key of each sequence."""
    for s, length in enumerate(arrays["lengths"].tolist()):
        if length % 128:
            behind = arrays["k_codes"][arrays["block_table"][s, length // 128], 0, length % 128, 0]
            arrays[named][arrays["starts"][s] : arrays["starts"][s + 1]] += np.float32(behind)


WRONG = [
    ("attention", of_the_first, "output"),
    ("attention", of_a_page, "output"),
    ("attention", of_a_slot, "output"),
    ("append", of_the_first, "q_scale"),
    ("append", of_a_page, "q_scale"),
]


@pytest.mark.parametrize(("base", "change", "named"), [*WRONG, *((base, None, "") for base in BASES)])
def test_a_kernel_that_looks_at_its_batch_is_caught(base, change, named, monkeypatch):
    def kernel(problem, **arrays):
        OPS[base].reference(problem, **arrays)
        if change is not None:
            with np.errstate(all="ignore"):
                change(problem, arrays, named)

    monkeypatch.setitem(planted.BASES, base, BASES[base])
    # Any distance from the reference, so that only the batches tell.
    monkeypatch.setitem(planted.FAULTS, "looks", Fault(base, "batch_invariant", kernel, max_ulp=None))
    sku = sku_of("looks")
    dispatcher = dispatcher_of(sku)
    examples = Examples(dispatcher.registry.ops[sku.op], SEED)
    like = next(case.problem for case in several(OPS[base]) if case.problem.key() == sku.key)
    sizes = {"sequences": 9, "pages": 30, "most_blocks": 3}
    more = tuple(Case(like.model_copy(update=sizes | {"tokens": tokens} | MORE[base])) for tokens in range(70, 73))
    numbers = range(len(OPS[base].cases), len(OPS[base].cases) + len(more))
    trial = Trial(sku, dispatcher, HOST, HostPlacement(), examples, more=more, only=numbers)
    perform(trial, "batch_invariant")
    assert trial.checks["batch_invariant"] == ""
    if change is None:
        assert trial.failures == {}, f"with seed {SEED}"
    else:
        failure = trial.failures["batch_invariant"]
        assert (failure.output, failure.problem != "") == (named, True)
        assert "give other bits" in failure.message
