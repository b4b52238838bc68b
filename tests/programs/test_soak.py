"""The soak finds planted faults."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import TESTS
from support import SEED, sampled

RUN, DESCRIBE = "numpy.HostRunner.run", "dispatcher.Dispatcher.describe"
PLANTED = {
    "a wrong value": ("values", RUN, "lambda *_: np.float32(3)", "Error"),
    "a hang": ("values", "planner.Planner._made", "lambda *_: time.sleep(1000)", "Timeout"),
    "a raw error": ("mistakes", DESCRIBE, "lambda *_, **__: {}['raw']", "Fault: a raw KeyError"),
    "an error that is too long": ("mistakes", DESCRIBE, "refusing", "Fault: a long or unprintable error"),
    "another cubin": (
        "cache",
        "cache.CubinCache.get",
        "lambda *_, **__: cache.Found(b'')",
        "Fault: the cache gave another",
    ),
}
PLANT = """
import random, sys, time
import numpy as np
import soak
from skuda.dispatch import dispatcher, planner
from skuda.dispatch.backends import numpy
from skuda.dispatch.compile import cache
from skuda.registry.errors import InvalidProblem

def refusing(*_, **__):
    raise InvalidProblem("x" * 9000, "y", "z", "w")

soak.PATIENCE = {patience}
{target} = {fault}
print(soak.one_round({scenario!r}, [{seed}, 1], 1.0))
"""


def _soak(*words):
    command = [sys.executable, TESTS / "programs" / "soak.py", "--seed", str(SEED), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("scenario", sampled(["values", "mistakes", "cache"], 1))
def test_a_short_round_of_each_scenario_finds_nothing(scenario):
    done = _soak("--seconds", "1", "--jobs", "1", "--only", scenario)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("scenario", "target", "fault", "seen"), sampled([pytest.param(*it, id=name) for name, it in PLANTED.items()], 1)
)
def test_a_planted_fault_makes_a_round_fail(scenario, target, fault, seen):
    # The other scenarios end by themselves; one of them first loads torch.
    patience = 2 if scenario == "values" else 60
    code = PLANT.format(scenario=scenario, target=target, fault=fault, seed=SEED, patience=patience)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS / "programs", capture_output=True, text=True, check=False
    )
    assert done.returncode != 0, done.stdout
    assert seen in done.stderr, done.stderr
