"""Ranks, stages and executors together give the tokens of one rank alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from tests.truth.matrix.cases import MATRIX, PAIRWISE, Case
from tests.truth.matrix.rank_processes import RankProcesses
from tests.truth.matrix.workload import check_case, references

NAMES = ("family", "tp", "pp", "dp")
EVERYDAY = Case(family="llama_tied_biased", tp=1, pp=2, dp=1)
"""The case that is not slow: two processes, in lanes."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Iterator[RankProcesses]:
    processes = RankProcesses(tmp_path_factory.mktemp("stores"))
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return references(tmp_path_factory.mktemp("models"))


def pairs(cases: list[Case]) -> set[tuple[object, ...]]:
    """Return the pairs of values that meet in any case."""
    return {
        (one, getattr(case, one), other, getattr(case, other))
        for case in cases
        for one, other in combinations(NAMES, 2)
    }


class TestCases:
    def test_pairwise_cases_cover_every_pair(self):
        """
        Any two values of any two of family, tp, pp and dp meet in a case of at most 8 processes.
        """
        assert EVERYDAY in PAIRWISE
        assert pairs(MATRIX) == pairs(PAIRWISE)
        assert 8 == max(case.num_processes for case in PAIRWISE)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case != EVERYDAY))
        for case in PAIRWISE
    ],
)
class TestTokens:
    def test_they_are_those_of_one_rank(self, case, processes, reference):
        """
        Greedy and seeded requests, with choices, penalties and log probabilities, that share
        prefixes, are preempted, swapped and computed again, get what one rank answers to each
        alone, and all ranks of an executor have the same tokens.
        """
        check_case(case, processes, *reference(case.family))
