"""The embedded engine over a fake runner: its calls, errors and threads."""

from __future__ import annotations

import threading

import pytest

from tandem.engine_config import EngineConfig
from tandem_embedded import (
    ConfigError,
    CoreOptions,
    EngineMemoryError,
    ExecutionError,
    FinishReason,
    GenerationParams,
    InferenceEngine,
    RequestState,
    SchedulerError,
    SimpleTokenizer,
    ValidationError,
)
from tests.clients.embedded.fake_backend import engine_and_runner, expected

EIGHT = GenerationParams(max_tokens=8)


class TestServing:
    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_run_returns_each_request_once(self, window):
        """
        `run` completes each request once with its own tokens, however far steps are planned ahead.
        """
        engine, _ = engine_and_runner(window=window)
        prompts = [f"prompt {number}" for number in range(9)]
        ids = [engine.submit_request(prompt, EIGHT) for prompt in prompts]
        completed = {request.request_id: request for request in engine.run()}
        assert ids == sorted(completed)
        for request_id, prompt in zip(ids, prompts, strict=True):
            request = completed[request_id]
            assert expected(prompt, 8) == request.output_tokens
            assert SimpleTokenizer().decode(request.output_tokens) == request.output_text
            assert (True, 8, FinishReason.MAX_TOKENS) == (
                request.success,
                request.generated_tokens,
                request.finish_reason,
            )
        assert [] == engine.run()

    def test_steps_return_what_run_would(self):
        """
        The requests that all steps return together are those of run.
        """
        engine, _ = engine_and_runner()
        for number in range(6):
            engine.submit_request("x" * (number + 1), GenerationParams(max_tokens=number + 1))
        completed = []
        while engine.has_pending_work():
            completed += engine.step()
            stats = engine.get_memory_stats()
            assert stats.total_blocks == stats.used_blocks + stats.free_blocks
            engine.check_integrity()
        assert list(range(6)) == sorted(request.request_id for request in completed)

    def test_submitting_computes_nothing(self):
        """
        A submitted request waits until the engine is stepped.
        """
        engine, runner = engine_and_runner()
        request_id = engine.submit_request("hello")
        assert RequestState.PENDING is engine.get_request(request_id).state
        assert 0 == runner.executor.num_steps
        assert engine.has_pending_work()

    def test_an_idle_engine_has_no_work_and_no_blocks(self):
        """
        Every block is free when no request is pending.
        """
        engine, _ = engine_and_runner()
        assert not engine.has_pending_work()
        assert [] == engine.run()
        engine.submit_request("hello", EIGHT)
        while engine.has_pending_work():
            engine.step()
        assert 0 == engine.get_memory_stats().used_blocks

    @pytest.mark.slow
    def test_ten_thousand_ids_are_unique_and_grow(self):
        """
        Ids are never used twice.
        """
        engine, _ = engine_and_runner(
            EngineConfig(block_size=4, max_num_blocks=64, max_num_seqs=10000)
        )
        ids = [engine.submit_request([5], EIGHT) for _ in range(10000)]
        assert list(range(10000)) == ids

    def test_a_custom_tokenizer_is_used_end_to_end(self):
        """
        The tokenizer given makes prompts and output text.
        """

        class Shouting(SimpleTokenizer):
            def encode(self, text):
                return super().encode(text.upper())

            def decode(self, token_ids):
                return f"<{len(token_ids)} tokens>"

        engine, _ = engine_and_runner(tokenizer=Shouting())
        engine.submit_request("abc", EIGHT)
        completed = engine.run()[0]
        assert expected("ABC", 8) == completed.output_tokens
        assert "<8 tokens>" == completed.output_text

    def test_an_ending_token_has_no_text(self):
        """
        EOS counts as a token and is not part of the text; under ignore_eos it is like any other.
        """
        eos = expected("abc", 8)[4]
        engine, _ = engine_and_runner(eos_token_ids=(eos,))
        engine.submit_request("abc", EIGHT)
        engine.submit_request("abc", GenerationParams(max_tokens=8, ignore_eos=True))
        ended, ignored = sorted(engine.run(), key=lambda request: request.request_id)
        assert FinishReason.EOS == ended.finish_reason
        assert expected("abc", 8, {eos}) == ended.output_tokens
        assert SimpleTokenizer().decode(ended.output_tokens[:-1]) == ended.output_text
        assert expected("abc", 8) == ignored.output_tokens

    def test_stop_token_ids_end_a_request(self):
        """
        A stop token of the request ends it.
        """
        stop = expected("abc", 8)[3]
        engine, _ = engine_and_runner()
        engine.submit_request("abc", GenerationParams(max_tokens=8, stop_token_ids=(stop,)))
        completed = engine.run()[0]
        assert FinishReason.STOP_TOKEN == completed.finish_reason
        assert expected("abc", 8, {stop}) == completed.output_tokens

    def test_seeds_are_chosen_and_told(self):
        """
        A request without a seed gets one of its own; one with a seed keeps it.
        """
        engine, _ = engine_and_runner()
        for seed in (None, None, 0):
            engine.submit_request("abc", GenerationParams(max_tokens=1, seed=seed))
        first, second, third = (request.seed for request in engine.run())
        assert first != second
        assert 0 == third

    def test_requests_are_preempted_when_blocks_run_out(self):
        """
        With too few blocks for all, all still produce their tokens.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=12, max_batch_size=4, max_model_len=48,
            max_total_tokens=32, memory_threshold=1.0,
        )  # fmt: skip
        options = CoreOptions(schedule_conservativeness=0.0)
        engine, _ = engine_and_runner(config, window=2, options=options)
        prompts = ["abcdef", "ghijkl", "mnopqr"]
        for prompt in prompts:
            engine.submit_request(prompt, GenerationParams(max_tokens=30))
        completed = sorted(engine.run(), key=lambda request: request.request_id)
        assert [expected(p, 30) for p in prompts] == [r.output_tokens for r in completed]
        assert engine.get_metrics().preemptions == sum(r.num_preemptions for r in completed) > 0


class TestAsking:
    def test_a_live_request_can_be_looked_at(self):
        """
        A live request shows its tokens, parameters and state.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request([5, 6, 7], EIGHT)
        for _ in range(3):
            engine.step()
        request = engine.get_request(request_id)
        assert RequestState.DECODE is request.state
        assert ([5, 6, 7], 8) == (request.input_tokens, request.max_tokens)
        assert expected([5, 6, 7], 8)[:3] == request.output_tokens
        assert request.output_tokens == engine.output_tokens(request_id)

    def test_a_chunked_prompt_is_in_prefill(self):
        """
        A prompt of which a part was computed is in PREFILL.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request([5] * 60, EIGHT)
        engine.step()
        assert RequestState.PREFILL is engine.get_request(request_id).state

    @pytest.mark.parametrize("call", ["get_request", "output_tokens", "abort", "preempt"])
    def test_who_is_not_live_is_not_found(self, call):
        """
        Asking for a request that ended, or never was, is a scheduler error.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request("abc", EIGHT)
        engine.run()
        for absent in (request_id, 99):
            with pytest.raises(SchedulerError, match=r"^Scheduler error: no live request"):
                getattr(engine, call)(absent)

    def test_memory_stats_print_a_line(self):
        """
        Memory statistics print as used and total blocks with a percentage.
        """
        engine, _ = engine_and_runner()
        engine.submit_request([5] * 9, EIGHT)
        engine.step()
        stats = engine.get_memory_stats()
        assert "Memory usage: 3/64 blocks (4.7%)" == str(stats)
        assert (64, 3, 61, 1) == (
            stats.total_blocks,
            stats.used_blocks,
            stats.free_blocks,
            stats.num_sequences,
        )

    def test_metrics_add_up(self):
        """
        Accepted requests are completed, failed or active.
        """
        engine, runner = engine_and_runner()
        for number in range(5):
            engine.submit_request(f"{number}bc", GenerationParams(max_tokens=2 + 3 * number))
        engine.step()
        runner.executor.poisoned.add((3, 1))
        while engine.has_pending_work():
            engine.step()
            found = engine.get_metrics()
            assert found.total_requests == (
                found.completed_requests + found.failed_requests + found.active_sequences
            )
        assert (5, 4, 1, 0) == (
            found.total_requests,
            found.completed_requests,
            found.failed_requests,
            found.active_sequences,
        )

    def test_an_abort_is_delivered_once(self):
        """
        An aborted request comes back as CANCELLED with its output so far, and its blocks return.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request("abc", EIGHT)
        for _ in range(3):
            engine.step()
        engine.abort(request_id)
        completed = engine.run()
        assert [(request_id, FinishReason.CANCELLED, 3)] == [
            (request.request_id, request.finish_reason, request.generated_tokens)
            for request in completed
        ]
        assert 0 == engine.get_memory_stats().used_blocks

    def test_a_preempted_request_goes_on_with_its_tokens(self):
        """
        Taking a request's blocks away changes nothing of its output.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request("abc", EIGHT)
        for _ in range(3):
            engine.step()
        engine.preempt(request_id)
        engine.preempt(request_id)
        completed = engine.run()[0]
        assert (1, expected("abc", 8)) == (completed.num_preemptions, completed.output_tokens)


