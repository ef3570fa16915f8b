"""Requests that the core takes, and what it says to those it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.request.geometry import ExecutorGeometry, Limits
from scheduler_svc.core.request.options import CoreOptions, OnPressure
from scheduler_svc.core.request.request import FinishReason
from tandem.engine_config import EngineConfig
from tandem.errors import (
    DuplicateRequestId,
    EmptyPrompt,
    IncompatibleExecutor,
    InvalidConfig,
    InvalidParameter,
    MemoryPressure,
    NeverFits,
    PromptTooLong,
    QueueFull,
    TotalTooLong,
)
from tests.scheduler_svc.core.harness import Rig, geometry_of, queue_position, small_config


class TestLengths:
    def test_a_prompt_and_output_of_exactly_max_model_len_is_taken(self):
        """
        A prompt and max_tokens that together equal max_model_len are taken and run to their end.
        """
        rig = Rig()
        handle = rig.submit(prompt_len=60, max_tokens=4)
        rig.run()
        assert 4 == len(rig.outputs[handle])

    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "error", "numbers"),
        [
            (0, 4, EmptyPrompt, ()),
            (4, 0, InvalidParameter, ("0",)),
            (65, 4, PromptTooLong, ("65", "64")),
            (60, 5, TotalTooLong, ("60", "5", "65", "64", "at most 4")),
        ],
        ids=["empty", "no-output", "prompt", "total"],
    )
    def test_impossible_lengths_are_refused_with_their_numbers(
        self, prompt_len, max_tokens, error, numbers
    ):
        """
        A request that max_model_len can never hold is refused, saying by how much and what to do.
        """
        rig = Rig()
        with pytest.raises(error) as caught:
            rig.submit(prompt_len=prompt_len, max_tokens=max_tokens)
        assert [] == [number for number in numbers if number not in caught.value.message]
        assert not rig.core.has_pending_work()

    def test_a_request_as_large_as_the_pool_is_taken(self):
        """
        A request that needs every block of the pool runs to its end.
        """
        rig = Rig(small_config(max_num_blocks=10))
        handle = rig.submit(prompt_len=30, max_tokens=10)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]

    def test_a_request_one_token_larger_than_the_pool_never_fits(self):
        """
        A request that needs one block more than there is fails at submission.
        """
        rig = Rig(small_config(max_num_blocks=10))
        with pytest.raises(NeverFits, match="needs 11 KV blocks of 4 tokens and there are 10"):
            rig.submit(prompt_len=30, max_tokens=11)

    def test_nothing_fits_under_a_threshold_of_zero(self):
        """
        A prompt fails at submission under memory_threshold 0, since none could ever start.
        """
        rig = Rig(small_config(memory_threshold=0.0))
        with pytest.raises(NeverFits, match="memory_threshold"):
            rig.submit()

    @pytest.mark.parametrize("token", [-1, 1 << 24])
    def test_end_ids_out_of_any_vocabulary_are_refused(self, token):
        """
        A stop token id that no vocabulary has is refused with its field.
        """
        with pytest.raises(InvalidParameter) as caught:
            Rig().submit(stop_token_ids=frozenset({token}))
        assert "stopping.stop_token_ids" == caught.value.field


class TestCapacity:
    def test_max_num_seqs_counts_waiting_and_running(self):
        """
        A request beyond max_num_seqs is refused with retry advice and our name for vLLM's limit.
        """
        rig = Rig(small_config(max_num_seqs=6))
        for _ in range(6):
            rig.submit()
        rig.step()
        with pytest.raises(QueueFull) as caught:
            rig.submit()
        assert {"limit": "max_num_seqs", "value": "6"} == caught.value.metadata
        assert "vLLM's max_num_seqs is max_batch_size here" in caught.value.message
        assert caught.value.retry_after_s is not None

    @pytest.mark.parametrize("how", ["finish", "cancel"])
    def test_a_place_is_free_again_after_an_end(self, how):
        """
        Another request is taken in the place of one that has ended.
        """
        rig = Rig(small_config(max_num_seqs=1))
        handle = rig.submit()
        if how == "finish":
            rig.run()
        else:
            rig.core.end_request(f"r{handle}", FinishReason.CANCELLED, rig.now)
        assert 1 == rig.submit()

    def test_an_id_in_use_is_refused_and_free_after_the_end(self):
        """
        A live request's id cannot be used again until it has ended.
        """
        rig = Rig()
        rig.submit(request_id="mine")
        with pytest.raises(DuplicateRequestId, match="mine"):
            rig.submit(request_id="mine")
        rig.run()
        rig.submit(request_id="mine")

    def test_a_refused_request_leaves_nothing(self):
        """
        A refused request changes only the counter of refusals.
        """
        rig = Rig()
        for _ in range(3):
            with pytest.raises(PromptTooLong):
                rig.submit(prompt_len=100)
        stats = rig.core.stats()
        assert (3, 0, 0) == (
            stats.refused_requests,
            stats.accepted_requests,
            stats.waiting_requests,
        )
        rig.core.check_integrity()

    def test_handles_are_unique(self):
        """
        Two live requests cannot have one handle: that is a bug of the submitter.
        """
        rig = Rig()
        rig.submit()
        with pytest.raises(Exception, match="handle 0 is in use"):
            rig.submit(handle=0, request_id="other")


def _filled(num_blocks: int, on_pressure: OnPressure) -> Rig:
    """Return a rig of 1024 blocks and threshold 0.9 with `num_blocks` used by decoding requests."""
    config = EngineConfig(max_batch_size=64, max_total_tokens=20000, max_model_len=16000)
    rig = Rig(config, options=CoreOptions(on_pressure=on_pressure), checked=False)
    rig.submit(prompt_len=16 * (num_blocks - 1) - 8, max_tokens=40)
    rig.submit(prompt_len=10, max_tokens=5)
    rig.step()
    assert num_blocks == rig.core.stats().used_blocks
    return rig


class TestPressure:
    def test_one_block_below_the_threshold_is_accepted(self):
        """
        A request is taken and admitted with 921 of 1024 blocks in use and threshold 0.9.
        """
        rig = _filled(921, OnPressure.REFUSE)
        handle = rig.submit()
        rig.core.schedule(rig.now)
        assert queue_position(rig.core, handle) is None

    def test_at_the_threshold_a_refusing_engine_refuses(self):
        """
        A request is refused at once with 922 of 1024 blocks in use and threshold 0.9.
        """
        rig = _filled(922, OnPressure.REFUSE)
        with pytest.raises(MemoryPressure, match="922 of 1024 KV blocks") as caught:
            rig.submit()
        assert "memory_threshold" == caught.value.metadata["limit"]
        assert caught.value.retry_after_s is not None

    def test_at_the_threshold_a_queueing_engine_waits_and_decodes(self):
        """
        A request waits with 922 of 1024 blocks in use while decodes go on, and runs after.
        """
        rig = _filled(922, OnPressure.QUEUE)
        handle = rig.submit()
        batch = rig.step()
        assert 2 == len(batch.row_slot)
        assert 0 == queue_position(rig.core, handle)
        rig.run()
        assert rig.expected(handle) == rig.outputs[handle]

    def test_pressure_ends_when_blocks_return(self):
        """
        A refusing engine takes requests again once blocks were given back.
        """
        rig = _filled(922, OnPressure.REFUSE)
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        rig.step()
        rig.submit()
        rig.run()


class TestLimits:
    def test_the_smaller_side_counts(self):
        """
        Each limit in force is the smaller of the configured one and the executor's.
        """
        geometry = ExecutorGeometry(
            num_blocks=500, block_size=16, num_slots=10, max_batch_size=20,
            max_total_tokens=9000, max_model_len=1000,
        )  # fmt: skip
        limits = Limits.of(EngineConfig(), geometry)
        assert (500, 10, 4096, 1000) == (
            limits.num_blocks,
            limits.max_running,
            limits.max_total_tokens,
            limits.max_model_len,
        )

    def test_other_block_sizes_are_incompatible(self):
        """
        A block size that differs from the executor's cannot be served.
        """
        geometry = geometry_of(EngineConfig(block_size=32))
        with pytest.raises(IncompatibleExecutor, match="16 in the configuration and 32"):
            Limits.of(EngineConfig(block_size=16), geometry)

    def test_an_invalid_configuration_is_refused(self):
        """
        The engine limits are validated when the core is made.
        """
        with pytest.raises(InvalidConfig, match="max_num_seqs must be greater than 0"):
            Limits.of(EngineConfig(max_num_seqs=0), geometry_of(EngineConfig()))

    @pytest.mark.parametrize("block_size", [1, 4, 7, 16])
    def test_blocks_are_rounded_up(self, block_size):
        """
        Holding n tokens takes ceil(n / block_size) blocks, and none for none.
        """
        limits = Limits.of(
            small_config(block_size=block_size), geometry_of(small_config(block_size=block_size))
        )
        lengths = np.arange(0, 40)
        expected = np.ceil(lengths / block_size).astype(int).tolist()
        assert expected == [limits.blocks_for(int(length)) for length in lengths]
