"""Prefix cache: KV that is found, waited for and forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.kv_cache import prefix_cache
from scheduler_svc.core.request import block_hashes
from scheduler_svc.core.request.events import ProgressKind
from scheduler_svc.core.request.options import CoreOptions, Eviction
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import InvalidLogits
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config

EAGER = CoreOptions(schedule_conservativeness=0.0)
REF_ZERO = CoreOptions(schedule_conservativeness=0.0, eviction=Eviction.REF_ZERO)
NO_CACHE = CoreOptions(schedule_conservativeness=0.0, prefix_caching=False)


def prompt_of(length: int, start: int = 0):
    return (np.arange(start, start + length, dtype=np.int32) * 3) % 50


def rig_of(options: CoreOptions = EAGER, delay: int = 1, **config) -> Rig:
    return Rig(small_config(**{"max_total_tokens": 64} | config), delay=delay, options=options)


def cached_in_order(rig: Rig) -> list[int]:
    """Return the number of cached tokens of every admission so far."""
    return [admission.num_cached_tokens for batch in rig.batches for admission in batch.admits]


def assert_outputs(rig: Rig) -> None:
    for handle in rig.submitted:
        assert rig.expected(handle) == rig.outputs[handle]


class TestFinding:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_equal_prompts_that_come_together_share_from_the_second_on(self, delay):
        """
        The first of equal prompts submitted together is computed; the others wait one step and use
        its full blocks.
        """
        rig = rig_of(delay=delay)
        for _ in range(3):
            rig.submit(prompt=prompt_of(10))
        assert 1 == len(rig.step().admits)
        assert 2 == len(rig.step().admits)
        rig.run()
        assert [0, 8, 8] == cached_in_order(rig)
        assert [0, 8, 8] == [rig.ended[handle].num_cached_tokens for handle in range(3)]
        assert_outputs(rig)

    def test_the_cached_part_is_told_when_a_request_is_scheduled(self):
        """
        SCHEDULED carries the prompt tokens that were found cached.
        """
        rig = rig_of()
        rig.submit(prompt=prompt_of(10))
        rig.run()
        rig.submit(prompt=prompt_of(13))
        rig.run()
        told = [p.value for p in rig.progress if p.kind is ProgressKind.SCHEDULED]
        assert [0, 8] == told

    def test_others_may_pass_a_request_that_waits_for_a_prefix(self):
        """
        A request that waits for another's prefix keeps its place and holds up no other request.
        """
        rig = rig_of()
        for prompt in (prompt_of(20), prompt_of(20), prompt_of(4, start=30)):
            rig.submit(prompt=prompt)
        assert [20, 4] == rig.step().row_num_tokens.tolist()
        assert [1] == rig.core.waiting_handles()
        rig.run()
        assert_outputs(rig)

    def test_a_long_prefix_is_used_chunk_by_chunk_as_it_is_computed(self):
        """
        A request that shares only the beginning of a long prompt goes on once that beginning was
        sent.
        """
        rig = rig_of(replace(EAGER, chunked_prefill_size=4))
        rig.submit(prompt=prompt_of(40))
        rig.submit(prompt=np.concatenate([prompt_of(8), prompt_of(4, start=33)]))
        assert [1, 0, 1] == [len(rig.step().admits) for _ in range(3)]
        rig.run()
        assert [0, 8] == cached_in_order(rig)
        assert_outputs(rig)

    def test_generated_tokens_are_found_by_the_next_turn(self):
        """
        A prompt that continues a conversation finds the answer's full blocks too.
        """
        rig = rig_of()
        first = rig.submit(prompt=prompt_of(6), max_tokens=11)
        rig.run()
        said = np.array([*rig.submitted[first].prompt, *rig.outputs[first]], np.int32)
        rig.submit(prompt=np.concatenate([said, prompt_of(3, start=40)]))
        rig.run()
        # 17 tokens, of which the last was never computed: four full blocks.
        assert [0, 16] == cached_in_order(rig)
        assert_outputs(rig)

    def test_the_last_token_is_always_computed(self):
        """
        A prompt that is cached as a whole computes one token, in a copy of its last block.
        """
        rig = rig_of()
        rig.submit(prompt=prompt_of(8))
        rig.run()
        rig.submit(prompt=prompt_of(8))
        batch = rig.step()
        assert [7] == [admission.num_cached_tokens for admission in batch.admits]
        assert [1] == batch.row_num_tokens.tolist()
        assert [batch.admits[0].block_ids[1]] == batch.copy_destination.tolist()
        rig.run()
        assert_outputs(rig)

    def test_nothing_is_copied_where_the_last_token_has_a_block_of_its_own(self):
        """
        A cached prompt shares all but the last block where blocks have one token.
        """
        rig = rig_of(block_size=1)
        rig.submit(prompt=prompt_of(8))
        rig.run()
        rig.submit(prompt=prompt_of(8))
        batch = rig.step()
        assert 7 == batch.admits[0].num_cached_tokens
        assert not len(batch.copy_source)
        rig.run()
        assert_outputs(rig)

    def test_only_equal_salts_share(self):
        """
        Equal prompts share nothing under different salts, and do under the same salt.
        """
        rig = rig_of()
        for salt in (b"", b"a", b"b", b"a"):
            rig.submit(prompt=prompt_of(9), cache_salt=salt)
            rig.run()
        assert [0, 0, 0, 8] == cached_in_order(rig)

    def test_digests_that_came_with_the_prompt_are_not_computed_again(self, monkeypatch):
        """
        The core hashes no prompt block for which the frontend sent a digest.
        """
        rig = rig_of()
        hashed = []

        def counting(tokens, *args, **kwargs):
            hashed.append(len(tokens) // args[0])
            return block_hashes.block_digests(tokens, *args, **kwargs)

        monkeypatch.setattr(prefix_cache, "block_digests", counting)
        for _ in range(2):
            digests = block_hashes.block_digests(prompt_of(9), 4)
            rig.submit(prompt=prompt_of(9), max_tokens=1, block_digests=digests)
            rig.run()
        assert [0, 8] == cached_in_order(rig)
        assert 0 == sum(hashed)


class TestModes:
    def test_ref_zero_shares_only_what_somebody_holds(self):
        """
        A prefix is found under ref_zero while a request holds it, and is gone with the last of
        them.
        """
        rig = rig_of(REF_ZERO)
        rig.submit(prompt=prompt_of(9), max_tokens=6)
        rig.step()
        rig.submit(prompt=prompt_of(9), max_tokens=2)
        rig.run()
        assert (0, 0) == (rig.core.stats().cached_blocks, rig.core.stats().used_blocks)
        rig.submit(prompt=prompt_of(9))
        rig.run()
        assert [0, 8, 0] == cached_in_order(rig)
        assert_outputs(rig)

    def test_without_prefix_caching_everything_is_computed(self):
        """
        Equal prompts are admitted together and share nothing with the cache off.
        """
        rig = rig_of(NO_CACHE)
        for _ in range(2):
            rig.submit(prompt=prompt_of(9))
        assert 2 == len(rig.step().admits)
        rig.run()
        assert [0, 0] == cached_in_order(rig)
        stats = rig.core.stats()
        assert (0, 0, 0) == (
            stats.cached_blocks, stats.prefix_cache_lookup_tokens, stats.prefix_cache_hit_tokens
        )  # fmt: skip
        assert_outputs(rig)

    def test_hits_and_lookups_are_counted(self):
        """
        The counters say how many tokens were admitted and how many of them were found.
        """
        rig = rig_of()
        for _ in range(2):
            rig.submit(prompt=prompt_of(9))
            rig.run()
        stats = rig.core.stats()
        assert (18, 8) == (stats.prefix_cache_lookup_tokens, stats.prefix_cache_hit_tokens)


class TestMemory:
    def test_cached_blocks_are_no_pressure(self):
        """
        A pool full of cached blocks has usage 0 and admits as if it were empty.
        """
        rig = rig_of(max_num_blocks=8, max_model_len=32)
        for start in (0, 30):
            rig.submit(prompt=prompt_of(12, start), max_tokens=5)
            rig.run()
        stats = rig.core.stats()
        assert (0, 8) == (stats.used_blocks, stats.cached_blocks + stats.free_blocks)
        assert stats.cached_blocks == 8
        rig.submit(prompt=prompt_of(28, start=101), max_tokens=4)
        rig.run()
        assert_outputs(rig)

    def test_what_a_request_matched_is_not_evicted_for_it(self):
        """
        A request that needs the whole pool keeps the blocks it matched and evicts the others.
        """
        rig = rig_of(max_num_blocks=8, max_model_len=32)
        rig.submit(prompt=prompt_of(16), max_tokens=1)
        rig.run()
        rig.submit(prompt=prompt_of(16, start=101), max_tokens=1)
        rig.run()
        assert 8 == rig.core.stats().cached_blocks
        rig.submit(prompt=prompt_of(31), max_tokens=1)
        rig.run()
        assert [0, 0, 16] == cached_in_order(rig)
        assert_outputs(rig)

    def test_a_copy_is_given_up_where_there_is_no_block_for_it(self):
        """
        A cached prompt that fits but for the block it would copy computes that block again.
        """
        rig = rig_of(max_num_blocks=8, max_model_len=32)
        rig.submit(prompt=prompt_of(12), max_tokens=1)
        rig.run()
        rig.submit(prompt=prompt_of(17, start=101), max_tokens=4)
        rig.step()
        rig.submit(prompt=prompt_of(12), max_tokens=1)
        assert [8] == [admission.num_cached_tokens for admission in rig.step().admits]
        rig.run()
        assert_outputs(rig)

    def test_a_preempted_request_finds_most_of_its_tokens(self):
        """
        A request that lost its slot comes back with its full blocks cached, outputs included.
        """
        rig = rig_of()
        handle = rig.submit(prompt=prompt_of(9), max_tokens=20)
        for _ in range(9):
            rig.step()
        rig.core.preempt("r0")
        rig.run()
        assert [0, 16] == cached_in_order(rig)
        assert 0 == rig.ended[handle].num_cached_tokens
        assert_outputs(rig)

    def test_flush_forgets_what_was_and_is_being_computed(self):
        """
        A flush leaves no KV to be found and frees the blocks that no request holds; the running
        requests go on.
        """
        rig = rig_of()
        rig.submit(prompt=prompt_of(8, start=60), max_tokens=1)
        rig.run()
        rig.submit(prompt=prompt_of(9), max_tokens=12)
        rig.step()
        assert 2 == rig.core.flush_prefix_cache()
        rig.check()
        rig.submit(prompt=prompt_of(9), max_tokens=2)
        rig.submit(prompt=prompt_of(9, start=60), max_tokens=2)
        rig.run()
        assert [0, 0, 0, 0] == cached_in_order(rig)
        assert_outputs(rig)

    @pytest.mark.parametrize("block_size", [4, 8])
    def test_a_new_executor_has_nothing_cached(self, block_size):
        """
        All KV is computed again after an executor is lost or replaced, also by one with other
        blocks.
        """
        rig = rig_of()
        rig.submit(prompt=prompt_of(9), max_tokens=12)
        for _ in range(3):
            rig.step()
        rig.config = small_config(block_size=block_size, max_total_tokens=64)
        rig.use_geometry(geometry_of(rig.config))
        rig.submit(prompt=prompt_of(9), max_tokens=2)
        rig.run()
        assert [0, 0, 8] == cached_in_order(rig)
        assert_outputs(rig)

    def test_digests_for_other_blocks_are_not_used(self):
        """
        Digests that came with prompts name nothing any more when the block size changes, also where
        there are as many as before.
        """
        rig = rig_of(max_num_seqs=8)
        prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
        for prompt in prompts:
            column = np.array([*prompt, 7], np.int32)
            digests = block_hashes.block_digests(column, 4)
            rig.submit(prompt=column, block_digests=digests)
        rig.config = small_config(block_size=5, max_total_tokens=64)
        rig.use_geometry(geometry_of(rig.config))
        rig.run()
        assert [0, 0] == cached_in_order(rig)
        assert_outputs(rig)


class TestRowErrors:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    def test_who_shares_a_bad_row_starts_over_and_ends_well(self, delay):
        """
        A row error fails its request only: those that share its KV compute it anew, and no later
        request finds it.
        """
        rig = rig_of(delay=delay)
        bad = rig.submit(prompt=prompt_of(9), max_tokens=12)
        rig.step()
        sharer = rig.submit(prompt=prompt_of(9), max_tokens=12)
        rig.executor.poisoned.add((0, 1))
        rig.run()
        later = rig.submit(prompt=prompt_of(9), max_tokens=12)
        rig.run()
        assert {bad} == set(rig.failed)
        assert isinstance(rig.failed[bad].error, InvalidLogits)
        for handle in (sharer, later):
            assert rig.expected(handle) == rig.outputs[handle]
        assert 1 == rig.ended[sharer].num_preemptions

    @pytest.mark.parametrize("delay", [1, 3])
    def test_bad_kv_left_in_the_cache_fails_nobody(self, delay):
        """
        A request that finds bad KV of an aborted one computes everything itself, once.
        """
        rig = rig_of(delay=delay, max_total_tokens=8)
        rig.submit(prompt=prompt_of(12), max_tokens=12)
        rig.step()
        # The executor does not report the NaN, as the prompt's first chunk samples nothing.
        rig.executor.memory.is_bad[rig.core._replica.slots.blocks.table[0, :2]] = True
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        handle = rig.submit(prompt=prompt_of(12), max_tokens=12)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]
        again = rig.submit(prompt=prompt_of(12), max_tokens=12)
        rig.run()
        assert rig.expected(again) == rig.outputs[again]
        assert not rig.failed

    def test_nothing_that_a_failed_row_produced_is_found(self):
        """
        Blocks that a row filled with outputs before its error are not kept at its release.
        """
        rig = rig_of()
        bad = rig.submit(prompt=prompt_of(3), max_tokens=12)
        while len(rig.outputs[bad]) < 6:
            rig.step()
        rig.executor.poisoned.add((0, 1))
        rig.run()
        assert isinstance(rig.failed[bad].error, InvalidLogits)
        text = np.concatenate([prompt_of(3), np.array(rig.outputs[bad], np.int32)])
        later = rig.submit(prompt=text, max_tokens=2)
        rig.run()
        assert 0 == rig.ended[later].num_cached_tokens