class TestErrors:
    def test_an_invalid_configuration_loads_nothing(self, tmp_path):
        """
        Limits are checked before anything is loaded: the directory is not even looked at.
        """
        with pytest.raises(ConfigError) as caught:
            InferenceEngine(EngineConfig(block_size=0), tmp_path / "absent")
        assert "Config error: block_size must be greater than 0" == str(caught.value)

    def test_a_missing_model_is_a_config_error(self, tmp_path):
        """
        A directory that is not there is named.
        """
        with pytest.raises(ConfigError, match=r"^Config error: .*absent does not exist"):
            InferenceEngine(EngineConfig(), tmp_path / "absent")

    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"window": 0}, "window is 0: it must be from 1 to 16"),
            ({"window": 17}, "window is 17: it must be from 1 to 16"),
            ({"options": CoreOptions(window=8)}, r"CoreOptions\.window is 8, which has no effect"),
            ({"options": CoreOptions(run_ahead=1)}, r"CoreOptions\.run_ahead is 1, which has no"),
            ({"kv_cache_management_mode": "keep"}, "choose one of persist, offload, recompute"),
            ({"buffer_size_gb": 0.0}, "buffer_size_gb must be over 0"),
        ],
        ids=["no-window", "window", "options-window", "run-ahead", "kv-mode", "buffer"],
    )
    def test_a_wrong_setting_is_a_config_error(self, settings, text):
        """
        A setting that is out of range, or that one process has no use for, is refused with what to
        do, before a model is looked for.
        """
        with pytest.raises(ConfigError, match=rf"^Config error: .*{text}"):
            InferenceEngine(EngineConfig(), "absent", **settings)

    def test_a_model_in_the_place_of_the_limits_is_told_apart(self):
        """
        A path as the first argument is refused with where it belongs.
        """
        with pytest.raises(ConfigError, match="the model is the second argument"):
            InferenceEngine("deploy/models/tandem-py")

    def test_parameters_of_another_type_are_refused(self):
        """
        A dictionary is no GenerationParams.
        """
        engine, _ = engine_and_runner()
        with pytest.raises(ValidationError, match="params must be GenerationParams"):
            engine.submit_request("abc", {"max_tokens": 3})

    def test_blocks_and_gigabytes_are_not_both_taken(self):
        """
        The KV memory is sized once.
        """
        with pytest.raises(ConfigError, match="keep one of them"):
            InferenceEngine(EngineConfig(max_num_blocks=512), "absent", buffer_size_gb=1.0)

    def test_an_engine_without_any_model_says_how_to_name_one(self, monkeypatch):
        """
        An engine without a given or bundled model is refused with an error that says what it takes.
        """
        monkeypatch.setattr("tandem_embedded.settings.bundled_model", lambda: None)
        with pytest.raises(ConfigError, match=r"InferenceEngine\(config, model_dir\) takes"):
            InferenceEngine(EngineConfig())

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "text"),
        [
            ("", 8, "the prompt is empty"),
            ([], 8, "the prompt has no token"),
            ([5] * 129, 8, "max_model_len is 128"),
            ([5] * 120, 9, "ask for at most 8 tokens"),
            ([358], 8, "token id 358 is not in the vocabulary, which is 0 to 357"),
            ([-1], 8, "token id -1"),
            ([1.5], 8, r"text or whole numbers, got \[1\.5\]"),
            (7, 8, "text or whole numbers, got 7"),
        ],
        ids=["text", "ids", "prompt", "total", "vocabulary", "negative", "real", "number"],
    )
    def test_a_wrong_request_is_a_validation_error(self, prompt, max_tokens, text):
        """
        Requests that can never run are refused with what is wrong, and leave nothing.
        """
        engine, _ = engine_and_runner()
        with pytest.raises(ValidationError, match=text) as caught:
            engine.submit_request(prompt, GenerationParams(max_tokens=max_tokens))
        assert str(caught.value).startswith("Validation error: ")
        assert not engine.has_pending_work()
        assert 0 == engine.submit_request("abc")

    def test_text_needs_a_tokenizer(self):
        """
        Without a tokenizer token ids are served and text is refused.
        """
        engine, _ = engine_and_runner(tokenizer=None)
        with pytest.raises(ValidationError, match=r"no tokenizer\.json"):
            engine.submit_request("abc")
        engine.submit_request([5], EIGHT)
        assert "" == engine.run()[0].output_text

    def test_pressure_refuses_at_once_by_default(self):
        """
        At memory_threshold a submission fails with a memory error and retry advice.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=10, max_model_len=40, memory_threshold=0.5
        )
        engine, _ = engine_and_runner(config)
        engine.submit_request([5] * 20, EIGHT)
        engine.step()
        with pytest.raises(EngineMemoryError, match=r"^Memory error: 5 of 10 KV blocks") as caught:
            engine.submit_request([5], EIGHT)
        assert ("MEMORY_PRESSURE", 1.0) == (caught.value.reason, caught.value.retry_after_s)

    def test_pressure_queues_where_asked(self):
        """
        With OnPressure.QUEUE the request waits instead.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=10, max_model_len=40, memory_threshold=0.5
        )
        engine, _ = engine_and_runner(config, options=CoreOptions())
        engine.submit_request([5] * 20, EIGHT)
        engine.step()
        engine.submit_request([5], EIGHT)
        assert 2 == len(engine.run())

    def test_a_full_system_is_a_scheduler_error(self):
        """
        Over max_num_seqs a submission fails with retry advice.
        """
        engine, _ = engine_and_runner(EngineConfig(max_num_seqs=1))
        engine.submit_request([5])
        with pytest.raises(SchedulerError, match=r"^Scheduler error: .*max_num_seqs is 1"):
            engine.submit_request([5])

    def test_a_bad_row_fails_one_request(self):
        """
        NaN in one row fails that request with an execution error; others complete.
        """
        engine, runner = engine_and_runner()
        for number in range(3):
            engine.submit_request(f"{number}bc", EIGHT)
        engine.step()
        runner.executor.poisoned.add((1, 1))
        completed = {request.request_id: request for request in engine.run()}
        assert isinstance(completed[1].error, ExecutionError)
        assert str(completed[1].error).startswith("Execution error: ")
        assert (True, False, True) == tuple(completed[number].success for number in range(3))


