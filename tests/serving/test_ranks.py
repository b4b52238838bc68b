"""Layers of vLLM have one output for any degree of tensor parallelism, bit for bit."""

from __future__ import annotations

import pytest
from processes import ran_on_ranks, returned
from support import fresh

COUNT = 4
DEGREES = (1, 2, 4)
CASES = ("schemes", "rows_with", "not_split", "floating", "four_bits", "sixteen_bits", "compiled", "gated", "head")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every case found on each of four processes, by its name and the number of ranks."""
    folder, seed = tmp_path_factory.mktemp("ranks"), int(fresh().integers(2**31))
    given, quiet = (folder, COUNT, seed), {"PYTHONWARNINGS": "ignore"}
    ranks = ran_on_ranks("rank_worker", {"every": given}, COUNT, folder, backend="", seconds=900, **quiet)
    return returned(ranks["every"])


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("case", CASES)
def test_every_degree_has_the_bits_of_one_rank(ranks, case, degree):
    for found in ranks:
        checks = found[f"{case} {degree}"]
        assert checks
        assert [number for number, right in enumerate(checks) if not right] == []


@pytest.mark.parametrize("degree", DEGREES)
def test_it_notices_maxima_of_one_rank_and_parts_that_are_rounded(ranks, degree):
    for found in ranks:
        assert found[f"faults {degree}"] == [degree == 1, True, degree == 1]
