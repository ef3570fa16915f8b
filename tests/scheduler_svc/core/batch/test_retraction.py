"""Retraction when blocks run out: the victims, their number, and what is logged about them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from scheduler_svc.core.batch.block_allocation import RETRACT_STEPS
from scheduler_svc.core.batch.victims import last_admitted
from scheduler_svc.core.request.options import CoreOptions, VictimRule
from tests.scheduler_svc.core.harness import Rig, small_config


def bold(rule: VictimRule = VictimRule.FEWEST_GENERATED, **changes) -> CoreOptions:
    """Return options that admit whatever fits now."""
    return CoreOptions(schedule_conservativeness=0.0, victim_rule=rule, **changes)


def growing(num_requests: int, options: CoreOptions, *, num_blocks: int, delay: int = 1) -> Rig:
    """Return a rig with requests that all fit at first and outgrow the pool together."""
    config = small_config(max_num_blocks=num_blocks, max_batch_size=8, max_total_tokens=64)
    rig = Rig(config, options=options, delay=delay)
    for _ in range(num_requests):
        rig.submit(prompt_len=8, max_tokens=40)
    return rig


def step_until_retracted(rig: Rig):
    """Return the batch that retracts, and the number of its victims."""
    for _ in range(100):
        before = rig.core.stats().retractions
        batch = rig.step()
        if count := rig.core.stats().retractions - before:
            return batch, count
    raise AssertionError("nobody was retracted")


def lines(rig: Rig, part: str) -> list[str]:
    return [line.text for line in rig.log_lines if part in line.text]


class TestVictims:
    def test_last_admitted_is_whoever_got_a_slot_last(self):
        """
        The order of admission decides, not that of arrival.
        """
        slots = SimpleNamespace(admitted=SimpleNamespace(turn=np.array([7, 9, 3])))
        assert 1 == last_admitted(slots, np.arange(3))
        assert 0 == last_admitted(slots, np.array([0, 2]))

    @pytest.mark.parametrize(
        ("rule", "victim"),
        [(VictimRule.FEWEST_GENERATED, 1), (VictimRule.LAST_ADMITTED, 2)],
    )
    def test_the_rule_chooses_the_first_victim(self, rule, victim):
        """
        The first victim among rows that generated as much has the longest prompt, or was admitted
        last.
        """
        config = small_config(max_num_blocks=14, max_total_tokens=64)
        rig = Rig(config, options=bold(rule))
        for prompt_len in (4, 20, 4):
            rig.submit(prompt_len=prompt_len, max_tokens=30)
        batch, _ = step_until_retracted(rig)
        assert victim == batch.release_slot[0]
        rig.run()

    @pytest.mark.parametrize("rule", [VictimRule.FEWEST_GENERATED, VictimRule.LAST_ADMITTED])
    def test_the_worst_priority_goes_first_whatever_the_rule(self, rule):
        """
        A request of worse priority is the victim though the rule alone would choose another.
        """
        config = small_config(max_num_blocks=14, max_total_tokens=64)
        rig = Rig(config, options=bold(rule))
        for prompt_len, priority in ((4, 3), (20, 0), (4, 0)):
            rig.submit(prompt_len=prompt_len, max_tokens=30, priority=priority)
        worst = rig.core._cell.requests._by_handle[0]
        step_until_retracted(rig)
        assert 1 == worst.setbacks.num_preemptions
        rig.run()

    @pytest.mark.parametrize("rule", [VictimRule.FEWEST_GENERATED, VictimRule.LAST_ADMITTED])
    def test_who_was_admitted_for_its_age_is_spared_before_any_priority(self, rule):
        """
        A request admitted because it had waited long is no victim while others run.
        """
        config = small_config(max_num_blocks=14, max_total_tokens=64)
        rig = Rig(config, options=bold(rule))
        rig.submit(prompt_len=8, max_tokens=30, priority=9)
        rig.submit(prompt_len=8, max_tokens=30)
        rig.submit(prompt_len=8, max_tokens=30)
        rig.step()
        aged = rig.core._cell.requests._by_handle[0]
        aged.setbacks.was_aged = True
        step_until_retracted(rig)
        assert 0 == aged.setbacks.num_preemptions
        rig.run()

    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("rule", list(VictimRule))
    @pytest.mark.parametrize("caching", [True, False])
    def test_tokens_are_those_of_unlimited_memory(self, rule, delay, caching):
        """
        Each request produces what it produces alone, whatever is retracted or paused.
        """
        options = bold(rule, prefix_caching=caching, paused_budget_blocks=6)
        rig = growing(6, options, num_blocks=20, delay=delay)
        rig.run()
        assert rig.core.stats().retractions >= 1
        for handle in range(6):
            assert rig.expected(handle) == rig.outputs[handle]


class TestHowMany:
    def test_retraction_goes_on_until_twenty_tokens_are_free_per_row(self):
        """
        A retraction leaves room for 20 steps of the remaining rows, or only one row.
        """
        rig = growing(6, bold(prefix_caching=False), num_blocks=24)
        _, count = step_until_retracted(rig)
        replica = rig.core._replica
        # The step has given out a block to each that grew.
        free = (replica.kv.pool.num_available + replica.slots.num_running) * 4
        assert replica.slots.num_running == 6 - count
        assert free >= RETRACT_STEPS * replica.slots.num_running or replica.slots.num_running == 1
        assert count > 1

    def test_no_more_are_retracted_than_that_takes(self):
        """
        One victim fewer would not have left 20 tokens per row.
        """
        rig = growing(6, bold(prefix_caching=False), num_blocks=24)
        before = {}
        while not rig.core.stats().retractions:
            before = {
                "running": rig.core.stats().running_requests,
                "free": rig.core.stats().free_blocks,
            }
            rig.step()
        held = -(-(24 - before["free"]) // before["running"])
        count = rig.core.stats().retractions
        one_fewer = (before["free"] + held * (count - 1)) * 4
        assert one_fewer < RETRACT_STEPS * (before["running"] - count + 1)

    def test_blocks_that_hold_more_than_twenty_tokens_must_still_do_for_all(self):
        """
        Each row that grows gets a block where blocks are large, though 20 tokens per row were free
        before.
        """
        config = small_config(
            block_size=32, max_num_blocks=5, max_model_len=128, max_total_tokens=256
        )
        rig = Rig(config, options=bold(prefix_caching=False))
        for _ in range(4):
            rig.submit(prompt_len=32, max_tokens=60)
        rig.run()
        assert rig.core.stats().retractions >= 1
        for handle in range(4):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_cached_blocks_go_before_anybody_is_retracted(self):
        """
        No request loses its slot while the prefix cache holds blocks that no request uses.
        """
        rig = Rig(small_config(max_num_blocks=16, max_total_tokens=64), options=bold())
        rig.submit(prompt_len=24, max_tokens=2)
        rig.run()
        assert rig.core._replica.kv.pool.num_cached >= 5
        rig.submit(prompt_len=8, max_tokens=20)
        rig.submit(prompt_len=8, max_tokens=20)
        rig.run()
        assert 0 == rig.core.stats().retractions


class TestWhatIsSaid:
    def test_each_retraction_is_one_line_with_its_numbers(self):
        """
        The line names how many were retracted and the ratio before and after, once per shortage.
        """
        rig = growing(6, bold(VictimRule.FEWEST_GENERATED), num_blocks=24)
        rig.core._replica.ratio.note_retraction(rig.core._replica.slots, 0)
        before = 0.0
        while not rig.core.stats().retractions:
            before = rig.core.stats().new_token_ratio
            rig.step()
        slots, stats = rig.core._replica.slots, rig.core.stats()
        left = slots.running.nonzero()[0]
        # One result came in after the plan.
        generated = int((slots.tokens.known[left] - slots.admitted.prompt_len[left]).sum()) - len(
            left
        )
        after = min(1.0, (generated + 20 * len(left)) / (40 * len(left)))
        expected = (
            f"decode out of memory happened, #retracted_reqs: {stats.retractions}, "
            f"#new_token_ratio: {before:.4f} -> {after:.4f}"
        )
        assert [expected] == lines(rig, "decode out of memory happened")
        assert pytest.approx(after) == stats.new_token_ratio

    def test_no_shortage_is_no_line(self):
        """
        No line is logged while there is memory to spare.
        """
        rig = growing(3, bold(), num_blocks=64)
        rig.run()
        assert [] == lines(rig, "out of memory") + lines(rig, "not enough KV cache space")

    @pytest.mark.slow
    def test_the_first_and_every_fiftieth_preemption_warn(self):
        """
        The warning says what it costs, which settings help, and how many there were.
        """
        rig = growing(8, bold(), num_blocks=16)
        while rig.core.stats().retractions < 60:
            if rig.core.stats().waiting_requests < 4:
                rig.submit(prompt_len=8, max_tokens=40)
            rig.step()
        warned = lines(
            rig, "there is not enough KV cache space. This can affect the end-to-end performance."
        )
        counts = [int(line.rsplit("=", 1)[1]) for line in warned]
        assert [1, 50] == counts
        assert all("max_num_blocks" in line and "max_batch_size" in line for line in warned)
        assert all(line.is_warning for line in rig.log_lines if "not enough KV" in line.text)

    def test_a_step_that_retracts_does_not_lower_the_ratio(self):
        """
        The ratio falls only in decode steps without a shortage.
        """
        rig = growing(6, bold(), num_blocks=24)
        step_until_retracted(rig)
        ratio = rig.core._replica.ratio
        steps = rig.core._replica.steps.num_decode
        assert ratio.at(steps) == ratio._start
