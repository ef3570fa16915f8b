"""Several runners in one engine, over runners without a model."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from scheduler_svc.core.request.options import Routing
from tandem.errors import OutOfMemory
from tandem_embedded import (
    CoreOptions,
    EngineMemoryError,
    FinishReason,
    SchedulerError,
)
from tests.clients.embedded.fake_backend import expected
from tests.clients.embedded.parallel.fleet import (
    EIGHT,
    SHORT_PROMPTS,
    by_id,
    check_all,
    fleet,
    submit_all,
)

ENOUGH_S = 30.0


def threads_of_runners() -> set[threading.Thread]:
    """Return the threads of all engines; those of forgotten ones end some time."""
    return {one for one in threading.enumerate() if one.name.startswith("tandem-runner")}


class TestServing:
    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_every_request_gets_its_tokens(self, count, window):
        """
        Requests are spread over all runners and completed once each, however far steps are planned
        ahead.
        """
        engine, runners = fleet(count, window=window)
        submit_all(engine)
        check_all(engine)
        assert all(sum(runner.row_counts) for runner in runners)
        steps = engine.get_metrics().steps_by_runner
        assert [len(runner.row_counts) for runner in runners] == list(steps)

    def test_statistics_are_those_of_all(self):
        """
        Blocks of all runners count, and requests that run on any.
        """
        engine, _ = fleet()
        submit_all(engine)
        for _ in range(4):
            engine.step()
        stats = engine.get_memory_stats()
        assert 128 == stats.total_blocks
        assert 4 < stats.num_sequences <= 8

    def test_runners_compute_at_the_same_time(self):
        """
        A step of one runner may wait for a step of another.
        """
        engine, runners = fleet()
        both = threading.Barrier(2)
        is_first = {0: True, 1: True}

        def meet(number: int) -> None:
            if is_first[number]:
                is_first[number] = False
                both.wait(ENOUGH_S)

        for number, runner in enumerate(runners):
            runner.before = lambda _batch, number=number: meet(number)
        submit_all(engine)
        check_all(engine)

    def test_idle_runner_takes_what_comes_while_the_other_computes(self):
        """
        A request that is submitted while one runner computes and another is idle is served at once,
        though no result wakes the thread that drives.
        """
        engine, runners = fleet()
        is_computing, may_go_on = threading.Event(), threading.Event()

        def hold(_batch) -> None:
            is_computing.set()
            assert may_go_on.wait(ENOUGH_S)

        def pass_by(_batch) -> None:
            may_go_on.set()

        runners[0].before, runners[1].before = hold, pass_by
        engine.submit_request("abc", EIGHT)
        found = []
        driving = threading.Thread(target=lambda: found.extend(engine.run()))
        driving.start()
        assert is_computing.wait(ENOUGH_S)
        engine.submit_request("abcd", EIGHT)
        driving.join(ENOUGH_S)
        assert not driving.is_alive()
        outputs = [request.output_tokens for request in by_id(found)]
        assert [expected("abc", 8), expected("abcd", 8)] == outputs

    def test_requests_end_where_they_are_aborted(self):
        """
        Aborted requests keep their output so far, on whichever runner they were; the others go on.
        """
        engine, _ = fleet()
        submit_all(engine)
        for _ in range(6):
            engine.step()
        aborted = {0, 3, 15}
        for number in aborted:
            engine.abort(number)
        for request in engine.run():
            wanted = expected(SHORT_PROMPTS[request.request_id], 8)
            if request.request_id in aborted:
                assert FinishReason.CANCELLED is request.finish_reason
                assert wanted[: request.generated_tokens] == request.output_tokens
            else:
                assert wanted == request.output_tokens
        engine.check_integrity()

    def test_streams_and_threads_share_the_runners(self):
        """
        Threads that stream side by side get their own text.
        """
        engine, runners = fleet()
        found: dict[str, str] = {}

        def stream(prompt: str) -> None:
            found[prompt] = "".join(piece.text for piece in engine.stream(prompt, EIGHT))

        threads = [threading.Thread(target=stream, args=(prompt,)) for prompt in SHORT_PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ENOUGH_S)
        decode = engine.tokenizer.decode
        assert {prompt: decode(expected(prompt, 8)) for prompt in SHORT_PROMPTS} == found
        assert all(sum(runner.row_counts) for runner in runners)

    @pytest.mark.parametrize("routing", [Routing.LONGEST_PREFIX, Routing.FIRST_PREFIX_BLOCK])
    def test_prompts_go_where_their_prefix_is(self, routing):
        """
        Under routing by prefix, a prompt is computed by the runner that has its beginning.
        """
        engine, _ = fleet(options=CoreOptions(routing=routing))
        first, second = [5] * 24, [6] * 24
        for prompt in (first, second):
            engine.submit_request(prompt, EIGHT)
        engine.run()
        for _ in range(3):
            for prompt in (first, second):
                engine.submit_request([*prompt, 7], EIGHT)
            assert [24, 24] == [request.num_cached_tokens for request in engine.run()]


def refuse(*_mode: object) -> None:
    """Stand in for a runner's `suspend` or `resume`."""
    raise OutOfMemory("the memory is taken")


