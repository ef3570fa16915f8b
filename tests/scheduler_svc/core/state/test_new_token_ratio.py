"""Output that running requests are expected to produce, and the room this leaves for others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.state.new_token_ratio import (
    CLIP_MAX_NEW_TOKENS,
    AdmissionBudget,
    NewTokenRatio,
    lasts,
)
from tests.scheduler_svc.core.harness import Rig, small_config

AN_EOS = frozenset({99})
"""EOS ids of requests that might end early and never do, since tokens are below 50."""


def columns(generated, max_new, prompt=5, running=True):
    """Return slots of requests with so many outputs of so many allowed."""
    prompt_len = np.full(len(generated), prompt, np.int32)
    known = prompt_len + np.array(generated, np.int32)
    stop_len = prompt_len + np.array(max_new, np.int32)
    return SimpleNamespace(
        admitted=SimpleNamespace(prompt_len=prompt_len, stop_len=stop_len),
        tokens=SimpleNamespace(known=known),
        running=np.full(len(generated), running, np.bool_) & np.ones_like(known, np.bool_),
    )


class TestRatio:
    @pytest.mark.parametrize(
        ("conservativeness", "init", "lowest", "decay"),
        [
            (0.0, 0.0, 0.0, 0.0),
            (0.3, 0.21, 0.0294, 0.000301),
            (1.0, 0.7, 0.098, 0.00100333),
            (1.3, 0.91, 0.1274, 0.00130433),
            (1.4286, 1.0, 0.14, 0.00143333),
            (5.0, 1.0, 0.14, 0.00143333),
        ],
    )
    def test_conservativeness_scales_start_and_end(self, conservativeness, init, lowest, decay):
        """
        The ratio starts at 0.7 times the conservativeness, at most 1, and may fall to 0.14 of that
        in 600 decode steps.
        """
        ratio = NewTokenRatio(conservativeness)
        # Each bound is the last decimal of its number above.
        assert pytest.approx(init, abs=1e-4) == ratio.init
        assert pytest.approx(lowest, abs=1e-5) == ratio.min
        assert pytest.approx(decay, abs=1e-6) == ratio.decay

    def test_it_falls_linearly_and_stops(self):
        """
        Each decode step lowers the ratio by the same amount; after 600 it stays where it is.
        """
        ratio = NewTokenRatio(1.0)
        assert [0.7, 0.7 - 0.602 / 600] == pytest.approx([ratio.at(0), ratio.at(1)])
        assert pytest.approx(0.7 - 0.602 / 2) == ratio.at(300)
        assert [0.098] * 3 == pytest.approx([ratio.at(step) for step in (600, 601, 10_000)])

    def test_it_equals_the_ratio_stepped_one_by_one(self):
        """
        The ratio computed from a count of steps is the one that subtracting in each step gives.
        """
        ratio, stepped = NewTokenRatio(1.3), 0.91
        for step in range(1, 700):
            stepped = max(stepped - ratio.decay, ratio.min)
            assert pytest.approx(stepped) == ratio.at(step)

    def test_idleness_starts_it_over(self):
        """
        The ratio is back where it began when nothing is left to do, and falls from there.
        """
        ratio = NewTokenRatio(1.0)
        ratio.reset(450)
        assert 0.7 == ratio.at(450)
        assert pytest.approx(0.7 - ratio.decay) == ratio.at(451)

    def test_retraction_expects_twenty_tokens_more_of_each_survivor(self):
        """
        The new ratio is (tokens generated + 20 per survivor) / (tokens allowed) of the survivors.
        """
        ratio = NewTokenRatio(1.0)
        slots = columns([10, 30, 99], [100, 200, 100])
        slots.running = np.array([True, True, False])
        ratio.note_retraction(slots, 50)
        assert pytest.approx((40 + 2 * 20) / 300) == ratio.at(50)
        assert pytest.approx(80 / 300 - ratio.decay) == ratio.at(51)

    def test_after_a_retraction_it_is_at_most_one(self):
        """
        Survivors about to end are expected to use no more than they may.
        """
        ratio = NewTokenRatio(1.0)
        ratio.note_retraction(columns([9], [10]), 0)
        assert 1.0 == ratio.at(0)

    def test_no_survivors_divide_nothing(self):
        """
        The ratio is 1 without survivors.
        """
        ratio = NewTokenRatio(1.0)
        ratio.note_retraction(columns([], []), 0)
        assert 1.0 == ratio.at(0)

    def test_a_ratio_under_the_lowest_stays_until_the_next_step(self):
        """
        A retraction may set it under its lowest value; the next step lifts it there.
        """
        ratio = NewTokenRatio(1.0)
        ratio.note_retraction(columns([0], [1000]), 7)
        assert pytest.approx(0.02) == ratio.at(7)
        assert pytest.approx(0.098) == ratio.at(8)


class TestBudget:
    def test_running_requests_reserve_a_share_of_what_they_may_still_produce(self):
        """
        The reserve is the ratio times the tokens left, each request's clipped at 4,096.
        """
        slots = columns([10, 0], [100, 9000])
        budget = AdmissionBudget.of(slots, 0.5)
        assert 0.5 * (90 + CLIP_MAX_NEW_TOKENS) == budget.reserved

    def test_who_does_not_run_reserves_nothing(self):
        """
        Slots that do not run reserve nothing.
        """
        assert 0 == AdmissionBudget.of(columns([1], [50], running=False), 1.0).reserved

    @pytest.mark.parametrize(("available", "fits"), [(75, False), (76, True)])
    def test_a_newcomer_is_charged_its_prompt_and_all_it_may_produce(self, available, fits):
        """
        A request fits when uncached prompt plus max_tokens, unscaled, is under what is left.
        """
        budget = AdmissionBudget.of(columns([10], [50]), 0.5)
        assert fits is budget.fits(available, extend_len=15, max_new=40)

    def test_a_newcomers_output_is_clipped_too(self):
        """
        No request is charged more than 4,096 tokens of output.
        """
        budget = AdmissionBudget(0.0)
        assert budget.fits(CLIP_MAX_NEW_TOKENS + 11, extend_len=10, max_new=1_000_000)
        assert not budget.fits(CLIP_MAX_NEW_TOKENS + 10, extend_len=10, max_new=1_000_000)

    def test_who_was_admitted_in_this_step_reserves_unscaled(self):
        """
        Two newcomers of one step are both charged in full.
        """
        budget = AdmissionBudget(0.0)
        budget.charge(40)
        assert not budget.fits(60, extend_len=5, max_new=15)
        assert budget.fits(61, extend_len=5, max_new=15)


class TestLasts:
    @pytest.mark.parametrize(
        ("free", "left", "held", "expected"),
        [
            (21, [10, 10], [8, 8], True),
            (20, [10, 10], [8, 8], False),
            # The first ends after 2 steps and frees 30; the other then has 6 more to take.
            (5, [8, 2], [8, 30], True),
            (4, [8, 2], [8, 30], False),
            (5, [40, 2], [8, 30], False),
            # A request that may end any time takes nothing and frees nothing.
            (9, [8, 0, -3], [8, 30, 30], True),
            (8, [8, 0, -3], [8, 30, 30], False),
            (0, [0], [8], True),
        ],
    )
    def test_who_has_least_left_frees_memory_first(self, free, left, held, expected):
        """
        Memory lasts when some is free at each end, all requests ending at their max_tokens.
        """
        assert expected is lasts(free, np.array(left), np.array(held))

    @given(
        st.integers(0, 60),
        st.lists(st.tuples(st.integers(-2, 12), st.integers(1, 20)), min_size=1, max_size=6),
    )
    def test_it_is_what_a_simulation_finds(self, free, requests):
        """
        The answer is that of a simulation that takes a token per request and step and gives all
        back at each end.
        """
        left, held = map(np.array, zip(*requests, strict=True))
        going_on, now = [list(one) for one in requests if one[0] > 0], free
        ran_out = False
        while going_on:
            now -= len(going_on)
            ends_now = any(one[0] == 1 for one in going_on)
            ran_out |= ends_now and now <= 0
            going_on = [[one[0] - 1, one[1] + 1] for one in going_on]
            now += sum(one[1] for one in going_on if not one[0])
            going_on = [one for one in going_on if one[0]]
        assert ran_out is not lasts(free, left, held)


def options(conservativeness: float = 1.0) -> CoreOptions:
    return CoreOptions(schedule_conservativeness=conservativeness, prefix_caching=False)


class TestAdmission:
    def test_a_request_is_refused_until_what_is_expected_leaves_room(self):
        """
        A request of 49 tokens waits with 76 tokens free and 27.3 reserved, and one of 48 does not.
        """
        for max_tokens, admitted in ((45, False), (44, True)):
            rig = Rig(small_config(max_num_blocks=22, max_model_len=88), options=options())
            rig.submit(prompt_len=8, max_tokens=40, eos_token_ids=AN_EOS)
            rig.step()
            rig.submit(prompt_len=4, max_tokens=max_tokens, eos_token_ids=AN_EOS)
            # One decode step: the ratio is 0.699, and 39 of 40 tokens are left to produce.
            batch = rig.plan()
            assert admitted is bool(batch.admits)

    @pytest.mark.parametrize(("max_tokens", "num_admitted"), [(30, 2), (41, 1)])
    def test_requests_of_one_step_leave_each_other_room(self, max_tokens, num_admitted):
        """
        A request that is admitted beside another counts with all of the other's output, not with a share of it.
        """
        rig = Rig(small_config(max_num_blocks=22, max_model_len=88), options=options())
        rig.submit(prompt_len=8, max_tokens=40, eos_token_ids=AN_EOS)
        rig.submit(prompt_len=4, max_tokens=max_tokens, eos_token_ids=AN_EOS)
        assert num_admitted == len(rig.step().admits)

    @pytest.mark.parametrize(("num_blocks", "admitted"), [(20, True), (19, False)])
    def test_who_has_no_eos_is_admitted_if_memory_lasts(self, num_blocks, admitted):
        """
        A request without EOS is admitted where the one before it ends after 10 steps and leaves it
        what it needs, and then none is retracted; there is no prefix cache.
        """
        rig = Rig(small_config(max_num_blocks=num_blocks, max_model_len=76), options=options())
        rig.submit(prompt_len=8, max_tokens=10)
        late = rig.submit(prompt_len=8, max_tokens=68)
        assert 1 + admitted == len(rig.step().admits)
        rig.run()
        assert rig.expected(late) == rig.outputs[late]
        assert 0 == rig.core.stats().retractions

    @pytest.mark.parametrize(("num_blocks", "num_admitted"), [(2053, 2), (2052, 1)])
    def test_nobody_is_expected_to_produce_more_than_4096_tokens(self, num_blocks, num_admitted):
        """
        Two requests without EOS that may fill the memory alone are admitted where both have room
        for 4,096 tokens beside their prompts.
        """
        config = small_config(max_num_blocks=num_blocks, max_model_len=8200)
        rig = Rig(config, options=options())
        for _ in range(2):
            rig.submit(prompt_len=8, max_tokens=8000)
        assert num_admitted == len(rig.step().admits)

    def test_a_lower_conservativeness_admits_more(self):
        """
        A conservativeness of 0.3 admits a request that 1.0 keeps waiting.
        """
        running = []
        for conservativeness in (1.0, 0.3):
            rig = Rig(
                small_config(max_num_blocks=22, max_model_len=88),
                options=options(conservativeness),
            )
            rig.submit(prompt_len=8, max_tokens=40, eos_token_ids=AN_EOS)
            rig.step()
            rig.submit(prompt_len=4, max_tokens=55, eos_token_ids=AN_EOS)
            rig.step()
            running.append(rig.core.stats().running_requests)
        assert [1, 2] == running

    def test_without_others_a_request_may_ask_for_the_whole_pool(self):
        """
        A request with a prompt that fits is admitted when none runs, whatever it may produce.
        """
        rig = Rig(small_config(max_num_blocks=16), options=options(5.0))
        handle = rig.submit(prompt_len=8, max_tokens=56)
        assert 1 == len(rig.step().admits)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]

    def test_who_was_refused_is_not_asked_again_before_somebody_is_gone(self, monkeypatch):
        """
        The refused head of the queue costs nothing while the running requests go on, and starts
        when one ends.
        """
        rig = Rig(small_config(max_num_blocks=20, max_model_len=80), options=options())
        rig.submit(prompt_len=8, max_tokens=10, eos_token_ids=AN_EOS)
        late = rig.submit(prompt_len=8, max_tokens=70, eos_token_ids=AN_EOS)
        rig.step()
        made = []
        of = AdmissionBudget.of
        monkeypatch.setattr(AdmissionBudget, "of", lambda *a: made.append(1) or of(*a))
        while 0 not in rig.ended:
            assert not rig.plan().admits
            assert not made
            rig.now += 1
            rig.deliver()
        assert [late] == [
            int(rig.core._replica.slots.admitted.handle[a.slot]) for a in rig.step().admits
        ]

    def test_a_step_without_a_free_place_sums_nothing_up(self, monkeypatch):
        """
        The reserve is not summed up while max_batch_size requests run.
        """
        rig = Rig(small_config(max_batch_size=2, max_num_blocks=64), options=options())
        for _ in range(3):
            rig.submit(prompt_len=2, max_tokens=20)
        rig.step()

        def fail(*_):
            raise AssertionError("summed up in a step that cannot admit")

        monkeypatch.setattr(AdmissionBudget, "of", fail)
        for _ in range(10):
            assert not rig.step().admits

    def test_the_ratio_falls_with_decode_steps_and_starts_over_when_idle(self):
        """
        The ratio in the statistics is that of the decode steps made, and the first one when idle.
        """
        rig = Rig(options=options())
        rig.submit(prompt_len=4, max_tokens=12)
        rig.step()
        assert 0.7 == rig.core.stats().new_token_ratio
        for _ in range(5):
            rig.step()
        assert pytest.approx(0.7 - 5 * 0.602 / 600) == rig.core.stats().new_token_ratio
        rig.run()
        assert 0.7 == rig.core.stats().new_token_ratio
