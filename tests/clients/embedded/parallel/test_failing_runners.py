"""Several runners in one engine, of which some fail, over runners without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tandem.errors import InternalError, OutOfMemory, SessionLost
from tandem.link.batch import Batch
from tandem_embedded import ExecutionError
from tandem_embedded.parallel.retries import MAX_STEP_RETRIES
from tests.clients.embedded.fake_backend import expected
from tests.clients.embedded.parallel.fleet import (
    EIGHT,
    SHORT_PROMPTS,
    Turns,
    by_id,
    check_all,
    fleet,
    submit_all,
)

ENOUGH_S = 30.0


def always(error: Exception) -> Callable[[Batch], None]:
    """Return what a runner does before its steps if all of them fail with this error."""

    def fail(_batch: Batch) -> None:
        raise error

    return fail


class TestFailures:
    @pytest.mark.parametrize("error", [RuntimeError("device"), OutOfMemory("full"), MemoryError()])
    @pytest.mark.parametrize("window", [1, 2])
    def test_step_that_fails_costs_no_request(self, error, window):
        """
        Requests of a runner whose step fails are computed again, there or elsewhere.
        """
        engine, runners = fleet(window=window)
        submit_all(engine)
        for _ in range(4):
            engine.step()
        runners[1].fail_next = [error, error]
        check_all(engine)
        assert 2 == runners[1].num_resets
        assert 0 == runners[0].num_resets

    def test_runner_that_always_fails_costs_no_request(self):
        """
        While another runner computes, no request fails of a runner that cannot.
        """
        engine, runners = fleet()
        runners[0].before = always(RuntimeError("device is gone"))
        submit_all(engine)
        check_all(engine)

    def test_runner_that_cannot_be_cleared_costs_no_request(self, monkeypatch):
        """
        Requests of a runner that fails and cannot be cleared are computed elsewhere.
        """
        engine, runners = fleet()
        submit_all(engine)
        engine.step()

        def fail() -> None:
            raise RuntimeError("device is gone")

        monkeypatch.setattr(runners[0], "reset", fail)
        runners[0].fail_next = [RuntimeError("device is gone")]
        check_all(engine)

    @pytest.mark.parametrize("num_runners", [2, 3])
    @pytest.mark.parametrize("num_good", [0, 1, 4, 16])
    @pytest.mark.parametrize("num_poison", [1, 2, 3, 6])
    def test_requests_that_no_runner_survives_fail_alone(self, num_poison, num_good, num_runners):
        """
        Requests under which every step fails end with errors, and the others get their tokens. Of
        four that fail one at a time the core rather believes that the runners are broken.
        """
        engine, runners = fleet(num_runners)

        def fail(batch) -> None:
            if any(9 in admission.token_ids for admission in batch.admits):
                raise RuntimeError("a bug")

        for runner in runners:
            runner.before = fail
        for number in range(num_poison):
            engine.submit_request([9, 9, 10 + number], EIGHT)
        prompts = SHORT_PROMPTS[:num_good]
        for prompt in prompts:
            engine.submit_request(prompt, EIGHT)
        completed = by_id(engine.run())
        reasons = {one.error.reason for one in completed[:num_poison]}
        assert reasons <= {"POISON_REQUEST"} | ({"EXECUTOR_LOST"} if num_poison >= 4 else set())
        found = [one.output_tokens for one in completed[num_poison:]]
        assert [expected(prompt, 8) for prompt in prompts] == found
        engine.check_integrity()

    def test_requests_fail_where_nothing_can_be_computed(self):
        """
        With every runner broken all requests fail, and the engine can be used once they work.
        """
        engine, runners = fleet()
        for runner in runners:
            runner.before = always(RuntimeError("device is gone"))
        submit_all(engine)
        assert all(request.error is not None for request in engine.run())
        for runner in runners:
            runner.before = lambda _batch: None
        submit_all(engine)
        found = [request.output_tokens for request in by_id(engine.run())]
        assert [expected(prompt, 8) for prompt in SHORT_PROMPTS] == found

    @pytest.mark.parametrize(
        ("error", "raised"),
        [
            (ValueError("a bug"), ValueError),
            (NotImplementedError("a bug"), NotImplementedError),
            (RecursionError("a bug"), RecursionError),
            (InternalError("a bug"), ExecutionError),
        ],
    )
    def test_bug_of_a_runner_is_raised_and_the_engine_goes_on(self, error, raised):
        """
        An error that no step should raise reaches the caller once, and no request is lost.
        """
        engine, runners = fleet()
        submit_all(engine)
        engine.step()
        runners[1].fail_next = [error]
        with pytest.raises(raised, match="a bug"):
            engine.run()
        check_all(engine)

    def test_request_that_bugs_end_comes_with_the_next_run(self):
        """
        A request that the core ends while a run raises a bug is returned by the run after it.
        """
        engine, runners = fleet()

        def fail(batch: Batch) -> None:
            if batch.num_tokens:
                raise ValueError("a bug")

        for runner in runners:
            runner.before = fail
        engine.submit_request("abc", EIGHT)
        for _ in range(3):
            with pytest.raises(ValueError, match="a bug"):
                engine.run()
        (completed,) = engine.run()
        assert "POISON_REQUEST" == completed.error.reason
        assert not engine.has_pending_work()


class TestRetries:
    @pytest.mark.parametrize("num_failures", [1, 2])
    def test_runner_uses_its_retries_after_another_has_none(self, num_failures):
        """
        A runner whose step fails, once or twice after another runner has failed too often, tries it
        again, and no request fails.
        """
        engine, runners = fleet()
        has_failed_often = threading.Event()
        failures = []

        def fail(_batch: Batch) -> None:
            failures.append("first")
            if failures.count("first") > MAX_STEP_RETRIES:
                has_failed_often.set()
            raise SessionLost("a step failed")

        def fail_after_it(_batch: Batch) -> None:
            assert has_failed_often.wait(ENOUGH_S)
            if failures.count("second") < num_failures:
                failures.append("second")
                raise SessionLost("a step failed")

        runners[0].before, runners[1].before = fail, fail_after_it
        submit_all(engine)
        check_all(engine)
        assert num_failures == failures.count("second")

    def test_request_alone_is_tried_as_often_on_each_runner(self):
        """
        Of a runner that is broken and one that fails as often as it may, the second computes a
        request.
        """
        engine, runners = fleet()
        runners[0].before = always(SessionLost("a step failed"))
        runners[1].fail_next = [SessionLost("a step failed")] * MAX_STEP_RETRIES
        assert expected("abc", 8) == engine.complete("abc", EIGHT).output_tokens

    @pytest.mark.parametrize("num_broken", [1, 2])
    @pytest.mark.parametrize("num_requests", [1, 2, 9])
    def test_broken_runners_leave_the_last_requests_to_others(self, num_broken, num_requests):
        """
        A runner that failed too often takes no request that another one could compute.
        """
        engine, runners = fleet(num_broken + 1)
        for runner in runners[:num_broken]:
            runner.before = always(SessionLost("a step failed"))
        prompts = SHORT_PROMPTS[:num_requests]
        for prompt in prompts:
            engine.submit_request(prompt, EIGHT)
        found = [request.output_tokens for request in by_id(engine.run())]
        assert [expected(prompt, 8) for prompt in prompts] == found

    def test_requests_fail_where_runners_fail_in_turn(self):
        """
        Runners that only fail end all requests, also where each fails while another computes; the
        engine can be used once they work.
        """
        engine, runners = fleet()
        turns = Turns(MAX_STEP_RETRIES + 1)
        for number, runner in enumerate(runners):
            runner.before = lambda _batch, number=number: turns.fail(number)
        submit_all(engine)
        completed = engine.run()
        assert len(SHORT_PROMPTS) == len(completed)
        assert all("failed in its turn" in str(request.error) for request in completed)
        submit_all(engine)
        check_all(engine)

    def test_request_ends_where_a_runner_with_retries_left_may_not_try_it(self):
        """
        Where one runner is blamed for a request's failures, and the other one has failed too often,
        the request fails, although the first has a retry left.
        """
        engine, runners = fleet()
        runners[0].before = always(SessionLost("a step failed"))
        runners[1].before = always(RuntimeError("device is gone"))
        engine.submit_request("abc", EIGHT)
        (completed,) = [request for _ in range(50) for request in engine.step()]
        assert isinstance(completed.error, ExecutionError)
        assert MAX_STEP_RETRIES >= runners[1].num_resets
        assert not engine.has_pending_work()
