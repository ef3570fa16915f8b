"""Several choices of one request: its prompt is computed once, and each draws its own tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.kv_cache.prefix_cache import writer_key
from scheduler_svc.core.request.options import CoreOptions, Eviction
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import QueueFull, RequestNotFound
from tests.scheduler_svc.core.harness import Rig, small_config

CACHES = [
    CoreOptions(schedule_conservativeness=0.0, prefix_caching=caching, eviction=eviction)
    for caching, eviction in (
        (True, Eviction.LRU),
        (True, Eviction.REF_ZERO),
        (False, Eviction.LRU),
    )
]
CACHE_IDS = ["lru", "ref_zero", "off"]
each_cache = pytest.mark.parametrize("options", CACHES, ids=CACHE_IDS)


def rig_of(options: CoreOptions = CACHES[0], delay: int = 1, **config) -> Rig:
    return Rig(small_config(**{"max_total_tokens": 64} | config), delay=delay, options=options)


def cached_in_order(rig: Rig) -> list[int]:
    return [admission.num_cached_tokens for batch in rig.batches for admission in batch.admits]


def assert_outputs(rig: Rig) -> None:
    for handle in rig.submitted:
        assert rig.expected(handle) == rig.outputs[handle]


class TestForks:
    @each_cache
    @pytest.mark.parametrize("prompt_len", [1, 3, 8, 9, 10])
    def test_the_prompt_is_computed_once(self, options, prompt_len):
        """
        Choice 0 computes the prompt; the others share it and compute its last token again.
        """
        rig = rig_of(options)
        rig.submit(prompt_len, num_choices=3)
        assert 1 == len(rig.step().admits)
        assert 2 == len(rig.step().admits)
        rig.run()
        assert [0, prompt_len - 1, prompt_len - 1] == cached_in_order(rig)
        assert prompt_len + 2 == rig.core.stats().prefill_tokens
        assert_outputs(rig)

    def test_a_choice_knows_which_slot_computed_the_prompt(self):
        """
        Choices that share a prompt have its writer, by slot and generation, so that a row error of it reaches them.
        """
        rig = rig_of(CoreOptions(prefix_caching=False))
        rig.submit(9, num_choices=3)
        rig.step()
        rig.step()
        replica = rig.core._replica
        assert 1 == replica.slots.generation[0]
        for slot in (1, 2):
            assert frozenset({writer_key(0, 0, 1)}) == replica.slots.request_of(slot).prefix.writers

    def test_only_a_block_that_is_written_on_is_copied(self):
        """
        The block of a prompt's last token is copied for each further choice, unless that token
        opens it.
        """
        for prompt_len, num_copies in ((10, 2), (8, 2), (9, 0)):
            rig = rig_of()
            rig.submit(prompt_len, num_choices=3)
            rig.step()
            assert num_copies == len(rig.step().copy_source)
            rig.run()

    def test_choices_draw_under_their_own_number_and_handle(self):
        """
        Choice i has handle + i, `choice` i and the same seed, and produces tokens of its own.
        """
        rig = rig_of()
        first = rig.submit(9, max_tokens=12, num_choices=3)
        rig.run()
        admissions = [admission for batch in rig.batches for admission in batch.admits]
        assert [0, 1, 2] == [admission.sampling.choice for admission in admissions]
        assert {0} == {admission.sampling.seed for admission in admissions}
        assert {first, first + 1, first + 2} == set(rig.ended)
        assert 3 == len({tuple(rig.outputs[first + choice]) for choice in range(3)})

    @each_cache
    def test_forks_wait_until_the_whole_prompt_was_sent(self, options):
        """
        No other choice is admitted while the prompt is computed in chunks.
        """
        rig = rig_of(options, max_total_tokens=8)
        rig.submit(21, num_choices=2)
        assert [1, 0, 0, 1] == [len(rig.step().admits) for _ in range(4)]
        rig.run()
        assert_outputs(rig)

    @each_cache
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_a_fork_may_wait_until_everyone_is_gone(self, options, delay):
        """
        Choices run one after the other in one slot, each with what is still cached.
        """
        rig = rig_of(options, delay, max_batch_size=1)
        rig.submit(9, max_tokens=5, num_choices=3)
        rig.run()
        expected = [0, 8, 8] if options is CACHES[0] else [0, 0, 0]
        assert expected == cached_in_order(rig)
        assert_outputs(rig)

    @each_cache
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_the_leader_may_end_first(self, options, delay):
        """
        Another choice leads when choice 0 ends before the others were admitted.
        """
        rig = rig_of(options, delay)
        rig.submit(9, max_tokens=8, num_choices=3)
        rig.step()
        rig.core.end_handle(0, FinishReason.CANCELLED, rig.now)
        rig.run()
        for handle in (1, 2):
            assert rig.expected(handle) == rig.outputs[handle]

    @each_cache
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("at_step", [1, 2, 6])
    def test_choices_that_lose_their_slots_give_the_same_tokens(self, options, delay, at_step):
        """
        Leader and forks may be preempted at any time, and share again when they come back.
        """
        rig = rig_of(options, delay)
        rig.submit(10, max_tokens=12, num_choices=3)
        for _ in range(at_step):
            rig.step()
        rig.core.preempt("r0")
        rig.run()
        assert_outputs(rig)

    def test_one_preempted_choice_forks_again(self):
        """
        A preempted choice shares the prompt with those that go on, also without a prefix cache.
        """
        rig = rig_of(CACHES[2])
        rig.submit(10, max_tokens=12, num_choices=2)
        for _ in range(5):
            rig.step()
        replica = rig.core._replica
        replica.preempt(replica.cell.requests._by_handle[1].place.slot)
        rig.run()
        assert [0, 9, 10] == cached_in_order(rig)
        assert_outputs(rig)

    @pytest.mark.slow
    @each_cache
    @settings(max_examples=25, deadline=None)
    @given(
        num_blocks=st.integers(8, 14),
        delay=st.sampled_from((1, 2, 4)),
        requests=st.lists(
            st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(1, 4)),
            min_size=1,
            max_size=4,
        ),
    )
    def test_any_memory_gives_the_same_tokens(self, options, num_blocks, delay, requests):
        """
        Every choice produces what it would alone, however little memory there is.
        """
        rig = rig_of(options, delay, max_num_blocks=num_blocks, max_model_len=32)
        for prompt_len, max_tokens, num_choices in requests:
            rig.submit(prompt_len, max_tokens, num_choices=num_choices)
            rig.step()
        rig.run()
        assert_outputs(rig)


class TestAllOrNone:
    def test_a_request_is_taken_with_all_its_choices_or_refused(self):
        """
        Each choice counts for max_num_seqs; where not all fit none is taken.
        """
        rig = rig_of(max_num_seqs=4)
        rig.submit(num_choices=3)
        with pytest.raises(QueueFull):
            rig.submit(num_choices=2)
        assert 3 == rig.core.num_requests
        rig.submit()
        rig.run()
        assert 4 == rig.core.stats().finished_requests

    def test_ending_the_request_ends_every_choice(self):
        """
        `end_request` ends running and waiting choices.
        """
        rig = rig_of(max_batch_size=2)
        rig.submit(9, max_tokens=20, num_choices=3)
        for _ in range(4):
            rig.step()
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.collect()
        assert {0, 1, 2} == set(rig.ended)
        assert 0 == rig.core.num_requests
        rig.run()

    def test_ending_a_handle_ends_one_choice(self):
        """
        `end_handle` ends one choice, with the outputs counted as told, and no other.
        """
        rig = rig_of()
        rig.submit(9, max_tokens=20, num_choices=3)
        for _ in range(6):
            rig.step()
        rig.core.end_handle(1, FinishReason.STOP_STRING, rig.now, num_output_tokens=2)
        rig.collect()
        assert {1} == set(rig.ended)
        assert 2 == rig.ended[1].num_output_tokens
        with pytest.raises(RequestNotFound):
            rig.core.end_handle(1, FinishReason.CANCELLED, rig.now)
        rig.run()
        for handle in (0, 2):
            assert rig.expected(handle) == rig.outputs[handle]

    def test_an_id_is_free_again_when_the_last_choice_has_ended(self):
        """
        A request lives under its id as long as any of its choices does.
        """
        rig = rig_of()
        rig.submit(5, max_tokens=20, num_choices=2)
        rig.step()
        rig.core.end_handle(0, FinishReason.CANCELLED, rig.now)
        assert "r0" == rig.core.find(1)
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        with pytest.raises(RequestNotFound):
            rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.run()

    def test_a_bad_choice_that_shared_starts_over(self):
        """
        A choice with NaN logits computes its shared prompt anew before it fails, as that may be
        wrong.
        """
        rig = rig_of()
        rig.submit(9, max_tokens=10, num_choices=3)
        for _ in range(3):
            rig.step()
        slots = rig.core._replica.slots
        slot = rig.core._cell.requests._by_handle[1].place.slot
        rig.executor.poisoned.add((slot, int(slots.generation[slot])))
        rig.run()
        assert not rig.failed
        assert_outputs(rig)
        assert 1 == np.sum([ended.num_preemptions for ended in rig.ended.values()])
