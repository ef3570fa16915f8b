"""An embedded engine's requests after a step that failed."""

from __future__ import annotations

import pytest

from tandem.engine_config import EngineConfig
from tandem.errors import InternalError, SessionLost
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded import (
    CoreOptions,
    EngineMemoryError,
    ExecutionError,
    FinishReason,
    GenerationParams,
    SchedulerError,
)
from tests.clients.embedded.fake_backend import engine_and_runner, expected

EIGHT = GenerationParams(max_tokens=8)
SCORED = GenerationParams(max_tokens=0, prompt_logprobs=0)
WIDE = EngineConfig(
    block_size=4,
    max_num_blocks=256,
    max_batch_size=16,
    max_model_len=128,
    max_total_tokens=64,
    memory_threshold=1.0,
)
BOLD = CoreOptions(schedule_conservativeness=0.0)


def engine_after_the_last_failure():
    """Return an engine whose steps failed as often as may be, and the one request in them."""
    engine, runner = engine_and_runner()
    request_id = engine.submit_request("abc", EIGHT)
    runner.fail_next = [RuntimeError("device is gone")] * 3
    for _ in range(3):
        engine.step()
    return engine, request_id


class TestRecovery:
    @pytest.mark.parametrize("error", [SessionLost("gap"), RuntimeError("device")])
    def test_a_failed_step_is_recomputed(self, error):
        """
        A step that fails is tried again from nothing, and no token is lost or repeated.
        """
        engine, runner = engine_and_runner(window=2)
        engine.submit_request("abc", EIGHT)
        for _ in range(4):
            engine.step()
        runner.fail_next = [error, error]
        completed = engine.run()[0]
        assert expected("abc", 8) == completed.output_tokens
        assert 2 == runner.num_resets

    def test_three_failures_in_a_row_fail_the_requests(self):
        """
        After two retries all requests fail with what went wrong, and the engine can be used on.
        """
        engine, runner = engine_and_runner()
        engine.submit_request("abc", EIGHT)
        engine.submit_request("abcd", EIGHT)
        runner.fail_next = [RuntimeError("device is gone")] * 3
        completed = engine.run()
        assert 2 == len(completed)
        for request in completed:
            assert isinstance(request.error, ExecutionError)
            assert "device is gone" in request.error.message
        engine.submit_request("abc", EIGHT)
        assert expected("abc", 8) == engine.run()[0].output_tokens

    @pytest.mark.parametrize("num_failures", [1, 9])
    @pytest.mark.parametrize("error", [RuntimeError("device"), MemoryError()])
    def test_runner_that_cannot_be_cleared_counts_as_failed(self, num_failures, error, monkeypatch):
        """
        Where a runner cannot be cleared after a failed step, that is tried again after the next
        one, which fails too; requests fail where it goes on like that.
        """
        engine, runner = engine_and_runner()
        engine.submit_request("abc", EIGHT)
        engine.step()
        reset, errors = runner.reset, [OSError("still gone")] * num_failures

        def reset_at_last() -> None:
            if errors:
                raise errors.pop()
            reset()

        monkeypatch.setattr(runner, "reset", reset_at_last)
        runner.fail_next = [error]
        (completed,) = [request for _ in range(20) for request in engine.step()]
        if num_failures == 1:
            assert expected("abc", 8) == completed.output_tokens
        else:
            assert "still gone" in completed.error.message
        assert not engine.has_pending_work()

    def test_bug_costs_no_result_of_a_run(self):
        """
        A run that a bug ends has lost no request that was over: the next one returns it.
        """
        engine, runner = engine_and_runner()
        engine.submit_request("abc", GenerationParams(max_tokens=1))
        engine.submit_request("abcd", EIGHT)
        execute = runner.execute

        def fail_later(batch: Batch, step_id: int) -> StepResult:
            if step_id == 3:
                raise InternalError("a bug")
            return execute(batch, step_id)

        runner.execute = fail_later
        with pytest.raises(ExecutionError, match="a bug"):
            engine.run()
        first, second = engine.run()
        assert expected("abc", 1) == first.output_tokens
        assert expected("abcd", 8) == second.output_tokens

    def test_request_over_in_the_core_alone_is_returned(self):
        """
        A run returns a request that has ended in the core, where that is not recorded yet; until
        then its result is pending, and the request is not live any more.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request("abc", EIGHT)
        engine._core.end_request(str(request_id), FinishReason.CANCELLED, 0.0)
        assert engine.has_pending_work()
        for question in (engine.get_request, engine.output_tokens):
            with pytest.raises(SchedulerError, match="no live request"):
                question(request_id)
        assert [request_id] == [request.request_id for request in engine.run()]
        assert not engine.has_pending_work()

    def test_bug_behind_a_result_is_not_the_runners(self, monkeypatch):
        """
        An error where results are recorded is raised, whatever its type, and no step is computed
        again.
        """
        engine, runner = engine_and_runner()
        engine.submit_request("abc", EIGHT)

        def fail(_core: object, _now: float) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(engine._ledger, "settle", fail)
            with pytest.raises(RuntimeError, match="a bug"):
                engine.step()
        assert expected("abc", 8) == engine.run()[0].output_tokens
        assert 0 == runner.num_resets

    def test_request_submitted_after_the_last_failure_is_tried(self):
        """
        A request that comes after a step of others failed for the last time gets its tokens.
        """
        engine, failed = engine_after_the_last_failure()
        engine.submit_request("abcd", EIGHT)
        first, second = engine.run()
        assert failed == first.request_id
        assert "device is gone" in first.error.message
        assert expected("abcd", 8) == second.output_tokens

    def test_request_submitted_after_the_last_failure_is_tried_as_often(self):
        """
        A request whose steps fail too ends after as many as the one before: the end of that one was
        no progress.
        """
        engine, _ = engine_after_the_last_failure()
        engine._backends[0].runner.fail_next = [RuntimeError("device is gone")] * 3
        engine.submit_request("abcd", EIGHT)
        assert all("device is gone" in str(request.error) for request in engine.run())
        assert expected("abcd", 8) == engine.complete("abcd", EIGHT).output_tokens

    def test_request_submitted_after_an_abort_is_tried(self):
        """
        A request aborted after its step failed for the last time takes no other one with it.
        """
        engine, aborted = engine_after_the_last_failure()
        engine.abort(aborted)
        assert expected("fresh", 8) == engine.complete("fresh", EIGHT).output_tokens

    def test_scored_request_counts_as_progress(self):
        """
        Failures far apart fail no request, also where requests end without a token in between.
        """
        engine, runner = engine_and_runner()
        for number in range(40):
            if number % 10 == 9:
                runner.fail_next = [RuntimeError("once in a while")]
            completed = engine.complete([number, 5, 6], SCORED)
            assert completed.success
        assert 4 == runner.num_resets

    @pytest.mark.parametrize("params", [EIGHT, SCORED])
    def test_long_prompt_gets_on_from_failure_to_failure(self, params):
        """
        A prompt of many chunks survives more failures than are retries, if each comes later.
        """
        engine, runner = engine_and_runner()
        execute, furthest, num_failures = runner.execute, 0, 0

        def fail_where_new(batch: Batch, step_id: int) -> StepResult:
            nonlocal furthest, num_failures
            start = max(batch.row_start.tolist(), default=0)
            if furthest < start < 100:
                furthest = start
                num_failures += 1
                raise RuntimeError("device is gone")
            return execute(batch, step_id)

        runner.execute = fail_where_new
        prompt = [5] * 110
        completed = engine.complete(prompt, params)
        assert completed.success
        assert expected(prompt, params.max_tokens) == completed.output_tokens
        assert 3 <= num_failures == runner.num_resets

    def test_prompt_that_fails_at_a_later_chunk_fails_its_request(self):
        """
        A chunk of a prompt that is computed again does not count as success: the step behind it is
        tried three times, like any other.
        """
        engine, runner = engine_and_runner()
        execute, failed = runner.execute, []

        def fail_later(batch: Batch, step_id: int) -> StepResult:
            if any(batch.row_start > 0):
                failed.append(step_id)
                raise RuntimeError("device is gone")
            return execute(batch, step_id)

        runner.execute = fail_later
        engine.submit_request([5] * 50, EIGHT)
        (completed,) = [request for _ in range(20) for request in engine.step()]
        assert "device is gone" in completed.error.message
        assert 3 == len(failed)


class TestOutOfMemory:
    @pytest.mark.parametrize("window", [1, 2])
    def test_steps_without_memory_become_smaller_and_no_request_fails(self, window):
        """
        Steps without memory are halved until they fit, and every request gets its tokens, however
        many failures in a row that takes.
        """
        engine, runner = engine_and_runner(WIDE, window=window, options=BOLD)
        runner.fits = lambda batch: len(batch.row_slot) <= 1
        prompts = [f"prompt {number:02}" for number in range(16)]
        for prompt in prompts:
            engine.submit_request(prompt, EIGHT)
        completed = sorted(engine.run(), key=lambda request: request.request_id)
        assert [expected(prompt, 8) for prompt in prompts] == [r.output_tokens for r in completed]
        assert 4 <= runner.num_resets <= 5
        assert 1 == max(runner.row_counts)

    def test_a_request_that_has_no_memory_alone_fails_alone(self):
        """
        A request that runs out of memory in its own steps again and again fails with a memory
        error; the others end well.
        """
        engine, runner = engine_and_runner(WIDE, options=BOLD)
        runner.fits = lambda batch: all(batch.row_start + batch.row_num_tokens <= 40)
        engine.submit_request([5] * 4, GenerationParams(max_tokens=100))
        for number in range(4):
            engine.submit_request([6, number + 4], EIGHT)
        failed, *others = sorted(engine.run(), key=lambda request: request.request_id)
        assert isinstance(failed.error, EngineMemoryError)
        assert "OUT_OF_MEMORY" == failed.error.reason
        assert [expected([6, number + 4], 8) for number in range(4)] == [
            request.output_tokens for request in others
        ]

    def test_memory_of_the_host_counts_too(self):
        """
        A MemoryError of Python is the same: smaller steps, no failed request.
        """
        engine, runner = engine_and_runner(WIDE)
        engine.submit_request("abc", EIGHT)
        runner.fail_next = [MemoryError()] * 2
        assert expected("abc", 8) == engine.run()[0].output_tokens