class TestThreads:
    def test_threads_can_submit_while_another_runs(self):
        """
        With eight threads submitting during run, ids are unique and no request is lost.
        """
        config = EngineConfig(
            block_size=4, max_num_blocks=256, max_num_seqs=1000, memory_threshold=1.0
        )
        engine, _ = engine_and_runner(config, options=CoreOptions())
        submitted: list[list[int]] = [[] for _ in range(8)]

        def submit(number: int) -> None:
            for length in range(25):
                prompt = [number + 4] * (length + 1)
                submitted[number].append(engine.submit_request(prompt, EIGHT))

        threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        completed = []
        while any(thread.is_alive() for thread in threads):
            completed += engine.run()
        completed += engine.run()
        ids = sorted(request_id for of_thread in submitted for request_id in of_thread)
        assert list(range(200)) == ids
        assert ids == sorted(request.request_id for request in completed)

    def test_two_threads_cannot_drive_at_once(self):
        """
        Each request is delivered exactly once even if two threads run the engine.
        """
        engine, _ = engine_and_runner()
        for _ in range(40):
            engine.submit_request("abc", EIGHT)
        delivered: list[int] = []

        def drive() -> None:
            delivered.extend(request.request_id for request in engine.run())

        threads = [threading.Thread(target=drive) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert list(range(40)) == sorted(delivered)