class TestSuspension:
    @pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
    @pytest.mark.parametrize("window", [1, 3])
    def test_all_runners_are_suspended_and_resumed(self, mode, window):
        """
        Requests on all runners have their tokens after a suspension in the middle.
        """
        engine, runners = fleet(window=window, kv_cache_management_mode=mode)
        submit_all(engine)
        for _ in range(5):
            engine.step()
        engine.suspend()
        assert engine.is_suspended
        assert all(runner.executor.is_suspended for runner in runners)
        with pytest.raises(SchedulerError, match="call resume"):
            engine.run()
        engine.resume()
        assert not engine.is_suspended
        check_all(engine)

    def test_all_go_on_where_one_cannot_be_suspended(self):
        """
        If the second runner cannot give its memory back, the first takes its own again, and all
        requests get their tokens.
        """
        engine, runners = fleet(kv_cache_management_mode="offload")
        submit_all(engine)
        for _ in range(5):
            engine.step()

        def fail(_mode) -> None:
            raise OutOfMemory("the host is full")

        runners[1].suspend = fail
        with pytest.raises(Exception, match="the host is full"):
            engine.suspend()
        assert not engine.is_suspended
        check_all(engine)

    def test_only_a_runner_whose_memory_is_taken_stays_suspended(self):
        """
        If the last runner cannot give its memory back and the first one's is taken by then, the one
        between takes its own again.
        """
        engine, runners = fleet(3, kv_cache_management_mode="offload")
        submit_all(engine)
        engine.step()
        runners[0].resume, resume = refuse, runners[0].resume
        runners[2].suspend = refuse
        with pytest.raises(EngineMemoryError, match="the memory is taken"):
            engine.suspend()
        assert [True, False, False] == [runner.executor.is_suspended for runner in runners]
        assert engine.is_suspended
        runners[0].resume = resume
        engine.resume()
        check_all(engine)

    def test_resumption_may_be_tried_again(self):
        """
        Where one runner's memory is taken, the engine stays suspended until it is there.
        """
        engine, runners = fleet(kv_cache_management_mode="offload")
        submit_all(engine)
        engine.step()
        engine.suspend()
        runners[1].resume, resume = refuse, runners[1].resume
        with pytest.raises(Exception, match="the memory is taken"):
            engine.resume()
        assert engine.is_suspended
        runners[1].resume = resume
        engine.resume()
        check_all(engine)


class TestEnd:
    def test_closed_engine_has_no_threads(self):
        """
        `with` ends the threads of the runners, also with work pending; nothing is accepted then.
        """
        before = threads_of_runners()
        engine, _ = fleet()
        with engine:
            submit_all(engine)
            engine.step()
            assert 2 == len(threads_of_runners() - before)
        engine.close()
        assert threads_of_runners() <= before
        for call in (engine.run, engine.suspend, lambda: engine.complete("abc")):
            with pytest.raises(SchedulerError, match="closed"):
                call()

    def test_forgotten_engine_has_no_threads(self):
        """
        Threads end with the last reference to their engine.
        """
        before = threads_of_runners()
        engine, _ = fleet()
        submit_all(engine)
        engine.run()
        del engine
        gc.collect()
        end_s = time.monotonic() + ENOUGH_S
        while not threads_of_runners() <= before and time.monotonic() < end_s:
            time.sleep(0.01)
        assert threads_of_runners() <= before

    def test_one_runner_needs_no_thread(self):
        """
        The runner of an engine with one computes on the thread that drives.
        """
        engine, (runner,) = fleet(1)
        threads = []
        runner.before = lambda _batch: threads.append(threading.current_thread())
        submit_all(engine)
        check_all(engine)
        assert {threading.current_thread()} == set(threads)
