"""Log probabilities of every output token, where asked for, whatever happened meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions, PreemptionMode
from scheduler_svc.core.request.request import FinishReason
from tests.scheduler_svc.core.harness import GREEDY, Rig, geometry_of, small_config

BOLD = CoreOptions(schedule_conservativeness=0.0)
"""Options that admit whatever fits now, so that blocks run out."""


def submit(rig: Rig, num_top: int | None, **changes) -> int:
    """Submit a request that asks for log probabilities with `num_top` ids; None: for none."""
    sampling = replace(changes.pop("sampling", GREEDY), logprobs=num_top)
    return rig.submit(sampling=sampling, **changes)


def check(rig: Rig) -> None:
    """Check that every request was told the log probabilities of its own tokens, and no others."""
    for handle in rig.submitted:
        assert rig.expected_logprobs(handle) == rig.logprobs[handle], handle


@pytest.mark.parametrize("delay", [1, 2, 4])
class TestEveryToken:
    def test_asking_and_not_asking_side_by_side(self, delay):
        """
        Each request is told as much as it asked for, and one that did not ask is told nothing.
        """
        rig = Rig(delay=delay)
        for num_top in (0, None, 3, 20, None, 1):
            submit(rig, num_top, prompt_len=6, max_tokens=9)
        rig.run()
        check(rig)
        assert [9, 0, 9] == [len(rig.logprobs[handle]) for handle in range(3)]

    @pytest.mark.parametrize("mode", list(PreemptionMode))
    def test_after_preemption(self, delay, mode):
        """
        A request that loses its slot keeps what was under way, and is told of no token twice.
        """
        config = small_config(max_num_blocks=8, max_model_len=32)
        rig = Rig(
            config,
            delay=delay,
            options=replace(BOLD, preemption_mode=mode),
            geometry=geometry_of(config, num_host_blocks=16),
        )
        for num_top in (2, 0, None):
            submit(rig, num_top, prompt_len=8, max_tokens=20)
        rig.run()
        assert rig.core.stats().preemptions > 0
        check(rig)

    @pytest.mark.parametrize("steps", [1, 3, 6])
    def test_after_the_loss_of_the_executor(self, delay, steps):
        """
        Tokens computed again on another executor are told once.
        """
        rig = Rig(small_config(max_total_tokens=8), delay=delay)
        for num_top in (1, None, 2, 0):
            submit(rig, num_top, prompt_len=9, max_tokens=12)
        for _ in range(steps):
            rig.step()
        rig.lose_executor()
        rig.run()
        check(rig)

    def test_several_choices(self, delay):
        """
        Every choice of a request is told of its own tokens.
        """
        rig = Rig(delay=delay)
        submit(rig, 2, prompt_len=7, max_tokens=8, num_choices=3)
        submit(rig, None, prompt_len=3, max_tokens=8)
        rig.run()
        check(rig)
        assert 3 == len(
            {tuple(chosen for chosen, _ in rig.logprobs[choice]) for choice in range(3)}
        )

    def test_outputs_a_request_came_with_are_not_told(self, delay):
        """
        A resumed request is told of the tokens after those it came with.
        """
        rig = Rig(delay=delay)
        prior = (np.array([4, 5, 6], np.int32),)
        handle = submit(rig, 1, prompt_len=5, max_tokens=9, prior_outputs=prior)
        rig.run()
        check(rig)
        assert 6 == len(rig.logprobs[handle])

    def test_ended_requests_are_told_nothing_more(self, delay):
        """
        Log probabilities under way for a request that was ended are dropped with its tokens.
        """
        rig = Rig(delay=delay)
        handles = [submit(rig, 2, prompt_len=4, max_tokens=30) for _ in range(3)]
        for _ in range(6):
            rig.step()
        rig.core.end_handle(handles[1], FinishReason.CANCELLED, rig.now)
        rig.run()
        check(rig)
        assert len(rig.logprobs[handles[1]]) < 30

    def test_bad_row_takes_only_its_own(self, delay):
        """
        A row that fails alone is told nothing of that step; the other rows of its step are.
        """
        rig = Rig(delay=delay)
        submit(rig, 2, prompt_len=4, max_tokens=10)
        rig.step()
        rig.poisons_next = True
        failing = submit(rig, 2, prompt_len=6, max_tokens=10)
        submit(rig, 2, prompt_len=8, max_tokens=10)
        rig.run()
        assert [failing] == list(rig.failed)
        check(rig)
