"""Every configuration of a product's kernels on a CUDA device, against the reference; `skuda verify` tests the first.

The same kernels run at small sizes on the CPU in ``tests/kernels/test_hopper_on_cpu.py``; `docs/bench.md` has the
command that runs these on a GPU, where SKUDA_TEST_SEED draws the same problems again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from products import SHIFTS, a_problem
from support import fresh

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.registry import Case
from skuda.tools.verify.placement import LAYOUTS, placement_for
from skuda.tools.verify.trial import Examples, Trial

DISPATCHER = Dispatcher(tuning="")
DEVICE = DISPATCHER.devices[0]
MOST_CONFIGURATIONS = 8
PROBLEMS = [
    (op, shifts, variant)
    for op in ("quantized_linear", "scaled_linear", "smoothquant_linear")
    for shifts in SHIFTS
    for variant in ("streamed", "warpgroup")
    if op != "quantized_linear" or not shifts[0]
]
pytestmark = pytest.mark.skipif(DEVICE.compute_capability != (9, 0), reason="needs a Hopper GPU")


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize(("op", "shifts", "variant"), PROBLEMS)
def test_every_configuration_gives_the_bits_of_the_reference(op, shifts, variant, turn):
    rng = fresh(op, shifts, variant, turn)
    fewest, most = (192 if shifts[0] else 1, 700) if variant == "warpgroup" else (1, 32) if turn else (33, 128)
    problem = a_problem(op, shifts, rng, fewest=fewest, most=most, widest=1000, longest=12_000)
    kernels = [sku for sku in DISPATCHER.registry.skus_of(op) if sku.key == problem.key() and sku.variant == variant]
    sku = kernels[rng.integers(len(kernels))]
    preference = PlanPreference(sku=sku.id)
    choices = DISPATCHER.choices(sku, problem, DEVICE)
    assert len(choices) > 1
    asked = [str(each) for each in rng.permutation(choices)[:MOST_CONFIGURATIONS]]

    def planned(problem, choice):
        plan = DISPATCHER.select(problem, preference, DEVICE)
        known = choice in DISPATCHER.choices(sku, problem, DEVICE)
        return DISPATCHER.prepare(plan.model_copy(update={"choice": choice})) if known else plan

    class Configured(Trial):
        choice = ""

        def plan(self, problem):
            return planned(problem, self.choice)

    with ThreadPoolExecutor() as pool:  # compiles them side by side
        list(pool.map(lambda choice: planned(problem, choice), asked))
    case = Case(problem, "special" if rng.random() < 0.5 else "normal")
    examples = Examples(DISPATCHER.registry.ops[op], int(rng.integers(2**32)))
    example = examples.of(case)
    for choice in asked:
        trial = Configured(sku, DISPATCHER, DEVICE, placement_for(DEVICE), examples)
        trial.choice = choice
        trial.run(example, (LAYOUTS[rng.integers(len(LAYOUTS))],), rng)
        assert trial.failures == {}, (choice, sku.id)
        assert trial.cases_run == 1, choice
