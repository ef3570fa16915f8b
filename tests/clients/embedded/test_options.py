"""Scheduling of an embedded engine, by the core's whole choice of options."""

from __future__ import annotations

import pytest

from tandem.engine_config import EngineConfig
from tandem_embedded import (
    ConfigError,
    CoreOptions,
    EngineMemoryError,
    GenerationParams,
    Overlength,
    SchedulePolicy,
    ValidationError,
)
from tests.clients.embedded.fake_backend import engine_and_runner, expected

EIGHT = GenerationParams(max_tokens=8)
PROMPT = [5 + i % 40 for i in range(30)]


class TestOptions:
    def test_equal_prompts_share_their_kv(self):
        """
        The second of two equal prompts finds all full blocks of the first but the last, and its
        tokens are the same.
        """
        engine, _ = engine_and_runner()
        for _ in range(2):
            engine.submit_request(PROMPT, EIGHT)
        first, second = sorted(engine.run(), key=lambda request: request.request_id)
        assert (0, 28) == (first.num_cached_tokens, second.num_cached_tokens)
        assert expected(PROMPT, 8) == first.output_tokens == second.output_tokens

    def test_prefix_caching_can_be_off(self):
        """
        Without prefix caching nothing is found, and an idle engine holds no block back.
        """
        engine, _ = engine_and_runner(options=CoreOptions(prefix_caching=False))
        for _ in range(2):
            engine.submit_request(PROMPT, EIGHT)
        assert [0, 0] == [request.num_cached_tokens for request in engine.run()]

    def test_cached_blocks_count_as_free(self):
        """
        Blocks that only the prefix cache keeps count as free: used and free add up to all.
        """
        engine, _ = engine_and_runner()
        engine.submit_request(PROMPT, EIGHT)
        engine.run()
        stats = engine.get_memory_stats()
        assert (0, stats.total_blocks) == (stats.used_blocks, stats.free_blocks)

    def test_long_prompt_can_be_truncated(self):
        """
        Under TRUNCATE a prompt over max_model_len loses its oldest tokens, and the result says so.
        """
        config = EngineConfig(block_size=4, max_num_blocks=64, max_model_len=24, max_batch_size=4)
        engine, _ = engine_and_runner(config, options=CoreOptions(overlength=Overlength.TRUNCATE))
        engine.submit_request(PROMPT, EIGHT)
        (done,) = engine.run()
        kept = PROMPT[done.num_truncated_tokens :]
        assert 0 < done.num_truncated_tokens
        assert len(kept) == done.num_prompt_tokens < 24
        assert expected(kept, len(done.output_tokens)) == done.output_tokens

    def test_longest_output_first(self):
        """
        The order of the queue follows the policy asked for.
        """
        config = EngineConfig(block_size=4, max_num_blocks=64, max_model_len=64, max_batch_size=1)
        engine, _ = engine_and_runner(
            config, options=CoreOptions(schedule_policy=SchedulePolicy.LOF)
        )
        for max_tokens in (2, 9, 5):
            engine.submit_request([7, max_tokens], GenerationParams(max_tokens=max_tokens))
        assert [1, 2, 0] == [request.request_id for request in engine.run()]

    def test_default_still_refuses_under_pressure(self):
        """
        An engine without options refuses at memory_threshold; options say it themselves.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=10, max_model_len=40, memory_threshold=0.5
        )
        engine, _ = engine_and_runner(config)
        engine.submit_request([5] * 20, EIGHT)
        engine.step()
        with pytest.raises(EngineMemoryError):
            engine.submit_request([5], EIGHT)

    @pytest.mark.parametrize(
        "options",
        [CoreOptions(schedule_conservativeness=-1.0), CoreOptions(max_prefill_share=0.0)],
        ids=["conservativeness", "share"],
    )
    def test_senseless_options_are_config_errors(self, options):
        """
        Options are judged before anything is made.
        """
        with pytest.raises(ConfigError):
            engine_and_runner(options=options)

    def test_limits_of_the_queue_hold(self):
        """
        A prompt that is more than may ever wait is refused as one that never fits.
        """
        engine, _ = engine_and_runner(options=CoreOptions(max_queued_tokens=10))
        with pytest.raises(ValidationError, match="max_queued_tokens is 10"):
            engine.submit_request(PROMPT, EIGHT)
