"""The step link against a model of all that can happen to it, and bugs that the model must find."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tandem.errors import TandemError
from tests.link.model.link_machine import LinkMachine
from tests.link.model.planted_bugs import PLANTED
from tests.link.model.random_walk import walk
from tests.link.model.world import Parts

EVERYDAY = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
THOROUGH = settings(EVERYDAY, max_examples=50, stateful_step_count=80, derandomize=False)
NUM_WALKS = 15
NUM_THOROUGH_WALKS = 35
NUM_HUNTS = 60
"""Number of walks within which a planted bug must be found; the slowest is found in the 18th."""


def machine(window: int, parts: Parts | None = None) -> type[LinkMachine]:
    """Return the machine with a window and, where given, with planted parts."""
    attributes = {"window": window, "parts": parts or Parts()}
    return type(f"LinkMachineWindow{window}", (LinkMachine,), attributes)


def hunt(planted: type[LinkMachine]) -> None:
    """Walk until a walk fails, or give up."""
    for seed in range(NUM_HUNTS):
        walk(planted(), seed, 60)


@pytest.mark.parametrize("window", [1, 2, 4, 16], ids=lambda window: f"window{window}")
class TestLinkModel:
    def test_any_history_keeps_tokens_blocks_and_order(self, window):
        """
        Tokens follow from their prefix and no block has two owners, however messages are delayed,
        repeated or lost and whichever process dies or takes over.
        """
        run_state_machine_as_test(machine(window), settings=EVERYDAY)

    def test_dense_history_keeps_tokens_blocks_and_order(self, window):
        """
        The same holds over long histories in which much is under way when a fault strikes.
        """
        for seed in range(NUM_WALKS):
            walk(machine(window)(), seed, 60)

    @pytest.mark.slow
    def test_longer_histories_keep_tokens_blocks_and_order(self, window):
        """
        The same holds over more and longer histories, new ones in every run.
        """
        run_state_machine_as_test(machine(window), settings=THOROUGH)

    @pytest.mark.slow
    def test_longer_dense_histories_keep_tokens_blocks_and_order(self, window):
        """
        The same holds over more and longer ones of these histories.
        """
        for seed in range(NUM_WALKS, NUM_THOROUGH_WALKS):
            walk(machine(window)(), seed, 100)


class TestPlantedBugs:
    @pytest.mark.parametrize("bug", PLANTED)
    def test_planted_bug_is_found(self, bug):
        """
        A model with one planted bug in its parts does not pass.
        """
        with pytest.raises((AssertionError, TandemError, pytest.fail.Exception)):
            hunt(machine(4, PLANTED[bug]))
